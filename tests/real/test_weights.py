"""Every primitive on SmolLM2-135M and MiniLM-L6 with their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

from .models import OwnGatedMLP, OwnLayerNorm, OwnMLP, OwnRMSNorm, minilm, smollm2
from .numbers import assert_as_recorded, assert_same, floats, record, step

Empty = slapo.Schedule()
pytestmark = [pytest.mark.real, pytest.mark.slow]

LLAMA = "model.layers.*"
BERT = "encoder.layer.*"


@pytest.fixture(scope="module")
def smol() -> Any:
    return smollm2()[0]


@pytest.fixture(scope="module")
def mini() -> Any:
    return minilm()[0]


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """The models are shared by all tests of this file, which is right only if none changes them."""
    names = [name for name in ("smol", "mini") if name in request.fixturenames]
    models = [request.getfixturevalue(name) for name in names]
    before = [{k: v for k, v in record(model).items() if k != "hooks"} for model in models]
    yield
    for model, one in zip(models, before, strict=True):
        model.zero_grad(set_to_none=True)
        assert_as_recorded_but_for_hooks(model, one)


def assert_as_recorded_but_for_hooks(model: nn.Module, before: dict[str, Any]) -> None:
    """transformers hooks the given model itself, at the first forward that asks for hidden states."""
    assert_as_recorded(model, {**before, "hooks": record(model)["hooks"]})


def text(name: str = "smol") -> dict[str, Tensor]:
    tokenizer = (smollm2 if name == "smol" else minilm)()[1]
    sentences = ["A schedule is data.", "The model that you gave stays as it was."]
    tokenizer.padding_side = "left" if name == "smol" else "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(sentences, return_tensors="pt", padding=True))


def own_everything(sch: slapo.Schedule) -> slapo.Schedule:
    sch = slapo.replace(sch, "**.{*_layernorm,norm}", OwnRMSNorm)
    return slapo.replace(sch, "**.mlp", OwnGatedMLP)


def test_smollm2_selecting(smol: Any) -> None:
    assert len(slapo.select(smol, LLAMA)) == 30
    assert len(slapo.select(smol, LLAMA)[::2]) == 15
    assert len(slapo.select(smol, type=type(smol.model.norm))) == 61
    assert len(slapo.select(smol, "**.{q,k,v}_proj", nn.Linear)) == 90
    assert len(slapo.select(smol, type=nn.Linear)) == 30 * 7 + 1


def test_smollm2_own_norms_and_mlps_in_float64_forward_and_backward(smol: Any) -> None:
    double = slapo.apply(smol, slapo.cast(Empty, "", torch.float64))
    out = slapo.apply(double, own_everything(Empty))
    assert set(out.state_dict()) == set(smol.state_dict())
    assert_same(step(double, text()), step(out, text()), 1e-9)


def test_smollm2_checkpointed_every_second_block_in_train_mode_with_the_default_cache(smol: Any) -> None:
    plain = slapo.apply(smol, Empty)
    assert plain.config.use_cache
    for _, attention in slapo.select(plain, "**.self_attn"):
        attention.attention_dropout = 0.1
    plain.train()
    out = slapo.apply(plain, slapo.checkpoint(Empty, slapo.select(smol, LLAMA)[::2]))
    ids = text()["input_ids"]
    found = []
    for model in (plain, out):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        given = model(input_ids=ids, labels=ids)
        given.loss.backward()
        assert given.past_key_values.get_seq_length() == ids.shape[1]
        found.append({"loss": given.loss.detach(), **{n: p.grad for n, p in model.named_parameters()}})
        model.zero_grad(set_to_none=True)
    assert_same(found[0], found[1])


def test_smollm2_generates_the_same_greedy_tokens(smol: Any) -> None:
    inputs = text()
    settings = {"max_new_tokens": 8, "do_sample": False}
    lengths: list[int] = []
    sch = slapo.checkpoint(own_everything(Empty), LLAMA)
    sch = slapo.compile(sch, slapo.select(smol, LLAMA)[-1], backend="eager")
    sch = slapo.hook(sch, "model.norm", forward=lambda m, args, output: lengths.append(output.shape[1]))
    with torch.no_grad():
        tokens = smol.generate(**inputs, **settings)
        out = slapo.apply(smol, sch)
        assert torch.equal(out.generate(**inputs, **settings), tokens)
    assert lengths[1:] == [1] * 7


def test_smollm2_frozen_embedding_stays_tied_and_the_rest_trains(smol: Any) -> None:
    sch = slapo.freeze(Empty, "model.embed_tokens")
    out = slapo.apply(smol, slapo.checkpoint(sch, LLAMA))
    assert out.lm_head.weight is out.model.embed_tokens.weight
    assert out.lm_head.weight.data_ptr() == smol.lm_head.weight.data_ptr()
    assert not out.lm_head.weight.requires_grad
    mine, theirs = step(smol, text()), step(out, text())
    assert theirs.pop("gradient of model.embed_tokens.weight") is None
    mine.pop("gradient of model.embed_tokens.weight")
    assert_same(mine, theirs)


def test_smollm2_a_fresh_head_is_refused_and_untied_on_demand(smol: Any) -> None:
    def head(old: nn.Linear) -> nn.Linear:
        return nn.Linear(old.in_features, old.out_features, bias=False)

    with pytest.raises(slapo.TieError, match=r"lm_head\.weight"):
        slapo.apply(smol, slapo.replace(Empty, "lm_head", head))
    out = slapo.apply(smol, slapo.replace(Empty, "lm_head", head, untie=True))
    assert out.lm_head.weight is not out.model.embed_tokens.weight
    assert out.model.embed_tokens.weight is smol.model.embed_tokens.weight
    assert (out.config.tie_word_embeddings, smol.config.tie_word_embeddings) == (False, True)


def test_smollm2_bfloat16_is_what_to_gives_but_for_the_rotary_table(smol: Any) -> None:
    out = slapo.apply(smol, slapo.cast(Empty, "", torch.bfloat16))
    by_hand = copy.deepcopy(smol).bfloat16()
    by_hand.model.rotary_emb.inv_freq = smol.model.rotary_emb.inv_freq
    assert out.model.rotary_emb.inv_freq is smol.model.rotary_emb.inv_freq
    assert out.lm_head.weight is out.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(out(**text()).logits, by_hand(**text()).logits)


def test_smollm2_probes_and_hidden_states_before_and_after_it_ran(smol: Any) -> None:
    seen: dict[str, Any] = {}
    with torch.no_grad():
        smol(**text())
        out = slapo.apply(smol, slapo.probe(slapo.checkpoint(Empty, LLAMA), LLAMA, seen.__setitem__))
        mine, theirs = (one(**text(), output_hidden_states=True).hidden_states for one in (smol, out))
        assert len(mine) == len(theirs) == 31
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert list(seen) == [f"model.layers.{n}" for n in range(30)]
        assert all(torch.equal(mine[n + 1], next(floats(seen[f"model.layers.{n}"]))) for n in range(29))
        after = slapo.apply(smol, slapo.replace(Empty, "**.mlp", OwnGatedMLP))
        again = after(**text(), output_hidden_states=True).hidden_states
    assert len(again) == 31
    torch.testing.assert_close(again[-1], mine[-1], rtol=1e-4, atol=1e-4)


def test_smollm2_saved_and_loaded_again(smol: Any, tmp_path: Any) -> None:
    out = slapo.apply(smol, slapo.checkpoint(slapo.compile(Empty, LLAMA, backend="eager"), LLAMA))
    assert list(out.state_dict()) == list(smol.state_dict())
    out.save_pretrained(tmp_path)
    again, info = type(smol).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert all(torch.equal(a, b) for a, b in zip(smol.state_dict().values(), again.state_dict().values(), strict=True))


def test_minilm_selecting(mini: Any) -> None:
    assert len(slapo.select(mini, BERT)) == 6
    assert len(slapo.select(mini, type=nn.LayerNorm)) == 13
    assert slapo.select(mini, type=nn.LayerNorm).paths == slapo.select(mini, "**.LayerNorm").paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minilm_own_norms_and_mlps_forward_and_backward(mini: Any, dtype: torch.dtype) -> None:
    plain = slapo.apply(mini, slapo.cast(Empty, "", dtype))
    sch = slapo.replace(Empty, nn.LayerNorm, OwnLayerNorm)
    sch = slapo.replace(sch, "**.intermediate", lambda old: OwnMLP(old, "dense", "intermediate_act_fn"))
    out = slapo.apply(plain, sch)
    assert list(out.state_dict()) == list(mini.state_dict())
    assert_same(step(plain, text("mini")), step(out, text("mini")))


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_minilm_checkpointed_and_compiled_in_train_mode(mini: Any, ran: bool) -> None:
    plain = slapo.apply(mini, slapo.cast(Empty, "", torch.float64)).train()
    if ran:
        plain(**text("mini"), output_hidden_states=True)
    out = slapo.apply(plain, slapo.checkpoint(Empty, slapo.select(mini, BERT)[::2]))
    assert_same(step(plain, text("mini")), step(out, text("mini")))
    both = slapo.apply(out, slapo.compile(Empty, slapo.select(mini, BERT)[:2], backend="eager"))
    assert_same(step(plain.eval(), text("mini")), step(both.eval(), text("mini")), 1e-9)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_minilm_saved_and_loaded_again(mini: Any, ran: bool, tmp_path: Any) -> None:
    sch = slapo.freeze(slapo.checkpoint(Empty, BERT), "embeddings")
    out = slapo.apply(mini, sch)
    if ran:
        step(out, text("mini"))
    out.save_pretrained(tmp_path)
    again = type(mini).from_pretrained(tmp_path).eval()
    assert list(again.state_dict()) == list(mini.state_dict())
    with torch.no_grad():
        mine, theirs = (one(**text("mini")).last_hidden_state for one in (mini, again))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_minilm_frozen_but_for_the_last_block(mini: Any) -> None:
    sch = slapo.unfreeze(slapo.freeze(Empty, ""), slapo.select(mini, BERT)[-1])
    out = slapo.apply(mini, slapo.checkpoint(sch, BERT))
    step_ = step(out, text("mini"))
    mine = step(mini, text("mini"))
    for name, grad in step_.items():
        if name.startswith("gradient of"):
            assert (grad is not None) == name.startswith("gradient of encoder.layer.5.")
            assert grad is None or torch.equal(grad, mine[name])
