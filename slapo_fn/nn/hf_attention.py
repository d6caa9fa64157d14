"""Attention that stands in for a transformers module: same call, same cache, same numbers.

h.0.attn: GPT2Attention   ->   h.0.attn: HFAttention

B batch, T tokens, S tokens with the cached ones, D hidden size, N query heads, K key and value heads, H head size
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._layout.sources import Source, WeightMap
from .._text import what
from ..errors import MisfitError, SizeError, UnsupportedError
from ._fill import as_linear, below, fill, fused, number, parts
from .attention import Attention

LLAMA_LIKE = ("LlamaAttention", "MistralAttention", "Qwen2Attention")
CHANGES = ("head_mask", "position_bias", "softcap", "s_aux", "encoder_hidden_states")


class HFAttention(nn.Module):
    """Stand in for the self-attention of a transformers model.

    It needs no transformers itself: what it is given of it, a cache say, is used by its methods.

    Args:
        attention: The attention.
        layer_idx: The layer's number, by which a cache knows it.
        resid_dropout: What follows the output projection; else nothing.

    Example:
        >>> attention = HFAttention(Attention(8, heads=2, causal=True), layer_idx=0)
        >>> context_BTD, weights = attention(torch.zeros(1, 3, 8))
        >>> context_BTD.shape, weights
        (torch.Size([1, 3, 8]), None)
    """

    is_causal: bool
    weight_map: WeightMap | None = None

    def __init__(
        self, attention: Attention, layer_idx: int | None = None, resid_dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention = attention
        self.layer_idx = layer_idx
        self.is_causal = attention.causal
        self.resid_dropout: nn.Module = resid_dropout or nn.Identity()

    @classmethod
    def from_gpt2(cls, attention: nn.Module) -> HFAttention:
        """Take over GPT-2's self-attention.

        Args:
            attention: A transformers ``GPT2Attention``.

        Returns:
            The attention. The weights, which lie transposed, are copied; biases and dropouts are the very same. A model
            that is asked for attention weights gets none, for GPT-2 does not hand the question down.

        Raises:
            UnsupportedError: It is cross attention.
            MisfitError: It is made of other parts.
        """
        if getattr(attention, "is_cross_attention", False):
            raise UnsupportedError("cross attention is not replaced, only self-attention")
        names = ("c_attn", "c_proj", "attn_dropout", "resid_dropout")
        c_attn, c_proj, dropout, resid_dropout = parts(attention, names, "GPT-2's attention")
        made, sources = _made(attention, {"c_attn": c_attn}, int(number(attention, "num_heads")), causal=True)
        made.dropout = dropout
        made.out, out = as_linear(c_proj, "c_proj")
        return _stand_in(attention, made, {**sources, **below("out", out)}, resid_dropout)

    @classmethod
    def from_bert(cls, attention: nn.Module) -> HFAttention:
        """Take over BERT's self-attention, of which the output projection is no part.

        Args:
            attention: A transformers ``BertSelfAttention``.

        Returns:
            The attention. The weights of query, key and value are copied, one above the other.

        Raises:
            UnsupportedError: It is cross attention.
            MisfitError: It is made of other parts.
        """
        if "Cross" in type(attention).__name__:
            raise UnsupportedError("cross attention is not replaced, only self-attention")
        query, key, value, dropout = parts(attention, ("query", "key", "value", "dropout"), "BERT's self-attention")
        layers = {"query": query, "key": key, "value": value}
        causal = bool(getattr(attention, "is_causal", False))
        made, sources = _made(attention, layers, int(number(attention, "num_attention_heads")), causal=causal)
        made.dropout = dropout
        return _stand_in(attention, made, sources)

    @classmethod
    def from_llama(cls, attention: nn.Module) -> HFAttention:
        """Take over Llama's self-attention, grouped-query and rotary.

        Args:
            attention: A transformers ``LlamaAttention``, ``MistralAttention`` or ``Qwen2Attention``.

        Returns:
            The attention. The weights of the three projections are copied, one above the other; the output projection
            is the very same module.

        Raises:
            MisfitError: It is of another class, whose rotation or scores may differ, or made of other parts.
        """
        if type(attention).__name__ not in LLAMA_LIKE:
            raise MisfitError(f"only {', '.join(LLAMA_LIKE)} are known to compute this, not {what(attention)}")
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        q, k, v, o_proj = parts(attention, names, "Llama's attention")
        head_dim = int(number(attention, "head_dim"))
        heads = fused({"q_proj": q})[1][0] // head_dim
        made, sources = _made(attention, {"q_proj": q, "k_proj": k, "v_proj": v}, heads, causal=True)
        made.dropout = nn.Dropout(number(attention, "attention_dropout", 0.0))
        made.out, out = as_linear(o_proj, "o_proj")
        return _stand_in(attention, made, {**sources, **below("out", out)})

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute it as the module that was replaced would.

        Args:
            hidden_states: The input BTD.
            attention_mask: None, or four-dimensional: bool, where True is seen, or added to the scores. It says all,
                causality included, as the model's mask does.
            position_embeddings: Cosine and sine BTH, by which queries and keys are rotated.
            cache: A transformers cache; its ``update`` extends keys and values.
            past_key_values: The older name for it.
            output_attentions: Must not be asked for.
            kwargs: What else the model hands down; the cache is given it.

        Returns:
            The context BTD, and None in the place of the attention weights.

        Raises:
            UnsupportedError: Attention weights, a head mask, cross attention or a mask of another form are asked for.
        """
        _refuse(output_attentions, attention_mask, kwargs)
        q_BNTH, k_BKSH, v_BKSH = self.attention.qkv(hidden_states)
        if position_embeddings is not None:
            q_BNTH, k_BKSH = (rotate(t, *position_embeddings) for t in (q_BNTH, k_BKSH))
        cache = past_key_values if cache is None else cache
        if cache is not None:
            own = getattr(cache, "self_attention_cache", cache)
            k_BKSH, v_BKSH = own.update(k_BKSH, v_BKSH, self.layer_idx, kwargs=kwargs)
        causal = kwargs.get("is_causal")
        causal = self.is_causal if causal is None else bool(causal)
        tokens = q_BNTH.shape[-2]
        if causal and attention_mask is None and 1 < tokens < k_BKSH.shape[-2]:
            # A cache of a fixed size, filled from the start: what is behind is empty.
            k_BKSH, v_BKSH = k_BKSH[..., :tokens, :], v_BKSH[..., :tokens, :]
        context_BTD = self.attention.mix(
            q_BNTH, k_BKSH, v_BKSH, attention_mask, causal=causal and attention_mask is None
        )
        return self.resid_dropout(context_BTD), None

    def extra_repr(self) -> str:
        return f"layer_idx={self.layer_idx}"


