"""B036-B047: replace all that match."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

from .nets import Everywhere, Lists, Model

Empty = slapo.Schedule()
MODES = pytest.mark.parametrize("inplace", [False, True])


class Wider(nn.Linear):
    pass


def wider_at(site: slapo.Site[nn.Linear], args: dict[str, int]) -> nn.Module:
    """A user's own primitive: it has the path and the old module."""
    return nn.Linear(site.module.in_features, args[site.path])


@MODES
def test_B036_the_maker_gets_the_path_and_the_old_module(inplace: bool) -> None:
    sizes = {"fc1": 1025, "fc2": 1026, "submod.linear": 1027}
    out = slapo.apply(Model(), slapo.add(Empty, nn.Linear, wider_at, sizes), inplace=inplace)
    assert {path: out.get_submodule(path).out_features for path in sizes} == sizes


def test_B036_or_a_factory_for_each_path_that_gets_the_old_module() -> None:
    model, sch, seen = Model(), Empty, []
    for number, (path, _) in enumerate(slapo.select(model, type=nn.Linear)):
        sch = slapo.replace(sch, path, lambda old, n=number: seen.append(old) or nn.Linear(old.in_features, 1025 + n))
    out = slapo.apply(model, sch)
    assert [out.get_submodule(p).out_features for p in ("fc1", "fc2", "submod.linear")] == [1025, 1026, 1027]
    assert [old.weight for old in seen] == [model.fc1.weight, model.fc2.weight, model.submod.linear.weight]


def build(old: nn.Linear, *, out_features: int, bias: bool) -> nn.Linear:
    return nn.Linear(old.in_features, out_features, bias=bias)


def test_B037_more_arguments_for_the_maker() -> None:
    out = slapo.apply(Lists(), slapo.replace(Empty, nn.Linear, functools.partial(build, out_features=5, bias=False)))
    assert {(m.out_features, m.bias) for m in out.modules() if isinstance(m, nn.Linear)} == {(5, None)}


@MODES
@pytest.mark.parametrize("target", ["fc1", nn.Linear])
def test_B038_wrapping_in_a_sequential_with_the_same_type_inside_happens_once(target: Any, inplace: bool) -> None:
    model = Model()
    weight = model.fc1.weight
    made: list[nn.Module] = []
    sch = slapo.replace(Empty, target, lambda old: made.append(old) or nn.Sequential(old, nn.ReLU()))
    out = slapo.apply(model, sch, inplace=inplace)
    assert len(made) == (1 if target == "fc1" else 3)
    assert [type(m) for m in out.fc1] == [nn.Linear, nn.ReLU]
    assert out.fc1[0].weight is weight
    assert list(out.fc1.state_dict()) == ["0.weight", "0.bias"]


@MODES
def test_B039_members_of_a_module_list_and_of_a_sequential(inplace: bool) -> None:
    out = slapo.apply(Lists(), slapo.replace(Empty, nn.Linear, lambda old: nn.Linear(8, 512)), inplace=inplace)
    changed = [path for path, m in out.named_modules() if getattr(m, "out_features", 0) == 512]
    assert changed == ["mod.0", "mod.2", "seq.0", "seq.2"]


@MODES
def test_B040_a_sequential_in_a_list_and_a_list_in_a_sequential(inplace: bool) -> None:
    seen: list[str] = []

    def gelu_at(site: slapo.Site[nn.Module], args: None) -> nn.Module:
        seen.append(site.path)
        return nn.GELU()

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    model.seq = nn.Sequential(nn.ModuleList([nn.ReLU()]))
    out = slapo.apply(model, slapo.add(Empty, nn.ReLU, gelu_at, None), inplace=inplace)
    assert seen == ["blocks.0.1", "blocks.1.1", "seq.0.0"]
    assert [type(out.get_submodule(path)) for path in seen] == [nn.GELU] * 3
    assert not [m for m in out.modules() if isinstance(m, nn.ReLU)]


