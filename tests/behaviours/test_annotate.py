"""B215-B216: annotate."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

import slapo_fn as slapo

from .nets import Model

Empty = slapo.Schedule()
MODES = pytest.mark.parametrize("inplace", [False, True])


@MODES
def test_B215_a_key_and_a_value_on_a_parameter_by_name(inplace: bool) -> None:
    model = Model()
    given = model.submod.linear.weight
    sch = slapo.annotate(Empty, "submod", "linear.weight", "replicated_param", True)
    sch = slapo.annotate(sch, "", "fc*.bias", "group", "no decay")
    out = slapo.apply(model, sch, inplace=inplace)
    marked = {n: p.replicated_param for n, p in out.named_parameters() if hasattr(p, "replicated_param")}
    assert marked == {"submod.linear.weight": True}
    assert {n: p.group for n, p in out.named_parameters() if hasattr(p, "group")} == {
        "fc1.bias": "no decay",
        "fc2.bias": "no decay",
    }
    assert hasattr(given, "replicated_param") == inplace, "in place the very parameter changes, else it is as it was"
    assert out.submod.linear.weight.data_ptr() == given.data_ptr(), "and its values are not copied"


@MODES
@pytest.mark.parametrize("name", ["weigth", "linear.weigth", "linear", "other.weight"])
def test_B215_an_unknown_name_is_an_attribute_error(name: str, inplace: bool) -> None:
    model = Model()
    with pytest.raises(AttributeError, match=name) as refused:
        slapo.apply(model, slapo.annotate(Empty, "submod", name, "key", 1), inplace=inplace)
    assert isinstance(refused.value, slapo.ParameterNameError)
    assert refused.value.paths == (f"submod.{name}",)
    assert not hasattr(model.submod.linear.weight, "key")


def test_B215_it_stays_through_pickling_and_later_schedules() -> None:
    out = slapo.apply(Model(), slapo.annotate(Empty, "fc1", "weight", "key", (1, "a")))
    later = slapo.apply(
        out, slapo.checkpoint(slapo.freeze(slapo.annotate(Empty, "fc1", "*", "other", 2), "fc1"), "fc1")
    )
    assert later.fc1.weight.key == (1, "a")
    assert later.fc1.weight.other == 2
    assert not hasattr(out.fc1.weight, "other")
    assert pickle.loads(pickle.dumps(later)).fc1.weight.key == (1, "a")


def test_B215_the_later_value_counts() -> None:
    sch = slapo.annotate(slapo.annotate(Empty, "fc1", "weight", "key", 1), "fc1", "weight", "key", 2)
    assert slapo.apply(Model(), sch).fc1.weight.key == 2
    assert [step.overridden_by for step in slapo.plan(Model(), sch).steps] == [1, None]


def test_B216_the_keys_are_those_of_the_schedule_whatever_was_annotated() -> None:
    sch = slapo.annotate(Empty, "fc1", "weight", "one", 1)
    sch = slapo.annotate(slapo.freeze(sch, "fc2"), "submod.linear", "bias", "two", 2)
    sch = slapo.annotate(sch, nn.Linear, "bias", "two", 2)
    assert {entry.args.key for entry in slapo.entries(sch, slapo.AnnotateArgs)} == {"one", "two"}
    out = slapo.apply(Model(), sch)
    assert {key for p in out.parameters() for key in p.__dict__} == {"one", "two"}
