"""Sources read backwards: the old tensors from the new ones, bit for bit; and maps over maps, in their shortest form.

qkv.weight: cat("q.weight", "k.weight", "v.weight"), qkv.weight   ->   q.weight, k.weight, v.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import WeightsError
from .sources import Cat, Part, Source, Transposed, WeightMap, substituted

Whole: TypeAlias = tuple[Source, int, int]  # what parts are of, the dimension along which they stand, its size
Piece: TypeAlias = tuple[int, int, Tensor, str]  # from, to, the values, and the name of the tensor that has them


def give_back(sources: Mapping[str, Source], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The old tensors, from the new ones that were made of them.

    Args:
        sources: The name of each new tensor with its source, which knows its sizes.
        held: The new tensors, by these names.

    Returns:
        The old tensors by their names. One that was taken as it is, is the very tensor; every other one is contiguous and
        has a storage of its own. What is one object under two names in ``held`` gives one object.

    Raises:
        WeightsError: A source does not fit its tensor; two tensors give one name; parts overlap or leave a gap.
    """
    giving = _Giving()
    with torch.no_grad():
        for name, source in sources.items():
            giving.give(simple(source), held[name], name, whole=True)
        while giving.parts:
            deepest = max(giving.parts, key=lambda whole: _depth(whole[0]))
            giving.put_together(deepest, giving.parts.pop(deepest))
    return giving.found


