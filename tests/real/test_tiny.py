"""Every primitive on tiny models of the usual families: numbers, names, ties, and the model that was given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .models import CASES, Case, llama
from .numbers import assert_as_recorded, assert_same, floats, record, step

Empty = slapo.Schedule()
ALL = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
HF = pytest.mark.parametrize("case", [c for c in CASES.values() if c.hf], ids=[n for n, c in CASES.items() if c.hf])
TIED = pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c.tied], ids=[n for n, c in CASES.items() if c.tied]
)
GENERATES = pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c.generates], ids=[n for n, c in CASES.items() if c.generates]
)


def transformed(case: Case, schedule: slapo.Schedule, **how: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its transformed self; that the first is as it was is checked on the way."""
    model = case.model(**how)
    before = record(model)
    out = slapo.apply(model, schedule)
    assert_as_recorded(model, before)
    assert type(out) is type(model)
    return model, out


# ---- selecting


@ALL
def test_blocks_norms_and_mlps_by_path_and_by_class(case: Case) -> None:
    model = case.model()
    blocks = slapo.select(model, case.blocks)
    assert len(blocks) == case.n_blocks
    (kind,) = {type(m) for m in blocks.modules} if case.n_blocks == 4 else {type(blocks[0].module)}
    by_class = slapo.select(model, type=kind)
    assert set(by_class.paths) <= set(blocks.paths)
    norms = slapo.select(model, case.norm)
    assert len(norms) == case.n_norms
    norm_class = {type(m) for m in norms.modules}
    assert {one.__name__ for one in norm_class} == {case.norm_class}
    assert slapo.select(model, type=norm_class.pop()).paths == norms.paths
    assert len(slapo.select(model, case.mlp)) >= 1
    assert all(model.get_submodule(path) is module for path, module in slapo.select(model))


# ---- numbers


@ALL
def test_own_norms_give_the_same_numbers(case: Case) -> None:
    model, out = transformed(case, slapo.replace(Empty, case.norm, case.own_norm))
    assert len([m for m in out.modules() if type(m) is case.own_norm]) == case.n_norms
    inputs = case.inputs()
    assert_same(step(model, inputs), step(out, inputs))
    assert list(out.state_dict()) == list(model.state_dict())


@ALL
def test_own_mlps_give_the_same_numbers(case: Case) -> None:
    model, out = transformed(case, slapo.replace(Empty, case.mlp, case.own_mlp))
    inputs = case.inputs()
    assert_same(step(model, inputs), step(out, inputs), 1e-12)
    assert set(out.state_dict()) == set(model.state_dict())


@ALL
def test_checkpointing_every_second_block_in_train_mode_with_dropout(case: Case) -> None:
    model = case.model()
    blocks = slapo.select(model, case.blocks)
    before, inputs = record(model), case.inputs()
    sch = slapo.checkpoint(Empty, blocks[::2])
    out = slapo.apply(model, sch)
    assert len(slapo.plan(model, sch).steps) == case.n_blocks // 2
    assert_as_recorded(model, before)
    if not case.hf:  # batch statistics: see test_running_statistics_of_a_checkpointed_block_are_updated_once
        model, out = copy.deepcopy(model), copy.deepcopy(out)
    assert_same(step(model, inputs), step(out, inputs))


def test_running_statistics_of_a_checkpointed_block_are_updated_once() -> None:
    case = CASES["resnet"]
    plain = case.model()
    out = slapo.apply(case.model(), slapo.checkpoint(Empty, case.blocks))
    assert_same(step(plain, case.inputs()), step(out, case.inputs()))
    assert_same(dict(plain.named_buffers()), dict(out.named_buffers()))


@ALL
def test_compiled_blocks_give_the_same_numbers(case: Case) -> None:
    model, out = transformed(
        case, slapo.compile(Empty, slapo.where(case.blocks)[:: case.n_blocks - 1], backend="eager")
    )
    model.eval(), out.eval()
    assert_same(step(model, case.inputs()), step(out, case.inputs()), 1e-12)
    assert list(out.state_dict()) == list(model.state_dict())


@pytest.mark.slow
def test_a_llama_compiled_by_inductor_inside_checkpoints() -> None:
    case = CASES["llama"]
    sch = slapo.checkpoint(slapo.compile(Empty, case.blocks), case.blocks)
    model, out = transformed(case, sch)
    model.eval(), out.eval()
    assert_same(step(model, case.inputs()), step(out, case.inputs()), 1e-6)  # the norms compute in float32


