"""A traced forward: graphs that are never written to, and the Python function that each of them stands for.

graph: x -> c_fc -> gelu -> c_proj   ->   def forward(self, x): …
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's graphs and torch's operators have no types.

from __future__ import annotations

import itertools
import linecache
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

Run = Callable[..., Any]
_made: WeakValueDictionary[tuple[str, tuple[tuple[str, int], ...]], Run] = WeakValueDictionary()
_numbers = itertools.count()


class Program:
    """One module's forward as a graph; as two where it asks, in a condition, whether it is in training.

    Graphs are in `torch.fx`'s form; their targets (``c_fc``, ``c_fc.weight``, ``training``) are looked up on the module
    at each call. A program is a value: whoever changes a graph makes a new program of a copy.

    Attributes:
        graphs: One graph; or one for training, and one for evaluation.
        inlined: Paths of the modules whose code was drawn into the graph.
        settings: How it was traced.
        constants: Tensors that the forward took from elsewhere, by the names of the buffers that they become.
    """

    graphs: tuple[fx.Graph, ...]
    inlined: tuple[str, ...]
    settings: Any
    constants: tuple[tuple[str, Tensor], ...]

    def __init__(
        self,
        graphs: tuple[fx.Graph, ...],
        inlined: tuple[str, ...] = (),
        settings: Any = None,
        constants: tuple[tuple[str, Tensor], ...] = (),
    ) -> None:
        self.graphs = graphs
        self.made: tuple[Run, ...] | None = None
        self.constants = constants
        self.inlined = inlined
        self.settings = settings

    @property
    def functions(self) -> tuple[Run, ...]:
        """The graphs' functions, made when they are first asked for."""
        if self.made is None:
            self.made = tuple(map(compiled, self.graphs))
        return self.made

    def function(self, training: bool) -> Run:
        """The function for a mode: the first graph's, but for evaluation where there are two."""
        return self.functions[0 if training else -1]

    def with_graphs(self, graphs: tuple[fx.Graph, ...]) -> Program:
        """The same program with other graphs."""
        return Program(graphs, self.inlined, self.settings, self.constants)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (tuple(map(_rows, self.graphs)), self.inlined, self.settings, self.constants)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __eq__(self, other: object) -> bool:
        mine = self.functions, self.inlined, self.settings  # equal graphs have the very same function
        return isinstance(other, Program) and mine == (other.functions, other.inlined, other.settings)

    def __hash__(self) -> int:
        return hash((self.functions, self.inlined))

    def __repr__(self) -> str:
        return "\n\n".join(source(graph) for graph in self.graphs)


class Graphed:
    """What runs a program: it gives the function of its graph, bound to what that looks its names up on."""

    def run(self) -> types.MethodType:
        """The function for the mode that the module is in."""
        raise NotImplementedError


class Helper:
    """A callable that a graph calls and that is no function; it has the name that the graph's code gives it."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.__name__ = type(self).__name__.lower()
        self.__module__ = __name__


class Called(Helper):
    """Any callable that has no name of its own: a partial, say."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


def callable_by_name(function: Run, name: str) -> Run:
    """A function that a graph can call: one with a name that can stand in code."""
    if isinstance(function, types.FunctionType) and not function.__name__.isidentifier():
        made = types.FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made
    return function if hasattr(function, "__name__") else Called(function)


class Operator:
    """An ATen operator by its name, since torch cannot pickle one."""

    def __init__(self, operator: OpOverload) -> None:
        space, _, name = operator._schema.name.partition("::")
        self.name = space, name, operator._overloadname

    def found(self) -> OpOverload:
        """The operator itself."""
        space, name, overload = self.name
        found: OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload)
        return found


class Ref:
    """A node by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


Row = tuple[str, str, Any, Any, Any]


def _rows(graph: fx.Graph) -> list[Row]:
    """A graph as plain values: torch can pickle neither operators nor what a graph remembers of them."""
    rows: list[Row] = []
    for node in graph.nodes:
        target = Operator(node.target) if isinstance(node.target, OpOverload) else node.target
        args, kwargs = _mapped((node.args, node.kwargs), lambda one: Ref(one.name) if isinstance(one, fx.Node) else one)
        rows.append((node.op, node.name, target, args, kwargs))
    return rows


def _node(known: Mapping[str, fx.Node], value: Any) -> Any:
    return known[value.name] if isinstance(value, Ref) else value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return map_aggregate(value, change)


def _unpickled(
    each: tuple[list[Row], ...], inlined: tuple[str, ...], settings: Any, constants: tuple[tuple[str, Tensor], ...]
) -> Program:
    graphs: list[fx.Graph] = []
    for rows in each:
        graph, known = new_graph(), dict[str, fx.Node]()
        for op, name, target, args, kwargs in rows:
            found = target.found() if isinstance(target, Operator) else target
            given, keywords = _mapped((args, kwargs), partial(_node, known))
            known[name] = graph.create_node(op, found, given, keywords, name)
        graphs.append(graph)
    return Program(tuple(graphs), inlined, settings, constants)


def source(graph: fx.Graph) -> str:
    """A graph as Python.

    Example:
        >>> from torch import fx
        >>> print(source(fx.symbolic_trace(lambda x: x + 1).graph))
        def forward(self, x):
            add = x + 1;  x = None
            return add
    """
    return str(graph.python_code("self").src).strip()


def compiled(graph: fx.Graph) -> Run:
    """The function that a graph stands for. Equal graphs give one function, so that equal blocks compile once."""
    code = graph.python_code("self")
    text, held = str(code.src).strip() + "\n", code.globals
    key = text, tuple(sorted((name, id(value)) for name, value in held.items()))
    made = _made.get(key)
    if made is None:
        name = f"<slapo_fn trace {next(_numbers)}>"
        space = dict(held)
        exec(compile(text, name, "exec"), space)  # the text that fx wrote from the graph
        made = _made[key] = space["forward"]  # it keeps alive what the key's numbers belong to
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # for tracebacks and debuggers
        finalize(made, linecache.cache.pop, name, None)
    return made


def new_graph() -> fx.Graph:
    """A graph in whose code no value is called ``self``, which is the module's name there."""
    graph = fx.Graph()
    graph._graph_namespace.create_name("self", None)
    return graph


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph to be edited, and which node of it each of the old ones is."""
    made = new_graph()
    known: dict[fx.Node, fx.Node] = {}
    output = made.graph_copy(graph, known)
    last = next(reversed(graph.nodes))
    known[last] = made.output(output, last.type)
    made._codegen = graph._codegen
    return made, known
