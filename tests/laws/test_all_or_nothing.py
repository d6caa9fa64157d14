"""Law 3: every problem at once, with its entry, its place and its line; in place, all is rolled back."""

from __future__ import annotations

import inspect
import pickle
import random

import numpy
import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .look import Still, assert_same, look, run
from .models import MODELS, Model, add_one, always, blocks, double, linear, x_BTD

ROW = next(row for row in MODELS if row.name == "blocks")


def line() -> int:
    """The caller's line."""
    return inspect.currentframe().f_back.f_lineno


def refusing_at(site: slapo.Site[nn.Module], args: object) -> nn.Module:
    raise ValueError(f"not {site.path}")


def interrupted_at(site: slapo.Site[nn.Module], args: object) -> nn.Module:
    torch.rand(3), random.random(), numpy.random.rand()
    site.module.eval()
    raise KeyboardInterrupt


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_every_problem_is_told_at_once_in_order_with_entry_place_and_line() -> None:
    sch = slapo.freeze(slapo.Schedule(), "0.mlpp")
    typo = line() - 1
    sch = slapo.checkpoint(sch, "1")
    sch = slapo.add(sch, "[0:2].norm", refusing_at, None)
    refused = line() - 1
    sch = slapo.annotate(sch, "2", "no.such", "key", 1)
    nameless = line() - 1
    with pytest.raises(slapo.ScheduleError, match="4 problems") as caught:
        slapo.apply(blocks(), sch)
    problems = caught.value.exceptions
    assert sorted(type(one).__name__ for one in problems) == [
        "NoMatchError",
        "ParameterNameError",
        "ValueError",
        "ValueError",
    ]
    by_entry = {0: (typo, "freeze"), 2: (refused, "refusing"), 3: (nameless, "annotate")}
    told = []
    for problem in problems:
        number = next(n for n in by_entry if f"entry {n}:" in notes(problem))
        told.append(number)
        written, name = by_entry[number]
        assert f"entry {number}: {name}(" in notes(problem)
        assert f"test_all_or_nothing.py:{written}" in notes(problem)
        assert f"test_all_or_nothing.py:{written}" in str(caught.value)
    assert sorted(told) == [0, 2, 2, 3]
    places = {
        notes(one).split(" at ")[-1].split("\n")[0]
        for one in problems
        if isinstance(one, ValueError) and "not " in str(one)
    }
    assert {"0.norm", "1.norm"} <= places


def test_one_problem_is_raised_as_itself_with_the_primitive_s_own_traceback() -> None:
    sch = slapo.add(slapo.Schedule(), "1.norm", refusing_at, None)
    with pytest.raises(ValueError, match=r"not 1\.norm") as caught:
        slapo.apply(blocks(), sch)
    assert caught.traceback[-1].name == "refusing_at"
    assert "entry 0: refusing(1.norm)" in notes(caught.value)
    assert notes(caught.value).endswith(" at 1.norm")


def test_an_error_can_be_told_twice_and_names_the_entry_once() -> None:
    sch = slapo.freeze(slapo.Schedule(), "0.mlpp")
    for _ in range(2):
        with pytest.raises(slapo.NoMatchError, match="mlpp") as caught:
            slapo.apply(blocks(), sch)
        assert notes(caught.value).count("entry 0:") == 1


def test_problems_in_a_plan_are_those_that_apply_raises() -> None:
    sch = slapo.add(slapo.freeze(slapo.Schedule(), "0.mlpp"), "*.norm", refusing_at, None)
    found = slapo.plan(blocks(), sch).problems
    with pytest.raises(slapo.ScheduleError) as caught:
        slapo.apply(blocks(), sch)
    assert [(type(one), str(one), notes(one)) for one in found] == [
        (type(one), str(one), notes(one)) for one in caught.value.exceptions
    ]


@pytest.mark.parametrize("inplace", [False, True])
def test_an_interruption_passes_at_once_and_leaves_all_as_it_was(inplace: bool) -> None:
    model = blocks()
    still = Still(model)
    sch = slapo.add(slapo.add(slapo.Schedule(), "0", interrupted_at, None), "1", refusing_at, None)
    with pytest.raises(KeyboardInterrupt):
        slapo.apply(model, sch, inplace=inplace)
    still.check()


# ---- what is rolled back


def applied(sch: slapo.Schedule, row: Model = ROW) -> nn.Module:
    """A model with layers around its forwards, edited in place as a user would who works so throughout."""
    return slapo.apply(row.make(), sch, inplace=True)


def refused(sch: slapo.Schedule) -> slapo.Schedule:
    return slapo.add(sch, "", refusing_last_at, None)


