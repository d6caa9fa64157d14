"""Selectors and selections: a rule that picks modules of one class, and what it found on one model."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types, and a check of what is no selection meets those of anything.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, Union, overload

from torch import nn
from typing_extensions import TypeVar as DefaultTypeVar

from ._algebra import Both, Complement, Either, Picked, Sliced, Without
from ._rules import Filtered, M_co, Rule, Site
from ._text import fold, kind, page, what
from ._tree import held_collector
from .errors import ArgumentError

M = DefaultTypeVar("M", bound=nn.Module, default=nn.Module)
N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True, repr=False)
class Selector(Generic[M_co]):
    """A rule that picks modules of one class, on any model. Made by `where`, combined with ``| & - ~`` and slices.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> rule = slapo.where(type=nn.Linear)[1:]
        >>> slapo.select(net, "2").paths == tuple(site.path for site in rule.resolve(net))
        True
    """

    rule: Rule

    def resolve(self, model: nn.Module) -> tuple[Site[M_co], ...]:
        """The places on a model, in module order.

        Args:
            model: The root that the paths start from.

        Raises:
            NoMatchError: There are none; the message names what is near.
        """
        return tuple(self.rule.resolve(model))  # type: ignore[arg-type]

    def where(self, predicate: Callable[[M_co, str], bool]) -> Selector[M_co]:
        """Only the places for which ``predicate(module, path)`` is true."""
        if not callable(predicate):
            raise ArgumentError(f"where takes a function (module, path) -> bool, not {what(predicate)}")
        return Selector(Filtered(self.rule, predicate))

    def __or__(self, other: Selector[N] | Selection[N]) -> Selector[M_co | N]:
        return Selector(Either(self.rule, _rule(other)))

    def __and__(self, other: Selector[nn.Module] | Selection[nn.Module]) -> Selector[M_co]:
        return Selector(Both(self.rule, _rule(other)))

    def __sub__(self, other: Selector[nn.Module] | Selection[nn.Module]) -> Selector[M_co]:
        return Selector(Without(self.rule, _rule(other)))

    def __invert__(self) -> Selector[nn.Module]:
        return Selector(Complement(self.rule))

    def __getitem__(self, which: int | slice) -> Selector[M_co]:
        return Selector(_part(self.rule, which))

    def __iter__(self) -> Iterator[Site[M_co]]:
        raise ArgumentError(f"{self!r} is a rule without a model; select(model, …) gives places to iterate over")

    def __repr__(self) -> str:
        return f"where({self.rule})"


@dataclass(frozen=True, repr=False, eq=False)
class Selection(Generic[M_co]):
    """A selector looked up on one model: a sized, ordered sequence of ``(path, module)`` sites.

    Attributes:
        model: The model that it was looked up on.
        sites: The places, in module order.
        selector: The rule, which is what a schedule keeps.
    """

    model: nn.Module
    sites: tuple[Site[M_co], ...]
    selector: Selector[M_co]

    @property
    def paths(self) -> tuple[str, ...]:
        """The sites' paths."""
        return tuple(site.path for site in self.sites)

    @property
    def modules(self) -> tuple[M_co, ...]:
        """The sites' modules."""
        return tuple(site.module for site in self.sites)

    def where(self, predicate: Callable[[M_co, str], bool]) -> Selection[M_co]:
        """Only the sites for which ``predicate(module, path)`` is true.

        Raises:
            NoMatchError: It is true for none.
        """
        return look_up(self.model, self.selector.where(predicate))

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site[M_co]]:
        return iter(self.sites)

    @overload
    def __getitem__(self, which: int) -> Site[M_co]: ...
    @overload
    def __getitem__(self, which: slice) -> Selection[M_co]: ...
    def __getitem__(self, which: int | slice) -> Site[M_co] | Selection[M_co]:
        rule = _part(self.selector.rule, which)
        if isinstance(which, slice):
            return look_up(self.model, Selector(rule))
        site: Site[M_co] = Site(*self.sites[which])
        site.rule = rule
        return site

    def __or__(self, other: Selection[N] | Selector[N]) -> Selection[M_co | N]:
        return look_up(self.model, self.selector | self._other(other))

    def __and__(self, other: Selection[nn.Module] | Selector[nn.Module]) -> Selection[M_co]:
        return look_up(self.model, self.selector & self._other(other))

    def __sub__(self, other: Selection[nn.Module] | Selector[nn.Module]) -> Selection[M_co]:
        return look_up(self.model, self.selector - self._other(other))

    def __invert__(self) -> Selection[nn.Module]:
        return look_up(self.model, ~self.selector)

    def _other(self, other: Selection[N] | Selector[N]) -> Selector[N]:
        if isinstance(other, Selection) and other.model is not self.model:
            raise ArgumentError("these selections were looked up on two different models; select both on one")
        return Selector(_rule(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and (self.sites, self.selector) == (other.sites, other.selector)

    def __hash__(self) -> int:
        return hash(self.selector)

    def __repr__(self) -> str:
        kinds = dict.fromkeys(kind(site.module) for site in self.sites)
        lines = [f"Selection of {len(self)}{': ' if kinds else ''}{', '.join(kinds)}"]
        lines += [f"  {path or '(root)'}" for path in fold(self.paths)]
        left_out = self.selector.rule.left_out(self.model)
        if left_out:
            lines.append("  left out, since they override forward (subclasses=True takes them):")
            lines += [f"    {path}" for path in fold(site.path for site in left_out)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page(repr(self))


Target: TypeAlias = Union[str, list[str], "re.Pattern[str]", type[M], Selector[M], Selection[M], Site[M]]


def look_up(model: nn.Module, selector: Selector[N]) -> Selection[N]:
    """Resolve a selector on a model."""
    with held_collector():
        return Selection(model, selector.resolve(model), selector)


def _part(rule: Rule, which: int | slice) -> Rule:
    if isinstance(which, slice):
        if which.step == 0:
            raise ArgumentError("a slice's step is not 0")
        return Sliced(rule, which.start, which.stop, which.step)
    if isinstance(which, int):
        return Picked(rule, which)
    raise ArgumentError(
        f"an index is an int or a slice, not {what(which)}; a path is selected with select(model, path)"
    )


def _rule(other: Selector[Any] | Selection[Any]) -> Rule:
    if isinstance(other, (Selector, Selection)):
        return (other if isinstance(other, Selector) else other.selector).rule
    raise ArgumentError(f"a selector or selection combines with another one, not with {what(other)}")
