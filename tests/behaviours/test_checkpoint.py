"""B200-B211: checkpoint. B201 and B202 (a subgraph) and the streams of B205 come with these primitives."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

from .nets import Inner, both_gradients

Empty = slapo.Schedule()
REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True])


class Counted(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layer1 = nn.Linear(4, 4)
        self.drop = nn.Dropout(p)
        self.calls = 0

    def forward(self, x: Tensor, y: Any = None, *, scale: float = 1.0, flag: Any = None) -> Tensor:
        self.calls += 1
        return self.drop(self.layer1(x).relu()) * scale + (0 if y is None else y)


@REENTRANT
@pytest.mark.parametrize("path", ["0", "*", ""])
def test_B200_outputs_and_gradients_are_equal(path: str, use_reentrant: bool) -> None:
    model = nn.Sequential(Counted(), Counted()).double()
    out = slapo.apply(model, slapo.checkpoint(Empty, path, use_reentrant=use_reentrant))
    both = torch.rand(3, 4, dtype=torch.float64)
    if not use_reentrant:
        both_gradients(model, out, both)
        out[0].calls = 0
    x, x2 = both.clone().requires_grad_(), both.clone().requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out.zero_grad()
    out(x2).square().sum().backward()
    assert torch.equal(x.grad, x2.grad)
    assert all(torch.equal(p.grad, g) for p, g in zip(out.parameters(), grads, strict=True))
    assert out[0].calls == 2


def test_B204_parameters_get_gradients_when_no_input_wants_one() -> None:
    model = nn.Sequential(Counted(), Counted())
    out = slapo.apply(model, slapo.checkpoint(Empty, "*"))
    out(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in out.parameters())


def test_B204_nor_when_the_inputs_are_integers() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    out = slapo.apply(model, slapo.checkpoint(Empty, ""))
    out(torch.tensor([1, 2])).sum().backward()
    assert all(p.grad is not None for p in out.parameters())


@REENTRANT
def test_B205_dropout_is_the_same_in_the_recomputation(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counted(0.5), Counted(0.5)).double()
    out = slapo.apply(model, slapo.checkpoint(Empty, "*", use_reentrant=use_reentrant))
    found = []
    for one in (model, out):
        one.zero_grad(set_to_none=True)
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(2)
        value = one(x)
        value.square().sum().backward()
        found.append([value.detach(), x.grad, *(p.grad.clone() for p in one.parameters()), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "the stream goes on as without, too"


def test_B206_the_re_entrancy_choice_and_the_other_options_are_honoured() -> None:
    seen: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(self.name)

        def __exit__(self, *_: object) -> None:
            pass

    model = nn.Sequential(Counted())
    contexts = slapo.checkpoint(Empty, "0", context_fn=lambda: (Noted("forward"), Noted("recomputation")))
    slapo.apply(model, contexts)(torch.ones(1, 4)).sum().backward()
    assert seen == ["forward", "recomputation"]

    out = slapo.apply(model, slapo.checkpoint(Empty, "0", use_reentrant=True))
    assert "CheckpointFunction" in type(out(torch.ones(1, 4, requires_grad=True)).grad_fn).__name__
    out = slapo.apply(model, slapo.checkpoint(Empty, "0"))
    assert "CheckpointFunction" not in type(out(torch.ones(1, 4, requires_grad=True)).grad_fn).__name__

    drops = nn.Sequential(Counted(0.5)).double()
    out = slapo.apply(drops, slapo.checkpoint(Empty, "0", preserve_rng_state=False))
    torch.manual_seed(0)
    out(torch.ones(64, 4, dtype=torch.float64)).sum().backward()
    other = out[0].layer1.weight.grad.clone()
    drops.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    drops(torch.ones(64, 4, dtype=torch.float64)).sum().backward()
    assert not torch.equal(other, drops[0].layer1.weight.grad)


@REENTRANT
def test_B206_keywords_reach_the_forward(use_reentrant: bool) -> None:
    model = Counted().double()
    out = slapo.apply(model, slapo.checkpoint(Empty, "", use_reentrant=use_reentrant))
    x, y = (
        torch.ones(2, 4, dtype=torch.float64, requires_grad=True),
        torch.ones(2, 4, dtype=torch.float64, requires_grad=True),
    )
    assert torch.equal(out(x, y=y, scale=3.0, flag="text"), model(x, y=y, scale=3.0, flag="text"))
    out(x, y=y, scale=3.0).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y)), "a keyword tensor gets its gradient, too"


@REENTRANT
def test_B207_what_is_no_tensor_passes_through(use_reentrant: bool) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, none: None, number: int, pair: tuple[Tensor, str]) -> tuple[Any, ...]:
            return self.fc(x) * number + pair[0], none, number + 1, pair[1]

    model = Passes()
    out = slapo.apply(model, slapo.checkpoint(Empty, "", use_reentrant=use_reentrant))
    x = torch.ones(1, 4, requires_grad=True)
    value, none, number, text = out(x, None, 3, (torch.ones(1, 4), "text"))
    assert torch.equal(value, model(x, None, 3, (torch.ones(1, 4), "text"))[0])
    assert (none, number, text) == (None, 4, "text")
    value.sum().backward()
    assert x.grad is not None


def test_B208_keys_attributes_and_pickling_are_unaffected() -> None:
    model = Inner()
    out = slapo.apply(model, slapo.checkpoint(Empty, "linear"))
    assert list(out.state_dict()) == ["linear.weight", "linear.bias"]
    assert out.linear.weight is model.linear.weight
    assert type(out.linear) is nn.Linear
    x = torch.rand(1, 1024)
    for made in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert torch.equal(made(x), model(x))
        made(x).sum().backward()
        assert made.linear.weight.grad is not None
    assert out.linear.weight.grad is None


@REENTRANT
def test_B209_mixed_positional_and_keyword_arguments_need_no_ordering_function(use_reentrant: bool) -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, c: Tensor, d: int = 1) -> Tensor:
            return a * b * c * d

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = Product()

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x * 2, d=5, c=x * 4, b=x * 3)

    out = slapo.apply(Calls(), slapo.checkpoint(Empty, "product", use_reentrant=use_reentrant))
    x = torch.ones(1, requires_grad=True)
    value = out(x)
    assert value.item() == 120
    value.backward()
    assert x.grad.item() == 360


def test_B211_the_inner_modules_stay_selectable_under_their_own_paths() -> None:
    model = nn.Sequential(Counted(), Counted())
    out = slapo.apply(model, slapo.checkpoint(Empty, "*"))
    assert slapo.select(out).paths == slapo.select(model).paths
    again = slapo.apply(out, slapo.replace(Empty, "*.layer1", lambda old: nn.Linear(4, 4)))
    again(torch.ones(2, 4)).sum().backward()
    assert [one.calls for one in again] == [2, 2]
