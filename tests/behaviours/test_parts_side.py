"""B066-B076: replace branches side by side, and single operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Attention, Deep, Empty, TwoLayers, equal, linear_relu, text, within

X = torch.rand(2, 3, 8)
MODES = pytest.mark.parametrize("inplace", [False, True])


def heads_of(x: Tensor) -> Tensor:
    y = slapo.call_module("{q,k,v}_proj", x)
    return y.view(x.size(0), x.size(1), 2, -1).permute(0, 2, 1, 3)


class Heads(nn.Module):
    """q, k and v by one matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).view(x.size(0), x.size(1), 6, -1).permute(0, 2, 1, 3).split(2, 1)


def tanh(x: Tensor) -> Tensor:
    """In the place of F.relu, with all that it is called with."""
    return torch.tanh(x)


BRANCHES = slapo.parallel(slapo.pattern(heads_of, within=""))
WEIGHTS = {f"qkv.{key}": slapo.cat(*(f"{name}_proj.{key}" for name in "qkv")) for key in ("weight", "bias")}


@MODES
def test_b066_branches_of_one_input_become_one_module_with_a_tuple(inplace: bool) -> None:
    model = Attention()
    reference = Attention()
    reference.load_state_dict(model.state_dict())
    out = slapo.apply(model, slapo.replace(Empty, BRANCHES, Heads(), weights=WEIGHTS), inplace=inplace)
    assert set(dict(out.named_children())) == {"Heads_0", "out"}
    assert text(out).count("several[") == 3
    equal(reference, out, X, close=True)
    original = slapo.to_original(out)
    assert original.keys() == reference.state_dict().keys()
    assert all(torch.equal(one, reference.state_dict()[key]) for key, one in original.items())


def test_b066_two_layers_then_permute() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc1(x).permute(0, 2, 1) @ self.fc2(x)

    model = within(forward, fc1=nn.Linear(8, 4), fc2=nn.Linear(8, 4))
    found = slapo.parallel(slapo.pattern(lambda x: slapo.call_module("fc{1,2}", x), within=""))
    out = slapo.apply(model, slapo.replace(Empty, found, lambda x: (x * 2, x * 3)))
    assert torch.equal(out(X), (X * 2).permute(0, 2, 1) @ (X * 3))


def test_b067_the_same_with_a_function() -> None:
    model = Attention()
    assert [len(site.module.nodes) for site in slapo.select(model, slapo.pattern(heads_of, within=""))] in (
        [5, 5, 5],
        [6, 6, 6],
        [3, 3, 3],
    )
    out = slapo.apply(model, slapo.replace(Empty, BRANCHES, lambda x: (x[:, None], x[:, None], x[:, None])))
    (graph,) = slapo.graph_of(out).graphs
    assert [getattr(node.target, "__name__", "") for node in graph.nodes].count("getitem") == 3
    assert set(dict(out.named_children())) == {"out"}
    y = F.scaled_dot_product_attention(X[:, None], X[:, None], X[:, None])
    assert torch.equal(out(X), model.out(y.permute(0, 2, 1, 3).flatten(2)))


def test_b068_constants_in_the_horizontal_form_are_right_or_refused() -> None:
    sch = slapo.replace(Empty, BRANCHES, lambda x, n: (x[:, None] * n,) * 3, constants={"n": 2})
    try:
        out = slapo.apply(Attention(), sch)
    except slapo.SlapoError:
        return
    y = F.scaled_dot_product_attention(X[:, None] * 2, X[:, None] * 2, X[:, None] * 2)
    assert torch.equal(out(X), out.out(y.permute(0, 2, 1, 3).flatten(2)))


def test_b071_a_branch_s_inner_value_that_is_used_elsewhere_is_no_match() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        q = self.q_proj(x)
        return F.relu(q), F.relu(self.k_proj(x)), q + 1

    model = within(forward, q_proj=nn.Linear(8, 8), k_proj=nn.Linear(8, 8))
    found = slapo.pattern(lambda x: F.relu(slapo.call_module("{q,k}_proj", x)), within="")
    assert [site.module.paths for site in slapo.select(model, found)] == [("k_proj",)]
    seen: list[str] = []
    out = slapo.apply(model, slapo.probe(Empty, slapo.parallel(found), lambda path, value: seen.append(path)))
    equal(model, out, X)


def test_b072_places_in_series_are_not_parallel() -> None:
    model = TwoLayers()
    serial = slapo.parallel(slapo.pattern(linear_relu, within=""))
    for sch in (slapo.checkpoint(Empty, serial), slapo.replace(Empty, serial, lambda x: (x, x))):
        with pytest.raises(slapo.MisfitError, match="depend on one another"):
            slapo.apply(model, sch)
    every = slapo.apply(model, slapo.checkpoint(Empty, slapo.pattern(linear_relu, within="")))
    equal(model, every, torch.rand(2, 4))


def test_b072_nor_are_branches_of_different_inputs() -> None:
    model = within(lambda self, x, y: F.relu(x) + F.relu(y))
    with pytest.raises(slapo.MisfitError, match="first inputs of these differ"):
        slapo.apply(model, slapo.checkpoint(Empty, slapo.parallel(slapo.pattern(lambda x: F.relu(x), within=""))))


