"""Cases 8-16: what people hit when they replace modules, and the right answer."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import slapo_fn as slapo

from .support import Block, Stack, assert_as_recorded, assert_same_numbers, gradients, ids, random_state, record, stack

Empty = slapo.Schedule()


class OwnNorm(nn.Module):
    """A LayerNorm written out, over the old one's tensors."""

    def __init__(self, old: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = old.weight, old.bias, old.eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


# ---- 8: one instance for three sites


def three_norms() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(3)])
    for norm in model:
        nn.init.normal_(norm.weight)
    return model


def test_case_08_a_template_gives_each_site_a_module_of_its_own_with_the_old_weights() -> None:
    model, template = three_norms(), nn.LayerNorm(8, eps=1e-3)
    before = record(template)
    out = slapo.apply(model, slapo.replace(Empty, nn.LayerNorm, template))
    assert len({id(norm) for norm in out}) == 3
    assert template not in list(out)
    for new, old in zip(out, model, strict=True):
        assert new is not old
        assert new.eps == 1e-3
        assert new.weight is old.weight
        assert new.bias is old.bias
    assert_as_recorded(template, before)


def test_case_08_modules_inside_a_template_are_each_site_s_own_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    template = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    out = slapo.apply(model, slapo.replace(Empty, "*", template, weights="fresh"))
    assert out[0][0] is not out[1][0]
    assert out[0][0].weight is not out[1][0].weight
    assert out[0][0].weight is not template[0].weight
    assert torch.equal(out[0][0].weight, template[0].weight)


def test_case_08_share_makes_them_one_on_purpose() -> None:
    model = three_norms()
    template = nn.LayerNorm(8)
    out = slapo.apply(model, slapo.replace(Empty, nn.LayerNorm, template, share=True))
    assert out[0] is out[1] is out[2]
    assert out[0].weight is not template.weight, "the caller's own template is not in the result"
    assert torch.equal(out[0].weight, template.weight)
    again = slapo.apply(model, slapo.replace(Empty, nn.LayerNorm, template, share=True))
    assert again[0] is not out[0], "nor is it shared by two results"


def test_case_08_a_factory_that_gives_one_instance_twice_is_refused_unless_shared() -> None:
    model, one = three_norms(), nn.LayerNorm(8)
    before = record(model)
    with pytest.raises(slapo.SlapoError, match="share=True"):
        slapo.apply(model, slapo.replace(Empty, nn.LayerNorm, lambda old: one))
    assert_as_recorded(model, before)
    out = slapo.apply(model, slapo.replace(Empty, nn.LayerNorm, lambda old: one, share=True))
    assert out[0] is out[1] is out[2]


# ---- 9: mode, dtype, device, frozenness


@pytest.mark.parametrize("inplace", [False, True])
def test_case_09_a_factory_s_linear_is_eval_bf16_and_frozen_like_the_old_one(inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval().bfloat16()
    model[0].requires_grad_(False)
    sch = slapo.replace(Empty, nn.Linear, lambda old: nn.Linear(old.in_features, old.out_features))
    out = slapo.apply(model, sch, inplace=inplace)
    for place, frozen in ((0, True), (2, False)):
        assert not out[place].training
        for name in ("weight", "bias"):
            tensor = getattr(out[place], name)
            assert tensor.dtype == torch.bfloat16
            assert tensor.device == torch.device("cpu")
            assert tensor.requires_grad is not frozen
            assert tensor.is_leaf
            assert isinstance(tensor, nn.Parameter)


def test_case_09_only_the_bias_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    out = slapo.apply(model, slapo.replace(Empty, "0", lambda old: nn.Linear(4, 4)))
    assert (out[0].weight.requires_grad, out[0].bias.requires_grad) == (True, False)


def test_case_09_the_device_of_the_old_one_meta_included() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("meta")
    sch = slapo.replace(Empty, "0", lambda old: nn.Linear(4, 4))
    sch = slapo.replace(sch, "1", lambda old: nn.BatchNorm1d(4))
    out = slapo.apply(model, sch)
    assert {tensor.device.type for tensor in (*out.parameters(), *out.buffers())} == {"meta"}


def test_case_09_a_mode_below_the_root_is_the_one_that_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Dropout(0.5))
    model[0].eval()
    out = slapo.apply(model, slapo.replace(Empty, nn.Dropout, lambda old: nn.Sequential(nn.Dropout(0.1))))
    assert [m.training for m in out[0].modules()] == [False] * 3
    assert out[1].training
    assert out[1][0].training


