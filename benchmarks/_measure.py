"""Rows of the table, and timings taken side by side.

Machines are noisy, so a time alone says little: cases that are compared run in turn, in one process, and what is
compared is the ratio within each round. Times are the process's CPU time, which on a free machine is the wall clock's,
since all of it runs on one thread, and which others on the machine do not add to.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was measured.
        measured: The value, as text with its unit.
        target: The most that it should be, as text; empty where there is none.
        ok: Whether it is within the target; None where there is none.
        note: What else there is to know.
    """

    what: str
    measured: str
    target: str = ""
    ok: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """``ok``, ``over``, or nothing where there is no target."""
        return "" if self.ok is None else "ok" if self.ok else "over"


class Case(NamedTuple):
    """One thing to time: ``run(prepare())``, of which only ``run`` is timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]


def in_turn(cases: dict[str, Case], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Time the cases round by round, in seconds; the order turns with each round.

    Garbage is collected before each timed part, and the collector is on within it, as it is for a user.

    Args:
        cases: What to time, by name.
        rounds: How many times to time each.
        warm_up: How many rounds come before those that count.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-warm_up, rounds):
        names = list(cases)
        for name in names if number % 2 else reversed(names):
            given = cases[name].prepare()
            gc.collect()
            start = process_time()
            kept = cases[name].run(given)
            took = process_time() - start
            del kept, given
            if number >= 0:
                times[name].append(took)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """The median, over the rounds, of one case's time over another's."""
    return statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))


def pairs(ours: Callable[[], object], theirs: Callable[[], object], count: int) -> list[tuple[float, float]]:
    """Time two functions of milliseconds alternately, in seconds; which one is first alternates, too."""
    for _ in range(5):
        theirs(), ours()
    gc.collect()
    taken = []
    for number in range(count):
        if number % 2:
            mine, other = _time(ours), _time(theirs)
        else:
            other, mine = _time(theirs), _time(ours)
        taken.append((mine, other))
    return taken


def _time(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """The median with the 95 % interval that the order of the values gives it."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def ms(seconds: Sequence[float] | float) -> str:
    """Seconds, or the median of several, as milliseconds."""
    value = seconds if isinstance(seconds, float) else statistics.median(seconds)
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
