"""trace: turn the forward of a module into a graph, which patterns are looked for in and people read.

def forward(self, x): …   ->   a torch.fx graph that computes the same
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx, nn
from typing_extensions import NamedTuple

from .._find import find
from .._glob import parse
from .._graph.exported import Example, called_with, example_of, export_forward
from .._graph.traced import program_of, run_by
from .._graph.tracer import Settings
from .._graph.tracing import is_leaf, trace_forward
from .._rules import Site, fits
from .._text import what
from .._tree import join
from ..errors import ArgumentError, TraceError
from ..schedule import Schedule, add
from ..selection import M, Target

Leaf: TypeAlias = str | type[nn.Module]


class TraceArgs(NamedTuple):
    """What `trace` was given; see there."""

    flat: bool = False
    recursive: bool = False
    depth: int | None = None
    leaves: tuple[Leaf, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    tracer: type[fx.Tracer] | None = None
    example: Example | None = None


def trace(
    schedule: Schedule,
    target: Target[M],
    *,
    flat: bool = False,
    recursive: bool = False,
    depth: int | None = None,
    leaves: Leaf | Sequence[Leaf] = (),
    constants: Mapping[str, Any] | None = None,
    tracer: type[fx.Tracer] | None = None,
    example: Any = None,
) -> Schedule:
    """Turn the forward of each selected module into a graph that computes the same.

    The module stays what it is: its class, signature, children, attributes, hooks and names, and the modes that it is
    switched to later on. Training flags, parameters, buffers and what is drawn at random are looked up at each call; plain
    attributes are read once, now. A forward that a graph would get wrong is refused, with file, line and the ways out.

    Args:
        schedule: The schedule so far.
        target: The modules.
        flat: Draw the code of the modules that a forward calls into its graph, too; torch's own layers stay calls.
        recursive: Trace the modules below each one, too, each on its own; those that cannot be traced stay as they are.
        depth: How many levels deep ``flat`` or ``recursive`` goes; None for all.
        leaves: Where it stops: patterns over paths, from the module, and classes.
        constants: Arguments of the forward that are fixed; another value in a call is an error then.
        tracer: A class of `torch.fx.Tracer` to trace with.
        example: Arguments of the model, as a tuple, a dict of keywords, or a tuple of both. What `torch.fx` cannot trace is
            then traced by `torch.export`, for calls such as the one that the module gets when the model runs on them:
            with the same arguments None, and the same nesting; sizes may differ.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    When applied, it raises:
        TraceError: A forward cannot be traced.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> traced = slapo.apply(net, slapo.trace(slapo.Schedule(), ""))
        >>> print(slapo.graph_of(traced))
        def forward(self, input):
            input_1 = input
            _0 = getattr(self, "0")(input_1);  input_1 = None
            _1 = getattr(self, "1")(_0);  _0 = None
            return _1
    """
    if flat and recursive:
        raise ArgumentError("flat draws all code into one graph, recursive gives each module its own: give one of them")
    if depth is not None and not (flat or recursive):
        raise ArgumentError("depth says how deep flat or recursive goes: give one of them, too")
    chosen = (leaves,) if isinstance(leaves, (str, type)) else tuple(leaves)
    for leaf in chosen:
        if isinstance(leaf, str):
            parse(leaf)
        elif not (isinstance(leaf, type) and issubclass(leaf, nn.Module)):
            raise ArgumentError(f"a leaf is a pattern or a class of modules, not {what(leaf)}")
    fixed = tuple((constants or {}).items())
    for name, value in fixed:
        if not isinstance(value, (type(None), bool, int, float, str, tuple)):
            raise ArgumentError(f"a constant is None, a number, a str or a tuple of such; {name} is {what(value)}")
    return add(
        schedule, target, trace_at, TraceArgs(flat, recursive, depth, chosen, fixed, tracer, example_of(example))
    )


def trace_at(site: Site[nn.Module], args: TraceArgs) -> nn.Module:
    """Lower one `trace` entry at one place."""
    flat = Settings(args.depth if args.flat else 0, args.leaves, args.constants, args.tracer)
    try:
        _trace(site.module, site.path, flat)
    except TraceError as error:
        if args.example is None:
            raise
        assert site.tree is not None
        given = called_with(site.tree.root, site.module, site.path, args.example)
        try:
            run_by(site.module, export_forward(site.module, site.path, given, flat))
        except TraceError as second:
            raise TraceError(f"{error}\n{second}", error.paths) from second
    if args.recursive:
        for path, module in _below(site.module, args):
            try:
                _trace(module, join(site.path, path), Settings())
            except TraceError:  # stays as it is
                continue
    return site.module


def _trace(module: nn.Module, path: str, settings: Settings) -> None:
    known = program_of(module)
    if known is None or known.settings != settings:
        run_by(module, trace_forward(module, path, settings))


def _below(root: nn.Module, args: TraceArgs) -> Iterator[tuple[str, nn.Module]]:
    """The modules below that have code of their own, as far as depth and leaves let it go."""
    stop = {id(m) for leaf in args.leaves if isinstance(leaf, str) for _, m in find(root, parse(leaf))}
    waiting = [("", root, 0)]
    while waiting:
        path, module, level = waiting.pop()
        for name, child in module.named_children():
            if id(child) in stop or any(fits(child, leaf, False) for leaf in args.leaves if isinstance(leaf, type)):
                continue
            deeper = level + (not isinstance(child, (nn.ModuleList, nn.ModuleDict)))
            if args.depth is not None and deeper > args.depth:
                continue
            if not is_leaf(child):
                yield join(path, name), child
            waiting.append((join(path, name), child, deeper))
