"""nodes: replacing many operations of one forward, beside one pass over a graph module that one writes by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo_fn as slapo

from ._measure import Case, Row, in_turn, ms, ratio

SIZES, MAIN = {100: 7, 400: 5, 800: 3}, 400  # calls, and rounds
HAND = "symbolic_trace, other targets, recompile"


class Calls(nn.Module):
    """A forward that calls relu many times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = torch.relu(x)
        return x


def by_hand(model: nn.Module) -> nn.Module:
    """Trace the module and give its relus another target."""
    made = fx.symbolic_trace(model)
    for node in made.graph.nodes:
        if node.target is torch.relu:
            node.target = F.silu
    made.recompile()
    return made


def by_call(model: nn.Module) -> nn.Module:
    """Replace calls by name."""
    return slapo.apply(
        model, slapo.replace(slapo.Schedule(), slapo.calls("relu", within=""), slapo.nn.Function(F.silu))
    )


def by_pattern(model: nn.Module) -> nn.Module:
    """Replace what a function computes."""
    relu = slapo.pattern(lambda x: torch.relu(x), within="")
    return slapo.apply(model, slapo.replace(slapo.Schedule(), relu, slapo.nn.Function(F.silu)))


RUNS: dict[str, Callable[[nn.Module], nn.Module]] = {
    HAND: by_hand,
    'replace(sch, calls("relu"), …)': by_call,
    "replace(sch, pattern(relu), …)": by_pattern,
}


def rows() -> Iterator[Row]:
    """Time the three on forwards of three sizes."""
    taken: dict[int, dict[str, list[float]]] = {}
    for size, rounds in SIZES.items():
        _check(Calls(size))
        taken[size] = in_turn({name: Case(partial(Calls, size), run) for name, run in RUNS.items()}, rounds, warm_up=0)
    for name in list(RUNS)[1:]:
        for size, times in taken.items():
            value = ratio(times, name, HAND)
            most, ok = ("at most 3x", value <= 3) if size == MAIN else ("", None)
            note = f"{ms(times[name])} over {ms(times[HAND])}"
            yield Row(f"{name} at {size} calls of one forward, over {HAND}", f"{value:.2f}x", most, ok, note)
    for name in RUNS:
        each = {size: statistics.median(times[name]) / size * 1e6 for size, times in taken.items()}
        worst = max(each.values()) / min(each.values())
        note = ", ".join(f"{value:.0f} µs at {size}" for size, value in each.items())
        most, ok = ("", None) if name == HAND else ("at most 1.3x", worst <= 1.3)
        yield Row(f"{name}: time per call, worst of {', '.join(map(str, SIZES))}", f"{worst:.2f}x", most, ok, note)


def _check(model: Calls) -> None:
    """All of them do the same."""
    x = torch.linspace(-2, 2, 9)
    wanted = by_hand(model)(x)
    for run in (by_call, by_pattern):
        torch.testing.assert_close(run(model)(x), wanted)
