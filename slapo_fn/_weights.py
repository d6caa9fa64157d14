"""Fill a new module with an old one's tensors, by name: the very tensors, not copies."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types.

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._tree import join
from .errors import WeightsError

Held = dict[str, Any]
Place = tuple[Held, str]


def renewed(
    tensor: Tensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool | None = None,
) -> Tensor:
    """A tensor of its own, over the same storage unless device or dtype change.

    A parameter stays one of its class, and what a user hung on it, attributes and hooks, stays on it.
    """
    values = tensor.detach().to(device or tensor.device, dtype or tensor.dtype)
    grad = tensor.requires_grad if requires_grad is None else requires_grad
    made = nn.Parameter.__new__(type(tensor), values, grad) if isinstance(tensor, nn.Parameter) else values
    vars(made).update(vars(tensor))
    hooks: dict[int, Any] = getattr(tensor, "_backward_hooks", None) or {}
    accumulated: dict[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    if made.requires_grad:
        for hook in hooks.values():
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in accumulated.values():
            made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return made


def places(module: nn.Module) -> dict[str, tuple[Held, str]]:
    """Every parameter and persistent buffer by its dotted name: the table that holds it, and its name there."""
    found: dict[str, tuple[Held, str]] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        for held, skip in ((one._parameters, frozenset[str]()), (one._buffers, one._non_persistent_buffers_set)):
            table: Held = held
            found.update(
                (join(path, name), (table, name)) for name, t in table.items() if t is not None and name not in skip
            )
    return found


def fill(new: nn.Module, old: nn.Module, names: Mapping[str, str], path: str, *, own: bool) -> dict[int, Tensor]:
    """Hang the old module's tensors in the new one.

    Args:
        new: The module to fill.
        old: Where the tensors come from.
        names: New name to old name, of a tensor or of a submodule; what is not in it keeps its name.
        path: The place, for messages.
        own: Whether the new module gets copies, so that nothing is tied to them.

    Returns:
        ``id`` of each tensor that the new module had to what it has now.

    Raises:
        WeightsError: A tensor has no partner of its name and shape, on either side.
    """
    wanted, given = places(new), places(old)
    if not wanted and not names:
        return {}  # nothing to be filled: an activation, an Identity
    sources = {name: _source(name, names) for name in wanted}
    if problems := _misfits(wanted, given, sources, names):
        raise WeightsError(
            f"the weights of {path or 'the root'} ({type(old).__name__}) do not fit {type(new).__name__} by name and "
            "shape:\n  "
            + "\n  ".join(problems)
            + "\nSay where each comes from, weights={'new name': 'old name'}; keep "
            "the template's own, weights='fresh'; or give a factory, lambda old: …, which fills it.",
            [path],
        )
    copies: dict[int, Tensor] = {}
    exchanged: dict[int, Tensor] = {}
    for name, (held, key) in wanted.items():
        tensor = given[sources[name]][0][given[sources[name]][1]]
        taken = copies.setdefault(id(tensor), _clone(tensor)) if own else tensor
        exchanged[id(held[key])] = taken
        held[key] = taken
    return exchanged


def _misfits(
    wanted: Mapping[str, Place], given: Mapping[str, Place], sources: Mapping[str, str], names: Mapping[str, str]
) -> list[str]:
    strange = [key for key in names if not _among(key, wanted)]
    if strange and all(_among(key, given) for key in strange) and all(_among(one, wanted) for one in names.values()):
        swapped = {new: old for old, new in names.items()}
        return [f"the mapping is the wrong way round: it is new name to old name, {swapped}"]
    problems = [f"the new one has no {key}{_near(key, wanted)}" for key in strange]
    for name, source in sources.items():
        said = f"new {name} {_shape(wanted[name])}"
        if source not in given:
            problems.append(f"{said}: the old one has no {source}{_near(source, given)}")
        elif _shape(wanted[name]) != _shape(given[source]):
            problems.append(f"{said}: the old {source} is {_shape(given[source])}")
    used = set(sources.values())
    return problems + [
        f"old {name} {_shape(place)}: the new one has no place for it"
        for name, place in given.items()
        if name not in used
    ]


def _among(key: str, names: Mapping[str, object]) -> bool:
    return any(name == key or name.startswith(key + ".") for name in names)


def _near(name: str, names: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, names, 1, 0.75)
    return f"; did you mean {close[0]}?" if close else ""


def clone_rest(made: nn.Module, template: nn.Module) -> dict[int, Tensor]:
    """Give a copy of a template its own tensors wherever it still holds the template's; gives them by the old one's id."""
    theirs = {id(tensor) for tensor in (*template.parameters(), *template.buffers())}
    copies: dict[int, Tensor] = {}
    for module in made.modules():
        for held in (module._parameters, module._buffers):
            table: Held = held
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in theirs:
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _clone(tensor)
                    table[name] = copies[id(tensor)]
    return copies


def _clone(tensor: Tensor) -> Tensor:
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _source(name: str, names: Mapping[str, str]) -> str:
    for key in sorted(names, key=len, reverse=True):
        if name == key or name.startswith(key + "."):
            return names[key] + name[len(key) :]
    return name


def _shape(place: tuple[Held, str]) -> str:
    tensor = place[0][place[1]]
    return "(lazy)" if nn.parameter.is_lazy(tensor) else str(tuple(tensor.shape))
