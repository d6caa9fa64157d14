"""A block as Llama has it, of torch's own layers.

B batch, T tokens, D hidden size, E any layer's output size, N heads, H head size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(heads * self.head, hidden, bias=False)
        pace_H = 1e4 ** -(torch.arange(self.head) % (self.head // 2) / (self.head // 2))
        angle_TH = torch.arange(512)[:, None] * pace_H
        self.register_buffer("cos_TH", angle_TH.cos(), persistent=False)
        self.register_buffer("sin_TH", angle_TH.sin(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (self._cut(proj(x_BTD)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        causal = x_BTD.shape[1] > 1
        out = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=causal, enable_gqa=True)
        made: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return made

    def _cut(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.view(*x_BTE.shape[:-1], -1, self.head).transpose(1, 2)

    def _turn(self, x_BNTH: Tensor) -> Tensor:
        tokens = x_BNTH.shape[2]
        first, second = x_BNTH.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x_BNTH * self.get_buffer("cos_TH")[:tokens] + turned * self.get_buffer("sin_TH")[:tokens]


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a sum."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(hidden), Attention(hidden, heads, kv_heads)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(hidden), MLP(hidden, intermediate)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out
