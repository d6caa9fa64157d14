"""Small models for the ancestor's behaviours."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Model(nn.Module):
    """fc1, act1, fc2, act2 and a submodule with a linear and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(1024, 1024)
        self.act1 = nn.ReLU()
        self.fc2 = nn.Linear(1024, 1024)
        self.act2 = nn.ReLU()
        self.submod = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.submod(self.act2(self.fc2(self.act1(self.fc1(x)))))


class Lists(nn.Module):
    """A ModuleList and a Sequential of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.mod = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.mod:
            x = one(x)
        return self.seq(x)


class Numbered(nn.Module):
    """A custom module whose children have numbers for names."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(8, 8))
        self.add_module("1", nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "1")(getattr(self, "0")(x))


class Everywhere(nn.Module):
    """Linears in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])
        self.named = nn.ModuleDict({"key": nn.Linear(8, 8)})
        self.bare = nn.Module()
        self.bare.linear = nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2)
        self.c = Numbered()


def both_gradients(first: nn.Module, second: nn.Module, *args: Tensor) -> None:
    """Outputs, input gradients and parameter gradients of two models are the same."""
    found = []
    for model in (first, second):
        inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
        wanted = [*(x for x in inputs if x.requires_grad), *(p for p in model.parameters() if p.requires_grad)]
        torch.manual_seed(1)
        out = model(*inputs)
        found.append((out, torch.autograd.grad(out.square().sum(), wanted)))
    assert torch.equal(found[0][0], found[1][0])
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(mine, theirs)