@ALL
def test_frozen_blocks_have_no_gradients_and_the_others_the_same(case: Case) -> None:
    model = case.model()
    frozen = slapo.select(model, case.blocks)[:1]
    model, out = transformed(case, slapo.freeze(Empty, frozen))
    below = tuple(f"gradient of {path}." for path in frozen.paths)
    mine, theirs = step(model, case.inputs()), step(out, case.inputs())
    assert all(theirs[name] is None for name in theirs if name.startswith(below))
    assert_same(*({n: v for n, v in one.items() if not n.startswith(below)} for one in (mine, theirs)))


@ALL
def test_cast_to_bfloat16_is_what_to_does_but_for_tables(case: Case) -> None:
    model, out = transformed(case, slapo.cast(Empty, "", torch.bfloat16), dtype=torch.float32)
    by_hand = copy.deepcopy(model).bfloat16()
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            by_hand.get_submodule(path)._buffers[name] = module._buffers[name]
    for (name, mine), (_, theirs) in zip(by_hand.state_dict().items(), out.state_dict().items(), strict=True):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.inputs().items()}
    assert_same(step(by_hand, inputs), step(out, inputs))


@ALL
def test_cast_up_to_float64_and_back_is_bit_for_bit(case: Case) -> None:
    model, out = transformed(case, slapo.cast(Empty, "", torch.float64), dtype=torch.float32)
    assert {p.dtype for p in out.parameters()} == {torch.float64}
    back = slapo.apply(out, slapo.cast(Empty, "", torch.float32))
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name


@ALL
def test_probes_see_what_hooks_by_hand_see(case: Case) -> None:
    seen: dict[str, Any] = {}
    calls: list[str] = []
    sch = slapo.probe(Empty, case.blocks, seen.__setitem__)
    sch = slapo.hook(sch, case.blocks, forward_pre=lambda module, args: calls.append(type(module).__name__))
    model, out = transformed(case, sch)
    model.eval(), out.eval()
    by_hand: dict[str, Any] = {}
    for path, module in slapo.select(model, case.blocks):
        module.register_forward_hook(lambda m, args, output, path=path: by_hand.__setitem__(path, output))
    assert_same(step(model, case.inputs()), step(out, case.inputs()))
    assert list(seen) == list(by_hand)
    assert len(calls) == case.n_blocks
    for path in seen:
        for mine, theirs in zip(floats(by_hand[path]), floats(seen[path]), strict=True):
            assert torch.equal(mine, theirs)


@ALL
def test_all_in_one_schedule(case: Case) -> None:
    seen: dict[str, Any] = {}
    sch = slapo.checkpoint(Empty, slapo.where(case.blocks)[::2])
    sch = slapo.compile(sch, slapo.where(case.blocks)[:1], backend="eager")
    sch = slapo.freeze(sch, case.norm)
    sch = slapo.replace(sch, case.norm, case.own_norm)
    sch = slapo.replace(sch, case.mlp, case.own_mlp)
    sch = slapo.probe(sch, slapo.where(case.blocks)[-1], seen.__setitem__)
    model, out = transformed(case, sch)
    model.eval(), out.eval()
    for _, norm in slapo.select(model, case.norm):
        norm.requires_grad_(False)
    mine, theirs = step(model, case.inputs()), step(out, case.inputs())
    assert_same(mine, {name: theirs[name] for name in mine}, 1e-11)
    assert set(theirs) == set(mine)
    assert len(seen) == 1


# ---- models that have just run


