"""The laws on random module trees, with random names, aliases, ties and modes, and random schedules."""

from __future__ import annotations

import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import slapo_fn as slapo
from slapo_fn._text import kind

from .look import Still, look
from .table import LINEARS, PRIMITIVES, ROOT, Primitive
from .test_all_or_nothing import refusing_last_at
from .test_same_numbers import ties

NAMES = ("0", "1", "10", "a", "b", "proj", "q_proj", "layers", "output", "module", "a.b")
S = slapo.Schedule()


class Node(nn.Module):
    """Adds up what its children make of the input."""

    def forward(self, x_BD: Tensor) -> Tensor:
        for child in self._modules.values():
            if child is not None:
                x_BD = x_BD + child(x_BD)
        return x_BD


LEAVES = (
    lambda: nn.Linear(4, 4),
    lambda: nn.LayerNorm(4),
    nn.Tanh,
    lambda: nn.Linear(4, 4, bias=False),
    lambda: nn.Dropout(0.3),
)


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """A tree of up to 12 modules; some are registered twice, some Linears are tied, some are frozen or in eval mode."""
    torch.manual_seed(draw(st.integers(0, 3)))
    root = Node()
    nodes, made = [root], [root]
    for _ in range(draw(st.integers(0, 11))):
        above = draw(st.sampled_from(nodes))
        kind = draw(st.integers(0, len(LEAVES) + 3))
        shared = [one for one in made if one is not root and above not in one.modules()]
        if kind == len(LEAVES) and shared:
            child = draw(st.sampled_from(shared))
        elif kind < len(LEAVES):
            child = LEAVES[kind]()
        else:
            child = Node()
            nodes.append(child)
        above._modules[draw(st.sampled_from(NAMES))] = child
        made.append(child)
    linears = [one for one in root.modules() if type(one) is nn.Linear]
    if len(linears) > 1 and draw(st.booleans()):
        linears[-1].weight = linears[0].weight
    for module in root.modules():
        module.training = draw(st.booleans())
    for parameter in root.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    return root


@st.composite
def schedules(draw: st.DrawFn, root: nn.Module, primitives: tuple[Primitive, ...] = PRIMITIVES) -> slapo.Schedule:
    """Up to four entries, each at a path of the tree or at a pattern over it."""
    places = slapo.select(root).paths
    linears = slapo.select(root, "**", nn.Linear).paths if any(type(m) is nn.Linear for m in root.modules()) else ()
    sch = S
    for _ in range(draw(st.integers(1, 4))):
        primitive = draw(st.sampled_from(primitives))
        if primitive.on == LINEARS and not linears:
            continue
        some = draw(st.sampled_from(linears if primitive.on == LINEARS else places))
        target = "" if primitive.on == ROOT else draw(st.sampled_from((some, "**")))
        sch = primitive.build(sch, target)
    return sch


def attempt(model: nn.Module, sch: slapo.Schedule, *, inplace: bool = False) -> nn.Module | None:
    """The transformed model, or None where the schedule is refused."""
    try:
        return slapo.apply(model, sch, inplace=inplace)
    except slapo.SlapoError as error:
        note(f"refused: {error}")
        return None


def of(data: st.DataObject, primitives: tuple[Primitive, ...] = PRIMITIVES) -> tuple[nn.Module, slapo.Schedule]:
    model = data.draw(trees())
    sch = data.draw(schedules(model, primitives))
    note(f"{model}\n{slapo.plan(model, sch)}")
    return model, sch


QUIET = tuple(one for one in PRIMITIVES if not one.restructures)
SAME = tuple(one for one in QUIET if one.atol is not None and one.name not in ("compile", "cast"))


@given(st.data())
def test_the_input_stays_and_the_result_is_apart(data: st.DataObject) -> None:
    model, sch = of(data)
    still = Still(model)
    result = attempt(model, sch)
    still.check()
    if result is not None:
        assert not {id(m) for m in model.modules()} & {id(m) for m in result.modules()}


