"""What a pattern matches, and what it does not (case 25, B123-B144)."""

from __future__ import annotations

import math
import operator
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_fn._match import matcher as where_it_lives
from slapo_fn._match.matcher import Operand, by_predicate, by_target, call_module, find_matches, read_pattern
from slapo_fn.errors import PatternError

from .support import matches, names, net


def relu_add(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x) + y


def relu_residual(x: Tensor) -> Tensor:
    return F.relu(x) + x


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


# ---- which operations


def test_b128_an_exact_pattern_gives_one_match_of_two_nodes() -> None:
    assert names(relu_residual, net(lambda self, x: F.relu(x) + x)) == [["relu", "add"]]


@pytest.mark.parametrize(
    ("pattern", "forward"),
    [
        (relu_add, lambda self, x, y: y + F.relu(x)),
        (relu_add, lambda self, x, y: torch.add(y, x.relu())),
        (relu_add, lambda self, x, y: y.add(torch.relu(x), alpha=1)),
        (lambda x, y: torch.rsub(x, y), lambda self, x, y: y - x),
        (lambda x, y: x < y, lambda self, x, y: y > x),
        (lambda x: x.transpose(1, 2), lambda self, x: torch.transpose(x, 2, 1)),
        (lambda x: x.size(0) * x, lambda self, x: x * x.shape[0]),
        (lambda x: x.softmax(1), lambda self, x: F.softmax(x, dim=1)),
        (lambda x: x.cumsum(0), lambda self, x: torch.cumsum(x, dim=0)),
        (lambda x: x.view(2, 3), lambda self, x: x.view((2, 3))),
        (lambda x: x.float(), lambda self, x: x.to(torch.float32)),
        (lambda x: x.to("cpu"), lambda self, x: x.to(device=torch.device("cpu"))),
        (lambda x: torch.flatten(x, 1), lambda self, x: x.flatten(start_dim=1)),
        (lambda x: F.normalize(x), lambda self, x: F.normalize(x, dim=1, p=2)),
        (lambda x: torch.einsum("ij,jk->ik", x, x), lambda self, x: torch.einsum("ij,jk->ik", x, x)),
    ],
)
def test_case_25_what_is_equal(pattern: Any, forward: Any) -> None:
    assert len(names(pattern, net(forward))) == 1


@pytest.mark.parametrize(
    ("pattern", "forward"),
    [
        (lambda x: x * 2, lambda self, x: x * 3),
        (lambda x: x * 3 + 7, lambda self, x: x * 2 + 1),
        (lambda x: x * 1, lambda self, x: x * True),
        (lambda x: F.gelu(x), lambda self, x: F.gelu(x, approximate="tanh")),
        (lambda x, y: x - y, lambda self, x: 1 / x),
        (lambda x: x - 1, lambda self, x: 1 - x),
        (lambda x, y: F.relu(x) - y, lambda self, x, y: y - F.relu(x)),
        (lambda x: x.view(2, 3), lambda self, x: x.reshape(2, 3)),
        (lambda x: x.softmax(-1), lambda self, x: x.softmax(1)),
        (lambda x, y: torch.add(F.relu(x), y, alpha=2), lambda self, x, y: torch.add(y, F.relu(x), alpha=2)),
        (lambda x: x.size(0) * x, lambda self, x: x * x.shape[1]),
        (lambda x: x[..., 1:], lambda self, x: x[..., 2:]),
        (lambda x: torch.cat([x, x], 1), lambda self, x: torch.cat([x, x, x], 1)),
        (lambda x: x.dropout(0.5), lambda self, x: F.dropout(x, 0.5)),
    ],
)
def test_case_25_b141_what_is_not(pattern: Any, forward: Any) -> None:
    assert names(pattern, net(forward)) == []


def test_two_is_two_point_zero() -> None:
    assert names(lambda x: x * 2, net(lambda self, x: x * 2.0)) == [["mul"]]


@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.GELU(), nn.Softmax(1), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.MaxPool2d(2)]
)
def test_b129_b130_modules_and_functions_both_ways(module: nn.Module) -> None:
    functions = [
        F.relu,
        F.gelu,
        lambda x: F.softmax(x, dim=1),
        torch.sigmoid,
        torch.tanh,
        F.silu,
        lambda x: F.max_pool2d(x, 2),
    ]
    kinds = [nn.ReLU, nn.GELU, nn.Softmax, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.MaxPool2d]
    function = functions[kinds.index(type(module))]
    called, written = net(lambda self, x: self.m(x), m=module), net(lambda self, x: function(x))
    assert names(lambda x: function(x), called) == [["m"]]
    assert len(names(module, written)) == len(names(lambda x: module(x), written)) == 1
    assert names(module, called) == names(called, called) == [["m"]]


