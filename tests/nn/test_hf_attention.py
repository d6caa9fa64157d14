"""The attention in the place of transformers' own, in whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from slapo_fn._layout.sources import cat, transposed
from slapo_fn.errors import MisfitError, SizeError, UnsupportedError
from slapo_fn.nn import HFAttention

from .support import EXACT, assert_mapped, assert_same

TINY = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def gpt2(implementation: str = "sdpa", dropout: float = 0.0, **more) -> GPT2LMHeadModel:
    drop = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    config = GPT2Config(n_embd=16, n_head=4, n_layer=2, n_positions=32, **drop, **TINY, **more)
    config._attn_implementation = implementation
    return GPT2LMHeadModel(config).double()


def bert(implementation: str = "sdpa", dropout: float = 0.0, **more) -> BertModel:
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    config = BertConfig(**sizes, max_position_embeddings=32, **drop, **TINY, **more)
    config._attn_implementation = implementation
    return BertModel(config).double()


def llama(implementation: str = "sdpa", dropout: float = 0.0, **more) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2}
    config = LlamaConfig(**sizes, attention_dropout=dropout, **TINY, **more)
    config._attn_implementation = implementation
    model = LlamaForCausalLM(config)
    # Its eager softmax is in float32, where the float64 mask overflows, so that the original gives nan.
    return model if implementation == "eager" else model.double()


def replaced(model: nn.Module) -> nn.Module:
    """A copy with each self-attention exchanged."""
    model = copy.deepcopy(model)
    for block in getattr(getattr(model, "transformer", None), "h", ()):
        block.attn = HFAttention.from_gpt2(block.attn)
    for block in getattr(getattr(model, "model", None), "layers", ()):
        block.self_attn = HFAttention.from_llama(block.self_attn)
    for block in getattr(getattr(model, "encoder", None), "layer", ()):
        block.attention.self = HFAttention.from_bert(block.attention.self)
    return model


IDS = torch.randint(2, 32, (2, 6))
LEFT = torch.ones(2, 6, dtype=torch.int64)
LEFT[1, :3] = 0
X = torch.randn(2, 6, 16, dtype=torch.float64)
ROTATION = tuple(torch.randn(2, 6, 4, dtype=torch.float64) for _ in range(2))
CASES = {
    "gpt2": (lambda **o: gpt2(**o).transformer.h[1].attn, HFAttention.from_gpt2, {}),
    "bert": (lambda **o: bert(**o).encoder.layer[1].attention.self, HFAttention.from_bert, {}),
    "llama": (
        lambda **o: llama(**o).model.layers[1].self_attn,
        HFAttention.from_llama,
        {"position_embeddings": ROTATION},
    ),
}
EACH = pytest.mark.parametrize(("make", "replace", "kwargs"), CASES.values(), ids=CASES.keys())
MODELS = pytest.mark.parametrize("build", [gpt2, bert, llama])
GENERATING = pytest.mark.parametrize("build", [gpt2, llama])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


@EACH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_one_module_equals_the_original(make, replace: Callable, kwargs: dict, training: bool, masked: bool) -> None:
    old = make().train(training)
    new = replace(old)
    assert all(module.training is training for module in new.modules())
    assert_mapped(old, new)
    mask = (LEFT[:, None, None, :] == 1) if masked else None
    assert_same(old, new, lambda m: m(X, attention_mask=mask, **kwargs))


@MODELS
@IMPLEMENTATIONS
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "padded"])
def test_a_model_equals_the_original(build, implementation: str, mask: Tensor | None) -> None:
    old = build(implementation)
    new = replaced(old)
    results = []
    for model in (old, new):
        out = model(input_ids=IDS, attention_mask=mask)[0]
        shown = out if mask is None else out[mask.bool()]
        shown.square().sum().backward()
        embeddings = model.get_input_embeddings().weight.grad
        results.append((shown, embeddings))
    # Llama's norm rounds to float32 on its way, and its eager softmax, too.
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if build is llama else EXACT
    torch.testing.assert_close(results[1], results[0], **tolerance)


@MODELS
def test_b275_dropout_is_off_in_eval(build) -> None:
    old = build(dropout=0.3)
    new = replaced(old)
    assert not torch.equal(new.train()(input_ids=IDS)[0], new(input_ids=IDS)[0])
    torch.testing.assert_close(new.eval()(input_ids=IDS)[0], old.eval()(input_ids=IDS)[0], rtol=1e-6, atol=1e-6)


@GENERATING
@IMPLEMENTATIONS
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_gives_the_same_tokens(build, implementation: str, use_cache: bool) -> None:
    old = build(implementation).eval()
    options = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(replaced(old).generate(IDS, **options), old.generate(IDS, **options))


@GENERATING
def test_b274_a_cache_in_pieces(build) -> None:
    new = replaced(build()).eval()
    whole = new(IDS).logits
    for cache in (DynamicCache(config=new.config), StaticCache(config=new.config, max_cache_len=16)):
        pieces = [new(piece, cache=cache).logits for piece in IDS.split((3, 1, 2), dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


@GENERATING
def test_causality(build) -> None:
    new = replaced(build()).eval()
    changed = IDS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 32
    before, after = new(IDS).logits, new(changed).logits
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])


@MODELS
def test_what_is_padded_is_not_seen(build) -> None:
    new = replaced(build()).eval()
    changed = IDS.masked_fill(LEFT == 0, 7)
    shown = LEFT.bool()
    torch.testing.assert_close(
        new(input_ids=IDS, attention_mask=LEFT)[0][shown], new(input_ids=changed, attention_mask=LEFT)[0][shown]
    )


def test_the_two_halves_of_a_cache() -> None:
    old = gpt2().transformer.h[0].attn
    new = HFAttention.from_gpt2(old)
    results = []
    for module in (old, new):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        module(X[:, :4].contiguous(), cache=cache)
        results.append(module(X[:, 4:5].contiguous(), past_key_values=cache)[0])
        assert cache.self_attention_cache.get_seq_length() == 5
    torch.testing.assert_close(results[1], results[0], **EXACT)


def test_gpt2_scales_by_layer() -> None:
    old = gpt2(scale_attn_by_inverse_layer_idx=True).transformer.h[1].attn
    assert_same(old, HFAttention.from_gpt2(old), lambda m: m(X))


def test_a_decoding_bert_is_causal() -> None:
    old = bert(is_decoder=True).encoder.layer[0].attention.self
    assert_same(old, HFAttention.from_bert(old), lambda m: m(X))


def test_a_bias_in_queries_keys_and_values_only() -> None:
    from transformers import Qwen2Config, Qwen2Model

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    old = Qwen2Model(Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=8)).layers[0].self_attn.double()
    assert_same(old, HFAttention.from_llama(old), lambda m: m(X, position_embeddings=ROTATION, attention_mask=None))


def test_the_maps() -> None:
    old = CASES["llama"][0]()
    sizes = tuple(one.out_features for one in (old.q_proj, old.k_proj, old.v_proj))
    assert dict(HFAttention.from_llama(old).weight_map.sources) == {
        "attention.qkv.weight": cat("q_proj.weight", "k_proj.weight", "v_proj.weight", sizes=sizes),
        "attention.out.weight": "o_proj.weight",
    }
    assert dict(HFAttention.from_gpt2(CASES["gpt2"][0]()).weight_map.sources) == {
        "attention.qkv.weight": transposed("c_attn.weight"),
        "attention.qkv.bias": "c_attn.bias",
        "attention.out.weight": transposed("c_proj.weight"),
        "attention.out.bias": "c_proj.bias",
    }


def test_what_is_taken_over() -> None:
    old = CASES["llama"][0]().bfloat16().requires_grad_(False).eval()
    new = HFAttention.from_llama(old)
    assert new.attention.out is old.o_proj
    assert new.layer_idx == 1
    assert {(p.dtype, p.requires_grad) for p in new.parameters()} == {(torch.bfloat16, False)}


@EACH
def test_it_survives(make, replace: Callable, kwargs: dict) -> None:
    from .support import assert_survives

    assert_survives(replace(make()), lambda m: m(X, **kwargs))


def test_b272_what_is_not_computed_is_refused() -> None:
    new = HFAttention.from_gpt2(CASES["gpt2"][0]())
    with pytest.raises(NotImplementedError, match="output_attentions"):
        new(X, output_attentions=True)
    with pytest.raises(UnsupportedError, match="head_mask"):
        new(X, head_mask=torch.ones(4))
    with pytest.raises(UnsupportedError, match="encoder_hidden_states"):
        new(X, encoder_hidden_states=X)
    with pytest.raises(UnsupportedError, match="attn_implementation"):
        new(X, attention_mask=LEFT)
    with pytest.raises(UnsupportedError, match="cross attention"):
        HFAttention.from_gpt2(gpt2(add_cross_attention=True).transformer.h[0].crossattention)
    crossed = bert(is_decoder=True, add_cross_attention=True)
    with pytest.raises(UnsupportedError, match="cross attention"):
        HFAttention.from_bert(crossed.encoder.layer[0].crossattention.self)


def test_other_modules_are_refused() -> None:
    with pytest.raises(MisfitError, match=r"only LlamaAttention.*GPT2Attention"):
        HFAttention.from_llama(CASES["gpt2"][0]())
    with pytest.raises(MisfitError, match="is made of c_attn"):
        HFAttention.from_gpt2(CASES["bert"][0]())
    uneven = CASES["bert"][0]()
    uneven.num_attention_heads = 3
    with pytest.raises(SizeError, match="3 heads do not divide query, key, value"):
        HFAttention.from_bert(uneven)
    del uneven.num_attention_heads
    with pytest.raises(MisfitError, match="no number num_attention_heads"):
        HFAttention.from_bert(uneven)
