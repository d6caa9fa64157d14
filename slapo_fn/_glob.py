"""The pattern language: how a path is written with holes in it. Strings are parsed here and nowhere else.

transformer.h.*.mlp         one segment             **.attn           any number of segments, none included
h.*.{q,k,v}_proj            alternatives            **.proj*          `*` inside a segment: any characters
h.[0:6]  h.[::2]  h.[-1]    Python's slices and indices over the digit names of one parent
layer[1-3]                  numbers from 1 to 3, both included
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from .errors import PatternError

MOST_ALTERNATIVES = 4096


class Numbers(NamedTuple):
    """The numbers that one ``[…]`` admits: any of its slices."""

    slices: tuple[slice, ...]

    @property
    def from_end(self) -> bool:
        """Whether a bound counts from the end."""
        return any(bound is not None and bound < 0 for one in self.slices for bound in (one.start, one.stop))

    def admits(self, number: int, count: int) -> bool:
        """Whether a number is in, where ``count`` is one more than the greatest number among the siblings."""
        return any(number in range(*one.indices(count)) for one in self.slices)


class Segment(NamedTuple):
    """One segment of a pattern: a literal name, or a regular expression with a ``Numbers`` for each of its groups."""

    text: str
    regex: re.Pattern[str] | None = None
    numbers: tuple[Numbers, ...] = ()

    def matches(self, name: str, count: int) -> bool:
        """Whether a child's name fits; see `Numbers.admits` for ``count``."""
        if self.regex is None:
            return name == self.text
        found = self.regex.fullmatch(name)
        return found is not None and all(
            numbers.admits(int(digits), count) for numbers, digits in zip(self.numbers, found.groups(), strict=True)
        )


DEEP = Segment("**")
State = frozenset[tuple[int, int]]  # (alternative, how many of its segments are consumed)


class Glob(NamedTuple):
    """A parsed pattern: some alternatives, each a sequence of segments."""

    alternatives: tuple[tuple[Segment, ...], ...]
    counts: bool  # whether a name's fit depends on its siblings

    @property
    def from_end(self) -> bool:
        """Whether a bound counts from the end of its siblings."""
        return any(numbers.from_end for segments in self.alternatives for one in segments for numbers in one.numbers)

    def start(self) -> State:
        """The state before the first segment."""
        return self._open((number, 0) for number in range(len(self.alternatives)))

    def step(self, state: State, name: str, count: int = 0) -> State:
        """The state after one more step down; empty when nothing below can match. Dots in a name are steps, too."""
        for part in name.split(".") if "." in name else (name,):
            state = self._open(
                (number, at if self.alternatives[number][at] is DEEP else at + 1)
                for number, at in state
                if at < len(self.alternatives[number])
                and ((segment := self.alternatives[number][at]) is DEEP or segment.matches(part, count))
            )
        return state

    def takes_any(self, state: State) -> bool:
        """Whether the next step goes the same way for every name."""
        return all(at == len(self.alternatives[n]) or self.alternatives[n][at] is DEEP for n, at in state)

    def accepts(self, state: State) -> bool:
        """Whether the path so far is a whole match."""
        return any(at == len(self.alternatives[number]) for number, at in state)

    def _open(self, positions: Iterable[tuple[int, int]]) -> State:
        found: set[tuple[int, int]] = set()
        for number, at in positions:
            segments = self.alternatives[number]
            found.add((number, at))
            while at < len(segments) and segments[at] is DEEP:
                at += 1
                found.add((number, at))
        return frozenset(found)


_literal = lru_cache(maxsize=4096)(Segment)


@lru_cache(maxsize=4096)
def parse(pattern: str) -> Glob:
    """Parse one pattern.

    Raises:
        PatternError: A segment is empty, or a bracket or brace is not closed or makes no sense.
    """
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a str, not {type(pattern).__name__}: {pattern!r}")
    written = _braces(_spans(pattern), pattern) if "{" in pattern or "}" in pattern else [pattern]
    alternatives = tuple(tuple(_segments(whole, pattern)) for whole in written)
    counts = any(segment.numbers for segments in alternatives for segment in segments)
    return Glob(alternatives, counts)


