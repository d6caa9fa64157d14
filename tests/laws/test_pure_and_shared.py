"""Laws 1 and 2: the input stays as it was; the result has modules of its own and shares every other tensor."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .look import Still, look, tensors_of
from .models import MODELS, Model
from .table import PAIRS, PRIMITIVES, Primitive, named


def failing_at(site: object, args: object) -> nn.Module:
    """A primitive that spoils the random states and what it may edit, and then fails."""
    torch.rand(3), random.random(), numpy.random.rand()
    site.module.train(not site.module.training)
    site.module.register_forward_hook(lambda *_: None)
    site.module.spoiled = True
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_apply_leaves_the_input_as_it_was(primitive: Primitive, row: Model) -> None:
    model = row.make()
    still = Still(model)
    slapo.apply(model, primitive.schedule(row))
    still.check()


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_plan_leaves_the_input_as_it_was(primitive: Primitive, row: Model) -> None:
    model = row.make()
    still = Still(model)
    assert not slapo.plan(model, primitive.schedule(row)).problems
    still.check()


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_apply_that_fails_leaves_the_input_as_it_was(primitive: Primitive, row: Model) -> None:
    model = row.make()
    sch = slapo.add(primitive.schedule(row), row.places, failing_at, None)
    still = Still(model)
    with pytest.raises((RuntimeError, slapo.SlapoError)):
        slapo.apply(model, sch)
    still.check()


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_apply_in_place_that_fails_leaves_the_input_as_it_was(primitive: Primitive, row: Model) -> None:
    model = row.make()
    sch = slapo.add(primitive.schedule(row), row.places, failing_at, None)
    still = Still(model)
    with pytest.raises((RuntimeError, slapo.SlapoError)):
        slapo.apply(model, sch, inplace=True)
    still.check()


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_in_place_gives_the_given_model_and_looks_like_a_copy(primitive: Primitive, row: Model) -> None:
    expected = look(slapo.apply(row.make(), primitive.schedule(row)))
    model = row.make()
    assert slapo.apply(model, primitive.schedule(row), inplace=True) is model
    assert look(model) == expected


@pytest.mark.parametrize(("primitive", "row"), PAIRS, ids=named)
def test_the_result_has_modules_of_its_own(primitive: Primitive, row: Model) -> None:
    model = row.make()
    result = slapo.apply(model, primitive.schedule(row))
    theirs = {id(module) for module in model.modules()}
    assert not [path for path, module in result.named_modules() if id(module) in theirs]
    modes = [module.training for module in model.modules()]
    result.train(not result.training)
    for module in result.modules():
        module.register_forward_hook(lambda *_: None)
        module.fresh_attribute = 1
    assert [module.training for module in model.modules()] == modes
    assert not any(hasattr(module, "fresh_attribute") for module in model.modules())


@pytest.mark.parametrize("row", MODELS, ids=named)
def test_an_empty_schedule_shares_every_tensor_and_looks_the_same(row: Model) -> None:
    model = row.make()
    result = slapo.apply(model, slapo.Schedule())
    assert type(result) is type(model) or row.name == "traced"
    assert look(result) == look(model)
    for (path, mine), (_, theirs) in zip(result.named_modules(), model.named_modules(), strict=True):
        assert mine is not theirs
        for (name, tensor), (_, original) in zip(tensors_of(mine), tensors_of(theirs), strict=True):
            assert tensor is original, f"{path}:{name} was copied"


@pytest.mark.parametrize(("primitive", "row"), [pair for pair in PAIRS if not pair[0].restructures], ids=named)
def test_tensors_that_no_entry_touches_are_the_very_same(primitive: Primitive, row: Model) -> None:
    model = row.make()
    sites = primitive.schedule(row)[0].selector.resolve(model)
    touched = {id(t) for site in sites for module in site.module.modules() for _, t in tensors_of(module)}
    result = slapo.apply(model, primitive.schedule(row))
    others = dict(model.named_modules(remove_duplicate=False))
    for path, module in result.named_modules(remove_duplicate=False):
        for name, tensor in tensors_of(module):
            original = dict(tensors_of(others[path]))[name]
            if not primitive.tensors or id(original) not in touched:
                assert tensor is original, f"{path}:{name} was copied"
            elif tensor.dtype == original.dtype:
                assert tensor.data_ptr() == original.data_ptr(), f"{path}:{name} has a storage of its own"


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=named)
def test_two_results_are_apart_and_the_schedule_is_reusable(primitive: Primitive) -> None:
    row = MODELS[0]
    sch, first, second = primitive.schedule(row), row.make(), row.make()
    one, two = slapo.apply(first, sch), slapo.apply(second, sch)
    again = slapo.apply(first, sch)
    assert not {id(m) for m in one.modules()} & {id(m) for m in again.modules()}
    assert not {id(m) for m in one.modules()} & {id(m) for m in two.modules()}
    assert not {id(p) for p in one.parameters()} & {id(p) for p in two.parameters()}
    assert look(one) == look(two) == look(again)


def test_a_factory_that_uses_the_input_s_own_module_is_refused() -> None:
    model = MODELS[0].make()
    sch = slapo.replace(slapo.Schedule(), "0.mlp.0", lambda old: model[1].mlp[0])
    with pytest.raises(slapo.MisfitError, match="given to apply"):
        slapo.apply(model, sch)


def test_a_template_stays_as_it_was_and_apart_from_every_copy() -> None:
    template = nn.Linear(4, 8)
    model = MODELS[0].make().eval().to(torch.bfloat16)
    still = Still(template)
    result = slapo.apply(model, slapo.replace(slapo.Schedule(), "*.mlp.0", template, weights="fresh"))
    still.check()
    made = [result[n].mlp[0] for n in range(3)]
    assert len({id(one) for one in made}) == len({one.weight.data_ptr() for one in made}) == 3
    assert template.weight.data_ptr() not in {one.weight.data_ptr() for one in made}
    assert {(one.training, one.weight.dtype) for one in made} == {(False, torch.bfloat16)}
