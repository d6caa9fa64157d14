"""How things are named to people: many paths on few lines, a value in a message, a text in a notebook."""

from __future__ import annotations

import functools
import html
import re
import types
from collections.abc import Iterable, Sequence

import torch
from torch import nn

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def fold(paths: Iterable[str]) -> list[str]:
    """Fold paths that differ in one number, then in the next, in the order in which they first appear.

    Example:
        >>> fold(["h.0.mlp", "h.1.mlp", "h.2.mlp", "lm_head"])
        ['h.{0...2}.mlp', 'lm_head']
        >>> fold(["h.0", "h.2", "h.4"])
        ['h.{0,2...4}']
    """
    lines = list(dict.fromkeys(paths))
    deepest = max((len(NUMBER.findall(line)) for line in lines), default=0)
    for place in reversed(range(deepest)):
        lines = _fold_at(lines, place)
    return lines


def _fold_at(lines: Sequence[str], place: int) -> list[str]:
    groups: dict[str | tuple[str, str], list[int]] = {}
    for line in lines:
        found = list(NUMBER.finditer(line))
        if len(found) <= place:
            groups.setdefault(line, [])
        else:
            at = found[place]
            groups.setdefault((line[: at.start()], line[at.end() :]), []).append(int(at.group()))
    return [key if isinstance(key, str) else f"{key[0]}{_span(numbers)}{key[1]}" for key, numbers in groups.items()]


def _span(numbers: Sequence[int]) -> str:
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    step = ordered[1] - ordered[0]
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
        return f"{{{ordered[0]}{'' if step == 1 else ',' + str(ordered[1])}...{ordered[-1]}}}"
    if len(ordered) == 2 and step == 1:
        return f"{{{ordered[0]},{ordered[1]}}}"
    return "{" + ",".join(map(str, ordered)) + "}"


def count(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "entry"), count(2, "entry"), count(0, "place")
        ('1 entry', '2 entries', '0 places')
    """
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def what(thing: object) -> str:
    """A value, named for a message; never a module's repr."""
    if isinstance(thing, nn.Module):
        return f"a module ({type(thing).__name__})"
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"{type(thing).__name__} {str(thing)[:40]!r}"


def kind(module: nn.Module) -> str:
    """What a module is, in a word: its class, or what a part of a forward (`Subgraph`) says that it computes."""
    said = getattr(type(module), "kind", None)
    return str(said.__get__(module)) if isinstance(said, property) else type(module).__name__


def short(value: object) -> str:
    """A value as an argument is shown: a function by its name, a module by its class, a dtype without ``torch.``."""
    if isinstance(value, functools.partial):
        return f"partial({short(value.func)})"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(…)"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__
    if callable(value):
        return (
            str(getattr(value, "__qualname__", type(value).__name__)).removeprefix("<locals>.").split("<locals>.")[-1]
        )
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of text, each column as wide as its widest cell."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}".rstrip() for line in lines]


def page(text: str, *, marks: Sequence[str] = ()) -> str:
    """A text for a notebook, escaped, in the notebook's own colours; what stands between two marks is struck through."""
    shown = html.escape(text)
    for mark, tag in zip(marks, ("<s>", "</s>"), strict=False):
        shown = shown.replace(mark, tag)
    return f'<pre style="line-height:1.35">{shown}</pre>'
