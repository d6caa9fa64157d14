"""Checkpoints both ways: a transformed model's tensors in the layout of the model before, and the other way round.

h.0.mlp.gate_up.weight   <->   h.0.mlp.gate_proj.weight, h.0.mlp.up_proj.weight
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import NamedTuple

from ._layout.inverse import give_back
from ._layout.lineage import folded, origins, places
from ._layout.sources import Source, laid_out, names, near, take
from ._layout.stored import Stored
from ._relink import relink_within
from ._text import fold
from .errors import ArgumentError, WeightsError


class Loaded(NamedTuple):
    """What a checkpoint and a model do not have in common, in the original spelling.

    Attributes:
        missing: Names that the model needs and the checkpoint does not have.
        unexpected: Names that the checkpoint has and the model does not need.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def to_original(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Give a transformed model's state in the layout of the model before: its keys, with today's values.

    Args:
        model: The transformed model.
        state_dict: Another state of the same model, an average of weights or one from a file; its own otherwise.

    Returns:
        The state. A tensor that was taken over as it is shares its storage with the model, as in ``state_dict()``; one
        that was cut out of another has a storage of its own. Tied tensors are one object.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        WeightsError: The old tensors cannot be given back, or the state is not one of this model.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> sch = slapo.replace(slapo.Schedule(), "1", lambda old: nn.GELU(approximate="tanh"))
        >>> list(to_original(slapo.apply(net, sch)))
        ['0.weight', '0.bias']
    """
    _check(model)
    if state_dict is not None and not isinstance(state_dict, Mapping):
        raise ArgumentError(f"state_dict is a mapping of names to tensors, not {type(state_dict).__name__}")
    given = model.state_dict(keep_vars=True) if state_dict is None else state_dict
    held = _one_object_each({name: one for name, one in given.items() if isinstance(one, Tensor)}, state_dict is None)
    slots = {name: table[key] for name, (table, key) in places(model).items()}
    sources = origins(model, dict.fromkeys([*held, *slots]))
    _fill_in_ties(held, slots, [name for name, source in sources.items() if source != name and name not in held])
    found: dict[str, Any] = {}
    found.update(give_back({name: sources[name] for name in held}, held))
    found.update((name, one) for name, one in given.items() if not isinstance(one, Tensor))
    return found


def from_original(
    model: nn.Module,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    assign: bool = False,
) -> Loaded:
    """Load a checkpoint of the model before into the transformed one.

    Everything is checked before anything is written. From files one tensor is read at a time.

    Args:
        model: The transformed model; its tensors are written to.
        source: The tensors by their original names; or the path of a ``.safetensors`` file, of an index of several,
            or of a directory with either.
        strict: Whether every name has to have its partner, and every dtype has to be the model's. If not, what has no
            partner is left as it is, and values are converted.
        assign: Whether the model gets new tensors in place of its own; for a model on the meta device. Ties stay.

    Returns:
        The names without a partner; there are none if ``strict``.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        WeightsError: The tensors do not fit the model, or a file cannot be read; nothing was written.

    Example:
        >>> from torch import nn
        >>> net, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> from_original(net, other.state_dict())
        Loaded(missing=(), unexpected=())
    """
    _check(model)
    slots = places(model)
    sources = origins(model, slots)
    with Stored(source) as stored:
        plan = _Plan({name: table[key] for name, (table, key) in slots.items()}, sources, stored)
        plan.check(strict=strict, assign=assign)
        made = dict(plan.write(assign=assign))
    if assign:
        for table, key in slots.values():
            table[key] = made.get(id(table[key]), table[key])
        relink_within(model, made)
    return Loaded(tuple(plan.missing), tuple(plan.unexpected))


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is the transformed model, a module, not {type(model).__name__}")
    if paths := folded(model):
        raise WeightsError(
            f"the tensors of {', '.join(fold(path or 'the root' for path in paths))} were folded into others for good, and "
            "have no original layout: leave out the entry that did it.",
            paths,
        )


def _one_object_each(given: Mapping[str, Tensor], is_own: bool) -> dict[str, Tensor]:
    """Tensors without their gradients; several that are the same memory are one object."""
    made: dict[tuple[object, ...], Tensor] = {}
    return {name: made.setdefault(_memory(one), one.detach() if is_own else one) for name, one in given.items()}


def _memory(tensor: Tensor) -> tuple[object, ...]:
    try:
        where = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return (id(tensor),)
    return (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _fill_in_ties(held: dict[str, Tensor], slots: Mapping[str, Tensor], lacking: Iterable[str]) -> None:
    known = {id(slots[name]): held[name] for name in held if name in slots}
    lost: list[str] = []
    for name in lacking:
        if id(slots[name]) in known:
            held[name] = known[id(slots[name])]
        else:
            lost.append(name)
    if lost:
        raise WeightsError(f"the state is none of this model: it has no {', '.join(fold(lost))}")


class _Plan:
    """Which tensors of a checkpoint go to which of a model: each of these once, by all names that it has."""

    def __init__(self, held: Mapping[str, Tensor], sources: Mapping[str, Source], stored: Stored) -> None:
        self.stored = stored
        self.tensors = {id(tensor): tensor for tensor in held.values()}
        self.ways: dict[int, list[tuple[str, Source]]] = {}
        self.missing: list[str] = []
        for name, tensor in held.items():
            self.ways.setdefault(id(tensor), []).append((name, sources[name]))
        for key, ways in self.ways.items():
            lacking = [[one for one in names(source) if one not in stored.shapes] for _, source in ways]
            if all(lacking):
                self.missing.extend(lacking[0])
            self.ways[key] = [way for way, lost in zip(ways, lacking, strict=True) if not lost]
        self.missing = list(dict.fromkeys(self.missing))
        wanted = {one for source in sources.values() for one in names(source)}
        self.unexpected = [name for name in stored.shapes if name not in wanted]

    def check(self, *, strict: bool, assign: bool) -> None:
        """Raise WeightsError with everything that does not fit."""
        problems: list[str] = []
        if strict and self.missing:
            problems.append(f"missing: {', '.join(fold(self.missing))}{near(self.missing[0], self.unexpected)}")
        if strict and self.unexpected:
            problems.append(f"unexpected: {', '.join(fold(self.unexpected))}")
        if strict:
            problems.extend(_prefix(self.missing, self.unexpected))
        for key, ways in self.ways.items():
            tensor = self.tensors[key]
            unfit = [one for _, source in ways for one in self._misfits(tensor, source, strict=strict)]
            if not unfit and tensor.is_meta and ways and not assign:
                unfit = [f"{ways[0][0]} is on the meta device, and has no values to write to: give assign=True"]
            problems.extend(unfit or self._untied(ways))
        if problems:
            raise WeightsError("the checkpoint does not fit the model:\n  " + "\n  ".join(problems))

    def _misfits(self, tensor: Tensor, source: Source, *, strict: bool) -> list[str]:
        shapes, dtypes = self.stored.shapes, self.stored.dtypes
        label = source if isinstance(source, str) else repr(source)
        try:
            shape = laid_out(source, shapes)[1]
        except WeightsError as error:
            return [str(error)]
        if shape != tuple(tensor.shape):
            return [f"{label} is {shape}, and the model's {tuple(tensor.shape)}"]
        found = {name: dtypes.get(name, tensor.dtype) for name in names(source)}
        if strict or len(set(found.values())) > 1:
            return [
                f"{name} is {dtype}, and the model's {tensor.dtype}"
                for name, dtype in found.items()
                if dtype != tensor.dtype
            ]
        return []

    def _untied(self, ways: Sequence[tuple[str, Source]]) -> list[str]:
        """What a checkpoint has under two names, with two values, and the model once."""
        different = {source: name for name, source in ways}
        if len(different) < 2:
            return []
        first, *others = different
        value = self._take(first)
        return [
            f"{first} and {other} differ, and are one tensor in the model ({different[first]})"
            for other in others
            if not _same_bits(value, self._take(other))
        ]

    def write(self, *, assign: bool) -> Iterator[tuple[int, Tensor]]:
        """Write every tensor, or make it anew; gives ``id`` of the old one and the new one."""
        for key, ways in self.ways.items():
            if ways:
                tensor, value = self.tensors[key], self._take(ways[0][1])
                if assign:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    yield key, nn.Parameter(value, tensor.requires_grad) if is_parameter else value.detach()
                else:
                    with torch.no_grad():
                        tensor.copy_(value)

    def _take(self, source: Source) -> Tensor:
        return take(source, {name: self.stored[name] for name in names(source)})


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What to try if names differ by what they begin with."""
    for lacking, longer, shorter in ((True, missing, unexpected), (False, unexpected, missing)):
        if longer and shorter:
            ends = {name for name in longer if name.endswith("." + shorter[-1])}
            for prefix in {name.removesuffix(shorter[-1]) for name in ends}:
                if sum(prefix + name in set(longer) for name in shorter) * 2 > len(shorter):
                    has = "lack" if lacking else "begin with"
                    return [
                        f"(the checkpoint's names {has} {prefix!r}: load it in a model of its class, or rename them)"
                    ]
    return []
