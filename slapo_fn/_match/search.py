"""Look for a pattern in a graph.

First every operation of the pattern gets the set of nodes that it could be, by what they compute, by their constants and by
the sets of its operands; then, from each node that could be the pattern's last operation, the values are bound. So a constant
that differs ends the search before anything is bound, and what an operand could be is never worked out twice. Where operands
can be commuted in two ways, whatever is certain is bound first, which in most cases leaves one way.

`torch.fx.passes.utils.matcher_utils.SubgraphMatcher` compares call targets as they are: it knows no two spellings of one
operation, commutes nothing, takes no hole for a constant and matches no module against a function.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .._find import find
from .._glob import parse
from .._rules import fits
from .calls import Attr, called_with, same
from .index import Index
from .reading import FLAG, Free, Input, PatternGraph, Ref, Step, Weight, Whatever


class Search:
    """One pattern in one graph.

    Attributes:
        could: For each step of the pattern the nodes that it could be, as far as its operands say.
        compared: How many times a step was compared with a node.
    """

    def __init__(self, pattern: PatternGraph, index: Index) -> None:
        self.pattern, self.index = pattern, index
        self.could: list[dict[fx.Node, None]] = []
        self.compared = 0
        for step in pattern.steps:
            self.could.append({node: None for node in self.candidates(step) if self.accepts(step, node)})
            if not self.could[-1]:
                return

    def candidates(self, step: Step) -> list[fx.Node]:
        """The nodes that compute what a step does, if their arguments are the right ones."""
        if step.which is None:
            return self.index.named.get(step.key, [])
        called = self.index.modules
        if isinstance(step.which, str):
            wanted = {id(module) for _, module in find(self.index.owner, parse(step.which))}
            return [node for node, module in called.items() if id(module) in wanted]
        return [node for node, module in called.items() if fits(module, step.which, False)]

    def anchors(self) -> list[fx.Node]:
        """The nodes that could be the pattern's first output that nothing else in it uses."""
        return [*self.could[self.pattern.sinks[0]]] if len(self.could) == len(self.pattern.steps) else []

    # ---- what a step or a value could be, whatever is bound

    def accepts(self, step: Step, node: fx.Node) -> bool:
        """Whether a node could be a step, as far as its operands say."""
        self.compared += 1
        if not (step.output or step.cheap) and self.index.users(node) != step.users:
            return False
        wanted, given = self.pair(step, node)
        if len(wanted) != len(given):
            return False
        return all(map(self.fits, wanted, given)) or (
            step.swaps is not None and all(map(self.fits, wanted, crossed(step.swaps, given)))
        )

    def ways(self, step: Step, node: fx.Node) -> list[tuple[Any, Any]]:
        """A step's arguments beside a node's, and once more with two of them exchanged."""
        wanted, given = self.pair(step, node)
        if len(wanted) != len(given):
            return []
        return [(wanted, given)] if step.swaps is None else [(wanted, given), (wanted, crossed(step.swaps, given))]

    def pair(self, step: Step, node: fx.Node) -> tuple[Any, Any]:
        """A step's arguments beside a node's."""
        wanted, given = step.args, self.index.args(node)
        if step.which is not None:
            kind: Any = type(self.index.modules[node])
            bind = called_with(kind)
            args, kwargs = wanted
            wanted = bind(args, dict(kwargs))
            raw = self.index.raw(node)
            given = bind(*raw)
            if wanted is None or given is None:
                wanted, given = args + tuple(kwargs), (*raw[0], *sorted(raw[1].items()))
        return wanted, given

    def fits(self, wanted: Any, given: Any) -> bool:
        """Whether a value could be an argument."""
        kind: Any = type(wanted)
        if kind is Ref:
            return type(given) is fx.Node and given in self.could[wanted.number]
        if kind is Input:
            return type(given) in (fx.Node, int, float, complex) or (type(given) is Attr and not given.is_flag)
        if kind is tuple:
            return type(given) is tuple and len(wanted) == len(given) and all(map(self.fits, wanted, given))
        if kind is Free:
            return _constant(given)
        if kind is Whatever:
            return wanted is not FLAG or (type(given) is Attr and given.is_flag)
        if type(given) is Attr and (kind is Weight or isinstance(wanted, Tensor)):
            tensor = self.index.tensor(given.name)
            if tensor is None or kind is not Weight:
                return tensor is not None and same(wanted, tensor)
            return bool(tuple(tensor.shape) == wanted.shape)
        return type(given) is not fx.Node and kind is not Weight and same(wanted, given)


def crossed(swaps: tuple[int, int], given: Any) -> Any:
    """Some arguments with two of them exchanged."""
    first, second = swaps
    made = list(given)
    made[first], made[second] = given[second], given[first]
    return tuple(made)


def _constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_constant, value))
    return type(value) is not fx.Node and (type(value) is not Attr or value.is_flag)
