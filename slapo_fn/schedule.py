"""A schedule: an immutable tuple of entries ``(selector, primitive, args)``. Data only; nothing here touches a model."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# A check of what is no schedule meets tuples of anything.

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Generic, SupportsIndex, TypeVar, overload

from torch import nn
from typing_extensions import NamedTuple
from typing_extensions import TypeVar as DefaultTypeVar

from ._origin import Origin, here
from ._rules import Site
from ._text import columns, count, page, short, what
from .errors import ArgumentError
from .select import as_selector
from .selection import M, Selector, Target

A = DefaultTypeVar("A", default=Any)
B = TypeVar("B")
F = TypeVar("F", bound=Callable[..., nn.Module])


class Phase(IntEnum):
    """When a primitive has its turn: `apply` sorts entries by phase and keeps their order within one."""

    STRUCTURE = 0
    NUMERICS = 1
    CUT = 2
    SHARD = 3
    SYNC = 4
    FORK_RNG = 5
    COMPILE = 6
    CHECKPOINT = 7
    DATA_PARALLEL = 8


class Traits(NamedTuple):
    """What `apply` and `plan` know of a primitive beside the function itself.

    Attributes:
        phase: When it has its turn.
        overrides: Given the args of an earlier and of a later entry at one place, whether the later alone counts.
            Where it says no, both hold.
    """

    phase: Phase = Phase.STRUCTURE
    overrides: Callable[[Any, Any], bool] | None = None


def traits(phase: Phase, overrides: Callable[[Any, Any], bool] | None = None) -> Callable[[F], F]:
    """Declare a primitive's traits, once, on the function. The function itself is given back, so that nothing stands
    between a caller and it; without this a primitive belongs to `Phase.STRUCTURE` and adds to what was there.

    Args:
        phase: When the primitive has its turn.
        overrides: See `Traits`.

    Example:
        >>> import slapo_fn as slapo
        >>> @slapo.traits(slapo.Phase.NUMERICS)
        ... def double_at(site, args):
        ...     return site.module
        >>> slapo.traits_of(double_at).phase.name
        'NUMERICS'
    """
    if not isinstance(phase, Phase):
        raise ArgumentError(f"traits is called with a phase, @traits(Phase.NUMERICS), not with {what(phase)}")

    def declare(primitive: F) -> F:
        vars(primitive)["_traits"] = Traits(phase, overrides)
        return primitive

    return declare


def traits_of(primitive: Callable[..., nn.Module]) -> Traits:
    """The traits that a primitive declares, or the default ones."""
    found = getattr(primitive, "_traits", None)
    return found if isinstance(found, Traits) else Traits()


class _Triple(NamedTuple, Generic[A]):
    selector: Selector[nn.Module]
    primitive: Callable[[Any, A], nn.Module]
    args: A


class Entry(_Triple[A]):
    """One line of a schedule: ``selector, primitive, args = entry``.

    Attributes:
        selector: Where.
        primitive: The function ``(site, args) -> module`` that lowers the entry at one place.
        args: What it is given; its fields complete in an editor.
        origin: The line of the user's code that wrote the entry; takes no part in equality.
        label: A name to drop, keep and find it by; takes no part in equality.
    """

    @property
    def origin(self) -> Origin | None:
        """The line of the user's code that wrote the entry."""
        return self.__dict__.get("_origin")

    @property
    def label(self) -> str:
        """The entry's name; empty when it has none."""
        return str(self.__dict__.get("_label", ""))

    @property
    def name(self) -> str:
        """The primitive's name as a user calls it: ``checkpoint`` for ``checkpoint_at``."""
        return str(getattr(self.primitive, "__name__", type(self.primitive).__name__)).removesuffix("_at")

    def _noted(self, origin: Origin | None, label: str) -> Entry[A]:
        """The same entry with another origin and label."""
        made = Entry(*self)
        made.__dict__.update(_origin=origin, _label=label)
        return made

    def __repr__(self) -> str:
        return f"{self.name}({', '.join([str(self.selector.rule), *shown_args(self.args)])})"


def shown_args(args: object) -> list[str]:
    """The arguments that differ from their defaults, as ``name=value``."""
    fields: tuple[str, ...] = getattr(args, "_fields", ())
    if not fields:
        return [] if args is None else [short(args)]
    defaults: dict[str, object] = getattr(args, "_field_defaults", {})
    values = ((field, getattr(args, field)) for field in fields)
    return [f"{field}={short(value)}" for field, value in values if field not in defaults or defaults[field] != value]


class Schedule(tuple[Entry[Any], ...]):
    """An immutable tuple of entries; slices and sums of schedules are schedules.

    Example:
        >>> import slapo_fn as slapo
        >>> sch = slapo.freeze(slapo.Schedule(), "wte")
        >>> sch = slapo.checkpoint(sch, "h.*")
        >>> sch  # doctest: +ELLIPSIS
        Schedule of 2
          0  freeze      wte  ...
          1  checkpoint  h.*  ...
        >>> slapo.drop(sch, 0) == sch[1:]
        True
    """

    __slots__ = ()

    @overload
    def __getitem__(self, which: SupportsIndex) -> Entry[Any]: ...
    @overload
    def __getitem__(self, which: slice) -> Schedule: ...
    def __getitem__(self, which: SupportsIndex | slice) -> Entry[Any] | Schedule:
        found: Any = super().__getitem__(which)
        return Schedule(found) if isinstance(which, slice) else found

    @overload
    def __add__(self, other: tuple[Entry[Any], ...]) -> Schedule: ...
    @overload
    def __add__(self, other: tuple[B, ...]) -> tuple[Entry[Any] | B, ...]: ...
    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        both = super().__add__(other)
        return Schedule(both) if all(isinstance(one, Entry) for one in other) else both

    def __repr__(self) -> str:
        rows = [
            (
                str(number),
                entry.name + (f" [{entry.label}]" if entry.label else ""),
                str(entry.selector.rule),
                ", ".join(shown_args(entry.args)),
                str(entry.origin or ""),
            )
            for number, entry in enumerate(self)
        ]
        return "\n".join([f"Schedule of {len(self)}", *columns(rows)])

    def _repr_html_(self) -> str:
        return page(repr(self))


