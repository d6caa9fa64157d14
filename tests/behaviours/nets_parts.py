"""Small models whose forwards have parts worth finding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

Empty = slapo.Schedule()


class ConvBn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.conv(x)).mean((2, 3)))


class TwoLayers(nn.Module):
    """relu(b(relu(a(x)))): two places, in series."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b(F.relu(self.a(x))))


class OneLayerTwice(nn.Module):
    """The same layer at two places of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(F.relu(self.a(x))))


class LinearRelu(nn.Module):
    """What takes the place of a linear layer and its activation."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class Attention(nn.Module):
    """Three projections of one input, each cut into heads."""

    def __init__(self, size: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)
        k = self.k_proj(x).view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)
        v = self.v_proj(x).view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.permute(0, 2, 1, 3).flatten(2))


class Deep(nn.Module):
    """Places at several depths, in every container."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.ModuleDict({"u": TwoLayers()}), nn.Sequential(TwoLayers(), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        return self.tower[1](self.tower[0]["u"](x))


def linear_relu(x: Tensor) -> Tensor:
    return F.relu(slapo.call_module(nn.Linear, x))


def fused(part: Any) -> LinearRelu:
    """The same weights in one module: for `fuse(into=…)`."""
    made = LinearRelu()
    made.linear = part.calls[0]
    return made


def within(forward: Any, **attributes: Any) -> nn.Module:
    """A module with a forward, and with attributes."""
    made = type("Written", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def equal(first: nn.Module, second: nn.Module, *args: Any, close: bool = False, **kwargs: Any) -> None:
    """Outputs and gradients of two models, by the original names, are the same."""
    found = []
    for model in (first, second):
        model.zero_grad()
        inputs = [
            x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args
        ]
        torch.manual_seed(1)
        out = model(*inputs, **kwargs)
        total = sum(one.square().sum() for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, Tensor))
        assert isinstance(total, Tensor)
        total.backward()
        found.append((out, [x.grad for x in inputs if isinstance(x, Tensor)]))
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], **({} if close else {"rtol": 0, "atol": 0}))


def text(model: nn.Module) -> str:
    return str(slapo.graph_of(model))