def test_case_09_what_was_in_train_mode_inside_an_eval_wrapper_is_left_as_it_was() -> None:
    inner = nn.Dropout(0.5).train()
    model = nn.Sequential(nn.Sequential(inner)).eval()
    inner.train()
    out = slapo.apply(model, slapo.replace(Empty, "0", lambda old: nn.Sequential(old, nn.Dropout(0.1))))
    assert out[0][0][0].training, "an old module keeps its mode"
    assert not out[0][1].training
    assert not out[0].training


def test_case_09_integer_tensors_of_the_new_module_keep_their_dtype() -> None:
    model = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    out = slapo.apply(model, slapo.replace(Empty, "0", lambda old: nn.BatchNorm1d(4)))
    assert out[0].num_batches_tracked.dtype == torch.int64
    assert out[0].running_mean.dtype == torch.bfloat16


def test_case_09_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval().bfloat16()
    out = slapo.apply(model, slapo.replace(Empty, "0", lambda old: nn.Linear(4, 4), inherit=False))
    assert out[0].training
    assert out[0].weight.dtype == torch.float32


# ---- 10: hooks


class Says:
    """A hook that notes its name when it runs."""

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.said.append(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Says:
        return self  # so that a copy's hooks are heard, too


def hooked(said: list[str]) -> tuple[nn.Sequential, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    one = model[0]
    handles = {
        "pre": one.register_forward_pre_hook(Says(said, "pre")),
        "pre kwargs": one.register_forward_pre_hook(Says(said, "pre kwargs"), with_kwargs=True),
        "pre first": one.register_forward_pre_hook(Says(said, "pre first"), prepend=True),
        "forward": one.register_forward_hook(Says(said, "forward")),
        "forward kwargs": one.register_forward_hook(Says(said, "forward kwargs"), with_kwargs=True),
        "forward always": one.register_forward_hook(Says(said, "forward always"), always_call=True),
        "forward first": one.register_forward_hook(Says(said, "forward first"), prepend=True),
        "backward pre": one.register_full_backward_pre_hook(Says(said, "backward pre")),
        "backward": one.register_full_backward_hook(Says(said, "backward")),
        "backward 2": one.register_full_backward_hook(Says(said, "backward 2")),
    }
    return model, handles


ORDER = ["pre first", "pre", "pre kwargs", "forward first", "forward", "forward kwargs", "forward always"]
BACK = ["backward pre", "backward", "backward 2"]


def run(model: nn.Module, said: list[str]) -> list[str]:
    said.clear()
    model(torch.ones(2, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    return list(said)


def own_linear(old: nn.Linear) -> nn.Module:
    made = nn.Linear(old.in_features, old.out_features)
    made.weight, made.bias = old.weight, old.bias
    return made


@pytest.mark.parametrize("inplace", [False, True])
def test_case_10_hooks_of_every_kind_are_moved_in_order(inplace: bool) -> None:
    said: list[str] = []
    model, _ = hooked(said)
    assert run(model, said) == ORDER + BACK
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear), inplace=inplace)
    assert run(out, said) == ORDER + BACK
    if not inplace:
        assert run(model, said) == ORDER + BACK, "the model that was given has its own still"


@pytest.mark.parametrize("which", [*ORDER, *BACK])
def test_case_10_in_place_an_old_handle_still_removes_its_hook(which: str) -> None:
    said: list[str] = []
    model, handles = hooked(said)
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear), inplace=True)
    assert out is model
    handles[which].remove()
    assert run(model, said) == [name for name in ORDER + BACK if name != which]


@pytest.mark.parametrize("which", [*ORDER, *BACK])
def test_case_10_pure_an_old_handle_acts_on_the_model_that_it_was_registered_on(which: str) -> None:
    said: list[str] = []
    model, handles = hooked(said)
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear))
    tables = [key for key in vars(model[0]) if key.endswith("_hooks") and vars(model[0])[key]]
    for key in tables:
        assert list(vars(out[0])[key]) == list(vars(model[0])[key]), "the same ids"
        assert vars(out[0])[key] is not vars(model[0])[key], "in tables of its own"
    handles[which].remove()
    assert run(model, said) == [name for name in ORDER + BACK if name != which]
    assert run(out, said) == ORDER + BACK


