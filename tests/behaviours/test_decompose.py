"""B092-B095: take a linear layer apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .nets_parts import Empty, TwoLayers, equal, text

X = torch.rand(3, 4)
MODES = pytest.mark.parametrize("inplace", [False, True])


@MODES
def test_b092_a_matmul_then_the_bias_on_the_same_parameters(inplace: bool) -> None:
    model = TwoLayers().double()
    weights, keys = list(model.parameters()), list(model.state_dict())
    reference = copy.deepcopy(model)
    out = slapo.apply(model, slapo.decompose(Empty, nn.Linear), inplace=inplace)
    equal(reference, out, X.double(), close=True)
    assert all(mine is theirs for mine, theirs in zip(out.parameters(), weights, strict=True))
    assert list(out.state_dict()) == keys
    assert isinstance(out.a, nn.Linear)
    assert (out.a.in_features, out.a.out_features) == (4, 4)
    assert text(out.a).count("+") == 1


def test_b092_ties_frozenness_and_marks_stay() -> None:
    model = TwoLayers()
    model.b.weight = model.a.weight
    model.a.bias.requires_grad_(False)
    out = slapo.apply(model, slapo.decompose(Empty, nn.Linear))
    assert out.a.weight is out.b.weight is model.a.weight
    assert [one.requires_grad for one in out.parameters()] == [True, False, True]


def test_b092_hooks_checkpointing_and_mode_stay() -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].register_forward_hook(lambda module, args, output: ran.append("hook"))
    out = slapo.apply(model, slapo.checkpoint(slapo.decompose(Empty, "0"), "0"))
    equal(model, out, X, close=True)
    assert ran == ["hook"] * 2
    assert not out[0].training


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 4, 1), nn.ReLU(), nn.Bilinear(4, 4, 4)])
def test_b093_anything_but_a_linear_is_refused(layer: nn.Module) -> None:
    with pytest.raises(slapo.MisfitError, match=f"0 is a {type(layer).__name__}; only an nn.Linear"):
        slapo.apply(nn.Sequential(layer), slapo.decompose(Empty, "0"))


def test_b093_a_lazy_linear_is_refused_with_a_reason() -> None:
    with pytest.raises(slapo.SlapoError, match="0"):
        slapo.apply(nn.Sequential(nn.LazyLinear(4)), slapo.decompose(Empty, "0"))


def test_b093_a_subclass_with_a_forward_of_its_own_is_refused() -> None:
    class Doubles(nn.Linear):
        def forward(self, input: Any) -> Any:
            return super().forward(input) * 2

    with pytest.raises(slapo.MisfitError, match="Doubles"):
        slapo.apply(nn.Sequential(Doubles(4, 4)), slapo.decompose(Empty, "0"))


def test_b093_a_parametrized_layer_keeps_its_parametrization_or_is_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    try:
        out = slapo.apply(model, slapo.decompose(Empty, "0"))
    except slapo.SlapoError:
        return
    assert list(out.state_dict()) == list(model.state_dict())
    equal(model, out, X, close=True)


@MODES
def test_b095_a_linear_without_bias_stays_as_it_is(inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    out = slapo.apply(model, slapo.decompose(Empty, "0"), inplace=inplace)
    assert type(out[0]) is nn.Linear
    assert torch.equal(out(X), model(X))


def test_b092_twice_is_once_and_the_parts_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sch = slapo.decompose(slapo.decompose(Empty, "*"), "*")
    out = slapo.apply(model, sch)
    equal(model, out, X, close=True)
    found = slapo.select(out, slapo.pattern(lambda x, bias: x + bias, within="*"))
    assert len(found) == 2


def test_b092_pickled_and_deep_copied_it_runs_its_own_weights() -> None:
    out = slapo.apply(nn.Sequential(nn.Linear(4, 4)), slapo.decompose(Empty, "0"))
    copied = copy.deepcopy(out)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert torch.equal(copied(X), copied[0].bias.expand(3, 4))
    assert not torch.equal(copied(X), out(X))
