"""A traced forward: graphs that are never written to, and the Python function that each of them stands for.

graph: x -> c_fc -> gelu -> c_proj   ->   def forward(self, x): …
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

Run = Callable[..., Any]
_made: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[Run, dict[str, Any]]] = {}


class Program:
    """One module's forward as a graph; as two where it asks, in a condition, whether it is in training.

    Graphs are in `torch.fx`'s form; their targets (``c_fc``, ``c_fc.weight``, ``training``) are looked up on the module
    at each call. A program is a value: whoever changes a graph makes a new program of a copy.

    Attributes:
        graphs: One graph; or one for training, and one for evaluation.
        inlined: Paths of the modules whose code was drawn into the graph.
        settings: How it was traced.
    """

    def __init__(self, graphs: tuple[fx.Graph, ...], inlined: tuple[str, ...] = (), settings: Any = None) -> None:
        self.graphs = graphs
        self.inlined = inlined
        self.settings = settings
        self.functions = tuple(map(compiled, graphs))

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.graphs, self.inlined, self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __str__(self) -> str:
        return "\n\n".join(source(graph) for graph in self.graphs)


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
    if key not in _made:  # what the key's numbers belong to is kept, so that none is used twice
        name = f"<slapo_fn trace {len(_made)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space = dict(held)
        exec(compile(text, name, "exec"), space)  # noqa: S102  the text that fx wrote from the graph
        made = space["forward"]
        assert isinstance(made, types.FunctionType)
        _made[key] = made, held
    return _made[key][0]


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph to be edited, and which node of it each of the old ones is."""
    made = fx.Graph(tracer_cls=graph._tracer_cls)
    known: dict[fx.Node, fx.Node] = {}
    output = made.graph_copy(graph, known)
    last = next(reversed(graph.nodes))
    known[last] = made.output(output, last.type)
    made._codegen = graph._codegen
    return made, known


def called(graph: fx.Graph) -> Iterator[str]:
    """The dotted names that a graph looks up on its module: of modules that it calls, of tensors, of flags."""
    return (str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
