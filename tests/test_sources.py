"""Where a tensor comes from: forwards and backwards, and maps over maps."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slapo_fn._layout.inverse import composed, give_back, simple
from slapo_fn._layout.lineage import origins, record
from slapo_fn._layout.sources import (
    Source,
    WeightMap,
    cat,
    names,
    part,
    rename,
    resolved,
    take,
    transposed,
    weight_map,
)
from slapo_fn._weights import fill
from slapo_fn.errors import ArgumentError, WeightsError


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def there_and_back(sources: dict[str, Source], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given back of what was taken."""
    shapes = {name: tensor.shape for name, tensor in old.items()}
    exact = {name: resolved(source, shapes) for name, source in sources.items()}
    return give_back(exact, {name: take(source, old) for name, source in sources.items()})


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# ---- values


def test_sources_are_values() -> None:
    said = weight_map({"a": cat("q", transposed("k"), dim=-1), "b": part("c", 0, 3), "d": "e"}, up=1)
    assert pickle.loads(pickle.dumps(said)) == said
    assert hash(said) == hash(pickle.loads(pickle.dumps(said)))
    assert repr(said.sources[0][1]) == "cat('q', transposed('k'), dim=-1)"
    assert eval(repr(said.sources[1][1])) == part("c", 0, 3)
    assert names(said.sources[0][1]) == ("q", "k")
    assert rename(said.sources[0][1], lambda name: f"x.{name}") == cat("x.q", transposed("x.k"), dim=-1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: cat(), "at least one"),
        (lambda: cat("a", "b", sizes=(1,)), "as many sizes"),
        (lambda: cat("a", 3), "not int"),  # type: ignore[arg-type]
        (lambda: cat("a", dim="x"), "dim is an int"),  # type: ignore[arg-type]
        (lambda: transposed(None), "not NoneType"),  # type: ignore[arg-type]
        (lambda: part("a", 3, 3), "greater stop, not 3 and 3"),
        (lambda: part("a", 0, True), "stop is an int"),
        (lambda: weight_map(["a"]), "a mapping of names"),  # type: ignore[arg-type]
        (lambda: weight_map({"a": "b"}, up=-1), "0 or more"),
        (lambda: weight_map({"a": 1}), "not int"),  # type: ignore[dict-item]
    ],
)
def test_a_source_of_the_wrong_kind_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        wrong()


# ---- forwards


def test_a_name_gives_the_very_tensor_and_every_other_source_a_new_one() -> None:
    old = tensors(a=(2, 3), b=(1, 3))
    assert take("a", old) is old["a"]
    for source in (cat("a"), cat("a", "b"), transposed("a"), transposed("b"), part("a", 0, 2), part("a", 0, 1, 1)):
        made = take(source, old)
        assert made.is_contiguous()
        assert made.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in old.values()}
    assert torch.equal(take(cat("a", "b"), old), torch.cat([old["a"], old["b"]]))
    assert torch.equal(take(part(transposed("a"), 1, 3), old), old["a"].t()[1:3])


def test_what_is_taken_has_no_gradient_of_its_own() -> None:
    old = {"a": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2, 2))}
    assert take("a", old) is old["a"]
    assert not take(cat("a", "b"), old).requires_grad


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (cat("a.weight", "a.weigth"), "has no a.weigth; did you mean a.weight"),
        (cat("a.weight", "b"), r"cat\('a.weight', 'b'\): their shapes are \(2, 3\), \(3, 2\)"),
        (cat("a.weight", "one"), r"their shapes are \(2, 3\), \(3,\)"),
        (cat("a.weight", "half"), "their dtypes differ: a.weight is torch.float32, half is torch.float16"),
        (cat("a.weight", "meta"), "their devices differ: a.weight is cpu, meta is meta"),
        (cat("a.weight", dim=2), r"no dimension 2 in \(2, 3\)"),
        (cat("a.weight", "a.weight", sizes=(1, 3)), "their shapes are"),
        (transposed("one"), "only a matrix is transposed"),
        (part("a.weight", 1, 4), r"part\('a.weight', 1, 4\): the whole is \(2, 3\)"),
        (part("a.weight", 0, 1, whole=5), "the whole is"),
    ],
)
def test_sources_that_do_not_go_together_are_refused(source: Source, says: str) -> None:
    old = {**tensors(b=(3, 2), one=(3,)), "a.weight": torch.ones(2, 3), "half": torch.ones(2, 3, dtype=torch.half)}
    old["meta"] = torch.ones(2, 3, device="meta")
    with pytest.raises(WeightsError, match=says):
        take(source, old)


