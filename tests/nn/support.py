"""What these tests share: gradients beside an original's, and what every module survives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from slapo_fn._layout.sources import WeightMap, take

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def first(output: Tensor | tuple) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def weigh(output: Tensor | tuple) -> Tensor:
    """A number that depends on every element of an output, each in its own way."""
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if isinstance(t, Tensor)]
    return sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape).cos()).sum() for t in tensors)


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


def assert_same(
    old: nn.Module, new: nn.Module, call: Callable[[nn.Module], Tensor | tuple], tolerance: Mapping = EXACT
) -> None:
    """The two give the same output and, by the new one's map, the same gradients of every parameter."""
    results = []
    for module in (old, new):
        module.zero_grad()
        torch.manual_seed(7)
        output = call(module)
        weigh(output).backward()
        results.append((first(output).detach(), grads_of(module)))
        module.zero_grad()
    (before, old_grads), (after, new_grads) = results
    torch.testing.assert_close(after, before, **tolerance)
    sources = dict(new.weight_map.sources) if new.weight_map else {}
    assert new_grads
    for name, grad in new_grads.items():
        torch.testing.assert_close(grad, take(sources.get(name, name), old_grads), **tolerance)


def assert_mapped(old: nn.Module, new: nn.Module) -> None:
    """Each tensor is what the map says; what a plain name gives is the very same object."""
    assert isinstance(new.weight_map, WeightMap)
    sources = dict(new.weight_map.sources)
    there = old.state_dict(keep_vars=True)
    mine = new.state_dict(keep_vars=True)
    assert set(sources) <= set(mine)
    for name, tensor in mine.items():
        source = sources.get(name, name)
        taken = take(source, there)
        assert tensor is taken if isinstance(source, str) else torch.equal(tensor, taken)
        assert tensor.is_contiguous()


def assert_survives(module: nn.Module, call: Callable[[nn.Module], Tensor | tuple]) -> None:
    """A deepcopy, a pickle, a state dict and a whole graph compute the same."""
    module.eval()
    expected = first(call(module))
    assert torch.equal(first(call(copy.deepcopy(module))), expected)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(first(call(torch.load(file, weights_only=False))), expected)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(module.state_dict())
    assert torch.equal(first(call(other)), expected)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(first(call(compiled)), expected)
    weigh(call(compiled)).backward()
