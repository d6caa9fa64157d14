"""The rules behind selectors: frozen data that, resolved on a model, give its places in module order."""

from __future__ import annotations

import builtins
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor, nn
from typing_extensions import NamedTuple, TypeVar

from ._find import Found, find, spelled
from ._glob import parse
from ._near import nothing_matches
from ._tree import Tree, below, join
from .errors import NoMatchError

M_co = TypeVar("M_co", bound=nn.Module, covariant=True)


class _Place(NamedTuple, Generic[M_co]):
    path: str
    module: M_co


class Site(_Place[M_co]):
    """One place in a model: ``path, module = site``.

    While `apply` lowers an entry at it, a site also knows the tree that is being edited; `renew` edits it.

    Attributes:
        path: The module's dotted path, as `nn.Module.named_modules` spells it; the root's is ``""``.
        module: The module that stands there now.
    """

    rule: Rule | None = None
    tree: Tree | None = None
    children: tuple[str, ...] = ()  # those of the module's that the entry is about, where it is about some together
    shown: tuple[str, str] = ("", "")  # and what they were, and are

    def __repr__(self) -> str:
        return f"Site({self.path!r}, {type(self.module).__name__})"

    def renew(self, old: Tensor, new: Tensor) -> None:
        """Exchange a parameter or buffer for another wherever the model holds it, so that ties stay.

        A lowering must never write into a tensor, since the input model shares it; this is what it does instead.

        Args:
            old: The tensor that the model holds, of any shape.
            new: The tensor to hold in its place.
        """
        (self.tree or Tree(self.module)).renew(old, new)


Places = list[Site[nn.Module]]


def fits(module: nn.Module, type: builtins.type[nn.Module], subclasses: bool) -> bool:
    """Whether a module is of a class, or of a subclass that inherits its ``forward`` unchanged."""
    kind = builtins.type(module)
    if kind is type or type is nn.Module:
        return True
    if not issubclass(kind, type):
        return False
    return subclasses or type.forward in (nn.Module.forward, kind.forward)


def identity(module: nn.Module) -> object:
    """What tells a place from others: the very module, or which operations of whose forward a part is."""
    return vars(module).get("place", id(module))


def every(root: nn.Module) -> Places:
    """Every distinct module with its first path."""
    return [Site(*place) for place in find(root, parse("**"))]


def in_order(root: nn.Module, places: Iterable[Site[nn.Module]]) -> Places:
    """Each module once, in module order."""
    order = {id(module): number for number, module in enumerate(below(root))}
    first = {identity(site.module): site for site in reversed(list(places))}
    found = list(first.values())[::-1]  # a part of a forward stands where the module is that it belongs to
    return sorted(found, key=lambda site: order[id(vars(site.module).get("owner", site.module))])


@dataclass(frozen=True)
class Rule(ABC):
    """What all rules share."""

    @abstractmethod
    def resolve(self, root: nn.Module) -> Places:
        """The places on a model.

        Raises:
            NoMatchError: There are none.
            CountError: There are not as many as was expected.
        """

    def left_out(self, root: nn.Module) -> Places:
        """Places that were passed over because their class overrides ``forward``."""
        return []

    def remarks(self, root: nn.Module) -> list[str]:
        """What a plan has to tell beside the places."""
        return []


@dataclass(frozen=True)
class Matching(Rule):
    """Modules by pattern and class."""

    patterns: tuple[str | re.Pattern[str], ...]
    type: builtins.type[nn.Module]
    subclasses: bool

    def _found(self, root: nn.Module, pattern: str | re.Pattern[str], fits: Callable[[nn.Module], bool]) -> Found:
        if isinstance(pattern, str):
            return find(root, parse(pattern), fits)
        there = (Site(*place) for place in spelled(root) if pattern.fullmatch(place[0]) and fits(place[1]))
        return [*in_order(root, there)]

    def _fits(self, module: nn.Module) -> bool:
        return fits(module, self.type, self.subclasses)

    def resolve(self, root: nn.Module) -> Places:
        found: list[Places] = []
        problems: list[NoMatchError] = []
        for pattern in self.patterns:
            there = [Site(*place) for place in self._found(root, pattern, self._fits)]
            if not there:
                by_path = self._found(root, pattern, lambda module: True)
                problems.append(nothing_matches(root, pattern, self.type, by_path))
            found.append(there)
        if problems:
            paths = [path for problem in problems for path in problem.paths]
            raise NoMatchError("\n".join(str(problem) for problem in problems), paths)
        return found[0] if len(found) == 1 else in_order(root, [site for part in found for site in part])

    def left_out(self, root: nn.Module) -> Places:
        if self.subclasses or self.type is nn.Module:
            return []
        strange = [
            self._found(root, p, lambda m: isinstance(m, self.type) and not self._fits(m)) for p in self.patterns
        ]
        return [Site(*place) for places in strange for place in places]

    def __str__(self) -> str:
        shown = [p if isinstance(p, str) else f"re.compile({p.pattern!r})" for p in self.patterns]
        text = ", ".join(shown) if shown != ["**"] or self.type is nn.Module else ""
        kind = "" if self.type is nn.Module else self.type.__name__ + ("+" if self.subclasses else "")
        return " : ".join(filter(None, (text or ("(root)" if not kind else ""), kind)))


@dataclass(frozen=True)
class Exact(Rule):
    """Modules by their very paths."""

    paths: tuple[str, ...]

    def resolve(self, root: nn.Module) -> Places:
        places = {path: Site(path, module) for path, module in spelled(root) if path in self.paths}
        if missing := [path for path in self.paths if path not in places]:
            raise nothing_matches(root, missing[0], nn.Module, [])
        return in_order(root, places.values())

    def __str__(self) -> str:
        return ", ".join(path or "(root)" for path in self.paths)


@dataclass(frozen=True)
class Inside(Rule):
    """What a rule finds below each place of another."""

    outer: Rule
    inner: Rule

    def resolve(self, root: nn.Module) -> Places:
        found: Places = []
        problem: NoMatchError | None = None
        for site in self.outer.resolve(root):
            try:
                found += [
                    Site(join(site.path, path) if path else site.path, m) for path, m in self.inner.resolve(site.module)
                ]
            except NoMatchError as error:
                problem = problem or NoMatchError(f"below {site.path or 'the root'}: {error}", error.paths)
        if not found and problem:
            raise problem
        return in_order(root, found)

    def __str__(self) -> str:
        return f"{self.outer} > {self.inner}"


@dataclass(frozen=True)
class Filtered(Rule):
    """Places of a rule for which a predicate holds."""

    rule: Rule
    predicate: Callable[[Any, str], bool]

    def resolve(self, root: nn.Module) -> Places:
        before = self.rule.resolve(root)
        found = [site for site in before if self.predicate(site.module, site.path)]
        if not found:
            raise NoMatchError(f"{self.rule} finds {len(before)} modules, and the predicate is true for none of them")
        return found

    def __str__(self) -> str:
        return f"{self.rule} where {getattr(self.predicate, '__name__', 'predicate')}"
