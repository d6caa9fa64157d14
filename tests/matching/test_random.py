"""A part of a random forward, written as a pattern, is found in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from slapo_fn._match.matcher import find_matches, read_pattern

from .support import net

# each operation in several spellings; the first argument is a random stream that picks one
UNARY: list[list[Callable[[Tensor], Tensor]]] = [
    [torch.relu, F.relu, lambda x: x.relu(), nn.ReLU()],
    [torch.tanh, lambda x: x.tanh(), nn.Tanh()],
    [lambda x: x * 2, lambda x: 2 * x, lambda x: torch.mul(x, 2.0)],
    [lambda x: x * 3, lambda x: x.mul(3)],
    [lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=-1), nn.Softmax(-1)],
]
BINARY: list[list[Callable[[Tensor, Tensor], Tensor]]] = [
    [lambda x, y: x + y, lambda x, y: y + x, lambda x, y: torch.add(x, y)],
    [lambda x, y: x * y, lambda x, y: y.mul(x)],
    [lambda x, y: x - y, lambda x, y: torch.sub(x, other=y), lambda x, y: torch.rsub(y, x)],
    [lambda x, y: x @ y, lambda x, y: torch.matmul(x, y)],
]
Plan = list[tuple[int, tuple[int, ...]]]  # the kind of each operation, and its operands: inputs are -1, -2


@st.composite
def plans(draw: Any) -> tuple[Plan, set[int]]:
    plan: Plan = []
    for number in range(draw(st.integers(2, 14))):
        operand = st.integers(-2, number - 1)
        if draw(st.booleans()):
            plan.append((draw(st.integers(0, len(UNARY) - 1)), (draw(operand),)))
        else:
            plan.append((len(UNARY) + draw(st.integers(0, len(BINARY) - 1)), (draw(operand), draw(operand))))
    chosen = {draw(st.integers(0, len(plan) - 1))}
    for _ in range(draw(st.integers(0, 6))):  # grow: an operand or a user of what is chosen
        near = {o for n in chosen for o in plan[n][1] if o >= 0} | {
            n for n, (_, os) in enumerate(plan) if chosen & {*os}
        }
        if near - chosen:
            chosen.add(draw(st.sampled_from(sorted(near - chosen))))
    return plan, closed(plan, chosen)


def closed(plan: Plan, chosen: set[int]) -> set[int]:
    """With all that lies between what is chosen: a convex part."""
    above: list[set[int]] = []
    for number, (_, operands) in enumerate(plan):
        above.append({number}.union(*(above[one] for one in operands if one >= 0)))
    return chosen | {n for n in range(len(plan)) if above[n] & chosen and any(n in above[one] for one in chosen)}


def run(plan: Plan, values: dict[int, Tensor], which: list[int], seed: int) -> dict[int, Tensor]:
    """Compute some of a plan's operations, each spelled one way or another."""
    stream = random.Random(seed)
    for number in which:
        kind, operands = plan[number]
        spelled = stream.choice(UNARY[kind] if kind < len(UNARY) else BINARY[kind - len(UNARY)])
        values[number] = spelled(*(values[one] for one in operands))
    return values


@given(plans(), st.integers(0, 1000))
def test_a_part_of_a_random_forward_is_found_in_it(case: tuple[Plan, set[int]], seed: int) -> None:
    plan, chosen = case
    used = {one for _, operands in plan for one in operands}
    inner = {n for n in chosen if any(n in plan[user][1] for user in chosen)}
    results = [
        n for n in sorted(chosen) if n not in inner or any(n in plan[u][1] for u in range(len(plan)) if u not in chosen)
    ]
    outside = sorted({one for n in chosen for one in plan[n][1]} - chosen)

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Any:
        values = run(plan, {-1: x, -2: y}, [*range(len(plan))], seed)
        return [values[n] for n in range(len(plan)) if n not in used]

    scope: dict[str, Any] = {"run": run, "plan": plan, "chosen": sorted(chosen), "results": results, "seed": seed + 1}
    names = [f"v{abs(one)}{'i' if one < 0 else ''}" for one in outside]
    pairs = ", ".join(f"{one}: {name}" for one, name in zip(outside, names, strict=True))
    exec(
        f"def pattern({', '.join(names)}):\n    values = run(plan, {{{pairs}}}, chosen, seed)\n"
        "    return tuple(values[n] for n in results)",
        scope,
    )
    model = net(forward, **{f"m{n}": m for n, m in enumerate(one[-1] for one in UNARY) if isinstance(m, nn.Module)})
    graph = fx.Tracer().trace(model)
    operations = [node for node in graph.nodes if node.op.startswith("call")]
    wanted = {operations[n] for n in chosen}
    found = find_matches(read_pattern(scope["pattern"]), graph, model)
    matched = [*found.found, *found.overlapping]
    assert matched
    assert all(len(match.nodes) == len(wanted) for match in matched)
    assert any({*match.nodes} & wanted for match in matched)
    for match in found.found:  # what is found computes what the pattern does
        assert_same(graph, model, match, scope["pattern"])


def assert_same(graph: fx.Graph, model: nn.Module, match: Any, pattern: Any) -> None:
    class Values(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made[n] = super().run_node(n)
            return made[n]

    made: dict[fx.Node, Any] = {}
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    Values(fx.GraphModule(model, graph), graph=graph).run(x, y)
    given_ = [made[one.node] if one.node is not None else torch.tensor(one.value) for one in match.inputs]
    for node, result in zip(match.outputs, pattern(*given_), strict=True):
        assert torch.allclose(made[node], result, equal_nan=True)
