"""Small models that have what real ones have, and a record of a model to compare it with itself later."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a norm, an MLP and a dropout; ``B`` batch, ``T`` tokens, ``D`` features."""

    def __init__(self, d: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, 2 * d)
        self.act = nn.GELU()
        self.proj = nn.Linear(2 * d, d)
        self.proj_drop = nn.Dropout(p)
        self.scale = 1.0

    def forward(self, x_BTD: Tensor, *, shift: float = 0.0) -> Tensor:
        return x_BTD + self.proj_drop(self.proj(self.act(self.fc(self.norm(x_BTD))))) * self.scale + shift


class Stack(nn.Module):
    """An embedding, some blocks, a norm and a head that is tied to the embedding."""

    def __init__(self, depth: int = 3, d: int = 8, vocab: int = 11, p: float = 0.0, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d, p) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


class Calls:
    """A forward-pre hook that counts; it is a class so that a copied model counts in its own copy."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.count += 1


def stack(**settings: Any) -> Stack:
    """A stack in float64, seeded, so that equal means equal."""
    torch.manual_seed(0)
    return Stack(**settings).double()


def ids(*shape: int, vocab: int = 11) -> Tensor:
    """Some token ids that do not touch the global random state."""
    return torch.randint(vocab, shape or (2, 5), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, *args: Any, seed: int = 3) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output and every parameter's gradient of ``output.square().sum()``, under a seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = model(*args)
    out.square().sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return out.detach(), grads


def assert_same_numbers(model: nn.Module, other: nn.Module, *args: Any, exact: bool = True) -> None:
    """Outputs and gradients of two models are the same."""
    (out, grads), (out2, grads2) = gradients(model, *args), gradients(other, *args)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(out2, out, **tolerance)
    assert list(grads2) == list(grads)
    for name, grad in grads.items():
        assert (grad is None) == (grads2[name] is None), name
        if grad is not None:
            torch.testing.assert_close(grads2[name], grad, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def record(model: nn.Module) -> dict[str, Any]:
    """What a model is: objects, values, flags, hooks and attributes."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "modules": [(path, id(m), type(m), m.training) for path, m in model.named_modules(remove_duplicate=False)],
        "tensors": [
            (n, id(t), t.requires_grad, t.dtype, t._version, id(t.grad), sorted(t.__dict__)) for n, t in tensors
        ],
        "values": [t.detach().clone() for _, t in tensors],
        "attributes": [(path, sorted(vars(m))) for path, m in model.named_modules()],
        "hooks": [
            (path, key, [(n, id(f)) for n, f in table.items()])
            for path, m in model.named_modules()
            for key, table in vars(m).items()
            if "hooks" in key and hasattr(table, "items")
        ],
    }


def assert_as_recorded(model: nn.Module, before: dict[str, Any]) -> None:
    """A model is what it was."""
    now = record(model)
    values, old = now.pop("values"), before["values"]
    for key, value in now.items():
        assert value == before[key], key
    assert all(torch.equal(a, b) for a, b in zip(values, old, strict=True))


def random_state() -> tuple[Any, ...]:
    """Every global random state, comparable."""
    name, keys, *rest = numpy.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), *rest)
