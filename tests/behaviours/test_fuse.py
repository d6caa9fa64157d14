"""B080-B090: compute several operations as one."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Deep, Empty, LinearRelu, TwoLayers, equal, fused, linear_relu, within

MODES = pytest.mark.parametrize("inplace", [False, True])
HERE = slapo.pattern(linear_relu, within="")
X = torch.rand(3, 4)


class ConvRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x)) + 1


class Residual(nn.Module):
    """bias + dropout + residual + layer_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.2), nn.LayerNorm(4)
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.drop(self.fc(x) + self.bias) + residual)


def bias_drop_norm(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return slapo.call_module(nn.LayerNorm, slapo.call_module(nn.Dropout, x + bias) + residual)


@MODES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b080_three_operations_become_one_compiled_part(backend: str, inplace: bool) -> None:
    model = ConvRelu()
    reference, keys = copy.deepcopy(model), list(model.state_dict())
    found = slapo.pattern(lambda x: F.relu(slapo.call_module("conv", x)) + 1, within="")
    out = slapo.apply(model, slapo.fuse(Empty, found, backend=backend), inplace=inplace)
    equal(reference, out, torch.rand(1, 3, 5, 5), close=True)
    assert list(out.state_dict()) == keys, "a part by a compiler keeps all names"


def test_b080_the_backend_gets_just_the_part() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.sin(F.relu(x) + 1)

    out = slapo.apply(
        within(forward), slapo.fuse(Empty, slapo.pattern(lambda x: F.relu(x) + 1, within=""), backend=backend)
    )
    out(X)
    assert len(graphs) == 1
    assert torch.sin not in graphs[0]


@MODES
def test_b081_with_no_compiler_a_chain_of_modules_becomes_a_sequential(inplace: bool) -> None:
    model = ConvRelu()
    reference = copy.deepcopy(model)
    found = slapo.pattern(lambda x: slapo.call_module("act", slapo.call_module("conv", x)), within="")
    out = slapo.apply(model, slapo.fuse(Empty, found, backend=None, name="ConvAct"), inplace=inplace)
    assert [type(one) for one in out.ConvAct_0] == [nn.Conv2d, nn.ReLU]
    assert list(out.state_dict()) == ["ConvAct_0.0.weight", "ConvAct_0.0.bias"]
    x = torch.rand(1, 3, 5, 5)
    assert torch.equal(out(x), reference(x))
    assert list(slapo.to_original(out)) == ["conv.weight", "conv.bias"]


def test_b082_after_decomposing_and_tracing_flat_bias_and_gelu_fuse() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    sch = slapo.trace(slapo.decompose(Empty, nn.Linear), "", flat=True, leaves=nn.GELU)
    sch = slapo.fuse(sch, slapo.pattern(lambda x, bias: F.gelu(x + bias), within=""), backend="eager")
    out = slapo.apply(model, sch)
    equal(model, out, X, close=True)
    assert list(out.state_dict()) == ["0.weight", "0.bias"]


def test_b082_the_pattern_may_look_through_calls_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    found = slapo.pattern(lambda x, bias: F.gelu(x + bias), within="", flat=True)
    out = slapo.apply(model, slapo.fuse(slapo.decompose(Empty, nn.Linear), found, backend="eager"))
    equal(model, out, X, close=True)


@pytest.mark.parametrize("training", [False, True])
def test_b083_bias_dropout_residual_norm(training: bool) -> None:
    model = Residual().train(training).double()
    sch = slapo.fuse(Empty, slapo.pattern(bias_drop_norm, within=""), backend="eager")
    out = slapo.apply(model, sch)
    assert len(slapo.select(model, slapo.pattern(bias_drop_norm, within=""))[0].module.ops) == 4
    equal(model, out, *torch.rand(2, 3, 4).double())
    out.train(not training)
    equal(model.train(not training), out, *torch.rand(2, 3, 4).double())


def test_b085_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(slapo.ArgumentError, match=r"no backend 'torchscriptt'; it has .*inductor"):
        slapo.fuse(Empty, HERE, backend="torchscriptt")
    assert issubclass(slapo.ArgumentError, (ValueError, TypeError))


@MODES
def test_b086_names_and_state_dict_keys(inplace: bool) -> None:
    out = slapo.apply(TwoLayers(), slapo.fuse(Empty, HERE, fused, name="A"), inplace=inplace)
    assert list(out.state_dict()) == [f"A_{n}.linear.{key}" for n in (0, 1) for key in ("weight", "bias")]
    assert list(slapo.to_original(out)) == list(TwoLayers().state_dict())


def test_b087_a_fused_dropout_still_obeys_eval() -> None:
    for into in (None, lambda part: nn.Sequential(*part.calls)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
        found = slapo.pattern(lambda x: slapo.call_module(nn.Dropout, slapo.call_module(nn.Linear, x)), within="")
        out = slapo.apply(model, slapo.fuse(Empty, found, into, backend="eager"))
        assert torch.equal(out.eval()(X), model[0](X))
        assert not torch.equal(out.train()(X), model[0](X))
        evaluated = slapo.apply(model.eval(), slapo.fuse(Empty, found, into, backend="eager"))
        assert torch.equal(evaluated(X), model[0](X))
        assert not torch.equal(evaluated.train()(X), model[0](X))


def test_b087_also_a_functional_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x), 0.9, self.training)

    model = within(forward)
    found = slapo.pattern(lambda x, *, training: F.dropout(F.relu(x), 0.9, training), within="")
    for sch in (
        slapo.fuse(Empty, found, backend="eager"),
        slapo.checkpoint(Empty, found),
        slapo.replace(Empty, found, lambda x, training: F.dropout(F.relu(x), 0.9, training)),
    ):
        out = slapo.apply(model, sch)
        equal(model, out, X)
        assert torch.equal(out.eval()(X), X)
        assert not torch.equal(out.train()(X), X)


