"""The queries, keys and values of attention from one matmul.

q(x), k(x), v(x), each cut into heads   ->   FusedQKV(x)

B batch, T tokens, D hidden size, N query heads, K key and value heads, H head size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._layout.sources import WeightMap
from ..errors import SizeError
from ._fill import fill, fused, hang_linear


class FusedQKV(nn.Module):
    """Compute queries, keys and values in one matmul, each cut into heads.

    The rows of the weight are all queries, then all keys, then all values, each head by head. Fewer heads for keys and
    values than for queries is grouped-query attention (https://arxiv.org/abs/2305.13245).

    Args:
        hidden: The size of the input, D.
        heads: How many heads the queries have, N.
        kv_heads: How many the keys and the values have, K; else N.
        head_dim: The size of a head, H; else D / N.
        bias: Whether there is a bias.
        device: Where its tensors are.
        dtype: What they are.

    Raises:
        SizeError: The heads do not divide the hidden size, or K does not divide N.

    Example:
        >>> q_BNTH, k_BKTH, v_BKTH = FusedQKV(8, heads=4, kv_heads=2)(torch.zeros(1, 3, 8))
        >>> q_BNTH.shape, k_BKTH.shape
        (torch.Size([1, 4, 3, 2]), torch.Size([1, 2, 3, 2]))
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    out_features: tuple[int, int, int]
    weight: Tensor
    weight_map: WeightMap | None = None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        if heads <= 0 or kv_heads <= 0 or heads % kv_heads:
            raise SizeError(f"kv_heads is positive and divides heads, and {kv_heads} does not divide {heads}")
        if head_dim is None and hidden % heads:
            raise SizeError(f"heads divides hidden, and {heads} does not divide {hidden}; or give head_dim")
        head_dim = hidden // heads if head_dim is None else head_dim
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.out_features = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        hang_linear(self, hidden, sum(self.out_features), bias, device, dtype)

    @classmethod
    def from_linears(
        cls,
        q: nn.Module,
        k: nn.Module,
        v: nn.Module,
        *,
        heads: int,
        kv_heads: int | None = None,
        names: Sequence[str] = ("q", "k", "v"),
    ) -> FusedQKV:
        """Fuse the layers that make queries, keys and values.

        Args:
            q: The `nn.Linear` or ``Conv1D`` for the queries.
            k: The one for the keys.
            v: The one for the values.
            heads: How many heads the queries have.
            kv_heads: How many the keys and the values have; else as many as fit their size.
            names: What the three are called in the module to be replaced, for ``weight_map``.

        Returns:
            The fused layer; its rows are theirs, bit for bit.

        Raises:
            MisfitError: They differ in input features, bias, dtype, device or ``requires_grad``.
            SizeError: The heads do not divide their sizes.

        Example:
            >>> q, k, v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
            >>> FusedQKV.from_linears(q, k, v, heads=4).kv_heads
            2
        """
        layers = dict(zip(names, (q, k, v), strict=True))
        hidden, outputs, sources = fused(layers)
        head_dim = _divided(outputs[0], heads, "the queries'")
        kv_heads = _divided(outputs[1], head_dim, "the keys'") if kv_heads is None else kv_heads
        if outputs[1:] != (kv_heads * head_dim,) * 2:
            raise SizeError(
                f"{kv_heads} heads of {head_dim} make {kv_heads * head_dim}, not {outputs[1]} and {outputs[2]}"
            )
        made = FusedQKV(hidden, heads, kv_heads, head_dim, "bias" in sources, device="meta")
        return fill(made, layers, sources)

    @classmethod
    def from_fused(cls, layer: nn.Module, *, heads: int, kv_heads: int | None = None, name: str = "c_attn") -> FusedQKV:
        """Take over a layer that makes all queries, then all keys, then all values, as GPT-2's ``c_attn`` does.

        Args:
            layer: The `nn.Linear` or ``Conv1D``.
            heads: How many heads the queries have.
            kv_heads: How many the keys and the values have; else as many.
            name: What the layer is called in the module to be replaced, for ``weight_map``.

        Returns:
            The layer; its parameters are the very same, but that a ``Conv1D``'s weight is transposed.

        Raises:
            MisfitError: It is no plain linear layer.
            SizeError: The heads do not divide its size.

        Example:
            >>> layer = nn.Linear(8, 24)
            >>> FusedQKV.from_fused(layer, heads=4).weight is layer.weight
            True
        """
        hidden, (total,), sources = fused({name: layer})
        head_dim = _divided(total, heads + 2 * (heads if kv_heads is None else kv_heads), f"{name}'s")
        made = FusedQKV(hidden, heads, kv_heads, head_dim, "bias" in sources, device="meta")
        return fill(made, {name: layer}, sources)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute them.

        Args:
            x_BTD: The input.

        Returns:
            q_BNTH, k_BKTH and v_BKTH, as views of one tensor.
        """
        q, k, v = F.linear(x_BTD, self.weight, self.bias).split_with_sizes(self.out_features, dim=-1)
        return self._cut(q, self.heads), self._cut(k, self.kv_heads), self._cut(v, self.kv_heads)

    def _cut(self, x_BTE: Tensor, heads: int) -> Tensor:
        return x_BTE.view(*x_BTE.shape[:-1], heads, self.head_dim).transpose(-3, -2)

    def extra_repr(self) -> str:
        shape = f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        return f"hidden={self.hidden}, {shape}, bias={self.bias is not None}"


def _divided(size: int, by: int, whose: str) -> int:
    if by <= 0 or size % by:
        raise SizeError(f"{whose} size {size} cannot be divided by {by}")
    return size // by