def test_case_10_a_handle_made_on_the_result_removes_there_only() -> None:
    said: list[str] = []
    model, _ = hooked(said)
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear))
    handle = out[0].register_forward_hook(Says(said, "new"))
    assert "new" not in run(model, said)
    assert run(out, said) == [*ORDER, "new", *BACK]
    handle.remove()
    assert run(out, said) == ORDER + BACK


def test_case_10_always_call_runs_though_the_new_forward_raises() -> None:
    said: list[str] = []
    model = nn.Sequential(nn.ReLU())
    model[0].register_forward_hook(Says(said, "always"), always_call=True)

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    out = slapo.apply(model, slapo.replace(Empty, "0", Raises()))
    with pytest.raises(RuntimeError, match="on purpose"):
        out(torch.ones(1))
    assert said == ["always"]


def test_case_10_a_failed_replacement_in_place_leaves_hooks_and_handles_as_they_were() -> None:
    said: list[str] = []
    model, handles = hooked(said)
    sch = slapo.replace(slapo.replace(Empty, "0", own_linear), "1", lambda old: None)
    with pytest.raises(slapo.MisfitError):
        slapo.apply(model, sch, inplace=True)
    assert run(model, said) == ORDER + BACK
    for name in (*ORDER, *BACK):
        handles[name].remove()
    assert run(model, said) == []


def test_case_10_a_hook_inside_what_is_replaced_is_refused() -> None:
    model = stack()
    model.layers[1].fc.register_forward_hook(Says([], "inside"))
    before = record(model)

    class Fused(nn.Module):
        def __init__(self, old: Block) -> None:
            super().__init__()
            self.weight = old.fc.weight

        def forward(self, x: Tensor) -> Tensor:
            return x

    for inplace in (False, True):
        with pytest.raises(slapo.HookError, match=r"layers\.1\.fc") as refused:
            slapo.apply(model, slapo.replace(Empty, "layers.*", Fused), inplace=inplace)
        assert refused.value.paths == ("layers.1.fc",)
        assert_as_recorded(model, before)


# ---- 11: the model that was given


class NeedsMore(nn.Module):
    pass


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_case_11_the_given_model_is_bit_for_bit_what_it_was(mode: str) -> None:
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    model = stack(depth=2, p=0.5)
    model.train(mode == "train")
    model.layers[0].fc.weight.requires_grad_(False)
    model.layers[0].register_forward_hook(Says([], "hook"))
    model(ids()).sum().backward()
    torch.manual_seed(5)
    base = model(ids())
    before, state = record(model), random_state()

    def draws(old: nn.Linear) -> nn.Linear:
        random.random(), numpy.random.rand(), torch.rand(3)
        return nn.Linear(old.in_features, old.out_features)

    sch = slapo.replace(Empty, "layers.*.{fc,proj}", draws)
    sch = slapo.replace(sch, "**.norm", OwnNorm)
    sch = slapo.freeze(sch, "embed")
    sch = slapo.cast(sch, "layers.1", torch.float32)
    sch = slapo.annotate(sch, "norm", "weight", "tag", 1)
    sch = slapo.hook(sch, "layers.*", forward_pre=Says([], "pre"))
    sch = slapo.probe(sch, "layers.*")
    sch = slapo.compile(sch, "layers.*", backend="eager")
    sch = slapo.checkpoint(sch, "layers.0")
    slapo.select(model, "layers.*")
    slapo.plan(model, sch)
    assert random_state() == state
    out = slapo.apply(model, sch)
    assert random_state() == state
    out.train(mode != "train")
    broken = slapo.replace(sch, "norm", lambda old: draws(old))
    for failing in (broken, slapo.freeze(sch, "nowhere"), slapo.freeze(sch, "embed", "nothing")):
        for inplace in (False, True):
            with pytest.raises(slapo.SlapoError):
                slapo.apply(model, failing + slapo.replace(Empty, "embed", lambda old: None), inplace=inplace)
            assert random_state() == state
            assert_as_recorded(model, before)
    torch.manual_seed(5)
    assert torch.equal(model(ids()), base)