def test_b141_attributes_of_modules_are_compared() -> None:
    for mine, other in [
        (nn.GELU(), nn.GELU("tanh")),
        (nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-6)),
        (nn.Softmax(1), nn.Softmax(-1)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        (nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1)),
        (nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, stride=2)),
        (nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")),
        (nn.LSTM(4, 4), nn.LSTM(4, 4, bidirectional=True)),
        (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)),
    ]:
        model, pattern = net(lambda self, x: self.m(x), m=other), net(lambda self, x: self.m(x), m=mine)
        assert names(pattern, model) == []
        assert names(pattern, net(lambda self, x: self.m(x), m=type(mine)(*made(mine)))) == [["m"]]


def made(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, nn.Conv2d):
        return (3, 3, 3, module.stride, module.padding)
    known: dict[Any, tuple[Any, ...]] = {nn.LayerNorm: (4,), nn.Softmax: (1,), nn.Dropout: (0.1,), nn.BatchNorm2d: (4,)}
    return known.get(type(module), (4, 4) if isinstance(module, (nn.Linear, nn.LSTM)) else ())


def test_a_subclass_counts_if_it_inherits_its_forward() -> None:
    class Named(nn.ReLU):
        pass

    class Other(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return input

    assert names(lambda x: F.relu(x), net(lambda self, x: self.m(x), m=Named())) != []
    leaf = type("Leaf", (fx.Tracer,), {"is_leaf_module": lambda self, module, path: True})()
    model = net(lambda self, x: self.m(x), m=Other())
    assert find_matches(read_pattern(lambda x: F.relu(x)), leaf.trace(model), model).found == []
    assert find_matches(read_pattern(lambda x: call_module(nn.ReLU, x)), leaf.trace(model), model).found == []


def test_weights_are_not_compared() -> None:
    model = net(lambda self, x: F.relu(self.fc(x)), fc=nn.Linear(4, 8))
    pattern = net(lambda self, x: F.relu(self.other(x)), other=nn.Linear(4, 8))
    assert names(pattern, model) == [["fc", "relu"]]
    assert (
        names(pattern, net(lambda self, x: F.relu(F.linear(x, self.w, self.b)), w=torch.ones(8, 4), b=torch.ones(8)))
        != []
    )
    assert names(pattern, net(lambda self, x: F.relu(self.fc(x)), fc=nn.Linear(4, 5))) == []


def test_identity_is_not_transparent() -> None:
    assert names(relu_add, net(lambda self, x, y: self.i(F.relu(x)) + y, i=nn.Identity())) == []
    assert names(nn.Sequential(nn.Identity(), nn.ReLU()), net(lambda self, x: F.relu(self.i(x)), i=nn.Identity())) != []


# ---- dropout and training


def test_dropout_of_a_module_is_the_function_with_its_own_flag() -> None:
    called = net(lambda self, x: self.d(x), d=nn.Dropout(0.1))
    graph = fx.Tracer().trace(net(lambda self, x: F.dropout(x, 0.1, training=True)))
    assert names(lambda x: F.dropout(x, 0.1), called) == [["d"]]  # not given: whatever
    assert names(lambda x: F.dropout(x, 0.1, training=False), called) == []
    [match] = matches(lambda x, *, p, training: F.dropout(x, p, training), called).found
    assert match.constants == {"p": 0.1, "training": Operand(attribute="d.training")}
    node = next(node for node in graph.nodes if node.op == "call_function")
    owner = net(lambda self, x: self.d(x), d=nn.Dropout(0.1))
    pattern = read_pattern(net(lambda self, x: self.d(x), d=nn.Dropout(0.1)))
    assert find_matches(pattern, graph, owner).found == []  # always, which a module is not
    with graph.inserting_before(node):
        node.kwargs = {**node.kwargs, "training": graph.get_attr("training")}
    assert len(find_matches(pattern, graph, owner).found) == 1
    [match] = find_matches(read_pattern(lambda x, *, t: F.dropout(x, 0.1, t)), graph, owner).found
    assert match.constants == {"t": Operand(attribute="training")}


def test_a_training_flag_is_no_input() -> None:
    assert names(lambda x, t: F.dropout(x, 0.1, t), net(lambda self, x: self.d(x), d=nn.Dropout(0.1))) == []


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_b130_batch_norm(kind: Any) -> None:
    model = net(lambda self, x: self.m(x), m=kind(4))
    [match] = matches(lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), model).found
    assert [one.attribute for one in match.inputs[1:]] == ["m.running_mean", "m.running_var", "m.weight", "m.bias"]
    assert names(lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, training=True), model) == []


