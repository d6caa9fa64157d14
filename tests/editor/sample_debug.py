"""What a user runs under a debugger; `test_debugger` finds its lines by their text."""

import torch
from torch import nn

import slapo_fn as slapo


def new(old: nn.Module) -> nn.Module:
    made = nn.Identity()
    return made  # noqa: RET504


def broken(old: nn.Module) -> nn.Module:
    raise RuntimeError("the factory fails")


def mine_at(site: slapo.Site[nn.Module], args: int) -> nn.Module:
    made = site.module
    return made  # noqa: RET504


model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
sel = slapo.select(model, type=nn.Linear)
sch = slapo.Schedule()
sch = slapo.replace(sch, sel, new)
sch = slapo.annotate(sch, sel, "*", "fixed", True)
sch = slapo.cast(sch, sel, torch.float64)
sch = slapo.checkpoint(sch, sel)
sch = slapo.compile(sch, sel)
sch = slapo.freeze(sch, sel)
sch = slapo.unfreeze(sch, sel)
sch = slapo.hook(sch, sel, forward=print)
sch = slapo.probe(sch, sel)
sch = slapo.decompose(sch, sel)
sch = slapo.fuse(sch, sel)
sch = slapo.trace(sch, sel)
sch = slapo.label(sch, "quiet", 0)
head = sch[:1]
first = slapo.apply(model, head)
own = slapo.add(slapo.Schedule(), "1", mine_at, 3)
second = slapo.apply(model, own)
shown = slapo.plan(model, own)
bad = slapo.replace(slapo.Schedule(), "1", broken)
third = slapo.apply(model, bad)