def test_case_11_training_the_result_changes_no_module_of_the_given_model() -> None:
    model = stack()
    before = record(model)
    out = slapo.apply(model, slapo.replace(Empty, "layers.*", lambda old: copy.deepcopy(old)))
    out.eval()
    out.layers[0].scale = 7.0
    out.layers[1].fc.register_forward_hook(Says([], "late"))
    out.layers.append(nn.Identity())
    assert_as_recorded(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_case_11_an_interruption_leaves_it_as_it_was_too(error: type[BaseException]) -> None:
    model = stack()
    before, state = record(model), random_state()

    def stops(old: nn.Module) -> nn.Module:
        torch.rand(1)
        raise error

    sch = slapo.replace(slapo.freeze(slapo.replace(Empty, "norm", OwnNorm), "embed"), "layers.2", stops)
    for inplace in (False, True):
        with pytest.raises(error):
            slapo.apply(model, sch, inplace=inplace)
        assert_as_recorded(model, before)
        assert random_state() == state


# ---- 12: two models of one class


def test_case_12_another_model_and_the_class_are_untouched() -> None:
    first, second = stack(), stack()
    before, namespaces = record(second), {cls: dict(vars(cls)) for cls in (Stack, Block, nn.Linear, nn.LayerNorm)}
    sch = slapo.replace(Empty, "**.norm", OwnNorm)
    sch = slapo.checkpoint(slapo.compile(sch, "layers.*", backend="eager"), "layers.*")
    for inplace in (False, True):
        out = slapo.apply(first, sch, inplace=inplace)
        assert_same_numbers(second, out, ids(), exact=False)
    assert_as_recorded(second, before)
    for cls, namespace in namespaces.items():
        assert dict(vars(cls)) == namespace
    assert type(out) is Stack
    assert type(out.layers[0]) is Block


# ---- 13: a live Llama


class OwnRMSNorm(nn.Module):
    def __init__(self, old: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = old.weight, old.variance_epsilon

    def forward(self, x_BTD: Tensor) -> Tensor:
        x32_BTD = x_BTD.float()
        return self.weight * (x32_BTD * torch.rsqrt(x32_BTD.square().mean(-1, keepdim=True) + self.eps)).to(x_BTD)


class OwnMLP(nn.Module):
    def __init__(self, old: LlamaMLP) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class OwnAttention(LlamaAttention):
    """The old one's projections under another class."""

    def __init__(self, old: LlamaAttention) -> None:
        super().__init__(old.config, old.layer_idx)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj


def llama(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def test_case_13_norms_mlps_and_attention_of_a_llama_in_one_schedule() -> None:
    model = llama()
    before = record(model)
    sch = slapo.replace(Empty, LlamaRMSNorm, OwnRMSNorm)
    sch = slapo.replace(sch, "**.mlp", OwnMLP)
    sch = slapo.replace(sch, slapo.select(model, "model.layers.*.self_attn", LlamaAttention), OwnAttention)
    plan = slapo.plan(model, sch)
    assert [len(plan.of(n)) for n in range(3)] == [2 * 3 + 1, 3, 3]
    assert "x7" in repr(plan)
    out = slapo.apply(model, sch)
    tokens = ids(2, 6, vocab=32)
    torch.testing.assert_close(out(tokens).logits, model(tokens).logits, rtol=1e-10, atol=1e-10)
    assert list(out.state_dict()) == list(model.state_dict())
    assert {type(m).__name__ for m in out.modules()} >= {"OwnRMSNorm", "OwnMLP", "OwnAttention"}
    assert "OwnRMSNorm" in repr(out)
    for copied in (copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        copied.load_state_dict(model.state_dict())
        assert torch.equal(copied(tokens).logits, out(tokens).logits)
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        assert out.lm_head.weight.abs().sum() > 0
    assert_as_recorded_but_for_capturing(model, before)


def assert_as_recorded_but_for_capturing(model: nn.Module, before: dict[str, Any]) -> None:
    """transformers itself adds attributes at the first forward, so modules and tensors are compared."""
    now = record(model)
    assert now["modules"] == before["modules"]
    assert now["tensors"] == before["tensors"]
    assert all(torch.equal(a, b) for a, b in zip(now["values"], before["values"], strict=True))


# ---- 14: adapters


class LoRA(nn.Module):
    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Linear(base_layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base_layer.out_features, bias=False)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x)) if self.on else self.base_layer(x)


def test_case_14_the_wrapper_and_its_base_layer_are_distinct_places() -> None:
    model = stack(depth=2)
    out = slapo.apply(model, slapo.replace(Empty, "layers.*.{fc,proj}", LoRA))
    assert slapo.select(out, "layers.*.fc").paths == ("layers.0.fc", "layers.1.fc")
    assert slapo.select(out, "layers.*.fc", LoRA).modules == tuple(layer.fc for layer in out.layers)
    assert slapo.select(out, "layers.*.fc.base_layer").modules == tuple(layer.fc.base_layer for layer in out.layers)
    assert slapo.select(out, "layers.0.fc.*").paths == ("layers.0.fc.base_layer", "layers.0.fc.a", "layers.0.fc.b")
    assert out.layers[0].fc.base_layer.weight is model.layers[0].fc.weight
    assert out.layers[0].fc.base_layer is not model.layers[0].fc


def test_case_14_switched_off_it_gives_the_base_output_exactly() -> None:
    model = stack(depth=2)
    out = slapo.apply(model, slapo.replace(Empty, "layers.*.{fc,proj}", LoRA))
    assert not torch.equal(out(ids()), model(ids()))
    for site in slapo.select(out, type=LoRA):
        site.module.on = False
    assert torch.equal(out(ids()), model(ids()))


def test_case_14_adapters_and_the_rest_of_a_recipe_in_one_schedule() -> None:
    model = stack(depth=2)
    sch = slapo.freeze(Empty, "")
    sch = slapo.replace(sch, "layers.*.fc", LoRA)
    sch = slapo.unfreeze(sch, slapo.where("layers.*.fc.{a,b}"))
    out = slapo.apply(model, slapo.checkpoint(sch, "layers.*"))
    assert [n for n, p in out.named_parameters() if p.requires_grad] == [
        f"layers.{n}.fc.{side}.weight" for n in range(2) for side in "ab"
    ]
    _, grads = gradients(out, ids())
    assert all((grads[name] is not None) == name.endswith(("a.weight", "b.weight")) for name in grads)


def test_case_14_adapters_on_a_frozen_base_are_trainable() -> None:
    """A wrapper around a frozen layer is not a frozen layer: what it adds is new."""
    model = stack(depth=2).requires_grad_(False)
    out = slapo.apply(model, slapo.replace(Empty, "layers.*.fc", LoRA))
    assert [n for n, p in out.named_parameters() if p.requires_grad] == [
        f"layers.{n}.fc.{side}.weight" for n in range(2) for side in "ab"
    ]


# ---- 15: a tied head


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=32, vocab_size=17, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("path", "factory"),
    [
        ("lm_head", lambda old: nn.Linear(8, 17, bias=False)),
        ("transformer.wte", lambda old: nn.Embedding(17, 8)),
        ("transformer", lambda old: copy.deepcopy(old)),
    ],
    ids=["lm_head", "wte", "transformer"],
)
def test_case_15_a_fresh_side_of_a_tie_is_refused_by_both_names(path: str, factory: Any, inplace: bool) -> None:
    model = gpt2()
    before = record(model)
    with pytest.raises(slapo.TieError, match="untie=True") as refused:
        slapo.apply(model, slapo.replace(Empty, path, factory), inplace=inplace)
    assert set(refused.value.paths) == {"lm_head.weight", "transformer.wte.weight"}
    assert_as_recorded(model, before)


@pytest.mark.parametrize("path", ["lm_head", "transformer.wte"])
def test_case_15_a_new_side_that_holds_the_old_parameter_keeps_the_tie(path: str) -> None:
    model = gpt2()

    class Same(nn.Module):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.weight, self.is_head = old.weight, isinstance(old, nn.Linear)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T if self.is_head else self.weight[x]

    out = slapo.apply(model, slapo.replace(Empty, path, Same))
    assert out.get_submodule(path) is not model.get_submodule(path)
    assert out.lm_head.weight is out.transformer.wte.weight
    assert out.config.tie_word_embeddings
    tokens = ids(2, 5, vocab=17)
    torch.testing.assert_close(out(tokens).logits, model(tokens).logits, rtol=1e-12, atol=1e-12)


def test_case_15_a_template_is_filled_with_the_tied_parameter() -> None:
    out = slapo.apply(gpt2(), slapo.replace(Empty, "lm_head", nn.Linear(8, 17, bias=False)))
    assert out.lm_head.weight is out.transformer.wte.weight


def test_case_15_both_sides_replaced_in_one_schedule_may_stay_tied() -> None:
    model = gpt2()
    wider = nn.Parameter(torch.randn(20, 8, dtype=torch.float64))

    def with_wider(old: nn.Module) -> nn.Module:
        made = nn.Embedding(20, 8) if isinstance(old, nn.Embedding) else nn.Linear(8, 20, bias=False)
        made.weight = wider
        return made

    out = slapo.apply(model, slapo.replace(Empty, slapo.select(model, ["lm_head", "transformer.wte"]), with_wider))
    assert out.lm_head.weight is out.transformer.wte.weight
    assert out.lm_head.weight.shape == (20, 8)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("path", ["lm_head", "transformer.wte"])
def test_case_15_untie_unties_and_says_so_in_the_config(path: str, inplace: bool, tmp_path: Any) -> None:
    model = gpt2()
    config, body = model.config, model.transformer.config
    factories = {
        "lm_head": lambda old: nn.Linear(8, 17, bias=False),
        "transformer.wte": lambda old: nn.Embedding(17, 8),
    }
    out = slapo.apply(model, slapo.replace(Empty, path, factories[path], untie=True), inplace=inplace)
    assert out.lm_head.weight is not out.transformer.wte.weight
    assert not out.config.tie_word_embeddings
    assert not out.transformer.config.tie_word_embeddings
    if not inplace:
        assert model.config is config
        assert model.transformer.config is body
        assert config.tie_word_embeddings
        assert body.tie_word_embeddings
        assert model.lm_head.weight is model.transformer.wte.weight
    out.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = ids(2, 5, vocab=17)
    assert torch.equal(again(tokens).logits, out(tokens).logits)


def test_case_15_untie_with_a_template_starts_from_the_old_values_apart() -> None:
    model = gpt2()
    out = slapo.apply(model, slapo.replace(Empty, "lm_head", nn.Linear(8, 17, bias=False), untie=True))
    assert out.lm_head.weight is not out.transformer.wte.weight
    assert out.lm_head.weight.data_ptr() != out.transformer.wte.weight.data_ptr()
    assert torch.equal(out.lm_head.weight, out.transformer.wte.weight)
    assert not out.config.tie_word_embeddings


# ---- 16: parameter primitives on one side of a tie


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("path", ["lm_head", "transformer.wte"])
@pytest.mark.parametrize("primitive", ["cast", "freeze", "annotate"])
def test_case_16_both_sides_of_a_tie_are_changed_together(path: str, primitive: str, inplace: bool) -> None:
    model = gpt2()
    given = model.lm_head.weight
    builders = {
        "cast": lambda: slapo.cast(Empty, path, torch.bfloat16),
        "freeze": lambda: slapo.freeze(Empty, path),
        "annotate": lambda: slapo.annotate(Empty, path, "weight", "tag", 1),
    }
    out = slapo.apply(model, builders[primitive](), inplace=inplace)
    assert out.lm_head.weight is out.transformer.wte.weight
    changed = {
        "cast": lambda w: w.dtype == torch.bfloat16,
        "freeze": lambda w: not w.requires_grad,
        "annotate": lambda w: getattr(w, "tag", 0) == 1,
    }[primitive]
    assert changed(out.transformer.wte.weight)
    assert changed(given) if inplace else not changed(given), "in place the very parameter changes, else it is as it was"
    if not inplace:
        assert model.lm_head.weight is model.transformer.wte.weight is given
    assert len(list(out.parameters())) == len(list(gpt2().parameters()))


def test_case_16_freezing_both_and_then_unfreezing_one_frees_both() -> None:
    sch = slapo.unfreeze(slapo.freeze(Empty, ["lm_head", "transformer.wte"]), "lm_head")
    out = slapo.apply(gpt2(), sch)
    assert out.lm_head.weight is out.transformer.wte.weight
    assert out.lm_head.weight.requires_grad
