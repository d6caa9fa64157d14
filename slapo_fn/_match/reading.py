"""Read a pattern: an ordinary function of tensors, or a module, as the operations that are looked for."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .._text import short
from .calls import Form, counts, form, form_of, plain, size_item
from .written import Tracer, call_module, declared, refused, returned, traced

# ---- what a pattern's arguments may be, beside constants; each is one object of its pattern, equal to itself alone


class Ref:
    """The value of another operation of the pattern."""

    def __init__(self, number: int) -> None:
        self.number = number


class Input:
    """A positional parameter: any value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uses = 0


class Free:
    """A keyword-only parameter: any constant."""

    def __init__(self, name: str) -> None:
        self.name = name


class Weight:
    """A tensor of a module in the pattern: any tensor of the traced module that has its shape."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape


class Whatever:
    """Anything, or only a module's own ``training`` flag."""

    def __init__(self, flag: bool) -> None:
        self.flag = flag


ANYTHING, FLAG = Whatever(False), Whatever(True)
HOLES = (Ref, Input, Free, Weight, Whatever)


@dataclass(eq=False)
class Step:
    """One operation of a pattern.

    Attributes:
        number: Its place among the pattern's operations.
        node: It, in the pattern's own graph.
        key: What it computes; None for a `call_module`.
        args: Its arguments, in the order of the table.
        swaps: The places of two arguments that may change places.
        which: For a `call_module`, which modules.
        cheap: Whether it only tells about a tensor: such a step may be shared with code outside of the match.
        output: Whether it is one of the pattern's outputs.
        users: How many operations, cheap ones left out, use it.
    """

    number: int
    node: fx.Node
    key: Any
    args: tuple[Any, ...]
    swaps: tuple[int, int] | None
    which: str | type[nn.Module] | None
    cheap: bool
    output: bool = False
    users: int = 0


class PatternGraph:
    """The operations of a pattern; equal to another of the same function.

    Attributes:
        fn: What it was read from.
        steps: The operations, each after those that it uses.
        inputs: The positional parameters.
        free: The keyword-only parameters.
        outputs: Which steps the function returns.
        sinks: Which of these no other step uses.
        outside: Parameters and buffers that a function takes from outside of it; they stand for any tensor.
    """

    def __init__(self, fn: Callable[..., Any] | nn.Module) -> None:
        self.fn = fn
        positional, names = declared(fn)
        graph, tracer = traced(fn, positional, names)
        outside = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        self.outside = [] if isinstance(fn, nn.Module) else [one for one in outside if one not in tracer.tensors]
        self.inputs = tuple(Input(name) for name in positional)
        self.free = tuple(Free(name) for name in names)
        results = returned(graph, fn)
        self.steps: list[Step] = []
        reader = _Reader(self, graph, tracer, results)
        self.outputs = tuple(reader.known[node].number for node in results)
        for number in self.outputs:
            self.steps[number].output = True
        used = {ref.number for step in self.steps for ref in holes(step.args) if isinstance(ref, Ref)}
        self.refs: list[Ref] = [reader.known[step.node] for step in self.steps]
        self.sinks = tuple(n for n in dict.fromkeys(self.outputs) if n not in used)
        _check(self)
        self.paths = _paths(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatternGraph) and self.fn is other.fn

    def __hash__(self) -> int:
        return hash((PatternGraph, id(self.fn)))

    def __reduce__(self) -> tuple[Any, ...]:
        return read_pattern, (self.fn,)

    def __repr__(self) -> str:
        return f"PatternGraph({short(self.fn)}, {len(self.steps)} operations)"


def read_pattern(fn: Callable[..., Any] | nn.Module) -> PatternGraph:
    """Read a pattern.

    Args:
        fn: A function of tensors. Its positional parameters stand for any values, its keyword-only ones for any constants.
            Or a module: its forward is the function; its children are compared by class and config, not by weights.

    Raises:
        PatternError: The function has no operations, or has parameters with defaults, or cannot be traced.
    """
    return PatternGraph(fn)


def holes(value: Any) -> list[Any]:
    """All that is not a constant in an argument."""
    if type(value) is tuple:
        return [hole for one in value for hole in holes(one)]
    return [value] if isinstance(value, HOLES) else []


