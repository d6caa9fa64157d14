"""peers: the same replacement by other tools, those that are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from ._measure import Case, Row, in_turn, ms, ratio
from ._tree import HAND, Reset, by_hand, grown, swish
from .swap import pure


def by_fx(model: nn.Module) -> nn.Module:
    """Trace the model with the blocks' parts as leaves, and put other modules in the graph module."""
    traced = torch.fx.symbolic_trace(model)
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(module := traced.get_submodule(node.target), nn.GELU):
            parent, _, name = node.target.rpartition(".")
            setattr(traced.get_submodule(parent), name, swish(module))
    return traced


class Swish(nn.SiLU):
    """What `torch.ao.quantization.convert` makes of a GELU."""

    @classmethod
    def from_float(cls, gelu: nn.GELU) -> Swish:
        """As a mapping of `torch.ao` names its factories."""
        return cls()


def by_ao(model: nn.Module) -> nn.Module:
    """`torch.ao.quantization.convert`, in place, with a mapping of our own."""
    convert: Any = torch.ao.quantization.convert
    made: nn.Module = convert(model, mapping={nn.GELU: Swish}, inplace=True, remove_qconfig=False)
    return made


def rows() -> Iterator[Row]:
    """Time each that is there beside the loop."""
    reset = Reset(grown(1000))

    def marked() -> nn.Module:
        model = reset()
        for parent, name in reset.places:
            cast(Any, parent._modules[name]).qconfig = "any"  # what torch.ao takes for "replace me"
        return model

    cases = {
        HAND: Case(reset, by_hand),
        "torch.fx: symbolic_trace, then the loop over its nodes": Case(reset, by_fx),
        "torch.ao.quantization.convert(inplace=True)": Case(marked, by_ao),
        **_torchao(reset),
        "slapo_fn apply (pure), in this very run": Case(reset, pure),
    }
    times = in_turn(cases, 3, warm_up=0)
    for name in list(cases)[1:]:
        yield Row(name, f"{ratio(times, name, HAND):.2f}x", note=f"{ms(times[name])}{_NOTES.get(name, '')}")
    if not _version():
        yield Row(
            "torchao's replacement by a function and a filter", "not installed", note="pip install --no-deps torchao"
        )


def _torchao(reset: Reset) -> dict[str, Case]:
    if not _version():
        return {}
    try:
        quant_api: Any = importlib.import_module("torchao.quantization.quant_api")
    except Exception as error:  # a peer that does not run with this torch is no fault of ours
        print(f"torchao does not import: {error}")
        return {}
    swap: Any = quant_api._replace_with_custom_fn_if_matches_filter

    def run(model: nn.Module) -> None:
        swap(model, swish, lambda module, path: isinstance(module, nn.GELU))

    return {f"torchao {_version()}: replacement by a function and a filter, in place": Case(reset, run)}


def _version() -> str:
    try:
        return importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return ""


_NOTES = {"torch.fx: symbolic_trace, then the loop over its nodes": "; gives a GraphModule that shares leaf modules"}
