"""replace: put another module in the place of each selected one.

h.0.mlp: GPT2MLP   ->   h.0.mlp: FusedMLP
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from typing_extensions import NamedTuple

from .._fork import Fork
from .._graph.subgraph import Subgraph
from .._layout.sources import Source, checked
from .._relink import relink_within
from .._rules import Site
from .._text import what
from .._weights import clone_rest, fill
from ..errors import ArgumentError, MisfitError
from ..nn.function import Function
from ..schedule import Schedule, add
from ..selection import M, Target

Weights: TypeAlias = Literal["inherit", "fresh"] | Mapping[str, Source]


class ReplaceArgs(NamedTuple):
    """What `replace` was given; see there."""

    new: Callable[[Any], nn.Module]
    weights: Literal["inherit", "fresh"] | tuple[tuple[str, Source], ...] | None = None
    share: bool = False
    untie: bool = False
    inherit: bool = True
    name: str | None = None
    constants: tuple[tuple[str, Any], ...] | None = None


def replace(
    schedule: Schedule,
    target: Target[M],
    new: Callable[[M], nn.Module],
    *,
    weights: Weights | None = None,
    share: bool = False,
    untie: bool = False,
    inherit: bool = True,
    name: str | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Schedule:
    """Put another module in the place of each selected one, or of a part of a forward.

    The new module takes over the old one's mode, device, dtype, frozenness, hooks, and the checkpointing and compiling
    around it. What takes the place of a part that a `pattern` finds is called with the values that the pattern's parameters
    stand for, in their order, and gives as many values as the pattern does.

    Args:
        schedule: The schedule so far.
        target: The modules to replace.
        new: A factory, called with the old module at each place; the weights are its affair. Or a module, which serves
            as a template: each place gets a copy of its own, filled with the old weights by name. A class is a factory
            that is called with the old module. For a pattern: a function of tensors, called in the place of the operations
            (``nn.Function(f)`` in code that is type-checked), or a template, which is registered in the module whose
            forward it is.
        weights: For a template ``"inherit"`` (the default) takes the old tensors and refuses what does not fit by name
            and shape; ``"fresh"`` keeps the template's own; a mapping ``{new name: old name}`` of tensors or of
            submodules says where each comes from, for what a factory gives, too; ``cat``, ``transposed`` and ``part`` say how
            one is made of several, and `to_original` gives these back.
        share: Let all places share one module: the template with its own weights, or what the factory gives twice.
        untie: Let a tied parameter or a shared module come apart: only the place that was asked for is changed.
        inherit: Whether the new module takes over mode, device, dtype, frozenness and hooks at all.
        name: For a pattern: what the new module is registered as, with a number; else it is its class's name.
        constants: For a pattern: further arguments, by name, that are fixed.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    When applied, it raises:
        WeightsError: The old weights do not fit the template.
        TieError: A tied parameter would be left out of the new module.
        HookError: Modules inside the old one have hooks that would be lost.
        MisfitError: The factory gave no module, or one module for two places.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import Tensor, nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> sch = slapo.replace(slapo.Schedule(), "1", lambda old: nn.GELU(approximate="tanh"))
        >>> slapo.apply(net, sch)[1]
        GELU(approximate='tanh')
    """
    if not callable(new):
        raise ArgumentError(f"new is a factory old -> module, or a module as a template, not {what(new)}")
    _refuse_class_that_takes_no_module(new)
    if isinstance(weights, Mapping):
        pairs: Any = tuple((name, checked(source)) for name, source in weights.items())
    elif weights in (None, "inherit", "fresh"):
        pairs = weights
    else:
        raise ArgumentError(f"weights is 'inherit', 'fresh' or a mapping of names, not {what(weights)}")
    fixed = tuple(constants.items()) if constants else None
    return add(schedule, target, replace_at, ReplaceArgs(new, pairs, share, untie, inherit, name, fixed))


def replace_at(site: Site[nn.Module], args: ReplaceArgs) -> nn.Module:
    """Lower one `replace` entry at one place."""
    old = site.module
    if not isinstance(args.new, nn.Module) and not (isinstance(old, Subgraph) and not isinstance(args.new, type)):
        made = args.new(old)
        if made is None:
            raise MisfitError(f"the factory gave None for {site.path!r}; give old to leave it as it is", [site.path])
        if isinstance(args.weights, tuple):
            relink_within(made, fill(made, old, dict(args.weights), site.path, own=args.untie))
        return made
    if not isinstance(args.new, nn.Module):
        return Function(args.new)
    if args.share:
        return _shared(site, args.new)
    made = Fork(args.new).root
    exchanged: dict[int, Tensor] = {}
    if args.weights != "fresh":
        names = dict(args.weights) if isinstance(args.weights, tuple) else {}
        exchanged.update(fill(made, old, names, site.path, own=args.untie))
    exchanged.update(clone_rest(made, args.new))
    relink_within(made, exchanged)
    return made


def _shared(site: Site[nn.Module], template: nn.Module) -> nn.Module:
    assert site.tree is not None
    made = site.tree.templates.get(id(template))
    if made is None:
        made = site.tree.templates[id(template)] = Fork(template).root
        relink_within(made, clone_rest(made, template))
    return made


def _refuse_class_that_takes_no_module(new: object) -> None:
    """`nn.ReLU` given for a factory would be called as ``nn.ReLU(old)``, and take the module for a flag."""
    if not isinstance(new, type) or new is nn.Identity:
        return
    try:
        first = next(iter(inspect.signature(new).parameters.values()), None)
    except (TypeError, ValueError):
        return
    if first is None or first.kind is inspect.Parameter.KEYWORD_ONLY:
        takes = "takes no argument"
    elif first.annotation in (bool, int, float, str, "bool", "int", "float", "str"):
        takes = f"would take it for {first.name}"
    else:
        return
    raise ArgumentError(
        f"the factory {new.__name__} is called with the old module, and {takes}: "
        f"give {new.__name__}(…) as a template, or lambda old: {new.__name__}(…)"
    )
