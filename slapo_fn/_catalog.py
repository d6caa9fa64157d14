"""The list of primitives, read off the package itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import NamedTuple

from . import ops
from ._match.equal import table
from ._text import columns


class Primitive(NamedTuple):
    """A primitive as the list shows it.

    Attributes:
        name: How it is called: ``slapo_fn.<name>``.
        doc: The first line of its documentation.
    """

    name: str
    doc: str


class Primitives(tuple[Primitive, ...]):
    """All primitives; shows itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        width = max(len(one.name) for one in self)
        return "\n".join(f"{one.name.ljust(width)}  {one.doc}" for one in self)


def primitives() -> Primitives:
    """List all primitives with a line of documentation each.

    Example:
        >>> import slapo_fn as slapo
        >>> [one.name for one in slapo.primitives()][:3]
        ['annotate', 'cast', 'checkpoint']
    """
    found: list[Primitive] = []
    for info in sorted(pkgutil.iter_modules(ops.__path__), key=lambda one: one.name):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__ and _builds(function):
                found.append(Primitive(name, (inspect.getdoc(function) or "").split("\n")[0]))
    return Primitives(found)


class Operation(NamedTuple):
    """What a pattern takes for one operation, however it is spelled.

    Attributes:
        name: What it is called.
        parameters: Its arguments, with their defaults.
        spellings: Functions, methods (``.relu``), modules and ATen operators.
    """

    name: str
    parameters: str
    spellings: tuple[str, ...]


class Operations(tuple[Operation, ...]):
    """All operations; shows itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(columns((one.name, one.parameters, ", ".join(one.spellings)) for one in self))


def operations() -> Operations:
    """List what `pattern` takes for equal: each operation with the ways in which it is spelled.

    Example:
        >>> import slapo_fn as slapo
        >>> slapo.operations()[0]
        Operation(name='relu', parameters='input', spellings=('F.relu', 'torch.relu', '.relu', 'nn.ReLU', 'aten.relu'))
    """
    return Operations(Operation(*row) for row in table())


def _builds(function: object) -> bool:
    """Whether a function is a builder: it takes a schedule first."""
    return next(iter(inspect.signature(function).parameters), "") == "schedule"  # type: ignore[arg-type]