# ---- backwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_source_is_read_backwards_bit_for_bit(dtype: torch.dtype) -> None:
    old = {name: torch.randn(shape).to(dtype) for name, shape in {"q": (4, 6), "k": (2, 6), "c": (6, 9)}.items()}
    old["strided"] = torch.randn(5, 8).to(dtype)[:, ::2]
    sources: dict[str, Source] = {
        "qk": cat("q", "k"),
        "c0": transposed(part("c", 0, 3, dim=1)),
        "c1": part(transposed("c"), 3, 9),
        "plain": "strided",
    }
    back = there_and_back(sources, old)
    assert back.keys() == old.keys()
    assert all(same_bits(back[name], old[name]) for name in old)
    assert back["strided"] is old["strided"]
    made = [back[name] for name in ("q", "k", "c")]
    assert all(one.is_contiguous() for one in made)
    assert len({one.untyped_storage().data_ptr() for one in made}) == 3


def test_nans_and_negative_zeros_come_back() -> None:
    old = {"a": torch.tensor([[float("nan"), -0.0]]), "b": torch.tensor([[float("inf"), 1e-45]])}
    back = there_and_back({"ab": cat("a", "b", dim=1)}, old)
    assert all(torch.equal(back[name].view(torch.int32), old[name].view(torch.int32)) for name in old)


def test_random_sources_come_back() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        old = tensors(**{f"t{n}": (draw.randint(2, 5), 4) for n in range(3)})
        source: Source = cat(*old)
        rows = sum(len(one) for one in old.values())
        cut = draw.randint(1, rows - 1)
        sources: dict[str, Source] = {"x": part(source, 0, cut), "y": part(source, cut, rows)}
        if draw.random() < 0.5:
            sources = {name: transposed(one) for name, one in sources.items()}
        back = there_and_back(sources, old)
        assert all(same_bits(back[name], old[name]) for name in old)


