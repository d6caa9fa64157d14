"""What a replacement would separate: tied parameters, and modules that are registered in several places."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ._tree import Tree, all_tensors, below, join
from .errors import TieError


class Break(NamedTuple):
    """A tie that is open: the tensor, one of its names inside the replaced module, and one outside."""

    tensor: Tensor
    inside: str
    outside: str


def broken_ties(tree: Tree, old: nn.Module, new: nn.Module) -> list[Break]:
    """The ties between a module and the rest of the tree that a new module in its place does not keep."""
    if not old._modules and not old._parameters and not old._buffers:
        return []
    lost = all_tensors(below(old))
    inside = {id(module) for module in below(old)}
    for key in all_tensors(below(new)):
        lost.pop(key, None)
    held = {
        id(tensor): [(module, join(tree.path(module), name)) for module, name in tree.slots(tensor)]
        for tensor in lost.values()
    }
    return [Break(lost[key], *names) for key, places in held.items() if (names := _across(inside, places))]


def _across(inside: Container[int], places: Iterable[tuple[nn.Module, str]]) -> tuple[str, str] | None:
    """The first name that hangs on a module inside, and the first that hangs outside, if there are both."""
    mine, others = None, None
    for module, name in places:
        if id(module) in inside:
            mine = mine or name
        else:
            others = others or name
    return (mine, others) if mine and others else None


def refuse_open(tree: Tree, breaks: Sequence[Break]) -> None:
    """Refuse ties of one place that are still open when all places of the entry are done.

    A tie is closed when nothing holds the tensor any more, and its two names hold one new tensor.

    Raises:
        TieError: Some are open.
    """
    still = [one for one in breaks if _is_open(tree, one)]
    if still:
        pairs = ", ".join(f"{one.inside} and {one.outside}" for one in still)
        which, has = ("one tied parameter", "another") if len(still) == 1 else ("tied parameters", "others")
        raise TieError(
            f"{pairs} are {which}, and the new module has {has}: keep the old parameter in it; replace both places in one "
            "entry, by modules that share one; or give untie=True.",
            [path for one in still for path in one[1:]],
        )


def _is_open(tree: Tree, broken: Break) -> bool:
    if tree.slots(broken.tensor):
        return True
    held = {join(tree.path(module), name): t for module in below(tree.root) for name, t in module._parameters.items()}
    return held.get(broken.inside) is None or held[broken.inside] is not held.get(broken.outside)


def refuse_split(tree: Tree, old: nn.Module, new: nn.Module) -> None:
    """Refuse to replace a module that contains one which stands elsewhere, too, and which the new one does not contain.

    Raises:
        TieError: There is one.
    """
    if not old._modules:
        return
    inside = {id(module): module for module in below(old)}
    kept = {id(module) for module in below(new)}
    for key, module in inside.items():
        if module is old or key in kept:
            continue
        if names := _across(inside, ((edge.parent, edge.path) for edge in tree.edges(module))):
            raise TieError(
                f"{names[0]} and {names[1]} are one shared module, and the new {tree.path(old)} does not contain it: "
                "keep it in the new one, or give untie=True.",
                names,
            )


def only_place(tree: Tree, module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The one registration of a shared module that a path spells.

    Raises:
        TieError: The path leads through a container that is shared itself, so that no one place is only there.
    """
    for edge in tree.edges(module):
        if edge.path == path and not tree.shared(edge.parent):
            return edge.parent, edge.name
    raise TieError(
        f"{path!r} is inside a container that is shared itself, so that it cannot change alone ({', '.join(tree.paths(module))} "
        "are one): untie the container first.",
        tree.paths(module),
    )
