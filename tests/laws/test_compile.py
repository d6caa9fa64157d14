"""Compiling: graphs are really produced, N equal blocks compile once, and checkpointing goes around or inside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import slapo_fn as slapo

from .look import assert_same, run
from .models import MODELS, linear, scaled_forward

ROW = MODELS[0]
S = slapo.Schedule()


def twelve() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(12)))


def x_BD() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_equal_blocks_compile_once(fullgraph: bool) -> None:
    counter = CompileCounter()
    result = slapo.apply(twelve(), slapo.compile(S, "*", backend=counter, fullgraph=fullgraph))
    result(x_BD()).sum().backward()
    assert (counter.frame_count, counter.op_count > 0) == (1, True)
    result(x_BD()).sum().backward()
    assert counter.frame_count == 1


def test_checkpointed_equal_blocks_compile_once() -> None:
    counter = CompileCounter()
    result = slapo.apply(twelve(), slapo.checkpoint(slapo.compile(S, "*", backend=counter, fullgraph=True), "*"))
    result(x_BD()).sum().backward()
    assert counter.frame_count == 1


def test_a_patched_forward_is_compiled_too() -> None:
    import types

    counter = CompileCounter()
    net = nn.Sequential(linear())
    net[0].forward = types.MethodType(scaled_forward, net[0])
    result = slapo.apply(net, slapo.compile(S, "0", backend=counter, fullgraph=True))
    assert torch.equal(result(x_BD()), net(x_BD()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_blocks_checkpointed_inside_a_compiled_model(fullgraph: bool) -> None:
    counter = CompileCounter()
    sch = slapo.checkpoint(slapo.compile(S, "", backend=counter, fullgraph=fullgraph), "*")
    net = twelve()
    plain, result = copy.deepcopy(net), slapo.apply(net, sch)
    plain(x := x_BD()).sum().backward()
    result(y := x_BD()).sum().backward()
    assert torch.allclose(x.grad, y.grad)
    assert counter.frame_count == 1


def test_torch_compile_of_the_whole_result_goes_through_every_layer() -> None:
    net = slapo.apply(twelve(), slapo.checkpoint(slapo.compile(S, "[::2]", backend="eager"), "*"))
    counter = CompileCounter()
    got = torch.compile(net, backend=counter, fullgraph=True)(x_BD())
    assert torch.allclose(got, net(x_BD()))
    assert counter.frame_count == 1


def test_the_result_s_own_weights_are_compiled_and_not_the_input_s() -> None:
    net = nn.Sequential(linear())
    result = slapo.apply(net, slapo.compile(S, "0", backend="eager"))
    result(x_BD())
    result[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(result(x_BD()), net[0].bias.expand(2, 4))


def test_a_copy_of_what_was_compiled_and_run_runs_on_its_own_weights() -> None:
    result = slapo.apply(nn.Sequential(linear()), slapo.compile(S, "0", backend="eager"))
    expected = result(x_BD())
    again, forked = copy.deepcopy(result), slapo.apply(result, S)
    forked[0].weight = nn.Parameter(forked[0].weight.detach().clone())
    forked[0].bias = nn.Parameter(forked[0].bias.detach().clone())
    with torch.no_grad():
        result[0].weight.zero_(), result[0].bias.zero_()
    assert torch.equal(again(x_BD()), expected)
    assert torch.equal(forked(x_BD()), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_checkpointed_blocks_give_the_plain_numbers(backend: str) -> None:
    sch = slapo.checkpoint(slapo.compile(S, "*", backend=backend), "[::2]")
    result = slapo.apply(ROW.make().eval(), sch)
    assert_same(run(result, ROW), run(ROW.make().eval(), ROW), 1e-6)


def test_hooks_run_outside_the_compiled_code() -> None:
    seen: list[str] = []
    net = nn.Sequential(linear())
    net[0].register_forward_hook(lambda *_: seen.append("hook"))
    counter = CompileCounter()
    result = slapo.apply(net, slapo.compile(S, "0", backend=counter, fullgraph=True))
    result(x_BD()), result(x_BD())
    assert (seen, counter.frame_count) == (["hook", "hook"], 1)