def test_ties_stay() -> None:
    one, other = torch.randn(4, 2), torch.randn(4, 2)
    halves = cat("a", "b", sizes=(2, 2)), cat("c", "d", sizes=(2, 2))
    back = give_back({"x": halves[0], "y": halves[1]}, {"x": one, "y": one})
    assert back["a"] is back["c"]
    assert back["b"] is back["d"]
    assert back["a"] is not back["b"]
    apart = give_back({"x": halves[0], "y": halves[1]}, {"x": one, "y": other})
    assert apart["a"] is not apart["c"]
    assert give_back({"x": "a", "y": "a"}, {"x": one, "y": one}) == {"a": one}


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"x": "a", "y": "a"}, "x and y both give a, and are not one tensor"),
        ({"x": part("a", 0, 2, whole=8)}, "nothing gives 2 to 8 of 'a' along dim 0, only x"),
        ({"x": part("a", 6, 8, whole=8)}, "nothing gives 0 to 6 of 'a'"),
        ({"x": part("a", 0, 2, whole=3), "y": part("a", 1, 3, whole=3)}, "two of x, y give 1 to 2 of 'a'"),
        ({"x": part("a", 0, 2, whole=2), "y": part("a", 0, 1, whole=2)}, "cannot be given back as part"),
        ({"x": cat("a", "b")}, r"x is \(2, 2\), and cannot be given back as cat\('a', 'b'\)"),
        ({"x": cat("a", "b", sizes=(2, 2))}, "cannot be given back"),
        ({"z": transposed("a")}, r"z is \(2,\), and cannot"),
        ({"x": part("a", 0, 2)}, "cannot be given back"),
    ],
)
def test_what_cannot_be_given_back_is_told(sources: dict[str, Source], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        give_back(sources, tensors(x=(2, 2), y=(2, 2), z=(2,)))


# ---- maps over maps


@pytest.mark.parametrize(
    ("source", "short"),
    [
        (transposed(transposed("a")), "a"),
        (cat("a", sizes=(4,)), "a"),
        (part("a", 0, 4, whole=4), "a"),
        (part(cat("a", "b", sizes=(4, 2)), 4, 6, whole=6), "b"),
        (part(cat("a", "b", sizes=(4, 2)), 3, 6, whole=6), cat(part("a", 3, 4, whole=4), "b", sizes=(1, 2))),
        (part(part("a", 2, 6, whole=8), 1, 2, whole=4), part("a", 3, 4, whole=8)),
        (cat(cat("a", "b", sizes=(1, 1)), "c", sizes=(2, 1)), cat("a", "b", "c", sizes=(1, 1, 1))),
        (
            cat(transposed(part("a", 0, 2, 1, whole=4)), transposed(part("a", 2, 4, 1, whole=4)), sizes=(2, 2)),
            transposed("a"),
        ),
        (part(transposed("a"), 0, 2, whole=4), transposed(part("a", 0, 2, 1, whole=4))),
        (transposed(cat("a", transposed("b"), sizes=(1, 2))), cat(transposed("a"), "b", dim=1, sizes=(1, 2))),
        (transposed(transposed(cat("a", "b"))), transposed(transposed(cat("a", "b")))),  # its sizes are not known
    ],
)
def test_the_shortest_form(source: Source, short: Source) -> None:
    assert simple(source) == short


def test_a_map_over_a_map() -> None:
    first = weight_map({"qkv": cat("q", "k", "v", sizes=(4, 2, 2)), "o": "out"})
    second = weight_map({"kv": part("qkv", 4, 8, whole=8), "q": part("qkv", 0, 4, whole=8), "p": "o", "n": "n"})
    assert composed(second, dict(first.sources)) == weight_map(
        {"kv": cat("k", "v", sizes=(2, 2)), "q": "q", "p": "out", "n": "n"}
    )


# ---- what modules carry


class Wrap(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core


class Pair(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, 2, bias=False), nn.Linear(size, 4, bias=False)


def carried(module: nn.Module) -> Any:
    return vars(module).get("weight_map")


def test_nothing_is_noted_where_nothing_was_moved() -> None:
    for new, old in (
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (nn.GELU(), nn.ReLU()),
        (Pair(), Pair()),
        (nn.Linear(2, 2), Pair()),
    ):
        record(new, old, "x")
        assert carried(new) is None
    old, new = Pair(), Pair()
    new.a.weight, new.b.weight = old.a.weight, old.b.weight
    record(new, old)
    assert carried(new) is None


def test_renames_are_found_by_the_tensors() -> None:
    old = nn.Linear(2, 2)
    new = Wrap(old)
    record(new, old, "h.0")
    assert carried(new) == weight_map({"core.weight": "weight", "core.bias": "bias"})
    again = Wrap(new)
    record(again, new, "h.0")
    assert carried(again) == carried(new) == weight_map({"core.weight": "weight", "core.bias": "bias"})
    inner = origins(again, ["h.0.core.core.weight"], "h.0")
    assert inner == {"h.0.core.core.weight": "h.0.weight"}
    unwrapped = again.core.core
    record(unwrapped, again, "h.0")
    assert carried(unwrapped) is None


def test_a_name_of_a_tied_tensor_stays_its_own() -> None:
    old = Pair()
    old.a.weight = old.b.weight
    new = Wrap(old)
    record(new, old)
    assert carried(new) == weight_map({"core.a.weight": "a.weight", "core.b.weight": "b.weight"})


def test_a_map_beside_its_place_knows_its_parent() -> None:
    old = nn.Linear(2, 2, bias=False)
    fused = nn.Linear(2, 4, bias=False)
    declared = weight_map({"weight": cat("q.weight", "k.weight", sizes=(2, 2))}, up=1)
    vars(fused)["weight_map"] = declared
    record(fused, old, "attn.q")
    assert carried(fused) == declared
    new = Wrap(fused)
    record(new, fused, "attn.q")
    found = origins(new, ["attn.q.core.weight"], "attn.q")
    assert found == {"attn.q.core.weight": cat("attn.q.weight", "attn.k.weight", sizes=(2, 2))}
    with pytest.raises(WeightsError, match="leads 1 up, above the root"):
        origins(new.core, ["weight"])


def test_what_a_factory_declares_learns_its_sizes_and_where_it_was_made_from() -> None:
    old = Wrap(Pair())
    new = Wrap(nn.Linear(3, 6, bias=False))
    new.core.weight_map = weight_map({"weight": cat("a.weight", "b.weight")})
    outer = nn.Module()
    outer.other = new.core
    record(outer, old, "h.0")
    assert carried(outer.other) == weight_map({"weight": cat("a.weight", "b.weight", sizes=(2, 4))})
    assert origins(outer, ["h.0.other.weight"], "h.0") == {
        "h.0.other.weight": cat("h.0.core.a.weight", "h.0.core.b.weight", sizes=(2, 4))
    }


def test_a_declared_map_that_does_not_fit_is_refused() -> None:
    new = nn.Linear(3, 6, bias=False)
    new.weight_map = weight_map({"weight": cat("a.weight", "b.weight", dim=1)})
    with pytest.raises(WeightsError, match=r"their shapes are \(2, 3\), \(4, 3\)"):
        record(new, Pair())


def test_an_outer_map_says_for_all_that_is_inside() -> None:
    new = Wrap(nn.Linear(3, 6, bias=False))
    vars(new.core)["weight_map"] = weight_map({"weight": cat("a.weight", "b.weight", sizes=(2, 4))})
    vars(new)["weight_map"] = weight_map({"core.weight": cat("x.weight", "y.weight", sizes=(2, 4))})
    assert origins(new, ["core.weight"]) == {"core.weight": cat("x.weight", "y.weight", sizes=(2, 4))}


# ---- fill


def test_fill_makes_new_tensors_from_sources_and_says_so() -> None:
    old, new = Pair(), nn.Linear(3, 6, bias=False)
    fill(new, old, {"weight": cat("a.weight", "b.weight")}, "x", own=False)
    assert isinstance(new.weight, nn.Parameter)
    assert new.weight.requires_grad
    assert torch.equal(new.weight, torch.cat([old.a.weight, old.b.weight]))
    assert carried(new) == weight_map({"weight": cat("a.weight", "b.weight", sizes=(2, 4))})


def test_fill_takes_whole_submodules_together() -> None:
    old, new = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 4)}), nn.ModuleDict({"ab": nn.Linear(3, 6)})
    fill(new, old, {"ab": cat("a", "b")}, "x", own=False)
    assert torch.equal(new["ab"].bias, torch.cat([old["a"].bias, old["b"].bias]))


