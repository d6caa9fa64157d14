"""Layers of one input, by their paths, as one: fuse(sch, "**.{q,k,v}_proj") (case 17)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_fn as slapo

from .nets_parts import Attention, Empty, equal, within

X = torch.rand(2, 3, 8)
MODES = pytest.mark.parametrize("inplace", [False, True])
QKV = slapo.fuse(Empty, "{q,k,v}_proj")


class Qk(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.use = nn.Linear(8, 4), nn.Linear(8, 2), use

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def in_place(self: Qk, x: Tensor) -> Any:
    y = x.clone()
    first = self.q_proj(y)
    y.mul_(2)
    return first, self.k_proj(y)


def part_autocast(self: Qk, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = self.q_proj(x)
    return first.float(), self.k_proj(x)


def part_no_grad(self: Qk, x: Tensor) -> Any:
    with torch.no_grad():
        first = self.q_proj(x)
    return first, self.k_proj(x)


USES: dict[str, Any] = {
    "plain": lambda self, x: (self.q_proj(x), self.k_proj(x)),
    "another order": lambda self, x: (self.k_proj(x), self.q_proj(x)),
    "another input": lambda self, x: (self.q_proj(x), self.k_proj(x + 1), self.q_proj(x)),
    "one alone": lambda self, x: self.k_proj(x),
    "twice": lambda self, x: (self.q_proj(x), self.q_proj(x), self.k_proj(x)),
    "by its weight": lambda self, x: F.linear(x, self.q_proj.weight, self.q_proj.bias) + self.q_proj.weight.sum(),
    "in place between": in_place,
    "partly autocast": part_autocast,
    "partly without gradients": part_no_grad,
    "sizes": lambda self, x: self.q_proj(x) * self.q_proj.out_features + self.k_proj.in_features,
}
USES["keyword"] = lambda self, x: (self.q_proj(input=x), self.k_proj(input=x))


@MODES
@pytest.mark.parametrize("name", USES)
def test_whatever_the_parent_does_with_them(name: str, inplace: bool) -> None:
    model = Qk(USES[name])
    reference = copy.deepcopy(model)
    out = slapo.apply(model, slapo.fuse(Empty, "{q,k}_proj"), inplace=inplace)
    if name != "in place between":  # its backward pass is an error, by torch itself
        equal(reference, out, X, close=True)
    with torch.no_grad():
        torch.testing.assert_close(out(X), reference(X))


def test_one_matmul_a_call_and_no_tensor_twice_in_a_file() -> None:
    model = Attention()
    out = slapo.apply(model, QKV)
    calls: list[int] = []
    out.qkv_proj.register_forward_hook(lambda *values: calls.append(1))
    equal(model, out, X, close=True)
    assert calls == [1]
    assert set(out.state_dict()) == {"out.weight", "out.bias", "qkv_proj.weight", "qkv_proj.bias"}
    assert len({one.data_ptr() for one in out.state_dict().values()}) == 4
    stream = io.BytesIO()
    torch.save(out.state_dict(), stream)
    stream.seek(0)
    fresh = slapo.apply(Attention(), QKV)
    fresh.load_state_dict(torch.load(stream))
    assert torch.equal(fresh(X), out(X))
    original = slapo.to_original(out)
    assert original.keys() == model.state_dict().keys()
    assert all(torch.equal(one, model.state_dict()[key]) for key, one in original.items())
    slapo.from_original(fresh, model.state_dict())
    assert torch.equal(fresh(X), out(X))


@MODES
def test_what_replaces_the_fused_layer_is_what_runs(inplace: bool) -> None:
    def zeroed(old: Any) -> Any:
        made = copy.deepcopy(old)
        made.requires_grad_(False)
        for one in made.parameters():
            one.zero_()
        return made

    two = slapo.apply(
        slapo.apply(Qk(USES["plain"]), slapo.fuse(Empty, "{q,k}_proj")), slapo.replace(Empty, "qk_proj", zeroed)
    )
    assert not any(one.any() for one in two(X))
    sch = slapo.replace(slapo.fuse(Empty, "{q,k}_proj"), "qk_proj", zeroed)
    one_pass = slapo.apply(Qk(USES["plain"]), sch, inplace=inplace)
    assert not any(one.any() for one in one_pass(X))


def test_what_is_told_apart_by_copying() -> None:
    out = slapo.apply(Qk(USES["plain"]), slapo.fuse(Empty, "{q,k}_proj"))
    stream = io.BytesIO()
    sch = slapo.compile(slapo.checkpoint(slapo.cast(QKV, "", torch.float64), ""), "", backend="eager")
    torch.save(slapo.apply(Attention(), sch), stream)
    stream.seek(0)
    for copied in (copy.deepcopy(out), torch.load(stream, weights_only=False)):
        with torch.no_grad():
            for one in copied.parameters():
                one.zero_()
        y = copied(X.double() if isinstance(copied, Attention) else X)
        assert not any(one.any() for one in (y if isinstance(y, tuple) else (y,)))
    assert any(one.any() for one in out(X))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: setattr(m, "k_proj", nn.Linear(8, 8, bias=False)), "bias"),
        (lambda m: m.k_proj.requires_grad_(False), "requires_grad"),
        (lambda m: m.k_proj.double(), "dtype"),
        (lambda m: setattr(m, "k_proj", nn.Linear(4, 8)), "in_features"),
        (lambda m: setattr(m.v_proj, "weight", m.k_proj.weight), "k_proj.weight and v_proj.weight are one tied"),
        (lambda m: setattr(m.out, "weight", m.k_proj.weight), "k_proj.weight and out.weight are one tied"),
        (lambda m: setattr(m, "k_proj", nn.Conv1d(8, 8, 1)), "k_proj"),
        (lambda m: setattr(m, "qkv_proj", 5), "has an attribute qkv_proj already"),
    ],
)
@MODES
def test_what_cannot_be_one_is_refused(change: Any, error: str, inplace: bool) -> None:
    model = Attention()
    change(model)
    before = list(model.named_modules())
    with pytest.raises(slapo.SlapoError, match=error):
        slapo.apply(model, QKV, inplace=inplace)
    assert list(model.named_modules()) == before
    assert "forward" not in vars(model)


def test_a_layer_alone_is_refused_by_its_path() -> None:
    with pytest.raises(slapo.NoMatchError, match="a layer alone has nothing to be fused with") as caught:
        slapo.apply(Attention(), slapo.fuse(Empty, "q_proj"))
    assert str(caught.value).startswith("q_proj")


@pytest.mark.parametrize("kind", ["ModuleList", "ModuleDict", "Sequential"])
def test_children_of_a_container_are_fused_right_or_refused(kind: str) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    model = {
        "ModuleList": within(lambda s, x: [one(x) for one in s.held], held=nn.ModuleList(layers)),
        "ModuleDict": within(
            lambda s, x: {k: one(x) for k, one in s.held.items()},
            held=nn.ModuleDict(dict(zip("ab", layers, strict=True))),
        ),
        "Sequential": within(lambda s, x: s.held(x), held=nn.Sequential(*layers)),
    }[kind]
    try:
        out = slapo.apply(model, slapo.fuse(Empty, "held.*"))
    except slapo.SlapoError:
        return
    torch.testing.assert_close(out(X), model(X))
    assert len(out.held) == 2


@pytest.mark.parametrize("name", ["freeze", "cast"])
def test_what_is_asked_of_a_share_is_done_or_refused(name: str) -> None:
    sch = slapo.freeze(QKV, "q_proj") if name == "freeze" else slapo.cast(QKV, "q_proj", torch.float64)
    with pytest.raises(slapo.SlapoError):
        slapo.apply(Attention(), sch)


def test_hooks_on_the_layers_stay_and_shared_parents_are_fused_once() -> None:
    ran: list[str] = []
    attention = Attention()
    attention.q_proj.register_forward_hook(lambda *values: ran.append("q"))
    model = within(lambda self, x: self.a(x) + self.b(x), a=attention, b=attention)
    out = slapo.apply(model, slapo.fuse(Empty, "**.{q,k,v}_proj"))
    equal(model, out, X, close=True)
    assert ran == ["q"] * 4
    assert out.a is out.b


def test_fullgraph_vmap_and_functional_call() -> None:
    model = Attention()
    out = slapo.apply(model, QKV)
    torch.testing.assert_close(torch.compile(out, fullgraph=True, backend="eager")(X), model(X))
    torch.testing.assert_close(torch.vmap(out)(X[:, None])[:, 0], model(X))
    zero = {name: torch.zeros_like(one) for name, one in out.named_parameters()}
    assert not torch.func.functional_call(out, zero, (X,)).any()


@pytest.mark.parametrize("flat", [False, True])
def test_traced_afterwards(flat: bool) -> None:
    model = Attention()
    out = slapo.apply(model, slapo.trace(QKV, "", flat=flat))
    equal(model, out, X, close=True)
