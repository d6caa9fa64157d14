"""From a module to its program, or to an error that says why there is none."""

from __future__ import annotations

import torch
from torch import nn

from .._fork import Fork
from .._forward import Forward
from .._text import what
from ..errors import ArgumentError, TraceError
from .program import Program
from .traced import program_of
from .tracer import AsksMode, ForwardTracer, Settings
from .watch import Refusal, Watch, located


def trace_forward(module: nn.Module, path: str, settings: Settings) -> Program:
    """The program of a module's forward. The module stays as it is: a copy of it is traced.

    Args:
        module: The module.
        path: Its path, for messages.
        settings: How.

    Raises:
        TraceError: A graph would not be the same as the forward; the message says where and what to do.
    """
    own = vars(module).get("forward")
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise _error(module, path, Refusal("it", "is scripted."))
    if own is not None and not isinstance(own, Forward):
        raise _error(module, path, Refusal("it", "has a forward of its own, set on the instance."))
    if kind.__getattr__ is not nn.Module.__getattr__ or kind.__call__ is not nn.Module.__call__:
        raise _error(module, path, Refusal("its class", "has a __getattr__ or __call__ of its own."))
    try:
        made = [_traced(module, path, settings, None)]
    except AsksMode:
        made = [_traced(module, path, settings, mode) for mode in (True, False)]
    inlined = dict.fromkeys(name for tracer in made for name in tracer.inlined)
    constants = dict(one for tracer in made for one in tracer.constants())
    return Program(tuple(tracer.graph for tracer in made), tuple(inlined), settings, tuple(constants.items()))


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no code to be traced: one of torch's own layers, or a mere container."""
    kind = type(module)
    own = kind.__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    return (own or kind.forward is nn.Module.forward) and program_of(module) is None


def graph_of(module: nn.Module) -> Program:
    """The graph that a module's forward was turned into: ``print`` shows it as Python.

    Args:
        module: A module that `trace`, or an entry with a pattern, has worked on; or any other, whose forward is traced now.

    Raises:
        TraceError: It cannot be traced.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> len(slapo.graph_of(nn.Sequential(nn.ReLU())).graphs[0].nodes)
        3
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"graph_of takes a module, not {what(module)}")
    return program_or_trace(module, "", Settings())


def program_or_trace(module: nn.Module, path: str, settings: Settings) -> Program:
    """The program that a module runs already, or that of its forward."""
    return program_of(module) or trace_forward(module, path, settings)


def _traced(module: nn.Module, path: str, settings: Settings, mode: bool | None) -> ForwardTracer:
    root = Fork(module).root
    known = program_of(root)
    vars(root).pop("forward", None)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        tracer = ForwardTracer(root, settings, mode, known)
    if settings.tracer is not None:
        try:
            tracer.graph = settings.tracer().trace(root, dict(settings.constants) or None)
        except Exception as error:
            raise _error(module, path, located(error)) from error
        return tracer
    watch = Watch(tracer)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), watch:
            tracer.trace(root)
    except Exception as error:
        raise _error(module, path, watch.refusal or tracer.refused or located(error)) from error
    if refused := watch.refusal or tracer.refused or tracer.written():
        raise _error(module, path, refused)
    tracer.finish()
    return tracer


def _error(module: nn.Module, path: str, refused: Refusal) -> TraceError:
    return TraceError(
        f"{path or 'the root'} ({type(module).__name__}) cannot be traced: {refused.place} {refused.reason}\nWays out: "
        f"{refused.way_out or 'select a module further inside'}; give an example of the arguments, "
        "trace(sch, target, example=(…)), and torch.export traces that call; or replace the whole module.",
        [path],
    )
