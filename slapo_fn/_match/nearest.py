"""Say why a pattern matches nowhere: what comes nearest, and what differs there."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from .._text import count, short
from .binding import Binding
from .calls import Attr, plain
from .index import Index
from .reading import ANYTHING, HOLES, Free, Input, Ref, Step
from .search import Search
from .spell import lookup

TORCH = os.path.dirname(torch.__file__) + os.sep


class Near(NamedTuple):
    """How far one step comes at one node: which steps are there, and what is wrong, by step."""

    there: Mapping[int, fx.Node]
    wrong: Mapping[int, str]


def explain(search: Search) -> str | None:
    """Say what comes nearest; None where no operation of the pattern occurs."""
    if anchors := search.anchors():
        told = [_unbound(search, anchor) for anchor in anchors]
        return next(filter(None, told), None)
    near: dict[tuple[int, Any], Near] = {}
    for step in search.pattern.steps:
        for node in _candidates(search, step):
            near[step.number, node] = _near(search, step, node, near)
    if not near:
        return None
    position = search.index.position
    (number, node), best = max(near.items(), key=lambda one: (len(one[1].there), one[0][0], -position[one[0][1]]))
    steps = search.pattern.steps
    first = min(best.wrong, default=len(steps))
    wrong = best.wrong[first] if best.wrong else _after(search, steps[number], node)
    before = [one for at, one in best.there.items() if at < first]
    last = max(before, key=position.__getitem__, default=None)
    after = "" if last is None else f"after `{last.name}`{place(last)}, "
    return f"matched {len(best.there)} of {count(len(steps), 'operation')}; {after}{wrong}"


def _candidates(search: Search, step: Step) -> list[fx.Node]:
    return [*search.candidates(step), *search.index.named.get(("in place", step.key), [])]


def _near(search: Search, step: Step, node: fx.Node, near: Mapping[tuple[int, Any], Near]) -> Near:
    """The better of the ways to lay a step's arguments beside a node's."""
    found: list[Near] = []
    for wanted, given in search.ways(step, node):
        there: dict[int, fx.Node] = {}
        wrong: dict[int, str] = {}
        fit = _laid(search, tuple(wanted), tuple(given), near, there, wrong)
        if not fit:
            wrong[step.number] = _differ(search, step, node)
        elif search.index.forms[node].key == step.key and node not in search.index.named.get(step.key, []):
            wrong[step.number] = f"`{node.name}` writes in place into what others may see{place(node)}"
        elif outside := _outside(search, step, node):
            wrong[step.number] = outside
        else:
            there[step.number] = node
        found.append(Near(there, wrong))
    return max(found, key=lambda one: len(one.there), default=Near({}, {step.number: _differ(search, step, node)}))


def _laid(
    search: Search,
    wanted: Any,
    given: Any,
    near: Mapping[tuple[int, Any], Near],
    there: dict[int, fx.Node],
    wrong: dict[int, str],
) -> bool:
    """Lay one argument beside another; whether it is right, its own operands left aside."""
    if type(wanted) is tuple and type(given) is tuple and len(wanted) == len(given):
        laid = [_laid(search, *pair, near, there, wrong) for pair in zip(wanted, given, strict=True)]
        return all(laid)
    if type(wanted) is not Ref:
        return search.fits(wanted, given)
    if (known := near.get((wanted.number, given))) is not None:
        there.update(known.there)
        wrong.update(known.wrong)
    else:
        wrong[wanted.number] = _differ(search, search.pattern.steps[wanted.number], given)
    return True


def _outside(search: Search, step: Step, node: fx.Node) -> str | None:
    number = search.index.users(node)
    if step.output or step.cheap or number == step.users:
        return None
    users = [user for user in node.users if user not in search.index.cheap]
    keys = [one.key for one in search.pattern.steps if search.pattern.refs[step.number] in one.args]
    others = [user for user in users if user not in search.index.forms or search.index.forms[user].key not in keys]
    if number > step.users:
        return f"an intermediate (`{node.name}`) is used outside of the match by `{(others or users)[-1].name}`{place(node)}"
    return f"`{node.name}` is used by {count(number, 'operation')}, and in the pattern by {step.users}{place(node)}"


def _after(search: Search, step: Step, node: fx.Node) -> str:
    """What the pattern goes on with, and what the forward does."""
    ref = search.pattern.refs[step.number]
    following = next((one for one in search.pattern.steps if ref in one.args), None)
    users = [user for user in node.users if user in search.index.forms]
    if following is None:
        return "nothing else is there"
    has = ", ".join(show_node(search.index, user) + place(user) for user in users[:3])
    return f"the pattern has {show_step(following)} and the forward {f'has {has}' if has else 'goes on with nothing'}"


def _differ(search: Search, step: Step, given: Any) -> str:
    other = show_node(search.index, given) + place(given) if isinstance(given, fx.Node) else _shown(given)
    return f"the pattern has {show_step(step)} and the forward has {other}"


def _unbound(search: Search, anchor: fx.Node) -> str | None:
    """Why everything is there, and is no match."""
    binding = Binding(search)
    if binding.find(anchor) or binding.refused is None:
        return None
    kind, what, value = binding.refused
    number = len(search.pattern.steps)
    text = f"matched {number} of {count(number, 'operation')} up to `{anchor.name}`{place(anchor)}; but "
    if kind == "twice":
        name = f"`{what.name}`" if isinstance(what, (Input, Free)) else "one value"
        return text + f"{name} of the pattern would have to be both {_named(value[0])} and {_named(value[1])}"
    if kind == "outside":
        return text + f"an intermediate (`{what.name}`) is used outside of the match by `{value.name}`"
    told = {
        "inside": "an input of the pattern would be a value of the match itself, `{}`",
        "around": "`{}`, outside of the match, uses a value of it and is used in it",
        "written": "`{}` writes in place between the operations of the match",
    }
    return text + told[kind].format(value.name)


def _named(value: Any) -> str:
    return f"`{value.name}`" if isinstance(value, (fx.Node, Attr)) else short(value)


def show_step(step: Step) -> str:
    """An operation of a pattern, in short: ``mul(·, 0.044715)``."""
    if step.which is not None:
        return f"call_module({short(step.which)}, …)"
    return _call(step.key, step.args if step.key in lookup().ops else _written(plain(step.node.args), step.node.kwargs))


def show_node(index: Index, node: fx.Node) -> str:
    """An operation of a forward, in short; what is no operation, by its name."""
    if node not in index.forms:
        return f"`{node.name}`"
    known = index.forms[node].op is not None
    shown = _call(index.forms[node].key, index.args(node) if known else _written(*index.raw(node)))
    return shown + (f" of `{node.target}`" if node in index.modules else "")


def _written(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call that the table does not know, those by name last."""
    return (*args, *(plain(value) for value in kwargs.values()))


def _call(key: Any, args: Any) -> str:
    name = key if isinstance(key, str) else key[-1] if type(key) is tuple else getattr(key, "__name__", str(key))
    shown = [*args]
    op = lookup().ops.get(name)
    while op and shown and len(shown) > 1 and (shown[-1] is ANYTHING or op.defaults[len(shown) - 1] is shown[-1]):
        shown.pop()
    return f"{name}({', '.join(map(_shown, shown))})"


def _shown(value: Any) -> str:
    if isinstance(value, Free):
        return value.name
    if isinstance(value, Attr):
        return f"`{value.name}`"
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value))})"
    return "·" if isinstance(value, (fx.Node, *HOLES)) else short(value)


def place(node: fx.Node) -> str:
    """Where the forward's code has a node, if that is known."""
    lines = [
        one for one in re.findall(r'File "([^"]*)", line (\d+)', node.stack_trace or "") if not one[0].startswith(TORCH)
    ]
    return f" at {os.path.basename(lines[-1][0])}:{lines[-1][1]}" if lines else ""
