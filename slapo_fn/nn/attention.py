"""Attention by `torch.nn.functional.scaled_dot_product_attention`, with queries, keys and values from one matmul.

softmax(q @ k.T / sqrt(H)) @ v, written out   ->   one kernel

B batch, T tokens, S tokens with the cached ones, D hidden size, N query heads, K key and value heads, H head size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._text import what
from ..errors import ArgumentError
from ._fill import number
from .qkv import FusedQKV

Cache = tuple[Tensor, Tensor]


def attend(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute attention, grouped-query or not.

    Args:
        q_BNTH: The queries.
        k_BKSH: The keys; K divides N.
        v_BKSH: The values.
        mask: What may be seen, of any shape that broadcasts to (B, N, T, S): bool, where True is seen, or floating
            point, which is added to the scores.
        causal: Whether a token sees only itself and what is before it, beside what the mask says. The last query is at
            the last key, so that S - T keys are seen by all.
        dropout: The share of the attention weights that is dropped.
        scale: What the scores are multiplied by; else 1 / sqrt(H).

    Returns:
        The context, BNTH.

    Raises:
        ArgumentError: The mask is neither bool nor floating point.

    Example:
        >>> x_BNTH = torch.randn(1, 2, 3, 4)
        >>> attend(x_BNTH, x_BNTH, x_BNTH, causal=True).shape
        torch.Size([1, 2, 3, 4])
    """
    if mask is not None:
        mask = _checked(mask, q_BNTH)
    tokens, keys = q_BNTH.shape[-2], k_BKSH.shape[-2]
    if causal and (mask is not None or (keys != tokens and tokens > 1)):
        seen_TS = torch.ones(tokens, keys, dtype=torch.bool, device=q_BNTH.device).tril(keys - tokens)
        mask = seen_TS if mask is None else _both(mask, seen_TS)
    causal = causal and mask is None and tokens > 1
    groups = q_BNTH.shape[-3] // k_BKSH.shape[-3]
    if groups > 1 and mask is not None:  # a mask and enable_gqa together leave only the slow kernel
        k_BKSH, v_BKSH = (t.repeat_interleave(groups, dim=-3) for t in (k_BKSH, v_BKSH))
    return F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1 and mask is None,
    )


def _checked(mask: Tensor, q_BNTH: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    if mask.dtype == q_BNTH.dtype:
        return mask
    if mask.is_floating_point():  # the least number of a wider dtype must not become -inf, lest a row of it give nan
        return mask.to(q_BNTH.dtype).clamp(min=torch.finfo(q_BNTH.dtype).min)
    raise ArgumentError(f"a mask is bool, True where seen, or floating point, which is added, not {mask.dtype}")


def _both(mask: Tensor, seen_TS: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask & seen_TS
    return mask.masked_fill(~seen_TS, float("-inf"))


class Attention(nn.Module):
    """Compute self-attention with its projections.

    Args:
        hidden: The size of the input and the output, D.
        heads: How many heads the queries have, N.
        kv_heads: How many the keys and the values have, K; else N.
        head_dim: The size of a head, H; else D / N.
        causal: Whether a token sees only itself and what is before it.
        dropout: The share of the attention weights that is dropped in training.
        scale: What the scores are multiplied by; else 1 / sqrt(H).
        bias: Whether queries, keys and values have a bias.
        out: Whether there is an output projection; else the context is given as it is, (B, T, N * H).
        out_bias: Whether the output projection has a bias; else as ``bias``.
        device: Where its tensors are.
        dtype: What they are.

    Raises:
        SizeError: The heads do not divide the hidden size, or K does not divide N.

    Example:
        >>> attention = Attention(8, heads=2, causal=True)
        >>> context_BTD, cache = attention(torch.randn(1, 3, 8), use_cache=True)
        >>> context_BTD, cache = attention(torch.randn(1, 1, 8), cache=cache)
        >>> cache[0].shape
        torch.Size([1, 2, 4, 4])
    """

    causal: bool
    scale: float | None
    qkv: FusedQKV

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        bias: bool = True,
        out: bool = True,
        out_bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale = causal, scale
        self.qkv = FusedQKV(hidden, heads, kv_heads, head_dim, bias, device=device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(dropout)
        self.out: nn.Module = nn.Identity()
        if out:
            width = self.qkv.out_features[0]
            self.out = nn.Linear(width, hidden, bias if out_bias is None else out_bias, device=device, dtype=dtype)

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None = None, cache: Cache | None = None, *, use_cache: bool = False
    ) -> tuple[Tensor, Cache | None]:
        """Compute it.

        Args:
            x_BTD: The input; with a cache, of the new tokens only.
            mask: See `attend`; it is beside causality, and spans the cached tokens, too.
            cache: The keys and values of the tokens before.
            use_cache: Whether to give keys and values back though no cache is given.

        Returns:
            The context BTD, and keys and values BKSH if they are asked for, else None.

        Raises:
            ArgumentError: The mask is neither bool nor floating point, or the cache is no pair of tensors.
        """
        q_BNTH, k_BKSH, v_BKSH = self.qkv(x_BTD)
        if cache is not None:
            if not isinstance(cache, tuple) or len(cache) != 2:
                raise ArgumentError(f"cache is what a call gave back, a pair of tensors, not {what(cache)}")
            k_BKSH, v_BKSH = torch.cat((cache[0], k_BKSH), dim=-2), torch.cat((cache[1], v_BKSH), dim=-2)
        context_BTD = self.mix(q_BNTH, k_BKSH, v_BKSH, mask, causal=self.causal)
        return context_BTD, (k_BKSH, v_BKSH) if use_cache or cache is not None else None

    def mix(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None = None, *, causal: bool
    ) -> Tensor:
        """Compute what follows queries, keys and values: see `attend`; joins the heads and projects, to BTD."""
        dropout = number(self.dropout, "p", 0.0) if self.training else 0.0
        context_BNTH = attend(q_BNTH, k_BKSH, v_BKSH, mask, causal=causal, dropout=dropout, scale=self.scale)
        return self.out(context_BNTH.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"causal={self.causal}" + (f", scale={self.scale}" if self.scale is not None else "")
