"""Laws 5 and 6 and what primitives promise: ties stay, what was there is inherited, numbers are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo

from .look import assert_same, look, run, tensors_of
from .models import MODELS, Block, Model, SharedContainer, Tied, blocks, linear, x_BTD
from .table import PAIRS, Primitive, named, refit, twin

NUMBERS = [pair for pair in PAIRS if pair[0].atol is not None]
S = slapo.Schedule()


@pytest.mark.parametrize(("primitive", "row"), NUMBERS, ids=named)
def test_outputs_and_gradients_are_the_plain_model_s(primitive: Primitive, row: Model) -> None:
    plain = run(row.make(), row)
    model = row.make()
    result = slapo.apply(model, primitive.schedule(row))
    found = run(result, row, primitive.dtype)
    trained = {f"grad of {name}" for name, p in result.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert not [key for key, value in found.items() if key in trained and value is None and plain.get(key) is not None]
    shared = [
        key for key in plain if not key.startswith("grad of") or key.startswith("grad of input") or key in trained
    ]
    shared = [key for key in shared if key in found and not (found[key] is not None and plain[key] is None)]
    assert [key for key in shared if key.startswith("output")] == [key for key in plain if key.startswith("output")]
    assert_same({key: found[key] for key in shared}, {key: plain[key] for key in shared}, primitive.atol or 0.0)


def ties(model: nn.Module) -> dict[str, list[str]]:
    """Names that stand for one tensor or for one module, by the first of them."""
    groups: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        groups.setdefault(id(module), []).append(path)
        for name, tensor in tensors_of(module):
            groups.setdefault(id(tensor), []).append(f"{path}:{name}")
    return {group[0]: group for group in groups.values() if len(group) > 1}


@pytest.mark.parametrize(("primitive", "row"), [pair for pair in PAIRS if not pair[0].restructures], ids=named)
def test_ties_stay(primitive: Primitive, row: Model) -> None:
    expected = ties(row.make())
    assert ties(slapo.apply(row.make(), primitive.schedule(row))) == expected


@pytest.mark.parametrize(
    ("primitive", "row"),
    [pair for pair in PAIRS if pair[0].restructures and "Tied" not in pair[1].build.__name__],
    ids=named,
)
def test_a_shared_module_that_is_replaced_stays_shared(primitive: Primitive, row: Model) -> None:
    model = row.make()
    result = slapo.apply(model, primitive.schedule(row))
    groups: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        groups.setdefault(id(module), []).append(path)
    after = dict(result.named_modules(remove_duplicate=False))
    for group in groups.values():
        assert len({id(after[path]) for path in group if path in after}) <= 1, group  # a part may have taken them in


# ---- ties that an entry would break


def test_a_fresh_module_for_one_side_of_a_tie_is_refused_by_both_names() -> None:
    sch = slapo.replace(S, "lm_head", lambda old: nn.Linear(4, 7, bias=False))
    with pytest.raises(slapo.TieError, match=r"lm_head\.weight.*wte\.weight|wte\.weight.*lm_head\.weight"):
        slapo.apply(Tied(), sch)
    free = slapo.apply(Tied(), slapo.replace(S, "lm_head", lambda old: nn.Linear(4, 7, bias=False), untie=True))
    assert free.lm_head.weight is not free.wte.weight


def test_a_fresh_module_that_leaves_a_shared_module_out_is_refused_by_both_names() -> None:
    net = nn.Module()
    net.shared = nn.Embedding(7, 4)
    net.encoder = nn.Sequential(net.shared, linear())
    net.decoder = nn.Sequential(net.shared, linear())
    sch = slapo.replace(S, "decoder", lambda old: nn.Sequential(nn.Embedding(7, 4), linear()))
    with pytest.raises(slapo.TieError, match=r"decoder\.0"):
        slapo.apply(net, sch)


def test_both_sides_of_a_tie_are_cast_frozen_and_annotated_together() -> None:
    sch = slapo.cast(
        slapo.freeze(slapo.annotate(S, "lm_head", "weight", "no_decay", True), "wte"), "lm_head", torch.bfloat16
    )
    result = slapo.apply(Tied(), sch)
    assert result.lm_head.weight is result.wte.weight
    weight = result.wte.weight
    assert (weight.dtype, weight.requires_grad, weight.no_decay) == (torch.bfloat16, False, True)


def test_untie_changes_only_the_place_that_was_asked_for() -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    net.append(net[0])
    result = slapo.apply(net, slapo.replace(S, "2", refit, untie=True))
    assert result[0] is not result[2]
    assert result[0].weight is net[0].weight


@pytest.mark.parametrize("path", ["encoder.0", "decoder.0"])
def test_untie_inside_a_shared_container_changes_one_place_or_is_refused(path: str) -> None:
    model = SharedContainer()
    try:
        result = slapo.apply(model, slapo.replace(S, path, refit, untie=True))
    except slapo.TieError:
        return
    other = {"encoder.0": "decoder.0", "decoder.0": "encoder.0"}[path]
    assert result.get_submodule(other).weight is model.encoder[0].weight, f"{other} was changed, too"


def test_the_plan_lists_every_other_name_of_a_place() -> None:
    steps = slapo.plan(SharedContainer(), slapo.checkpoint(S, ["encoder.0", "encoder"])).steps
    assert {step.path: step.aliases for step in steps} == {"encoder": ("decoder",), "encoder.0": ("decoder.0",)}


# ---- what a new module takes over


@pytest.mark.parametrize("template", [True, False], ids=["template", "factory"])
def test_a_replacement_takes_over_mode_dtype_frozenness_and_hooks_in_order(template: bool) -> None:
    calls: list[str] = []
    model = blocks().eval().to(torch.bfloat16)
    old = model[1].mlp[0].requires_grad_(False)
    for name in "ab":
        old.register_forward_hook(lambda *_, name=name: calls.append(name))
    old.register_forward_pre_hook(lambda m, args, kwargs: calls.append("pre"), with_kwargs=True)
    old.register_full_backward_hook(lambda *_: calls.append("back"))
    new = nn.Linear(4, 8)
    sch = slapo.replace(S, "1.mlp.0", new if template else (lambda old: nn.Linear(4, 8)))
    result = slapo.apply(model, sch)
    made = result[1].mlp[0]
    assert made is not new
    assert (made.training, made.weight.dtype, made.weight.requires_grad, made.bias.requires_grad) == (
        (False, torch.bfloat16, False, False)
    )
    assert (made.weight is old.weight) == template
    result(*(x.to(torch.bfloat16).requires_grad_() for x in x_BTD())).sum().backward()
    assert calls == ["pre", "a", "b", "back"]
    assert len(old._forward_hooks) == 2


def test_inherit_false_takes_over_nothing() -> None:
    model = blocks().eval().to(torch.bfloat16)
    made = slapo.apply(model, slapo.replace(S, "1.mlp.0", lambda old: nn.Linear(4, 8), inherit=False))[1].mlp[0]
    assert (made.training, made.weight.dtype) == (True, torch.float32)


def test_what_is_checkpointed_and_compiled_stays_so_when_it_is_replaced_later() -> None:
    first = slapo.apply(blocks(), slapo.checkpoint(slapo.compile(S, "*", backend="eager"), "*"))
    second = slapo.apply(first, slapo.replace(S, "1", lambda old: Block()))
    seen = look(second)
    assert [name for name, _ in seen["1"]["layers"]] == ["Checkpointed", "Compiled"]
    assert look(first)["1"]["layers"] == seen["1"]["layers"]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiled_module_that_was_run_and_is_replaced_runs_the_new_one(inplace: bool) -> None:
    first = slapo.apply(nn.Sequential(linear(), linear()), slapo.compile(S, "0", backend="eager"))
    x_BD = torch.ones(2, 4)
    before = first(x_BD)
    second = slapo.apply(first, slapo.replace(S, "0", refit), inplace=inplace)
    weight, bias = second[0].weight, second[0].bias
    assert torch.allclose(second(x_BD), second[1](nn.functional.linear(x_BD, weight, bias)))
    assert not torch.allclose(second(x_BD), before)


def test_the_wrapper_s_hooks_go_to_what_takes_its_place_or_are_refused() -> None:
    """A wrapper is replaced by the module inside it: its own hooks must not be lost without a word."""
    net = nn.Sequential(nn.Sequential(linear()), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, output: output + 1)
    expected = net(*x_BTD())
    try:
        result = slapo.apply(net, slapo.replace(S, "0", lambda old: old[0]))
    except slapo.HookError:
        return
    assert torch.equal(result(*x_BTD()), expected)


def test_the_wrapper_s_checkpointing_goes_to_what_takes_its_place() -> None:
    net = slapo.apply(nn.Sequential(nn.Sequential(linear()), nn.Tanh()), slapo.checkpoint(S, "0"))
    result = slapo.apply(net, slapo.replace(S, "0", lambda old: old[0]))
    assert [name for name, _ in look(result)["0"]["layers"]] == ["Checkpointed"]


def test_hooks_inside_what_is_replaced_are_refused() -> None:
    model = blocks()
    model[1].mlp[0].register_forward_hook(lambda *_: None)
    with pytest.raises(slapo.HookError, match=r"1\.mlp\.0"):
        slapo.apply(model, slapo.replace(S, "1.mlp", lambda old: nn.Identity()))


class Weight(nn.Parameter):
    """A parameter class of the user's."""


