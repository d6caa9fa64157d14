"""plan: what a schedule does to a model, place by place, as data and as text, with nothing changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from ._engine import Work, prepare
from ._problems import told
from ._text import columns, count, fold, page
from ._tree import all_tensors, below
from .schedule import Entry, Schedule, shown_args, traits_of

WIDE = 80  # characters of a line's places
MARKS = ("\ue000\ue000", "\ue001\ue001")  # private characters around what is struck through: no name has them by accident


class Step(NamedTuple):
    """What one entry does at one place.

    Attributes:
        number: The entry's number in the schedule.
        primitive: The primitive's name.
        path: The place.
        before: The class that stands there when the entry has its turn.
        after: The class that stands there afterwards.
        aliases: Other paths of the same module.
        overridden_by: The number of the later entry that makes this one void here, or None.
    """

    number: int
    primitive: str
    path: str
    before: str
    after: str
    aliases: tuple[str, ...]
    overridden_by: int | None


@dataclass(frozen=True, repr=False)
class Plan:
    """What a schedule does to a model. It shows itself as text, folded, with overridden steps struck through.

    Attributes:
        model: The model's class.
        schedule: The schedule.
        order: The numbers of the entries in the order of their execution.
        steps: One for each entry and place, in that order.
        notes: ``(number, text)``: places left out or skipped.
        problems: What `apply` would raise.
        trouble: The same as folded lines.
    """

    model: str
    schedule: Schedule
    order: tuple[int, ...]
    steps: tuple[Step, ...]
    notes: tuple[tuple[int, str], ...]
    problems: tuple[Exception, ...]
    trouble: tuple[str, ...]

    def of(self, number: int) -> tuple[Step, ...]:
        """The steps of one entry."""
        return self._by_number.get(number, ())

    @cached_property
    def _by_number(self) -> dict[int, tuple[Step, ...]]:
        steps = sorted(self.steps, key=lambda step: step.number)
        return {number: tuple(group) for number, group in groupby(steps, key=lambda step: step.number)}

    def __repr__(self) -> str:
        return self._text().translate({ord(mark[0]): "~" for mark in MARKS})

    def _text(self) -> str:
        head = f"Plan for {self.model}: {count(len(self.schedule), 'entry')}, {count(len(self.steps), 'place')}"
        if self.order != tuple(range(len(self.order))):
            head += f"; order of execution {', '.join(map(str, self.order))}"
        lines = [head, *columns(row for number in self.order for row in self._rows(number))]
        lines += [line.replace("  ", "  ! ", 1) if line.startswith("  entry") else line for line in self.trouble]
        if self.problems:
            lines.append("  apply would refuse this schedule")
        return "\n".join(lines)

    def _rows(self, number: int) -> Iterable[tuple[str, ...]]:
        entry = self.schedule[number]
        head = (str(number), entry.name + (f" [{entry.label}]" if entry.label else ""))
        tail = (", ".join(shown_args(entry.args)), str(entry.origin or ""))
        groups: dict[tuple[str, str, int | None], list[Step]] = {}
        for step in self.of(number):
            groups.setdefault((step.before, step.after, step.overridden_by), []).append(step)
        lines = [line for key, steps in groups.items() for line in _lines(*key, steps)]
        lines += [f"({text})" for at, text in self.notes if at == number]
        for line in lines or ["(nothing)"]:
            yield (*head, line, *tail)
            head, tail = ("", ""), ("", "")

    def _repr_html_(self) -> str:
        return page(self._text(), marks=MARKS)


def _lines(before: str, after: str, overridden_by: int | None, steps: list[Step]) -> list[str]:
    paths = [path or "(root)" for path in fold(step.path for step in steps)]
    aliases = fold(alias for step in steps for alias in step.aliases)
    change = before if before == after else f"{before} -> {after}"
    tail = f": {change}" + (f"  x{len(steps)}" if len(steps) > 1 else "") + (f"  (also {', '.join(aliases)})" if aliases else "")
    lines = [", ".join(paths) + tail]
    if len(lines[0]) > WIDE:  # one path a line
        lines = [*(f"{path}," for path in paths[:-1]), paths[-1] + tail]
    if overridden_by is None:
        return lines
    struck = [f"{MARKS[0]}{line}{MARKS[1]}" for line in lines]
    return [*struck[:-1], f"{struck[-1]} overridden by {overridden_by}"]


def plan(model: nn.Module, schedule: Iterable[Entry[Any]]) -> Plan:
    """Tell what a schedule does to a model: per entry the places, what is there and what will be; nothing is changed.

    It runs the very pass that `apply` runs and gives the record of it instead of the result, so it costs the same and
    cannot differ. Problems do not raise; they are listed.

    Args:
        model: The model; it stays as it was.
        schedule: The schedule.

    Returns:
        The plan, as data that shows itself as text.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> print(slapo.plan(net, slapo.replace(slapo.Schedule(), nn.GELU, nn.ReLU())))  # doctest: +ELLIPSIS
        Plan for Sequential: 1 entry, 1 place
          0  replace  1: GELU -> ReLU  new=ReLU(…)  ...
    """
    for entry, site in (work := prepare(model, schedule)):
        with work: work.put(site, entry.primitive(site, entry.args))  # noqa: E701  the loop of apply
    return _recorded(work)


def _recorded(work: Work[nn.Module]) -> Plan:
    left_out = [
        (number, "left out, since they override forward: " + ", ".join(fold(path for path, _ in places)))
        for number, entry in enumerate(work.schedule)
        if (places := entry.selector.rule.left_out(work.given))
    ]
    left_out += [(n, one) for n, entry in enumerate(work.schedule) for one in entry.selector.rule.remarks(work.given)]
    skipped: dict[tuple[int, str], list[str]] = {}
    for number, path, reason in work.skipped:
        skipped.setdefault((number, reason), []).append(path)
    skips = [(number, f"{', '.join(fold(paths))} {reason}".strip()) for (number, reason), paths in skipped.items()]
    by_path: dict[str, list[int]] = {}
    for at, row in enumerate(work.rows):
        by_path.setdefault(row.path, []).append(at)
    steps = tuple(
        Step(row.number, work.schedule[row.number].name, *row[1:5], _overridden_by(work, at, by_path))
        for at, row in enumerate(work.rows)
    )
    work.rng.restore()
    problems = tuple(problem.error for problem in work.problems)
    notes, trouble = (*left_out, *skips), tuple(told(work.problems))
    return Plan(type(work.given).__name__, work.schedule, tuple(work.order), steps, notes, problems, trouble)


def _overridden_by(work: Work[nn.Module], at: int, by_path: Mapping[str, list[int]]) -> int | None:
    """The later entry that makes a row void: it overrides the same module, or has put out all that the row made."""
    row = work.rows[at]
    mine = work.schedule[row.number]
    overrides = traits_of(mine.primitive).overrides
    gone = row.replaced and not _left(work, row.module)
    for later in (work.rows[other] for other in by_path[row.path] if other > at):
        theirs = work.schedule[later.number]
        alike = theirs.primitive is mine.primitive or (type(theirs.args) is type(mine.args) and mine.args is not None)
        if overrides and alike and overrides(mine.args, theirs.args):
            return later.number
        if gone and later.replaced:
            return later.number
    above = [other for path in _above(row.path) for other in by_path.get(path, ()) if other > at] if gone else []
    return next((work.rows[other].number for other in sorted(above) if work.rows[other].replaced), None)


def _left(work: Work[nn.Module], made: nn.Module) -> bool:
    """Whether anything of a new module is still in the tree: itself, a module in it, or a tensor that it brought."""
    known = work.fork.memo if work.fork else {}
    parts = list(below(made))
    return any(map(work.tree.holds, parts)) or any(
        id(tensor) not in known and work.tree.slots(tensor) for tensor in all_tensors(parts).values()
    )


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
