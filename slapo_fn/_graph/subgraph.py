"""A part of a forward, held as a module, so that whatever works on modules works on it.

def forward(self, x):                          def forward(self, x):
    fc = self.fc(x)                 ->             gelu_0 = self.gelu_0(x)      # gelu_0: Subgraph(x) = gelu(fc(x))
    gelu = F.gelu(fc)                              return self.proj(gelu_0)
    return self.proj(gelu)
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from .._match.matcher import Match, Operand
from .._text import count, short
from ..errors import MisfitError
from ..nn.function import Function
from .program import Graphed, Program, new_graph
from .traced import program_of

LOOKS_UP = ("call_module", "get_attr")
Matches = tuple[Match | None, ...]
HOOKS_IN = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OUT = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Subgraph(nn.Module, Graphed):
    """Some operations of a module's forward, that a pattern has found.

    Attributes:
        owner: The module in whose forward they are.
        paths: The modules that they call, in order, by their paths from the owner.
        ops: What they are, in order: names of functions, methods and modules.
        constants: The pattern's free constants, by name.
        inputs: The names of what they take from outside, in the order of the pattern's parameters.
    """

    def __init__(self, owner: nn.Module, program: Program, matches: Matches) -> None:
        super().__init__()
        there = [match for match in matches if match is not None]
        first = there[0]
        vars(self).update(  # plain attributes: the owner is not registered in a part of it
            owner=owner,
            scope=owner,
            matches=matches,
            source=program,
            paths=tuple(dict.fromkeys(str(node.target) for node in first.nodes if node.op == "call_module")),
            ops=tuple(map(op, first.nodes)),
            looks_up=any(
                one.op in LOOKS_UP for match in there for node in match.nodes for one in (node, *node.all_input_nodes)
            ),
            constants=dict(first.constants),
            is_drawn_out=False,
            place=(id(owner), tuple(node.name for node in first.nodes)),
            inputs=tuple(map(_named, first.inputs)),
            outputs=len(first.outputs),
        )
        self.train(owner.training)

    is_trace_leaf = True
    owner: nn.Module
    scope: nn.Module
    matches: Matches
    source: Program | None  # of the owner's whole forward, while a pass works on the part
    paths: tuple[str, ...]
    ops: tuple[str, ...]
    looks_up: bool  # whether the operations look anything up: a module, a tensor, a flag
    constants: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: int

    @property
    def program(self) -> Program:
        """The operations as a program of their own, made when it is first asked for."""
        if "made" not in vars(self):
            vars(self)["made"] = Program(tuple(part_of(match) for match in self.matches if match is not None))
        made: Program = vars(self)["made"]
        return made

    @property
    def calls(self) -> tuple[nn.Module, ...]:
        """The modules that are called, in order."""
        return tuple(self.scope.get_submodule(path) for path in self.paths)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operations, as `torch.fx` has them."""
        there = [match for match in self.matches if match is not None]
        return there[0].nodes if there else tuple(n for n in self.program.graphs[0].nodes if n.op.startswith("call"))

    @property
    def kind(self) -> str:
        """The operations on one line, as plans show them."""
        shown = self.ops if len(self.ops) < 5 else (*self.ops[:2], "…", self.ops[-1])
        return "+".join(shown)

    def run(self) -> types.MethodType:
        """The function of the graph for the mode that the owner is in, bound to what it looks its names up on."""
        return types.MethodType(self.program.function(self.scope.training), self.scope)

    def forward(self, *args: Any) -> Any:
        return self.program.function(self.scope.training)(self.scope, *args)

    def onto(self, program: Program) -> None:
        """Be a part of an equal program: of another look at the same forward."""
        moved: list[Match | None] = []
        for match, graph in zip(self.matches, program.graphs, strict=True):
            nodes = {node.name: node for node in graph.nodes}
            moved.append(match and _renamed(match, nodes))
        vars(self).update(matches=tuple(moved), source=program)

    def reopen(self) -> None:
        """Be worked on again, after an earlier entry has left the part as a module."""
        program = program_of(self.owner)
        assert program is not None
        vars(self).update(matches=(None,) * len(program.graphs), source=program)

    def settle(self) -> None:
        """Forget what only the pass needs, and look modules up on the owner from now on."""
        assert self.program.functions  # made now, and not while the module is compiled
        vars(self).update(scope=self.owner, matches=(), source=None, is_drawn_out=False)

    def extra_repr(self) -> str:
        return self.kind


