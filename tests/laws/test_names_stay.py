"""Law 4: names, classes, signatures, saving and copying are the plain model's; copies run on their own weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .look import assert_same, look, names, run
from .models import MODELS, Model
from .table import PAIRS, Primitive, named

QUIET = [pair for pair in PAIRS if not pair[0].restructures]
STACK = Primitive(
    "compile and checkpoint",
    lambda s, t: slapo.checkpoint(slapo.compile(s, t, backend="eager"), t),
)


def saved(model: nn.Module) -> Any:
    """A copy through a file."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


COPIES: dict[str, Callable[[nn.Module], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}
UNHOOKED = "traced"  # torch's own copies of a graph module lose its hooks and whatever else hangs on it


@pytest.mark.parametrize(("primitive", "row"), QUIET, ids=named)
def test_names_classes_signatures_and_modes_stay(primitive: Primitive, row: Model) -> None:
    model = row.make()
    plain = (
        copy.deepcopy(row.make()) if row.name == "traced" else row.make()
    )  # a copied graph module has another class name
    expected, result = names(plain), slapo.apply(model, primitive.schedule(row))
    assert names(result) == expected
    for (_, mine), (_, theirs) in zip(result.named_modules(), model.named_modules(), strict=True):
        assert isinstance(mine, type(theirs).__mro__[1 if row.name == "traced" else 0])


@pytest.mark.parametrize(("primitive", "row"), QUIET, ids=named)
def test_a_state_dict_loads_both_ways(primitive: Primitive, row: Model) -> None:
    if row.lazy or row.name == "hostile names":
        return  # torch itself cannot load into a module whose name has a dot
    plain, result = row.make(), slapo.apply(row.make(), primitive.schedule(row))
    plain.load_state_dict(result.state_dict())
    result.load_state_dict(row.make().state_dict())
    assert list(result.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(("primitive", "row"), [pair for pair in QUIET if pair[1].name != UNHOOKED], ids=named)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_of_the_result_looks_the_same_wherever_the_plain_model_can_be_copied(
    way: str, primitive: Primitive, row: Model
) -> None:
    try:
        COPIES[way](row.make())
    except Exception:
        return  # what the plain model cannot, its transformed self need not
    result = slapo.apply(row.make(), primitive.schedule(row))
    again = COPIES[way](result)
    assert not {id(m) for m in again.modules()} & {id(m) for m in result.modules()}
    kept = way != "deepcopy"  # torch's own copy of a parameter has none of its attributes
    assert look(again, annotations=kept) == look(result, annotations=kept)


@pytest.mark.parametrize("row", [row for row in MODELS if not row.lazy and row.name != "referring"], ids=named)
@pytest.mark.parametrize("way", COPIES)  # Python's own deepcopy leaves a weak reference on the original
def test_a_copy_of_the_result_runs_on_its_own_weights(way: str, row: Model) -> None:
    try:
        COPIES[way](row.make())
    except Exception:
        return
    result = slapo.apply(row.make(), STACK.schedule(row))
    again = COPIES[way](result)
    with torch.no_grad():
        for tensor in (*result.parameters(), *result.buffers()):
            tensor.zero_()
    assert_same(run(again, row), run(row.make(), row), 1e-6)


@pytest.mark.parametrize("row", [row for row in MODELS if not row.lazy], ids=named)
def test_the_result_outlives_the_input_and_runs_on_its_own_modules(row: Model) -> None:
    model = row.make()
    result = slapo.apply(model, STACK.schedule(row))
    for module in model.modules():  # break the original's structure, not its tensors
        module._parameters, module._buffers, module._modules = {}, {}, {}
    assert_same(run(result, row), run(row.make(), row), 1e-6)


@pytest.mark.parametrize("row", [row for row in MODELS if not row.lazy], ids=named)
def test_functional_call_reaches_through_the_layers(row: Model) -> None:
    result = slapo.apply(row.make(), slapo.checkpoint(slapo.Schedule(), row.places))
    halves = {name: tensor.detach() / 2 for name, tensor in result.named_parameters()}
    if row.name == "hostile names":
        return  # torch itself cannot find a module whose name has a dot
    plain = row.make()
    torch.manual_seed(1)
    got = torch.func.functional_call(result, halves, tuple(row.inputs()))
    torch.manual_seed(1)
    wanted = torch.func.functional_call(plain, halves, tuple(row.inputs()))
    for mine, theirs in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert torch.equal(mine, theirs)


def test_a_block_can_be_copied_out_of_the_result() -> None:
    row = MODELS[0]
    result = slapo.apply(row.make(), STACK.schedule(row))
    block = copy.deepcopy(result[0])
    expected = block(*row.inputs()) if block.eval() else None
    with torch.no_grad():
        for tensor in result.parameters():
            tensor.zero_()
    assert torch.equal(block(*row.inputs()), expected)


def test_an_attribute_is_written_and_read_as_on_the_plain_model() -> None:
    row = MODELS[0]
    result = slapo.apply(row.make(), STACK.schedule(row))
    result[0].scale = 3
    result[0].extra = nn.Linear(2, 2)
    result[0].norm.weight = nn.Parameter(torch.zeros(4))
    assert (result[0].scale, "0.extra.weight" in result.state_dict()) == (3, True)
    assert result[0](*row.inputs()).isfinite().all()


def test_a_graph_module_keeps_its_hooks_and_layers_in_the_result() -> None:
    model = next(row for row in MODELS if row.name == "traced").make()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("mine"))
    model[0].get_submodule("0").register_forward_hook(lambda *_: calls.append("inner"))
    first = slapo.apply(model, slapo.checkpoint(slapo.Schedule(), "0"))
    second = slapo.apply(first, slapo.freeze(slapo.Schedule(), "1"))
    assert look(second)["0"]["layers"] == look(first)["0"]["layers"] != []
    second.eval()(torch.ones(2, 4))
    assert calls == ["inner", "mine"]
