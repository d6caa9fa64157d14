"""checkpoint: recompute a module's activations in the backward pass instead of keeping them.

y = block(x)   ->   y = torch.utils.checkpoint.checkpoint(block, x)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # pyright: ignore[reportUnknownVariableType]
from torch.utils.checkpoint import noop_context_fn
from typing_extensions import NamedTuple

from .._forward import Forward, wrap
from .._replay import Replay, is_cache, running_norms
from .._rules import Site
from ..errors import ArgumentError
from ..schedule import Phase, Schedule, add, traits
from ..selection import M, Target

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointArgs(NamedTuple):
    """What `checkpoint` was given; see there."""

    use_reentrant: bool = False
    preserve_rng_state: bool = True
    context_fn: Contexts = noop_context_fn
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False
    early_stop: bool = True


def checkpoint(
    schedule: Schedule,
    target: Target[M],
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Contexts = noop_context_fn,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> Schedule:
    """Recompute the activations of each selected module in the backward pass instead of keeping them.

    Outputs and gradients are the plain module's, dropout included; names, class and signature stay. With gradients
    switched off the plain forward runs. A key-value cache among the arguments, and the running statistics of batch
    norms, are written once, not again in the recomputation. Weights are read again then: with
    `torch.func.functional_call`, whose exchange ends with the forward, take the gradients inside it.

    Args:
        schedule: The schedule so far.
        target: The modules to checkpoint.
        use_reentrant: As in `torch.utils.checkpoint.checkpoint`, and so are the others.
        preserve_rng_state: Whether the recomputation draws the same random numbers.
        context_fn: Gives two context managers, for the forward and for its recomputation (selective checkpointing).
        determinism_check: Whether the recomputation's tensors are compared with the forward's by shape and dtype.
        debug: Whether an error shows the operators that ran.
        early_stop: Whether the recomputation stops at the last tensor that is needed.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind, or ``use_reentrant`` is combined with what needs it off.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> lean = slapo.apply(net, slapo.checkpoint(slapo.Schedule(), "0"))
        >>> torch.equal(lean(torch.ones(1, 2)), net(torch.ones(1, 2)))
        True
    """
    if determinism_check not in ("default", "none"):
        raise ArgumentError(f"determinism_check is 'default' or 'none', not {determinism_check!r}")
    if use_reentrant and (context_fn is not noop_context_fn or debug):
        raise ArgumentError("use_reentrant=True takes neither context_fn nor debug; leave it at False for these")
    args = CheckpointArgs(use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop)
    return add(schedule, target, checkpoint_at, args)


@traits(Phase.CHECKPOINT, overrides=lambda earlier, later: True)
def checkpoint_at(site: Site[nn.Module], args: CheckpointArgs) -> nn.Module:
    """Lower one `checkpoint` entry at one place."""
    wrap(site.module, Checkpointed(site.module, args))
    return site.module


class Checkpointed(Forward):
    """The layer around a checkpointed module's forward."""

    rank: ClassVar[int] = Phase.CHECKPOINT

    args: CheckpointArgs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call(*args, **kwargs)
        run: Callable[..., Any] = self.call
        if not torch.compiler.is_compiling():
            norms = running_norms(self.module) if self.module.training else ()
            if norms or any(map(is_cache, (*args, *kwargs.values()))):
                run = Replay(run, norms)
        return self._reentrant(run, args, kwargs) if self.args.use_reentrant else self._plain(run, args, kwargs)

    def _plain(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run_with_keywords(*inner: Any) -> Any:
            return run(*inner, **kwargs)

        settings = self.args
        contexts = {} if settings.context_fn is noop_context_fn else {"context_fn": settings.context_fn}
        return torch_checkpoint(  # pyright: ignore[reportUnknownVariableType]
            run_with_keywords if kwargs else run,  # given apart, for torch's own function has keywords of some names
            *args,
            use_reentrant=False,
            preserve_rng_state=settings.preserve_rng_state,
            determinism_check=settings.determinism_check,
            debug=settings.debug,
            early_stop=settings.early_stop,
            **contexts,  # dynamo does not take the default one when it is spelled out
        )

    def _reentrant(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It takes no keywords, and sees gradients of positional tensors only.
        names, count = tuple(kwargs), len(args)

        def run_flat(*flat: Any) -> Any:
            return run(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

        return torch_checkpoint(  # pyright: ignore[reportUnknownVariableType]
            run_flat, *args, *kwargs.values(), use_reentrant=True, preserve_rng_state=self.args.preserve_rng_state
        )