def add(schedule: Schedule, target: Target[M], primitive: Callable[[Site[M], A], nn.Module], args: A) -> Schedule:
    """A schedule with one more entry, lowered by any function: this is how every primitive is built, ours and yours.

    Args:
        schedule: The schedule so far; it stays as it is.
        target: A pattern, a module class, a selector (`where`), a selection (`select`) or one site of it.
        primitive: ``(site, args) -> module``: what stands at ``site.path`` afterwards, be it ``site.module`` itself.
        args: What the primitive is given; a NamedTuple of plain values shows, compares and pickles well.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        PatternError: The target is a pattern that is not well formed.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> def widen_at(site, by):
        ...     return nn.Linear(site.module.in_features, site.module.out_features + by)
        >>> sch = slapo.add(slapo.Schedule(), nn.Linear, widen_at, 1)
        >>> slapo.apply(nn.Sequential(nn.Linear(2, 2)), sch)[0].out_features
        3
    """
    checked(schedule)
    if not callable(primitive):
        raise ArgumentError(f"a primitive is a function (site, args) -> module, not {what(primitive)}")
    entry = Entry(as_selector(target), primitive, args)._noted(here(), "")
    return Schedule([*schedule, entry])


def checked(schedule: Any) -> Schedule:
    """The schedule, if it is one.

    Raises:
        ArgumentError: It is something else; the message says what a builder wants first.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, nn.Module):
        reason = "a builder takes a schedule first and never the model: sch = slapo.checkpoint(sch, …)"
    elif isinstance(schedule, tuple) and schedule and all(isinstance(one, Entry) for one in schedule):
        reason = "make the tuple of entries a schedule: Schedule(entries)"
    else:
        reason = "start with sch = slapo.Schedule(), and give it first: sch = slapo.checkpoint(sch, target)"
    raise ArgumentError(f"the first argument is {what(schedule)}, not a schedule; {reason}")


def drop(schedule: Schedule, *which: int | str) -> Schedule:
    """A schedule without some entries, given by number or label; the others stay in order.

    Raises:
        ArgumentError: There is no such entry.
    """
    away = _numbers(schedule, which)
    return Schedule(entry for number, entry in enumerate(schedule) if number not in away)


def keep(schedule: Schedule, *which: int | str) -> Schedule:
    """A schedule of only some entries, given by number or label, in their old order.

    Raises:
        ArgumentError: There is no such entry.
    """
    kept = _numbers(schedule, which)
    return Schedule(entry for number, entry in enumerate(schedule) if number in kept)


def label(schedule: Schedule, name: str, *which: int | str) -> Schedule:
    """Name entries, the last one unless others are given, so that `drop` and `keep` find them by name.

    Raises:
        ArgumentError: There is no such entry, or the name is empty.

    Example:
        >>> import slapo_fn as slapo
        >>> sch = slapo.label(slapo.freeze(slapo.Schedule(), "wte"), "no embedding updates")
        >>> len(slapo.drop(sch, "no embedding updates"))
        0
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"a label is a str that is not empty, not {what(name)}")
    named = _numbers(schedule, which or (-1,))
    return Schedule(entry._noted(entry.origin, name) if n in named else entry for n, entry in enumerate(schedule))


def entries(schedule: Iterable[Entry[Any]], args: type[A]) -> tuple[Entry[A], ...]:
    """The entries of one kind, told by the class of their args, so that these complete in an editor.

    Example:
        >>> import slapo_fn as slapo
        >>> sch = slapo.checkpoint(slapo.freeze(slapo.Schedule(), "wte"), "h.*")
        >>> [entry.args.preserve_rng_state for entry in slapo.entries(sch, slapo.CheckpointArgs)]
        [True]
    """
    return tuple(entry for entry in schedule if isinstance(entry.args, args))


def _numbers(schedule: Schedule, which: Iterable[int | str]) -> set[int]:
    checked(schedule)
    found: set[int] = set()
    for one in which:
        numbers: list[int] = []
        if isinstance(one, str):
            numbers = [number for number, entry in enumerate(schedule) if entry.label == one]
        elif isinstance(one, int) and not isinstance(one, bool) and -len(schedule) <= one < len(schedule):
            numbers = [one % len(schedule)]
        if not numbers:
            labels = [entry.label for entry in schedule if entry.label]
            known = f"; its labels are {', '.join(map(repr, labels))}" if labels else ""
            raise ArgumentError(f"the schedule has {count(len(schedule), 'entry')} and none is {one!r}{known}")
        found.update(numbers)
    return found
