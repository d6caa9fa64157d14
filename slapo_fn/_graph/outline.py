"""The parts of one forward that an entry works on, while it works: out of the graph, into modules, and back.

gelu(fc(x))   ->   self.gelu_0(x), a Subgraph that holds fc   ->   self.FusedLinear_0(x); or fc and gelu again
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's graphs have no types.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any

from torch import fx, nn

from .._forward import layers
from .._inherit import has_hooks
from .._match.matcher import Match, Operand
from .._rules import Site
from .._tree import Tree
from ..errors import MisfitError
from ..nn.function import Function
from .program import callable_by_name, copied
from .subgraph import Subgraph, keywords, outside
from .traced import run_by
from .values import several


class Outline:
    """One owner's parts.

    Attributes:
        owner: The module whose forward is edited.
        names: What each part is registered as in the owner.
    """

    def __init__(self, tree: Tree, owner: nn.Module, parts: Mapping[str, Subgraph]) -> None:
        self.tree, self.owner, self.parts = tree, owner, dict(parts)
        self.again = {name for name, part in parts.items() if part.source is None}
        for name in self.again:
            parts[name].reopen()
        program = next(iter(parts.values())).source
        assert program is not None
        for part in parts.values():
            if part.source is not program and part.source == program:
                part.onto(program)
        if any(part.source is not program for part in parts.values()):
            raise MisfitError("one entry takes the places of one pattern: give each pattern an entry of its own")
        self.program = program
        if program.constants:
            run_by(owner, program)
        self.graphs: list[fx.Graph] = []
        self.calls: dict[str, list[tuple[fx.Node, Mapping[fx.Node, fx.Node]]]] = {name: [] for name in parts}
        self.homes: list[tuple[nn.Module, str, nn.Module, Subgraph]] = []
        self.orders: dict[int, tuple[nn.Module, list[str]]] = {}
        self.numbers: dict[str, int] = {}
        self.made: dict[int, str] = {}
        for number, graph in enumerate(program.graphs):
            self._draw(graph, number)
        self._move()

    # ---- into modules

    def _draw(self, graph: fx.Graph, number: int) -> None:
        made, known = copied(graph)
        values = dict(known)
        place = {node: at for at, node in enumerate(made.nodes)}
        unordered = False
        for name, part in self.parts.items():
            if (match := part.matches[number]) is not None:
                last = place[known[match.nodes[-1]]]
                unordered |= any(place.get(user, last) < last for one in match.outputs for user in known[one].users)
                self.calls[name].append((_call(made, match, name, known, values), values))
        for part in self.parts.values():
            if (match := part.matches[number]) is not None:
                _erase(made, [known[node] for node in match.nodes])
        if unordered:
            _in_order(made)
        for call in made.nodes:
            if call.op == "call_module" and call.target in self.again:
                self.calls[call.target].append((call, values))
        self.graphs.append(made)

    def _move(self) -> None:
        """Let each part hold the modules that only it calls."""
        used = {name.rpartition(".")[0] if kind else name for graph in self.graphs for kind, name in _looked_up(graph)}
        callers = Counter(path for part in self.parts.values() for path in part.paths)
        used.update(path for path, count in callers.items() if count > 1)
        self.tree.touch(self.owner)
        for name, part in self.parts.items():
            vars(part)["scope"] = _namespace(self.owner, part)
            for path in part.paths:
                parent = self.owner.get_submodule(path.rpartition(".")[0])
                child, last = self.owner.get_submodule(path), path.rpartition(".")[2]
                if path not in used and self.tree.registrations(child) == [(parent, last)]:
                    self.tree.touch(parent)
                    self.orders.setdefault(id(parent), (parent, [*parent._modules]))
                    self.homes.append((parent, last, child, part))
                    vars(parent)[last] = parent._modules.pop(last)  # it is found there while the pass works on the part
                    _holder(part, path)._modules[last] = child
            vars(part)["is_drawn_out"] = True
            self.owner._modules[name] = part
        self.tree.refresh(self.owner)

    # ---- a part is replaced

    def rename(
        self, part: Subgraph, new: nn.Module, path: str, wanted: str | None, constants: Mapping[str, Any] | None
    ) -> str:
        """Register what took a part's place under a name of its own; gives its path.

        Raises:
            MisfitError: It takes another number of inputs.
        """
        old = next(name for name, one in self.parts.items() if one is part)
        given = keywords(part, new, constants)
        name = free_name(self.owner, wanted or type(new).__name__, self.numbers)
        if not isinstance(new, Function):
            self.owner._modules[name] = self.owner._modules.pop(old)
            self.tree.register(new, self.owner, name)
        for call, values in self.calls[old]:
            call.args = call.args[: len(part.inputs)]
            call.kwargs = {key: _keyword(call, value, values) for key, value in given.items()}
            if isinstance(new, Function):
                call.op, call.target = "call_function", callable_by_name(new.function, re.sub(r"_\d+$", "", old))
            else:
                call.target = name
        del self.parts[old]
        self.made[id(part)] = name
        if isinstance(new, Function):
            del self.owner._modules[old]
            return path
        return path.removesuffix(old) + name

    # ---- and back

    def close(self) -> None:
        """Give modules that are still called their old names, and let the owner run what has come of its forward."""
        kept = {id(part) for part in self.parts.values()}
        stands_for: dict[tuple[int, str], str] = {}
        for parent, last, child, part in self.homes:
            del vars(parent)[last]
            if id(part) in kept:
                parent._modules[last] = child
            elif parent is self.owner and id(part) in self.made:
                stands_for[id(parent), last] = self.made[id(part)]
        for parent, names in self.orders.values():
            wanted = [stands_for.get((id(parent), name), name) for name in names]
            for name in dict.fromkeys([*wanted, *parent._modules]):
                if name in parent._modules:
                    parent._modules[name] = parent._modules.pop(name)
        for part in self.parts.values():
            part._modules.clear()
            part.settle()
        self.tree.refresh(self.owner)
        if kept and not self.again and len(kept) == len(self.calls) and not any(map(_wrapped, self.parts.values())):
            for name in self.parts:
                del self.owner._modules[name]
            return
        run_by(self.owner, self.program.with_graphs(tuple(self.graphs)))


def outlines(tree: Tree, sites: Iterable[Site[nn.Module]]) -> dict[int, Outline]:
    """Draw the parts that an entry's places are out of their forwards; by the owner's ``id``."""
    owners: dict[int, dict[str, Subgraph]] = {}
    for site in sites:
        if isinstance(site.module, Subgraph):
            name = site.path.rpartition(".")[2]
            owners.setdefault(id(site.module.owner), {})[name] = site.module
    return {key: Outline(tree, next(iter(parts.values())).owner, parts) for key, parts in owners.items()}


def free_name(owner: nn.Module, wanted: str, numbers: dict[str, int]) -> str:
    """A name with a number behind it that the module does not use yet: ``FusedMLP_0``."""
    stem = re.sub(r"\W", "_", wanted).strip("_") or "subgraph"
    number = numbers.get(stem, 0)
    while hasattr(owner, f"{stem}_{number}"):
        number += 1
    numbers[stem] = number + 1
    return f"{stem}_{number}"


def _call(
    graph: fx.Graph, match: Match, name: str, known: Mapping[fx.Node, fx.Node], values: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Call a module in the place of a match; its results go where the match's went."""
    with graph.inserting_after(known[match.nodes[-1]]):
        call = graph.call_module(name)
    arguments: list[Any] = []
    with graph.inserting_before(call):
        for operand in match.inputs:
            if operand.node is not None:
                arguments.append(values[operand.node])
            else:
                value = fx.map_arg(operand.value, values.__getitem__)
                arguments.append(graph.get_attr(operand.attribute) if operand.attribute else value)
    declared = [operand.node for operand in match.inputs]
    call.args = (*arguments, *(values[node] for node in outside(match) if node not in declared))
    after = whole = call
    inside = {known[node] for node in match.nodes}
    if len(match.outputs) > 1:
        with graph.inserting_after(after):
            after = whole = graph.call_function(several, (call, len(match.outputs)))
    for number, output in enumerate(match.outputs):
        result = call
        if len(match.outputs) > 1:
            with graph.inserting_after(after):
                result = after = graph.call_function(getitem, (whole, number))
        known[output].replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        values[output] = result
    return call