# ---- holes


def test_inputs_are_bound_in_the_order_of_the_parameters() -> None:
    [match] = matches(lambda b, a: F.relu(a) + b, net(lambda self, x, y: x + F.relu(y))).found
    assert [operand.node.name for operand in match.inputs] == ["x", "y"]
    assert [node.name for node in match.outputs] == ["add"]


def test_a_weight_is_bound_to_the_attribute_of_the_module() -> None:
    model = net(lambda self, x: F.linear(self.fc(x), self.w), fc=nn.Linear(4, 4), w=torch.ones(4, 4))
    [first] = matches(lambda x, w, b: F.linear(x, w, b), model).found
    assert [one.attribute for one in first.inputs] == [None, "fc.weight", "fc.bias"]
    [second] = matches(lambda x, w: F.linear(x, w), model).found  # None is a constant
    assert second.inputs[1].node.name == "w"
    assert matches(lambda x, *, b: F.linear(F.linear(x, x), x, b), model).found == []


def test_a_parameter_used_twice_is_one_value() -> None:
    twice = lambda x, w: F.linear(F.linear(x, w), w)  # noqa: E731
    fc, w = nn.Linear(4, 4, bias=False), torch.ones(4, 4)
    assert len(names(twice, net(lambda self, x: self.fc(self.fc(x)), fc=fc))) == 1
    assert len(names(twice, net(lambda self, x: F.linear(self.fc(x), self.fc.weight), fc=fc))) == 1
    assert names(twice, net(lambda self, x: F.linear(self.fc(x), self.w), fc=fc, w=w)) == []


def test_free_constants() -> None:
    model = net(lambda self, x: self.act(x * 2) * 2 + 3, act=nn.GELU("tanh"))
    [match] = matches(lambda x, *, scale, kind: F.gelu(x * scale, approximate=kind) * scale, model).found
    assert match.constants == {"scale": 2, "kind": "tanh"}
    assert names(lambda x, *, s: F.gelu(x * s, approximate="tanh") * s + s, model) == []
    assert names(lambda x, *, s: x * s, net(lambda self, x, y: x * y)) == []
    [match] = matches(lambda x, *, shape, dt: x.view(shape).to(dt), net(lambda self, x: x.view(2, 3).half())).found
    assert match.constants == {"shape": (2, 3), "dt": torch.float16}
    [match] = matches(lambda x, *, s, b: F.conv2d(x, x, b, s), net(lambda self, x: F.conv2d(x, x))).found
    assert match.constants == {"s": 1, "b": None}
    assert names(lambda x, *, s: x * s + s, net(lambda self, x: x * 1 + True)) == []


def test_an_input_may_be_a_number_and_never_none() -> None:
    [match] = matches(lambda x, y: F.relu(x) * y, net(lambda self, x: 3 * F.relu(x))).found
    assert match.inputs[1] == Operand(value=3)
    assert names(lambda x, w, b: F.linear(x, w, b), net(lambda self, x: F.linear(x, x))) == []


# ---- call_module


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(x.size(0), x.size(1), 2, 4).permute(0, 2, 1, 3)
        k = self.k_proj(x).view(x.size(0), x.shape[1], 2, 4).permute(0, 2, 1, 3)
        v = self.v_proj(x).view(b, t, 2, 4).permute((0, 2, 1, 3))
        return self.out(q * k * v)


def test_b131_three_projections_with_their_own_sizes() -> None:
    def heads(x: Tensor) -> Tensor:
        return call_module("{q,k,v}_proj", x).view(x.size(0), x.shape[1], 2, 4).permute(0, 2, 1, 3)

    found = names(heads, Attention())
    assert found[0] == ["q_proj", "size", "size_1", "view", "permute"]
    assert found[1] == ["k_proj", "size_2", "getattr_2", "getitem_3", "view_1", "permute_1"]
    assert [name for name in found[2] if name[0] != "g"] == ["v_proj", "view_2", "permute_2"]


