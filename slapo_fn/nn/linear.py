"""Linear layers, fused or taken apart.

q(x), k(x), v(x)   ->   FusedLinear(x), one matmul;   linear(x)   ->   x @ W.T, then + bias

B batch, T tokens, D input features, E output features
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._layout.sources import WeightMap
from .._text import what
from ..errors import MisfitError, SizeError
from ._fill import M, fill, fused, hang_linear, sizes
from .activations import Activation, placed


class FusedLinear(nn.Module):
    """Compute several linear layers of one input in one matmul.

    Args:
        in_features: The size of the input, D.
        out_features: The size of each output, E.
        bias: Whether there is a bias.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> gate_BE, up_BE = FusedLinear(4, (8, 8))(torch.zeros(2, 4))
        >>> gate_BE.shape
        torch.Size([2, 8])
    """

    in_features: int
    out_features: tuple[int, ...]
    weight: Tensor
    weight_map: WeightMap | None = None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not out_features or any(size <= 0 for size in (in_features, *out_features)):
            raise SizeError(f"sizes are positive, not {in_features} to {tuple(out_features)}")
        self.in_features, self.out_features = in_features, tuple(out_features)
        hang_linear(self, in_features, sum(out_features), bias, device, dtype)

    @classmethod
    def from_linears(cls, *linears: nn.Module, names: Sequence[str] | None = None) -> FusedLinear:
        """Fuse some linear layers of one input.

        Args:
            linears: `nn.Linear` or ``Conv1D`` layers, all with a bias or all without.
            names: What their names are in the module to be replaced, for ``weight_map``; else 0, 1, ….

        Returns:
            The layer that gives all their outputs, in their order; its rows are theirs, bit for bit.

        Raises:
            MisfitError: They differ in input features, bias, dtype, device or ``requires_grad``.

        Example:
            >>> q, kv = nn.Linear(4, 4), nn.Linear(4, 8)
            >>> FusedLinear.from_linears(q, kv, names=("q", "kv")).weight_map.sources[1]
            ('bias', cat('q.bias', 'kv.bias', sizes=(4, 8)))
        """
        layers = dict(zip(names or map(str, range(len(linears))), linears, strict=True))
        if not layers:
            raise MisfitError("there is no layer to fuse")
        in_features, out_features, sources = fused(layers)
        return fill(FusedLinear(in_features, out_features, "bias" in sources, device="meta"), layers, sources)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Compute all of the layers.

        Args:
            x_BTD: The input, with any number of leading dimensions.

        Returns:
            One tensor (…, E) for each of ``out_features``, as views of one.
        """
        return F.linear(x_BTD, self.weight, self.bias).split_with_sizes(self.out_features, dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class LinearWithSeparateBias(nn.Linear):
    """Compute a linear layer as a matmul and then an addition, so that the addition can be fused with what follows.

    The arguments are `nn.Linear`'s, but that there always is a bias.

    Example:
        >>> LinearWithSeparateBias(4, 8)(torch.zeros(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, device=device, dtype=dtype)  # pyright: ignore[reportUnknownMemberType]

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Take over a linear layer's parameters: the same objects, under the same names.

        Args:
            linear: The layer.

        Returns:
            The layer with its bias apart.

        Raises:
            MisfitError: It has no bias, or is not a plain `nn.Linear`.

        Example:
            >>> linear = nn.Linear(4, 8)
            >>> LinearWithSeparateBias.from_linear(linear).weight is linear.weight
            True
        """
        in_features, out_features, biased = _alone(linear)
        if not biased:
            raise MisfitError(f"the {type(linear).__name__} has no bias to be set apart")
        return _take_over(cls(in_features, out_features, device="meta"), linear)

    def forward(self, input: Tensor) -> Tensor:
        """Compute x @ W.T + b in two steps: (…, D) to (…, E)."""
        return F.linear(input, self.weight) + self.bias


class LinearActivation(nn.Module):
    """Compute a linear layer, its activation and, in training, dropout.

    Args:
        in_features: The size of the input, D.
        out_features: The size of the output, E.
        activation: The activation, by name, as a function or as a module.
        bias: Whether there is a bias.
        dropout: The share of the activations that is dropped in training.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> LinearActivation(4, 8, "relu")(torch.zeros(2, 4)).min() >= 0
        tensor(True)
    """

    in_features: int
    out_features: int
    weight: Tensor
    activation: nn.Module
    dropout: nn.Dropout
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: Activation,
        bias: bool = True,
        *,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        hang_linear(self, in_features, out_features, bias, device, dtype)
        self.activation = placed(activation, self.weight)
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_linear(cls, linear: nn.Linear, activation: Activation, *, dropout: float = 0.0) -> Self:
        """Take over a linear layer's parameters: the same objects, under the same names.

        Args:
            linear: The `nn.Linear`.
            activation: The activation that follows it.
            dropout: The share of the activations that is dropped in training.

        Returns:
            The layer with its activation.

        Raises:
            MisfitError: It is not a plain `nn.Linear`.

        Example:
            >>> LinearActivation.from_linear(nn.Linear(4, 8), "gelu").activation
            GELU(approximate='none')
        """
        in_features, out_features, biased = _alone(linear)
        act = placed(activation, linear.weight)
        return _take_over(cls(in_features, out_features, act, biased, dropout=dropout, device="meta"), linear)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the layer: x_BTD, with any number of leading dimensions, to (…, E)."""
        return self.dropout(self.activation(F.linear(x_BTD, self.weight, self.bias)))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _alone(linear: nn.Linear) -> tuple[int, int, bool]:
    in_features, out_features = sizes(linear, "linear")
    if not isinstance(linear, nn.Linear):
        raise MisfitError(f"only an nn.Linear's parameters can stay the same, and this is {what(linear)}")
    return in_features, out_features, linear._parameters.get("bias") is not None


def _take_over(new: M, linear: nn.Linear) -> M:
    new._parameters.update(linear._parameters)
    return new.train(linear.training)
