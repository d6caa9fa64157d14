"""The trees that are transformed: blocks of twelve modules, one GELU in each, as a transformer has them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest.mock import patch

from torch import Tensor, nn

HAND = "hand-written loop, in place"


class Attention(nn.Module):
    """Four projections; 5 modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out: Tensor = self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v))
        return out


class MLP(nn.Module):
    """An MLP; 4 modules."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc, self.act, self.proj = nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(self.act(self.fc(x)))
        return out


class Block(nn.Module):
    """A transformer block; 12 modules, itself included."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Stack(nn.Module):
    """Blocks, one after the other, on the root as ``block_0``, ``block_1``, …"""

    def __init__(self, count: int, make: Callable[[], nn.Module] = lambda: Block(4, 4)) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"block_{number}", make())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


def grown(blocks: int) -> Stack:
    """A tree of small blocks, made quickly: its weights are never read, and what they are is left open."""
    gc.disable()
    try:
        with patch.object(nn.Linear, "reset_parameters", lambda linear: None):
            return Stack(blocks)
    finally:
        gc.enable()


def by_hand(model: nn.Module) -> nn.Module:
    """Replace every GELU as one writes it by hand: a loop over `named_modules`, and `setattr`."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.GELU):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, swish(module))
    return model


def swish(gelu: nn.Module) -> nn.Module:
    """What stands in a GELU's place."""
    return nn.SiLU()


class Reset:
    """Gives a tree new GELUs after it was edited in place, and itself holds none of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places = [
            (parent, name)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.GELU)
        ]

    def __call__(self) -> nn.Module:
        for parent, name in self.places:
            parent._modules[name] = nn.GELU()
        return self.model
