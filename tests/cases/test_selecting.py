"""Cases 1-7: what people hit when they select modules, and the right answer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import GPT2Config, GPT2Model
from transformers.pytorch_utils import Conv1D

import slapo_fn as slapo

from .support import Calls, assert_as_recorded, assert_same_numbers, ids, record, stack

Empty = slapo.Schedule()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.k_proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) + self.k_proj(x)


def encoder_decoder() -> nn.Module:
    model = nn.Module()
    model.encoder = nn.ModuleList([Attention(), Attention()])
    model.decoder = nn.ModuleList([Attention(), Attention()])
    return model


# ---- 1: a list in which one pattern is wrong


def test_case_01_a_pattern_of_a_list_that_matches_nothing_is_refused_and_named_alone() -> None:
    model = nn.Sequential(Attention(), nn.ReLU())
    with pytest.raises(slapo.NoMatchError, match="q_proj") as refused:
        slapo.select(model, ["0", "q_proj"])
    assert refused.value.paths == ("q_proj",)
    assert "0.q_proj" in str(refused.value), "the path that is near, or where it does exist"
    assert "'0'" not in str(refused.value), "what does match is not complained about"


def test_case_01_two_wrong_patterns_of_a_list_are_both_named() -> None:
    with pytest.raises(slapo.NoMatchError) as refused:
        slapo.select(nn.Sequential(Attention()), ["k_proj", "0", "v_proj"])
    assert refused.value.paths == ("k_proj", "v_proj")


@pytest.mark.parametrize("inplace", [False, True])
def test_case_01_a_list_with_a_wrong_pattern_is_refused_when_applied_too(inplace: bool) -> None:
    model = nn.Sequential(Attention(), nn.ReLU())
    before = record(model)
    with pytest.raises(slapo.NoMatchError, match="q_proj"):
        slapo.apply(model, slapo.freeze(Empty, ["0", "q_proj"]), inplace=inplace)
    assert_as_recorded(model, before)


def test_case_01_optional_makes_it_fine_and_the_plan_lists_it() -> None:
    model = nn.Sequential(Attention(), nn.ReLU())
    sch = slapo.freeze(Empty, slapo.optional("q_proj"))
    assert all(p.requires_grad for p in slapo.apply(model, sch).parameters())
    plan = slapo.plan(model, sch)
    assert not plan.problems
    assert [number for number, _ in plan.notes] == [0]
    assert "optional" in repr(plan)
    assert "q_proj" in repr(plan)


def test_case_01_an_optional_part_of_a_union_makes_it_fine_and_the_plan_lists_what_is_missing() -> None:
    model = nn.Sequential(Attention(), nn.ReLU())
    sch = slapo.freeze(Empty, slapo.where("0") | slapo.optional("q_proj"))
    out = slapo.apply(model, sch)
    assert not any(p.requires_grad for p in out[0].parameters())
    assert "q_proj" in repr(slapo.plan(model, sch)), "the plan tells which optional part matched nothing"


# ---- 2: a digit is a whole name


def test_case_02_layers_1_of_12_is_one_module() -> None:
    model = stack(depth=12)
    assert slapo.select(model, "layers.1").paths == ("layers.1",)
    assert slapo.select(model, "layers.1").modules == (model.layers[1],)
    assert slapo.select(model, "layers.1.*").paths == tuple(
        f"layers.1.{name}" for name in dict(model.layers[1].named_children())
    )
    assert slapo.select(model, "layers.1*").paths == ("layers.1", "layers.10", "layers.11"), "a hole is asked for"
    assert slapo.select(model, "layers.[1]").paths == ("layers.1",)


def test_case_02_nothing_but_that_module_is_changed() -> None:
    out = slapo.apply(stack(depth=12), slapo.freeze(Empty, "layers.1"))
    assert {n.rsplit(".", 2)[0] for n, p in out.named_parameters() if not p.requires_grad} == {"layers.1"}


# ---- 3: one name in two places


@pytest.mark.parametrize("wrapped", [lambda p: p, lambda p: [p], lambda p: (p,)], ids=["str", "list", "tuple"])
def test_case_03_a_pattern_is_anchored_in_a_str_and_in_a_list_alike(wrapped) -> None:
    model = encoder_decoder()
    assert slapo.select(model, wrapped("decoder.**.q_proj")).paths == ("decoder.0.q_proj", "decoder.1.q_proj")
    assert len(slapo.select(model, wrapped("**.q_proj"))) == 4
    for half_a_path in ("q_proj", "*.q_proj", "0.q_proj", "coder.*.q_proj", "decoder.*.q", "decoder.*.proj"):
        with pytest.raises(slapo.NoMatchError, match=re.escape(half_a_path)):
            slapo.select(model, wrapped(half_a_path))


def test_case_03_q_proj_alone_is_a_child_of_the_root() -> None:
    model = encoder_decoder()
    model.q_proj = nn.Linear(4, 4)
    assert slapo.select(model, "q_proj").paths == ("q_proj",)
    assert slapo.select(model, ["q_proj"]).paths == ("q_proj",)
    assert len(slapo.select(model, "**.q_proj")) == 5, "** stands for no segment, too"


def test_case_03_a_regular_expression_only_compiled_and_matched_in_full() -> None:
    model = encoder_decoder()
    assert slapo.select(model, re.compile(r"decoder\.\d+\.q_proj")).paths == ("decoder.0.q_proj", "decoder.1.q_proj")
    for half in (r"decoder\.\d+\.q", r"q_proj", r"coder\.\d+\.q_proj"):
        with pytest.raises(slapo.NoMatchError):
            slapo.select(model, re.compile(half))
    for as_text in (r"decoder\.\d+\.q_proj", r".*\.q_proj", "(encoder|decoder).0.q_proj"):
        with pytest.raises((slapo.NoMatchError, slapo.PatternError)):
            slapo.select(model, as_text)


# ---- 4: a pattern that takes too much


def widened(linear: nn.Linear) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.weight = linear.weight
    made.bias = linear.bias
    return made


def needs_linear_at(site: slapo.Site[nn.Module], args: None) -> nn.Module:
    if not isinstance(site.module, nn.Linear):
        raise slapo.MisfitError(f"{site.path} is a {type(site.module).__name__}, not a Linear", [site.path])
    return widened(site.module)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [slapo.replace(Empty, "**.proj*", widened), slapo.add(Empty, "**.proj*", needs_linear_at, None)],
    ids=["replace", "own primitive"],
)
def test_case_04_misfits_are_listed_and_nothing_is_converted(schedule: slapo.Schedule, inplace: bool) -> None:
    model = stack(depth=3)
    before = record(model)
    with pytest.raises(slapo.ScheduleError) as refused:
        slapo.apply(model, schedule, inplace=inplace)
    assert len(refused.value.exceptions) == 3
    for error, path in zip(refused.value.exceptions, (f"layers.{n}.proj_drop" for n in range(3)), strict=True):
        assert path in "\n".join([str(error), *error.__notes__])
    assert "proj_drop" in str(refused.value)
    assert_as_recorded(model, before)


def test_case_04_misfits_are_left_out_where_a_class_is_given() -> None:
    model = stack(depth=3)
    out = slapo.apply(model, slapo.replace(Empty, slapo.select(model, "**.proj*", nn.Linear), widened))
    assert [type(layer.proj_drop) for layer in out.layers] == [nn.Dropout] * 3
    assert all(new.proj is not old.proj for new, old in zip(out.layers, model.layers, strict=True))
    assert_same_numbers(model, out, ids())


# ---- 5: what is a Linear


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class NamedLinear(nn.Linear):
    """It inherits forward unchanged."""


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4), weight_norm(nn.Linear(4, 4)), Conv1D(4, 4), NamedLinear(4, 4))


def test_case_05_linear_is_linear_and_parametrised_linear_and_not_what_overrides_forward() -> None:
    model = linears()
    assert slapo.select(model, "*", nn.Linear).paths == ("0", "2", "4")
    assert slapo.select(model, "*", nn.Linear, subclasses=True).paths == ("0", "1", "2", "4")
    assert slapo.select(model, type=nn.Linear).paths == ("0", "2", "4")
    assert "1" in repr(slapo.select(model, "*", nn.Linear)).split("left out")[1], "what was left out is told"
    assert "left out" in repr(slapo.plan(model, slapo.freeze(Empty, nn.Linear)))


@pytest.mark.parametrize(
    "schedule",
    [
        slapo.checkpoint(Empty, nn.Linear),
        slapo.compile(Empty, nn.Linear, backend="eager"),
        slapo.probe(Empty, nn.Linear, lambda path, output: None),
        slapo.hook(Empty, nn.Linear, forward=lambda module, args, output: None),
    ],
    ids=["checkpoint", "compile", "probe", "hook"],
)
def test_case_05_the_parametrisation_is_kept(schedule: slapo.Schedule) -> None:
    model = linears().double()
    out = slapo.apply(model, schedule)
    assert nn.utils.parametrize.is_parametrized(out[2], "weight")
    assert list(out.state_dict()) == list(model.state_dict())
    assert_same_numbers(model, out, torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("change", ["cast", "freeze", "annotate"])
def test_case_05_parameter_primitives_work_below_a_parametrisation(change: str) -> None:
    model = linears()
    before = record(model)
    if change == "cast":
        out = slapo.apply(model, slapo.cast(Empty, "2", torch.float64))
        assert out[2].weight.dtype == torch.float64
        assert out[2](torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64
    elif change == "freeze":
        out = slapo.apply(model, slapo.freeze(Empty, "2"))
        assert not any(p.requires_grad for p in out[2].parameters())
    else:
        out = slapo.apply(model, slapo.annotate(Empty, "2", "parametrizations.**", "tag", 1))
        assert all(p.tag == 1 for p in out[2].parametrizations.parameters())
    assert nn.utils.parametrize.is_parametrized(out[2], "weight")
    assert_as_recorded(model, before)


def test_case_05_an_empty_result_names_the_look_alikes() -> None:
    model = GPT2Model(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0))
    with pytest.raises(slapo.NoMatchError, match="Conv1D x8"):
        slapo.select(model, type=nn.Linear)
    with pytest.raises(slapo.NoMatchError, match="Conv1D x2"):
        slapo.select(model, "h.*.mlp.c_fc", nn.Linear)
    with pytest.raises(slapo.NoMatchError, match="Conv1D"):
        slapo.apply(model, slapo.checkpoint(Empty, nn.Linear))


def test_case_05_an_empty_result_names_subclasses_that_were_left_out() -> None:
    with pytest.raises(slapo.NoMatchError, match=r"MyLinear.*subclasses=True"):
        slapo.select(nn.Sequential(MyLinear(2, 2)), type=nn.Linear)


# ---- 6: one module under two names


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.between = nn.GELU()
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


@pytest.mark.parametrize("chosen", ["a", "b", "{a,b}", nn.Linear])
def test_case_06_selecting_either_name_transforms_the_one_module_once(chosen) -> None:
    model, calls = Twice(), []
    sch = slapo.replace(Empty, chosen, lambda old: calls.append(old) or widened(old))
    out = slapo.apply(model, sch)
    assert len(calls) == 1
    assert out.a is out.b
    assert out.a is not model.a
    assert model.a is model.b
    (step,) = slapo.plan(model, sch).steps
    assert {step.path, *step.aliases} == {"a", "b"}
    assert step.aliases[0] in repr(slapo.plan(model, sch))
    assert list(out.state_dict()) == list(model.state_dict())


def test_case_06_a_wrap_of_a_shared_module_is_one_wrap() -> None:
    model = Twice().double()
    for chosen in ("a", "b", "*"):
        sch = slapo.hook(Empty, chosen, forward_pre=Calls())
        out = slapo.apply(model, slapo.checkpoint(sch, chosen))
        assert out.a is out.b
        assert_same_numbers(model, out, torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize(("chosen", "other"), [("a", "b"), ("b", "a")])
def test_case_06_untie_changes_only_the_name_that_was_asked_for(chosen: str, other: str) -> None:
    model = Twice().double()
    sch = slapo.replace(Empty, chosen, lambda old: nn.Linear(4, 4), untie=True)
    out = slapo.apply(model, sch)
    assert out.get_submodule(chosen) is not out.get_submodule(other)
    assert out.get_submodule(other).weight is model.a.weight
    assert out.get_submodule(chosen).weight is not model.a.weight
    assert model.a is model.b


def test_case_06_a_module_shared_by_two_parents_is_one_place_too() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"x": nn.Sequential(nn.ReLU(), shared), "y": nn.Sequential(shared, nn.ReLU())})
    out = slapo.apply(model, slapo.replace(Empty, "y.0", widened))
    assert out["x"][1] is out["y"][0]
    assert out["x"][1] is not shared


class Apart(nn.Module):
    """A child of one part is a part of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.part = self.whole[0]


