"""probe: see what comes out of a module, by its path.

y = block(x)   ->   y = block(x); see("h.0", y)
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from typing_extensions import NamedTuple

from .._rules import Site
from .._text import what
from ..errors import ArgumentError
from ..schedule import Schedule, add
from ..selection import M, Target

See: TypeAlias = Callable[[str, Any], object]


def print_output(path: str, output: Any) -> None:
    """Print a path with the shapes and dtypes of an output."""
    print(f"{path or '(root)'}: {outline(output)}")


class ProbeArgs(NamedTuple):
    """What `probe` was given; see there."""

    see: See = print_output


def probe(schedule: Schedule, target: Target[M], see: See = print_output) -> Schedule:
    """Show each selected module's output to a function whenever its forward has run; the output stays as it is.

    Args:
        schedule: The schedule so far.
        target: The modules.
        see: ``(path, output)``. By default it prints shapes and dtypes; ``seen.__setitem__`` of a dict records.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: ``see`` cannot be called.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> _ = slapo.apply(net, slapo.probe(slapo.Schedule(), "*"))(torch.ones(1, 2))
        0: Tensor(1, 3) float32
        1: Tensor(1, 3) float32
        >>> seen = {}
        >>> _ = slapo.apply(net, slapo.probe(slapo.Schedule(), "1", seen.__setitem__))(torch.ones(1, 2))
        >>> list(seen)
        ['1']
    """
    if not callable(see):
        raise ArgumentError(f"see is a function of a path and an output, not {what(see)}")
    return add(schedule, target, probe_at, ProbeArgs(see))


def probe_at(site: Site[nn.Module], args: ProbeArgs) -> nn.Module:
    """Lower one `probe` entry at one place."""
    site.module.register_forward_hook(Probe(site.path, args.see))
    return site.module


class Probe:
    """The forward hook of a probed module."""

    def __init__(self, path: str, see: See) -> None:
        self.path = path
        self.see = see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.see(self.path, output)


def outline(value: Any) -> str:
    """A value with each tensor told by shape and dtype.

    Example:
        >>> import torch
        >>> outline((torch.zeros(2, 3), None))
        '(Tensor(2, 3) float32, None)'
    """
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}".replace(
            ",)", ")"
        )
    if isinstance(value, dict):
        inner = ", ".join(f"{key}={outline(item)}" for key, item in value.items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(outline, value))})"
    return f"{type(value).__name__}" if hasattr(value, "__dict__") else repr(value)