def test_fill_keeps_the_very_tensors_that_have_a_name() -> None:
    old, new = nn.ModuleDict({"a": nn.Linear(3, 2)}), nn.ModuleDict({"b": nn.Linear(3, 2)})
    fill(new, old, {"b": "a"}, "x", own=False)
    assert new["b"].weight is old["a"].weight
    assert carried(new) == WeightMap((("b.weight", "a.weight"), ("b.bias", "a.bias")))
    same = nn.ModuleDict({"a": nn.Linear(3, 2)})
    fill(same, old, {}, "x", own=False)
    assert carried(same) is None


def test_what_is_made_of_frozen_tensors_is_frozen() -> None:
    old, new = Pair().requires_grad_(False), nn.Linear(3, 6, bias=False)
    fill(new, old, {"weight": cat("a.weight", "b.weight")}, "x", own=False)
    assert not new.weight.requires_grad
    old.a.weight.requires_grad_(True)
    with pytest.raises(WeightsError, match=r"new weight: cat\(.*\): b.weight is frozen, and others are not"):
        fill(nn.Linear(3, 6, bias=False), old, {"weight": cat("a.weight", "b.weight")}, "x", own=False)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"weight": cat("a.weight", "b.wieght")}, "has no b.wieght; did you mean b.weight"),
        ({"weight": cat("a.weight", "b.weight", dim=1)}, r"new weight \(6, 3\): cat\(.*their shapes are"),
        ({"weight": cat("b.weight", "b.weight")}, r"cat\('b.weight', 'b.weight'\) is \(8, 3\)"),
        ({"weight": "b.weight"}, r"the old b.weight is \(4, 3\)"),
        ({"weight": cat("b.weight", "b.weight")}, r"old a.weight \(2, 3\): the new one has no place for it"),
        ({"a.weight": "weight", "b.weight": "weight"}, "the wrong way round"),
        ({"wieght": cat("a.weight", "b.weight")}, "the new one has no wieght; did you mean weight"),
    ],
)
def test_fill_tells_what_does_not_fit(names: dict[str, Source], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        fill(nn.Linear(3, 6, bias=False), Pair(), names, "x", own=False)
