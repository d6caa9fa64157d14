"""Places inside forwards, and layers of one input, on SmolLM2-135M and MiniLM-L6 with their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_fn as slapo

from .inside import INSIDE, Empty, assert_close, assert_same_bits, layers, original_step
from .models import minilm, smollm2
from .test_weights import BERT, LLAMA, as_before, mini, smol, text  # noqa: F401  fixtures

pytestmark = [pytest.mark.real, pytest.mark.slow]
HOW = {"max_new_tokens": 8, "do_sample": False}
LLAMA_PARTS, BERT_PARTS = INSIDE["llama"].parts, INSIDE["bert"].parts
SMOL = {
    "layers": layers(INSIDE["llama"]),
    "norms and gated mlps": LLAMA_PARTS["swiglu"](LLAMA_PARTS["rms"](Empty)),
    "modules": LLAMA_PARTS["gated mlp"](LLAMA_PARTS["attention"](Empty)),
    "traces": LLAMA_PARTS["flat"](Empty),
    "checkpointed": LLAMA_PARTS["rms checkpoint"](slapo.checkpoint(layers(INSIDE["llama"]), LLAMA)),
}
MINI = {
    "layers": layers(INSIDE["bert"]),
    "linear activation": BERT_PARTS["linear activation"](Empty),
    "residual norm": BERT_PARTS["residual norm"](layers(INSIDE["bert"])),
    "decompose": BERT_PARTS["decompose"](Empty),
    "attention": BERT_PARTS["attention"](Empty),
    "checkpointed": BERT_PARTS["residual checkpoint"](slapo.checkpoint(layers(INSIDE["bert"]), BERT)),
}


def padded(name: str) -> dict[str, Any]:
    return text() if name == "smol" else text("mini")


@pytest.fixture(scope="module")
def smol_step() -> dict[str, Any]:
    return original_step(smollm2()[0].eval(), {**padded("smol"), "use_cache": False})


@pytest.fixture(scope="module")
def smol_tokens() -> dict[bool, Any]:
    with torch.no_grad():
        return {cache: smollm2()[0].generate(**padded("smol"), **HOW, use_cache=cache) for cache in (True, False)}


def relative(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of two steps, each tensor's relative to its largest value."""
    assert set(mine) == set(theirs)
    return max(float((mine[n] - theirs[n]).abs().max() / mine[n].abs().max().clamp(min=1e-30)) for n in mine)


@pytest.mark.parametrize("name", SMOL)
def test_smollm2_forward_backward_and_greedy_tokens(name: str, smol: Any, smol_step: Any, smol_tokens: Any) -> None:  # noqa: F811
    out = slapo.apply(smol, SMOL[name])
    assert relative(smol_step, original_step(out, {**padded("smol"), "use_cache": False})) < 1e-3
    with torch.no_grad():
        assert torch.equal(out.generate(**padded("smol"), **HOW), smol_tokens[True])
    state, given_back = smol.state_dict(), slapo.to_original(out)
    assert set(given_back) == set(state)
    assert_same_bits(state, {key: given_back[key] for key in state})


def test_smollm2_greedy_tokens_without_a_cache(smol: Any, smol_tokens: Any) -> None:  # noqa: F811
    out = slapo.apply(smol, SMOL["layers"])
    with torch.no_grad():
        assert torch.equal(out.generate(**padded("smol"), **HOW, use_cache=False), smol_tokens[False])


def test_smollm2_attention_traced_from_an_example(smol: Any, smol_tokens: Any) -> None:  # noqa: F811
    inputs = {**padded("smol"), "use_cache": False}
    first = slapo.select(smol, "**.self_attn")[:1]
    with pytest.raises(slapo.TraceError, match=rf"{first.paths[0]} .*modeling_llama\.py:\d+ "):
        slapo.apply(smol, slapo.trace(Empty, first))
    out = slapo.apply(smol, slapo.trace(Empty, first, example=inputs))
    with torch.no_grad():
        assert torch.equal(out.generate(**padded("smol"), **HOW, use_cache=False), smol_tokens[False])


def test_smollm2_saved_in_the_original_layout_gives_the_same_tokens(smol: Any, smol_tokens: Any, tmp_path: Any) -> None:  # noqa: F811
    out = slapo.apply(smol, slapo.checkpoint(SMOL["layers"], LLAMA))
    out.save_pretrained(tmp_path, state_dict=slapo.to_original(out))
    again, info = type(smol).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_bits(smol.state_dict(), again.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval().generate(**padded("smol"), **HOW), smol_tokens[True])
    other = slapo.apply(type(smol)(smol.config), SMOL["modules"]).eval()
    assert slapo.from_original(other, tmp_path) == ((), ())
    with torch.no_grad():
        assert torch.equal(other.generate(**padded("smol"), **HOW), smol_tokens[True])


@pytest.mark.parametrize("name", MINI)
def test_minilm_trained_in_float64_and_evaluated_in_float32(name: str, mini: Any) -> None:  # noqa: F811
    torch._dynamo.reset()
    for dtype, training, tolerance in ((torch.float64, True, 1e-9), (torch.float32, False, 1e-3)):
        plain = slapo.apply(mini, slapo.cast(Empty, "", dtype))
        out = slapo.apply(plain, MINI[name])
        steps = [original_step(one.train(training), padded("mini")) for one in (plain, out)]
        assert torch.equal(*(step["random numbers afterwards"] for step in steps))
        assert_close(*steps, tolerance)


def test_minilm_saved_in_the_original_layout(mini: Any, tmp_path: Any) -> None:  # noqa: F811
    out = slapo.apply(mini, MINI["checkpointed"])
    out.save_pretrained(tmp_path, state_dict=slapo.to_original(out))
    again = type(mini).from_pretrained(tmp_path)
    assert_same_bits(mini.state_dict(), again.state_dict())
    fresh = slapo.apply(type(minilm()[0])(mini.config), MINI["layers"])
    assert slapo.from_original(fresh, tmp_path) == ((), ())
