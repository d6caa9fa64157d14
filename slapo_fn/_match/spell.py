"""The table of what counts as equal, ready to look a call up in it, and to bind the call's arguments."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .equal import SPELLING, rows

MISSING = inspect.Parameter.empty
IGNORED = ("_stacklevel", "implicit", "half_to_float", "cudnn_enable", "cudnn_enabled", "inplace")
OTHER_NAMES = {"self": "input", "train": "training", "indices": "input", "axis": "dim", "keepdims": "keepdim"}


class Op(NamedTuple):
    """A row: one operation.

    Attributes:
        name: The operation's name.
        parameters: The names of its parameters, by which calls are compared.
        defaults: Their defaults, MISSING where there is none.
        rest: Whether the last parameter takes all that is left.
        swaps: The positions of two parameters that may change places.
        alias: Whether the result may share memory with what went in.
        cheap: Whether it only tells about a tensor.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: tuple[Any, ...]
    rest: bool = False
    swaps: tuple[int, int] | None = None
    alias: bool = False
    cheap: bool = False


class Spelling(NamedTuple):
    """One way to write an operation.

    Attributes:
        op: The operation.
        text: How the table writes the spelling.
        names: The spelling's own parameters.
        places: The position of each in the operation's parameters; -1 for one that is not the operation's.
        spare: For each of the latter the value that it must have; MISSING if any will do.
        start: The operation's arguments before any is given: defaults, and what the spelling fixes.
        rest: Whether the last parameter takes all that is left.
        writes: Whether the call writes into its first argument.
    """

    op: Op
    text: str
    names: tuple[str, ...]
    places: tuple[int, ...]
    spare: tuple[Any, ...]
    start: tuple[Any, ...]
    rest: bool = False
    writes: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The operation's arguments for a call, in the order of the row; None if the call is not of this form."""
        values, places = list(self.start), self.places
        if self.rest and len(args) >= len(places):
            left = args[len(places) - 1 :]
            whole = len(left) == 1 and not isinstance(left[0], int)
            args = (*args[: len(places) - 1], left[0] if whole else tuple(left))
        if len(args) > len(places):
            return None
        for place, spare, value in zip(places, self.spare, args, strict=False):
            if place >= 0:
                values[place] = value
            elif spare is not MISSING and spare != value:
                return None
        for name, value in kwargs.items():
            at = self._at(name)
            if at is None:
                if name not in IGNORED:
                    return None
            elif places[at] >= 0:
                values[places[at]] = value
            elif self.spare[at] is not MISSING and self.spare[at] != value:
                return None
        for value in values:
            if value is MISSING:
                return None
        return values

    def _at(self, name: str) -> int | None:
        """Which of the spelling's parameters a keyword means."""
        for one in (name, OTHER_NAMES.get(name)):
            if one in self.names:
                return self.names.index(one)
        return None


class Table(NamedTuple):
    """The rows, and the spellings by what a graph's node calls: a function, a method's name, an attribute's, a module's class."""

    ops: dict[str, Op]
    functions: dict[Any, Spelling]
    methods: dict[str, Spelling]
    attributes: dict[str, Spelling]
    modules: dict[Any, Spelling]


@lru_cache(maxsize=1)
def lookup() -> Table:
    """The table, ready to be looked things up in."""
    made = Table({}, {}, {}, {}, {})
    for name, parameters, spellings, flags in rows():
        names, defaults, rest = _parameters(parameters)
        words = flags.split()
        swaps = (names.index(words[0][1:]), names.index(words[1])) if flags.startswith("~") else None
        op = Op(name, names, defaults, rest, swaps, "alias" in words, "cheap" in words)
        made.ops[name] = op
        for text in SPELLING.findall(spellings):
            _enter(made, op, text)
    return made


