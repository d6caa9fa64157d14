"""B115: whatever a forward takes and gives."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import slapo_fn as slapo

from .nets_parts import Empty, within

X = torch.rand(3, 4)


class Named(NamedTuple):
    first: Tensor
    second: Any = 2


@dataclasses.dataclass
class Data:
    first: Tensor
    second: Any = None


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "positional only": (lambda self, x, /, y=2: x * y, (X, 3), {}),
    "keyword only": (lambda self, x, *, z=2: x * z, (X,), {"z": 3}),
    "args": (lambda self, *args: args[0] * args[1], (X, 3), {}),
    "kwargs": (lambda self, **kwargs: kwargs["x"] * kwargs.get("z", 5), (), {"x": X}),
    "args, kwargs": (lambda self, *args, **kwargs: args[0] * kwargs["z"], (X,), {"z": 3}),
    "dtype": (lambda self, x, dtype=torch.float64: x.to(dtype), (X,), {}),
}
RESULTS: dict[str, Any] = {
    "none": lambda self, x: None,
    "same": lambda self, x: x,
    "nested": lambda self, x: [x, (x + 1, {"a": x * 2, "b": None}), 3],
    "named tuple": lambda self, x: Named(x * 2, 3),
    "dict": lambda self, x: {"a": x, 1: x + 1},
    "iteration": lambda self, x: x.split([1, 2]),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_b115_signatures(name: str) -> None:
    forward, args, kwargs = SIGNATURES[name]
    model = within(forward)
    out = slapo.apply(model, slapo.trace(Empty, ""))
    assert torch.equal(out(*args, **kwargs), model(*args, **kwargs))
    if "kwargs" not in name:
        with pytest.raises(TypeError):
            out(*args, **kwargs, unknown=1)


def test_b115_keyword_only_arguments_behind_args() -> None:
    model = within(lambda self, x, *rest, z=2: x * z + rest[0])
    out = slapo.apply(model, slapo.trace(Empty, ""))
    assert torch.equal(out(X, 5, z=3), model(X, 5, z=3))


@pytest.mark.parametrize("name", RESULTS)
def test_b115_results(name: str) -> None:
    model = within(RESULTS[name])
    out = slapo.apply(model, slapo.trace(Empty, ""))
    torch.testing.assert_close(out(X), model(X), rtol=0, atol=0)
    assert type(out(X)) is type(model(X))


def test_b115_a_dataclass_as_a_result() -> None:
    out = slapo.apply(within(lambda self, x: Data(x * 2)), slapo.trace(Empty, ""))
    assert type(out(X)) is Data
    assert torch.equal(out(X).first, X * 2)
    assert out(X).second is None
