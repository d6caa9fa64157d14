"""Rules made of rules: parts, set algebra, and what is expected of a count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import nn

from ._rules import Places, Rule, every, identity, in_order
from .errors import CountError, NoMatchError


def sifted(others: Places, places: Places, *, within: bool) -> Places:
    """The places whose modules are among others, or are not."""
    known = {identity(site.module) for site in others}
    return [site for site in places if (identity(site.module) in known) is within]


@dataclass(frozen=True)
class Sliced(Rule):
    """A slice of a rule's places."""

    rule: Rule
    start: int | None
    stop: int | None
    step: int | None

    def resolve(self, root: nn.Module) -> Places:
        before = self.rule.resolve(root)
        found = before[self.start : self.stop : self.step]
        if not found:
            raise NoMatchError(f"{self} is empty: there are {len(before)} modules before it is sliced")
        return found if (self.step or 1) > 0 else found[::-1]

    def __str__(self) -> str:
        bounds = ["" if one is None else str(one) for one in (self.start, self.stop, self.step)]
        return f"({self.rule})[{':'.join(bounds if bounds[2] else bounds[:2])}]"


@dataclass(frozen=True)
class Picked(Rule):
    """One place of a rule, by its index."""

    rule: Rule
    index: int

    def resolve(self, root: nn.Module) -> Places:
        before = self.rule.resolve(root)
        if not -len(before) <= self.index < len(before):
            raise NoMatchError(f"{self}: there are only {len(before)} modules")
        return [before[self.index]]

    def __str__(self) -> str:
        return f"({self.rule})[{self.index}]"


@dataclass(frozen=True)
class Either(Rule):
    """The union."""

    first: Rule
    second: Rule

    def resolve(self, root: nn.Module) -> Places:
        return in_order(root, [*self.first.resolve(root), *self.second.resolve(root)])

    def __str__(self) -> str:
        return f"({self.first}) | ({self.second})"


@dataclass(frozen=True)
class Both(Rule):
    """The intersection."""

    first: Rule
    second: Rule

    def resolve(self, root: nn.Module) -> Places:
        found = sifted(self.second.resolve(root), self.first.resolve(root), within=True)
        if not found:
            raise NoMatchError(f"{self} is empty: each side finds modules, and they have none in common")
        return found

    def __str__(self) -> str:
        return f"({self.first}) & ({self.second})"


@dataclass(frozen=True)
class Without(Rule):
    """The difference."""

    first: Rule
    second: Rule

    def resolve(self, root: nn.Module) -> Places:
        found = sifted(self.second.resolve(root), self.first.resolve(root), within=False)
        if not found:
            raise NoMatchError(f"{self} is empty: the right side takes away all that the left side finds")
        return found

    def __str__(self) -> str:
        return f"({self.first}) - ({self.second})"


@dataclass(frozen=True)
class Complement(Rule):
    """Every module that a rule does not pick."""

    rule: Rule

    def resolve(self, root: nn.Module) -> Places:
        found = sifted(self.rule.resolve(root), every(root), within=False)
        if not found:
            raise NoMatchError(f"{self} is empty: {self.rule} finds every module")
        return found

    def __str__(self) -> str:
        return f"~({self.rule})"


@dataclass(frozen=True)
class Counted(Rule):
    """A rule that must find so many places."""

    rule: Rule
    count: int

    def resolve(self, root: nn.Module) -> Places:
        found = self.rule.resolve(root)
        if len(found) != self.count:
            paths = [site.path for site in found]
            shown = ", ".join(paths[:6]) + (", …" if len(paths) > 6 else "")
            raise CountError(f"{self.rule} should find {self.count} modules and finds {len(found)}: {shown}", paths)
        return found

    def __str__(self) -> str:
        return f"exactly {self.count} of {self.rule}"


@dataclass(frozen=True)
class Maybe(Rule):
    """A rule that may find nothing."""

    rule: Rule

    def resolve(self, root: nn.Module) -> Places:
        try:
            return self.rule.resolve(root)
        except NoMatchError:
            return []

    def __str__(self) -> str:
        return f"optional {self.rule}"


def empty_options(rule: Rule, root: nn.Module) -> Iterator[Rule]:
    """The optional parts of a rule that find nothing."""
    if isinstance(rule, Maybe) and not rule.resolve(root):
        yield rule.rule
    for field in fields(rule):
        part = getattr(rule, field.name)
        if isinstance(part, Rule):
            yield from empty_options(part, root)
