"""Bind a pattern's values, from the node that its last operation could be."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from torch import fx

from ..errors import PatternError
from .calls import same
from .reading import Free, Input, Ref, Step, Weight
from .search import Search

MOST_STEPS = 100_000  # bound from one node
MOST_RESULTS = 64  # bindings from one node that are then found to have a value used outside
BOUND = (Input, Free, Weight, Ref)
Todo = Any  # a linked list: (wanted, given, rest) or None


def equal(one: Any, other: Any) -> bool:
    """Whether two values that one name stands for are the same."""
    if type(one) is fx.Node or type(other) is fx.Node:
        return one is other
    return same(one, other)


class Binding:
    """The values of one match, while it is looked for.

    Attributes:
        bound: What the pattern's holes and steps stand for.
        nodes: The matched nodes, in graph order, once `find` has found some.
        refused: Why the last complete binding was no match.
    """

    def __init__(self, search: Search, forbidden: set[fx.Node] | None = None) -> None:
        self.search, self.pattern, self.index = search, search.pattern, search.index
        self.forbidden = forbidden or set()
        self.bound: dict[Any, Any] = {}
        self.taken: set[fx.Node] = set()
        self.trail: list[Any] = []
        self.choices: list[tuple[int, Todo, Todo, int]] = []
        self.nodes: tuple[fx.Node, ...] = ()
        self.refused: tuple[str, Any, Any] | None = None

    def find(self, anchor: fx.Node) -> bool:
        """Bind everything, from the node for the pattern's first sink."""
        todo: Todo = (self.pattern.refs[self.pattern.sinks[0]], anchor, None)
        later: Todo = None
        path, results = 0, 0
        for _ in range(MOST_STEPS):
            if todo is not None:
                wanted, given, todo = todo
                state = self._take(wanted, given, todo, later)
            elif later is not None:
                (step, node), later = later
                state = self._choose([_push(pair, None) for pair in self._open(step, node)], later, path)
            elif path < len(self.pattern.paths):
                path += 1
                sink = self.pattern.refs[self.pattern.paths[path - 1][-1]]
                found = self._along(self.pattern.paths[path - 1])
                state = (
                    (None, None) if sink in self.bound else self._choose([(sink, n, None) for n in found], None, path)
                )
            else:
                if self._complete():
                    return True
                results += 1
                state = None
            if state is None and (not self.choices or results == MOST_RESULTS):
                return False
            todo, later, path = (*state, path) if state is not None else self._back()
        raise PatternError(
            f"{self.pattern!r} can be bound in too many ways from {anchor.name}: make it smaller, or its operands distinct"
        )

    def place(self) -> tuple[int, int]:
        """Where the match begins and ends, reads of sizes left aside."""
        places = [self.index.position[node] for node in self.taken or self.nodes]
        return min(places), max(places)

    def _take(self, wanted: Any, given: Any, todo: Todo, later: Todo) -> tuple[Todo, Todo] | None:
        """Let one part of the pattern be one value; gives what is left to do, None if it cannot be."""
        if type(wanted) is tuple:
            return _push((wanted, given), todo), later
        if type(wanted) not in BOUND:
            return todo, later  # a constant, which `could` has compared
        if wanted in self.bound:
            if equal(self.bound[wanted], given):
                return todo, later
            if not (isinstance(wanted, Ref) and self.pattern.steps[wanted.number].cheap):
                self.refused = ("twice", wanted, (self.bound[wanted], given))
                return None
        if type(wanted) is not Ref:
            self._bind(wanted, given)
            return todo, later
        step = self.pattern.steps[wanted.number]
        if given in self.taken or given in self.forbidden:
            return None
        if wanted not in self.bound:
            self._bind(wanted, given)
            if not step.cheap:
                self.taken.add(given)
        if step.swaps is None:
            return _push(self.search.pair(step, given), todo), later
        ways = self._open(step, given)
        if len(ways) > 1 and not _symmetric(step):
            return todo, ((step, given), later)
        return (_push(ways[0], todo), later) if ways else None

    def _open(self, step: Step, node: fx.Node) -> list[tuple[Any, Any]]:
        """The ways to take a node's arguments that go with what is bound."""
        return [pair for pair in self.search.ways(step, node) if all(map(self._agrees, *pair))]

    def _agrees(self, wanted: Any, given: Any) -> bool:
        if isinstance(wanted, (Input, Weight, Ref)) and wanted in self.bound and not equal(self.bound[wanted], given):
            return isinstance(wanted, Ref) and self.pattern.steps[wanted.number].cheap
        return self.search.fits(wanted, given)

    def _bind(self, wanted: Any, given: Any) -> None:
        self.bound[wanted] = given
        self.trail.append(wanted)

    def _choose(self, todos: list[Todo], later: Todo, path: int) -> tuple[Todo, Todo] | None:
        """Go on with the first of some ways, and keep the others."""
        self.choices += [(len(self.trail), todo, later, path) for todo in reversed(todos[1:])]
        return (todos[0], later) if todos else None

    def _back(self) -> tuple[Todo, Todo, int]:
        length, todo, later, path = self.choices.pop()
        for wanted in reversed(self.trail[length:]):
            given = self.bound.pop(wanted)
            if isinstance(wanted, Ref):
                self.taken.discard(given)
        del self.trail[length:]
        return todo, later, path

    def _along(self, path: list[Any]) -> list[fx.Node]:
        """The nodes that could be a sink, reached from what is bound."""
        first, *steps = path
        start = self.bound.get(self.pattern.refs[first] if isinstance(first, int) else first)
        if not isinstance(start, fx.Node):
            return [*self.search.could[steps[-1]]]
        found = [start]
        for number in steps:
            reached = {
                one: None for node in found for one in self.index.reached(node) if one in self.search.could[number]
            }
            found = sorted(reached, key=self.index.position.__getitem__)
        return found

    # ---- what a complete binding has to be

    def _complete(self) -> bool:
        """Whether the nodes that are bound can be taken out of the graph together."""
        made = {given for wanted, given in self.bound.items() if isinstance(wanted, Ref)}
        outputs = {self.bound[self.pattern.refs[number]] for number in self.pattern.outputs}
        inputs = {given for wanted, given in self.bound.items() if isinstance(wanted, Input) and type(given) is fx.Node}
        inside = self._with_cheap({node for node in made if node in self.taken or node in outputs}, inputs, outputs)
        if own := inputs & inside:
            self.refused = ("inside", None, next(iter(own)))
            return False
        for node in inside - outputs:
            for user in node.users:
                if user not in inside:
                    self.refused = ("outside", node, user)
                    return False
        position = self.index.position
        nodes = sorted(inside, key=position.__getitem__)
        first, last = position[nodes[0]], position[nodes[-1]]
        if len(outputs) > 1 and (around := self._between(inside, outputs, last)):
            self.refused = ("around", None, next(iter(around)))
            return False
        writes = self.index.writes
        between = writes[bisect_right(writes, first) : bisect_left(writes, last)] if writes else []
        if wrong := [node for node in map(self.index.nodes.__getitem__, between) if node not in inside]:
            self.refused = ("written", None, wrong[0])
            return False
        self.nodes = tuple(nodes)
        return True

    def _with_cheap(self, inside: set[fx.Node], inputs: set[fx.Node], outputs: set[fx.Node]) -> set[fx.Node]:
        """The same, and the reads of sizes and the like that nothing else uses."""
        if not self.index.cheap:
            return inside
        cheap = self.index.cheap - inputs - inside
        near: dict[fx.Node, None] = {}
        for todo, users in (([*inside], False), ([*(inside - outputs)], True)):
            for node in todo:
                around = node.users if users else node.all_input_nodes
                fresh = [one for one in around if one in cheap and one not in near]
                near.update(dict.fromkeys(fresh))
                todo += fresh
        whole = inside | near.keys()
        while left := [node for node in near if node in whole and any(user not in whole for user in node.users)]:
            whole.difference_update(left)
        return whole

    def _between(self, inside: set[fx.Node], outputs: set[fx.Node], last: int) -> set[fx.Node]:
        """The nodes outside of a match that use a value of it, and are used in it."""
        position = self.index.position
        after: set[fx.Node] = set()
        todo = [*outputs]
        for node in todo:
            fresh = [user for user in node.users if user not in inside and user not in after and position[user] < last]
            after.update(fresh)
            todo += fresh
        return {node for node in after if any(user in inside for user in node.users)}


def _symmetric(step: Step) -> bool:
    """Whether two operands are inputs that nothing else uses, so that one way is as good as the other."""
    return step.swaps is not None and all(
        isinstance(one := step.args[at], Input) and one.uses == 1 for at in step.swaps
    )


def _push(pair: tuple[Any, Any], todo: Todo) -> Todo:
    made: list[Todo] = [todo]
    for wanted, given in reversed([*zip(*pair, strict=True)]):
        made.append((wanted, given, made[-1]))
    return made[-1]