class _Giving:
    """What was given back so far; a step that was taken once on a tensor gives the same object again."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.givers: dict[str, str] = {}
        self.parts: dict[Whole, list[Piece]] = {}
        self.steps: dict[tuple[object, ...], Tensor] = {}

    def give(self, source: Source, tensor: Tensor, name: str, *, whole: bool = False) -> None:
        """Take in that a source is a tensor, which is a view of another unless it is a whole one."""
        if isinstance(source, str):
            self._name(source, tensor if whole else self._once(("copy", id(tensor)), lambda: _copy(tensor)), name)
            return
        dim = 1 if isinstance(source, Transposed) else source.dim
        length = tensor.shape[dim] if dim < tensor.dim() else None
        if isinstance(source, Transposed):
            _refuse(length is None or tensor.dim() != 2, source, tensor, name)
            self.give(source.source, self._once(("transposed", id(tensor)), tensor.t), name)
        elif isinstance(source, Cat):
            _refuse(source.sizes is None or length != sum(source.sizes), source, tensor, name)
            start = 0
            for one, size in zip(source.sources, source.sizes or (), strict=True):
                cut = partial(tensor.narrow, dim, start, size)
                self.give(one, self._once(("cut", id(tensor), dim, start, size), cut), name)
                start += size
        else:
            _refuse(source.whole is None or length != source.stop - source.start, source, tensor, name)
            known = self.parts.setdefault((source.source, dim, source.whole or 0), [])
            known.append((source.start, source.stop, tensor, name))

    def put_together(self, whole: Whole, pieces: list[Piece]) -> None:
        """Give what parts are parts of."""
        source, dim, size = whole
        pieces = sorted(
            {(piece[0], piece[1], id(piece[2])): piece for piece in pieces}.values(), key=lambda one: one[:2]
        )
        names = ", ".join(dict.fromkeys(piece[3] for piece in pieces))
        at = 0
        for start, stop in [*(piece[:2] for piece in pieces), (size, size)]:
            if start > at:
                raise WeightsError(f"nothing gives {at} to {start} of {source!r} along dim {dim}, only {names}")
            if start < at:
                raise WeightsError(f"two of {names} give {start} to {min(at, stop)} of {source!r} along dim {dim}")
            at = stop
        tensors = [piece[2] for piece in pieces]
        made = self._once(("cat", dim, *map(id, tensors)), lambda: torch.cat(tensors, dim).contiguous())
        self.give(source, made, names, whole=True)

    def _once(self, step: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        if step not in self.steps:
            self.steps[step] = make()
        return self.steps[step]

    def _name(self, original: str, tensor: Tensor, giver: str) -> None:
        if self.found.setdefault(original, tensor) is not tensor:
            raise WeightsError(f"{self.givers[original]} and {giver} both give {original}, and are not one tensor")
        self.givers.setdefault(original, giver)


def _refuse(misfit: bool, source: Source, tensor: Tensor, name: str) -> None:
    if misfit:
        raise WeightsError(f"{name} is {tuple(tensor.shape)}, and cannot be given back as {source!r}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _depth(source: Source) -> int:
    if isinstance(source, str):
        return 0
    inner = source.sources if isinstance(source, Cat) else (source.source,)
    return 1 + max(map(_depth, inner))


# ---- the shortest form


def composed(given: WeightMap, beneath: Mapping[str, Source]) -> WeightMap:
    """A map with what each name on its right came from in turn, for a schedule over the result of another."""
    return replace(given, sources=tuple((name, over(source, beneath)) for name, source in given.sources))


def over(source: Source, beneath: Mapping[str, Source]) -> Source:
    """A source in its shortest form, with what each of its names came from in turn."""
    return simple(substituted(source, lambda one: beneath.get(one, one)))


def simple(source: Source) -> Source:
    """The shortest form of a source that knows its sizes: cats outside, parts at the names, what undoes itself gone.

    Example:
        >>> from slapo_fn._layout.sources import cat, part
        >>> simple(part(cat("q", "k", sizes=(4, 4)), 4, 8, whole=8))
        'k'
        >>> simple(cat(part("qkv", 0, 4, whole=8), part("qkv", 4, 8, whole=8), sizes=(4, 4)))
        'qkv'
    """
    return source if isinstance(source, str) or not _known(source) else _simple(source)


def _known(source: Source) -> bool:
    if isinstance(source, Cat):
        return source.sizes is not None and all(map(_known, source.sources))
    return isinstance(source, str) or (
        _known(source.source) and (isinstance(source, Transposed) or source.whole is not None)
    )


def _simple(source: Source) -> Source:
    if isinstance(source, Transposed):
        return _turned(_simple(source.source))
    if isinstance(source, Cat):
        return _joined(map(_simple, source.sources), source.dim, source.sizes or ())
    if isinstance(source, Part):
        return _cut(_simple(source.source), source)
    return source


def _turned(source: Source) -> Source:
    if isinstance(source, Transposed):
        return source.source
    if isinstance(source, Cat):
        return Cat(tuple(map(_turned, source.sources)), 1 - source.dim, source.sizes)
    return Transposed(source)


def _cut(source: Source, by: Part) -> Source:
    """A part of a source in its shortest form; of ``by`` only the numbers count."""
    start, stop, dim = by.start, by.stop, by.dim
    if (start, stop) == (0, by.whole):
        return source
    if isinstance(source, Transposed):
        return _turned(_cut(source.source, replace(by, dim=1 - dim)))
    if isinstance(source, Part) and source.dim == dim:
        return replace(source, start=source.start + start, stop=source.start + stop)
    if not isinstance(source, Cat):
        return replace(by, source=source)
    if source.dim != dim:
        return _joined((_cut(one, by) for one in source.sources), source.dim, source.sizes or ())
    found: list[Source] = []
    sizes: list[int] = []
    for one, size in zip(source.sources, source.sizes or (), strict=True):
        first, last = max(start, 0), min(stop, size)
        if first < last:
            found.append(_cut(one, replace(by, start=first, stop=last, whole=size)))
            sizes.append(last - first)
        start, stop = start - size, stop - size
    return _joined(found, dim, sizes)


def _joined(sources: Iterable[Source], dim: int, sizes: Sequence[int]) -> Source:
    """A cat in its shortest form."""
    found: list[tuple[Source, int]] = []
    for source, size in zip(sources, sizes, strict=True):
        inner: Iterable[tuple[Source, int]] = [(source, size)]
        if isinstance(source, Cat) and source.dim == dim:
            inner = zip(source.sources, source.sizes or (), strict=True)
        for one, length in inner:
            merged = _merged(found[-1][0], one, dim) if found else None
            if merged is None:
                found.append((one, length))
            else:
                found[-1] = (merged, found[-1][1] + length)
    if len(found) == 1:
        return found[0][0]
    return Cat(tuple(one for one, _ in found), dim, tuple(length for _, length in found))


def _merged(first: Source, second: Source, dim: int) -> Source | None:
    """Two parts that stand side by side as one; None if they do not."""
    if isinstance(first, Transposed) and isinstance(second, Transposed):
        merged = _merged(first.source, second.source, 1 - dim)
        return None if merged is None else _turned(merged)
    if not isinstance(first, Part) or not isinstance(second, Part):
        return None
    if first.dim != dim or replace(second, start=first.start, stop=first.stop) != first or first.stop != second.start:
        return None
    whole = (first.start, second.stop) == (0, first.whole)
    return first.source if whole else replace(first, stop=second.stop)
