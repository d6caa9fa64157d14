"""What is put in the place of a part; and parts, and their parents, that stand in the model by now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_fn as slapo

from .nets_parts import Empty, LinearRelu, TwoLayers, equal, fused, linear_relu

X = torch.rand(3, 4)
HERE = slapo.pattern(linear_relu, within="")


@pytest.mark.parametrize(
    "into",
    [
        lambda part: None,
        lambda part: F.relu,
        lambda part: LinearRelu,
        lambda part: X,
        lambda part: part.calls,
        lambda part: part.owner,
        lambda part: nn.Bilinear(4, 4, 4),
        pytest.param(
            lambda part: nn.ModuleList(part.calls),
            marks=pytest.mark.xfail(strict=True, reason="a container has no forward: NotImplementedError at run time"),
        ),
        pytest.param(
            nn.ReLU, marks=pytest.mark.xfail(strict=True, reason="replace refuses such a class, fuse calls ReLU(part)")
        ),
    ],
)
def test_into_gives_something_else_than_a_module_for_the_place(into: Any) -> None:
    with pytest.raises(slapo.SlapoError, match=r"module|argument|forward"):
        slapo.apply(TwoLayers(), slapo.fuse(Empty, HERE, into))


@pytest.mark.xfail(strict=True, reason="the function is called with tensors, and its module goes on as a value")
@pytest.mark.parametrize("new", [lambda part: LinearRelu(), lambda part: fused(part)], ids=["new", "of the part"])
def test_a_factory_given_for_a_function_is_refused_with_a_hint(new: Any) -> None:
    with pytest.raises(slapo.SlapoError, match=r"fuse\(|into"):
        slapo.apply(TwoLayers(), slapo.replace(Empty, HERE, new))(X)


# ---- parts that stand in the model by now


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


def hooked(kind: str, calls: list[int]) -> nn.Module:
    model = slapo.apply(TwoLayers(), slapo.checkpoint(Empty, HERE))
    getattr(model.get_submodule("linear_relu_0"), kind)(lambda *values: calls.append(1))
    return model


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("entry", ["into", "compile"])
def test_hooks_on_a_part_go_with_it(kind: str, entry: str) -> None:
    calls: list[int] = []
    model = hooked(kind, calls)
    sch = slapo.fuse(Empty, HERE, fused) if entry == "into" else slapo.compile(Empty, HERE, backend="eager")
    slapo.apply(model, sch)(X.clone().requires_grad_()).sum().backward()
    assert calls == [1]


LOSES = pytest.mark.xfail(strict=True, reason="a function carries no hooks, and nothing asks whether the part had some")


@LOSES
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_a_part_that_becomes_a_function_are_refused(kind: str) -> None:
    with pytest.raises(slapo.HookError):
        slapo.apply(hooked(kind, []), slapo.replace(Empty, HERE, torch.relu))


@LOSES
def test_nor_is_a_probe_of_the_same_schedule_lost() -> None:
    seen: list[str] = []
    probed = slapo.probe(Empty, HERE, lambda path, value: seen.append(path))
    try:
        out = slapo.apply(TwoLayers(), slapo.replace(probed, HERE, torch.relu))
    except slapo.SlapoError:
        return
    out(X)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "kind",
    [
        "into",
        "sequential",
        pytest.param("eager", marks=pytest.mark.xfail(strict=True, reason="the part is registered as one more layer")),
        pytest.param("checkpoint", marks=pytest.mark.xfail(strict=True, reason="as above")),
    ],
)
def test_a_sequential_goes_on_being_one(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Softmax(-1))
    sch = {
        "into": slapo.fuse(Empty, HERE, fused),
        "sequential": slapo.fuse(Empty, HERE, backend=None),
        "eager": slapo.fuse(Empty, HERE, backend="eager"),
        "checkpoint": slapo.checkpoint(Empty, HERE),
    }[kind]
    out = slapo.apply(model, sch)
    equal(model, out, X)
    assert isinstance(out[-1], nn.Softmax)
    y = X
    for layer in out:
        y = layer(y)
    assert torch.equal(y, model(X))