def test_B041_subclass_instances_and_several_types() -> None:
    class Forwards(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(nn.Linear(2, 2), Wider(2, 2), Forwards(2, 2), nn.ReLU(), nn.Tanh(), nn.GELU())
    assert slapo.select(model, type=nn.Linear).paths == ("0", "1")
    assert slapo.select(model, type=nn.Linear, subclasses=True).paths == ("0", "1", "2")
    several = slapo.select(model, type=nn.ReLU) | slapo.select(model, type=nn.Tanh)
    assert several.paths == ("3", "4")
    rule = slapo.where(type=nn.ReLU) | slapo.where(type=nn.Tanh) | slapo.where(type=nn.Linear)
    out = slapo.apply(model, slapo.replace(Empty, rule, lambda old: nn.Identity()))
    assert [type(m).__name__ for m in out] == ["Identity", "Identity", "Forwards", "Identity", "Identity", "GELU"]


@MODES
def test_B043_in_a_subtree_only(inplace: bool) -> None:
    model = Model()
    below = slapo.select(slapo.select(model, "submod"), "**", nn.Linear)
    assert below.paths == ("submod.linear",)
    out = slapo.apply(model, slapo.replace(Empty, below, lambda old: Wider(1024, 1024)), inplace=inplace)
    assert [path for path, m in out.named_modules() if isinstance(m, Wider)] == ["submod.linear"]


def test_B043_and_a_submodule_s_own_paths_are_relative_to_it() -> None:
    model = Model()
    out = slapo.apply(model.submod, slapo.replace(Empty, "linear", lambda old: Wider(1024, 1024)))
    assert type(out.linear) is Wider


@MODES
def test_B044_whatever_the_container(inplace: bool) -> None:
    model = Everywhere()
    model.alias = model.named["key"]
    expected = [path for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)]
    assert "attention.out_proj" in expected, "a subclass that inherits its forward"
    sch = slapo.replace(Empty, nn.Linear, lambda old: Wider(old.in_features, old.out_features))
    out = slapo.apply(model, sch, inplace=inplace)
    assert [path for path, m in out.named_modules(remove_duplicate=False) if type(m) is Wider] == expected
    assert out.alias is out.named["key"]


class Nest(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x


@MODES
def test_B045_a_match_inside_a_match_that_was_replaced_is_skipped(inplace: bool) -> None:
    model = nn.Sequential(Nest(Nest()), Nest())
    seen: list[nn.Module] = []
    sch = slapo.replace(Empty, Nest, lambda old: seen.append(old) or nn.Linear(2, 2))
    assert any("0.inner" in text for _, text in slapo.plan(model, sch).notes), "the plan tells it"
    seen.clear()
    out = slapo.apply(model, sch, inplace=inplace)
    assert len(seen) == 2
    assert [path for path, _ in out.named_modules()] == ["", "0", "1"], "nothing stray is added"


@MODES
def test_B045_a_match_inside_a_match_that_was_wrapped_is_still_reached(inplace: bool) -> None:
    model = nn.Sequential(Nest(Nest()))

    class Around(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.old = old

    out = slapo.apply(model, slapo.replace(Empty, Nest, Around), inplace=inplace)
    kinds = [(path, type(m).__name__) for path, m in out.named_modules()]
    assert kinds == [
        ("", "Sequential"),
        ("0", "Around"),
        ("0.old", "Nest"),
        ("0.old.inner", "Around"),
        ("0.old.inner.old", "Nest"),
    ]


@MODES
def test_B046_a_maker_that_returns_none_is_refused_clearly(inplace: bool) -> None:
    model = Model()
    with pytest.raises(slapo.SlapoError, match=r"None for 'fc1'.*give old"):
        slapo.apply(model, slapo.replace(Empty, "fc1", lambda old: None), inplace=inplace)
    out = slapo.apply(model, slapo.replace(Empty, "fc1", lambda old: old), inplace=inplace)
    assert type(out.fc1) is nn.Linear


@MODES
def test_B046_whatever_is_no_module_is_refused_clearly(inplace: bool) -> None:
    model = Model()
    weight = model.fc1
    for wrong in (3, "fc1", nn.Linear, torch.zeros(1), [nn.ReLU()]):
        with pytest.raises(slapo.MisfitError, match=r"fc1|module"):
            slapo.apply(model, slapo.replace(Empty, "fc1", lambda old, wrong=wrong: wrong), inplace=inplace)
        assert model.fc1 is weight


def test_B047_by_predicate_and_by_pattern() -> None:
    model = Model()
    out = slapo.apply(model, slapo.replace(Empty, "fc*", lambda old: Wider(1024, 1024)))
    assert [path for path, m in out.named_modules() if type(m) is Wider] == ["fc1", "fc2"]
    wide = slapo.select(model, type=nn.Linear).where(
        lambda module, path: path.endswith("2") and module.in_features == 1024
    )
    out = slapo.apply(model, slapo.replace(Empty, wide, lambda old: Wider(1024, 1024)))
    assert [path for path, m in out.named_modules() if type(m) is Wider] == ["fc2"]
    chosen = slapo.at(model, lambda m: [m.fc2, m.submod.linear])
    out = slapo.apply(model, slapo.replace(Empty, chosen, lambda old: Wider(1024, 1024)))
    assert [path for path, m in out.named_modules() if type(m) is Wider] == ["fc2", "submod.linear"]
