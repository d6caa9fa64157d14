"""Faults that were met once, each with the right value, so that its whole kind stays mended."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

S = slapo.Schedule()


def grow_at(site: slapo.Site[nn.Module], args: None) -> nn.Module:
    site.module.down = nn.Linear(4, 2)
    return site.module


@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_primitive_registers_by_hand_is_found_by_later_entries(inplace: bool) -> None:
    sch = slapo.replace(slapo.add(S, "0", grow_at, None), "0.down", lambda old: nn.Identity())
    assert type(slapo.apply(nn.Sequential(nn.Linear(4, 4)), sch, inplace=inplace)[0].down) is nn.Identity
    sch = slapo.freeze(slapo.add(slapo.freeze(S, ""), "0", grow_at, None), "0.down")
    assert not slapo.apply(nn.Sequential(nn.Linear(4, 4)), sch, inplace=inplace)[0].down.weight.requires_grad


class Listed(nn.Module):
    """Runs on a list of its own parameter, as recurrent modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.weights = [self.weight]

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD @ self.weights[0]


@pytest.mark.parametrize("weights", ["inherit", "fresh"])
@pytest.mark.parametrize("share", [False, True])
def test_a_template_runs_on_the_weights_that_it_shows(weights: Any, share: bool) -> None:
    model, template = nn.Sequential(Listed()), Listed()
    made = slapo.apply(model, slapo.replace(S, "0", template, weights=weights, share=share, untie=True))[0]
    assert made.weights[0] is made.weight is not template.weight
    assert torch.equal(made.weight, model[0].weight if weights == "inherit" and not share else template.weight)


def test_a_factory_s_module_runs_on_the_weights_of_the_dtype_that_it_took_over() -> None:
    made = slapo.apply(nn.Sequential(nn.Linear(4, 4)).double(), slapo.replace(S, "0", lambda old: Listed()))[0]
    assert made.weights[0] is made.weight
    assert made.weight.dtype == torch.float64


class Helpful(nn.Linear):
    def helper(self, x_BD: Tensor) -> Tensor:
        return self(x_BD)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kept_method_that_the_new_class_lacks_is_bound_to_the_new_module(inplace: bool) -> None:
    model = nn.Module()
    model.child = Helpful(4, 4)
    model.helper = model.child.helper
    result = slapo.apply(model, slapo.replace(S, "child", lambda old: nn.Linear(4, 4)), inplace=inplace)
    assert result.helper.__self__ is result.child


def test_statistics_are_written_once_by_a_norm_that_came_after_checkpointing() -> None:
    base = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()))
    checkpointed = slapo.apply(base, slapo.checkpoint(S, "0"))
    result = slapo.apply(checkpointed, slapo.replace(S, "0.1", lambda old: nn.BatchNorm1d(4)))
    result(torch.randn(8, 4)).sum().backward()
    assert result[0][1].num_batches_tracked == 1


def test_numbers_are_whole_numbers() -> None:
    model = nn.ModuleDict({f"layer{i}": nn.ReLU() for i in range(1, 13)})
    assert slapo.select(model, "*[1-3]").paths == ("layer1", "layer2", "layer3")
    assert slapo.select(model, "*[10-12]").paths == ("layer10", "layer11", "layer12")
    with pytest.raises(slapo.PatternError, match="counts from the end"):
        slapo.where("layer[-1]")
    with pytest.raises(slapo.PatternError, match="count from the end"):
        slapo.freeze(S, "", "h.[:-1].**")


def test_what_a_plan_prints_can_be_typed() -> None:
    model = nn.ModuleDict({"h": nn.ModuleList(nn.ReLU() for _ in range(12))})
    assert slapo.select(model, "h.{0...3}").paths == ("h.0", "h.1", "h.2", "h.3")
    assert slapo.select(model, "h.{0,2...10}").paths == tuple(f"h.{i}" for i in range(0, 11, 2))


def test_a_parameter_under_two_names_of_one_module_is_renewed_once() -> None:
    model = nn.Module()
    model.p = model.q = nn.Parameter(torch.ones(4))
    model.kept = [model.p]
    result = slapo.apply(model, slapo.cast(S, "", torch.bfloat16))
    assert result.p is result.q is result.kept[0]


class Named(dict[str, nn.Module]):
    """A user's own kind of dict."""


def test_a_user_s_own_kind_of_dict_leads_into_the_copy() -> None:
    model = nn.Sequential(nn.ReLU())
    model.__dict__["by_name"] = Named(first=model[0])
    result = slapo.apply(model, S)
    assert type(result.by_name) is Named
    assert result.by_name["first"] is result[0] is not model[0]


