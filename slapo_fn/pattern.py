"""Select places inside a forward: by a function of tensors that computes the same (`pattern`), or by call (`calls`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ._graph.inside import Calls, Parallel, Pattern
from ._graph.subgraph import Subgraph
from ._graph.tracer import Settings
from ._match.matcher import read_pattern
from ._text import what
from .errors import ArgumentError, PatternError
from .select import as_selector
from .selection import Selection, Selector, Target


def pattern(
    fn: Callable[..., Any] | nn.Module, within: Target[nn.Module] = "**", *, flat: bool = False
) -> Selector[Subgraph]:
    """Pick the places inside forwards that compute what a function computes.

    The forwards of the modules named are traced, and the function's trace is looked for in theirs; what counts as equal
    is one table: ``F.relu(x)``, ``torch.relu(x)``, ``x.relu()`` and a call of an `nn.ReLU` are one operation, operands
    of sums and products may be commuted, constants are compared. A value that is used outside of the place, other than
    its outputs, rules it out. Places do not overlap: the first one in the forward's order counts.

    Args:
        fn: A function of tensors. Its positional parameters stand for any values, and what is put in the place is called
            with them in their order; its keyword-only parameters stand for any constants, and are passed by name. It
            calls modules of the forward by ``call_module(path or class, x)``, and may return several values. A module that
            it calls from outside stands for any of its class and configuration, whatever the weights. Or a module, whose
            forward is the function.
        within: The modules whose forwards are looked into, each its own code only.
        flat: Whether the code of the modules that a forward calls is drawn in, too.

    Returns:
        A selector, for `select` and for every builder. Its places are `Subgraph` modules.

    Raises:
        PatternError: The function has no operations, or cannot be traced.
        ArgumentError: An argument is of the wrong kind.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> def linear_relu(x):
        ...     return torch.relu(slapo.call_module(nn.Linear, x))
        >>> slapo.select(net, slapo.pattern(linear_relu, within=""))
        Selection of 1: 0+1
          linear_relu_0
    """
    if not callable(fn):
        raise ArgumentError(f"a pattern is a function of tensors, or a module, not {what(fn)}")
    read = read_pattern(fn)
    if read.outside:
        raise PatternError(
            "the pattern takes a parameter or buffer from outside of it, which says nothing of where it is in a model: make "
            "it an input of the pattern"
        )
    return Selector(Pattern(as_selector(within).rule, _settings(flat), read))


def calls(
    of: str | re.Pattern[str] = "**",
    within: Target[nn.Module] = "**",
    *,
    where: Callable[[fx.Node], bool] | None = None,
    flat: bool = False,
) -> Selector[Subgraph]:
    """Pick single operations inside forwards, by the name of what they call.

    Args:
        of: The name of a function (``gelu``), of a tensor method (``view``), or a called module's path: with holes, as in
            `select`, or a compiled ``re.Pattern``, which is a full match.
        within: The modules whose forwards are looked into.
        where: Only operations for which this is true; it is given the `torch.fx.Node`.
        flat: As in `pattern`.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> class Net(nn.Module):
        ...     def forward(self, x):
        ...         return torch.relu(x).view(-1)
        >>> slapo.select(Net(), slapo.calls("view"))[0].module.ops
        ('view',)
    """
    if not isinstance(of, (str, re.Pattern)):
        raise ArgumentError(f"calls takes a name with holes or a compiled re.Pattern, not {what(of)}")
    if where is not None and not callable(where):
        raise ArgumentError(f"where is a function of a torch.fx.Node, not {what(where)}")
    name = re.compile(_regex(of)) if isinstance(of, str) else of
    return Selector(Calls(as_selector(within).rule, _settings(flat), name, where))


def parallel(target: Selector[Subgraph] | Selection[Subgraph]) -> Selector[Subgraph]:
    """Take all the places in one forward together, as one place with several outputs.

    They have to be branches side by side: of one common first input, none of which depends on another. What is put in
    their place takes the common input, then whatever else they take, and gives as many values as there are branches.

    Example:
        >>> import slapo_fn as slapo
        >>> slapo.parallel(slapo.pattern(lambda x: slapo.call_module("{q,k,v}_proj", x), within="**.attn"))
        where(parallel **.attn ~ <lambda>)
    """
    return Selector(Parallel(as_selector(target).rule))


def _settings(flat: bool) -> Settings:
    return Settings(depth=None if flat else 0)


def _regex(name: str) -> str:
    """A name with holes as a regular expression."""
    parts = re.split(r"(\*\*|\*|\{[^{}]*\})", name)
    holes = {"**": ".*", "*": r"[^.]*"}
    return "".join(
        holes.get(part)
        or (f"({'|'.join(map(re.escape, part[1:-1].split(',')))})" if part[:1] == "{" else re.escape(part))
        for part in parts
    )