def _spans(text: str) -> str:
    """``{0...3}`` and ``{0,2...10}``, as paths are shown, written as ``{0,1,2,3}`` and so on."""

    def written(found: re.Match[str]) -> str:
        first, second, last = int(found[1]), found[2], int(found[3])
        step = int(second) - first if second else 1
        if step < 1 or (last - first) // step > MOST_ALTERNATIVES:
            return found[0]
        return "{" + ",".join(map(str, range(first, last + 1, step))) + "}"

    return re.sub(r"\{(\d+)(?:,(\d+))?\.\.\.(\d+)\}", written, text)


def _braces(text: str, pattern: str) -> list[str]:
    """Write out ``{a,b}``, innermost last, as a shell does."""
    start = text.find("{")
    if start < 0:
        if "}" in text:
            raise PatternError(f"the pattern {pattern!r} closes a brace that was never opened")
        return [text]
    parts: list[str] = []
    depth, last = 0, start + 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if text[at] == "," and depth == 1:
            parts.append(text[last:at])
            last = at + 1
        if depth == 0:
            parts.append(text[last:at])
            tails = _braces(text[at + 1 :], pattern)
            made = [text[:start] + head + tail for part in parts for head in _braces(part, pattern) for tail in tails]
            if len(made) > MOST_ALTERNATIVES:
                raise PatternError(f"the pattern {pattern!r} stands for more than {MOST_ALTERNATIVES} alternatives")
            return made
    raise PatternError(f"the pattern {pattern!r} opens a brace and does not close it")


def _segments(text: str, pattern: str) -> list[Segment]:
    if text == "":
        return []  # the root
    made: list[Segment] = []
    for part in text.split("."):
        if part == "":
            raise PatternError(f"the pattern {pattern!r} has an empty segment: two dots in a row, or one at an end")
        if "**" in part and part != "**":
            raise PatternError(f"the pattern {pattern!r} has '**' beside other characters; it is a whole segment")
        if not (part == "**" and made and made[-1] is DEEP):
            made.append(DEEP if part == "**" else _segment(part, pattern))
    return made


def _segment(part: str, pattern: str) -> Segment:
    if "*" not in part and "[" not in part and "]" not in part:
        return _literal(part)
    expression = ""
    numbers: list[Numbers] = []
    for piece in re.split(r"(\[[^\[\]]*\]|\*)", part):
        if piece == "*":
            expression += ".*"
        elif piece.startswith("[") and piece.endswith("]"):
            expression += r"(?<!\d)(\d+)(?!\d)"
            numbers.append(_numbers(piece[1:-1], pattern))
            if piece != part and any(one.from_end for one in numbers):
                raise PatternError(
                    f"the pattern {pattern!r} counts from the end in {part!r}; only a whole segment of numbers, as in "
                    "'h.[-1]', has an end to count from"
                )
        elif "[" in piece or "]" in piece:
            raise PatternError(f"the pattern {pattern!r} has a bracket without its partner")
        else:
            expression += re.escape(piece)
    return Segment(part, re.compile(expression, re.DOTALL), tuple(numbers))


def _numbers(text: str, pattern: str) -> Numbers:
    return Numbers(tuple(_slice(one.strip(), pattern) for one in text.split(",")))


def _slice(text: str, pattern: str) -> slice:
    number = r"(-?\d+)"
    if found := re.fullmatch(number, text):
        start = int(found[1])
        return slice(start, start + 1 if start != -1 else None)
    if found := re.fullmatch(r"(\d+)-(\d+)", text):
        first, last = int(found[1]), int(found[2])
        if first <= last:
            return slice(first, last + 1)
    if found := re.fullmatch(rf"{number}?:{number}?(?::{number}?)?", text):
        start_, stop, step = (int(found[n]) if found[n] else None for n in (1, 2, 3))
        if step is None or step > 0:
            return slice(start_, stop, step)
    raise PatternError(
        f"the pattern {pattern!r} has [{text}], which is no range of numbers: "
        "write [3], [0-5] (5 included), [0:6] (6 excluded), [::2] or [0,3,7]. "
        "A name that itself has brackets is reached with re.compile(re.escape(path))."
    )