class Recorder:
    calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_what_a_schedule_gave_stays_the_schedule_s() -> None:
    seen, hooked = Recorder(), Recorder()
    sch = slapo.hook(slapo.probe(S, "0", seen), "0", forward=hooked)
    slapo.apply(slapo.apply(nn.Sequential(nn.ReLU()), sch), S)(torch.ones(1))
    assert (seen.calls, hooked.calls) == (1, 1)


def test_in_place_an_attribute_that_leads_nowhere_stays_the_same_object() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.__dict__["settings"] = settings = types.SimpleNamespace(scale=1)
    block = model[0]
    slapo.apply(model, slapo.replace(S, "0", nn.Linear(2, 2)), inplace=True)
    assert model.settings is settings
    assert model[0] is not block


@pytest.mark.parametrize(
    "build",
    [
        lambda: slapo.annotate(S, "", "*", "tag", 1),
        lambda: slapo.cast(S, "", torch.float64),
        lambda: slapo.unfreeze(slapo.freeze(S, ""), ""),
    ],
)
def test_in_place_an_optimizer_goes_on_training_the_parameters_that_it_holds(build: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    slapo.apply(model, build(), inplace=True)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_in_place_tensors_are_rolled_back_too() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    weight, before, grad = model.weight, model.weight.detach().clone(), model.weight.grad
    sch = slapo.annotate(slapo.cast(slapo.freeze(S, ""), "", torch.float64), "", "weight", "tag", 1)
    with pytest.raises(slapo.ParameterNameError):
        slapo.apply(model, slapo.annotate(sch, "", "nothing", "tag", 1), inplace=True)
    assert (model.weight is weight, weight.dtype, weight.requires_grad) == (True, torch.float32, True)
    assert torch.equal(weight, before)
    assert weight.grad is grad
    assert not hasattr(weight, "tag")


def test_a_factory_that_writes_into_a_shared_tensor_is_told() -> None:
    def doubled(old: nn.Linear) -> nn.Module:
        with torch.no_grad():
            old.weight.mul_(2)
        return old

    with pytest.raises(slapo.MisfitError, match=r"0\.weight.*wrote into it"):
        slapo.apply(nn.Sequential(nn.Linear(2, 2)), slapo.replace(S, "0", doubled))


def test_a_module_registered_inside_itself_does_not_hang() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    model[0].add_module("up", model)
    result = slapo.apply(model, slapo.freeze(S, "0.0"))
    assert not result[0][0].weight.requires_grad
    assert result[0].up is result


def test_a_wrapper_for_many_processes_is_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(slapo.ForkError, match="apply the schedule to its module"):
            slapo.apply(wrapped, S)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inplace", [False, True])
def test_an_interruption_leaves_everything_as_it_was(inplace: bool) -> None:
    def interrupted(old: nn.Module) -> nn.Module:
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, state = model[0], torch.get_rng_state()
    sch = slapo.replace(slapo.replace(S, "0", lambda old: nn.Linear(2, 2)), "1", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slapo.apply(model, sch, inplace=inplace)
    assert model[0] is first
    assert torch.equal(torch.get_rng_state(), state)
    assert gc.isenabled()


def test_a_reversed_mapping_of_weights_is_named() -> None:
    old, new = nn.Sequential(), nn.Sequential()
    old.add_module("a", nn.Linear(2, 2)), new.add_module("g", nn.Linear(2, 2))
    model = nn.Sequential(old)
    assert slapo.apply(model, slapo.replace(S, "0", new, weights={"g": "a"}))[0].g.weight is old.a.weight
    with pytest.raises(slapo.WeightsError, match=r"wrong way round.*\{'g': 'a'\}"):
        slapo.apply(model, slapo.replace(S, "0", new, weights={"a": "g"}))
    with pytest.raises(slapo.WeightsError, match=r"no a.wieght; did you mean a\.weight\?"):
        slapo.apply(model, slapo.replace(S, "0", new, weights={"g.weight": "a.wieght", "g.bias": "a.bias"}))


def test_unfreeze_is_called_so_and_overrides_freeze() -> None:
    plan = slapo.plan(nn.Linear(2, 2), slapo.unfreeze(slapo.freeze(S, ""), ""))
    assert [(step.primitive, step.overridden_by) for step in plan.steps] == [("freeze", 1), ("unfreeze", None)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layers.*.mlp", r"write '\*\*\.layers\.\*\.mlp'"),
        ("model.layers[0:2]", r"write 'model\.layers\.\[0:2\]'"),
        (r"model.layers.\d+", r"re\.compile"),
        ("ReLU", r"name of a class.*type=ReLU"),
        ("model.layrs.*.mlp", r"Did you mean 'model\.layers\.\*\.mlp'\?"),
    ],
)
def test_a_near_miss_says_what_to_write(pattern: str, said: str) -> None:
    net = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"mlp": nn.ReLU()}) for _ in "ab")})})
    with pytest.raises(slapo.NoMatchError, match=said):
        slapo.select(net, pattern)
