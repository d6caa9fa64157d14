"""A pattern as it is written: an ordinary function of tensors, or a module, traced."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError

from .._text import short, what
from ..errors import PatternError


def call_module(which: str | type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """In a pattern: a call of a module of the forward that is looked into.

    Args:
        which: The module's path from the traced one, with holes as in `select`; or its class.
        args: What it is called with.
        kwargs: What it is called with by name.

    Raises:
        PatternError: It was called outside of a pattern.

    Example:
        >>> import slapo_fn as slapo
        >>> heads = slapo.pattern(lambda x: slapo.call_module("{q,k,v}_proj", x).view(1, 2, 4, 8))
    """
    found: list[fx.Proxy] = []

    def look(value: Any) -> None:
        if isinstance(value, fx.Proxy):
            found.append(value)

    map_aggregate((args, kwargs), look)
    if not found or not isinstance(found[0].tracer, Tracer):
        raise PatternError(
            "call_module stands for a call only in the function that is given to pattern(…), on the function's own "
            f"inputs; here it was called with {', '.join(map(what, args)) or 'nothing'}"
        )
    if not isinstance(which, str) and not (isinstance(which, type) and issubclass(which, nn.Module)):
        raise PatternError(f"call_module takes a path, with holes, or a module class, not {what(which)}")
    tracer = found[0].tracer
    tracer.which.append(which)  # a class cannot stand in a graph
    return tracer.create_proxy("call_function", call_module, (len(tracer.which) - 1, *args), kwargs)


class Tracer(fx.Tracer):
    """Traces a pattern, and lets it call modules that hang nowhere."""

    def __init__(self, args: list[str], names: list[str], is_module: bool) -> None:
        super().__init__(autowrap_modules=(math,))
        self.given, self.names, self.is_module = args, names, is_module
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.which: list[str | type[nn.Module]] = []

    def create_arg(self, a: Any) -> Any:
        """A parameter that the function only refers to is one that it holds."""
        if isinstance(a, nn.Parameter) and not self.is_module and all(a is not one for one in self.root.parameters()):
            self.root.register_parameter(f"parameter_{len(self.root._parameters)}", a)
        return super().create_arg(a)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        given = [self.create_proxy("placeholder", name, (), {}) for name in self.given]
        free = {name: self.create_proxy("placeholder", name, (), {}) for name in self.names}
        root = [self.root] if self.is_module else []

        def run(root_module: nn.Module) -> Any:
            return root_fn(*root, *given, **free)

        return run, [self.root]

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            path = super().path_of_module(mod)
        except NameError:
            known = (path for path, module in self.modules.items() if module is mod)
            path = next(known, f"{type(mod).__name__}_{len(self.modules)}")
        self.modules[path] = mod
        return path


def refused(fn: Any, why: str) -> PatternError:
    """What is wrong with a pattern, as an error."""
    return PatternError(f"the pattern {short(fn)} {why}")


def declared(fn: Callable[..., Any] | nn.Module) -> tuple[list[str], list[str]]:
    """The names of the positional and of the keyword-only parameters."""
    try:
        parameters = [*inspect.signature(type(fn).forward if isinstance(fn, nn.Module) else fn).parameters.values()]
    except (TypeError, ValueError):
        raise refused(fn, "does not say what its parameters are; wrap it: lambda x: …") from None
    positional: list[str] = []
    names: list[str] = []
    for one in parameters[isinstance(fn, nn.Module) :]:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise refused(fn, f"takes {one}; name each of its inputs")
        if one.kind == one.KEYWORD_ONLY:
            names.append(one.name)
        elif one.default is not one.empty:
            raise refused(
                fn,
                f"gives its input {one.name} a default; an input is any value. For one fixed constant, write it in the "
                f"body; for any constant, make it keyword-only: def f(…, *, {one.name})",
            )
        else:
            positional.append(one.name)
    return positional, names


def traced(fn: Callable[..., Any] | nn.Module, positional: list[str], names: list[str]) -> tuple[fx.Graph, Tracer]:
    """The trace of a pattern's function.

    Raises:
        PatternError: It branches on a value, or loops over one.
    """
    root = fn
    if not isinstance(root, nn.Module):

        def called(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        forward = fn if inspect.isfunction(fn) else called
        root = type("Pattern", (nn.Module,), {"forward": forward})()
    tracer, before = Tracer(positional, names, isinstance(fn, nn.Module)), {*vars(root)}
    try:
        graph = tracer.trace(root)
    except TraceError as error:
        raise refused(
            fn, f"cannot be traced: {error}. A pattern is straight-line code: no `if` over an input, no loop over one."
        ) from error
    finally:
        fresh = [name for name in vars(root) if name not in before and name.startswith("_tensor_constant")]
        tracer.tensors.update({name: vars(root).pop(name) for name in fresh})  # fx has put them there
    return graph, tracer


def returned(graph: fx.Graph, fn: Any) -> list[fx.Node]:
    """The operations whose values a pattern returns."""
    value = next(iter(reversed(graph.nodes))).args[0]
    outputs = [*value] if isinstance(value, (tuple, list)) else [value]
    nodes = [one for one in outputs if isinstance(one, fx.Node) and one.op not in ("placeholder", "get_attr")]
    if nodes and len(nodes) == len(outputs):
        return nodes
    if not any(node.op.startswith("call") for node in graph.nodes):
        raise refused(fn, "has no operations: it would match anywhere")
    raise refused(fn, "returns something else than values that it computes, one or a tuple of them")
