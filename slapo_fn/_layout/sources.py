"""Where a tensor of a new module comes from, as data that can be read in both directions.

qkv.weight: cat("q.weight", "k.weight", "v.weight")   ->   take: three tensors to one;   give_back: one to three
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import ArgumentError, WeightsError

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Cat:
    """Several sources, one after the other; ``sizes`` along ``dim`` are known once it was resolved."""

    sources: tuple[Source, ...]
    dim: int = 0
    sizes: Shape | None = None

    def __repr__(self) -> str:
        return f"cat({', '.join(map(repr, self.sources))}{_shown(dim=self.dim or None, sizes=self.sizes)})"


@dataclass(frozen=True, repr=False)
class Transposed:
    """A matrix with its two dimensions exchanged."""

    source: Source

    def __repr__(self) -> str:
        return f"transposed({self.source!r})"


@dataclass(frozen=True, repr=False)
class Part:
    """What stands from ``start`` to ``stop`` in a source; its ``whole`` size along ``dim`` is known once resolved."""

    source: Source
    start: int
    stop: int
    dim: int = 0
    whole: int | None = None

    def __repr__(self) -> str:
        return f"part({self.source!r}, {self.start}, {self.stop}{_shown(dim=self.dim or None, whole=self.whole)})"


Source: TypeAlias = str | Cat | Transposed | Part


@dataclass(frozen=True)
class WeightMap:
    """Where the tensors of a module come from, the module that carries it as its attribute ``weight_map``.

    Attributes:
        sources: Each name, relative to the module, with its source; what is not in it comes from its own name.
        up: How many segments of the module's path the names in the sources leave out: at 0 they are relative to the
            module's own path, at 1 to its parent's.
    """

    sources: tuple[tuple[str, Source], ...]
    up: int = 0


def cat(*sources: Source, dim: int = 0, sizes: Sequence[int] | None = None) -> Cat:
    """Say that a tensor is several old ones, one after the other.

    Args:
        sources: The old ones, in order.
        dim: The dimension along which they stand.
        sizes: How long each is, where it is known already; else it is found when the tensor is made.

    Returns:
        The source.

    Raises:
        ArgumentError: There are none, or one of them is of the wrong kind.

    Example:
        >>> cat("q.weight", "k.weight", "v.weight")
        cat('q.weight', 'k.weight', 'v.weight')
    """
    if not sources or (sizes is not None and len(sizes) != len(sources)):
        raise ArgumentError("cat is given names or sources, at least one, and as many sizes if any")
    return Cat(tuple(map(checked, sources)), _int(dim, "dim"), None if sizes is None else tuple(sizes))


def transposed(source: Source) -> Transposed:
    """Say that a matrix is an old one with its dimensions exchanged, as between `nn.Linear` and GPT-2's ``Conv1D``.

    Args:
        source: The old one.

    Returns:
        The source.

    Raises:
        ArgumentError: It is of the wrong kind.

    Example:
        >>> transposed("c_fc.weight")
        transposed('c_fc.weight')
    """
    return Transposed(checked(source))


def part(source: Source, start: int, stop: int, dim: int = 0, *, whole: int | None = None) -> Part:
    """Say that a tensor is a part of an old one.

    Args:
        source: The old one.
        start: Where the part begins.
        stop: Where it ends; this one is no longer in it.
        dim: The dimension along which it is cut.
        whole: How long the old one is, where it is known already; else it is found when the tensor is made.

    Returns:
        The source.

    Raises:
        ArgumentError: An argument is of the wrong kind, or the part is empty.

    Example:
        >>> part("qkv.weight", 0, 64)
        part('qkv.weight', 0, 64)
    """
    if not 0 <= _int(start, "start") < _int(stop, "stop"):
        raise ArgumentError(f"a part has a start and a greater stop, not {start} and {stop}")
    return Part(checked(source), start, stop, _int(dim, "dim"), whole)


def weight_map(sources: Mapping[str, Source], up: int = 0) -> WeightMap:
    """Say where the tensors of a module come from; the module carries it as its attribute ``weight_map``.

    Args:
        sources: Each name in the module with its source; what is not in it comes from its own name.
        up: How many segments of the module's path the names in the sources leave out.

    Returns:
        The map.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    Example:
        >>> weight_map({"gate_up.weight": cat("gate.weight", "up.weight")})
        WeightMap(sources=(('gate_up.weight', cat('gate.weight', 'up.weight')),), up=0)
    """
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources) or _int(up, "up") < 0:
        raise ArgumentError("weight_map is given a mapping of names to sources, and up, which is 0 or more")
    return WeightMap(tuple((name, checked(source)) for name, source in sources.items()), up)


def checked(source: object) -> Source:
    """A source that is one.

    Raises:
        ArgumentError: It is a thing of another kind.
    """
    if isinstance(source, str | Cat | Transposed | Part):
        return source
    raise ArgumentError(f"a source is a name, cat(…), transposed(…) or part(…), not {type(source).__name__}")


def names(source: Source) -> tuple[str, ...]:
    """The names of the tensors that a source is made of, in order."""
    if isinstance(source, str):
        return (source,)
    if isinstance(source, Cat):
        return tuple(name for one in source.sources for name in names(one))
    return names(source.source)


def substituted(source: Source, function: Callable[[str], Source]) -> Source:
    """A source with another source in the place of each name."""
    if isinstance(source, str):
        return function(source)
    if isinstance(source, Cat):
        return replace(source, sources=tuple(substituted(one, function) for one in source.sources))
    return replace(source, source=substituted(source.source, function))


def rename(source: Source, function: Callable[[str], str]) -> Source:
    """A source with its names changed."""
    return substituted(source, function)


# ---- forwards


def resolved(source: Source, shapes: Mapping[str, Sequence[int]]) -> Source:
    """A source with the sizes that it has over tensors of some shapes.

    Raises:
        WeightsError: There is no tensor of a name, or the shapes do not go together.
    """
    return laid_out(source, shapes)[0]


def laid_out(source: Source, shapes: Mapping[str, Sequence[int]]) -> tuple[Source, Shape]:
    """A source with its sizes, and the shape of the tensor that it gives; raises as `resolved` does."""
    if isinstance(source, str):
        if source not in shapes:
            raise WeightsError(f"the old one has no {source}{near(source, shapes)}")
        return source, tuple(shapes[source])
    if isinstance(source, Cat):
        return _laid_out_cat(source, shapes)
    inner, shape = laid_out(source.source, shapes)
    if isinstance(source, Transposed):
        if len(shape) != 2:
            raise WeightsError(f"{source!r}: only a matrix is transposed, and it is {shape}")
        return Transposed(inner), shape[::-1]
    dim = _dim(source, shape)
    if source.stop > shape[dim] or source.whole not in (None, shape[dim]):
        raise WeightsError(f"{source!r}: the whole is {shape}")
    cut = (*shape[:dim], source.stop - source.start, *shape[dim + 1 :])
    return Part(inner, source.start, source.stop, dim, shape[dim]), cut


def _laid_out_cat(source: Cat, shapes: Mapping[str, Sequence[int]]) -> tuple[Source, Shape]:
    inner = [laid_out(one, shapes) for one in source.sources]
    first = inner[0][1]
    dim = _dim(source, first)
    sizes = tuple(shape[dim] if len(shape) == len(first) else -1 for _, shape in inner)
    if len({(*shape[:dim], *shape[dim + 1 :]) for _, shape in inner}) > 1 or source.sizes not in (None, sizes):
        raise WeightsError(f"{source!r}: their shapes are {', '.join(str(shape) for _, shape in inner)}")
    return Cat(tuple(one for one, _ in inner), dim, sizes), (*first[:dim], sum(sizes), *first[dim + 1 :])


def take(source: Source, given: Mapping[str, Tensor]) -> Tensor:
    """The tensor that a source gives: the very one for a name, else a new and contiguous one.

    Args:
        source: Where it comes from.
        given: The old tensors.

    Returns:
        The tensor, without a gradient if it is new.

    Raises:
        WeightsError: There is no tensor of a name, or shapes, dtypes or devices do not go together.
    """
    for name in names(source):
        if name not in given:
            raise WeightsError(f"the old one has no {name}{near(name, given)}")
    exact = resolved(source, {name: given[name].shape for name in names(source)})
    if isinstance(exact, str):
        return given[exact]
    for what in ("dtype", "device"):
        if len({getattr(given[name], what) for name in names(exact)}) > 1:
            told = ", ".join(f"{name} is {getattr(given[name], what)}" for name in names(exact))
            raise WeightsError(f"{source!r}: their {what}s differ: {told}")
    with torch.no_grad():
        made = _view(exact, given)
        return made if isinstance(exact, Cat) else made.clone(memory_format=torch.contiguous_format)


def _view(source: Source, given: Mapping[str, Tensor]) -> Tensor:
    if isinstance(source, str):
        return given[source].detach()
    if isinstance(source, Cat):
        return torch.cat([_view(one, given) for one in source.sources], source.dim).contiguous()
    inner = _view(source.source, given)
    if isinstance(source, Transposed):
        return inner.t()
    return inner.narrow(source.dim, source.start, source.stop - source.start)


# ---- small things


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message: the known name that is most like another."""
    close = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _dim(source: Cat | Part, shape: Shape) -> int:
    if not -len(shape) <= source.dim < len(shape):
        raise WeightsError(f"{source!r}: there is no dimension {source.dim} in {shape}")
    return source.dim % len(shape)


def _int(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ArgumentError(f"{name} is an int, not {value!r}")


def _shown(**options: object) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
