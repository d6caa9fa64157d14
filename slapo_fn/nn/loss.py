"""Cross entropy of a linear layer, without ever holding all of its logits.

F.cross_entropy(F.linear(x, weight), target)   ->   linear_cross_entropy(x, weight, target)

N tokens, C tokens of one chunk, D hidden size, V vocabulary
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from .._text import what
from ..errors import ArgumentError, SizeError
from ._chunked import Options, Reduction, Wanted, chunked_loss
from ._fill import hang_linear, sizes


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk_size: int = 256,
) -> Tensor:
    """Compute the cross entropy of a linear layer chunk by chunk, gradients included.

    It is `torch.nn.functional.cross_entropy` of the logits in float32, but that only ``chunk_size`` tokens' logits exist
    at a time. For "mean" and "sum" the gradients are made along with the loss; for "none" the logits are made again in
    the backward pass. Follows https://arxiv.org/abs/2410.10989.

    Args:
        x_ND: The input, with any number of leading dimensions.
        weight_VD: The linear layer's weight.
        target_N: The class of each token, int64, of x's leading dimensions.
        bias: The linear layer's bias (V).
        ignore_index: The target of a token that does not count.
        label_smoothing: The share of the target that is spread over all classes.
        softcap: What the logits are softly bounded by: ``softcap * tanh(logits / softcap)``.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``.
        chunk_size: How many tokens' logits exist at a time, C.

    Returns:
        The loss, a scalar, or of the target's shape for "none"; float32 for half precision.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        SizeError: Shapes do not go together, or a number is out of its range.

    Example:
        >>> x_ND, weight_VD, target_N = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
        >>> loss = linear_cross_entropy(x_ND, weight_VD, target_N)
        >>> torch.allclose(loss, nn.functional.cross_entropy(x_ND @ weight_VD.T, target_N))
        True
    """
    options = Options(ignore_index, label_smoothing, softcap, reduction, chunk_size)
    _check(x_ND, weight_VD, target_N, bias, options)
    x, weight = x_ND.flatten(0, -2), weight_VD
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        wanted = Wanted(*(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)))
        loss = chunked_loss(x, weight, bias, target_N.flatten(), options, wanted)
    return loss.view(target_N.shape) if reduction == "none" else loss


class LinearCrossEntropy(nn.Module):
    """Compute a linear layer and its cross entropy, without ever holding all of its logits.

    Args:
        in_features: The size of the input, D.
        num_classes: How many classes there are, V.
        bias: Whether there is a bias.
        ignore_index: See `linear_cross_entropy`, as for all that follow.
        label_smoothing: The same.
        softcap: The same.
        reduction: The same.
        chunk_size: The same.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> loss = LinearCrossEntropy(4, 9)
        >>> loss(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)).shape
        torch.Size([])
    """

    options: Options
    weight: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        chunk_size: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.options = Options(ignore_index, label_smoothing, softcap, reduction, chunk_size)
        _check_numbers(self.options)
        hang_linear(self, in_features, num_classes, bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        chunk_size: int = 256,
    ) -> Self:
        """Take over a linear layer's parameters: the same objects, under the same names, so that ties stay.

        Args:
            linear: The layer, a language model's head say.
            ignore_index: See `linear_cross_entropy`, as for all that follow.
            label_smoothing: The same.
            softcap: The same.
            reduction: The same.
            chunk_size: The same.

        Returns:
            The layer with its loss.

        Raises:
            MisfitError: It is no plain linear layer.

        Example:
            >>> head = nn.Linear(4, 9, bias=False)
            >>> LinearCrossEntropy.from_linear(head).weight is head.weight
            True
        """
        in_features, num_classes = sizes(linear, "linear")
        made = cls(
            in_features,
            num_classes,
            linear.bias is not None,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            reduction=reduction,
            chunk_size=chunk_size,
            device="meta",
        )
        made._parameters.update(linear._parameters)
        return made.train(linear.training)

    def forward(self, x_BTD: Tensor, target_BT: Tensor) -> Tensor:
        """Compute the loss: see `linear_cross_entropy`."""
        return linear_cross_entropy(x_BTD, self.weight, target_BT, bias=self.bias, **self.options._asdict())

    def extra_repr(self) -> str:
        shape = f"in_features={self.weight.shape[1]}, num_classes={self.weight.shape[0]}, bias={self.bias is not None}"
        return ", ".join((shape, *(f"{name}={value!r}" for name, value in self.options._asdict().items())))


def _check(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, bias: Tensor | None, options: Options) -> None:
    for name, value in (("x", x_ND), ("weight", weight_VD), ("target", target_N), ("bias", bias)):
        if not isinstance(value, Tensor) and (value is not None or name != "bias"):
            raise ArgumentError(f"{name} is a tensor, not {what(value)}")
    if target_N.dtype is not torch.int64:
        raise ArgumentError(f"target is int64, the number of each token's class, not {target_N.dtype}")
    if x_ND.dim() < 2 or weight_VD.dim() != 2 or x_ND.shape[-1] != weight_VD.shape[1]:
        raise SizeError(f"x is (…, D) and weight (V, D), not {tuple(x_ND.shape)} and {tuple(weight_VD.shape)}")
    if target_N.shape != x_ND.shape[:-1]:
        raise SizeError(f"target is {tuple(x_ND.shape[:-1])}, a class for each token, not {tuple(target_N.shape)}")
    if bias is not None and bias.shape != weight_VD.shape[:1]:
        raise SizeError(f"bias is {tuple(weight_VD.shape[:1])}, not {tuple(bias.shape)}")
    _check_numbers(options)


def _check_numbers(options: Options) -> None:
    if options.reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction is 'mean', 'sum' or 'none', not {what(options.reduction)}")
    if not 0 <= options.label_smoothing <= 1:
        raise SizeError(f"label_smoothing is between 0 and 1, not {options.label_smoothing}")
    if options.softcap is not None and options.softcap <= 0:
        raise SizeError(f"softcap is positive, not {options.softcap}")
    if options.chunk_size < 1:
        raise SizeError(f"chunk_size is positive, not {options.chunk_size}")
