"""The attention of its own: masks, causality, caches, groups, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slapo_fn.errors import ArgumentError, SizeError
from slapo_fn.nn import Attention, attend

from .support import EXACT, assert_survives

X = torch.randn(2, 5, 8, dtype=torch.float64)


def made(**options) -> Attention:
    return Attention(8, 4, dtype=torch.float64, **options)


def written_out(attention: Attention, x_BTD: Tensor, seen: Tensor) -> Tensor:
    q, k, v = attention.qkv(x_BTD)
    groups = attention.qkv.heads // attention.qkv.kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    return attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [True, False])
def test_b277_it_equals_attention_written_out(causal: bool, kv_heads: int, masked: bool) -> None:
    attention = made(causal=causal, kv_heads=kv_heads)
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    if masked:
        seen[1, ..., 3:] = False
    whole = seen & torch.ones(5, 5, dtype=torch.bool).tril() if causal else seen
    wanted = written_out(attention, X, whole)
    added = torch.zeros(2, 1, 1, 5, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    for mask in (seen, added) if masked else (None, seen, added):
        context, cache = attention(X, mask)
        assert cache is None
        torch.testing.assert_close(context, wanted, **EXACT)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1), (3, 2), (2, 1, 2)])
def test_b274_cached_keys_and_values_extend_the_sequence(kv_heads: int, steps: tuple[int, ...]) -> None:
    attention = made(causal=True, kv_heads=kv_heads)
    whole, _ = attention(X)
    cache, pieces = None, []
    for piece in X.split(steps, dim=1):
        context, cache = attention(piece, cache=cache, use_cache=True)
        pieces.append(context)
    assert [t.shape for t in cache] == [(2, kv_heads, 5, 2)] * 2
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)


def test_a_cache_and_a_padding_mask() -> None:
    attention = made(causal=True)
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    seen[1, ..., 0] = False
    whole, _ = attention(X[:, 1:], seen[..., 1:])
    _, cache = attention(X[:, :3], seen[..., :3], use_cache=True)
    context, _ = attention(X[:, 3:], seen, cache=cache)
    torch.testing.assert_close(context[1], whole[1, 2:], **EXACT)


def test_causality() -> None:
    attention = made(causal=True)
    changed = X.clone()
    changed[:, 3] += 1
    before, after = attention(X)[0], attention(changed)[0]
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def test_b271_what_is_padded_is_not_seen() -> None:
    attention = made()
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    seen[..., 4] = False
    changed = X.clone()
    changed[:, 4] += 1
    torch.testing.assert_close(attention(X, seen)[0][:, :4], attention(changed, seen)[0][:, :4], **EXACT)


def test_b271_heads_must_divide_hidden() -> None:
    with pytest.raises(SizeError, match="3 does not divide 8"):
        Attention(8, 3)
    assert isinstance(SizeError(""), ValueError)


def test_b271_without_output_projection() -> None:
    attention = Attention(8, 2, head_dim=6, out=False)
    assert attention(X.float())[0].shape == (2, 5, 12)
    assert attention(X.float(), use_cache=True)[1][0].shape == (2, 2, 5, 6)


def test_b275_dropout_is_off_in_eval() -> None:
    attention = made(dropout=0.5)
    assert not torch.equal(attention(X)[0], attention(X)[0])
    attention.eval()
    attention_without = made()
    attention_without.load_state_dict(attention.state_dict())
    torch.testing.assert_close(attention(X)[0], attention_without(X)[0], **EXACT)


def test_a_row_that_sees_nothing_gives_numbers_in_half_precision() -> None:
    hidden = torch.full((2, 1, 5, 5), torch.finfo(torch.float32).min)
    assert made().bfloat16()(X.bfloat16(), hidden)[0].isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert made().float()(X.float(), hidden)[0].isfinite().all()


def test_scale() -> None:
    q = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(attend(q, q, q, scale=0.5), attend(q * 0.5, q, q, scale=1.0))


def test_bad_masks_and_caches() -> None:
    with pytest.raises(ArgumentError, match=r"bool, True where seen.*torch.int64"):
        made()(X, torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="pair of tensors, not int"):
        made()(X, cache=3)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_survives(kv_heads: int) -> None:
    attention = made(causal=True, kv_heads=kv_heads)
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    assert_survives(attention, lambda m: m(X))
    assert_survives(attention, lambda m: m(X, seen))
    assert "causal=True" in repr(attention)
