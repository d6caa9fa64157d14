"""hook: run a function before or after a module's forward or backward.

y = block(x)   ->   y = block(x); function(block, (x,), y)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn
from typing_extensions import NamedTuple

from .._rules import Site
from .._text import what
from ..errors import ArgumentError
from ..schedule import Schedule, add
from ..selection import M, Target

Hook: TypeAlias = Callable[..., Any]


class HookArgs(NamedTuple):
    """What `hook` was given; see there."""

    forward: Hook | None = None
    forward_pre: Hook | None = None
    backward: Hook | None = None
    backward_pre: Hook | None = None
    prepend: bool = False
    with_kwargs: bool = False
    always_call: bool = False


def hook(
    schedule: Schedule,
    target: Target[M],
    *,
    forward: Hook | None = None,
    forward_pre: Hook | None = None,
    backward: Hook | None = None,
    backward_pre: Hook | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> Schedule:
    """Register hooks on each selected module, as its own ``register_…_hook`` methods do.

    Args:
        schedule: The schedule so far.
        target: The modules.
        forward: ``(module, args, output)``; what it gives, unless None, is the output (`register_forward_hook`).
        forward_pre: ``(module, args)``; what it gives, unless None, are the args (`register_forward_pre_hook`).
        backward: ``(module, grad_input, grad_output)``, and may give another grad_input (`register_full_backward_hook`).
        backward_pre: ``(module, grad_output)``, and may give another (`register_full_backward_pre_hook`).
        prepend: Whether they run before the hooks that are there.
        with_kwargs: Whether forward hooks get the keyword arguments, too: ``(module, args, kwargs, output)``.
        always_call: Whether ``forward`` runs though the module's forward raised.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: There is no hook, or one that cannot be called.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> sch = slapo.hook(slapo.Schedule(), nn.ReLU, forward=lambda module, args, output: output + 1)
        >>> slapo.apply(nn.Sequential(nn.ReLU()), sch)(torch.zeros(2))
        tensor([1., 1.])
    """
    given = {"forward": forward, "forward_pre": forward_pre, "backward": backward, "backward_pre": backward_pre}
    if not any(function is not None for function in given.values()):
        raise ArgumentError("hook needs a function: forward=, forward_pre=, backward= or backward_pre=")
    for kind, function in given.items():
        if function is not None and not callable(function):
            raise ArgumentError(f"{kind} is a function, not {what(function)}")
    args = HookArgs(forward, forward_pre, backward, backward_pre, prepend, with_kwargs, always_call)
    return add(schedule, target, hook_at, args)


def hook_at(site: Site[nn.Module], args: HookArgs) -> nn.Module:
    """Lower one `hook` entry at one place."""
    module, prepend, with_kwargs = site.module, args.prepend, args.with_kwargs
    if args.forward_pre is not None:
        module.register_forward_pre_hook(args.forward_pre, prepend=prepend, with_kwargs=with_kwargs)
    if args.forward is not None:
        module.register_forward_hook(
            args.forward, prepend=prepend, with_kwargs=with_kwargs, always_call=args.always_call
        )
    if args.backward_pre is not None:
        module.register_full_backward_pre_hook(args.backward_pre, prepend=prepend)
    if args.backward is not None:
        module.register_full_backward_hook(args.backward, prepend=prepend)
    return module
