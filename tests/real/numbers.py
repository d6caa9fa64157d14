"""What a model computes, flattened, so that two models can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors of an output, a cache's left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floats(item)


def step(model: nn.Module, inputs: Mapping[str, Any], seed: int = 3) -> dict[str, Tensor | None]:
    """Outputs, gradients of parameters and of floating inputs, and the buffers afterwards, of one training step."""
    model.zero_grad(set_to_none=True)
    given = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    torch.manual_seed(seed)
    outputs = list(floats(model(**given)))
    sum(one.double().square().sum() for one in outputs if one.requires_grad).backward()
    found: dict[str, Tensor | None] = {f"output {n}": one.detach() for n, one in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of input {name}": x.grad for name, x in given.items()}
    found["random numbers afterwards"] = torch.rand(1)
    model.zero_grad(set_to_none=True)
    return found


def assert_same(mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], tolerance: float = 0.0) -> None:
    """Two steps gave the same."""
    assert list(theirs) == list(mine)
    for name, value in mine.items():
        other = theirs[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def record(model: nn.Module) -> dict[str, Any]:
    """What a model is, but for what transformers itself hangs on it at its first forward."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "modules": [(path, id(m), type(m), m.training) for path, m in model.named_modules(remove_duplicate=False)],
        "tensors": [(n, id(t), t.requires_grad, t.dtype) for n, t in tensors],
        "forwards": [path for path, m in model.named_modules() if "forward" in vars(m)],
        "hooks": [
            (path, key, list(table))
            for path, m in model.named_modules()
            for key, table in vars(m).items()
            if key.endswith("_hooks") and isinstance(table, dict)
        ],
        "config": model.config.to_dict() if hasattr(model, "config") else None,
        "values": [t.detach().clone() for _, t in tensors],
    }


def assert_as_recorded(model: nn.Module, before: dict[str, Any]) -> None:
    """A model is what it was."""
    now = record(model)
    for key in now:
        if key != "values":
            assert now[key] == before[key], key
    for mine, theirs in zip(now["values"], before["values"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
