"""swap: replace every GELU of a tree of 12,001 modules, against the in-place loop that one writes by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn

import slapo_fn as slapo

from ._measure import Case, Row, in_turn, ms, ratio
from ._tree import HAND, Reset, by_hand, grown, swish

ROUNDS = 7


def sharing_deepcopy(model: nn.Module) -> nn.Module:
    """A deep copy that shares the tensors, as one writes it by hand."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def pure(model: nn.Module) -> nn.Module:
    """Build the schedule and apply it."""
    return slapo.apply(model, slapo.replace(slapo.Schedule(), nn.GELU, swish))


def in_place(model: nn.Module) -> nn.Module:
    """Build the schedule and apply it to the model itself."""
    return slapo.apply(model, slapo.replace(slapo.Schedule(), nn.GELU, swish), inplace=True)


def in_place_held(model_and_modules: tuple[nn.Module, list[nn.Module]]) -> nn.Module:
    """The same while a variable of the user's holds every module."""
    return in_place(model_and_modules[0])


def rows() -> Iterator[Row]:
    """Time the loop, a deepcopy with the loop, and apply both ways."""
    reset = Reset(grown(1000))
    count = sum(1 for _ in reset.model.modules())
    _check(reset)
    times = in_turn({HAND: Case(reset, by_hand), "pure": Case(reset, pure), "in place": Case(reset, in_place)}, ROUNDS)
    held = in_turn(
        {HAND: Case(reset, by_hand), "held": Case(lambda: (reset(), list(reset.model.modules())), in_place_held)},
        ROUNDS,
    )
    slow = in_turn(
        {HAND: Case(reset, by_hand), "deepcopy": Case(reset, lambda m: by_hand(sharing_deepcopy(m)))}, 3, warm_up=0
    )
    yield Row(f"{HAND} ({count:,} modules, {len(reset.places):,} replaced)", ms(times[HAND]), note="the baseline, 1x")
    yield Row("Slapo: its schedule and replace_all", "252x", note="as reported; not installable, so not measured here")
    by_copy = ratio(slow, "deepcopy", HAND)
    yield Row(
        "deepcopy that shares tensors, then the loop",
        f"{by_copy:.1f}x",
        note=f"{ms(slow['deepcopy'])}; 24-40x reported",
    )
    for name, text, most in (("pure", "apply (pure)", 5.0), ("in place", "apply(inplace=True)", 1.5)):
        value = ratio(times, name, HAND)
        yield Row(
            f"slapo_fn {text}", f"{value:.2f}x", f"at most {most:g}x", value <= most, _note(name, ms(times[name]))
        )

    yield Row(
        "slapo_fn apply(inplace=True), while somebody holds the replaced modules",
        f"{ratio(held, 'held', HAND):.2f}x",
        note=f"{ms(held['held'])}; then every attribute is looked at for references to them",
    )


def _note(name: str, time: str) -> str:
    return f"{time}; the aim is 3x" if name == "pure" else time


def _check(reset: Reset) -> None:
    """All of them do the same."""
    for run in (by_hand, pure, in_place):
        made = run(reset())
        kinds = [type(module) for module in made.modules()]
        assert kinds.count(nn.GELU) == 0, run.__name__
        assert kinds.count(nn.SiLU) == len(reset.places), run.__name__
        assert (made is reset.model) == (run is not pure)
