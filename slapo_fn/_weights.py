"""Fill a new module with an old one's tensors, by name: the very tensors, and new ones only where several make one."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._layout.lineage import declare, places
from ._layout.lineage import record as record
from ._layout.sources import Source, laid_out, near, rename, resolved, take
from ._layout.sources import names as names_in
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


def fill(new: nn.Module, old: nn.Module, names: Mapping[str, Source], path: str, *, own: bool) -> dict[int, Tensor]:
    """Hang the old module's tensors in the new one, and note on it where each came from.

    Args:
        new: The module to fill.
        old: Where the tensors come from.
        names: New name to old name, of a tensor or of a submodule, or to a source made of such names; what is not in it
            keeps its name.
        path: The place, for messages.
        own: Whether the new module gets copies, so that nothing is tied to them.

    Returns:
        ``id`` of each tensor that the new module had to what it has now.

    Raises:
        WeightsError: A tensor has no partner of its name and shape, on either side; or a new one cannot be made.
    """
    wanted, given = places(new), places(old)
    if not wanted and not names:
        return {}  # nothing to be filled: an activation, an Identity
    sources = {name: _source(name, names) for name in wanted}
    problems, made = _misfits(wanted, given, sources, names), dict[Source, Tensor]()
    if not problems:
        problems = _make(wanted, {name: held[key] for name, (held, key) in given.items()}, sources, made, own)
    if problems:
        raise WeightsError(
            f"the weights of {path or 'the root'} ({type(old).__name__}) do not fit {type(new).__name__} by name and "
            "shape:\n  "
            + "\n  ".join(problems)
            + "\nSay where each comes from, weights={'new name': 'old name'}; keep "
            "the template's own, weights='fresh'; or give a factory, lambda old: …, which fills it.",
            [path],
        )
    exchanged: dict[int, Tensor] = {}
    for name, (held, key) in wanted.items():
        exchanged[id(held[key])] = held[key] = made[sources[name]]
    shapes = {name: tuple(held[key].shape) for name, (held, key) in given.items() if not _is_lazy(held[key])}
    declare(
        new,
        {
            name: source if isinstance(source, str) else resolved(source, shapes)
            for name, source in sources.items()
            if source != name
        },
    )
    return exchanged


def _make(
    wanted: Mapping[str, Place],
    given: Mapping[str, Tensor],
    sources: Mapping[str, Source],
    made: dict[Source, Tensor],
    own: bool,
) -> list[str]:
    """Take the tensors from their sources; one that two names come from is one object. Gives what is wrong."""
    problems: list[str] = []
    copies: dict[int, Tensor] = {}
    for name, (held, key) in wanted.items():
        source = sources[name]
        if source in made:
            continue
        if isinstance(source, str):
            tensor = given[source]
            if own and id(tensor) not in copies:
                copies[id(tensor)] = _clone(tensor)
            made[source] = copies[id(tensor)] if own else tensor
            continue
        grads = {one: given[one].requires_grad for one in names_in(source)}
        try:
            if len(set(grads.values())) > 1:
                frozen = ", ".join(one for one, grad in grads.items() if not grad)
                raise WeightsError(
                    f"{source!r}: {frozen} {'is' if frozen.count(',') == 0 else 'are'} frozen, and others are not"
                )
            values = take(source, given)
        except WeightsError as error:
            problems.append(f"new {name}: {error}")
            continue
        made[source] = nn.Parameter(values, any(grads.values())) if isinstance(held[key], nn.Parameter) else values
    return problems


def _misfits(
    wanted: Mapping[str, Place], given: Mapping[str, Place], sources: Mapping[str, Source], names: Mapping[str, Source]
) -> list[str]:
    strange = [key for key in names if not _among(key, wanted)]
    if strange and all(_among(key, given) for key in strange):
        swapped = {new: old for old, new in names.items() if isinstance(new, str)}
        if all(isinstance(one, str) and _among(one, wanted) for one in names.values()):
            return [f"the mapping is the wrong way round: it is new name to old name, {swapped}"]
    problems = [f"the new one has no {key}{near(key, wanted)}" for key in strange]
    shapes = {name: tuple(held[key].shape) for name, (held, key) in given.items() if not _is_lazy(held[key])}
    for name, source in sources.items():
        said = f"new {name} {_shape(wanted[name])}"
        if isinstance(source, str) and source in given:
            if _shape(wanted[name]) != _shape(given[source]):
                problems.append(f"{said}: the old {source} is {_shape(given[source])}")
            continue
        try:
            shape = laid_out(source, shapes)[1]
        except WeightsError as error:
            problems.append(f"{said}: {error}")
        else:
            if _shape(wanted[name]) != str(shape):
                problems.append(f"{said}: {source!r} is {shape}")
    used = {one for source in sources.values() for one in names_in(source)}
    return problems + [
        f"old {name} {_shape(place)}: the new one has no place for it"
        for name, place in given.items()
        if name not in used
    ]


def _among(key: str, names: Mapping[str, object]) -> bool:
    return any(name == key or name.startswith(key + ".") for name in names)


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


def _source(name: str, names: Mapping[str, Source]) -> Source:
    key = max((key for key in names if name == key or name.startswith(key + ".")), key=len, default=name)
    return rename(names[key], lambda one: one + name[len(key) :]) if key in names else name


def _shape(place: Place) -> str:
    tensor = place[0][place[1]]
    return "(lazy)" if _is_lazy(tensor) else str(tuple(tensor.shape))


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)
