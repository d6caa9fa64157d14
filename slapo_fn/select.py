"""Which modules: look them up on a model now (`select`, `at`), or keep the rule for later (`where`)."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch leaves named_modules without types, and a check of what is no selection meets those of anything.

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, Union

from torch import nn

from ._algebra import Counted, Maybe
from ._glob import parse
from ._rules import Exact, Inside, Matching, Site
from ._text import what
from .errors import ArgumentError
from .selection import M, N, Selection, Selector, Target, look_up

Root = TypeVar("Root", bound=nn.Module)
Pattern: TypeAlias = Union[str, "re.Pattern[str]", Sequence[Union[str, "re.Pattern[str]"]]]


def select(
    model: nn.Module | Selection[nn.Module],
    pattern: Pattern | Selector[M] = "**",
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
            of its patterns has to match; a compiled ``re.Pattern`` is a full match. Or a selector, such as those of
            `where`, `pattern` and `calls`; to the latter give the type `Subgraph`, for completion.
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
    inner = pattern if isinstance(pattern, Selector) else where(pattern, type, subclasses=subclasses)
    if isinstance(model, Selection):
        return look_up(model.model, Selector(Inside(model.selector.rule, inner.rule)))
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"select looks modules up on a model, and got {what(model)} in its place: write select(model, {model!r}), "
            f"or where({model!r}) for a rule without a model"
            if isinstance(model, str)
            else f"select looks modules up on a model or in a selection, not in {what(model)}"
        )
    found = look_up(model, inner)
    if strange := [site for site in found if isinstance(pattern, Selector) and not isinstance(site.module, type)]:
        raise ArgumentError(f"{strange[0].path} is a {strange[0].module.__class__.__name__}, not a {type.__name__}")
    return found


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
    if isinstance(pattern, builtins.type):
        raise ArgumentError(f"a class is given as type={pattern.__name__}, after the pattern or instead of it")
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(one, (str, re.Pattern)) for one in patterns):
        raise ArgumentError(
            f"a pattern is a str, a compiled re.Pattern or a list of them, not {what(pattern)}; "
            "selectors and optional(…) are combined with |"
        )
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
        raise ArgumentError(
            f"the function gave {len(strange)} things that are no modules of the model: {what(strange[0])}"
        )
    if not modules:
        raise ArgumentError("the function gave no modules")
    return look_up(model, Selector(Exact(tuple(paths[id(module)] for module in modules))))


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
    if isinstance(target, (str, re.Pattern, list)):
        rule: Selector[Any] = where(target)
        return rule
    if isinstance(target, type) and issubclass(target, nn.Module):
        return where(type=target)
    hint = "; give its path, or at(model, lambda m: [m.…])" if isinstance(target, nn.Module) else ""
    raise ArgumentError(
        f"a target is a pattern, a module class, a selector (where) or a selection (select), not {what(target)}{hint}"
    )
