"""Which modules: rules by path, class and predicate, looked up on a model or kept for later."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types, and a check of what is no selection meets those of anything.

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, Union, overload

from torch import nn
from typing_extensions import TypeVar as DefaultTypeVar

from ._glob import parse
from ._rules import (
    Both,
    Complement,
    Counted,
    Either,
    Exact,
    Filtered,
    Inside,
    M_co,
    Matching,
    Maybe,
    Picked,
    Rule,
    Site as Site,
    Sliced,
    Without,
)
from ._text import fold, page, what
from .errors import ArgumentError

M = DefaultTypeVar("M", bound=nn.Module, default=nn.Module)
N = TypeVar("N", bound=nn.Module)
Root = TypeVar("Root", bound=nn.Module)
Pattern: TypeAlias = Union[str, "re.Pattern[str]", Sequence[Union[str, "re.Pattern[str]"]]]


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
        return Selector(Filtered(self.rule, predicate))

    def __or__(self, other: Selector[N]) -> Selector[M_co | N]:
        return Selector(Either(self.rule, _rule(other)))

    def __and__(self, other: Selector[nn.Module]) -> Selector[M_co]:
        return Selector(Both(self.rule, _rule(other)))

    def __sub__(self, other: Selector[nn.Module]) -> Selector[M_co]:
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
        return _look_up(self.model, self.selector.where(predicate))

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
            return _look_up(self.model, Selector(rule))
        site: Site[M_co] = Site(*self.sites[which])
        site.rule = rule
        return site

    def __or__(self, other: Selection[N]) -> Selection[M_co | N]:
        return self._with(other, lambda mine, theirs: mine | theirs)

    def __and__(self, other: Selection[nn.Module]) -> Selection[M_co]:
        return self._with(other, lambda mine, theirs: mine & theirs)

    def __sub__(self, other: Selection[nn.Module]) -> Selection[M_co]:
        return self._with(other, lambda mine, theirs: mine - theirs)

    def __invert__(self) -> Selection[nn.Module]:
        return _look_up(self.model, ~self.selector)

    def _with(self, other: Selection[Any], combine: Callable[[Selector[Any], Selector[Any]], Selector[Any]]) -> Selection[Any]:
        if not isinstance(other, Selection):
            raise ArgumentError(f"a selection combines with another selection, not with {what(other)}")
        if other.model is not self.model:
            raise ArgumentError("these selections were looked up on two different models; select both on one")
        return _look_up(self.model, combine(self.selector, other.selector))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and (self.sites, self.selector) == (other.sites, other.selector)

    def __hash__(self) -> int:
        return hash(self.selector)

    def __repr__(self) -> str:
        kinds = dict.fromkeys(type(site.module).__name__ for site in self.sites)
        lines = [f"Selection of {len(self)}{': ' if kinds else ''}{', '.join(kinds)}"]
        lines += [f"  {path or '(root)'}" for path in fold(self.paths)]
        left_out = self.selector.rule.left_out(self.model)
        if left_out:
            lines.append("  left out, since they override forward (subclasses=True takes them):")
            lines += [f"    {path}" for path in fold(site.path for site in left_out)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page(repr(self))


Target: TypeAlias = Union[str, type[M], Selector[M], Selection[M], Site[M]]


def select(
    model: nn.Module | Selection[nn.Module],
    pattern: Pattern = "**",
    type: type[M] = nn.Module,  # type: ignore[assignment]  # ty: ignore[invalid-parameter-default]
    *,
    subclasses: bool = False,
) -> Selection[M]:
    """Look modules up, now: a typo fails on this very line.

    A module registered under several paths is one module; it is listed once, at its first matching path.

    Args:
        model: The model that the paths start from; or a selection, and then they start from each of its modules.
        pattern: A path with holes: ``*`` one segment, ``**`` any number (none included), ``{q,k,v}_proj`` alternatives,
            ``h.[0:6]``, ``h.[::2]``, ``layer[1-3]`` numbers. It is anchored at both ends. A list is the union, and each
            of its patterns has to match; a compiled ``re.Pattern`` is a full match.
        type: Only modules of this class. A subclass counts where it inherits ``forward`` unchanged.
        subclasses: Whether a subclass counts that overrides ``forward``, too.

    Returns:
        The places, in module order, with the module's class known to the type checker.

    Raises:
        NoMatchError: The pattern, or one of several, matches nothing; the message names what is near.
        PatternError: The pattern is not well formed.
        ArgumentError: There is no model.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> slapo.select(net, "*", nn.Linear).paths
        ('0', '2')
        >>> slapo.select(net, "[::2]")[-1]
        Site('2', Linear)
    """
    if isinstance(model, Selection):
        inner = where(pattern, type, subclasses=subclasses)
        return _look_up(model.model, Selector(Inside(model.selector.rule, inner.rule)))
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"select looks modules up on a model, and got {what(model)} in its place: write select(model, {model!r}), "
            f"or where({model!r}) for a rule without a model"
            if isinstance(model, str)
            else f"select looks modules up on a model or in a selection, not in {what(model)}"
        )
    return _look_up(model, where(pattern, type, subclasses=subclasses))


def where(
    pattern: Pattern = "**",
    type: type[M] = nn.Module,  # type: ignore[assignment]  # ty: ignore[invalid-parameter-default]
    *,
    subclasses: bool = False,
) -> Selector[M]:
    """The rule alone, for modules that an earlier entry will make, or for another model.

    Args:
        pattern: As in `select`.
        type: As in `select`.
        subclasses: As in `select`.

    Raises:
        PatternError: The pattern is not well formed.
        ArgumentError: An argument is of the wrong kind.

    Example:
        >>> import slapo_fn as slapo
        >>> slapo.where("transformer.h.*.mlp")[::2]
        where((transformer.h.*.mlp)[::2])
    """
    patterns = (pattern,) if isinstance(pattern, (str, re.Pattern)) else pattern
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(one, (str, re.Pattern)) for one in patterns):
        raise ArgumentError(f"a pattern is a str, a compiled re.Pattern or a list of them, not {what(pattern)}")
    if not patterns:
        raise ArgumentError("an empty list of patterns can match nothing")
    for one in patterns:
        if isinstance(one, str):
            parse(one)
    if not (isinstance(type, builtins.type) and issubclass(type, nn.Module)):
        raise ArgumentError(f"type is a class of modules, not {what(type)}")
    return Selector(Matching(tuple(patterns), type, subclasses))


def at(model: Root, choose: Callable[[Root], Iterable[N]]) -> Selection[N]:
    """Select by code that the editor completes and checks.

    Args:
        model: The model.
        choose: Given the model, gives the modules.

    Raises:
        ArgumentError: What it gives are not modules of this model.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> slapo.at(net, lambda m: [m[1]]).paths
        ('1',)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"at looks modules up on a model, not on {what(model)}")
    chosen = choose(model)
    if isinstance(chosen, nn.Module):
        raise ArgumentError(f"the function gave one {type(chosen).__name__}; give a list: lambda m: [m.…]")
    paths = {id(module): path for path, module in model.named_modules()}
    modules = list(chosen)
    strange = [module for module in modules if id(module) not in paths]
    if strange:
        raise ArgumentError(f"the function gave {len(strange)} things that are no modules of the model: {what(strange[0])}")
    if not modules:
        raise ArgumentError("the function gave no modules")
    return _look_up(model, Selector(Exact(tuple(paths[id(module)] for module in modules))))