def rotate(x_BNTH: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """Rotate queries or keys by their positions (https://arxiv.org/abs/2104.09864), the first half with the second.

    Args:
        x_BNTH: Queries or keys.
        cos_BTH: The cosines of the angles.
        sin_BTH: The sines.

    Returns:
        The rotated, BNTH.

    Example:
        >>> rotate(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
        tensor([[[[-1.,  1.]]]])
    """
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_BTH.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin_BTH.unsqueeze(1)


def _made(
    old: nn.Module, layers: Mapping[str, nn.Module], heads: int, *, causal: bool
) -> tuple[Attention, dict[str, Source]]:
    """An attention on the meta device without output projection, and where its ``qkv`` comes from."""
    hidden, outputs, sources = fused(layers)
    q, k, v = outputs if len(outputs) == 3 else (outputs[0] // 3,) * 3
    if q % heads or k != v or k % (q // heads) or (len(outputs) == 1 and q * 3 != outputs[0]):
        raise SizeError(f"{heads} heads do not divide {', '.join(layers)} of sizes {outputs}")
    head_dim = q // heads
    made = Attention(
        hidden,
        heads,
        kv_heads=k // head_dim,
        head_dim=head_dim,
        causal=causal,
        scale=number(old, "scaling", head_dim**-0.5),
        bias="bias" in sources,
        out=False,
        device="meta",
    )
    return made, below("qkv", sources)


def _stand_in(
    old: nn.Module, made: Attention, sources: Mapping[str, Source], resid_dropout: nn.Module | None = None
) -> HFAttention:
    layer_idx = getattr(old, "layer_idx", None)
    new = HFAttention(made, layer_idx if isinstance(layer_idx, int) else None, resid_dropout)
    return fill(new, {"": old}, below("attention", sources))


def _refuse(output_attentions: bool | None, mask: object, kwargs: Mapping[str, Any]) -> None:
    if output_attentions:
        raise UnsupportedError("attention weights are never made here, so output_attentions cannot be given")
    asked = [name for name in CHANGES if kwargs.get(name) is not None]
    if asked:
        raise UnsupportedError(
            f"{', '.join(asked)} is not computed by this attention; leave the original where it is needed"
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        raise UnsupportedError(
            "the mask is None or a tensor of four dimensions; load the model with attn_implementation='sdpa' or 'eager'"
        )
