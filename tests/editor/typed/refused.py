"""What users get wrong. Every line marked ``# E`` must be an error in every checker, and no other.

``# E (not mypy)``: a known gap. The test fails when the gap closes, too.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block, GPT2LMHeadModel

import slapo_fn as slapo
from slapo_fn import CheckpointArgs, Phase, Plan, Schedule, Selection, Selector, Site, Target


class Net(nn.Module):
    head: nn.Linear
    mlp: GPT2MLP


class ScaleArgs(NamedTuple):
    factor: float


def scale(schedule: Schedule, target: Target[nn.Linear], factor: float) -> Schedule:
    return slapo.add(schedule, target, scale_at, ScaleArgs(factor))


def scale_at(site: Site[nn.Linear], args: ScaleArgs) -> nn.Module:
    return site.module


def needs_mlp(old: GPT2MLP) -> nn.Module:
    return old


def int_to_module(size: int) -> nn.Module:
    return nn.Linear(size, size)


def two(path: str, old: nn.Module) -> nn.Module:
    return old


def selecting(
    model: GPT2LMHeadModel, sch: Schedule, blocks: Selection[GPT2Block], rule: Selector[GPT2Block]
) -> None:
    net = Net()
    slapo.select(model, 3)  # E
    slapo.select(model, type=int)  # E
    slapo.select("transformer.h.*")  # E
    slapo.select(model, "transformer.h.*", subclasses="yes")  # E
    slapo.select(model, "transformer.h.*", GPT2Block, True)  # E
    slapo.select(sch)  # E
    slapo.where(3)  # E
    slapo.where(type=GPT2Block())  # E
    blocks["transformer.h.0"]  # E
    blocks | 3  # E
    rule | "transformer.wte"  # E
    rule["transformer.h.0"]  # E
    len(rule)  # E
    blocks.where(lambda block: True)  # E
    blocks.where(lambda block, path: block.forward(path) == path + 1)  # E
    rule.where(lambda block, path: path + 1)  # E
    slapo.at(net, lambda m: m.head)  # E
    slapo.at(net, lambda m: ["transformer.wte"])  # E
    slapo.exactly("12", rule)  # E
    slapo.exactly(rule, 12)  # E
    slapo.optional(3)  # E
    slapo.optional(int)  # E
    rule.resolve(blocks)  # E
    blocks.sites = ()  # E
    rule.rule = rule.rule  # E
    blocks[0].path = "transformer"  # E


def replacing(model: GPT2LMHeadModel, sch: Schedule, blocks: Selection[GPT2Block]) -> None:
    slapo.replace(sch, blocks, lambda old: 3)  # E
    slapo.replace(sch, blocks, lambda old: None)  # E
    slapo.replace(sch, blocks, lambda old: int_to_module(old))  # E
    slapo.replace(sch, blocks, lambda: nn.Identity())  # E
    slapo.replace(sch, blocks, needs_mlp)  # E
    slapo.replace(sch, blocks[0], needs_mlp)  # E
    slapo.replace(sch, blocks[::2], needs_mlp)  # E
    slapo.replace(sch, GPT2Block, needs_mlp)  # E
    slapo.replace(sch, slapo.where("*", GPT2Block), needs_mlp)  # E
    slapo.replace(sch, slapo.optional(GPT2Block), needs_mlp)  # E
    slapo.replace(sch, slapo.at(Net(), lambda m: [m.head]), needs_mlp)  # E
    slapo.replace(sch, blocks, two)  # E
    slapo.replace(sch, blocks, 3)  # E
    slapo.replace(sch, 3, nn.Identity)  # E
    slapo.replace(sch, int, nn.Identity)  # E
    slapo.replace(model, blocks, nn.Identity)  # E
    slapo.replace(sch, blocks)  # E
    slapo.replace(sch, blocks, nn.Identity(), weights="new")  # E
    slapo.replace(sch, blocks, nn.Identity(), weights=["c_fc"])  # E
    slapo.replace(sch, blocks, nn.Identity(), weights={"weight": 1})  # E
    slapo.replace(sch, blocks, nn.Identity(), "fresh")  # E
    slapo.replace(sch, blocks, nn.Identity(), share="yes")  # E
    slapo.replace(sch, blocks, nn.Identity(), untied=True)  # E


def building(model: GPT2LMHeadModel, sch: Schedule, blocks: Selection[GPT2Block]) -> None:
    slapo.checkpoint(sch, blocks, True)  # E
    slapo.checkpoint(sch, blocks, preserve_rng_state="no")  # E
    slapo.checkpoint(sch, blocks, determinism_check="never")  # E
    slapo.checkpoint(sch, blocks, preserve_rng=True)  # E
    slapo.checkpoint(blocks, sch)  # E
    slapo.compile(sch, blocks, True)  # E
    slapo.compile(sch, blocks, backend=3)  # E
    slapo.compile(sch, blocks, options=["trace"])  # E
    slapo.fuse(sch, blocks, 3)  # E
    slapo.fuse(sch, blocks, needs_mlp)  # E
    slapo.fuse(sch, blocks, backends="eager")  # E
    slapo.fuse(sch)  # E
    slapo.decompose(sch)  # E
    slapo.trace(sch, blocks, flat="yes")  # E
    slapo.trace(sch, blocks, leaves=3)  # E
    slapo.trace(sch, blocks, constants=["mask"])  # E
    slapo.pattern(3)  # E
    slapo.pattern(torch.relu, 3)  # E
    slapo.calls(3)  # E
    slapo.parallel("h.*")  # E
    slapo.to_original(3)  # E
    slapo.cast(sch, blocks)  # E
    slapo.cast(sch, blocks, "bfloat16")  # E
    slapo.cast(sch, blocks, torch.Tensor)  # E
    slapo.freeze(sch)  # E
    slapo.freeze(sch, blocks, 3)  # E
    slapo.unfreeze(sch, blocks, requires_grad=True)  # E
    slapo.annotate(sch, blocks, "*", "no_decay")  # E
    slapo.annotate(sch, blocks, "*", 3, True)  # E
    slapo.annotate(sch, blocks, "*", "no_decay", [True])  # E
    slapo.hook(sch, blocks, lambda module, args, output: output)  # E
    slapo.hook(sch, blocks, forward="print")  # E
    slapo.hook(sch, blocks, after=print)  # E
    slapo.probe(sch, blocks, 3)  # E
    slapo.probe(sch, blocks, int_to_module)  # E
    scale(sch, blocks, 2.0)  # E
    scale(sch, nn.Conv2d, 2.0)  # E
    slapo.add(sch, nn.Linear, scale_at, CheckpointArgs())  # E
    slapo.add(sch, nn.Conv2d, scale_at, ScaleArgs(1.0))  # E
    slapo.add(sch, nn.Linear, scale_at)  # E
    slapo.add(sch, blocks, lambda site: site.module, None)  # E
    slapo.traits("numerics")  # E
    slapo.traits(Phase.NUMERICS, overrides=lambda earlier: True)  # E
    slapo.traits_of("scale_at")  # E


def using(model: GPT2LMHeadModel, sch: Schedule, plan: Plan) -> None:
    sch[0] = sch[1]  # E
    sch.append(sch[0])  # E
    sch[0].args = 3  # E
    sch[0].origin = None  # E
    sch[0].label = "embedding"  # E
    sch[0].arg  # E
    sch["embedding"]  # E
    slapo.entries(sch, CheckpointArgs)[0].args.preserve_rng  # E
    slapo.entries(sch, CheckpointArgs())  # E
    slapo.apply(sch, model)  # E
    slapo.apply(model)  # E
    slapo.apply(model, sch, True)  # E
    slapo.apply(model, sch[0])  # E
    slapo.drop(sch, 1.5)  # E
    slapo.drop(sch, sch[0])  # E
    slapo.keep(sch, None)  # E
    slapo.label(sch, 3)  # E
    slapo.plan(sch, model)  # E
    plan.steps = ()  # E
    plan.of("replace")  # E
    plan.steps[0].way  # E
    wrong: Schedule = (sch[0],)  # E
    other: GPT2Block = slapo.apply(model, sch)  # E
    narrower: Selection[GPT2Block] = slapo.select(model)  # E (not mypy, not ty: they let the left side choose M)
    print(wrong, other, narrower)