def _enter(made: Table, op: Op, text: str) -> None:
    """Enter a spelling, and its brother that writes in place."""
    name, _, own = text.partition("(")
    own = own.removesuffix(")")
    if name[0] in "@.":
        spelling = _spelling(op, text, None, own)
        (made.attributes if name[0] == "@" else made.methods)[name[1:]] = spelling
        if name[0] == "." and hasattr(torch.Tensor, name[1:] + "_"):
            made.methods[name[1:] + "_"] = spelling._replace(text=text + "_", writes=True)
        return
    target = _resolve(name)
    if target is None:
        return  # this version of torch lacks it
    spelling = _spelling(op, text, target, own)
    (made.modules if isinstance(target, type) else made.functions)[target] = spelling
    writing = None if isinstance(target, type) else _resolve(_in_place(name))
    if writing is not None and writing not in made.functions:
        made.functions[writing] = spelling._replace(text=_in_place(name), writes=True)


def _in_place(name: str) -> str:
    where, what, *overload = name.split(".")
    return ".".join([where, "i" + what.rstrip("_") if where == "operator" else what + "_", *overload])


def _resolve(name: str) -> Any:
    """What a dotted name of the table stands for; None if there is nothing of that name."""
    first, *others = name.split(".")
    if first == "aten" and len(others) == 1:
        others.append("default")
    found: Any = {"F": F, "torch": torch, "nn": nn, "operator": operator, "aten": torch.ops.aten}[first]
    for part in others:
        found = getattr(found, part, None)
    return found


def _parameters(text: str) -> tuple[tuple[str, ...], tuple[Any, ...], bool]:
    """Names, defaults, and whether the last takes the rest."""
    parsed = ast.parse(f"lambda {text.replace('*', '')}: 0", mode="eval").body
    assert isinstance(parsed, ast.Lambda)
    names = tuple(argument.arg for argument in parsed.args.args)
    given = [
        getattr(torch, one.id) if isinstance(one, ast.Name) else ast.literal_eval(one) for one in parsed.args.defaults
    ]
    return names, (MISSING,) * (len(names) - len(given)) + tuple(given), "*" in text


def _spelling(op: Op, text: str, target: Any, own: str) -> Spelling:
    rest = op.rest
    if own:
        written, defaults, rest = _parameters(own)
    else:
        written, defaults = _declared(target) or (op.parameters, op.defaults)
    names = tuple(name if name in op.parameters else OTHER_NAMES.get(name, name) for name in written)
    places = tuple(op.parameters.index(name) if name in op.parameters else -1 for name in names)
    if isinstance(target, type):
        places = (0, *places[1:])  # whatever its forward calls the input
    if own and written[:2] == ("other", "input"):
        names = (
            "input",
            "other",
            *names[2:],
        )  # as torch calls them: ``torch.gt(input, other)`` is ``lt(other, input)``
    elif own and (declared := _schema(target)):
        called = [OTHER_NAMES.get(name, name) for name in declared[0][: len(names)]]
        names = (*called, *names[len(called) :])
    spare = tuple(MISSING if name in IGNORED else default for name, default in zip(names, defaults, strict=True))
    start = list(op.defaults)
    for place, default in zip(places, defaults, strict=True):
        if place >= 0:
            start[place] = default
    if isinstance(target, type):  # its attributes give what its forward does not take
        start = [None if value is MISSING and at not in places else value for at, value in enumerate(start)]
    return Spelling(op, text, names, places, spare, tuple(start), rest)


def _declared(target: Any) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """A function's own parameters, a module's forward's, or those of an operator's schema; None where none are declared."""
    if target is None or target.__class__.__name__ == "builtin_function_or_method":
        return None
    if schema := _schema(target):
        return schema
    try:
        run = getattr(target, "forward") if isinstance(target, type) else target  # noqa: B009
        parameters = [*inspect.signature(run).parameters.values()]
    except (TypeError, ValueError):
        return None
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return None
    parameters = parameters[isinstance(target, type) :]
    return tuple(one.name for one in parameters), tuple(one.default for one in parameters)


def _schema(target: Any) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """An operator's names and defaults."""
    declared: list[Any] | None = getattr(getattr(target, "_schema", None), "arguments", None)
    if declared is None:
        return None
    defaults: list[Any] = []
    for one in declared:
        default: Any = one.default_value if one.has_default_value() else MISSING
        defaults.append((*default,) if type(default) is list else default)
    return tuple(str(one.name) for one in declared), tuple(defaults)
