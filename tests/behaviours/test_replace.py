"""B020-B031: replace one whole module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

from .nets import Inner, Model, both_gradients

Empty = slapo.Schedule()
MODES = pytest.mark.parametrize("inplace", [False, True])


def own_linear(old: nn.Linear) -> nn.Linear:
    made = nn.Linear(old.in_features, old.out_features)
    made.weight, made.bias = old.weight, old.bias
    return made


@MODES
def test_B020_one_child_is_replaced_at_its_path(inplace: bool) -> None:
    model = Inner()
    out = slapo.apply(model, slapo.replace(Empty, "activation", nn.GELU()), inplace=inplace)
    assert type(out.activation) is nn.GELU
    assert list(dict(out.named_children())) == ["linear", "activation"]
    by_hand = Inner()
    by_hand.linear, by_hand.activation = out.linear, nn.GELU()
    both_gradients(by_hand, out, torch.rand(2, 1024))


@MODES
def test_B022_the_path_s_name_stays_whatever_the_new_module_is_called(inplace: bool) -> None:
    class Renamed(nn.Linear):
        name = "other"

    out = slapo.apply(Model(), slapo.replace(Empty, "fc1", lambda old: Renamed(1024, 1024)), inplace=inplace)
    assert list(dict(out.named_children())) == ["fc1", "act1", "fc2", "act2", "submod"]
    assert list(out.state_dict()) == list(Model().state_dict())


@MODES
def test_B023_the_root_is_replaced_and_the_result_is_the_new_root(inplace: bool) -> None:
    model = Inner()
    out = slapo.apply(model, slapo.replace(Empty, "", lambda old: nn.Sequential(old, nn.Tanh())), inplace=inplace)
    assert type(out) is nn.Sequential
    assert (out[0] is model) == inplace
    x = torch.rand(2, 1024)
    assert torch.equal(out(x), model(x).tanh())


def test_B023_later_entries_see_the_new_root() -> None:
    sch = slapo.replace(Empty, "", lambda old: nn.Sequential(old, nn.Tanh()))
    sch = slapo.replace(sch, "1", nn.ReLU())
    sch = slapo.freeze(sch, "0.linear")
    out = slapo.apply(Inner(), sch)
    assert type(out[1]) is nn.ReLU
    assert not out[0].linear.weight.requires_grad


@MODES
def test_B024_pre_forward_and_backward_hooks_are_on_the_new_one(inplace: bool) -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_pre_hook(lambda module, args: ran.append("pre"))
    model[0].register_forward_hook(lambda module, args, output: ran.append("forward"))
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: ran.append("backward"))
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear), inplace=inplace)
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
        assert len(vars(out[0])[table]) == 1
    out(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert ran == ["pre", "forward", "backward"]


def test_B025_a_handle_from_before_still_removes_its_hook() -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2))
    handle = model[0].register_forward_hook(lambda module, args, output: ran.append("in place"))
    slapo.apply(model, slapo.replace(Empty, "0", own_linear), inplace=True)
    model(torch.ones(1, 2))
    assert ran == ["in place"]
    handle.remove()
    model(torch.ones(1, 2))
    assert ran == ["in place"]


def test_B025_pure_the_handle_belongs_to_the_model_that_was_given() -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2))
    handle = model[0].register_forward_hook(lambda module, args, output: ran.append("x"))
    out = slapo.apply(model, slapo.replace(Empty, "0", own_linear))
    handle.remove()
    model(torch.ones(1, 2))
    assert ran == []
    out(torch.ones(1, 2))
    assert ran == ["x"]


@MODES
def test_B026_hooks_that_the_new_module_had_are_kept_after_the_old_ones(inplace: bool) -> None:
    ran: list[str] = []

    def hooked(old: nn.Linear) -> nn.Linear:
        made = own_linear(old)
        made.register_forward_hook(lambda module, args, output: ran.append("new"))
        made.register_forward_pre_hook(lambda module, args, kwargs: ran.append("new pre"), with_kwargs=True)
        made.register_full_backward_hook(lambda module, grad_input, grad_output: ran.append("new backward"))
        return made

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: ran.append("old"))
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: ran.append("old backward"))
    out = slapo.apply(model, slapo.replace(Empty, "0", hooked), inplace=inplace)
    out(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert ran == ["new pre", "old", "new", "old backward", "new backward"]


@MODES
def test_B026_also_those_of_a_template_and_each_site_removes_its_own(inplace: bool) -> None:
    ran: list[str] = []
    template = nn.ReLU()
    template.register_forward_hook(lambda module, args, output: ran.append("template"))
    model = nn.Sequential(nn.GELU(), nn.GELU())
    out = slapo.apply(model, slapo.replace(Empty, "*", template), inplace=inplace)
    out(torch.ones(1))
    assert ran == ["template"] * 2


@MODES
def test_B027_kwargs_always_called_and_backward_pre_hooks_survive(inplace: bool) -> None:
    ran: list[Any] = []

    class Scales(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            if scale == 0:
                raise RuntimeError("no scale")
            return x * scale

    class ScalesToo(Scales):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale)

    model = Scales()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2}), with_kwargs=True
    )
    model.register_forward_hook(lambda module, args, kwargs, output: ran.append(kwargs["scale"]), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: ran.append("always"), always_call=True)
    model.register_full_backward_pre_hook(lambda module, grad_output: ran.append("backward pre"))
    root = nn.ModuleList([model])
    out = slapo.apply(root, slapo.replace(Empty, "0", lambda old: ScalesToo()), inplace=inplace)
    x = torch.ones(1, requires_grad=True)
    y = out[0](x, scale=3.0)
    assert y.item() == 6.0
    y.sum().backward()
    assert ran == [6.0, "always", "backward pre"]
    with pytest.raises(RuntimeError, match="no scale"):
        out[0](x, scale=0.0)
    assert ran[-1] == "always"


class Wraps(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@MODES
def test_B029_around_the_old_one_hooks_run_once(inplace: bool) -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2)).double()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[0].register_forward_pre_hook(lambda module, args: ran.append("pre"))
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: ran.append("backward"))
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    expected = model(x).detach()
    ran.clear()
    out = slapo.apply(model, slapo.replace(Empty, "0", Wraps), inplace=inplace)
    out = slapo.apply(out, slapo.replace(slapo.checkpoint(Empty, "0"), "0", Wraps), inplace=inplace)
    value = out(x)
    value.sum().backward()
    assert torch.equal(value, expected)
    assert ran == ["pre", "backward"]


@MODES
def test_B029_around_the_old_one_checkpointing_is_once_too(inplace: bool) -> None:
    calls: list[int] = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    first = slapo.apply(nn.Sequential(Counts(2, 2)), slapo.checkpoint(Empty, "0"))
    out = slapo.apply(first, slapo.replace(Empty, "0", Wraps), inplace=inplace)
    out(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2


@MODES
@pytest.mark.parametrize("training", [False, True])
def test_B030_the_training_flag_is_the_old_one_s(training: bool, inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).train(training)
    sch = slapo.replace(Empty, "1", lambda old: nn.Dropout(0.5))
    sch = slapo.replace(sch, "0", nn.Linear(2, 2).train(not training))
    out = slapo.apply(model, sch, inplace=inplace)
    assert [m.training for m in out.modules()] == [training] * 3
    if not training:
        x = torch.rand(4, 2)
        assert torch.equal(out(x), model[0](x))


def test_B030_unless_the_caller_wants_the_new_one_s() -> None:
    model = nn.Sequential(nn.ReLU()).eval()
    out = slapo.apply(model, slapo.replace(Empty, "0", lambda old: nn.Dropout(0.5), inherit=False))
    assert out[0].training


def test_B031_marks_on_an_old_parameter_are_not_carried_to_a_fresh_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.mark = 1
    sch = slapo.replace(Empty, "0", lambda old: nn.Linear(2, 2))
    out = slapo.apply(model, sch)
    assert not hasattr(out[0].weight, "mark")
    kept = slapo.apply(model, slapo.replace(Empty, "0", own_linear))
    assert kept[0].weight.mark == 1, "the very parameter, so with what hangs on it"


def test_B031_an_entry_that_annotates_holds_for_whatever_stands_there() -> None:
    sch = slapo.annotate(Empty, "0", "weight", "mark", 1)
    sch = slapo.replace(sch, "0", lambda old: nn.Linear(2, 2))
    assert slapo.apply(nn.Sequential(nn.Linear(2, 2)), sch)[0].weight.mark == 1
