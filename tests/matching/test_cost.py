"""What looking costs, counted in comparisons and not in time (B143)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_fn._match import binding as _binding
from slapo_fn._match.binding import Binding
from slapo_fn._match.index import Index
from slapo_fn._match.matcher import find_matches, read_pattern
from slapo_fn._match.search import Search

from .support import net


def gelu(x: Tensor, factor: float = 0.044715) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + factor * torch.pow(x, 3))))


def deep(layers: int) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(layers):
            x = x + gelu(x.exp())
        return x

    return net(forward)


def cost(pattern: Callable[..., Any], model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many matches there are, and how many nodes or values were compared."""
    taken = [0]
    take = Binding._take

    def counted(self: Binding, *args: Any) -> Any:
        taken[0] += 1
        return take(self, *args)

    graph = fx.Tracer().trace(model)
    with monkeypatch.context() as patch:
        patch.setattr(Binding, "_take", counted)
        found = find_matches(read_pattern(pattern), graph, model).found
    return len(found), taken[0] + Search(read_pattern(pattern), Index(graph, model)).compared


def test_b143_ten_times_the_graph_costs_ten_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    few, small = cost(lambda x: gelu(x), deep(10), monkeypatch)
    many, large = cost(lambda x: gelu(x), deep(100), monkeypatch)
    assert (few, many) == (10, 100)
    assert large <= 10.5 * small


def test_b143_a_near_miss_costs_no_more_than_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hit = cost(lambda x: gelu(x), deep(50), monkeypatch)
    for near in (
        lambda x: gelu(x, 0.0447),
        lambda x: gelu(x) * 0.5,
        lambda x: gelu(x) + x + 1,
        lambda x: F.relu(gelu(x)),
    ):
        found, missed = cost(near, deep(50), monkeypatch)
        assert found == 0
        assert missed <= hit


def chain(x: Tensor, y: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = torch.tanh(x + y) * y
    return x


def test_b143_a_long_pattern_that_almost_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(lambda self, x, y: chain(x, y, 100) + 1)
    found, right = cost(lambda x, y: chain(x, y, 33), model, monkeypatch)
    assert found == 3
    found, missed = cost(lambda x, y: torch.exp(chain(x, y, 33)), model, monkeypatch)
    assert found == 0
    assert missed <= right <= 99 * 300 * 5


def test_b143_operands_that_can_be_commuted_do_not_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(self: Any, *xs: Tensor) -> Tensor:
        total = xs[0] * xs[1]
        for number in range(1, 14):
            total = total + F.relu(xs[number] * xs[number + 1])
        return total + xs[-1] * torch.sigmoid(xs[0])

    def pattern(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any, k: Any, m: Any) -> Any:
        total = a * b + F.relu(b * c)
        for one, other in zip((c, d, e, f, g, h, i, j, k), (d, e, f, g, h, i, j, k, m), strict=True):
            total = total + F.relu(one * other)
        return (total + F.relu(m * m)) + m * torch.sigmoid(m)

    names = [f"x{number}" for number in range(15)]
    scope: dict[str, Any] = {"products": products}
    exec(f"def forward(self, {', '.join(names)}): return products(self, {', '.join(names)})", scope)
    found, compared = cost(pattern, net(scope["forward"]), monkeypatch)
    assert found == 0
    assert compared < 3000


def test_b143_a_symmetric_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(depth: int, leaves: Any) -> Tensor:
        return next(leaves) if depth == 0 else tree(depth - 1, leaves) + tree(depth - 1, leaves)

    model = net(lambda self, x, y: tree(6, iter([x, y] * 31 + [x, x])).exp())
    found, compared = cost(lambda a, b: tree(6, iter([a, b] * 31 + [a, a])).exp(), model, monkeypatch)
    assert found == 1
    assert compared < 63 * 63 * 4


def test_what_is_bound_in_too_many_ways_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_binding, "MOST_STEPS", 5)
    model = deep(1)
    with pytest.raises(ValueError, match="can be bound in too many ways from mul_3"):
        find_matches(read_pattern(lambda x: gelu(x)), fx.Tracer().trace(model), model)