@slapo.traits(slapo.Phase.DATA_PARALLEL)
def refusing_last_at(site: slapo.Site[nn.Module], args: object) -> nn.Module:
    raise ValueError("the last entry fails")


LAYERED = {
    "checkpointed, then compiled": (
        slapo.checkpoint(slapo.Schedule(), "*"),
        slapo.compile(slapo.Schedule(), "*", backend="eager"),
    ),
    "compiled, then checkpointed": (
        slapo.compile(slapo.Schedule(), "*", backend="eager"),
        slapo.checkpoint(slapo.Schedule(), "*"),
    ),
    "checkpointed, then replaced": (
        slapo.checkpoint(slapo.Schedule(), "0"),
        slapo.replace(slapo.Schedule(), "0", lambda old: nn.Identity(), untie=True),
    ),
    "checkpointed twice": (
        slapo.checkpoint(slapo.Schedule(), "*"),
        slapo.checkpoint(slapo.Schedule(), "*", preserve_rng_state=False),
    ),
}


@pytest.mark.parametrize("case", LAYERED)
def test_layers_around_a_forward_are_rolled_back(case: str) -> None:
    first, second = LAYERED[case]
    model = applied(first)
    before, expected, still = look(model), run(applied(first), ROW), Still(model)
    with pytest.raises(ValueError, match="the last entry fails"):
        slapo.apply(model, refused(second), inplace=True)
    assert look(model) == before
    still.check()
    assert_same(run(model, ROW), expected)


@pytest.mark.parametrize("inplace", [True, False])
def test_removal_handles_work_after_a_failure(inplace: bool) -> None:
    model = blocks()
    handles = [
        model[0].register_forward_pre_hook(add_one),
        model[0].register_forward_hook(double),
        model[0].register_forward_hook(always, always_call=True),
    ]
    sch = slapo.replace(slapo.hook(slapo.Schedule(), "0", forward=always), "0", lambda old: nn.Identity(), untie=True)
    with pytest.raises(ValueError, match="the last entry fails"):
        slapo.apply(model, refused(sch), inplace=inplace)
    for handle in handles:
        handle.remove()
    assert not any(table for key, table in vars(model[0]).items() if key.startswith("_forward"))


def test_removal_handles_follow_a_module_that_is_replaced_in_place() -> None:
    model = blocks()
    handle = model[0].register_forward_hook(always, always_call=True, with_kwargs=False)
    result = slapo.apply(
        model, slapo.replace(slapo.Schedule(), "0", lambda old: nn.Identity(), untie=True), inplace=True
    )
    assert list(result[0]._forward_hooks.values()) == [always]
    handle.remove()
    assert not result[0]._forward_hooks
    assert not result[0]._forward_hooks_always_called


def test_an_instance_s_own_forward_is_rolled_back() -> None:
    row = next(row for row in MODELS if row.name == "patched by method")
    model = row.make()
    own, still = vars(model[0])["forward"], Still(model)
    sch = slapo.compile(slapo.checkpoint(slapo.Schedule(), "**"), "**", backend="eager")
    with pytest.raises(ValueError, match="the last entry fails"):
        slapo.apply(model, refused(sch), inplace=True)
    assert vars(model[0])["forward"] is own
    still.check()


def test_a_root_that_was_replaced_is_rolled_back() -> None:
    model = linear()
    handle, still = model.register_forward_hook(double), Still(model)
    with pytest.raises(ValueError, match="the last entry fails"):
        slapo.apply(model, refused(slapo.replace(slapo.Schedule(), "", lambda old: nn.Sequential(old))), inplace=True)
    still.check()
    handle.remove()
    assert not model._forward_hooks


def test_a_schedule_error_pickles_and_splits() -> None:
    sch = slapo.add(slapo.freeze(slapo.Schedule(), "0.mlpp"), "0.norm", refusing_at, None)
    with pytest.raises(slapo.ScheduleError) as caught:
        slapo.apply(blocks(), sch)
    matching, rest = caught.value.split(slapo.NoMatchError)
    assert len(matching.exceptions) == len(rest.exceptions) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert [type(one) for one in again.exceptions] == [type(one) for one in caught.value.exceptions]
    assert again.paths == caught.value.paths


def test_wrong_arguments_are_refused_before_anything_is_copied() -> None:
    sch = slapo.freeze(slapo.Schedule(), "0")
    with pytest.raises(slapo.ArgumentError, match="the model comes first"):
        slapo.apply(sch, blocks())
    with pytest.raises(slapo.ArgumentError, match="not a schedule"):
        slapo.apply(blocks(), blocks()[0])
    with pytest.raises(slapo.ArgumentError, match="entry 0"):
        slapo.apply(blocks(), [("0", None, None)])
    assert x_BTD()[0].shape == (2, 3, 4)
