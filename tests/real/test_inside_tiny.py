"""Places inside forwards, and layers of one input, on tiny models of the usual families: numbers, names and checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import slapo_fn as slapo

from .inside import INSIDE, Empty, Inside, assert_close, assert_same_bits, layers, original_step, schedules
from .models import ids
from .numbers import assert_as_recorded, record

EXACT = 1e-10
TABLE = {name: (sch, one) for name, sch, one in schedules()}
EVERY = pytest.mark.parametrize("name", TABLE)
ONES = pytest.mark.parametrize("one", INSIDE.values(), ids=list(INSIDE))
GENERATES = pytest.mark.parametrize(
    "one", [o for o in INSIDE.values() if o.case.generates], ids=[n for n, o in INSIDE.items() if o.case.generates]
)
IN_ALL = {"gpt2": ("gelu module", "sequential"), "bert": ("linear activation", "residual norm"), "llama": ("rms",)}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def together(one: Inside) -> slapo.Schedule:
    """Layers fused, parts replaced, and checkpointing and compiling around."""
    sch = layers(one)
    for part in IN_ALL.get(one.case.name, ()):
        sch = one.parts[part](sch)
    sch = slapo.checkpoint(sch, slapo.where(one.case.blocks)[::2])
    return slapo.compile(sch, slapo.where(one.case.blocks)[:1], backend="eager")


def prompt(one: Inside) -> dict[str, Any]:
    return {name: value for name, value in one.case.inputs().items() if name != "decoder_input_ids"}


# ---- numbers


@EVERY
def test_forward_backward_and_the_draws_of_dropout_are_the_same(name: str) -> None:
    sch, one = TABLE[name]
    model = one.case.model()
    before = record(model)
    out = slapo.apply(model, sch)
    assert_as_recorded(model, before)
    for mode in (True, False):
        model.train(mode), out.train(mode)
        mine, theirs = (original_step(each, one.case.inputs()) for each in (model, out))
        assert torch.equal(mine["random numbers afterwards"], theirs["random numbers afterwards"])
        assert_close(mine, theirs, EXACT)


@EVERY
def test_original_keys_and_values_bit_for_bit(name: str) -> None:
    sch, one = TABLE[name]
    model = one.case.model()
    state, given_back = model.state_dict(), slapo.to_original(slapo.apply(model, sch))
    assert set(given_back) == set(state)
    assert_same_bits(state, {key: given_back[key] for key in state})


@EVERY
def test_original_keys_in_the_original_order(name: str, request: pytest.FixtureRequest) -> None:
    sch, one = TABLE[name]
    model = one.case.model()
    found, wanted = list(slapo.to_original(slapo.apply(model, sch))), list(model.state_dict())
    if name in ("bert-**.{query,key,value}", "bert-attention", "opt-**.{q,k,v}_proj"):
        found, wanted = sorted(found), sorted(wanted)  # all weights of fused layers come before their biases
    assert found == wanted


@ONES
def test_all_together_and_without_any_one_entry(one: Inside) -> None:
    sch = together(one)
    model = one.case.model()
    mine = original_step(model, one.case.inputs())
    for number in (None, *range(len(sch))):
        out = slapo.apply(model, sch if number is None else slapo.drop(sch, number))
        assert_close(mine, original_step(out, one.case.inputs()), EXACT)


@ONES
def test_one_entry_at_a_time_then_others_on_the_result(one: Inside) -> None:
    model = one.case.model()
    mine, sch = original_step(model, one.case.inputs()), together(one)
    out = model
    for number in range(len(sch)):
        out = slapo.apply(out, sch[number : number + 1])
    assert_close(mine, original_step(out, one.case.inputs()), EXACT)
    back = slapo.apply(slapo.apply(out, slapo.cast(Empty, "", torch.float32)), slapo.cast(Empty, "", torch.float64))
    rounded = {key: value.float().double() for key, value in model.state_dict().items()}
    given_back = slapo.to_original(back)
    assert_same_bits(rounded, {key: given_back[key] for key in rounded})


@ONES
def test_copies_and_pickles_compute_the_same(one: Inside) -> None:
    out = slapo.apply(one.case.model().eval(), layers(one))
    mine = original_step(out, one.case.inputs())
    for again in (copy.deepcopy(out), pickle.loads(pickle.dumps(out)), slapo.apply(out, Empty)):
        assert_close(mine, original_step(again, one.case.inputs()), 0)
        assert_same_bits(slapo.to_original(out), slapo.to_original(again))


@pytest.mark.slow
def test_llama_norms_by_inductor() -> None:
    from .inside import rms

    one = INSIDE["llama"]
    model = one.case.model().eval()
    out = slapo.apply(model, slapo.fuse(Empty, slapo.pattern(rms)))
    assert_close(original_step(model, one.case.inputs()), original_step(out, one.case.inputs()), 1e-4)


# ---- traces


@ONES
def test_attention_is_refused_without_an_example_and_traced_with_one(one: Inside) -> None:
    model = one.case.model().eval()
    first = slapo.select(model, one.attention)[:1]
    with pytest.raises(slapo.TraceError, match=rf"{first.paths[0]} .*modeling_\w+\.py:\d+ ") as refused:
        slapo.apply(model, slapo.trace(Empty, first))
    assert refused.value.paths == (first.paths[0],)
    inputs = {**one.case.inputs(), "use_cache": False}
    out = slapo.apply(model, slapo.trace(Empty, first, example=inputs))
    assert [(path, type(m)) for path, m in out.named_modules()] == [
        (path, type(m)) for path, m in model.named_modules()
    ]
    assert_close(original_step(model, inputs), original_step(out, inputs), EXACT)
    if one.case.generates and "t5" not in one.case.name:  # generating, a T5 is called with more arguments
        how = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
        with torch.no_grad():
            assert torch.equal(out.generate(**prompt(one), **how), model.generate(**prompt(one), **how))


def test_t5_norms_are_found_in_what_was_traced_from_an_example() -> None:
    from .inside import t5_rms

    one = INSIDE["t5"]
    model, inputs = one.case.model().eval(), {**one.case.inputs(), "use_cache": False}
    norms = slapo.select(model, "encoder.block.*.layer.0.layer_norm")
    traced = slapo.apply(model, slapo.trace(Empty, norms, example=inputs))
    kernel = slapo.nn.Function(lambda x, weight, eps: nn.functional.rms_norm(x, weight.shape, weight, eps))
    out = slapo.apply(traced, slapo.replace(Empty, slapo.pattern(t5_rms, "encoder.block.*.layer.0.layer_norm"), kernel))
    assert_close(original_step(model, inputs), original_step(out, inputs), 1e-5)  # its own statistics are float32


# ---- generating


@GENERATES
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_greedy_tokens_of_a_padded_batch(one: Inside, use_cache: bool) -> None:
    model = one.case.model().eval()
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    parts = [one.parts[name](Empty) for name in ("attention", "mlp", "gated mlp") if name in one.parts]
    with torch.no_grad():
        tokens = model.generate(**prompt(one), **how)
        for sch in (layers(one), together(one), sum(parts, Empty)):
            assert torch.equal(slapo.apply(model, sch).generate(**prompt(one), **how), tokens)


@GENERATES
def test_beams(one: Inside) -> None:
    model = one.case.model().eval()
    how = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3}
    with torch.no_grad():
        tokens = model.generate(**prompt(one), **how)
        assert torch.equal(slapo.apply(model, layers(one)).generate(**prompt(one), **how), tokens)


# ---- checkpoints


@ONES
def test_a_plain_checkpoint_loads_into_a_scheduled_model(one: Inside) -> None:
    model = one.case.model().eval()
    torch.manual_seed(5)
    out = slapo.apply(one.case.build().double().eval(), together(one))
    assert slapo.from_original(out, model.state_dict()) == ((), ())
    assert_close(original_step(model, one.case.inputs()), original_step(out, one.case.inputs()), EXACT)


@ONES
def test_saved_in_the_original_layout_and_loaded_plain(one: Inside, tmp_path: Any) -> None:
    model = one.case.model().eval()
    out = slapo.apply(model, together(one))
    out.save_pretrained(tmp_path, state_dict=slapo.to_original(out))
    again, info = type(model).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_bits(model.state_dict(), again.state_dict())
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert len(stored.keys()) == len(list(model.parameters()))
    fresh = slapo.apply(one.case.build().double().eval(), together(one))
    assert slapo.from_original(fresh, tmp_path) == ((), ())
    assert_same_bits(slapo.to_original(out), slapo.to_original(fresh))


@ONES
def test_given_back_after_a_step_of_an_optimizer(one: Inside) -> None:
    model = one.case.model().eval()
    out = copy.deepcopy(slapo.apply(model, together(one)))
    for each in (model, out):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(**one.case.inputs()).logits.square().sum().backward()
        optimizer.step()
    mine, theirs = model.state_dict(), slapo.to_original(out)
    assert_close(dict(mine), theirs, EXACT)
    memory = [tensor.untyped_storage().data_ptr() for tensor in theirs.values()]
    assert len(set(memory)) == len({tensor.untyped_storage().data_ptr() for tensor in mine.values()})


def test_a_llama_on_the_meta_device_is_given_its_weights() -> None:
    one = INSIDE["llama"]
    model = one.case.model().eval()
    with torch.device("meta"):
        empty = one.case.build().double()
    out = slapo.apply(empty, layers(one)).eval()
    slapo.from_original(out, model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        out.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    assert_close(original_step(model, {"input_ids": ids(2, 5)}), original_step(out, {"input_ids": ids(2, 5)}), EXACT)
