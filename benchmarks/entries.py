"""entries: what many entries cost, to apply and to write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import nn

import slapo_fn as slapo

from ._measure import Case, Row, in_turn, ms, ratio
from ._tree import Reset, Stack, swish

WIDE = 100


class Small(nn.Sequential):
    """A block of ten modules, itself included."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(8)), nn.GELU())


def rows() -> Iterator[Row]:
    """Compare a hundred entries of one place each with one entry of a hundred places, and build a long schedule."""
    reset = Reset(Stack(WIDE, Small))
    count = sum(1 for _ in reset.model.modules())
    one = slapo.replace(slapo.Schedule(), "*.8", swish)
    by_path = _each([slapo.where(f"block_{number}.8") for number in range(WIDE)])
    by_class = _each([slapo.where(f"block_{number}.**", nn.GELU) for number in range(WIDE)])
    by_index = _each([slapo.where(type=nn.GELU)[0] for _ in range(WIDE)])
    for name, many, target in (
        ("by path", by_path, 3.0),
        ("by path and class", by_class, 3.0),
        ("by class and index", by_index, None),
    ):
        cases = {key: Case(reset, _applies(sch)) for key, sch in (("one", one), ("many", many))}
        times = in_turn(cases, 7)
        value = ratio(times, "many", "one")
        note = f"{ms(times['many'])} over {ms(times['one'])}"
        if target is None:
            note += "; each entry looks through the whole tree"
        ok = None if target is None else value <= target
        most = "" if target is None else f"at most {target:g}x"
        yield Row(
            f"{WIDE} entries ({name}) on {count:,} modules over one entry of {WIDE} places",
            f"{value:.2f}x",
            most,
            ok,
            note,
        )
    yield from _building()


def _applies(schedule: slapo.Schedule) -> Callable[[nn.Module], nn.Module]:
    return lambda model: slapo.apply(model, schedule)


def _each(targets: Sequence[slapo.Selector[nn.Module]]) -> slapo.Schedule:
    schedule = slapo.Schedule()
    for target in targets:
        schedule = slapo.replace(schedule, target, swish)
    return schedule


def _building() -> Iterator[Row]:
    fresh = itertools.count()  # no pattern is written twice, so that none is known already

    def build(pattern: str) -> slapo.Schedule:
        schedule, batch = slapo.Schedule(), next(fresh)
        for number in range(1000):
            schedule = slapo.replace(schedule, pattern.format(f"{batch}_{number}"), swish)
        return schedule

    times = in_turn({"new": Case(lambda: "h.x{}.mlp.act", build), "same": Case(lambda: "h.*.mlp.act", build)}, 9)
    for name, text in (("new", "1,000 different patterns"), ("same", "one pattern, 1,000 times")):
        took = sorted(times[name])[len(times[name]) // 2]
        yield Row(f"building a schedule of 1,000 entries ({text})", ms(took), "under 20 ms", took < 0.02)
