"""The MLPs beside those of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, T5Config
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense

from slapo_fn._layout.sources import cat, transposed
from slapo_fn.errors import MisfitError
from slapo_fn.nn import FusedMLP, GatedMLP

from .support import assert_mapped, assert_same, assert_survives

X = torch.randn(2, 3, 8, dtype=torch.float64)


def gpt2(act: str = "gelu_new", dropout: float = 0.0) -> GPT2MLP:
    return GPT2MLP(16, GPT2Config(n_embd=8, n_head=2, activation_function=act, resid_pdrop=dropout)).double()


def llama(act: str = "silu", bias: bool = False) -> LlamaMLP:
    return LlamaMLP(
        LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=16, hidden_act=act, mlp_bias=bias)
    ).double()


def t5(kind: type[nn.Module], dropout: float = 0.0) -> nn.Module:
    return kind(T5Config(d_model=8, d_ff=16, dropout_rate=dropout)).double()


CASES = {
    "gpt2": (gpt2, FusedMLP.from_gpt2),
    "llama": (llama, GatedMLP.from_llama),
    "llama with bias": (lambda: llama(bias=True), GatedMLP.from_llama),
    "t5": (lambda: t5(T5DenseActDense), FusedMLP.from_t5),
    "t5 gated": (lambda: t5(T5DenseGatedActDense), GatedMLP.from_t5),
}
EACH = pytest.mark.parametrize(("make", "replace"), CASES.values(), ids=CASES.keys())


@EACH
@pytest.mark.parametrize("training", [True, False])
def test_b270_it_equals_the_original(make, replace, training: bool) -> None:
    old = make().train(training)
    new = replace(old)
    assert all(module.training is training for module in new.modules())
    assert_mapped(old, new)
    assert_same(old, new, lambda m: m(X))


@EACH
def test_it_survives(make, replace) -> None:
    assert_survives(replace(make()), lambda m: m(X))


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"prelu", "xielu"}))
def test_b268_the_mlp_honours_its_activation(name: str) -> None:
    for made in (FusedMLP(8, 16, name, dtype=torch.float64), FusedMLP.from_gpt2(gpt2(name))):
        torch.testing.assert_close(made(X), made.fc_out(ACT2FN[name](made.fc_in(X))))
        assert made.fc_in.bias is not None
    old = llama(name)
    assert_same(old, GatedMLP.from_llama(old), lambda m: m(X))


@pytest.mark.parametrize(
    ("old", "replace"),
    [
        (gpt2(dropout=0.5), FusedMLP.from_gpt2),
        (t5(T5DenseActDense, 0.5), FusedMLP.from_t5),
        (t5(T5DenseGatedActDense, 0.5), GatedMLP.from_t5),
    ],
)
def test_b269_dropout_draws_as_the_original_and_is_off_in_eval(old, replace) -> None:
    new = replace(old.train())
    assert_same(old, new, lambda m: m(X))
    assert not torch.equal(new(X), new(X))
    new.eval()
    assert torch.equal(new(X), new(X))


def test_what_is_taken_over() -> None:
    old = gpt2().bfloat16().requires_grad_(False).eval()
    new = FusedMLP.from_gpt2(old)
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in new.parameters())
    assert new.activation is old.act
    assert new.dropout is old.dropout
    old = llama()
    assert GatedMLP.from_llama(old).down is old.down_proj


def test_the_maps() -> None:
    assert dict(FusedMLP.from_gpt2(gpt2()).weight_map.sources) == {
        "fc_in.weight": transposed("c_fc.weight"),
        "fc_in.bias": "c_fc.bias",
        "fc_out.weight": transposed("c_proj.weight"),
        "fc_out.bias": "c_proj.bias",
    }
    old = llama()
    wide = (old.gate_proj.out_features,) * 2
    assert dict(GatedMLP.from_llama(old).weight_map.sources) == {
        "gate_up.weight": cat("gate_proj.weight", "up_proj.weight", sizes=wide),
        "down.weight": "down_proj.weight",
    }


def test_it_trains_from_scratch() -> None:
    for mlp in (FusedMLP(8, 16, "relu", bias=False, dropout=0.1), GatedMLP(8, 16, bias=True, activation_dropout=0.1)):
        mlp(X.float()).sum().backward()
        assert all(p.grad is not None for p in mlp.parameters())


def test_other_modules_are_refused() -> None:
    with pytest.raises(MisfitError, match=r"GPT-2's MLP is made of c_fc.*LlamaMLP lacks c_fc"):
        FusedMLP.from_gpt2(llama())
    more = llama()
    more.norm = nn.LayerNorm(8)
    with pytest.raises(MisfitError, match="LlamaMLP has norm besides"):
        GatedMLP.from_llama(more)
    uneven = llama()
    uneven.up_proj = nn.Linear(8, 12, bias=False).double()
    with pytest.raises(MisfitError, match="not 16 and 12"):
        GatedMLP.from_llama(uneven)
    mixed = t5(T5DenseGatedActDense)
    mixed.wo.float()
    with pytest.raises(MisfitError, match=r"wo is kept in torch.float32"):
        GatedMLP.from_t5(mixed)