def test_b072_a_longer_way_round_is_noticed() -> None:
    """The second branch takes the common input, and the first one's result through other code."""
    model = within(lambda self, x: torch.add(x * 2, x * (x * 2).sum()))
    found = slapo.parallel(slapo.pattern(lambda x, y: x * y, within=""))
    with pytest.raises(slapo.SlapoError):
        slapo.apply(model, slapo.replace(Empty, found, lambda x, y: (x, y)))


def test_b066_one_branch_alone_gives_its_value_and_no_tuple() -> None:
    model = within(lambda self, x: F.relu(x) + 1)
    out = slapo.apply(
        model, slapo.replace(Empty, slapo.parallel(slapo.pattern(lambda x: F.relu(x), within="")), torch.tanh)
    )
    assert torch.equal(out(X), torch.tanh(X) + 1)


def test_b066_a_wrong_number_of_results_is_no_silent_loss() -> None:
    model = Attention()
    out = slapo.apply(model, slapo.replace(Empty, BRANCHES, lambda x: (x[:, None], x[:, None])))
    with pytest.raises((slapo.SlapoError, IndexError)):
        out(X)


@MODES
def test_b074_one_call_is_replaced_with_the_same_arguments(inplace: bool) -> None:
    model = within(lambda self, x: F.relu(x * 2) + 1)
    out = slapo.apply(model, slapo.replace(Empty, slapo.calls("relu", within=""), tanh), inplace=inplace)
    assert torch.equal(out(X), torch.tanh(X * 2) + 1)
    (graph,) = slapo.graph_of(out).graphs
    assert sum(node.target is tanh for node in graph.nodes) == 1
    assert not any(getattr(node.target, "__name__", "") == "relu" for node in graph.nodes)


def test_b074_keywords_and_constants_of_the_call_reach_the_function() -> None:
    model = within(lambda self, x: F.leaky_relu(x - 0.5, negative_slope=0.3))
    out = slapo.apply(model, slapo.replace(Empty, slapo.calls("leaky_relu", within=""), F.leaky_relu))
    equal(model, out, X)


@MODES
def test_b075_in_a_nested_forward(inplace: bool) -> None:
    model = Deep()
    x = torch.rand(2, 4)
    out = slapo.apply(model, slapo.replace(Empty, slapo.calls("relu"), tanh), inplace=inplace)
    for block in (out.tower[0].u, out.tower[1][0]):
        assert text(block).count("tanh(") == 2
    inner = torch.tanh(out.tower[0].u.b(torch.tanh(out.tower[0].u.a(x))))
    assert torch.equal(out.tower[0].u(x), inner)


def test_b076_a_tensor_method_is_a_target_too() -> None:
    model = within(lambda self, x: x.view(2, 3, 4, 2).expand(2, 3, 4, 2))
    sch = slapo.replace(Empty, slapo.calls("view", within=""), lambda x, *sizes: x.view(2, 3, 2, 4))
    with pytest.raises(RuntimeError, match="expand"):
        slapo.apply(model, sch)(X)
    sch = slapo.replace(sch, slapo.calls("expand", within=""), lambda x, *sizes: x)
    assert slapo.apply(model, sch)(X).shape == (2, 3, 2, 4)


@pytest.mark.parametrize("kind", ["method", "function"])
def test_b076_the_arguments_of_the_call_are_given(kind: str) -> None:
    """What stands in the place of ``x.view(2, 12, 2)`` is called as it was: with the sizes."""
    model = {
        "method": within(lambda self, x: x.view(2, 12, 2)),
        "function": within(lambda self, x: torch.reshape(x, (2, 12, 2))),
    }[kind]
    of = {"method": "view", "function": "reshape"}[kind]
    seen: list[Any] = []

    def new(*args: Any, **kwargs: Any) -> Any:
        seen.append((len(args), args[1:], kwargs))
        return args[0]

    slapo.apply(model, slapo.replace(Empty, slapo.calls(of, within=""), new))(X)
    assert seen == [{"method": (4, (2, 12, 2), {}), "function": (2, ((2, 12, 2),), {})}[kind]]


@pytest.mark.parametrize(
    ("forward", "new"),
    [(lambda self, x: torch.sub(1, x), torch.sub), (lambda self, x: torch.mul(x, x), torch.mul)],
)
def test_b074_the_order_of_operands_stays_and_one_may_stand_twice(forward: Any, new: Any) -> None:
    model = within(forward)
    out = slapo.apply(model, slapo.replace(Empty, slapo.calls(new.__name__, within=""), new))
    assert torch.equal(out(X), model(X))


def test_b074_by_a_predicate_over_nodes() -> None:
    model = TwoLayers()
    second = slapo.calls("relu", within="", where=lambda node: str(node.args[0]) == "b")
    out = slapo.apply(model, slapo.replace(Empty, second, lambda x: x))
    x = torch.rand(2, 4)
    assert torch.equal(out(x), model.b(F.relu(model.a(x))))
