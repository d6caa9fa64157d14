"""Convolutions with the batch norm after them folded in, for inference.

bn(conv(x))   ->   conv(x), whose weight and bias hold the batch norm's scale and shift
"""

from __future__ import annotations

import copy
from typing import NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .._text import what
from ..errors import MisfitError

C = TypeVar("C", bound=_ConvNd)


def fold_conv_bn(conv: C, bn: nn.Module) -> C:
    """Fold a batch norm in eval mode into the convolution before it.

    What it did cannot be undone, so `to_original` refuses a model with it, and names it.

    Args:
        conv: The convolution, of one to three dimensions, transposed or not.
        bn: The batch norm.

    Returns:
        A convolution of the same class that computes both, in eval mode; neither of the given is changed.

    Raises:
        MisfitError: One is in train mode, where the batch norm depends on the batch; or they do not go together.

    Example:
        >>> conv, bn = nn.Conv2d(3, 8, 3, bias=False).eval(), nn.BatchNorm2d(8).eval()
        >>> fold_conv_bn(conv, bn)
        Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    """
    mean, var, bn_weight, bn_bias, eps = _numbers(conv, bn)
    shared = [*conv.parameters(recurse=False)]
    made = copy.deepcopy(conv, {id(tensor): tensor for tensor in shared})
    weight, bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, mean, var, eps, bn_weight, bn_bias, isinstance(conv, _ConvTransposeNd)
    )
    made.register_parameter("weight", weight)
    made.register_parameter("bias", bias)
    vars(made)["weight_map"] = None  # to_original refuses it by name
    return made.eval()


class _Numbers(NamedTuple):
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def _numbers(conv: _ConvNd, bn: nn.Module) -> _Numbers:
    if not isinstance(conv, _ConvNd) or conv._parameters.get("weight") is None:
        raise MisfitError(f"what is folded into is a convolution with a weight of its own, not {what(conv)}")
    if not isinstance(bn, _BatchNorm):
        raise MisfitError(f"what is folded is a batch norm, not {what(bn)}")
    training = [name for name, module in (("conv", conv), ("bn", bn)) if module.training]
    if training:
        raise MisfitError(
            f"{' and '.join(training)} in train mode: a batch norm is folded for inference; call eval() first"
        )
    if bn.running_mean is None or bn.running_var is None:
        raise MisfitError("the batch norm keeps no running statistics, so it depends on the batch in eval mode, too")
    if bn.num_features != conv.out_channels:
        raise MisfitError(
            f"the batch norm is for {bn.num_features} channels, and the convolution gives {conv.out_channels}"
        )
    if isinstance(conv, _ConvTransposeNd) and conv.groups > 1:
        raise MisfitError("a transposed convolution in groups is not folded")
    return _Numbers(bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps)
