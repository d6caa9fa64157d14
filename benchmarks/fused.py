"""fused: layers of one input in one matmul, beside the same layers apart, at SmolLM2-135M's sizes.

Each part alone, and the whole block also compiled, on one token and on 256: a forward in evaluation without gradients, and
a forward in training with its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from ._llama import MLP, Attention, Block
from ._measure import Row, middle, pairs
from .running import BACKEND

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 576, 9, 3, 1536
PAIRS = {1: (300, 100), 256: (15, 9)}  # by tokens: for the forward, and with the backward
Change = Callable[[slapo.Schedule], slapo.Schedule]


class Plain(nn.Module):
    """GPT-2's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.act, self.dropout = nn.GELU("tanh"), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class Compared(NamedTuple):
    """A module, what is done to it, and whether both are compiled."""

    what: str
    module: nn.Module
    change: Change
    compiled: bool = False


def qkv(sch: slapo.Schedule) -> slapo.Schedule:
    """Fuse queries, keys and values."""
    return slapo.fuse(sch, "**.{q,k,v}_proj")


def gate_up(sch: slapo.Schedule) -> slapo.Schedule:
    """Fuse gate and up."""
    return slapo.fuse(sch, "**.{gate,up}_proj")


def gated(sch: slapo.Schedule) -> slapo.Schedule:
    """Put a GatedMLP in the place of the MLP."""
    return slapo.replace(sch, slapo.where("**", MLP), slapo.nn.GatedMLP.from_llama)


def plain(sch: slapo.Schedule) -> slapo.Schedule:
    """Put a FusedMLP in the place of the MLP."""
    return slapo.replace(sch, slapo.where("**", Plain), slapo.nn.FusedMLP.from_gpt2)


def rows() -> Iterator[Row]:
    """Time each pair, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        attention, mlp = Attention(HIDDEN, HEADS, KV_HEADS), MLP(HIDDEN, INTERMEDIATE)
        block = Block(HIDDEN, HEADS, KV_HEADS, INTERMEDIATE)
        for compared in (
            Compared("attention, fuse q/k/v", attention, qkv),
            Compared("gated MLP, fuse gate/up", mlp, gate_up),
            Compared("gated MLP, nn.GatedMLP", mlp, gated),
            Compared("plain MLP, nn.FusedMLP", Plain(), plain),
            Compared("block, fuse q/k/v and gate/up", block, lambda sch: gate_up(qkv(sch))),
            Compared("block, fuse q/k/v and gate/up", block, lambda sch: gate_up(qkv(sch)), compiled=True),
            Compared("block, fuse q/k/v, nn.GatedMLP", block, lambda sch: gated(qkv(sch)), compiled=True),
        ):
            yield from _rows(compared)
        for what, layers in (
            ("q/k/v", [attention.q_proj, attention.k_proj, attention.v_proj]),
            ("gate/up", [mlp.gate_proj, mlp.up_proj]),
        ):
            yield from _bare(what, [layer.weight for layer in layers])
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def _rows(compared: Compared) -> Iterator[Row]:
    torch._dynamo.reset()
    none = slapo.Schedule()
    ours, theirs = (
        slapo.apply(compared.module, _compiled(sch) if compared.compiled else sch)
        for sch in (compared.change(none), none)
    )
    for tokens, counts in PAIRS.items():
        x_BTD = torch.randn(1, tokens, HIDDEN)
        values: list[float] = []
        notes: list[str] = []
        for run, name, count in zip((_forward, _step), ("forward", "step"), counts, strict=True):
            mine, other = (partial(run, module.train(run is _step), x_BTD) for module in (ours, theirs))
            torch.testing.assert_close(mine(), other(), atol=1e-4, rtol=1e-4)
            taken = pairs(mine, other, count)
            value, low, high = middle([one / another for one, another in taken])
            base, _, _ = middle([another for _, another in taken])
            values.append(value)
            notes.append(f"{name} {base * 1e6:,.0f} µs apart, {low:.2f} to {high:.2f}")
        yield Row(
            f"{compared.what}, {'compiled' if compared.compiled else 'eager'}, {tokens} token{'s' * (tokens > 1)}: "
            "forward, training step over the layers apart",
            ", ".join(f"{value:.2f}x" for value in values),
            "at most 1x",
            round(max(values), 2) <= 1,
            "; ".join(notes),
        )


@torch.no_grad()
def _bare(what: str, weights: list[Tensor]) -> Iterator[Row]:
    """What there is to gain: the matmuls, with no module around them."""
    fused = torch.cat(weights)
    for tokens, (count, _) in PAIRS.items():
        x_BTD = torch.randn(1, tokens, HIDDEN)
        taken = pairs(partial(_linear, x_BTD, [fused]), partial(_linear, x_BTD, weights), count)
        value, low, high = middle([mine / other for mine, other in taken])
        base, _, _ = middle([other for _, other in taken])
        yield Row(
            f"the bare matmuls of {what}, {tokens} token{'s' * (tokens > 1)}: one over {len(weights)}, by hand",
            f"{value:.2f}x",
            note=f"{base * 1e6:,.0f} µs apart, {low:.2f} to {high:.2f}; what there is to gain",
        )


def _linear(x_BTD: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x_BTD, weight) for weight in weights]


def _compiled(sch: slapo.Schedule) -> slapo.Schedule:
    return slapo.compile(sch, "", backend=BACKEND, dynamic=False, fullgraph=True)


def _forward(module: nn.Module, x_BTD: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(x_BTD)
    return out


def _step(module: nn.Module, x_BTD: Tensor) -> Tensor:
    given = x_BTD.detach().requires_grad_()
    out: Tensor = module(given)
    return torch.autograd.grad(out.sum(), [given, *module.parameters()])[0]
