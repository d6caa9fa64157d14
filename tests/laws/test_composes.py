"""Laws 7, 8 and 9: any entry can be dropped, schedules compose, phases are sorted, the cascade is visible."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch
from torch import nn

import slapo_fn as slapo

from .look import assert_same, look, run
from .models import MODELS, blocks, linear, x_BTD
from .table import LINEARS, PRIMITIVES, Primitive, named, refit

ROW = MODELS[0]
S = slapo.Schedule()
FOUR = {
    "replace": lambda s: slapo.replace(s, "*.mlp.0", refit),
    "cast": lambda s: slapo.cast(s, "1", torch.float32),
    "compile": lambda s: slapo.compile(s, "*", backend="eager"),
    "checkpoint": lambda s: slapo.checkpoint(s, "[::2]"),
}


def random_linear(old: nn.Linear) -> nn.Linear:
    """A module drawn from all three global random states."""
    made = refit(old)
    with torch.no_grad():
        made.bias.fill_(random.random() + numpy.random.rand())
    return made


# ---- dropping


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=named)
def test_the_others_mean_the_same_without_an_entry(primitive: Primitive) -> None:
    """Random initialisation included: entries 0 and 2 draw the same weights whether or not the others are there."""
    sch = slapo.replace(S, "0.mlp.0", refit)
    sch = primitive.build(sch, "1.mlp.2" if primitive.on == LINEARS else "1")
    sch = slapo.replace(sch, "2.mlp.0", refit)
    whole = slapo.apply(blocks_of(0), sch)
    for number in range(3):
        part = slapo.apply(blocks_of(0), slapo.drop(sch, number))
        for entry, path in ((0, "0.mlp.0"), (2, "2.mlp.0")):
            if entry != number:
                assert torch.equal(part.get_submodule(path).weight, whole.get_submodule(path).weight)


def blocks_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return blocks()


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_an_entry_draws_the_same_from_every_random_state_without_the_others(dropped: int) -> None:
    random.seed(1), numpy.random.seed(1)
    sch = S
    for number in range(3):
        sch = slapo.replace(sch, f"{number}.mlp.0", random_linear)
    whole, part = slapo.apply(blocks_of(0), sch), slapo.apply(blocks_of(0), slapo.drop(sch, dropped))
    for number in {0, 1, 2} - {dropped}:
        assert torch.equal(part[number].mlp[0].weight, whole[number].mlp[0].weight)
        assert torch.equal(part[number].mlp[0].bias, whole[number].mlp[0].bias)


def test_random_initialisation_follows_the_user_s_seed_and_differs_between_places() -> None:
    sch = slapo.replace(S, "*.mlp.0", refit)

    def weights(seed: int) -> list[torch.Tensor]:
        model = blocks_of(0)
        torch.manual_seed(seed)
        return [block.mlp[0].weight for block in slapo.apply(model, sch)]

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not any(map(torch.equal, weights(1), weights(2)))
    assert not torch.equal(*weights(1)[:2])


# ---- composition


BINARY = [  # a class of modules is not found where a wrapper took their place, which is an error of its own
    (first, second)
    for first, second in itertools.product(PRIMITIVES, repeat=2)
    if not (first.name in ("replace by wrapper", "decompose") and second.on == LINEARS)
]


def phase(primitive: Primitive) -> slapo.Phase:
    return slapo.traits_of(primitive.schedule(ROW)[0].primitive).phase


@pytest.mark.parametrize(("first", "second"), [(a, b) for a, b in BINARY if phase(a) <= phase(b)], ids=named)
def test_a_sum_applied_is_one_applied_after_the_other(first: Primitive, second: Primitive) -> None:
    together = slapo.apply(blocks_of(0), first.schedule(ROW) + second.schedule(ROW))
    one = slapo.apply(blocks_of(0), first.schedule(ROW))
    torch.manual_seed(0), blocks()  # the random state that the sum met
    assert look(slapo.apply(one, second.schedule(ROW))) == look(together)


@pytest.mark.parametrize("first", PRIMITIVES, ids=named)
def test_entries_of_different_phases_may_be_written_in_any_order(first: Primitive) -> None:
    for second in PRIMITIVES:
        if phase(second) != phase(first):
            one = slapo.apply(blocks_of(0), first.schedule(ROW) + second.schedule(ROW))
            two = slapo.apply(blocks_of(0), second.schedule(ROW) + first.schedule(ROW))
            assert look(one) == look(two), second.name


def test_all_orders_give_the_same_structure_outputs_and_gradients() -> None:
    found = []
    for order in itertools.permutations(FOUR):
        sch = S
        for name in order:
            sch = FOUR[name](sch)
        result = slapo.apply(blocks_of(0), sch)
        found.append((look(result), run(result, ROW)))
    assert len(found) == 24
    for seen, numbers in found[1:]:
        assert seen == found[0][0]
        assert_same(numbers, found[0][1])
    assert [name for name, _ in found[0][0]["0"]["layers"]] == ["Checkpointed", "Compiled"]


def test_two_entries_that_share_one_template_share_it_entry_by_entry() -> None:
    """As two schedules applied one after the other would."""
    template = nn.Linear(4, 8)
    first = slapo.replace(S, "0.mlp.0", template, share=True)
    second = slapo.replace(S, "1.mlp.0", template, share=True)
    together = slapo.apply(blocks(), first + second)
    apart = slapo.apply(slapo.apply(blocks(), first), second)
    assert (together[0].mlp[0] is together[1].mlp[0]) == (apart[0].mlp[0] is apart[1].mlp[0])


def test_phases_are_sorted_stably_and_the_plan_shows_it() -> None:
    sch = slapo.checkpoint(S, "0")
    sch = slapo.hook(sch, "0", forward=lambda *_: None)
    sch = slapo.compile(sch, "0", backend="eager")
    sch = slapo.cast(sch, "0", torch.bfloat16)
    sch = slapo.replace(sch, "1.mlp.0", refit)
    sch = slapo.annotate(sch, "0", "**", "key", 1)
    assert slapo.plan(blocks(), sch).order == (1, 4, 3, 5, 2, 0)


def test_a_second_schedule_selects_by_the_old_paths_and_takes_effect() -> None:
    first = slapo.apply(blocks(), slapo.checkpoint(slapo.compile(S, "*", backend="eager"), "*"))
    assert slapo.select(first, "*.mlp.0", nn.Linear).paths == ("0.mlp.0", "1.mlp.0", "2.mlp.0")
    second = slapo.apply(first, slapo.replace(S, "1.mlp.0", refit))
    x_BD = torch.ones(2, 3, 4, requires_grad=True)
    assert not torch.equal(second.eval()(x_BD), first.eval()(x_BD))


# ---- the cascade


def overridden(sch: slapo.Schedule, model: nn.Module | None = None) -> dict[int, set[int | None]]:
    plan = slapo.plan(model or blocks_of(0), sch)
    assert not plan.problems
    return {number: {step.overridden_by for step in plan.of(number)} for number in range(len(sch))}


@pytest.mark.parametrize(("first", "second"), BINARY, ids=named)
def test_what_the_plan_strikes_out_can_be_dropped(first: Primitive, second: Primitive) -> None:
    sch = second.schedule(ROW, first.schedule(ROW))
    plan = slapo.plan(blocks_of(0), sch)
    void = [n for n in range(2) if plan.of(n) and all(step.overridden_by is not None for step in plan.of(n))]
    whole = look(slapo.apply(blocks_of(0), sch))
    for number in void:
        rest = slapo.drop(sch, number)
        assert look(slapo.apply(blocks_of(0), rest)) == whole, f"entry {number} is struck out and yet has an effect"


def test_a_narrowing_cast_is_not_void_though_a_later_one_widens_again() -> None:
    narrow = slapo.cast(S, "0", torch.bfloat16)
    sch = slapo.cast(narrow, "0", torch.float32)
    whole, alone = look(slapo.apply(blocks_of(0), sch)), look(slapo.apply(blocks_of(0), sch[1:]))
    assert overridden(sch)[0] == ({1} if whole == alone else {None})


def test_a_hook_on_what_is_replaced_later_is_not_void_since_it_moves() -> None:
    sch = slapo.replace(slapo.hook(S, "0.mlp.0", forward=lambda *_: None), "0.mlp.0", refit)
    assert look(slapo.apply(blocks_of(0), sch))["0.mlp.0"]["hooks"]
    assert overridden(sch)[0] == {None}


def test_the_entry_that_made_a_step_void_is_named_and_not_one_in_between() -> None:
    sch = slapo.replace(S, "0.mlp", lambda old: nn.Identity(), untie=True)
    sch = slapo.hook(sch, "0", forward=lambda *_: None)
    sch = slapo.replace(sch, "0", lambda old: nn.Identity(), untie=True)
    assert overridden(sch)[0] == {2}


def test_the_later_of_two_settings_wins_and_the_plan_says_so() -> None:
    sch = slapo.checkpoint(slapo.checkpoint(S, "*"), "0", preserve_rng_state=False)
    assert overridden(sch) == {0: {1, None}, 1: {None}}
    assert look(slapo.apply(blocks(), sch))["0"]["layers"] == [("Checkpointed", sch[1].args)]
    sch = slapo.unfreeze(slapo.freeze(S, "0"), "0")
    assert overridden(sch) == {0: {1}, 1: {None}}
    sch = slapo.annotate(slapo.annotate(S, "0", "**", "a", 1), "0", "**", "b", 2)
    assert overridden(sch) == {0: {None}, 1: {None}}


def test_what_was_put_out_of_the_tree_is_void_and_a_wrapped_one_is_not() -> None:
    sch = slapo.replace(slapo.replace(S, "0.mlp.0", refit), "0.mlp", lambda old: nn.Identity())
    assert overridden(sch)[0] == {1}
    sch = slapo.replace(slapo.replace(S, "0.mlp.0", refit), "0.mlp.0", lambda old: nn.Sequential(old))
    assert overridden(sch)[0] == {None}


def test_the_plan_strikes_out_in_text_and_html() -> None:
    plan = slapo.plan(nn.Sequential(linear()), slapo.unfreeze(slapo.freeze(S, "0"), "0"))
    assert "~~0: Linear~~ overridden by 1" in repr(plan)
    assert "<s>0: Linear</s> overridden by 1" in plan._repr_html_()
    assert x_BTD()