def test_b088_inputs_given_by_keyword() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.gelu(input=self.fc(input=x), approximate="tanh")

    model = within(forward, fc=nn.Linear(4, 4))
    found = slapo.pattern(lambda x: F.gelu(slapo.call_module("fc", x), approximate="tanh"), within="")
    for sch in (slapo.fuse(Empty, found, backend="eager"), slapo.checkpoint(Empty, found)):
        equal(model, slapo.apply(model, sch), X)


def test_b088_a_chain_called_by_keyword_is_a_sequential_or_refused() -> None:
    model = within(lambda self, x: self.act(input=self.fc(input=x)), fc=nn.Linear(4, 4), act=nn.ReLU())
    found = slapo.pattern(lambda x: slapo.call_module("act", slapo.call_module("fc", x)), within="")
    with pytest.raises(slapo.MisfitError, match="no chain of different modules"):
        slapo.apply(model, slapo.fuse(Empty, found, backend=None))


def test_b089_with_no_compiler_a_chain_with_a_function_is_refused() -> None:
    with pytest.raises(slapo.ScheduleError, match="only such a chain"):
        slapo.apply(TwoLayers(), slapo.fuse(Empty, HERE, backend=None))
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    twice = slapo.pattern(lambda x: F.relu(F.relu(x)), within="")
    assert torch.equal(slapo.apply(model, slapo.fuse(Empty, twice, backend=None))(X), X)


def test_b090_on_the_meta_device_then_built() -> None:
    with torch.device("meta"):
        model = TwoLayers()
    for sch in (slapo.fuse(Empty, HERE, fused), slapo.fuse(Empty, HERE, backend="eager")):
        out = slapo.apply(model, sch)
        assert all(one.is_meta for one in out.parameters())
        out.to_empty(device="cpu")
        for one in out.parameters():
            nn.init.ones_(one)
        assert torch.equal(out(torch.ones(1, 4)), torch.full((1, 4), 21.0))


def test_b086_the_result_is_deep_copied_pickled_and_saved() -> None:
    model = Deep()
    for sch in (
        slapo.fuse(Empty, slapo.pattern(linear_relu), fused),
        slapo.fuse(Empty, slapo.pattern(linear_relu), backend="eager"),
    ):
        out = slapo.apply(model, sch)
        stream = io.BytesIO()
        torch.save(out, stream)
        stream.seek(0)
        for copied in (copy.deepcopy(out), torch.load(stream, weights_only=False)):
            assert torch.equal(copied(X), model(X))
            with torch.no_grad():
                for one in copied.parameters():
                    one.zero_()
            assert not copied(X).any(), "the copy runs its own weights"
            assert torch.equal(out(X), model(X))


def test_b086_fullgraph_goes_through() -> None:
    model = Deep()
    for sch in (
        slapo.fuse(Empty, slapo.pattern(linear_relu), fused),
        slapo.fuse(Empty, slapo.pattern(linear_relu), backend="eager"),
        slapo.checkpoint(Empty, slapo.pattern(linear_relu)),
    ):
        whole = torch.compile(slapo.apply(model, sch), fullgraph=True, backend="eager")
        torch.testing.assert_close(whole(X), model(X))
        assert isinstance(LinearRelu(), nn.Module)


def test_b086_into_has_to_give_a_module_that_takes_the_inputs() -> None:
    with pytest.raises(slapo.ScheduleError, match="where a module has to stand"):
        slapo.apply(TwoLayers(), slapo.fuse(Empty, HERE, lambda part: torch.relu))  # type: ignore[arg-type,return-value]
    with pytest.raises(slapo.ScheduleError, match="requires 2"):
        slapo.apply(TwoLayers(), slapo.fuse(Empty, HERE, lambda part: nn.Bilinear(4, 4, 4)))
