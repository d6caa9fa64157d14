"""Code of inner modules drawn into an outer graph, and what other entries do to these modules before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import slapo_fn as slapo

from .nets_parts import Empty, TwoLayers, equal, fused, linear_relu, within

X = torch.rand(3, 4)
FLAT = slapo.pattern(linear_relu, within="", flat=True)
INNER = slapo.pattern(linear_relu, within="n")
OUTER = slapo.pattern(lambda x, y: x + y, within="")
TRACED = slapo.trace(Empty, "", flat=True)


def model() -> nn.Module:
    return within(lambda self, x: self.n(x) + self.k(x), n=TwoLayers(), k=TwoLayers())


def same(net: nn.Module, out: nn.Module) -> None:
    equal(net, out, X, close=True)
    original = slapo.to_original(out)
    assert original.keys() == net.state_dict().keys()
    assert all(torch.equal(one, original[key]) for key, one in net.state_dict().items())


ORDERS = {
    "two, inner": (FLAT[:2], INNER),
    "inner, all": (INNER, FLAT),
    "one, all": (FLAT[:1], FLAT),
    "first of inner, all": (INNER[:1], FLAT),
    "last two, inner": (FLAT[2:], INNER),
    "all, outer": (FLAT, OUTER),
}


@pytest.mark.parametrize("kind", ["eager", "checkpoint"])
@pytest.mark.parametrize("order", ORDERS)
def test_places_found_flat_and_not(order: str, kind: str) -> None:
    net, sch = model(), Empty
    for found in ORDERS[order]:
        sch = slapo.fuse(sch, found, backend="eager") if kind == "eager" else slapo.checkpoint(sch, found)
    same(net, slapo.apply(net, sch))


LOST = "what the inner module's map said of its tensors is lost where they are moved out of it"
GONE = "the outer graph calls, by their paths, layers that the second entry moved"


@pytest.mark.parametrize(
    "order",
    [
        "two, inner",
        "one, all",
        pytest.param("inner, all", marks=pytest.mark.xfail(strict=True, reason=LOST)),
        pytest.param("first of inner, all", marks=pytest.mark.xfail(strict=True, reason=LOST)),
        pytest.param("last two, inner", marks=pytest.mark.xfail(strict=True, reason=GONE)),
    ],
)
def test_places_found_flat_and_not_become_modules_or_are_refused(order: str) -> None:
    net, (first, second) = model(), ORDERS[order]
    try:
        out = slapo.apply(net, slapo.fuse(slapo.fuse(Empty, first, fused), second, fused))
    except slapo.SlapoError:
        return
    same(net, out)


@pytest.mark.parametrize("before", ["trace", "replace", "eager"])
@pytest.mark.xfail(strict=True, reason="the program that is there is taken, flat or not")
def test_a_flat_pattern_looks_through_calls_after_an_entry_that_was_not_flat(before: str) -> None:
    net = model()
    sch = {
        "trace": slapo.trace(Empty, ""),
        "replace": slapo.replace(Empty, OUTER, torch.add),
        "eager": slapo.fuse(Empty, OUTER, backend="eager"),
    }[before]
    same(net, slapo.apply(net, slapo.fuse(sch, FLAT, backend="eager")))


seen: list[Any] = []
AFTER = {
    "probe": lambda sch: slapo.probe(sch, "n", lambda path, value: seen.append(path)),
    "hook": lambda sch: slapo.hook(sch, "n", forward=lambda *values: seen.append(1)),
    "compile": lambda sch: slapo.compile(sch, "n", backend=lambda graph, inputs: seen.append(1) or graph),
    "replace": lambda sch: slapo.replace(sch, "n", lambda old: within(lambda s, x: seen.append(1) or s.o(x), o=old)),
    "pattern": lambda sch: slapo.replace(sch, INNER, lambda x: seen.append(1) or torch.relu(x)),
}


@pytest.mark.xfail(strict=True, reason="its code is in the outer graph, which does not call it; nothing says so")
@pytest.mark.parametrize("name", AFTER)
def test_what_is_asked_of_a_module_whose_code_was_drawn_in_is_done_or_refused(name: str) -> None:
    seen.clear()
    try:
        out = slapo.apply(model(), AFTER[name](TRACED))
    except slapo.SlapoError:
        return
    out(X)
    assert seen


def test_a_later_phase_is_seen_by_a_flat_pattern() -> None:
    net, counter = model(), CompileCounter()
    same(net, slapo.apply(net, slapo.compile(slapo.checkpoint(Empty, FLAT), "", backend=counter)))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "kind",
    ["eager", "checkpoint", pytest.param("into", marks=pytest.mark.xfail(strict=True, reason="n's names stay, too"))],
)
def test_a_module_that_is_called_under_two_names_drawn_in(kind: str) -> None:
    net = within(lambda self, x: self.n(x) + self.m(x * 2), n=TwoLayers())
    net.m = net.n
    sch = {
        "eager": slapo.fuse(Empty, FLAT, backend="eager"),
        "checkpoint": slapo.checkpoint(Empty, FLAT),
        "into": slapo.fuse(Empty, FLAT, fused),
    }[kind]
    same(net, slapo.apply(net, sch))


class Sized(nn.Module):
    """A forward that only an example can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = torch.relu(self.a(x)) if x.shape[0] > 2 else self.b(x)
        return {"y": y if mask is None else y * mask, "z": (x, None)}


BY_EXAMPLE = slapo.trace(Empty, "", example=(X,))


def test_by_an_example_it_is_the_same_or_says_that_it_is_not() -> None:
    net = Sized()
    out = slapo.apply(net, BY_EXAMPLE)
    torch.testing.assert_close(out(X), net(X))
    torch.testing.assert_close(out(torch.rand(7, 4))["z"][1], None)
    for given in ((X[:1],), (X, X), (X.double(),), (X[0],)):
        with pytest.raises(slapo.TraceError, match=r"is called with|traced with"):
            out(*given)
    for entry in (slapo.fuse(BY_EXAMPLE, "{a,b}"), slapo.trace(slapo.fuse(Empty, "{a,b}"), "", example=(X,))):
        fused_one = slapo.apply(net, entry)
        torch.testing.assert_close(fused_one(X), net(X))
        assert slapo.to_original(fused_one).keys() == net.state_dict().keys()


@pytest.mark.xfail(strict=True, reason="the exported graph reads a.weight and calls no a")
@pytest.mark.parametrize("kind", ["wrap", "probe"])
def test_what_is_asked_of_a_child_of_an_exported_forward_is_done_or_refused(kind: str) -> None:
    seen.clear()
    sch = (
        slapo.probe(BY_EXAMPLE, "a", lambda path, value: seen.append(path))
        if kind == "probe"
        else slapo.replace(BY_EXAMPLE, "a", lambda old: within(lambda s, x: seen.append(1) or s.o(x), o=old))
    )
    try:
        out = slapo.apply(Sized(), sch)
    except slapo.SlapoError:
        return
    out(X)
    assert seen
