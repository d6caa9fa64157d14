"""Every activation that transformers names, with its numbers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from slapo_fn.errors import ArgumentError
from slapo_fn.nn import activation
from slapo_fn.nn.activations import NAMES

X = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([0.0, -0.0, 1e-9, -1e-9])]).double()


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_it_equals_the_one_of_transformers(name: str) -> None:
    results = []
    for module in (ACT2FN[name], activation(name)):
        x = X.clone().requires_grad_()
        module = module.double() if name == "prelu" else module
        y = module(x)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_every_name_is_known() -> None:
    assert set(ACT2FN) <= set(NAMES)


@pytest.mark.parametrize("name", ["xielu", "prelu", "gelu", "gelu_new"])
def test_state_dict_keys_are_the_same(name: str) -> None:
    assert list(activation(name).state_dict()) == list(ACT2FN[name].state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_it_is_copied_pickled_and_compiled(name: str) -> None:
    module = activation(name)
    module = module.double() if name == "prelu" else module
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(X), module(X))
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(X), module(X))


def test_functions_modules_and_classes() -> None:
    relu = nn.ReLU()
    assert activation(relu) is relu
    assert isinstance(activation(nn.SiLU), nn.SiLU)
    assert torch.equal(activation(torch.sin)(X), X.sin())


def test_what_is_no_activation() -> None:
    with pytest.raises(ArgumentError, match="no activation 'gleu'; near ones are gelu"):
        activation("gleu")
    with pytest.raises(ArgumentError, match="there are gelu, gelu_10"):
        activation("!!!")
    with pytest.raises(ArgumentError, match="not int"):
        activation(3)
    with pytest.raises(ArgumentError, match="not the class int"):
        activation(int)


def test_transformers_is_never_imported() -> None:
    code = "import sys, slapo_fn.nn; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