def _keyword(call: fx.Node, value: Any, values: Mapping[fx.Node, fx.Node]) -> Any:
    """A constant of a pattern as an argument: what a training flag stands for is looked up at each call."""
    if not isinstance(value, Operand):
        return fx.map_arg(value, values.__getitem__)
    with call.graph.inserting_before(call):
        return call.graph.get_attr(str(value.attribute))


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    read = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one.op == "get_attr")
    for node in reversed(nodes):
        graph.erase_node(node)
    for one in read:
        if not one.users and one not in nodes:
            graph.erase_node(one)


def _in_order(graph: fx.Graph) -> None:
    """Move nodes behind what they use, else in their old order."""
    done: set[fx.Node] = set()
    for first in list(graph.nodes):
        waiting = [first]
        while waiting:
            node = waiting[-1]
            missing = [one for one in node.all_input_nodes if one not in done]
            if missing and node not in done:
                waiting.extend(missing)
                continue
            waiting.pop()
            if node not in done:
                done.add(node)
                next(reversed(graph.nodes)).append(node)


def _looked_up(graph: fx.Graph) -> Iterable[tuple[bool, str]]:
    """Names of modules that are called, and of tensors and flags (True) that are read."""
    return ((node.op == "get_attr", str(node.target)) for node in graph.nodes if node.op in ("call_module", "get_attr"))


def _namespace(owner: nn.Module, part: Subgraph) -> nn.Module:
    """What a part looks up while its modules are on their way, under the paths that they have in the owner."""
    if not part.looks_up:
        return owner
    made = nn.Module().train(owner.training)
    for is_attribute, target in (one for graph in part.program.graphs for one in _looked_up(graph)):
        path, _, last = target.rpartition(".")
        holder = _holder(made, target)
        if is_attribute:
            vars(holder)[last] = getattr(owner.get_submodule(path), last)
        else:
            holder._modules[last] = owner.get_submodule(target)
    return made


def _holder(module: nn.Module, path: str) -> nn.Module:
    """Where a path's last segment is registered, below a module that has the same paths as an owner."""
    for segment in path.split(".")[:-1]:
        if segment not in module._modules:
            module._modules[segment] = nn.Module().train(module.training)
        module = module._modules[segment]  # type: ignore[assignment]
    return module


def _wrapped(module: nn.Module) -> bool:
    return has_hooks(module) or any(layers(module))
