"""Fused linear layers, and linear layers with what follows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from slapo_fn._layout.sources import cat, transposed
from slapo_fn.errors import ArgumentError, MisfitError, SizeError
from slapo_fn.nn import FusedLinear, FusedQKV, LinearActivation, LinearWithSeparateBias

from .support import EXACT, assert_survives

X = torch.randn(2, 3, 8, dtype=torch.float64)


def linear(out: int, bias: bool = True, inputs: int = 8, dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(inputs, out, bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_fused_rows_are_the_parts_bit_for_bit(bias: bool) -> None:
    a, b = linear(4, bias), linear(6, bias)
    fused = FusedLinear.from_linears(a, b)
    assert torch.equal(fused.weight, torch.cat([a.weight, b.weight]))
    assert (fused.bias is None) is not bias
    for got, part in zip(fused(X), (a, b), strict=True):
        torch.testing.assert_close(got, part(X), **EXACT)


def test_fused_gradients() -> None:
    a, b = linear(4), linear(6)
    fused = FusedLinear.from_linears(a, b)
    sum(out.square().sum() for out in fused(X)).backward()
    (a(X).square().sum() + b(X).square().sum()).backward()
    torch.testing.assert_close(fused.weight.grad, torch.cat([a.weight.grad, b.weight.grad]), **EXACT)
    torch.testing.assert_close(fused.bias.grad, torch.cat([a.bias.grad, b.bias.grad]), **EXACT)


def test_the_map_says_where_rows_come_from() -> None:
    fused = FusedLinear.from_linears(linear(4), linear(6), names=("a", "b"))
    weight, bias = cat("a.weight", "b.weight", sizes=(4, 6)), cat("a.bias", "b.bias", sizes=(4, 6))
    assert dict(fused.weight_map.sources) == {"weight": weight, "bias": bias}


def test_conv1d_parts_lie_transposed() -> None:
    conv = Conv1D(4, 8).double()
    fused = FusedLinear.from_linears(conv, linear(6))
    assert fused.weight_map.sources[0][1] == cat(transposed("0.weight"), "1.weight", sizes=(4, 6))
    torch.testing.assert_close(fused(X)[0], conv(X), **EXACT)


def test_mode_and_frozenness_are_taken_over() -> None:
    a, b = linear(4).requires_grad_(False).eval(), linear(4).requires_grad_(False).eval()
    fused = FusedLinear.from_linears(a, b)
    assert not fused.training
    assert not fused.weight.requires_grad
    assert fused.weight.dtype is torch.float64


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (linear(4, bias=False), "agree in bias: 0 has True, 1 has False"),
        (linear(4, inputs=6), "agree in in_features: 0 has 8, 1 has 6"),
        (linear(4, dtype=torch.float32), "agree in dtype: 0.weight has torch.float64, 1.weight has torch.float32"),
        (linear(4).to("meta"), "agree in device: 0.weight has cpu"),
        (linear(4).requires_grad_(False), "agree in requires_grad: 0.weight has True, 1.weight has False"),
        (nn.ReLU(), "1 is a plain nn.Linear or a Conv1D"),
        (nn.utils.parametrizations.weight_norm(linear(4)), "1 is a plain nn.Linear or a Conv1D"),
    ],
)
def test_what_does_not_go_together_is_named(other: nn.Module, said: str) -> None:
    with pytest.raises(MisfitError, match=said):
        FusedLinear.from_linears(linear(4), other)


def test_nothing_to_fuse() -> None:
    with pytest.raises(MisfitError, match="no layer"):
        FusedLinear.from_linears()
    with pytest.raises(SizeError, match="positive"):
        FusedLinear(4, ())


def test_making_one_from_another_draws_no_random_number() -> None:
    parts = linear(4), linear(4)
    state = torch.get_rng_state()
    FusedLinear.from_linears(*parts)
    LinearWithSeparateBias.from_linear(parts[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_bias_apart() -> None:
    old = linear(4)
    new = LinearWithSeparateBias.from_linear(old)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert list(new.state_dict()) == list(old.state_dict())
    assert (new.in_features, new.out_features) == (8, 4)
    torch.testing.assert_close(new(X), old(X), **EXACT)
    with pytest.raises(MisfitError, match="no bias"):
        LinearWithSeparateBias.from_linear(linear(4, bias=False))
    with pytest.raises(MisfitError, match="parameters can stay the same"):
        LinearWithSeparateBias.from_linear(Conv1D(4, 8))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu"])
def test_b267_linear_and_activation(name: str, bias: bool) -> None:
    from transformers.activations import ACT2FN

    old = linear(4, bias)
    new = LinearActivation.from_linear(old, name)
    assert new.weight is old.weight
    torch.testing.assert_close(new(X), ACT2FN[name](old(X)), **EXACT)


def test_b269_dropout_after_linear_is_off_in_eval() -> None:
    new = LinearActivation(8, 400, "linear", dropout=0.5, dtype=torch.float64)
    assert (new(X) == 0).float().mean() > 0.4
    assert (new.eval()(X) == 0).sum() == 0


def test_an_activation_made_by_name_is_of_the_layers_dtype() -> None:
    assert LinearActivation.from_linear(linear(4), "prelu")(X).dtype is torch.float64
    assert LinearActivation(8, 4, "prelu", dtype=torch.float64)(X).dtype is torch.float64


def test_an_unknown_activation() -> None:
    with pytest.raises(ArgumentError, match="near ones are gelu_new"):
        LinearActivation(8, 4, "gelu_neu")


def qkv(kv: int = 8, bias: bool = True) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return linear(8, bias), linear(kv, bias), linear(kv, bias)


@pytest.mark.parametrize("kv", [8, 4, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_b265_queries_keys_and_values_in_heads(kv: int, bias: bool) -> None:
    parts = qkv(kv, bias)
    fused = FusedQKV.from_linears(*parts, heads=4)
    assert (fused.heads, fused.kv_heads, fused.head_dim) == (4, kv // 2, 2)
    for got, part in zip(fused(X), parts, strict=True):
        torch.testing.assert_close(got, part(X).unflatten(-1, (-1, 2)).transpose(1, 2), **EXACT)
    assert torch.equal(fused.weight, torch.cat([part.weight for part in parts]))


def test_qkv_from_a_fused_layer() -> None:
    c_attn = Conv1D(24, 8).double()
    fused = FusedQKV.from_fused(c_attn, heads=4)
    assert fused.bias is c_attn.bias
    assert dict(fused.weight_map.sources) == {"weight": transposed("c_attn.weight"), "bias": "c_attn.bias"}
    wanted = [t.unflatten(-1, (4, 2)).transpose(1, 2) for t in c_attn(X).split(8, -1)]
    for got, expected in zip(fused(X), wanted, strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


def test_heads_must_divide() -> None:
    with pytest.raises(SizeError, match="3 does not divide 8"):
        FusedQKV(8, 3)
    with pytest.raises(ValueError, match="kv_heads is positive and divides heads"):
        FusedQKV(8, 4, 3)
    with pytest.raises(SizeError, match="the queries' size 8"):
        FusedQKV.from_linears(*qkv(), heads=3)
    with pytest.raises(SizeError, match="c_attn's size 24"):
        FusedQKV.from_fused(Conv1D(24, 8), heads=5)
    with pytest.raises(SizeError, match="2 heads of 2 make 4, not 8 and 8"):
        FusedQKV.from_linears(*qkv(), heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "module",
    [
        FusedLinear.from_linears(linear(4), linear(4)),
        LinearWithSeparateBias.from_linear(linear(4)),
        LinearActivation.from_linear(linear(4), "gelu_new", dropout=0.1),
        FusedQKV.from_linears(*qkv(4), heads=4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_it_survives(module: nn.Module) -> None:
    assert_survives(module, lambda m: m(X))
    assert type(module).__name__ in repr(module)