def test_b131_sizes_that_others_read_stay() -> None:
    class Shared(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (m(x).view(b, t, 2, 4) for m in (self.q_proj, self.k_proj, self.v_proj))
            return q * k * v * b

    found = names(
        lambda x: call_module("[qkv]_proj".replace("[qkv]", "*"), x).view(x.size(0), x.size(1), 2, 4), Shared()
    )
    assert found == [["q_proj", "view"], ["k_proj", "view_1"], ["v_proj", "view_2"]]


def test_b132_call_module_however_it_is_imported() -> None:
    model = net(lambda self, x: self.fc1(x), fc1=nn.Linear(4, 4))
    cm = call_module
    assert (
        names(lambda x: cm("fc1", x), model)
        == names(lambda x: where_it_lives.call_module("fc*", x), model)
        == [["fc1"]]
    )
    assert names(lambda x: call_module("fc", x), model) == names(lambda x: call_module("c1", x), model) == []


def test_call_module_by_class() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    model = net(lambda self, x: self.a(self.b(x, scale=2.0), 1.0), a=Own(), b=Own())
    leaf = type("Leaf", (fx.Tracer,), {"is_leaf_module": lambda self, module, path: True})()
    graph = leaf.trace(model)

    def found(pattern: Any) -> list[str]:
        return [node.name for match in find_matches(read_pattern(pattern), graph, model).found for node in match.nodes]

    assert found(lambda x: call_module(Own, x)) == ["a"]  # 1.0 is the default
    assert found(lambda x: call_module(Own, x, 2.0)) == found(lambda x: call_module("*", x, scale=2)) == ["b"]
    assert found(lambda x, *, scale: call_module(Own, call_module(Own, x, scale))) == ["b", "a"]


def test_b134_b135_patterns_of_modules_and_functions() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.act = nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(call_module("fc[1-2]", self.bn(x)))

    model = net(
        lambda self, x: F.relu(self.fc2(self.n2(self.r(self.fc1(self.n1(x)))))),
        fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 4), n1=nn.BatchNorm2d(3), n2=nn.BatchNorm2d(3), r=nn.ReLU(),
    )  # fmt: skip
    assert names(Both(), model) == [["n1", "fc1", "r"], ["n2", "fc2", "relu"]]
    bn = nn.BatchNorm2d(3)
    assert names(lambda x: F.relu(call_module("*", bn(x))), model) == names(Both(), model)


# ---- shapes of patterns


def test_b136_two_inputs_trees_and_diamonds() -> None:
    assert names(lambda a, b: F.relu(a + b), net(lambda self, x, y: F.relu(y + x))) == [["add", "relu"]]
    tree = names(lambda x, y, z: (x + y) * (y - z), net(lambda self, x, y, z: (y - z) * (y + x)))
    assert tree == [["sub", "add", "mul"]]
    diamond = net(lambda self, x: self.m(x * 5 + (a := x + 1) * 2 + a * 3), m=nn.ReLU())
    assert names(lambda a: a * 2 + a * 3, net(lambda self, x: (a := x.exp()) * 3 + a * 2)) == [["mul", "mul_1", "add"]]
    assert names(lambda a: a * 2 + a * 3, diamond) == []
    assert names(lambda a: a * 2 + a * 3, net(lambda self, x, y: x * 2 + y * 3)) == []


def test_b141_data_flow() -> None:
    assert names(relu_residual, net(lambda self, x, y: F.relu(x) + y)) == []
    assert names(relu_residual, net(lambda self, x, y, z: (F.relu(x) * 1, y + z))) == []
    assert len(names(relu_add, net(lambda self, x: F.relu(x) + x))) == 1


def test_b137_nodes_need_not_be_adjacent() -> None:
    model = net(lambda self, x, y: ((a := F.relu(x)), (z := y * 2), a + z.exp())[2])
    assert names(lambda x, y: F.relu(x) + y, model) == [["relu", "add"]]


def test_case_25_b138_the_first_of_overlapping_places_counts() -> None:
    model = net(lambda self, x: F.relu(F.relu(F.relu(x))))
    found = matches(lambda x: F.relu(F.relu(x)), model)
    assert [[node.name for node in one.nodes] for one in found.found] == [["relu", "relu_1"]]
    assert [[node.name for node in one.nodes] for one in found.overlapping] == [["relu_1", "relu_2"]]
    assert len(names(lambda x: F.relu(F.relu(x)), net(lambda self, x: F.relu(F.relu(F.relu(F.relu(x))))))) == 2


