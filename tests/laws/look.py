"""Three ways to look at a model: what must not change, what a user sees, and what it computes."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .models import Model


def is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def bits(tensor: Tensor | None) -> bytes | None:
    """A tensor's values, bit for bit."""
    if tensor is None or is_lazy(tensor) or tensor.is_meta:
        return None
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    held = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in held if tensor is not None]


class Still:
    """A model as it stands now, by identity, with the global random states; `check` says that nothing has moved."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.keep: list[object] = []
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            found[f"module {path}"] = (id(module), type(module))
            for key, value in vars(module).items():
                self.keep.append(value)
                found[f"attribute {path}:{key}"] = (id(value), *self._inside(value))
            for name, tensor in tensors_of(module):
                grad = tensor.grad if tensor.is_leaf else None
                found[f"tensor {path}:{name}"] = (
                    id(tensor),
                    tensor._version,
                    tensor.dtype,
                    tensor.requires_grad,
                    tensor.is_leaf,
                ) + (bits(tensor), id(grad), bits(grad), dict(vars(tensor)))
        found["torch"] = torch.get_rng_state().numpy().tobytes()
        found["python"] = random.getstate()
        found["numpy"] = numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2:]
        return found

    def _inside(self, value: object) -> tuple[object, ...]:
        """What a container holds, in order, by identity; a layer around a forward counts as one."""
        if isinstance(value, dict):
            items = [(id(key), id(item)) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            items = [id(item) for item in value]
        elif hasattr(value, "inner"):
            items = [(key, id(item)) for key, item in vars(value).items() if key != "compiled"]
            items += self._inside(value.inner)
        else:
            items = []
        return tuple(items)

    def check(self) -> None:
        after = self._now()
        moved = [key for key in {**self.before, **after} if self.before.get(key) != after.get(key)]
        assert not moved, f"these changed: {moved}"


def layers(module: nn.Module) -> list[tuple[str, object]]:
    """The layers around a module's forward, outermost first, by class and args."""
    found, layer = [], vars(module).get("forward")
    while hasattr(layer, "inner"):
        assert layer.module is module, "a layer runs the module that it stands on"
        found.append((type(layer).__name__, layer.args))
        layer = layer.inner
    return found if layer is None else [*found, (type(layer).__name__, "its own")]


def hooks(module: nn.Module) -> dict[str, list[str]]:
    """Hooks in order, by kind."""
    return {
        key: [
            getattr(one := getattr(hook, "hook", hook), "__qualname__", type(one).__name__) for hook in table.values()
        ]
        for key, table in vars(module).items()
        if key.endswith("_hooks") and table
    }


def look(model: nn.Module, *, annotations: bool = True) -> dict[str, Any]:
    """All that a user can see of a model, without identities: models that look alike are the same to a user."""
    firsts: dict[int, str] = {}
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        found[path] = {
            "same as": firsts.setdefault(id(module), path),
            "class": kind,
            "training": module.training,
            "layers": layers(module),
            "hooks": hooks(module),
            **{
                name: (
                    firsts.setdefault(id(t), f"{path}:{name}"),
                    t.dtype,
                    t.requires_grad,
                    bits(t),
                    dict(vars(t)) if annotations else {},
                )
                for name, t in tensors_of(module)
            },
        }
    return found


def names(model: nn.Module) -> dict[str, Any]:
    """Everything by which a user or a file finds a thing in a model."""
    return {
        "modules": [path for path, _ in model.named_modules(remove_duplicate=False)],
        "distinct modules": [path for path, _ in model.named_modules()],
        "classes": [(m.__class__.__module__, m.__class__.__qualname__) for m in model.modules()],
        "parameters": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "distinct parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers(remove_duplicate=False)],
        "state dict": list(model.state_dict()),
        "signatures": [str(inspect.signature(m.forward)) for m in model.modules()],
        "repr": [line for line in repr(model).split("\n") if "Parameter containing" not in line],  # it tells the dtype
        "mode": [m.training for m in model.modules()],
    }


def run(model: nn.Module, row: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """Outputs and gradients of one forward and backward pass."""
    model.zero_grad()
    inputs = [x.clone().to(dtype).requires_grad_() if x.is_floating_point() else x for x in row.inputs()]
    torch.manual_seed(7)
    outputs = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    loss = sum((out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    if loss.requires_grad:
        loss.backward()
    found: dict[str, Tensor | None] = {f"output {n}": out.detach() for n, out in enumerate(outputs)}
    found.update({f"grad of input {n}": x.grad for n, x in enumerate(inputs)})
    found.update({f"grad of {name}": p.grad for name, p in model.named_parameters(remove_duplicate=False)})
    return found


def assert_same(mine: dict[str, Tensor | None], theirs: dict[str, Tensor | None], atol: float = 0.0) -> None:
    """The same names with the same numbers, bit for bit unless a tolerance is given."""
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        other = theirs[key]
        assert (value is None) == (other is None), f"{key}: {value} and {other}"
        if value is not None and other is not None:
            assert value.shape == other.shape
            near = torch.equal(value, other) if atol == 0 else torch.allclose(value.double(), other.double(), 0, atol)
            assert near, f"{key} differs by {(value.double() - other.double()).abs().max().item()}"