@pytest.mark.parametrize("inplace", [False, True])
def test_case_06_a_module_inside_a_replaced_one_that_is_shared_with_another_stays_one_or_is_refused(
    inplace: bool,
) -> None:
    model = Apart()
    before = record(model)
    with pytest.raises(slapo.TieError, match=r"whole\.0.*part|part.*whole\.0"):
        slapo.apply(model, slapo.replace(Empty, "whole", lambda old: nn.Sequential(nn.Linear(4, 4))), inplace=inplace)
    assert_as_recorded(model, before)
    out = slapo.apply(
        model, slapo.replace(Empty, "whole", lambda old: nn.Sequential(old[0], nn.ReLU())), inplace=inplace
    )
    assert out.whole[0] is out.part


# ---- 7: experts held as one parameter


class Experts(nn.Module):
    """``E`` experts of inner size ``I`` on ``H`` features."""

    def __init__(self, e: int = 3, i: int = 4, h: int = 8) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.randn(e, h, i))

    def forward(self, x_TH: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->tei", x_TH, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tei,ehi->th", gate.sigmoid() * up, self.down_proj)


def moe() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(2):
        layer = nn.Module()
        layer.experts = Experts()
        layer.norm = nn.LayerNorm(8)
        model.layers.append(layer)
    return model