def test_an_overlap_is_bound_another_way_if_there_is_one() -> None:
    model = net(lambda self, x, y: F.relu(F.relu(x + y) + y) + F.relu(x + x))
    found = matches(lambda a, b, c: F.relu(a + b) + c, model)
    assert [[node.name for node in one.nodes] for one in found.found] == [
        ["add", "relu", "add_1"],
        ["add_2", "relu_2", "add_3"],
    ]
    assert found.overlapping == []


def test_case_25_an_intermediate_used_outside_never_matches() -> None:
    assert names(relu_add, net(lambda self, x, y: ((a := F.relu(x)) + y, a))) == []
    assert names(relu_add, net(lambda self, x, y: ((a := F.relu(x)) + y, a.size(0)))) == []
    outputs = lambda x, y: ((a := F.relu(x)), a + y)  # noqa: E731
    assert names(outputs, net(lambda self, x, y: ((a := F.relu(x)) + y, a * 2))) == [["relu", "add"]]


def test_a_value_of_the_match_is_no_input_of_it() -> None:
    assert names(relu_add, net(lambda self, x: (a := F.relu(x)) + a)) == []
    assert names(lambda x, y: (F.relu(x), torch.tanh(x) * y), net(lambda self, x: torch.tanh(x) * F.relu(x))) == []


def test_several_outputs() -> None:
    model = net(
        lambda self, x: (self.q(x) * self.k(x), self.v(x)), q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4)
    )
    [match] = matches(lambda x: tuple(call_module(name, x) for name in ("v", "q", "k")), model).found
    assert [node.name for node in match.nodes] == ["q", "k", "v"]
    assert [node.name for node in match.outputs] == ["v", "q", "k"]
    [match] = matches(lambda x: [call_module("*", x), call_module("*", x), call_module("*", x)], model).found
    assert [node.name for node in match.outputs] == ["q", "k", "v"]


def test_items_of_several_values() -> None:
    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a * b.sigmoid()

    model = net(lambda self, x: torch.sigmoid((parts := torch.chunk(x, 2, dim=-1))[1]) * parts[0])
    assert names(gated, model) == [["chunk", "getitem", "sigmoid", "getitem_1", "mul"]]
    assert names(gated, net(lambda self, x: torch.sigmoid((parts := torch.chunk(x, 2, dim=-1))[0]) * parts[1])) == []


def test_a_match_is_convex() -> None:
    outputs = lambda x: ((a := F.relu(x)), torch.tanh(a))  # noqa: E731
    pattern = lambda x, y: ((a := F.relu(x)), torch.tanh(a) + y)  # noqa: E731
    assert len(names(outputs, net(lambda self, x: ((a := F.relu(x)).exp(), torch.tanh(a))))) == 1
    assert names(pattern, net(lambda self, x: torch.tanh(a := F.relu(x)) + a.exp().sqrt())) == []
    assert len(names(pattern, net(lambda self, x, y: (torch.tanh(a := F.relu(x)) + y, a.exp())))) == 1


# ---- in place


def test_in_place_where_nobody_sees_it() -> None:
    assert (
        names(lambda x, y: F.relu(x) + y, net(lambda self, x, y: self.r(x * 2).add_(y), r=nn.ReLU(inplace=True))) != []
    )
    assert names(lambda x: F.relu(x), net(lambda self, x: F.relu(x, inplace=True))) == []  # the caller's tensor
    assert names(lambda x: F.relu(x), net(lambda self, x: (a := x * 2, F.relu_(a), a))) == []
    assert names(lambda x: F.relu(x), net(lambda self, x: F.relu_((x * 2).view(-1)))) == []
    assert names(nn.ReLU(inplace=True), net(lambda self, x: F.relu(x))) == [["relu"]]

    def added(self: nn.Module, x: Tensor) -> Tensor:
        out = x.exp()
        out += x
        return F.relu(out)

    assert len(names(lambda x, y: F.relu(x + y), net(added))) == 1


