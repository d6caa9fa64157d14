"""graphs: equal blocks are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import slapo_fn as slapo

from ._measure import Row
from ._tree import Block, Stack

BLOCKS = 12


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward


def rows() -> Iterator[Row]:
    """Count the graphs of twelve equal blocks, ours and those of ``module.compile()`` on each block."""
    for what, train, checkpointed in (
        ("inputs require grad", True, False),
        ("inputs require grad, checkpointed", True, True),
        ("no_grad", False, False),
    ):
        ours, theirs = _ours(train, checkpointed), _by_hand(train)
        note = f"module.compile() on each block: {theirs}"
        yield Row(f"graphs of {BLOCKS} equal blocks, {what}", f"{ours}", "1", ours == 1, note)


def _ours(train: bool, checkpointed: bool) -> int:
    backend = Counting()
    sch = slapo.compile(slapo.Schedule(), "*", backend=backend, fullgraph=True)
    if checkpointed:
        sch = slapo.checkpoint(sch, "*")
    return _count(slapo.apply(Stack(BLOCKS, lambda: Block(16, 32)), sch), backend, train)


def _by_hand(train: bool) -> int:
    backend, model = Counting(), Stack(BLOCKS, lambda: Block(16, 32))
    for block in model.children():
        block.compile(backend=backend, fullgraph=True)
    return _count(model, backend, train)


def _count(model: nn.Module, backend: Counting, train: bool) -> int:
    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        for _ in range(2):
            out = model(torch.randn(8, 16, requires_grad=train))
            if train:
                out.sum().backward()
    torch._dynamo.reset()
    return backend.graphs
