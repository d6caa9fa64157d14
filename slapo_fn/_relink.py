"""After an edit, let plain attributes that refer to what was exchanged refer to what took its place.

self.layers = [self.one]; one -> new   ->   self.layers = [new]
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ._copier import Copier, is_atom
from ._fork import KNOWN
from ._tree import Tree, all_tensors, below

Link = tuple[nn.Module, str]


def relink(tree: Tree, links: Sequence[Link] | None, last: nn.Module | None) -> None:
    """Rewrite the links that lead to modules and tensors which the tree has exchanged.

    Args:
        tree: The edited tree.
        links: The plain attributes that refer to modules or tensors; None looks for them.
        last: The module of the place that was lowered last.
    """
    if not tree.exchanged:
        return
    if links is None:
        looked = any(_referred(one, is_last=one is last) for one in tree.gone)
        links = [(module, key) for module, key in _found(tree.first) if tree.holds(module)] if looked else []
    links = [*links, *((module, key) for module, key in tree.links if tree.holds(module))]
    if not links:
        return
    modules = list(below(tree.root))
    follow = Relink([*modules, *all_tensors(modules).values()], tree.exchanged)
    tree.touch(*(module for module, _ in links))
    follow.rewrite(links)


def relink_within(top: nn.Module, exchanged: Mapping[int, nn.Module | Tensor]) -> None:
    """Let the plain attributes of a new module follow the tensors that it was given in exchange for its own."""
    links = list(_found(below(top))) if exchanged else []
    if links:
        modules = list(below(top))
        Relink([*modules, *all_tensors(modules).values()], exchanged).rewrite(links)


def _referred(gone: nn.Module | Tensor, *, is_last: bool) -> bool:
    """Whether something may refer to what was put out, beside the records of the pass: the tree's lists of what was there
    at first and of what is gone, its journal, its put, and the site of the last place. A look at every attribute of every
    module would cost more than the rest of the pass.
    """
    if isinstance(gone, Tensor):
        return True
    records, this_call = 4 + 2 * is_last, 3  # the last is held by its site and by our caller, too
    return sys.getrefcount(gone) > records + this_call or weakref.getweakrefcount(gone) > 0


def _found(modules: Iterable[nn.Module]) -> Iterator[Link]:
    """The plain attributes that may refer to modules or tensors."""
    for module in modules:
        held = vars(module)
        if len(held) != len(KNOWN):
            for key, value in held.items():
                if key not in KNOWN and not is_atom(value):
                    yield module, key


class Relink(Copier):
    """Follows, on plain attributes, the modules and tensors that were exchanged.

    Args:
        kept: What stays.
        exchanged: ``id`` of what was put out to what took its place; a chain is followed to its end.
    """

    def __init__(self, kept: Iterable[nn.Module | Tensor], exchanged: Mapping[int, nn.Module | Tensor]) -> None:
        memo: dict[int, Any] = {id(one): one for one in kept}
        for key, new in exchanged.items():
            while id(new) in exchanged and exchanged[id(new)] is not new:
                new = exchanged[id(new)]
            memo[key] = new
        super().__init__(memo)

    def rewrite(self, links: Iterable[Link]) -> None:
        """Rewrite those attributes that lead to something exchanged; the others stay the very objects that they are."""
        rewritten: dict[int, tuple[Any, Any]] = {}  # by id, with what keeps the id
        for module, key in links:
            value = vars(module).get(key)
            if id(value) not in rewritten:
                self.changed = False
                made = self.copy(value)
                rewritten[id(value)] = (value, made if self.changed else value)
            if rewritten[id(value)][1] is not value:
                vars(module)[key] = rewritten[id(value)][1]

    def _method(self, value: Any) -> Any:
        if id(value.__self__) not in self.memo:
            return value
        owner, method = self._known(value.__self__), value.__func__
        return value if owner is value.__self__ else getattr(owner, method.__name__, types.MethodType(method, owner))