@HF
@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("when", ["before the first forward", "after it", "after it asked for them"])
def test_hidden_states_and_attentions_before_and_after_the_first_forward(case: Case, when: str, wanted: str) -> None:
    model, inputs = case.model().eval(), case.inputs()
    if wanted == "output_attentions":
        model.set_attn_implementation("eager")
    if when != "before the first forward":
        model(**inputs, **({wanted: True} if when == "after it asked for them" else {}))
    before = record(model)
    sch = slapo.replace(Empty, case.norm, case.own_norm)
    out = slapo.apply(model, slapo.checkpoint(sch, slapo.where(case.blocks)[::2]))
    assert_as_recorded(model, before)
    mine, theirs = model(**inputs, **{wanted: True}), out(**inputs, **{wanted: True})
    assert list(mine.keys()) == list(theirs.keys())
    kind = wanted.removeprefix("output_")
    captured = [key for key in mine if kind in key]
    assert captured
    for key in captured:
        assert len(mine[key]) == len(theirs[key])
        for a, b in zip(mine[key], theirs[key], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # rows of padding are NaN in some
    again = model(**inputs, **{wanted: True})
    assert [len(again[key]) for key in captured] == [len(mine[key]) for key in captured], "nothing is captured twice"
    if kind == "hidden_states":
        grads = [torch.autograd.grad(one[captured[0]][-1].square().sum(), next(one_model.parameters()), allow_unused=True)
                 for one, one_model in ((mine, model), (theirs, out))]  # fmt: skip
        assert (grads[0][0] is None and grads[1][0] is None) or torch.equal(grads[0][0], grads[1][0])


@HF
def test_replaced_blocks_are_captured_too(case: Case) -> None:
    """A block that is put in anew after a first forward still shows up in output_hidden_states."""
    model, inputs = case.model().eval(), case.inputs()
    model(**inputs, output_hidden_states=True)
    out = slapo.apply(model, slapo.replace(Empty, case.blocks, copy.deepcopy))
    mine, theirs = model(**inputs, output_hidden_states=True), out(**inputs, output_hidden_states=True)
    for key in (key for key in mine if "hidden_states" in key):
        assert len(mine[key]) == len(theirs[key])
        for a, b in zip(mine[key], theirs[key], strict=True):
            assert torch.equal(a, b)


@ALL
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_two_schedules_in_a_row_over_a_model_that_runs_in_between(case: Case, ran: bool) -> None:
    model, inputs = case.model().eval(), case.inputs()
    first = slapo.apply(model, slapo.checkpoint(Empty, case.blocks))
    if ran:
        step(first, inputs)
    second = slapo.apply(first, slapo.replace(Empty, case.norm, case.own_norm))
    assert_same(step(model, inputs), step(second, inputs))


# ---- ties, saving, generating


@TIED
def test_ties_stay_through_every_primitive(case: Case) -> None:
    sch = slapo.checkpoint(slapo.compile(Empty, case.blocks, backend="eager"), case.blocks)
    sch = slapo.replace(slapo.replace(sch, case.norm, case.own_norm), case.mlp, case.own_mlp)
    sch = slapo.annotate(slapo.cast(sch, "", torch.bfloat16), case.tied[0].rpartition(".")[0], "weight", "mark", 1)
    model, out = transformed(case, sch)
    for one in (model, out):
        held = [one.get_submodule(name.rpartition(".")[0]).weight for name in case.tied]
        assert len({id(tensor) for tensor in held}) == 1
    assert held[0].dtype == torch.bfloat16
    assert held[0].mark == 1
    assert len(list(out.parameters())) == len(list(model.parameters()))


@TIED
def test_a_fresh_side_of_a_tie_is_refused(case: Case) -> None:
    model = case.model()
    path = case.tied[0].rpartition(".")[0]
    with pytest.raises(slapo.TieError) as refused:
        slapo.apply(model, slapo.replace(Empty, path, copy.deepcopy))
    assert len(set(refused.value.paths) & set(case.tied)) == 2


@HF
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_saved_and_loaded_again_where_nothing_was_restructured(case: Case, ran: bool, tmp_path: Any) -> None:
    sch = slapo.checkpoint(slapo.compile(Empty, slapo.where(case.blocks)[-1], backend="eager"), case.blocks)
    sch = slapo.freeze(sch, slapo.where(case.blocks)[:1])
    sch = slapo.annotate(slapo.probe(sch, case.blocks, lambda path, output: None), "", "**.weight", "mark", 1)
    model, out = transformed(case, sch)
    model.eval(), out.eval()
    inputs = case.inputs()
    if ran:
        step(out, inputs)
    assert list(out.state_dict()) == list(model.state_dict())
    out.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert list(again.state_dict()) == list(model.state_dict())
    again.config._experts_implementation = getattr(model.config, "_experts_implementation", None)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    torch.testing.assert_close(again.eval()(**inputs).logits, model(**inputs).logits, rtol=1e-12, atol=1e-12)


@ALL
def test_a_state_dict_goes_both_ways(case: Case) -> None:
    sch = slapo.checkpoint(Empty, case.blocks)
    _, out = transformed(case, sch)
    torch.manual_seed(9)
    other = case.build().double()
    assert not out.load_state_dict(other.state_dict()).missing_keys
    other.load_state_dict(out.state_dict())
    other.eval(), out.eval()
    assert_same(step(other, case.inputs()), step(out, case.inputs()), 1e-12)


@ALL
def test_copies_and_pickles_of_the_result(case: Case) -> None:
    sch = slapo.checkpoint(slapo.replace(Empty, case.norm, case.own_norm), case.blocks)
    _, out = transformed(case, sch)
    inputs = case.inputs()
    expected = step(copy.deepcopy(out), inputs)
    made = copy.deepcopy(out)
    assert not {id(p) for p in made.parameters()} & {id(p) for p in out.parameters()}
    assert_same(expected, step(made, inputs))
    assert repr(made) == repr(out)


@GENERATES
def test_generate_gives_the_same_greedy_tokens_with_a_cache(case: Case) -> None:
    model = case.model().eval()
    inputs = {k: v for k, v in case.inputs().items() if k != "decoder_input_ids"}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        tokens = model.generate(**inputs, **settings)
    lengths: list[int] = []
    sch = slapo.replace(slapo.checkpoint(Empty, case.blocks), case.norm, case.own_norm)
    out = slapo.apply(model, slapo.replace(sch, case.mlp, case.own_mlp))
    last = slapo.select(out, case.blocks)[-1].module
    last.register_forward_hook(lambda m, args, output: lengths.append(next(floats(output)).shape[1]))
    with torch.no_grad():
        assert torch.equal(out.generate(**inputs, **settings), tokens)
        assert torch.equal(model.generate(**inputs, **settings), tokens)
    assert lengths[1:] == [1] * 5, "the cache is used"


@GENERATES
def test_compiled_blocks_generate_the_same_greedy_tokens(case: Case) -> None:
    model = case.model().eval()
    inputs = {k: v for k, v in case.inputs().items() if k != "decoder_input_ids"}
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "use_cache": True}
    out = slapo.apply(model, slapo.compile(Empty, slapo.where(case.blocks)[-1], backend="eager"))
    with torch.no_grad():
        assert torch.equal(out.generate(**inputs, **settings), model.generate(**inputs, **settings))


