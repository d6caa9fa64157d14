"""B064, B069: hooks on modules inside a part that is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Attention, Empty, LinearRelu, TwoLayers, linear_relu, within

X = torch.rand(2, 4)
MODES = pytest.mark.parametrize("inplace", [False, True])
HOOKS = {
    "pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward": "register_full_backward_hook",
    "backward pre": "register_full_backward_pre_hook",
}


class Three(nn.Module):
    """c(b(a(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


CHAIN = slapo.pattern(lambda x: slapo.call_module("c", slapo.call_module("b", slapo.call_module("a", x))), within="")


def hook(module: nn.Module, kind: str, ran: list[str]) -> Any:
    return getattr(module, HOOKS[kind])(lambda *values: ran.append(kind))


@MODES
@pytest.mark.parametrize(("name", "kind"), [("a", "pre"), ("a", "backward"), ("c", "forward")])
def test_b064_hooks_at_the_ends_move_to_the_new_module(name: str, kind: str, inplace: bool) -> None:
    ran: list[str] = []
    model = Three()
    handle = hook(model.get_submodule(name), kind, ran)
    out = slapo.apply(model, slapo.replace(Empty, CHAIN, nn.Linear(4, 4), weights="fresh"), inplace=inplace)
    out(X.clone().requires_grad_()).sum().backward()
    assert ran == [kind]
    if inplace:
        handle.remove()
        out(X)
        assert ran == [kind]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a", "forward"), ("b", "pre"), ("b", "forward"), ("b", "backward"), ("c", "pre"), ("c", "backward")],
)
@MODES
def test_b064_hooks_inside_are_refused(name: str, kind: str, inplace: bool) -> None:
    model = Three()
    hook(model.get_submodule(name), kind, [])
    with pytest.raises(slapo.HookError, match=name):
        slapo.apply(model, slapo.replace(Empty, CHAIN, nn.Linear(4, 4), weights="fresh"), inplace=inplace)
    assert len(model.get_submodule(name)._forward_pre_hooks) == (kind == "pre")
    assert list(dict(model.named_children())) == ["a", "b", "c"]


def test_b064_and_named_by_their_paths_in_the_model() -> None:
    model = Three()
    hook(model.b, "pre", [])
    with pytest.raises(slapo.HookError, match="hooks on b would"):
        slapo.apply(model, slapo.replace(Empty, CHAIN, nn.Linear(4, 4), weights="fresh"))


def test_b064_after_a_refusal_of_one_the_hooks_of_others_are_where_they_were() -> None:
    model = TwoLayers()
    ran: list[str] = []
    hook(model.a, "pre", ran)
    hook(model.b, "forward", ran)
    sch = slapo.replace(Empty, slapo.pattern(linear_relu, within=""), LinearRelu(), weights="fresh")
    with pytest.raises(slapo.HookError):
        slapo.apply(model, sch, inplace=True)
    model(X)
    assert ran == ["pre", "forward"]
    assert len(model.a._forward_pre_hooks) == 1


@pytest.mark.parametrize(("name", "kind"), [("a", "pre"), ("a", "backward")])
def test_b064_a_function_cannot_carry_hooks_so_it_is_refused(name: str, kind: str) -> None:
    model = TwoLayers()
    hook(model.get_submodule(name), kind, [])
    with pytest.raises(slapo.HookError, match="a"):
        slapo.apply(model, slapo.replace(Empty, slapo.pattern(linear_relu, within=""), torch.relu))


def test_b064_a_module_that_the_new_one_keeps_keeps_its_hooks() -> None:
    ran: list[str] = []
    model = TwoLayers()
    for kind in HOOKS:
        hook(model.a, kind, ran)

    def into(part: Any) -> LinearRelu:
        made = LinearRelu()
        (made.linear,) = part.calls
        return made

    out = slapo.apply(model, slapo.fuse(Empty, slapo.pattern(linear_relu, within=""), into))
    out(X.clone().requires_grad_()).sum().backward()
    assert sorted(ran) == sorted(HOOKS)
    assert set(map(id, out.LinearRelu_0.linear._forward_hooks.values())) == set(
        map(id, model.a._forward_hooks.values())
    )


@pytest.mark.parametrize("kind", HOOKS)
def test_b069_hooks_in_parallel_branches_are_refused(kind: str) -> None:
    model = Attention()
    hook(model.k_proj, kind, [])
    branches = slapo.parallel(slapo.pattern(lambda x: slapo.call_module("{q,k,v}_proj", x), within=""))
    with pytest.raises(slapo.HookError, match="k_proj"):
        slapo.apply(model, slapo.replace(Empty, branches, lambda x: (x, x, x)))


@pytest.mark.parametrize("kind", HOOKS)
def test_b064_hooks_of_the_module_whose_forward_it_is_stay_and_run_once(kind: str) -> None:
    ran: list[str] = []
    model = TwoLayers()
    hook(model, kind, ran)
    sch = slapo.checkpoint(slapo.trace(Empty, ""), slapo.pattern(lambda x: F.relu(x), within=""))
    out = slapo.apply(model, sch)
    out(X.clone().requires_grad_()).sum().backward()
    assert ran == [kind]


def test_b064_a_hooked_inner_module_that_a_flat_trace_meets_stays_a_call() -> None:
    ran: list[str] = []
    inner = within(lambda self, x: x * 2)
    hook(inner, "forward", ran)
    out = slapo.apply(within(lambda self, x: self.inner(x) + 1, inner=inner), slapo.trace(Empty, "", flat=True))
    assert torch.equal(out(X), X * 2 + 1)
    assert ran == ["forward"]
