"""The rules behind selectors of places inside a forward: what matches on the trace of each module named."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import fx, nn

from .._match.matcher import Match, Matches, Operand, PatternGraph, by_target, find_matches, nearest
from .._rules import Places, Rule, Site
from .._text import short
from .._tree import join
from ..errors import MisfitError, NoMatchError, TraceError
from .outline import free_name
from .program import Program
from .subgraph import Subgraph, op, signature_of
from .tracer import Settings
from .tracing import is_leaf, program_or_trace


@dataclass(frozen=True)
class Within(Rule):
    """Places inside the forwards of some modules."""

    within: Rule
    settings: Settings

    @property
    @abstractmethod
    def name(self) -> str:
        """What a place is called, before its number."""

    @abstractmethod
    def find(self, graph: fx.Graph, owner: nn.Module) -> Matches:
        """The matches in one graph."""

    def resolve(self, root: nn.Module) -> Places:
        found: Places = []
        refused: list[TraceError] = []
        looked: list[tuple[str, nn.Module, Program]] = []
        for path, module in self.within.resolve(root):
            if is_leaf(module):
                continue
            try:
                program = program_or_trace(module, path, self.settings)
            except TraceError as error:
                refused.append(error)
                continue
            looked.append((path, module, program))
            found += self._sites(path, module, program)
        if not found:
            told = [f"{self} matches nothing.", *self._why(looked), *map(str, refused[: 1 if looked else 3])]
            if looked and self.settings.depth == 0:
                told.append(
                    "Each forward is looked into on its own: flat=True draws in those that it calls, or name these in within."
                )
            raise NoMatchError("\n".join(told))
        return found

    def _sites(self, path: str, module: nn.Module, program: Program) -> Places:
        numbers: dict[str, int] = {}
        each = [self.find(graph, module).found for graph in program.graphs]
        drawn_out: Places = [  # by an entry before, which kept the part as a module
            Site(join(path, name), child)
            for name, child in module._modules.items()
            if isinstance(child, Subgraph) and self._is_all_of(child, module)
        ]
        return drawn_out + [
            Site(join(path, free_name(module, self.name, numbers)), Subgraph(module, program, matches))
            for matches in _paired(each)
        ]

    def _is_all_of(self, part: Subgraph, owner: nn.Module) -> bool:
        return any(len(match.nodes) == len(part.ops) for match in self.find(part.program.graphs[0], owner).found)

    def _why(self, looked: list[tuple[str, nn.Module, Program]]) -> list[str]:
        return [] if looked else ["None of the modules that it was to look into could be traced:"]

    def remarks(self, root: nn.Module) -> list[str]:
        overlapping = [
            (path, match)
            for path, module in self.within.resolve(root)
            if not is_leaf(module) and (program := self._program(path, module))
            for match in self.find(program.graphs[0], module).overlapping
        ]
        return [
            f"{path or '(root)'}: {', '.join(map(op, match.nodes))} matches as well, and overlaps an earlier place"
            for path, match in overlapping
        ]

    def _program(self, path: str, module: nn.Module) -> Program | None:
        try:
            return program_or_trace(module, path, self.settings)
        except TraceError:
            return None


@dataclass(frozen=True)
class Pattern(Within):
    """Places that compute what a function computes."""

    pattern: PatternGraph

    @property
    def name(self) -> str:
        return short(self.pattern.fn).rpartition(".")[2].removeprefix("<lambda>") or "subgraph"

    def find(self, graph: fx.Graph, owner: nn.Module) -> Matches:
        return find_matches(self.pattern, graph, owner)

    def _why(self, looked: list[tuple[str, nn.Module, Program]]) -> list[str]:
        near = ((path, nearest(self.pattern, one.graphs[0], owner)) for path, owner, one in looked)
        told = (f"In {path or 'the root'}: {text}" for path, text in near if text)
        return list(islice(told, 3)) or super()._why(looked)

    def __str__(self) -> str:
        return f"{self.within} ~ {short(self.pattern.fn)}"


@dataclass(frozen=True)
class Calls(Within):
    """Single operations, by the name of what they call, or by a predicate over their nodes."""

    called: re.Pattern[str]
    predicate: Callable[[fx.Node], bool] | None

    @property
    def name(self) -> str:
        return "call"

    def find(self, graph: fx.Graph, owner: nn.Module) -> Matches:
        nodes = [match.nodes[0] for match in by_target(graph, self.called)]
        nodes = [node for node in nodes if not _calls_a_part(node, owner)]
        return Matches([_as_called(node) for node in nodes if self.predicate is None or self.predicate(node)], [])

    def __str__(self) -> str:
        which = "" if self.predicate is None else f" where {short(self.predicate)}"
        return f"{self.within} ~ calls of {self.called.pattern}{which}"


@dataclass(frozen=True)
class Parallel(Rule):
    """The places of a rule in one forward as one place, that gives the outputs of all."""

    rule: Rule

    def resolve(self, root: nn.Module) -> Places:
        groups: dict[int, list[Site[Any]]] = {}
        for site in self.rule.resolve(root):
            if not isinstance(site.module, Subgraph):
                raise MisfitError(f"parallel takes places inside a forward, and {self.rule} gives modules", [site.path])
            groups.setdefault(id(site.module.owner), []).append(site)
        return [_joined(sites) for sites in groups.values()]

    def __str__(self) -> str:
        return f"parallel {self.rule}"


def _joined(sites: list[Site[Subgraph]]) -> Site[Subgraph]:
    parts = [site.module for site in sites]
    columns = zip(*(part.matches for part in parts), strict=True)
    joined = tuple(_side_by_side([one for one in column if one is not None], sites) for column in columns)
    source = parts[0].source
    assert source is not None
    return Site(sites[0].path, Subgraph(parts[0].owner, source, joined))


def _side_by_side(matches: list[Match], sites: list[Site[Subgraph]]) -> Match | None:
    if not matches:
        return None
    graph = matches[0].nodes[0].graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    nodes = {node for match in matches for node in match.nodes}
    paths = [site.path for site in sites]
    if any(_after(nodes.difference(match.nodes), graph).intersection(match.nodes) for match in matches):
        raise MisfitError(
            f"parallel takes branches side by side, and these depend on one another: {', '.join(paths)}", paths
        )
    if len({match.inputs[0].node for match in matches if match.inputs}) > 1:
        raise MisfitError(
            f"parallel takes branches of one input, and the first inputs of these differ: {', '.join(paths)}", paths
        )
    inputs = dict.fromkeys(operand for match in matches for operand in match.inputs)
    outputs = tuple(node for match in matches for node in match.outputs)
    return Match(tuple(sorted(nodes, key=place.__getitem__)), tuple(inputs), {}, outputs)


def _after(nodes: set[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """All that depends on some nodes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if any(one in nodes or one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _as_called(node: fx.Node) -> Match:
    """One operation as a place, whose inputs are the call's own arguments, in their order and by their keywords."""
    inputs = [Operand(one, None, None) if isinstance(one, fx.Node) else Operand(None, None, one) for one in node.args]
    return Match((node,), tuple(inputs), _said(node), (node,))


def _calls_a_part(node: fx.Node, owner: nn.Module) -> bool:
    return node.op == "call_module" and isinstance(owner.get_submodule(str(node.target)), Subgraph)


def _said(node: fx.Node) -> dict[str, Any]:
    """A call's keywords, but for those that only spell a default out, as torch's functions do when they are traced."""
    signature = signature_of(node.target) if node.kwargs else None
    parameters = dict(signature.parameters) if signature else {}
    return {
        key: value
        for key, value in node.kwargs.items()
        if key not in parameters or isinstance(value, fx.Node) or parameters[key].default != value
    }


def _paired(each: list[list[Match]]) -> list[tuple[Match | None, ...]]:
    """What matches in training and in evaluation, as one place where it is the same one."""
    if len(each) == 1:
        return [(match,) for match in each[0]]
    training, evaluation = each
    left = list(evaluation)
    pairs: list[tuple[Match | None, ...]] = []
    for match in training:
        partner = next((one for one in left if _looks(one) == _looks(match)), None)
        if partner is not None:
            left.remove(partner)
        pairs.append((match, partner))
    return [*pairs, *((None, match) for match in left)]


def _looks(match: Match) -> tuple[Any, ...]:
    return tuple((node.op, str(node.target)) for node in match.nodes)
