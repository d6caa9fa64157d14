"""B201, B202, and several entries with patterns on one module: in any order, each may be dropped."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Deep, Empty, LinearRelu, TwoLayers, equal, fused, linear_relu, within

X = torch.rand(3, 4)
HERE = slapo.pattern(linear_relu, within="")
MODES = pytest.mark.parametrize("inplace", [False, True])


class Counts(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(input)


@MODES
@pytest.mark.parametrize("count", [1, 2])
def test_b201_b202_each_found_part_is_recomputed_and_nothing_else(count: int, inplace: bool) -> None:
    model = within(
        lambda s, x: s.c(F.relu(s.b(F.relu(s.a(x))))), a=Counts(4, 4), b=Counts(4, 4), c=Counts(4, 4)
    ).double()
    reference = copy.deepcopy(model)
    which = "{a,b}" if count == 2 else "a"
    found = slapo.pattern(lambda x: F.relu(slapo.call_module(which, x)), within="")
    out = slapo.apply(model, slapo.checkpoint(Empty, found), inplace=inplace)
    assert list(out.state_dict()) == list(reference.state_dict())
    equal(reference, out, X.double())
    Counts.calls = 0
    out(X.double()).sum().backward()
    assert Counts.calls == 3 + count


def test_b201_parameters_of_the_module_itself_and_dropout() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x @ self.weight + self.shift), 0.5, self.training) * 2

    model = within(forward, weight=nn.Parameter(torch.rand(4, 4)))
    model.register_buffer("shift", torch.rand(4))
    for found in (
        slapo.pattern(lambda x, w, b: F.relu(x @ w + b), within=""),
        slapo.pattern(lambda x, w: x @ w, within=""),
        slapo.calls("dropout", within=""),
    ):
        out = slapo.apply(model, slapo.checkpoint(Empty, found))
        equal(model.train(), out.train(), X)
        equal(model.eval(), out.eval(), X)


def test_b201_several_outputs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        return {"a": y.sin(), "b": (y.cos(), x)}

    def both(x: Tensor) -> Any:
        y = slapo.call_module("fc", x)
        return y.sin(), y.cos()

    model = within(forward, fc=nn.Linear(4, 4))
    for sch in (
        slapo.checkpoint(Empty, slapo.pattern(both, within="")),
        slapo.compile(Empty, slapo.pattern(both, within=""), backend="eager"),
        slapo.fuse(Empty, slapo.pattern(both, within=""), backend="eager"),
    ):
        equal(model, slapo.apply(model, sch), X)


KINDS: dict[str, Any] = {
    "checkpoint": lambda sch: slapo.checkpoint(sch, HERE),
    "compile": lambda sch: slapo.compile(sch, HERE, backend="eager"),
    "probe": lambda sch: slapo.probe(sch, HERE, lambda path, value: None),
    "fuse": lambda sch: slapo.fuse(sch, HERE, backend="eager"),
}


@pytest.mark.parametrize("order", [order for n in (2, 3, 4) for order in itertools.permutations(KINDS, n)])
def test_on_one_place_in_any_order(order: tuple[str, ...]) -> None:
    sch = Empty
    for name in order:
        sch = KINDS[name](sch)
    model = TwoLayers()
    out = slapo.apply(model, sch)
    equal(model, out, X)
    assert list(out.state_dict()) == list(model.state_dict())
    assert set(dict(out.named_parameters())) == set(dict(model.named_parameters()))
    equal(model, copy.deepcopy(out), X)
    for number in range(len(sch)):
        equal(model, slapo.apply(model, slapo.drop(sch, number)), X)


def test_two_patterns_one_after_the_other_and_either_dropped() -> None:
    one = slapo.pattern(lambda x: F.relu(slapo.call_module("a", x)), within="")
    two = slapo.pattern(lambda x: F.relu(slapo.call_module("b", x)), within="")
    sch = slapo.fuse(slapo.fuse(Empty, one, fused), two, fused)
    model = TwoLayers()
    for schedule in (sch, slapo.drop(sch, 0), slapo.drop(sch, 1), sch[::-1]):
        out = slapo.apply(model, schedule)
        equal(model, out, X)
        assert slapo.to_original(out).keys() == model.state_dict().keys()


def test_a_pattern_over_what_earlier_ones_made() -> None:
    over = slapo.pattern(lambda x: slapo.call_module(LinearRelu, slapo.call_module(LinearRelu, x)), within="")
    sch = slapo.fuse(slapo.fuse(Empty, HERE, fused), over, backend=None, name="both")
    model = TwoLayers()
    out = slapo.apply(model, sch)
    equal(model, out, X)
    assert next(iter(out.state_dict())) == "both_0.0.linear.weight"
    assert list(slapo.to_original(out)) == list(model.state_dict())


@MODES
def test_within_a_module_that_an_earlier_entry_put_in(inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.replace(Empty, "0", lambda old: nn.Sequential(old, nn.ReLU()))
    sch = slapo.fuse(slapo.trace(sch, "0"), slapo.pattern(linear_relu, within="0"), fused)
    expected = F.relu(model(X))
    out = slapo.apply(model, sch, inplace=inplace)
    assert torch.equal(out(X), expected)
    assert list(out.state_dict()) == ["0.LinearRelu_0.linear.weight", "0.LinearRelu_0.linear.bias"]


def test_a_place_that_an_earlier_entry_took_is_told_with_that_entry() -> None:
    sch = slapo.checkpoint(slapo.fuse(Empty, HERE, fused), HERE)
    with pytest.raises(slapo.NoMatchError) as caught:
        slapo.apply(TwoLayers(), sch)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert "entry 0 (fuse" in notes


def test_a_smaller_place_inside_a_checkpointed_one_works_or_is_told() -> None:
    larger = slapo.pattern(lambda x: linear_relu(linear_relu(x)), within="")
    for first, second in ((HERE, larger), (larger, HERE)):
        try:
            out = slapo.apply(TwoLayers(), slapo.checkpoint(slapo.checkpoint(Empty, first), second))
        except slapo.NoMatchError as error:
            told = str(error) + "\n".join(getattr(error, "__notes__", []))
            assert "entry 0" in told
            continue
        equal(TwoLayers(), out, X)


def test_the_given_model_stays_and_plan_tells_the_places() -> None:
    model = Deep()
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    attributes = [sorted(vars(module)) for module in model.modules()]
    every = slapo.pattern(linear_relu)
    sch = slapo.checkpoint(slapo.fuse(Empty, every[::2], fused), every)
    told = str(slapo.plan(model, sch))
    slapo.apply(model, sch)
    assert "tower.0.u.LinearRelu_0: a+relu -> LinearRelu" in told.replace("\n", " ") or "LinearRelu_0" in told
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_tied_weight_in_a_part_stays_tied_or_is_refused() -> None:
    model = within(lambda s, x: s.c(F.relu(s.a(x))), a=nn.Linear(4, 4), c=nn.Linear(4, 4))
    model.c.weight = model.a.weight
    for sch in (
        slapo.fuse(Empty, HERE, fused),
        slapo.replace(Empty, HERE, LinearRelu(), weights={"linear": "a"}),
        slapo.checkpoint(Empty, HERE),
    ):
        out = slapo.apply(model, sch)
        equal(model, out, X)
        assert sum(one is model.a.weight for one in out.parameters()) == 1
    with pytest.raises(slapo.TieError, match=r"a\.weight and c\.weight are one"):
        slapo.apply(model, slapo.replace(Empty, HERE, LinearRelu(), weights="fresh"))
    out = slapo.apply(model, slapo.replace(Empty, HERE, LinearRelu(), weights="fresh", untie=True))
    assert out.c.weight is model.a.weight


def test_b009_case_9_what_is_new_takes_over_mode_dtype_and_frozenness() -> None:
    model = TwoLayers().eval().double()
    model.a.requires_grad_(False)
    out = slapo.apply(model, slapo.replace(Empty, HERE, LinearRelu(), weights="fresh"))
    assert [one.requires_grad for one in out.parameters()] == [False, False, True, True]
    assert {one.dtype for one in out.parameters()} == {torch.float64}
    assert not any(module.training for module in out.modules())


class Layers(nn.Module):
    """Three causal layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            within(attend, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def attend(self: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)


def test_case_33_the_attention_function_on_one_of_three_layers() -> None:
    called: list[Any] = []

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        called.append(q.shape)
        size = q.size(-2)
        mask = torch.ones(size, size).tril().log()
        return torch.softmax(q @ k.transpose(-2, -1) / 2 + mask, -1) @ v

    model = Layers()
    found = slapo.pattern(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), within="layers.1")
    out = slapo.apply(model, slapo.replace(Empty, found, own))
    x = torch.rand(1, 5, 4)
    equal(model, out, x, close=True)
    assert called == [(1, 5, 4)]
    assert ["forward" in vars(layer) for layer in out.layers] == [False, True, False]
    changed = x.clone()
    changed[:, 3] += 1
    assert torch.equal(out(x)[:, :3], out(changed)[:, :3])
