"""running: a transformed module beside the same thing written by hand. Both share one set of weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slapo_fn as slapo

from ._measure import Row, middle, pairs
from ._tree import MLP
from .swap import sharing_deepcopy

WIDTH, TOKENS = 256, 64
BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


class ByHand(nn.Module):
    """A wrapper that calls `torch.utils.checkpoint`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The hook."""
    return output * 2


def rows() -> Iterator[Row]:
    """Time each pair, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _checkpoint()
        yield from _hook()
        yield from _compile()
    finally:
        torch.set_num_threads(threads)


def _checkpoint() -> Iterator[Row]:
    block, x = MLP(WIDTH, 4 * WIDTH), torch.randn(TOKENS, WIDTH, requires_grad=True)
    ours = slapo.apply(block, slapo.checkpoint(slapo.Schedule(), ""))
    yield _row(
        "checkpoint, forward and backward",
        _trains(ours, x),
        _trains(ByHand(sharing_deepcopy(block)), x),
        600,
        "torch.utils.checkpoint in a wrapper",
    )


def _hook() -> Iterator[Row]:
    mlp, x = MLP(WIDTH, 4 * WIDTH), torch.randn(TOKENS, WIDTH)
    ours, theirs = slapo.apply(mlp, slapo.hook(slapo.Schedule(), "", forward=double)), sharing_deepcopy(mlp)
    theirs.register_forward_hook(double)
    yield _row("hook, forward", _infers(ours, x), _infers(theirs, x), 1200, "register_forward_hook")


def _compile() -> Iterator[Row]:
    block, x = MLP(WIDTH, 4 * WIDTH), torch.randn(TOKENS, WIDTH)
    for name, compiled in (("module.compile()", _compiled_in_place), ("torch.compile(module)", _compiled_apart)):
        torch._dynamo.reset()
        ours = slapo.apply(block, slapo.compile(slapo.Schedule(), "", backend=BACKEND))
        theirs = compiled(sharing_deepcopy(block))
        yield _row(f"compile, forward, backend {BACKEND}", _infers(ours, x), _infers(theirs, x), 1200, name)
    torch._dynamo.reset()


def _compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=BACKEND)
    return module


def _compiled_apart(module: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(module, backend=BACKEND)  # type: ignore[assignment]
    return made


def _trains(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    tensors = [x, *module.parameters()]

    def step() -> Tensor:
        out: Tensor = module(x)
        torch.autograd.grad(out.sum(), tensors)
        return out.detach()

    return step


def _infers(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    return step


def _row(what: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], count: int, hand: str) -> Row:
    torch.testing.assert_close(ours(), theirs())
    taken = pairs(ours, theirs, count)
    value, low, high = middle([mine / other for mine, other in taken])
    _, base, _ = sorted((other, other, other) for _, other in taken)[len(taken) // 2]
    apart, _, _ = middle([mine - other for mine, other in taken])
    note = (
        f"by hand {base * 1e6:,.0f} µs; ours {apart * 1e6:+.1f} µs; {count:,} pairs, "
        f"95 % interval {low - 1:+.2%} to {high - 1:+.2%}"
    )
    return Row(f"{what}, over {hand}", f"{value - 1:+.2%}", "within 1 %", value <= 1.01, note)
