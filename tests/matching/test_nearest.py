"""What is said where a pattern matches nowhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_fn._match.matcher import call_module, nearest, read_pattern

from .support import net, why


def gelu(x: Tensor, factor: float = 0.044715, half: float = 0.5) -> Tensor:
    return half * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + factor * torch.pow(x, 3))))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (
            lambda self, x: gelu(x, 0.5),
            "matched 7 of 8 operations; after `pow_1`, the pattern has mul(0.044715, ·) and the forward has mul(0.5, ·)",
        ),
        (
            lambda self, x: gelu(x, half=0.25),
            "matched 7 of 8 operations; the pattern has mul(0.5, ·) and the forward has mul(0.25, ·)",
        ),
        (
            lambda self, x: (
                t := torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
                0.5 * x * (1 + t),
                t.exp(),
            )[1:],
            "matched 7 of 8 operations; after `mul_2`, an intermediate (`tanh`) is used outside of the match by `exp`",
        ),
        (lambda self, x: x.exp(), None),
    ],
)
def test_a_long_pattern(forward: Any, said: str | None) -> None:
    assert why(lambda x: gelu(x), net(forward)) == said


@pytest.mark.parametrize(
    ("pattern", "forward", "said"),
    [
        (
            lambda x: F.relu(x) + x,
            lambda self, x, y: F.relu(x) + y,
            "matched 2 of 2 operations up to `add`; but `x` of the pattern would have to be both `x` and `y`",
        ),
        (
            lambda x, y: F.relu(x) + y,
            lambda self, x: (a := F.relu(x)) + a,
            "matched 2 of 2 operations up to `add`; but an input of the pattern would be a value of the match itself, `relu`",
        ),
        (
            lambda x: F.relu(x) + x,
            lambda self, x: (a := F.relu(x), x.add_(1), a + x)[2],
            "matched 2 of 2 operations up to `add`; but `add_` writes in place between the operations of the match",
        ),
        (
            lambda x: F.relu(x).exp(),
            lambda self, x: F.relu_(x).exp(),
            "matched 1 of 2 operations; `relu_` writes in place into what others may see",
        ),
        (
            lambda x: F.relu(x).exp(),
            lambda self, x: F.relu(x).sqrt(),
            "matched 1 of 2 operations; after `relu`, the pattern has exp(·) and the forward has sqrt(·)",
        ),
        (
            lambda x: F.relu(x).exp(),
            lambda self, x: F.relu(x),
            "matched 1 of 2 operations; after `relu`, the pattern has exp(·) and the forward goes on with nothing",
        ),
        (
            lambda x, *, s: F.relu(x) * s,
            lambda self, x, y: F.relu(x) * y,
            "matched 1 of 2 operations; after `relu`, the pattern has mul(·, s) and the forward has mul(·, ·)",
        ),
        (
            lambda x, y: ((a := F.relu(x)), torch.tanh(a) + y),
            lambda self, x: torch.tanh(a := F.relu(x)) + a.exp().sqrt(),
            "matched 3 of 3 operations up to `add`; but `sqrt`, outside of the match, uses a value of it and is used in it",
        ),
        (
            lambda x: F.relu(x).view(x.size(0)),
            lambda self, x: F.relu(x).view(x.shape[1]),
            "matched 2 of 3 operations; after `relu`, the pattern has size(·, 0) and the forward has size(·, 1)",
        ),
        (
            lambda x: (a := F.relu(x)) * a.exp() + a,
            lambda self, x: (a := F.relu(x)).exp() + a,
            "matched 1 of 4 operations; `relu` is used by 2 operations, and in the pattern by 3",
        ),
    ],
)
def test_why(pattern: Any, forward: Any, said: str) -> None:
    told = why(pattern, net(forward))
    assert told == said


def test_what_the_table_does_not_know_is_shown_as_it_is_written() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x * scale

    leaf = type("Leaf", (fx.Tracer,), {"is_leaf_module": lambda self, module, path: True})()
    model = net(lambda self, x: torch.cumsum(self.own(x, scale=2.0), dim=0), own=Own())
    graph = leaf.trace(model)
    told = nearest(read_pattern(lambda x: F.relu(x).cumsum(0)), graph, model)
    assert told == "matched 1 of 2 operations; the pattern has relu(·) and the forward has Own(·, 2.0) of `own`"
    told = nearest(read_pattern(lambda x: call_module(Own, x, 2.0).cumsum(1)), graph, model)
    assert (
        told == "matched 1 of 2 operations; after `own`, the pattern has cumsum(·, 1) and the forward has cumsum(·, 0)"
    )


def test_modules_by_their_class_and_path() -> None:
    model = net(lambda self, x: F.relu(self.fc(x)), fc=nn.Linear(4, 4))
    assert why(lambda x: F.relu(call_module("proj", x)), model) == (
        "matched 1 of 2 operations; the pattern has call_module('proj', …) and the forward has "
        "linear(·, `fc.weight`, `fc.bias`) of `fc`"
    )
    assert "the pattern has call_module(LayerNorm, …)" in str(
        why(lambda x: F.relu(call_module(nn.LayerNorm, x)), model)
    )


def test_the_line_of_the_forward_is_told_where_it_is_known() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return F.relu(x).sqrt()

    model = net(forward)
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    graph = tracer.trace(model)
    told = nearest(read_pattern(lambda x: F.relu(x).exp()), graph, model)
    assert "test_nearest.py:" in str(told)