def op(node: fx.Node) -> str:
    """What a node does, in a word."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _named(operand: Operand) -> str:
    if operand.node is not None:
        return operand.node.name
    return operand.attribute or short(operand.value)


def _renamed(match: Match, nodes: Mapping[str, fx.Node]) -> Match:
    def found(value: Any) -> Any:
        return fx.map_arg(value, lambda node: nodes[node.name])

    inputs = tuple(one._replace(node=one.node and nodes[one.node.name], value=found(one.value)) for one in match.inputs)
    constants = {k: one if isinstance(one, Operand) else found(one) for k, one in match.constants.items()}
    here, outputs = (tuple(nodes[node.name] for node in some) for some in (match.nodes, match.outputs))
    return Match(here, inputs, constants, outputs)


def outside(match: Match) -> list[fx.Node]:
    """The nodes that a match takes from outside, the pattern's inputs first; tensors and flags it looks up itself."""
    declared = [operand.node for operand in match.inputs if operand.node is not None]
    inside = set(match.nodes)
    used = (one for node in match.nodes for one in node.all_input_nodes if one not in inside)
    return list(dict.fromkeys([*declared, *(one for one in used if one.op != "get_attr")]))


def part_of(match: Match) -> fx.Graph:
    """A match as a graph of its own, whose arguments are the pattern's inputs, then whatever else it takes."""
    graph = new_graph()
    known: dict[fx.Node, fx.Node] = {}
    for number, operand in enumerate(match.inputs):
        made = graph.placeholder(f"input_{number}")
        if operand.node is not None:
            known.setdefault(operand.node, made)
    for node in outside(match):
        if node not in known:
            known[node] = graph.placeholder(node.name)
    for node in match.nodes:
        for looked_up in node.all_input_nodes:
            if looked_up not in known and looked_up.op == "get_attr":
                known[looked_up] = graph.node_copy(looked_up)
        known[node] = graph.node_copy(node, known.__getitem__)
    results = tuple(known[node] for node in match.outputs)
    graph.output(results if len(results) > 1 else next(iter(results)))
    return graph


def lift_hooks(part: Subgraph, new: nn.Module) -> None:
    """Take hooks from the modules at a part's ends, so that what replaces the part takes them over.

    The first module's forward-pre and backward hooks, and the last one's forward hooks, see the same values on the new
    module; all other hooks are inside, and `inherit` refuses to lose them.
    """
    if isinstance(new, Function):
        return  # it is written into the graph, and carries none
    kept = set(map(id, new.modules()))
    first, last = next(iter(part.nodes)), part.nodes[-1]
    taken = {
        one for node in part.nodes for one in node.all_input_nodes if one not in part.nodes and one.op != "get_attr"
    }
    if first.op == "call_module" and taken <= set(first.all_input_nodes):
        _lift(part, first, HOOKS_IN, kept)
    if last.op == "call_module" and part.outputs == 1:
        _lift(part, last, HOOKS_OUT, kept)


def _lift(part: Subgraph, node: fx.Node, tables: tuple[str, ...], kept: set[int]) -> None:
    module = part.scope.get_submodule(str(node.target))
    if id(module) in kept:
        return
    mine, theirs = vars(part), vars(module)
    if "_backward_hooks" in tables and theirs["_backward_hooks"]:
        mine["_is_full_backward_hook"] = theirs["_is_full_backward_hook"]
    for table in tables:
        mine[table], theirs[table] = theirs[table], mine[table]


@functools.lru_cache(maxsize=1024)
def signature_of(function: Any) -> inspect.Signature | None:
    """A function's signature, or None where it does not say."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def keywords(part: Subgraph, new: nn.Module, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The constants that a new module is called with, beside the pattern's inputs.

    Raises:
        MisfitError: It takes another number of inputs.
    """
    run = new.function if isinstance(new, Function) else new.forward
    given = {**part.constants, **(extra or {})}
    signature = signature_of(run)
    if signature is None:  # a builtin function, which does not say
        return given
    if extra is None:  # the module was made of the part, and may have taken its constants in
        given = {name: value for name, value in given.items() if name in signature.parameters}
    names = part.inputs + tuple(f"and {name}=" for name in given)
    try:
        signature.bind(*part.inputs, **given)
    except TypeError as error:
        required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
        raise MisfitError(
            f"the pattern gives {count(len(part.inputs), 'input')} ({', '.join(names)}), and {short(run)} requires "
            f"{len(required)}: {error}. Give constants={{name: value}} for what the pattern does not give."
        ) from None
    return given
