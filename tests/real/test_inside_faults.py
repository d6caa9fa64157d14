"""Layers of one input that share a result, where the sharing could show; and fused parts among others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import slapo_fn as slapo

from .inside import INSIDE, Empty, assert_close, layers, original_step

LLAMA = INSIDE["llama"]
QKV = slapo.fuse(Empty, "**.{q,k,v}_proj")


INSIDES = {
    "nothing": Empty,
    "attention": LLAMA.parts["attention"](Empty),
    "layers": layers(LLAMA),
    "trace": slapo.trace(Empty, "**.mlp"),
    "pattern": LLAMA.parts["rms"](Empty),
    "checkpoint": slapo.checkpoint(Empty, "**.mlp"),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pair(nn.Module):
    """Two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.between(x, self.q_proj(x))

    def between(self, x: Tensor, q: Tensor) -> Any:
        return q, self.k_proj(x)


class WritesBetween(Pair):
    def between(self, x: Tensor, q: Tensor) -> Any:
        x.add_(1)
        return q, self.k_proj(x)


class Autocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            q = self.q_proj(x)
        return q, self.k_proj(x)


class Checkpoints(Pair):
    def forward(self, x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        return tuple(checkpoint(layer, x, use_reentrant=False) for layer in (self.q_proj, self.k_proj))


class GradModes(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            q = self.q_proj(x)
        return q, self.k_proj(x)


@pytest.mark.parametrize(
    "kind",
    [
        Pair,
        Checkpoints,
        GradModes,
        WritesBetween,
        Autocast,
    ],
)
def test_what_happens_between_two_layers_of_one_input(kind: type[Pair]) -> None:
    net = kind()
    out = slapo.apply(net, slapo.fuse(Empty, "{q,k}_proj"))
    x = torch.randn(2, 4)
    mine, theirs = net(x.clone()), out(x.clone())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(other, one)
        assert other.requires_grad == one.requires_grad


def test_layers_called_by_themselves_use_the_weights_of_now() -> None:
    out = slapo.apply(Pair(), slapo.fuse(Empty, "{q,k}_proj"))
    x = torch.randn(2, 4)
    with torch.no_grad():
        out.q_proj(x)
        out.qk_proj.weight.mul_(2)
        torch.testing.assert_close(out.k_proj(x), F.linear(x, out.k_proj.weight, out.k_proj.bias))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_one_layer_see_and_change_its_values(hook: str) -> None:
    model = LLAMA.case.model().eval()
    double = (
        (lambda m, args, output: output * 2) if hook == "register_forward_hook" else (lambda m, args: (args[0] * 2,))
    )
    getattr(model.model.layers[0].self_attn.k_proj, hook)(double)
    out = slapo.apply(model, QKV)
    inputs = LLAMA.case.inputs()
    assert_close(original_step(model, inputs), original_step(out, inputs), 1e-11)


def test_each_of_the_layers_checkpointed() -> None:
    model = LLAMA.case.model()
    out = slapo.apply(model, slapo.checkpoint(QKV, "**.{q,k,v}_proj"))
    inputs = LLAMA.case.inputs()
    assert_close(original_step(model, inputs), original_step(out, inputs), 1e-11)


def test_checkpointing_by_transformers() -> None:
    model = LLAMA.case.model()
    model.gradient_checkpointing_enable()
    inputs = {**LLAMA.case.inputs(), "use_cache": False}
    assert_close(original_step(model, inputs), original_step(slapo.apply(model, layers(LLAMA)), inputs), 1e-11)


@pytest.mark.parametrize("base", INSIDES)
def test_blocks_alike_with_places_inside_compile_once(base: str) -> None:
    model = LLAMA.case.model().eval()
    counter = CompileCounter()
    sch = slapo.compile(INSIDES[base], "model.layers.*", backend=counter, fullgraph=True)
    inputs = {**LLAMA.case.inputs(), "use_cache": False}
    assert_close(original_step(model, inputs), original_step(slapo.apply(model, sch), inputs), 1e-11)
    assert counter.frame_count == 1


def test_inplace_and_back_after_a_failure() -> None:
    model = LLAMA.case.model().eval()
    mine, state = original_step(model, LLAMA.case.inputs()), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(slapo.ScheduleError):
        slapo.apply(model, slapo.replace(layers(LLAMA), "**.o_proj", lambda old: 1 / 0), inplace=True)
    assert list(model.state_dict()) == list(state)
    assert_close(mine, original_step(model, LLAMA.case.inputs()), 0)
    assert slapo.apply(model, layers(LLAMA), inplace=True) is model
    assert_close(mine, original_step(model, LLAMA.case.inputs()), 1e-11)
    assert all(torch.equal(state[key], value) for key, value in slapo.to_original(model).items())


@pytest.mark.parametrize(
    "after",
    [lambda s: slapo.freeze(s, "**.q_proj"), lambda s: slapo.cast(s, "**.q_proj", torch.bfloat16)],
    ids=["freeze", "cast"],
)
def test_what_reaches_only_a_part_of_a_fused_weight_is_refused(after: Any) -> None:
    with pytest.raises(slapo.SlapoError):
        slapo.apply(LLAMA.case.model(), after(QKV))


def test_a_flat_trace_over_fused_layers() -> None:
    model = LLAMA.case.model().eval()
    out = slapo.apply(model, slapo.trace(layers(LLAMA), "**.mlp", flat=True))
    assert_close(original_step(model, LLAMA.case.inputs()), original_step(out, LLAMA.case.inputs()), 1e-11)


def test_a_pattern_over_fused_layers() -> None:
    def gated(x: Tensor) -> Tensor:
        return F.silu(slapo.call_module("gate_proj", x)) * slapo.call_module("up_proj", x)

    model = LLAMA.case.model().eval()
    found = slapo.pattern(gated, "**.mlp", flat=True)
    out = slapo.apply(model, slapo.fuse(layers(LLAMA), found, backend="eager"))
    assert_close(original_step(model, LLAMA.case.inputs()), original_step(out, LLAMA.case.inputs()), 1e-11)


def test_layers_fused_in_a_module_that_was_traced_before() -> None:
    model = LLAMA.case.model().eval()
    out = slapo.apply(model, slapo.fuse(slapo.trace(Empty, "**.mlp"), "**.{gate,up}_proj"))
    assert_close(original_step(model, LLAMA.case.inputs()), original_step(out, LLAMA.case.inputs()), 1e-11)


class Layer(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + 1


def test_more_than_eight_different_patterns_are_compiled() -> None:
    acts = [torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.sin, torch.cos, torch.abs, torch.neg, F.silu, F.elu]
    net, sch, counter = nn.Sequential(*map(Layer, acts)), Empty, CompileCounter()
    for layer in map(Layer, acts):
        sch = slapo.fuse(sch, slapo.pattern(layer.forward), backend=counter)
    x = torch.rand(4)
    torch.testing.assert_close(slapo.apply(net, sch)(x), net(x))
    assert counter.frame_count == len(acts)