def trained(seen: list[str]) -> nn.Sequential:
    net = nn.Sequential(linear(), linear())
    net[0].weight.tag = "mine"
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    net[0].weight.register_hook(lambda grad: grad * 2)
    return net


def test_an_annotated_parameter_keeps_its_own_hooks() -> None:
    seen: list[str] = []
    plain = trained([])
    plain(*x_BTD()).sum().backward()
    result = slapo.apply(net := trained(seen), slapo.annotate(S, "0", "weight", "no_decay", True))
    result.load_state_dict(plain.state_dict())
    assert (result[0].weight.tag, hasattr(net[0].weight, "no_decay")) == ("mine", False)
    result(*x_BTD()).sum().backward()
    assert seen == ["accumulated"]
    assert torch.equal(result[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize(
    "build",
    [
        lambda s: slapo.annotate(s, "", "**", "no_decay", True),
        lambda s: slapo.freeze(s, ""),
        lambda s: slapo.cast(s, "", torch.bfloat16),
    ],
    ids=["annotate", "freeze", "cast"],
)
def test_a_parameter_s_class_and_attributes_stay(build: object) -> None:
    net = linear()
    net.weight = Weight(torch.zeros(4, 4))
    net.weight.tag = "mine"
    made = slapo.apply(net, build(S)).weight
    assert type(made) is Weight
    assert made.tag == "mine"


def test_two_annotations_of_a_buffer_both_hold() -> None:
    net = nn.BatchNorm1d(4)
    sch = slapo.annotate(slapo.annotate(S, "", "running_mean", "one", 1), "", "running_mean", "two", 2)
    mean = slapo.apply(net, sch).running_mean
    assert (getattr(mean, "one", None), getattr(mean, "two", None)) == (1, 2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["freeze", "cast"])
def test_an_lstm_runs_on_the_parameters_that_it_shows(dtype: torch.dtype | None, inplace: bool) -> None:
    """`nn.LSTM` keeps its parameters in a list, too, and runs on that list."""
    net = nn.LSTM(4, 4)
    result = slapo.apply(net, slapo.freeze(S, "") if dtype is None else slapo.cast(S, "", dtype), inplace=inplace)
    x_TBD = torch.ones(2, 3, 4, dtype=dtype or torch.float32, requires_grad=True)
    out = result(x_TBD)[0]
    out.sum().backward()
    assert out.dtype == x_TBD.dtype
    assert [p.grad is not None for p in result.parameters()] == [p.requires_grad for p in result.parameters()]
    assert all(a is b for a, b in zip(result._flat_weights, result.parameters(), strict=True))


def test_a_keyword_may_have_the_name_of_one_of_torch_s_own() -> None:
    class Called(nn.Module):
        def forward(
            self, x: Tensor, use_reentrant: float, preserve_rng_state: float, early_stop: float = 1.0
        ) -> Tensor:
            return x * use_reentrant + preserve_rng_state * early_stop

    result = slapo.apply(Called(), slapo.checkpoint(S, ""))
    x = torch.ones(2, requires_grad=True)
    assert result(x, use_reentrant=2.0, preserve_rng_state=3.0, early_stop=4.0).tolist() == [14.0, 14.0]


def test_reentrant_checkpointing_gives_the_same_numbers() -> None:
    row = MODELS[0]
    result = slapo.apply(row.make(), slapo.checkpoint(S, "*", use_reentrant=True))
    assert_same(run(result, row), run(row.make(), row))


def test_a_checkpointed_module_runs_twice_and_the_others_once() -> None:
    model = blocks().train()
    counts = [0, 0, 0]
    for number in range(3):

        def counting(module: nn.Module, args: object, number: int = number) -> None:
            counts[number] += 1

        model[number].norm.register_forward_pre_hook(counting)
    result = slapo.apply(model, slapo.checkpoint(S, "[::2]"))
    result(*x_BTD()).sum().backward()
    assert counts == [2, 1, 2]


def test_a_lazy_model_is_initialised_through_the_layers_and_sheds_its_hooks() -> None:
    row = next(row for row in MODELS if row.lazy)
    plain, result = row.make(), slapo.apply(row.make(), slapo.checkpoint(S, "*"))
    torch.manual_seed(1)
    expected = plain(*row.inputs())
    torch.manual_seed(1)
    assert torch.equal(result(*row.inputs()), expected)
    assert [type(one) for one in result] == [type(one) for one in plain] == [nn.Linear, nn.Tanh, nn.BatchNorm1d]
    assert not result[0]._forward_pre_hooks
    assert not result[0]._load_state_dict_pre_hooks


@pytest.mark.parametrize(
    "build",
    [
        lambda s: slapo.cast(s, "**", torch.bfloat16),
        lambda s: slapo.freeze(s, "**"),
        lambda s: slapo.annotate(s, "**", "**", "key", 1),
    ],
    ids=["cast", "freeze", "annotate"],
)
def test_a_parameter_without_a_shape_is_refused(build: object) -> None:
    row = next(row for row in MODELS if row.lazy)
    with pytest.raises((slapo.MisfitError, slapo.ScheduleError), match="run the model once"):
        slapo.apply(row.make(), build(S))


def test_twin_is_what_it_says() -> None:
    old = linear()
    assert twin(old).weight is old.weight