def test_case_07_parameter_primitives_take_experts_by_parameter_name() -> None:
    model = moe()
    before = record(model)
    sch = slapo.freeze(Empty, "**.experts", "gate_up_proj")
    sch = slapo.cast(sch, "**.experts", torch.bfloat16, "down_proj")
    sch = slapo.annotate(sch, "layers.1.experts", "{gate_up,down}_proj", "expert", True)
    out = slapo.apply(model, sch)
    for number, layer in enumerate(out.layers):
        assert not layer.experts.gate_up_proj.requires_grad
        assert layer.experts.gate_up_proj.dtype == torch.float32
        assert layer.experts.down_proj.requires_grad
        assert layer.experts.down_proj.dtype == torch.bfloat16
        assert (
            hasattr(layer.experts.gate_up_proj, "expert") == hasattr(layer.experts.down_proj, "expert") == (number == 1)
        )
        assert layer.norm.weight is model.layers[number].norm.weight, "what no entry touches is shared"
    assert_as_recorded(model, before)


def test_case_07_from_further_up_by_dotted_name() -> None:
    out = slapo.apply(moe(), slapo.freeze(Empty, "", "**.gate_up_proj"))
    assert [n for n, p in out.named_parameters() if not p.requires_grad] == [
        "layers.0.experts.gate_up_proj",
        "layers.1.experts.gate_up_proj",
    ]


