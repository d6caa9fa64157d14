"""B100-B124: turn forwards into graphs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import slapo_fn as slapo

from .nets_parts import Attention, Deep, Empty, TwoLayers, equal, text, within

X = torch.rand(3, 4)
MODES = pytest.mark.parametrize("inplace", [False, True])


class Outer(nn.Module):
    """attention.inner.query and attention.output.dense, nearly as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = within(lambda s, x: s.output(s.inner(x)))
        self.attention.inner = within(lambda s, x: s.query(x) * 2, query=nn.Linear(4, 4))
        self.attention.output = within(lambda s, x: s.norm(s.dense(x)), dense=nn.Linear(4, 4), norm=nn.LayerNorm(4))
        self.intermediate = within(lambda s, x: s.dense(x), dense=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate(self.attention(x))


def traced(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if "forward" in vars(module)]


@MODES
def test_b100_recursively_with_all_names_and_leaves_as_they_are(inplace: bool) -> None:
    model = Outer()
    names, keys, reference = [name for name, _ in model.named_modules()], list(model.state_dict()), copy.deepcopy(model)
    out = slapo.apply(model, slapo.trace(Empty, "", recursive=True), inplace=inplace)
    assert traced(out) == ["", "attention", "attention.inner", "attention.output", "intermediate"]
    assert [name for name, _ in out.named_modules()] == names
    assert list(out.state_dict()) == keys
    equal(reference, out, X)


@pytest.mark.parametrize("settings", [{}, {"recursive": True}, {"flat": True, "leaves": "self"}])
def test_b102_a_child_that_is_called_self_as_in_bert(settings: dict[str, Any]) -> None:
    model = within(lambda own, x: own.output(own.self(x)), output=nn.Linear(4, 4))
    model.self = within(lambda own, x: own.query(x) * 2, query=nn.Linear(4, 4))
    equal(model, slapo.apply(model, slapo.trace(Empty, "", **settings)), X)


def test_b101_only_the_asked_subtree() -> None:
    out = slapo.apply(Outer(), slapo.trace(Empty, "attention", recursive=True))
    assert traced(out) == ["attention", "attention.inner", "attention.output"]


def test_b102_flat_is_one_graph_and_inner_modules_stay_found() -> None:
    model = Outer()
    out = slapo.apply(model, slapo.trace(Empty, "attention", flat=True))
    (graph,) = slapo.graph_of(out.attention).graphs
    assert [node.target for node in graph.nodes if node.op == "call_module"] == [
        "inner.query",
        "output.dense",
        "output.norm",
    ]
    assert list(out.state_dict()) == list(model.state_dict())
    assert slapo.select(out, "attention.output.dense", nn.Linear)
    equal(model, out, X)


@pytest.mark.parametrize("leaf", ["**.output", "output"])
def test_b103_leaves_by_path(leaf: str) -> None:
    out = slapo.apply(Outer(), slapo.trace(Empty, "attention", flat=True, leaves=leaf))
    assert "self.output(" in text(out.attention)
    assert "self.inner.query(" in text(out.attention)


def test_b103_a_class_is_that_class_and_no_name_that_contains_it() -> None:
    class LR(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class LRx(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 2

    model = nn.Sequential(LR(), LRx())
    out = slapo.apply(model, slapo.trace(Empty, "", flat=True, leaves=LR))
    assert text(out).count("getattr(self") == 1
    assert "+ 2" in text(out)
    equal(model, out, X)


def test_b104_not_recursive() -> None:
    assert traced(slapo.apply(Outer(), slapo.trace(Empty, "attention"))) == ["attention"]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.fc(x) * scale
        return y if mask is None else y.masked_fill(mask, 0.0)


def test_b106_another_value_of_a_fixed_argument_is_an_error_at_run_time() -> None:
    model = Masked()
    out = slapo.apply(model, slapo.trace(Empty, "", constants={"mask": None, "scale": 2.0}))
    assert torch.equal(out(X, None, 2.0), model(X, scale=2.0))
    assert torch.equal(out(X, scale=2.0), model(X, scale=2.0))
    for wrong in ({"mask": X > 0, "scale": 2.0}, {"scale": 3.0}):
        with pytest.raises(slapo.TraceError, match="traced with"):
            out(X, **wrong)
    with pytest.raises(slapo.TraceError, match="traced with scale"):
        out(X)


def test_b106_also_after_a_pattern_worked_on_it_and_when_compiled() -> None:
    out = slapo.apply(Masked(), slapo.trace(Empty, "", constants={"mask": None}))
    out = slapo.apply(out, slapo.replace(Empty, slapo.calls("fc", within=""), torch.relu))
    with pytest.raises(slapo.TraceError, match="mask=None"):
        out(X, X > 0)
    outer = slapo.apply(nn.Sequential(out), slapo.trace(Empty, "", flat=True))
    assert torch.equal(outer(X), out(X))


@MODES
def test_b107_a_module_that_cannot_be_traced_is_refused_and_stays(inplace: bool) -> None:
    model = Masked()
    with pytest.raises(slapo.TraceError, match=r"test_trace.py:\d+ `return y if mask is None") as caught:
        slapo.apply(model, slapo.trace(Empty, ""), inplace=inplace)
    assert "constants={'mask': None}" in str(caught.value)
    assert traced(model) == []
    outer = within(lambda self, x: self.inner(x) + 1, inner=model)
    out = slapo.apply(outer, slapo.trace(Empty, "", recursive=True))
    assert traced(out) == [""]
    assert torch.equal(out(X), model(X) + 1)


def test_b108_again_is_the_same_and_flat_after_a_trace_is_flat() -> None:
    once = slapo.trace(Empty, "attention")
    out = slapo.apply(Outer(), slapo.trace(once, "attention", flat=True))
    assert "output.dense" in text(out.attention)
    again = slapo.apply(Outer(), once + once)
    assert text(again.attention) == text(slapo.apply(Outer(), once).attention)


CONSTANT = torch.tensor(3.0)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "plain tensor"])
def test_b109_its_own_tensors(kind: str, flat: bool) -> None:
    model = within(lambda self, x: x * self.held + 1)
    if kind == "buffer":
        model.register_buffer("held", torch.rand(4), persistent=False)
    else:
        model.held = nn.Parameter(torch.rand(4)) if kind == "parameter" else torch.rand(4)
    out = slapo.apply(model, slapo.trace(Empty, "", flat=flat))
    equal(model, out, X)
    assert list(out.state_dict()) == list(model.state_dict())
    copied = copy.deepcopy(out)
    with torch.no_grad():
        copied.held.zero_()
    assert torch.equal(copied(X), torch.ones(3, 4))


def test_b109_a_constant_tensor_from_outside() -> None:
    model = within(lambda self, x: x * CONSTANT)
    out = slapo.apply(model, slapo.trace(Empty, ""))
    equal(model, out, X)
    equal(model, copy.deepcopy(out), X)


def test_b110_a_child_that_is_never_called() -> None:
    model = within(lambda self, x: x + 1, unused=Masked(), inner=nn.ModuleList([nn.Linear(2, 2)]))
    for sch in (slapo.trace(Empty, ""), slapo.trace(Empty, "", recursive=True), slapo.trace(Empty, "", flat=True)):
        out = slapo.apply(model, sch)
        equal(model, out, X)
        assert list(out.state_dict()) == list(model.state_dict()), "B113: what is not used stays"


def test_b111_attributes_and_methods_stay() -> None:
    class Extra(TwoLayers):
        scale = 3

        def extra(self) -> int:
            return self.scale + self.more

    model = Extra()
    model.more = 4
    out = slapo.apply(model, slapo.trace(Empty, ""))
    assert out.extra() == 7
    assert type(out) is Extra
    assert isinstance(out.a, nn.Linear)


def test_b114_members_of_lists_keep_their_keys() -> None:
    model = Deep()
    out = slapo.apply(model, slapo.trace(Empty, "", recursive=True))
    assert list(out.state_dict()) == list(model.state_dict())
    assert traced(out) == ["", "tower.0.u", "tower.1", "tower.1.0"]
    equal(model, out, X)


def test_b118_a_tracer_of_one_s_own() -> None:
    class Inlines(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    model = TwoLayers()
    out = slapo.apply(model, slapo.trace(Empty, "", tracer=Inlines))
    assert text(out).count("linear(") == 2
    equal(model, out, X)
    assert list(out.state_dict()) == list(model.state_dict())
    found = slapo.pattern(lambda x, w, b: F.relu(F.linear(x, w, b)), within="")
    equal(model, slapo.apply(out, slapo.checkpoint(Empty, found)), X)


def test_b117_by_an_example_through_torch_export() -> None:
    model = Attention()
    out = slapo.apply(model, slapo.trace(Empty, "", example=(torch.rand(2, 3, 8),)))
    equal(model, out, torch.rand(5, 4, 8), close=True)


def test_b120_down_to_some_depth_or_leaves() -> None:
    model = Outer()
    assert traced(slapo.apply(model, slapo.trace(Empty, "", recursive=True, depth=1))) == [
        "",
        "attention",
        "intermediate",
    ]
    stopped = slapo.apply(model, slapo.trace(Empty, "", recursive=True, leaves="attention"))
    assert traced(stopped) == ["", "intermediate"]


def test_b123_what_is_checkpointed_is_a_leaf_and_its_modules_stay_selectable() -> None:
    """B211 too: the checkpointed module is not drawn in, so that it stays checkpointed."""
    once = slapo.apply(Outer(), slapo.checkpoint(Empty, "attention"))
    out = slapo.apply(once, slapo.trace(Empty, "", flat=True))
    assert "self.attention(" in text(out)
    assert slapo.select(out, "attention.inner.query", nn.Linear)
    equal(once, out, X)


def test_b124_what_hangs_on_children_and_parameters_survives() -> None:
    model = Outer()
    model.attention.inner.query.weight.mark = "split"
    ran: list[str] = []
    model.attention.register_forward_hook(lambda *values: ran.append("hook"))
    out = slapo.apply(model, slapo.trace(Empty, "", recursive=True))
    assert out.attention.inner.query.weight.mark == "split"
    out(X)
    assert ran == ["hook"]


@pytest.mark.parametrize("flat", [False, True])
def test_b100_deep_copied_saved_and_switched_it_is_itself(flat: bool) -> None:
    model = nn.Sequential(Deep(), nn.Dropout(0.5))
    out = slapo.apply(model, slapo.trace(Empty, "", flat=flat))
    stream = io.BytesIO()
    torch.save(out, stream)
    stream.seek(0)
    for one in (out, copy.deepcopy(out), torch.load(stream, weights_only=False)):
        equal(model.train(), one.train(), X)
        equal(model.eval(), one.eval(), X)
