"""Trace a forward by `torch.export`, from an example of its arguments, where symbolic tracing does not get through.

Its graph is of ATen operators, holds for any sizes that the export found free, and checks at each call what it took for
granted: which arguments are None, how they are nested, which sizes are fixed.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's graphs and pytree have no types.

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from .._fork import Fork
from .._text import short
from ..errors import TraceError
from .program import Helper, Program, new_graph
from .values import fixed


class Flatten(Helper):
    """Gives the leaves of the arguments, if they are what those of the example were: tensors of as many dimensions and of
    the same dtype, and else the same values, None among them.
    """

    def __call__(self, given: dict[str, Any]) -> list[Any]:
        leaves, spec = pytree.tree_flatten(given)
        wanted, kinds = self.held
        if spec != wanted or any(_kind(leaf) != kind for leaf, kind in zip(leaves, kinds, strict=True)):
            raise TraceError(
                f"this forward was traced from the example {_told(pytree.tree_unflatten(kinds, wanted))}, and is called with "
                f"{_told(pytree.tree_map(_kind, given))}: give an example of such a call"
            )
        return leaves


class Sized(NamedTuple):
    """What a traced forward takes for granted of a tensor."""

    dims: int
    dtype: torch.dtype


class Unflatten(Helper):
    """Nests the results as the forward did."""

    def __call__(self, leaves: tuple[Any, ...]) -> Any:
        return pytree.tree_unflatten(leaves, self.held)


class Check(Helper):
    """Checks the sizes that the export took for granted, which it says as Python expressions over the arguments."""

    def __call__(self, given: dict[str, Any]) -> None:
        for guard in self.held:
            if not eval(guard, {**SYMPY_INTERP, "torch": torch, "L": {"given": given}}):
                raise TraceError(f"this forward was traced from an example, and is called with other sizes: {guard}")


class _Called(nn.Module):
    """A module called with keywords that are one argument: an export takes no ``**kwargs`` apart."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: dict[str, Any]) -> Any:
        return self.inner(**given)


def _kind(leaf: Any) -> Any:
    return Sized(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _told(kinds: Any) -> str:
    return ", ".join(f"{name}={short(kind)}" for name, kind in kinds.items())


def _sizes(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else short(value)


def refuse_more(given: Mapping[str, Any]) -> None:
    """Refuse keywords that the example did not have."""
    if given:
        raise TraceError(f"this forward was traced from an example without {', '.join(given)}")


def export_forward(module: nn.Module, path: str, example: Example, settings: Any) -> Program:
    """The program of a module's forward, traced from an example of its arguments.

    Raises:
        TraceError: The export does not get through, either.
    """
    graphs: list[fx.Graph] = []
    for training in (True, False):
        root = Fork(module).root.train(training)
        try:
            graphs.append(_graph(root, example))
        except Exception as error:
            said = str(error).strip().split("\n")[0]
            raise TraceError(
                f"{path or 'the root'} ({type(module).__name__}) cannot be exported: {type(error).__name__}: {said}",
                [path],
            ) from error
    same = str(graphs[0].python_code("self").src) == str(graphs[1].python_code("self").src)
    return Program(tuple(graphs[:1] if same else graphs), (), settings)


class Example:
    """Arguments of a model, by which forwards in it are traced; a value of its own, for tensors do not compare."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, dict(kwargs)

    def __repr__(self) -> str:
        return (
            f"({', '.join([*map(_sizes, self.args), *(f'{key}={_sizes(one)}' for key, one in self.kwargs.items())])})"
        )


def example_of(given: Any) -> Example | None:
    """An example as a user gives it: a tuple of positional arguments, a dict of keywords, a tuple of both, or a value."""
    if given is None or isinstance(given, Example):
        return given
    if isinstance(given, Mapping):
        return Example((), given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return Example(*given)
    return Example(given if isinstance(given, tuple) else (given,), {})


def called_with(root: nn.Module, module: nn.Module, path: str, example: Example) -> Example:
    """What a module is first called with when the model runs on an example.

    Raises:
        TraceError: It is not called.
    """

    class Stop(BaseException):
        pass

    found: list[Example] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Example(args, kwargs))
        raise Stop

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            root(*example.args, **example.kwargs)
    except Stop:
        return found[0]
    finally:
        handle.remove()
    raise TraceError(f"{path or 'the root'} is not called when the model runs on the example", [path])


def _graph(root: nn.Module, example: Example) -> fx.Graph:
    signature = inspect.signature(root.forward)
    bound = signature.bind(*example.args, **example.kwargs).arguments
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    extra = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
    if any(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for kind in kinds.values()):
        raise TraceError("its forward takes *args or positional-only arguments")
    given = {name: value for name, value in bound.items() if name not in extra}
    given.update({key: value for name in extra for key, value in bound.get(name, {}).items()})
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, Tensor):
            shapes[leaf] = dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)
    with _quiet():
        exported = torch.export.export(_Called(root), (given,), dynamic_shapes=shapes, strict=False)
    return _rewritten(exported.module(check_guards=False).graph, exported._guards_code, signature, given)


def _rewritten(exported: Any, guards: list[str], signature: inspect.Signature, given: Mapping[str, Any]) -> fx.Graph:
    """The exported graph with the forward's own arguments, and without attributes that only the export's module has."""
    graph, known = new_graph(), dict[fx.Node, fx.Node]()
    arguments: dict[str, fx.Node] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            default = () if parameter.default is parameter.empty else (parameter.default,)
            arguments[name] = graph.create_node("placeholder", name, default)
    arguments.update({name: graph.create_node("placeholder", name, (None,)) for name in given if name not in arguments})
    rest = [name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD]
    for name in rest:
        graph.call_function(refuse_more, (graph.placeholder("**" + name),))
    for name, node in arguments.items():
        if name not in given:
            graph.call_function(fixed, (node, signature.parameters[name].default, name))
    values, spec = pytree.tree_flatten(dict(given))
    flatten: Any = Flatten((spec, tuple(map(_kind, values))))
    check: Any = Check(tuple(guards))
    together = {name: arguments[name] for name in given}
    leaves = graph.call_function(flatten, (together,))
    if guards:
        graph.call_function(check, (together,))
    count = 0
    for node in exported.nodes:
        if node.op == "placeholder":
            known[node] = graph.call_function(getitem, (leaves, count))
            count += 1
        elif node.op == "output":
            unflatten: Any = Unflatten(exported._codegen.pytree_info.out_spec)
            results = fx.map_arg(node.args[0], known.__getitem__)
            graph.output(graph.call_function(unflatten, (results,)))
        else:
            known[node] = made = graph.node_copy(node, known.__getitem__)
            made.meta.clear()  # the export's own tensors
            if node.op == "get_attr":
                made.target = str(node.target).removeprefix("inner.")
    return graph


@contextmanager
def _quiet() -> Generator[None]:
    """Sizes of 1 in the example are fixed, and said to be at each call that has others; the export need not warn of it."""
    logger = logging.getLogger("torch._export.non_strict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
