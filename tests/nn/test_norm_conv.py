"""The end of a residual branch, and folded batch norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_fn.errors import MisfitError
from slapo_fn.nn import BiasDropoutResidualNorm, fold_conv_bn

from .support import EXACT, assert_survives

X = torch.randn(2, 3, 8, dtype=torch.float64)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("training", [True, False])
def test_it_equals_its_parts(norm: type[nn.Module], training: bool) -> None:
    linear, dropout, norm_ = nn.Linear(8, 8).double(), nn.Dropout(0.3), norm(8).double().train(training)
    dropout.train(training)
    module = BiasDropoutResidualNorm.from_parts(linear.bias, dropout, norm_)
    assert module.training is training
    assert module.bias is linear.bias
    torch.manual_seed(0)
    wanted = norm_(dropout(linear(X)) + X)
    torch.manual_seed(0)
    torch.testing.assert_close(module(X @ linear.weight.T, X), wanted, **EXACT)


def test_b269_dropout_is_off_in_eval() -> None:
    module = BiasDropoutResidualNorm(8, dropout=0.5, norm=nn.RMSNorm, dtype=torch.float64)
    assert not torch.equal(module(X, X), module(X, X))
    module.eval()
    assert torch.equal(module(X, X), module(X, X))
    assert_survives(module, lambda m: m(X, X))


def test_without_bias() -> None:
    module = BiasDropoutResidualNorm(8, bias=False).double()
    torch.testing.assert_close(module(X, X), nn.functional.layer_norm(2 * X, (8,)))
    with pytest.raises(MisfitError, match="vector"):
        BiasDropoutResidualNorm.from_parts(nn.Parameter(torch.zeros(2, 2)), nn.Dropout(), nn.LayerNorm(2))


CONVS = [(nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d)]
CONVS += [(nn.ConvTranspose1d, nn.BatchNorm1d), (nn.ConvTranspose2d, nn.BatchNorm2d)]


def pair(conv: type[nn.Module], bn: type[nn.Module], affine: bool = True, **options) -> tuple[nn.Module, nn.Module]:
    made, norm = conv(4, 6, 3, **options).double(), bn(6, affine=affine).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return made.eval(), norm.eval()


@pytest.mark.parametrize(("conv", "bn"), CONVS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_folded_batch_norm(conv, bn, bias: bool, affine: bool) -> None:
    made, norm = pair(conv, bn, affine, bias=bias)
    x = torch.randn(2, 4, *(5,) * (made.weight.dim() - 2), dtype=torch.float64)
    before = made.weight.clone()
    folded = fold_conv_bn(made, norm)
    assert type(folded) is conv
    assert not folded.training
    torch.testing.assert_close(folded(x), norm(made(x)), **EXACT)
    assert torch.equal(made.weight, before)
    assert (made.bias is not None) is bias
    assert_survives(folded, lambda m: m(x))


def test_a_folded_group_convolution() -> None:
    made, norm = pair(nn.Conv2d, nn.BatchNorm2d, groups=2, stride=2, padding=1, padding_mode="reflect")
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(fold_conv_bn(made, norm)(x), norm(made(x)), **EXACT)


def test_frozenness_is_taken_over() -> None:
    made, norm = pair(nn.Conv2d, nn.BatchNorm2d)
    assert not fold_conv_bn(made.requires_grad_(False), norm).weight.requires_grad


def test_what_cannot_be_folded() -> None:
    made, norm = pair(nn.Conv2d, nn.BatchNorm2d)
    for conv, bn, said in (
        (made, pair(nn.Conv2d, nn.BatchNorm2d)[1].train(), "bn in train mode"),
        (pair(nn.Conv2d, nn.BatchNorm2d)[0].train(), norm, "conv in train mode"),
        (made, nn.BatchNorm2d(6, track_running_stats=False).eval(), "keeps no running statistics"),
        (made, nn.BatchNorm2d(5).eval(), "for 5 channels, and the convolution gives 6"),
        (nn.Linear(2, 2), norm, "a convolution with a weight of its own, not a module"),
        (made, nn.LayerNorm(6), "is a batch norm, not a module"),
        (nn.ConvTranspose2d(4, 6, 3, groups=2).eval(), norm, "transposed convolution in groups"),
    ):
        with pytest.raises(MisfitError, match=said):
            fold_conv_bn(conv, bn)