@given(st.data())
def test_in_place_gives_what_a_copy_gives(data: st.DataObject) -> None:
    model, sch = of(data)
    result = attempt(model, sch)
    expected = None if result is None else look(result)
    still = Still(model)
    inplace = attempt(model, sch, inplace=True)
    assert (inplace is None) == (result is None)
    if inplace is None:
        still.check()
    else:
        assert look(inplace) == expected


@given(st.data())
def test_a_failure_at_the_very_end_is_rolled_back(data: st.DataObject) -> None:
    model, sch = of(data)
    still = Still(model)
    try:
        slapo.apply(model, slapo.add(sch, "", refusing_last_at, None), inplace=True)
    except (slapo.SlapoError, ValueError):
        still.check()
    else:
        raise AssertionError("the last entry fails")


@given(st.data())
def test_names_and_ties_stay(data: st.DataObject) -> None:
    model, sch = of(data, QUIET)
    result = attempt(model, sch)
    if result is not None:
        for key in ("same as", "class", "training"):
            mine, theirs = look(result), look(model)
            assert {path: one[key] for path, one in mine.items()} == {path: one[key] for path, one in theirs.items()}
        assert ties(result) == ties(model)


@given(st.data())
def test_outputs_and_gradients_are_the_same(data: st.DataObject) -> None:
    model, sch = of(data, SAME)
    result = attempt(model, sch)
    if result is None:
        return

    def both(one: nn.Module) -> list[Tensor | None]:
        x_BD = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        torch.manual_seed(5)
        out = one(x_BD)
        out.sum().backward()
        return [out.detach(), x_BD.grad]

    for mine, theirs in zip(both(result), both(model), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)  # gradients are summed up in another order


@given(st.data())
def test_one_entry_after_the_other_is_all_at_once(data: st.DataObject) -> None:
    model, sch = of(data)
    state = torch.get_rng_state()
    together = attempt(model, sch)
    order = slapo.plan(model, sch).order
    apart: nn.Module | None = model
    for number in order:
        torch.set_rng_state(state)
        apart = None if apart is None else attempt(apart, sch[number : number + 1])
    assert (together is None) == (apart is None)
    if together is not None:
        assert look(apart) == look(together)


@given(st.data(), st.randoms(use_true_random=False))
def test_phases_make_the_order_of_writing_irrelevant(data: st.DataObject, chance: object) -> None:
    model, sch = of(data)
    phases: dict[slapo.Phase, list[slapo.Entry]] = {}
    for entry in sch:
        phases.setdefault(slapo.traits_of(entry.primitive).phase, []).append(entry)
    queues = [list(one) for one in phases.values()]
    shuffled = []
    while any(queues):
        shuffled.append(chance.choice([one for one in queues if one]).pop(0))
    one, two = attempt(model, sch), attempt(model, slapo.Schedule(shuffled))
    assert (one is None) == (two is None)
    if one is not None:
        assert look(one) == look(two)


@given(st.data())
def test_what_is_struck_out_can_be_dropped(data: st.DataObject) -> None:
    model, sch = of(data)
    plan = slapo.plan(model, sch)
    if plan.problems:
        return
    void = [n for n in range(len(sch)) if plan.of(n) and all(step.overridden_by is not None for step in plan.of(n))]
    whole = look(slapo.apply(model, sch))
    for number in void:
        assert look(slapo.apply(model, slapo.drop(sch, number))) == whole, f"entry {number} is struck out"


@given(st.data())
def test_a_plan_tells_what_apply_does(data: st.DataObject) -> None:
    model, sch = of(data)
    plan = slapo.plan(model, sch)
    result = attempt(model, sch)
    assert bool(plan.problems) == (result is None)
    if result is not None:
        after = dict(result.named_modules(remove_duplicate=False))
        for step in plan.steps:
            last = [one for one in plan.steps if one.path == step.path][-1]
            if step is last and step.overridden_by is None and step.path in after:
                names = {step.path, *step.aliases} & set(after)
                assert len({id(after[name]) for name in names}) == 1
                assert kind(after[step.path]) == step.after
