"""Laws 1, 2 and 4 for what hangs on plain attributes.

References follow into the copy and follow replacements; what would run the original is made anew or refused.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import slapo_fn as slapo

from .look import Still
from .models import Symmetric, linear, scaled_forward
from .table import refit

S = slapo.Schedule()


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Holder:
    module: Any
    rest: Any = None


@dataclass(frozen=True)
class FrozenHolder:
    module: Any


def parent() -> nn.Module:
    net = nn.Module()
    net.child, net.other = linear(), nn.Tanh()
    return net


def cyclic(child: nn.Module) -> list[Any]:
    made: list[Any] = [child]
    made.append(made)
    return made


class Reference(NamedTuple):
    """How a child is referred to by a plain attribute, and how it is reached again."""

    store: Callable[[nn.Module], Any]
    reach: Callable[[Any], Any]


REFERENCES = {
    "list": Reference(lambda c: [c], lambda v: v[0]),
    "tuple": Reference(lambda c: (1, c), lambda v: v[1]),
    "dict": Reference(lambda c: {"a": [{"b": c}]}, lambda v: v["a"][0]["b"]),
    "dict key": Reference(lambda c: {c: 1}, lambda v: next(iter(v))),
    "set": Reference(lambda c: {c}, lambda v: next(iter(v))),
    "cycle": Reference(cyclic, lambda v: v[1][1][0]),
    "weakref": Reference(lambda c: weakref.ref(c), lambda v: v()),
    "bound method": Reference(lambda c: c.forward, lambda v: v.__self__),
    "partial": Reference(lambda c: functools.partial(print, c), lambda v: v.args[0]),
    "partial of a bound method": Reference(lambda c: functools.partial(c.forward), lambda v: v.func.__self__),
    "namedtuple": Reference(lambda c: Pair(1, c), lambda v: v.right),
    "dataclass": Reference(Holder, lambda v: v.module),
    "frozen dataclass": Reference(FrozenHolder, lambda v: v.module),
    "namespace": Reference(lambda c: types.SimpleNamespace(deep=[c]), lambda v: v.deep[0]),
    "list with a stranger after it": Reference(lambda c: [c, linear()], lambda v: v[0]),
    "object that holds a tensor with a graph": Reference(
        lambda c: Holder(c, rest=torch.ones(1, requires_grad=True) * 2), lambda v: v.module
    ),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_points_into_the_copy(kind: str) -> None:
    store, reach = REFERENCES[kind]
    model = parent()
    model.__dict__["kept"] = store(model.child)
    still = Still(model)
    result = slapo.apply(model, slapo.checkpoint(S, "child"))
    assert reach(result.kept) is result.child
    assert reach(model.kept) is model.child
    still.check()


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_follows_a_replacement(kind: str, inplace: bool) -> None:
    store, reach = REFERENCES[kind]
    model = parent()
    model.__dict__["kept"] = store(model.child)
    result = slapo.apply(model, slapo.replace(S, "child", refit), inplace=inplace)
    assert reach(result.kept) is result.child


@pytest.mark.parametrize("kind", ["list", "dict", "namedtuple"])
def test_a_reference_follows_two_replacements_in_a_row(kind: str) -> None:
    store, reach = REFERENCES[kind]
    model = parent()
    model.__dict__["kept"] = store(model.child)
    result = slapo.apply(model, slapo.replace(slapo.replace(S, "child", refit), "child", refit))
    assert reach(result.kept) is result.child


def test_a_reference_to_what_a_wrapper_went_around_is_the_wrapper_but_not_inside_it() -> None:
    model = parent()
    model.__dict__["kept"] = [model.child]
    result = slapo.apply(model, slapo.replace(S, "child", lambda old: nn.Sequential(old)))
    assert result.kept[0] is result.child
    assert type(result.child[0]) is nn.Linear


def test_a_method_kept_on_an_attribute_is_the_new_module_s_own() -> None:
    model = parent()
    model.__dict__["run"] = model.child.forward
    result = slapo.apply(model, slapo.replace(S, "child", lambda old: nn.Identity(), untie=True))
    assert torch.equal(result.run(torch.ones(2, 4)), torch.ones(2, 4))


def test_one_object_on_two_attributes_stays_one_object() -> None:
    model = parent()
    model.__dict__["one"] = model.__dict__["two"] = [model.child]
    result = slapo.apply(model, slapo.replace(S, "child", refit))
    assert result.one is result.two
    assert result.one is not model.one


def test_a_module_outside_the_tree_is_copied_and_shares_its_tensors() -> None:
    model = parent()
    model.__dict__["teacher"] = [nn.Sequential(linear())]
    result = slapo.apply(model, S)
    assert result.teacher[0] is not model.teacher[0]
    assert result.teacher[0][0].weight is model.teacher[0][0].weight


def test_a_reference_upwards_does_not_loop() -> None:
    model = parent()
    model.child.__dict__["up"] = model
    model.child.__dict__["weak_up"] = weakref.ref(model)
    result = slapo.apply(model, slapo.checkpoint(S, "child"))
    assert result.child.up is result
    assert result.child.weak_up() is result


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "weakref"])
def test_a_reference_to_a_parameter_follows_its_renewal(kind: str, inplace: bool) -> None:
    """As `nn.LSTM` has them: lists of, and weak references to, its own parameters."""
    store, reach = REFERENCES[kind]
    model = parent()
    model.__dict__["kept"] = store(model.child.weight)
    result = slapo.apply(model, slapo.freeze(S, "child"), inplace=inplace)
    assert reach(result.kept) is result.child.weight


# ---- what cannot be copied apart


def closing_over(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x_BD: nn.functional.linear(x_BD, module.weight) * 2


def closing_over_a_closure(module: nn.Module) -> Callable[[Tensor], Tensor]:
    inner = closing_over(module)
    return lambda x_BD: inner(x_BD) + 1


def closing_over_a_method(module: nn.Module) -> Callable[[Tensor], Tensor]:
    inner = module.forward
    return lambda x_BD: inner(x_BD) + 1


def closing_over_a_list(module: nn.Module) -> Callable[[Tensor], Tensor]:
    modules = [module]
    return lambda x_BD: modules[0].weight.sum() * x_BD


def default_argument(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x_BD: Tensor, module: nn.Module = module) -> Tensor:
        return x_BD * module.weight.sum()

    return forward


def method_of_a_helper(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return functools.partial(closing_over(module))


CLOSURES = (
    closing_over,
    closing_over_a_closure,
    closing_over_a_method,
    closing_over_a_list,
    default_argument,
    method_of_a_helper,
)


def assert_apart_or_refused(model: nn.Module) -> None:
    """A copy's own forward never runs the original's weights: it runs the copy's, or there is no copy."""
    still = Still(model)
    try:
        result = slapo.apply(model, S)
    except slapo.ForkError as error:
        if "inplace=True" not in str(error):
            raise
        still.check()
        return
    still.check()
    x_BD = torch.ones(2, 4)
    expected = model.child(x_BD)
    assert torch.equal(result.child(x_BD), expected)
    for name, parameter in list(result.child.named_parameters()):
        holder, _, last = name.rpartition(".")
        setattr(result.child.get_submodule(holder), last, nn.Parameter(torch.zeros_like(parameter)))
    assert not torch.equal(result.child(x_BD), expected), "the copy runs the original's weights"
    assert torch.equal(model.child(x_BD), expected)


