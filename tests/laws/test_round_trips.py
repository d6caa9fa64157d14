"""Law 10: a schedule survives pickle, copying and `==`, and means the same afterwards."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .look import look
from .models import MODELS, blocks
from .table import Adapter, passed, refit, seen, twin

S = slapo.Schedule()
SCHEDULES: dict[str, Callable[[], slapo.Schedule]] = {
    "replace": lambda: slapo.replace(S, slapo.where("*.mlp.0", nn.Linear), refit),
    "replace by class": lambda: slapo.replace(S, "0.mlp.0", Adapter, weights=None),
    "replace with weights": lambda: slapo.replace(
        S, "0.mlp.0", twin, weights={"weight": "weight", "bias": "bias"}, share=True
    ),
    "cast": lambda: slapo.cast(S, "**.norm", torch.bfloat16),
    "freeze": lambda: slapo.freeze(S, ["0", re.compile(r"[12]\.norm")], "**.weight"),
    "annotate": lambda: slapo.annotate(S, nn.LayerNorm, "*", "key", (1, "a")),
    "checkpoint": lambda: slapo.checkpoint(S, slapo.where("*")[::2], preserve_rng_state=False),
    "compile": lambda: slapo.compile(S, slapo.exactly(3, "*"), backend="eager", options={"a": 1}),
    "hook": lambda: slapo.hook(S, slapo.optional("no.such"), forward=passed),
    "probe": lambda: slapo.probe(S, ~slapo.where("*.mlp.**"), seen),
    "selection": lambda: slapo.freeze(S, slapo.select(blocks(), "*").where(is_block)),
    "set algebra": lambda: slapo.freeze(S, (slapo.where("0") | slapo.where("1")) & slapo.where("*")),
    "site": lambda: slapo.freeze(S, slapo.select(blocks(), "*")[1]),
}


def is_block(module: nn.Module, path: str) -> bool:
    return path != ""


def whole() -> slapo.Schedule:
    made = S
    for build in SCHEDULES.values():
        made = made + build()
    return slapo.label(made, "last")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_schedule(kind: str, protocol: int) -> None:
    sch = SCHEDULES[kind]()
    again = pickle.loads(pickle.dumps(sch, protocol))
    assert again == sch
    assert type(again) is slapo.Schedule
    assert type(again[0]) is type(sch[0])
    assert (again[0].origin, again[0].label, repr(again)) == (sch[0].origin, sch[0].label, repr(sch))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_copies_are_equal_and_keep_where_they_were_written(kind: str) -> None:
    sch = SCHEDULES[kind]()
    for again in (copy.copy(sch), copy.deepcopy(sch), sch[:], S + sch):
        assert again == sch
        assert again[0].origin == sch[0].origin


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_was_stored_means_the_same(kind: str) -> None:
    sch = SCHEDULES[kind]()
    again = pickle.loads(pickle.dumps(sch))
    assert look(slapo.apply(MODELS[0].make(), again)) == look(slapo.apply(MODELS[0].make(), sch))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_equality_is_of_values_and_not_of_the_line_or_the_label(kind: str) -> None:
    one, two = SCHEDULES[kind](), SCHEDULES[kind]()
    assert one == two
    assert slapo.label(one, "name") == two
    assert hash(one) == hash(two)
    others = [build() for other, build in SCHEDULES.items() if other != kind]
    assert all(other != one for other in others)


def test_a_stored_schedule_keeps_labels_and_its_order() -> None:
    sch = whole()
    again = pickle.loads(pickle.dumps(sch))
    assert [entry.label for entry in again] == [*[""] * (len(sch) - 1), "last"]
    assert slapo.drop(again, "last") == sch[:-1]


def test_what_differs_in_one_argument_is_not_equal() -> None:
    assert slapo.cast(S, "0", torch.bfloat16) != slapo.cast(S, "0", torch.float16)
    assert slapo.freeze(S, "0") != slapo.unfreeze(S, "0")
    assert slapo.freeze(S, "0") != slapo.freeze(S, "1")
    assert slapo.checkpoint(S, "0") != slapo.freeze(S, "0")


def test_a_builder_leaves_the_given_schedule_as_it_is() -> None:
    sch = slapo.freeze(S, "0")
    slapo.checkpoint(sch, "1")
    assert len(sch) == 1
    selector, primitive, args = sch[0]
    assert slapo.add(S, selector, primitive, args) == sch