@GENERATES
def test_training_with_the_default_cache_and_checkpointed_layers(case: Case) -> None:
    """Case 20 on every family: loss and gradients are the plain model's, and the cache is written once."""
    model = case.model()
    out = slapo.apply(model, slapo.checkpoint(Empty, case.blocks))
    inputs = case.inputs()
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    found = []
    for one in (model, out):
        one.zero_grad(set_to_none=True)
        torch.manual_seed(4)
        given = one(**inputs, labels=labels, use_cache=True)
        length = given.past_key_values.get_seq_length()
        given.loss.backward()
        grads = {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}
        found.append({"loss": given.loss.detach(), **grads})
        assert length == given.past_key_values.get_seq_length() == labels.shape[1]
    assert len(found[0]) > 10
    assert_same(found[0], found[1])


def test_gradient_checkpointing_of_transformers_and_ours_at_once() -> None:
    case = CASES["llama"]
    plain, model = case.model(), case.model()
    model.gradient_checkpointing_enable()
    out = slapo.apply(model, slapo.checkpoint(Empty, case.blocks))
    assert_same(step(plain, case.inputs()), step(out, case.inputs()))


def test_a_llama_with_tied_embeddings() -> None:
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=True).double()
    out = slapo.apply(model, slapo.cast(slapo.freeze(Empty, "lm_head"), "model.embed_tokens", torch.float32))
    assert out.lm_head.weight is out.model.embed_tokens.weight
    assert out.lm_head.weight.dtype == torch.float32
    assert not out.model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad


def test_experts_of_a_mixtral_by_parameter_name() -> None:
    model, out = transformed(CASES["mixtral"], slapo.freeze(Empty, "**.experts", "gate_up_proj"))
    assert [n for n, p in out.named_parameters() if not p.requires_grad] == [
        f"model.layers.{n}.mlp.experts.gate_up_proj" for n in range(4)
    ]
    with pytest.raises(slapo.NoMatchError, match="is a parameter"):
        slapo.select(model, "**.experts.gate_up_proj")


@pytest.mark.parametrize("forced", [False, True], ids=["plain", "hooked"])
def test_a_llama_that_accelerate_has_dispatched(forced: bool) -> None:
    """What from_pretrained(device_map="auto") gives: forwards and `to` are wrapped by accelerate."""
    from accelerate import dispatch_model

    case = CASES["llama"]
    plain = case.model()
    model = dispatch_model(case.model(), {"": "cpu"}, force_hooks=forced)
    out = slapo.apply(model, slapo.checkpoint(Empty, case.blocks))
    assert_same(step(plain, case.inputs()), step(out, case.inputs()))
    with torch.no_grad():
        for p in copy.deepcopy(out).parameters():
            p.zero_()
    assert_same(step(plain, case.inputs()), step(out, case.inputs()))