@pytest.mark.parametrize("make", CLOSURES, ids=lambda make: make.__name__)
def test_a_closure_over_a_module_is_made_anew_or_refused(make: Callable[[nn.Module], Any]) -> None:
    model = parent()
    model.child.forward = make(model.child)
    assert_apart_or_refused(model)


@pytest.mark.parametrize("make", CLOSURES, ids=lambda make: make.__name__)
def test_a_closure_over_a_module_is_taken_in_place(make: Callable[[nn.Module], Any]) -> None:
    model = parent()
    model.child.forward = make(model.child)
    expected = model.child(torch.ones(2, 4))
    result = slapo.apply(model, slapo.checkpoint(S, "child"), inplace=True)
    assert torch.equal(result.child(torch.ones(2, 4)), expected)


def test_a_closure_under_a_layer_is_made_anew_or_refused() -> None:
    model = parent()
    model.child.forward = closing_over(model.child)
    assert_apart_or_refused(slapo.apply(model, slapo.checkpoint(S, "child"), inplace=True))


def test_a_closure_on_a_module_that_copies_itself_is_made_anew_or_refused() -> None:
    model = parent()
    parametrize.register_parametrization(model.child, "weight", Symmetric())
    model.child.forward = closing_over(model.child)
    assert_apart_or_refused(model)


def test_a_closure_over_no_module_is_shared() -> None:
    model, factor = parent(), 3.0
    model.child.__dict__["scale"] = lambda x: x * factor
    assert slapo.apply(model, S).child.scale is model.child.scale


def test_a_method_of_the_instance_is_bound_to_the_copy_under_every_layer() -> None:
    model = parent()
    model.child.forward = types.MethodType(scaled_forward, model.child)
    result = slapo.apply(model, slapo.checkpoint(slapo.compile(S, "child", backend="eager"), "child"))
    expected = model.child(torch.ones(2, 4))
    result.child.weight = nn.Parameter(result.child.weight * 2)
    assert torch.equal(model.child(torch.ones(2, 4)), expected)
    assert not torch.equal(result.child(torch.ones(2, 4)), expected)
