"""The end of a residual branch: bias, dropout, residual and norm, written so that a compiler fuses them.

norm(residual + dropout(linear(x)))   ->   norm(residual + dropout(x @ W.T + bias)), from the bias on in one module

B batch, T tokens, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import MisfitError


class BiasDropoutResidualNorm(nn.Module):
    """Compute ``norm(residual + dropout(x + bias))``, with dropout in training only.

    Args:
        hidden: The size of the input, D.
        dropout: The share that is dropped.
        bias: Whether there is a bias.
        norm: What makes the norm for a size, `nn.LayerNorm` or `nn.RMSNorm` say.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> x_BTD = torch.randn(2, 3, 4)
        >>> BiasDropoutResidualNorm(4)(x_BTD, x_BTD).shape
        torch.Size([2, 3, 4])
    """

    norm: nn.Module
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype)) if bias else None)
        self.dropout: nn.Module = nn.Dropout(dropout)
        self.norm = norm(hidden)
        if device is not None or dtype is not None:
            self.norm.to(device, dtype)

    @classmethod
    def from_parts(cls, bias: nn.Parameter | None, dropout: nn.Module, norm: nn.Module) -> BiasDropoutResidualNorm:
        """Make it of what is there already: the very same objects.

        Args:
            bias: The bias of the linear layer before, which no longer adds it.
            dropout: The dropout.
            norm: The norm.

        Returns:
            The module, in the norm's mode.

        Raises:
            MisfitError: The bias is not a vector.

        Example:
            >>> linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
            >>> BiasDropoutResidualNorm.from_parts(linear.bias, nn.Dropout(0.1), norm).norm is norm
            True
        """
        if bias is not None and bias.dim() != 1:
            raise MisfitError(f"the bias is a vector, not of shape {tuple(bias.shape)}")
        made = cls(1, bias=False, norm=lambda _: norm)
        made.dropout = dropout
        made.register_parameter("bias", bias)
        made.training = norm.training
        return made

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor) -> Tensor:
        """Compute it: two tensors BTD to one."""
        biased_BTD = x_BTD if self.bias is None else x_BTD + self.bias
        return self.norm(self.dropout(biased_BTD) + residual_BTD)  # type: ignore[no-any-return]
