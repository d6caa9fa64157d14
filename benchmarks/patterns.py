"""patterns: finding what a function computes inside forwards, beside torch's own matcher of subgraphs.

Each of 96 MLPs computes GELU's approximation by tanh, eight operations, written as the pattern writes it. Torch's matcher
knows no other spelling, so any other comparison would be with what it does not find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

import slapo_fn as slapo
from slapo_fn._match.matcher import PatternGraph, find_matches, read_pattern

from ._measure import Case, Row, in_turn, middle, ms, pairs, ratio

COUNT = 96
Function = Callable[[Tensor], Tensor]
THEIRS = "torch.fx's SubgraphMatcher"


class Constants(NamedTuple):
    """The five constants of the function, in the order in which it uses them."""

    half: float = 0.5
    power: float = 3.0
    cubic: float = 0.044715
    scale: float = math.sqrt(2.0 / math.pi)
    one: float = 1.0


def gelu(**other: float) -> Function:
    """The function, with other constants as the case may be."""
    half, power, cubic, scale, one = Constants(**other)

    def tanh_gelu(x: Tensor) -> Tensor:
        return half * x * (one + torch.tanh(scale * (x + cubic * torch.pow(x, power))))

    return tanh_gelu


class MLP(nn.Module):
    """GPT-2's MLP, its activation written out."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        out: Tensor = self.c_proj(0.5 * x * (1.0 + torch.tanh(_SCALE * (x + 0.044715 * torch.pow(x, 3.0)))))
        return out


_SCALE = math.sqrt(2.0 / math.pi)
NEAR = {name: gelu(**{name: value * 1.5}) for name, value in Constants()._asdict().items()}
Graphs = list[tuple[fx.Graph, nn.Module]]


def rows() -> Iterator[Row]:
    """Match on graphs that are there, then go the whole way from modules."""
    model = nn.Sequential(*(MLP() for _ in range(COUNT)))
    flat = fx.symbolic_trace(model)
    each: Graphs = [(slapo.graph_of(mlp).graphs[0], mlp) for mlp in model]
    both: list[tuple[Graphs, str]] = [
        (each, f"{COUNT} graphs of one MLP each"),
        ([(flat.graph, flat)], f"one graph of {COUNT} MLPs"),
    ]
    for graphs, what in both:
        yield from _matching(graphs, what)
    yield from _whole(model)


def _matching(graphs: Graphs, what: str) -> Iterator[Row]:
    pattern, matcher = read_pattern(gelu()), SubgraphMatcher(_graph(gelu()))
    assert _ours(graphs, pattern) == _theirs(graphs, matcher) == COUNT
    hit = partial(_ours, graphs, pattern)
    taken = pairs(hit, partial(_theirs, graphs, matcher), 21)
    value, low, high = middle([mine / other for mine, other in taken])
    note = f"{ms([mine for mine, _ in taken])} over {ms([other for _, other in taken])}, {low:.2f} to {high:.2f}"
    yield Row(f"matching alone, {what}: over {THEIRS}", f"{value:.2f}x", "at most 2x", value <= 2, note)
    misses: dict[str, float] = {}
    for name, fn in NEAR.items():
        near, theirs = read_pattern(fn), SubgraphMatcher(_graph(fn))
        assert not _ours(graphs, near), name
        assert not _theirs(graphs, theirs), name
        misses[name] = middle([mine / other for mine, other in pairs(partial(_ours, graphs, near), hit, 9)])[0]
    yield Row(
        f"a near miss, one constant of five another, {what}: the worst over our own hit",
        f"{max(misses.values()):.2f}x",
        "at most 1x",
        max(misses.values()) <= 1,
        ", ".join(f"{_said(name)}: {value:.2f}x" for name, value in misses.items()),
    )


def _whole(model: nn.Module) -> Iterator[Row]:
    misses = list(NEAR.values())
    cases = {
        "theirs": _case(lambda: SubgraphMatcher(_graph(gelu())).match(fx.symbolic_trace(model).graph)),
        "ours": _case(lambda: slapo.select(model, slapo.pattern(gelu(), within="*"))),
        "flat": _case(lambda: slapo.select(model, slapo.pattern(gelu(), within="", flat=True))),
        "miss": _case(lambda: _missing(model, misses[-1])),
    }
    assert len(slapo.select(model, slapo.pattern(gelu(), within="*"))) == COUNT
    assert len(slapo.select(model, slapo.pattern(gelu(), within="", flat=True))) == COUNT
    times = in_turn(cases, 3, warm_up=0)
    for name, what in (("ours", "each MLP traced alone"), ("flat", "the model traced as one, flat=True")):
        value = ratio(times, name, "theirs")
        note = f"{ms(times[name])} over {ms(times['theirs'])}"
        yield Row(
            f"select with a pattern, {what}: over symbolic_trace of the model and {THEIRS}",
            f"{value:.2f}x",
            "at most 2x",
            value <= 2,
            note,
        )
    value = ratio(times, "miss", "ours")
    yield Row(
        "select with a near miss, until the error that says what is near: over our own hit",
        f"{value:.2f}x",
        "at most 1x",
        value <= 1,
        ms(times["miss"]),
    )


def _ours(graphs: Graphs, pattern: PatternGraph) -> int:
    return sum(len(find_matches(pattern, graph, owner).found) for graph, owner in graphs)


def _theirs(graphs: Graphs, matcher: SubgraphMatcher) -> int:
    return sum(len(matcher.match(graph)) for graph, _ in graphs)


def _missing(model: nn.Module, fn: Function) -> str:
    try:
        slapo.select(model, slapo.pattern(fn, within="*"))
    except slapo.NoMatchError as error:
        return str(error)
    raise AssertionError("a near miss was found")


def _graph(fn: Function) -> fx.Graph:
    return fx.symbolic_trace(fn).graph


def _said(name: str) -> str:
    return f"{Constants()._asdict()[name]:.3g}"


def _case(run: Callable[[], object]) -> Case:
    return Case(lambda: None, lambda _: run())
