"""Find places inside a forward: where a pattern matches, or single operations by what they call.

Matches do not overlap. They are taken in the order of their first operations, reads of sizes left aside; one that overlaps an
earlier one is bound anew without its nodes, and told about if that fails. What is matched can be replaced by one call: nothing
outside uses a value of it but its outputs, no value of it comes back into it through the outside, and nothing outside writes into
a tensor in between. Reads of a size, a dtype or a device are no part of that: they may be shared with code outside, and are taken
along where nothing else uses them.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx, nn

from .binding import Binding
from .calls import Attr
from .index import Index
from .nearest import explain
from .reading import PatternGraph as PatternGraph
from .reading import read_pattern as read_pattern
from .search import Search
from .written import call_module as call_module

CALLS = ("call_function", "call_method", "call_module")


class Operand(NamedTuple):
    """What a pattern's input stands for: one of three.

    Attributes:
        node: The node whose value it is.
        attribute: The path of the traced module's tensor, where a module is called that has it; or of a ``training`` flag.
        value: A constant.
    """

    node: fx.Node | None = None
    attribute: str | None = None
    value: Any = None


class Match(NamedTuple):
    """One place.

    Attributes:
        nodes: The operations, in graph order.
        inputs: What each of the pattern's positional parameters stands for.
        constants: What each of its keyword-only parameters stands for; a ``training`` flag as an `Operand`.
        outputs: The nodes for each of its outputs.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[Operand, ...]
    constants: dict[str, Any]
    outputs: tuple[fx.Node, ...]


class Matches(NamedTuple):
    """All places in one graph, in order, and those that were left out because they overlap an earlier one."""

    found: list[Match]
    overlapping: list[Match]


def find_matches(pattern: PatternGraph, graph: fx.Graph, owner: nn.Module) -> Matches:
    """Find where a pattern matches.

    Args:
        pattern: The pattern.
        graph: The graph of a forward.
        owner: The module whose forward it is: targets are looked up on it.
    """
    index = Index(graph, owner)
    search = Search(pattern, index)
    bound: list[tuple[Binding, fx.Node]] = []
    for anchor in search.anchors():
        binding = Binding(search)
        if binding.find(anchor):
            bound.append((binding, anchor))
    found: list[tuple[int, int, Match]] = []
    overlapping: list[Match] = []
    taken: set[fx.Node] = set()
    for binding, anchor in sorted(bound, key=lambda one: one[0].place()):
        if not taken.isdisjoint(binding.nodes):
            other = Binding(search, taken)
            if not other.find(anchor) or not taken.isdisjoint(other.nodes):
                if all(
                    {*one.nodes} != {*binding.nodes} for _, _, one in found
                ):  # the same place, its outputs exchanged
                    overlapping.append(_match(pattern, binding, index))
                continue
            binding = other
        taken.update(binding.nodes)
        found.append((*binding.place(), _match(pattern, binding, index)))
    return Matches([match for _, _, match in sorted(found, key=lambda one: one[:2])], overlapping)


def _match(pattern: PatternGraph, binding: Binding, index: Index) -> Match:
    bound = binding.bound
    constants = {
        one.name: _operand(given, index) if type(given := bound[one]) is Attr else given for one in pattern.free
    }
    inputs = tuple(_operand(bound[one], index) for one in pattern.inputs)
    return Match(binding.nodes, inputs, constants, tuple(bound[pattern.refs[number]] for number in pattern.outputs))


def _operand(given: Any, index: Index) -> Operand:
    if type(given) is fx.Node:
        return Operand(node=given)
    if type(given) is not Attr:
        return Operand(value=given)
    looked_up = None if given.is_flag else index.tensors.get(given.name)
    return Operand(attribute=given.name) if looked_up is None else Operand(node=looked_up)


def nearest(pattern: PatternGraph, graph: fx.Graph, owner: nn.Module) -> str | None:
    """Say what comes nearest to a pattern that matches nowhere; None where none of its operations occurs."""
    return explain(Search(pattern, Index(graph, owner)))


def by_target(graph: fx.Graph, regex: re.Pattern[str]) -> list[Match]:
    """The single operations whose name is a full match: a function's name, a method's, or a called module's path."""
    return by_predicate(graph, lambda node: any(map(regex.fullmatch, _names(node))))


def by_predicate(graph: fx.Graph, fn: Callable[[fx.Node], bool]) -> list[Match]:
    """The single operations for which a function is true; their inputs are what they use, in order."""
    return [
        Match((node,), tuple(Operand(node=one) for one in node.all_input_nodes), {}, (node,))
        for node in graph.nodes
        if node.op in CALLS and fn(node)
    ]


def _names(node: fx.Node) -> list[str]:
    """A function's name; for one of torch's operators with and without its overload."""
    if isinstance(node.target, str):
        return [node.target]
    name = str(getattr(node.target, "__name__", node.target))
    return [name, name.partition(".")[0]] if hasattr(node.target, "_schema") else [name]