def exactly(count: int, target: Target[M]) -> Selector[M]:
    """Expect so many modules; another number is an error, on this line for a selection, else when it is applied.

    Raises:
        CountError: A selection has another number.

    Example:
        >>> import slapo_fn as slapo
        >>> slapo.exactly(12, "transformer.h.*")
        where(exactly 12 of transformer.h.*)
    """
    rule = Counted(as_selector(target).rule, count)
    if isinstance(target, Selection):
        rule.resolve(target.model)
    return Selector(rule)


def optional(target: Target[M]) -> Selector[M]:
    """Let it match nothing.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> slapo.optional("q_proj").resolve(nn.Linear(2, 2))
        ()
    """
    return Selector(Maybe(as_selector(target).rule))


def as_selector(target: Target[M]) -> Selector[M]:
    """The rule of whatever a builder takes as its target.

    Raises:
        ArgumentError: It is none of a pattern, a class, a selector, a selection, a site.
    """
    if isinstance(target, Selector):
        return target
    if isinstance(target, Selection):
        return target.selector
    if isinstance(target, Site):
        return Selector(target.rule or Exact((target.path,)))
    if isinstance(target, (str, re.Pattern, list)) or (isinstance(target, tuple) and not isinstance(target, nn.Module)):
        rule: Selector[Any] = where(target)
        return rule
    if isinstance(target, type) and issubclass(target, nn.Module):
        return where(type=target)
    hint = "; give its path, or at(model, lambda m: [m.…])" if isinstance(target, nn.Module) else ""
    raise ArgumentError(
        f"a target is a pattern, a module class, a selector (where) or a selection (select), not {what(target)}{hint}"
    )


def _look_up(model: nn.Module, selector: Selector[N]) -> Selection[N]:
    return Selection(model, selector.resolve(model), selector)


def _part(rule: Rule, which: int | slice) -> Rule:
    if isinstance(which, slice):
        if which.step == 0:
            raise ArgumentError("a slice's step is not 0")
        return Sliced(rule, which.start, which.stop, which.step)
    if isinstance(which, int):
        return Picked(rule, which)
    raise ArgumentError(f"an index is an int or a slice, not {what(which)}; a path is selected with select(model, path)")


def _rule(other: Selector[Any] | Selection[Any]) -> Rule:
    if isinstance(other, (Selector, Selection)):
        return (other if isinstance(other, Selector) else other.selector).rule
    raise ArgumentError(f"a selector combines with another selector, not with {what(other)}")
