"""Every primitive, one line each in `PRIMITIVES`: a new one gets every law's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

import slapo_fn as slapo
from slapo_fn import Schedule

from .models import MODELS, Model

PLACES, LINEARS, ROOT = "places", "linears", "root"


class Primitive(NamedTuple):
    """One use of a primitive.

    Attributes:
        name: Its name in the tests.
        build: Adds it to a schedule for a target.
        on: Which of a model's modules it is tried on.
        restructures: Whether names or classes change by intent.
        atol: How far outputs and gradients may be from the plain model's; None where it promises no same numbers.
        dtype: What floating inputs have to be.
        tensors: Whether it makes new tensors, and so refuses a lazy module.
    """

    name: str
    build: Callable[[Schedule, Any], Schedule]
    on: str = PLACES
    restructures: bool = False
    atol: float | None = 0.0
    dtype: torch.dtype = torch.float32
    tensors: bool = False

    def schedule(self, model: Model, before: Schedule | None = None) -> Schedule:
        """The primitive at its places of a model."""
        target = {PLACES: model.places, LINEARS: model.linears, ROOT: ""}[self.on]
        return self.build(Schedule() if before is None else before, target)


def twin(old: nn.Linear) -> nn.Linear:
    """A new Linear that holds the old one's parameters."""
    made = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    made.weight, made.bias = old.weight, old.bias
    return made


class Adapter(nn.Module):
    """A LoRA-like wrapper, which adds nothing at first."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.base_layer(x_BTD) + self.up(self.down(x_BTD))


def refit(old: nn.Linear) -> nn.Linear:
    """A Linear with weights of its own: what random initialisation is tested with."""
    return nn.Linear(old.in_features, old.out_features)


def passed(module: nn.Module, *rest: Any) -> None:
    return None


def seen(path: str, output: Any) -> None:
    return None


def can_be_traced(module: nn.Module, path: str) -> bool:
    try:
        slapo.graph_of(module)
    except slapo.TraceError:
        return False
    return True


def one_linear(x: Tensor) -> Tensor:
    return slapo.call_module(nn.Linear, x)


def first_call(old: slapo.Subgraph) -> nn.Module:
    return old.calls[0]


def parts(target: Any) -> slapo.Selector[slapo.Subgraph]:
    """Every call of a Linear inside what can be traced."""
    return slapo.optional(slapo.pattern(one_linear, within=target))


def steps(target: Any) -> slapo.Selector[slapo.Subgraph]:
    """Every operation inside what can be traced."""
    return slapo.optional(slapo.calls(within=target, where=computes))


def computes(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") not in ("getattr", "getitem")


PRIMITIVES = (
    Primitive("replace", lambda s, t: slapo.replace(s, slapo.where(t, nn.Linear), twin), LINEARS),
    Primitive(
        "replace by wrapper", lambda s, t: slapo.replace(s, slapo.where(t, nn.Linear), Adapter), LINEARS, True, 1e-6
    ),
    Primitive("replace fresh", lambda s, t: slapo.replace(s, slapo.where(t, nn.Linear), refit), LINEARS, True, None),
    Primitive("cast", lambda s, t: slapo.cast(s, t, torch.float64), ROOT, atol=1e-4, dtype=torch.float64, tensors=True),
    Primitive("cast places", lambda s, t: slapo.cast(s, t, torch.bfloat16), atol=None, tensors=True),
    Primitive("freeze", lambda s, t: slapo.freeze(s, t), atol=1e-6, tensors=True),
    Primitive("unfreeze", lambda s, t: slapo.unfreeze(s, t), tensors=True),
    Primitive("annotate", lambda s, t: slapo.annotate(s, t, "**", "no_decay", True), tensors=True),
    Primitive("checkpoint", lambda s, t: slapo.checkpoint(s, t)),
    Primitive("compile", lambda s, t: slapo.compile(s, t, backend="eager"), atol=1e-6),
    Primitive("hook", lambda s, t: slapo.hook(s, t, forward=passed, forward_pre=passed)),
    Primitive("hook backward", lambda s, t: slapo.hook(s, t, backward=passed, backward_pre=passed), atol=1e-6),
    Primitive("probe", lambda s, t: slapo.probe(s, t, seen)),
    Primitive("trace", lambda s, t: slapo.trace(s, slapo.optional(slapo.where(t).where(can_be_traced)))),
    Primitive("trace flat", lambda s, t: slapo.trace(s, slapo.optional(slapo.where(t).where(can_be_traced)), flat=True)),
    Primitive("decompose", lambda s, t: slapo.decompose(s, slapo.where(t, nn.Linear)), LINEARS, True, 1e-6),
    Primitive("checkpoint parts", lambda s, t: slapo.checkpoint(s, steps(t)), restructures=True),
    Primitive("fuse parts", lambda s, t: slapo.fuse(s, parts(t), backend="eager"), restructures=True, atol=1e-6),
    Primitive("fuse parts into", lambda s, t: slapo.fuse(s, parts(t), first_call), restructures=True),
    Primitive("replace parts", lambda s, t: slapo.replace(s, parts(t), slapo.nn.Function(torch.relu)), PLACES, True, None),
)

PAIRS = [
    (primitive, model)
    for primitive in PRIMITIVES
    for model in MODELS
    if (model.linears or primitive.on != LINEARS) and not (primitive.tensors and model.lazy)
]


def named(pair: object) -> str:
    """How a row, or a pair of rows, is called in a test's id."""
    return str(getattr(pair, "name", pair))