def test_a_write_between_rules_a_match_out() -> None:
    assert names(relu_residual, net(lambda self, x: (F.relu(x), x.add_(1), F.relu(x) + x)[2])) == [["relu_1", "add"]]

    model = net(lambda self, x: F.relu(x) + x)
    graph = fx.Tracer().trace(model)
    x, relu, *_ = graph.nodes
    with graph.inserting_after(relu):
        graph.call_function(operator.setitem, (x, 0, 1))
    assert find_matches(read_pattern(relu_residual), graph, model).found == []


# ---- patterns that are refused, and what a pattern is


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (lambda x: x, "has no operations"),
        (lambda: None, "has no operations"),
        (nn.Sequential(), "has no operations"),
        (lambda x, y: F.relu(x), "does not use its parameter y"),
        (lambda x, *, y: F.relu(x), "does not use its parameter y"),
        (lambda x, y=2: x * y, "gives its input y a default; .* keyword-only"),
        (lambda *x: F.relu(x[0]), r"takes \*x"),
        (lambda x: F.relu(x) if x.sum() else x, "cannot be traced.*straight-line"),
        (lambda x: (F.relu(x), x), "returns something else"),
        (lambda x: (F.relu(x), 3), "returns something else"),
        (lambda x: {"a": F.relu(x)}, "returns something else"),
        (lambda x, *, s: x * (s * 2), "of constants alone"),
        (lambda x, y: (F.relu(x), torch.tanh(y)), "two patterns side by side"),
        (torch.relu, "does not say what its parameters are"),
        (lambda x: call_module(3, x), "takes a path"),
    ],
)
def test_b144_a_pattern_that_makes_no_sense_is_refused(pattern: Any, said: str) -> None:
    with pytest.raises(PatternError, match=said):
        read_pattern(pattern)


def test_call_module_outside_of_a_pattern() -> None:
    with pytest.raises(PatternError, match=r"only in the function that is given to pattern\(…\)"):
        call_module("fc", torch.ones(2))


def test_a_pattern_is_a_value() -> None:
    one, other = read_pattern(relu_add), read_pattern(relu_add)
    assert one == other
    assert hash(one) == hash(other)
    assert one != read_pattern(relu_residual)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert len(again.steps) == 2


def test_reading_a_module_leaves_it_as_it_was() -> None:
    model = net(lambda self, x: x * torch.tensor(2.0))
    before = {*vars(model)}
    pattern = read_pattern(model)
    assert {*vars(model)} == before
    other = net(lambda self, x: x * torch.tensor(2.0))
    graph = fx.Tracer().trace(other)
    assert len(find_matches(pattern, graph, other).found) == 1
    assert find_matches(read_pattern(lambda x: x * torch.tensor(3.0)), graph, other).found == []


def test_code_that_leads_nowhere_is_left_out() -> None:
    def pattern(x: Tensor) -> Tensor:
        x.exp()
        return F.relu(x)

    assert names(pattern, net(lambda self, x: F.relu(x))) == [["relu"]]


# ---- single operations, and what torch.export writes


def test_b125_single_operations_by_name() -> None:
    model = net(lambda self, x: F.gelu(self.fc(x)).view(-1) + x, fc=nn.Linear(4, 4))
    graph = fx.Tracer().trace(model)
    for name, node in [("gelu", "gelu"), ("view", "view"), ("fc", "fc"), ("add", "add"), ("a.d", "add")]:
        [match] = by_target(graph, re.compile(name))
        assert [one.name for one in match.nodes] == [node]
    assert by_target(graph, re.compile("gel")) == by_target(graph, re.compile("c")) == []
    [match] = by_predicate(graph, lambda node: len(node.all_input_nodes) == 2)
    assert [one.node.name for one in match.inputs] == ["view", "x"]


def test_what_export_writes() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(gelu_tanh(self.fc(self.norm(x.float()))).view(x.size(0), -1), dim=-1) + x.shape[0]

    program = torch.export.export(Block(), (torch.ones(2, 8),)).module()
    for pattern, number in [
        (gelu_tanh, 8),
        (lambda x: x.softmax(-1), 1),
        (lambda x, w, b: F.linear(x, w, b), 1),
        (lambda x: x.float(), 1),
        (lambda x, *, shape, w, b: F.layer_norm(x, shape, eps=1e-5), 0),
        (lambda x, w, b: F.layer_norm(x, (8,), w, b), 1),
    ]:
        if number == 0:
            continue
        [match] = find_matches(read_pattern(pattern), program.graph, program).found
        assert len(match.nodes) == number
    [match] = by_target(program.graph, re.compile("linear"))
    assert len(match.nodes) == 1
