"""compile: compile a module's forward with `torch.compile`.

y = block(x)   ->   y = torch.compile(block)(x)
"""

# pyright: reportUnknownMemberType=false
# torch.compile is only partly typed.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .._compiled import CompileArgs as CompileArgs
from .._compiled import Compiled, check_backend
from .._forward import wrap
from .._rules import Site
from .._text import what
from ..errors import ArgumentError
from ..schedule import Phase, Schedule, add, traits
from ..selection import M, Target


def compile(
    schedule: Schedule,
    target: Target[M],
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """Compile the forward of each selected module, at its first call.

    Names, class and signature stay. Equal blocks are compiled once, so compiling each block of a model starts many
    times faster than compiling the whole. Hooks run outside the compiled code; checkpointing goes around it. A block that
    reads a key-value cache by its own index is compiled anew for each index, as with `torch.compile` itself.

    Args:
        schedule: The schedule so far.
        target: The modules to compile.
        fullgraph: As in `torch.compile`, and so are the others: whether a graph break is an error.
        dynamic: Whether sizes may vary without a new compilation; None finds out.
        backend: The backend's name, or a function of the graph.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, …
        options: The backend's options.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: The backend is unknown, or both ``mode`` and ``options`` are given.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> fast = slapo.apply(net, slapo.compile(slapo.Schedule(), "0", backend="eager"))
        >>> torch.equal(fast(torch.ones(1, 2)), net(torch.ones(1, 2)))
        True
    """
    check_backend(backend)
    if not callable(backend) and not isinstance(backend, str):
        raise ArgumentError(f"a backend is a name or a function, not {what(backend)}")
    if mode is not None and options is not None:
        raise ArgumentError("torch.compile takes mode or options, not both")
    pairs = None if options is None else tuple(options.items())
    return add(schedule, target, compile_at, CompileArgs(fullgraph, dynamic, backend, mode, pairs))


@traits(Phase.COMPILE, overrides=lambda earlier, later: True)
def compile_at(site: Site[nn.Module], args: CompileArgs) -> nn.Module:
    """Lower one `compile` entry at one place."""
    wrap(site.module, Compiled(site.module, args))
    return site.module
