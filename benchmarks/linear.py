"""linear: the time of apply grows with the number of modules, and no faster."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator

from ._measure import Case, Row, in_turn
from ._tree import HAND, Reset, by_hand, grown
from .swap import in_place, pure

SIZES = {100: 20, 1_000: 5, 10_000: 2}  # blocks, and rounds


def rows() -> Iterator[Row]:
    """Time apply on trees of three sizes. Only one tree is alive at a time."""
    runs = {HAND: by_hand, "apply (pure)": pure, "apply(inplace=True)": in_place}
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in runs}
    for size, rounds in SIZES.items():
        reset = Reset(grown(size))
        cases = {name: Case(reset, run) for name, run in runs.items()}
        for name, times in in_turn(cases, rounds, warm_up=int(size < 10_000)).items():
            taken[name][size] = [time / (12 * size + 1) * 1e6 for time in times]
        del reset, cases
        gc.collect()
    for name, by_size in taken.items():
        each = [statistics.median(by_size[size]) for size in SIZES]
        worst = max(each) / min(each)
        note = ", ".join(f"{value:.2f} µs at {size:,}" for size, value in zip(SIZES, each, strict=True))
        target, ok = ("", None) if name == HAND else ("at most 1.3x", worst <= 1.3)
        yield Row(f"{name}: time per module, worst of 100, 1,000, 10,000 blocks", f"{worst:.2f}x", target, ok, note)
