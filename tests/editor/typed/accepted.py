"""What users write. Every checker must accept all of it and agree on every `assert_type`."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, assert_type

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import slapo_fn as slapo
from slapo_fn import (
    AnnotateArgs,
    CheckpointArgs,
    Entry,
    Origin,
    Phase,
    Plan,
    Schedule,
    Selection,
    Selector,
    Site,
    Step,
    Subgraph,
    Target,
    Traits,
)


class Net(nn.Module):
    head: nn.Linear
    mlps: list[GPT2MLP]


class Fused(nn.Module):
    def __init__(self, old: GPT2MLP, bias: bool = True) -> None:
        super().__init__()


def needs_block(old: GPT2Block) -> nn.Module:
    return old.attn


def any_module(old: nn.Module) -> nn.Linear:
    return nn.Linear(1, 1)


# --- a user's own primitive: two functions, no registry


class ScaleArgs(NamedTuple):
    factor: float
    mode: Literal["mul", "div"] = "mul"


def scale(
    schedule: Schedule, target: Target[nn.Linear], factor: float, *, mode: Literal["mul", "div"] = "mul"
) -> Schedule:
    return slapo.add(schedule, target, scale_at, ScaleArgs(factor, mode))


@slapo.traits(Phase.NUMERICS, overrides=lambda earlier, later: True)
def scale_at(site: Site[nn.Linear], args: ScaleArgs) -> nn.Linear:
    assert_type(site.path, str)
    assert_type(site.module.in_features, int)
    site.renew(site.module.weight, nn.Parameter(site.module.weight.detach() * args.factor))
    return site.module


def selections(model: GPT2LMHeadModel) -> None:
    assert_type(slapo.select(model), Selection[nn.Module])
    assert_type(slapo.select(model, "transformer.h.*"), Selection[nn.Module])
    assert_type(slapo.select(model, ["transformer.wte", "transformer.wpe"]), Selection[nn.Module])
    assert_type(slapo.select(model, re.compile("transformer.*")), Selection[nn.Module])
    assert_type(slapo.select(model, "transformer.h.*", GPT2Block), Selection[GPT2Block])
    assert_type(slapo.select(model, "transformer.h.*", type=GPT2Block), Selection[GPT2Block])
    assert_type(slapo.select(model, type=GPT2Block, subclasses=True), Selection[GPT2Block])
    blocks = slapo.select(model, type=GPT2Block)
    mlps = slapo.select(blocks, type=GPT2MLP)
    assert_type(mlps, Selection[GPT2MLP])
    assert_type(blocks[0], Site[GPT2Block])
    assert_type(blocks[0].path, str)
    assert_type(blocks[0].module.attn, GPT2Attention)
    assert_type(blocks[1:], Selection[GPT2Block])
    assert_type(blocks | mlps, Selection[GPT2Block | GPT2MLP])
    assert_type(blocks & slapo.select(model, "transformer.h.0"), Selection[GPT2Block])
    assert_type(blocks - blocks[:1], Selection[GPT2Block])
    assert_type(~blocks, Selection[nn.Module])
    assert_type(blocks.where(lambda block, path: assert_type(block, GPT2Block).training), Selection[GPT2Block])
    assert_type(blocks.modules, tuple[GPT2Block, ...])
    assert_type(blocks.paths, tuple[str, ...])
    assert_type(blocks.sites, tuple[Site[GPT2Block], ...])
    assert_type(blocks.selector, Selector[GPT2Block])
    assert_type(len(blocks), int)
    for path, module in blocks:
        assert_type(path, str)
        assert_type(module, GPT2Block)
    wider: Selection[nn.Module] = blocks  # covariant
    print(wider)


def selectors(model: GPT2LMHeadModel) -> None:
    assert_type(slapo.where("transformer.h.*"), Selector[nn.Module])
    assert_type(slapo.where("transformer.h.*", GPT2Block), Selector[GPT2Block])
    rule = slapo.where(type=GPT2Block)
    assert_type(rule | slapo.where(type=GPT2MLP), Selector[GPT2Block | GPT2MLP])
    assert_type(rule & slapo.where("transformer.h.0"), Selector[GPT2Block])
    assert_type(rule - slapo.where("transformer.h.0"), Selector[GPT2Block])
    assert_type(~rule, Selector[nn.Module])
    assert_type(rule[::2], Selector[GPT2Block])
    assert_type(rule[-1], Selector[GPT2Block])
    assert_type(rule.where(lambda block, path: "1" in path and block.training), Selector[GPT2Block])
    assert_type(rule.resolve(model), tuple[Site[GPT2Block], ...])
    assert_type(slapo.exactly(12, rule), Selector[GPT2Block])
    assert_type(slapo.exactly(12, GPT2Block), Selector[GPT2Block])
    assert_type(slapo.exactly(12, slapo.select(model, type=GPT2Block)), Selector[GPT2Block])
    assert_type(slapo.exactly(1, "transformer.wte"), Selector[nn.Module])
    assert_type(slapo.optional(rule), Selector[GPT2Block])
    assert_type(slapo.optional("transformer.wte"), Selector[nn.Module])
    assert_type(slapo.at(Net(), lambda m: [assert_type(m, Net).head]), Selection[nn.Linear])
    assert_type(slapo.at(Net(), lambda m: (layer.c_fc for layer in m.mlps)), Selection[Conv1D])
    table: dict[Selector[nn.Module], int] = {rule: 1}
    print(table)


def replacing(model: GPT2LMHeadModel, sch: Schedule) -> None:
    blocks = slapo.select(model, "transformer.h.*", GPT2Block)
    rule = slapo.where("**", GPT2MLP)
    sch = slapo.replace(sch, blocks, lambda old: assert_type(old, GPT2Block).attn)
    sch = slapo.replace(sch, blocks[::2], lambda old: assert_type(old, GPT2Block).attn)
    sch = slapo.replace(sch, blocks[0], lambda old: assert_type(old, GPT2Block).attn)
    sch = slapo.replace(sch, GPT2MLP, lambda old: assert_type(old, GPT2MLP).c_fc)
    sch = slapo.replace(sch, rule, lambda old: assert_type(old, GPT2MLP).c_fc)
    sch = slapo.replace(sch, slapo.optional(rule), lambda old: assert_type(old, GPT2MLP).c_fc)
    sch = slapo.replace(sch, slapo.exactly(12, rule), lambda old: assert_type(old, GPT2MLP).c_fc)
    sch = slapo.replace(sch, rule.where(lambda mlp, path: path != ""), lambda old: assert_type(old, GPT2MLP).c_fc)
    sch = slapo.replace(sch, slapo.at(Net(), lambda m: [m.head]), lambda old: assert_type(old, nn.Linear))
    sch = slapo.replace(sch, blocks, needs_block)
    sch = slapo.replace(sch, blocks, any_module)
    sch = slapo.replace(sch, GPT2MLP, Fused)
    sch = slapo.replace(sch, GPT2MLP, partial(Fused, bias=False))
    sch = slapo.replace(sch, "transformer.ln_f", nn.Identity())
    sch = slapo.replace(sch, "transformer.ln_f", nn.Identity)
    sch = slapo.replace(sch, "transformer.h.0", needs_block)  # a str says nothing: the factory's own word is taken
    sch = slapo.replace(sch, "transformer.ln_f", nn.LayerNorm(768), weights="fresh")
    sch = slapo.replace(sch, GPT2MLP, nn.Linear(1, 1), weights="inherit", inherit=False)
    sch = slapo.replace(sch, GPT2MLP, nn.Linear(1, 1), weights={"weight": "c_fc.weight"}, untie=True)
    sch = slapo.replace(sch, GPT2MLP, nn.Linear(1, 1), weights="fresh", share=True)
    sch = slapo.replace(sch, GPT2MLP, nn.Linear(1, 1), weights={"weight": slapo.cat("q.weight", "k.weight")})
    assert_type(sch, Schedule)


def looking_inside(model: GPT2LMHeadModel, sch: Schedule) -> None:
    chain = slapo.pattern(torch.relu, within="**.mlp")
    assert_type(chain, Selector[Subgraph])
    assert_type(slapo.calls("view", where=lambda node: node.op == "call_method"), Selector[Subgraph])
    assert_type(slapo.parallel(chain), Selector[Subgraph])
    assert_type(slapo.select(model, chain, Subgraph), Selection[Subgraph])
    assert_type(slapo.select(model, chain, Subgraph)[0].module.calls, tuple[nn.Module, ...])
    sch = slapo.replace(sch, chain, nn.ReLU(), name="relu", constants={"inplace": True})
    sch = slapo.replace(sch, chain, slapo.nn.Function(torch.relu))
    sch = slapo.fuse(sch, chain, lambda old: assert_type(old, Subgraph).calls[0])
    sch = slapo.fuse(sch, slapo.select(model, chain, Subgraph)[::2], backend="eager", name="fast")
    sch = slapo.fuse(sch, "**.{q,k,v}_proj", name="qkv")
    sch = slapo.decompose(sch, nn.Linear)
    sch = slapo.checkpoint(sch, chain)
    sch = slapo.trace(sch, GPT2MLP, flat=True, depth=2, leaves=("*.act", nn.Linear), constants={"mask": None})
    sch = slapo.trace(sch, "", recursive=True, leaves="h.*", example=(torch.ones(1),))
    assert_type(slapo.to_original(slapo.apply(model, sch)), dict[str, Any])
    assert_type(slapo.from_original(model, "model.safetensors", strict=False).missing, tuple[str, ...])
    assert_type(slapo.graph_of(model), slapo.Program)


def see(path: str, output: object) -> None:
    print(path, output)


def see_all(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    return output


def see_block(block: GPT2Block, args: tuple[Any, ...], output: object) -> None:
    print(block.attn)


def see_args(block: nn.Module, args: tuple[Any, ...]) -> None:
    print(args)


def building(model: GPT2LMHeadModel, sch: Schedule, other: nn.Module) -> None:
    blocks = slapo.select(model, "transformer.h.*", GPT2Block)
    seen: dict[str, Any] = {}
    sch = slapo.checkpoint(sch, GPT2Block, preserve_rng_state=False, determinism_check="none")
    sch = slapo.checkpoint(sch, blocks, use_reentrant=True, debug=False, early_stop=False)
    sch = slapo.compile(sch, blocks, fullgraph=True, dynamic=None, backend="eager", mode="default")
    sch = slapo.compile(sch, blocks, options={"epilogue_fusion": True})
    sch = slapo.cast(sch, blocks, torch.bfloat16)
    sch = slapo.cast(sch, blocks, torch.bfloat16, "**.weight")
    sch = slapo.freeze(sch, "transformer.wte")
    sch = slapo.unfreeze(sch, blocks[-1], "*.bias")
    sch = slapo.annotate(sch, nn.LayerNorm, "*", "no_decay", True)
    sch = slapo.hook(sch, blocks, backward=see_block, backward_pre=print, prepend=True)
    sch = slapo.hook(sch, blocks, forward=see_all, with_kwargs=True)
    sch = slapo.hook(sch, blocks, forward=see_block, forward_pre=see_args)
    sch = slapo.hook(sch, "transformer.h.0", forward=see_block)
    sch = slapo.probe(sch, blocks)
    sch = slapo.probe(sch, blocks, see)
    sch = slapo.probe(sch, blocks, seen.__setitem__)
    sch = scale(sch, nn.Linear, 2.0, mode="div")
    sch = slapo.add(sch, nn.Linear, scale_at, ScaleArgs(2.0))
    sch = slapo.add(sch, nn.Linear, lambda site, by: nn.Linear(site.module.in_features, by), 3)
    sch = slapo.add(sch, blocks, lambda site, n: assert_type(site, Site[GPT2Block]).module, None)
    assert_type(sch, Schedule)
    assert_type(slapo.apply(model, sch), GPT2LMHeadModel)
    assert_type(slapo.apply(other, sch), nn.Module)
    assert_type(slapo.apply(model, sch, inplace=True), GPT2LMHeadModel)
    assert_type(slapo.apply(model, sch).transformer.h, nn.ModuleList)
    assert_type(slapo.apply(model, (sch[0], sch[1])), GPT2LMHeadModel)


def schedules(model: GPT2LMHeadModel, sch: Schedule) -> None:
    assert_type(sch + sch, Schedule)
    assert_type(sch + (sch[0],), Schedule)
    assert_type(sch[1:], Schedule)  # not ty
    assert_type(slapo.drop(sch, 0, -1, "no embedding updates"), Schedule)
    assert_type(slapo.keep(sch, 0, "no embedding updates"), Schedule)
    assert_type(slapo.label(sch, "no embedding updates"), Schedule)
    assert_type(slapo.label(sch, "both", 0, "old name"), Schedule)
    entry = sch[0]
    selector, primitive, args = entry
    assert_type(selector, Selector[nn.Module])
    assert_type(entry.origin, Origin | None)
    assert_type(entry.label, str)
    assert_type(entry.name, str)
    assert_type(slapo.traits_of(primitive), Traits)
    assert_type(slapo.traits_of(primitive).phase, Phase)
    assert_type(slapo.entries(sch, CheckpointArgs), tuple[Entry[CheckpointArgs], ...])
    for one in slapo.entries(sch, CheckpointArgs):
        assert_type(one.args.preserve_rng_state, bool)
    for made in slapo.entries(sch, ScaleArgs):
        assert_type(made.args.mode, Literal["mul", "div"])
    keys: set[str] = {e.args.key for e in slapo.entries(sch, AnnotateArgs)}
    for other in sch:
        if isinstance(other.args, ScaleArgs):
            print(other.args.factor + 1.0, keys, args)
    lowered: list[Callable[..., nn.Module]] = [e.primitive for e in sch]
    ordered = sorted(lowered, key=lambda primitive: slapo.traits_of(primitive).phase)
    print(ordered)


def planning(model: GPT2LMHeadModel, sch: Schedule) -> None:
    plan = slapo.plan(model, sch)
    assert_type(plan, Plan)
    assert_type(plan.steps, tuple[Step, ...])
    assert_type(plan.of(0), tuple[Step, ...])
    assert_type(plan.problems, tuple[Exception, ...])
    paths: list[str] = [step.path for step in plan.steps if step.overridden_by is None]
    names: list[str] = [one.name for one in slapo.primitives()]
    print(paths, names)


def failing(model: GPT2LMHeadModel, sch: Schedule) -> None:
    try:
        slapo.apply(model, sch)
    except slapo.NoMatchError as error:
        assert_type(error.paths, tuple[str, ...])
    except slapo.ScheduleError as error:
        assert_type(error.exceptions, tuple[Exception | ExceptionGroup[Exception], ...])


class DoubleArgs(NamedTuple):
    by: Tensor


def generic_builder(schedule: Schedule, target: Target, by: Tensor) -> Schedule:  # a bare Target is of nn.Module
    return slapo.add(schedule, target, double_at, DoubleArgs(by))


def double_at(site: Site[nn.Module], args: DoubleArgs) -> nn.Module:
    return site.module
