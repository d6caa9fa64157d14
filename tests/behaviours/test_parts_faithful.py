"""A graph is the forward, or is refused: what a trace would get wrong without a sound (cases 24 and 11)."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Empty, within

X = torch.rand(3, 4)
TRACE = slapo.trace(Empty, "")


def same_or_refused(model: nn.Module, *calls: tuple[Any, ...], sch: slapo.Schedule = TRACE, mode: Any = None) -> None:
    """Each call gives what the forward gives; or it is refused, when it is traced or when it is called."""
    try:
        out = slapo.apply(model, sch)
    except slapo.TraceError:
        return
    for args in calls:
        with mode() if mode else torch.enable_grad():
            torch.manual_seed(0)
            random.seed(0)
            expected = model(*args)
            torch.manual_seed(0)
            random.seed(0)
            try:
                found = out(*args)
            except slapo.TraceError:
                continue
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if isinstance(expected, Tensor):
            assert found.requires_grad == expected.requires_grad


def asks_none(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * 2


def test_whether_an_argument_without_a_default_is_none() -> None:
    same_or_refused(within(asks_none), (X, None), (X, X))


def test_whether_a_child_gave_none() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.child(x)
        return x if y is None else x * 2

    same_or_refused(within(forward, child=within(lambda self, x: None)), (X,))


QUESTIONS: dict[str, Any] = {
    "is_tensor": lambda self, x: x if torch.is_tensor(x) else x * 2,
    "type": lambda self, x: x if type(x) is Tensor else x * 2,
    "hasattr": lambda self, x: x * 2 if hasattr(x, "sample") else x,
    "getattr": lambda self, x: x if getattr(x, "sample", None) is None else x * 2,
    "is_floating_point": lambda self, x: x if torch.is_floating_point(x) else x * 2,
    "callable": lambda self, x: x * 2 if callable(x) else x,
    "is grad enabled": lambda self, x: x if torch.is_grad_enabled() else x * 2,
    "is autocast enabled": lambda self, x: x if torch.is_autocast_enabled("cpu") else x * 2,
    "python's random": lambda self, x: x * random.random(),
    "text": lambda self, x: {f"{x.shape}": x},
    "str": lambda self, x: {str(x.dtype): x},
    "seed": lambda self, x: (torch.manual_seed(5), x + torch.rand(4))[1],
    "identity": lambda self, x: x if x is self.seen else x * 2,
    "in a list": lambda self, x: x if any(x is one for one in [self.seen]) else x * 2,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(name: str) -> None:
    model = within(QUESTIONS[name], seen=X)
    same_or_refused(model, (X,))
    same_or_refused(model, (X,), mode=torch.no_grad)
    same_or_refused(model, (X,), mode=lambda: torch.autocast("cpu"))


def test_a_forward_that_catches_all() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        try:
            if x.sum() > 0:
                return x
        except Exception:
            pass
        return x * 2

    same_or_refused(within(forward), (X,), (-X,))


@pytest.mark.parametrize("training", [False, True])
def test_the_flag_of_a_child_is_looked_up_at_each_call(training: bool) -> None:
    model = within(lambda self, x: F.dropout(x, self.drop.p, self.drop.training), drop=nn.Dropout(0.9)).train(training)
    out = slapo.apply(model, TRACE)
    assert torch.equal(out.eval()(X), X)
    assert not torch.equal(out.train()(X), X)


def no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.fc(x)
    return y + self.scale


def enable_grad(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return self.fc(x)


def no_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.fc(x)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
def test_no_grad_inside_wherever_it_is_traced(around: Any) -> None:
    model = within(no_grad, fc=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    try:
        with around():
            out = slapo.apply(model, TRACE)
    except slapo.TraceError:
        return
    out(X).sum().backward()
    assert model.fc.weight.grad is None


@pytest.mark.parametrize(
    ("forward", "mode"),
    [
        (enable_grad, torch.no_grad),
        (no_autocast, lambda: torch.autocast("cpu")),
    ],
)
def test_a_context_that_changes_nothing_while_it_is_traced(forward: Any, mode: Any) -> None:
    same_or_refused(within(forward, fc=nn.Linear(4, 4)), (X,), mode=mode)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
def test_a_function_with_a_gradient_of_its_own(around: Any) -> None:
    model = within(lambda self, x: Straight.apply(x))
    try:
        with around():
            out = slapo.apply(model, TRACE)
    except slapo.TraceError:
        return
    x = X.clone().requires_grad_()
    out(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 3))  # type: ignore[arg-type]


class Counter:
    def __init__(self) -> None:
        self.count = 0


@pytest.mark.parametrize("kind", ["nested", "object"])
def test_what_a_forward_writes_further_in(kind: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if kind == "nested":
            self.log["a"].append(1)
        else:
            self.log.count += 1
        return x

    model = within(forward, log={"a": []} if kind == "nested" else Counter())
    try:
        out = slapo.apply(model, TRACE)
    except slapo.TraceError:
        return
    assert (out.log["a"] if kind == "nested" else out.log.count) in ([], 0), "tracing leaves no mark"
    out(X)
    assert (out.log["a"] if kind == "nested" else out.log.count) in ([1], 1)


@pytest.mark.parametrize("what", ["torch", "python"])
def test_tracing_leaves_the_random_state_alone(what: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return x * random.random()

    before = torch.get_rng_state(), random.getstate()
    with contextlib.suppress(slapo.TraceError):
        slapo.apply(within(forward), TRACE)
    if what == "torch":
        assert torch.equal(torch.get_rng_state(), before[0])
    else:
        assert random.getstate() == before[1]


def test_drawn_and_made_tensors_are_new_at_each_call() -> None:
    model = within(lambda self, x: x + torch.rand(4) + torch.zeros(4).normal_() + torch.randn_like(x))
    out = slapo.apply(model, TRACE)
    assert not torch.equal(out(X), out(X))
    same_or_refused(model, (X,))


def test_in_place_operations_are_done_at_each_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        y = x.clone()
        y.mul_(2)
        y += 1
        return F.relu(y, inplace=True)

    model = within(forward)
    model.register_buffer("count", torch.zeros(()))
    out = slapo.apply(model, TRACE)
    assert torch.equal(out(X), X * 2 + 1)
    out(X)
    assert out.count.item() == 2


def test_b282_a_print_is_refused_and_a_probe_prints_when_it_runs(capsys: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        print(x)
        return x * 2

    with pytest.raises(slapo.TraceError, match=r"prints.*\n.*slapo\.probe"):
        slapo.apply(within(forward), TRACE)
    doubled = slapo.pattern(lambda x: x * 2, within="")
    out = slapo.apply(within(lambda self, x: x * 2 + 1), slapo.probe(TRACE, doubled))
    assert capsys.readouterr().out == ""
    out(X)
    assert "(3, 4)" in capsys.readouterr().out
