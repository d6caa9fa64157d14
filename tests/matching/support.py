"""Little forwards, traced as `torch.fx` traces them, and what a pattern finds in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from slapo_fn._match.matcher import Matches, find_matches, nearest, read_pattern


def net(forward: Callable[..., Any], **members: Any) -> nn.Module:
    """A module with this forward, whose first argument is the module, and with these children or tensors."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, member in members.items():
        setattr(made, name, nn.Parameter(member) if isinstance(member, Tensor) else member)
    return made


def matches(pattern: Callable[..., Any] | nn.Module, model: nn.Module) -> Matches:
    return find_matches(read_pattern(pattern), fx.Tracer().trace(model), model)


def names(pattern: Callable[..., Any] | nn.Module, model: nn.Module) -> list[list[str]]:
    """The names of each match's nodes."""
    return [[node.name for node in match.nodes] for match in matches(pattern, model).found]


def why(pattern: Callable[..., Any] | nn.Module, model: nn.Module) -> str | None:
    return nearest(read_pattern(pattern), fx.Tracer().trace(model), model)