class _Reader:
    """Makes steps of a traced function's nodes; what no output needs is left out."""

    def __init__(self, pattern: PatternGraph, graph: fx.Graph, tracer: Tracer, results: list[fx.Node]) -> None:
        self.pattern, self.tracer = pattern, tracer
        self.known: dict[fx.Node, Any] = {}
        self.weights: dict[str, Any] = {}
        wanted = set(results)
        for node in reversed(graph.nodes):
            if node in wanted:
                wanted.update(node.args[0].all_input_nodes if size_item(node) else node.all_input_nodes)
        parameters = iter((*pattern.inputs, *pattern.free))
        for node in graph.nodes:
            if node.op == "placeholder":
                self.known[node] = next(parameters)
            elif node.op == "get_attr":
                path = str(node.target)
                constant = tracer.tensors.get(path)
                held = operator.attrgetter(path)(tracer.root) if constant is None else None
                self.known[node] = constant if constant is not None else self.leaf(path, held)
            elif node in wanted and node.op != "output":
                self._step(node)

    def leaf(self, path: str, value: Any) -> Any:
        """What stands for a tensor, or for a ``training`` flag, of the pattern."""
        if not isinstance(value, torch.Tensor):
            return FLAG
        return self.weights.setdefault(path, Weight(path, tuple(value.shape)))

    def _step(self, node: fx.Node) -> None:
        written = (node.args[0].args[0], node.args[1]) if size_item(node) else node.args  # type: ignore[union-attr]
        args, kwargs = plain(written, self._arg), {name: plain(one, self._arg) for name, one in node.kwargs.items()}
        steps, which = self.pattern.steps, None
        operands = [one for one in holes((args, tuple(kwargs.values()))) if isinstance(one, (Ref, Input, Weight))]
        if not operands:
            raise refused(
                self.pattern.fn, f"computes {node.name} of constants alone; compute it before, or name the result"
            )
        if node.target is call_module:
            at, *args = args
            which = self.tracer.which[at]
            step = Step(len(steps), node, None, (tuple(args), tuple(sorted(kwargs.items()))), None, which, False)
        else:
            read, values = self._read(node, args, kwargs)
            cheap = read.op.cheap if read.op else False
            refs = [steps[one.number] for one in operands if isinstance(one, Ref)]
            cheap = cheap or (counts(node) and len(refs) == len(operands) and all(one.cheap for one in refs))
            step = Step(len(steps), node, read.key, values, swaps(read, values), None, cheap)
        for one in {*holes(step.args)}:
            if isinstance(one, Ref) and not step.cheap:
                steps[one.number].users += 1
        self.known[node] = Ref(len(steps))
        steps.append(step)

    def _arg(self, node: fx.Node) -> Any:
        return self.known[node]

    def _read(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Form, Any]:
        if size_item(node):
            return form("call_method", "size"), args
        if node.target is getattr:
            read = form("attribute", args[1])
            return read, read.read(args[:1], {}, None, self.leaf)
        module = self.tracer.modules[str(node.target)] if node.op == "call_module" else None
        read = form_of(module) if module is not None else form(node.op, node.target)
        values = read.read(args, kwargs, module, lambda name, value: self.leaf(f"{node.target}.{name}", value))
        if read.spelling is not None and module is None and "training" in read.spelling.op.parameters:
            at = read.spelling.op.parameters.index("training")
            if (
                len(values) > at
                and isinstance(values[at], bool)
                and (self.tracer.is_module or values[at] is read.spelling.start[at])
            ):
                values = (*values[:at], ANYTHING, *values[at + 1 :])
        return read, values


def swaps(read: Form, values: tuple[Any, ...]) -> tuple[int, int] | None:
    """Which two arguments of a call may change places; ``a + 2 * b`` is not ``b + 2 * a``."""
    if read.op is None or read.op.swaps is None:
        return None
    return read.op.swaps if "alpha" not in read.op.parameters or values[-1] == 1 else None


def _check(pattern: PatternGraph) -> None:
    used = {hole for step in pattern.steps for hole in holes(step.args)}
    parameters: tuple[Input | Free, ...] = (*pattern.inputs, *pattern.free)
    for hole in parameters:
        if hole not in used:
            raise refused(pattern.fn, f"does not use its parameter {hole.name}, so nothing says what it would be")
    for step in pattern.steps:
        for hole in holes(step.args):
            if isinstance(hole, Input):
                hole.uses += 1


def _paths(pattern: PatternGraph) -> list[list[Any]]:
    """How each further sink is reached: from a hole or step that the sinks before have bound, over its users."""
    left = list(pattern.sinks[1:])
    bound = _cone(pattern, pattern.sinks[0])
    found: list[list[Any]] = []
    while left:
        path = next((path for sink in left if (path := _path(pattern, sink, bound))), None)
        if path is None:
            raise refused(
                pattern.fn, "is two patterns side by side: its outputs share neither an input nor an operation"
            )
        found.append(path)
        left.remove(path[-1])
        bound |= _cone(pattern, path[-1])
    return found


def _operands(pattern: PatternGraph, number: int) -> list[Any]:
    """The steps, by number, and the inputs that a step uses."""
    found = [one for one in holes(pattern.steps[number].args) if isinstance(one, (Ref, Input))]
    return [one.number if isinstance(one, Ref) else one for one in found]


def _cone(pattern: PatternGraph, number: int) -> set[Any]:
    found: set[Any] = set()
    todo: list[Any] = [number]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += _operands(pattern, one) if isinstance(one, int) else []
    return found


def _path(pattern: PatternGraph, sink: int, bound: set[Any]) -> list[Any] | None:
    paths: list[list[Any]] = [[sink]]
    for path in paths:  # breadth first
        if path[0] in bound:
            return path
        paths += [[one, *path] for one in _operands(pattern, path[0])] if isinstance(path[0], int) else []
        if len(paths) > 10_000:
            break
    return None