def test_case_07_a_wrong_parameter_name_is_refused_at_every_place() -> None:
    model = moe()
    before = record(model)
    for build in (
        slapo.freeze(Empty, "**.experts", "gate_proj"),
        slapo.cast(Empty, "**.experts", torch.bfloat16, "gate_proj"),
        slapo.annotate(Empty, "**.experts", "gate_proj", "x", 1),
    ):
        with pytest.raises(slapo.ScheduleError) as refused:
            slapo.apply(model, build)
        assert all(isinstance(one, slapo.ParameterNameError) for one in refused.value.exceptions)
        assert "gate_up_proj" in str(refused.value), "the message names what there is"
        assert len(refused.value.exceptions) == 2
    assert_as_recorded(model, before)


@pytest.mark.parametrize("pattern", ["layers.0.experts.gate_up_proj", "**.experts.gate_up_proj", "**.gate_up_proj"])
@pytest.mark.parametrize("build", [slapo.checkpoint, slapo.compile, lambda s, t: slapo.replace(s, t, widened)])
def test_case_07_a_module_primitive_says_that_this_is_a_parameter(build, pattern: str) -> None:
    model = moe()
    with pytest.raises(slapo.NoMatchError, match="is a parameter"):
        slapo.select(model, pattern)
    with pytest.raises(slapo.NoMatchError, match="is a parameter"):
        slapo.apply(model, build(Empty, pattern))
