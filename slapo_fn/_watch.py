"""What a trace would get wrong without a sound: tests of a value that is not known yet.

    if mask is None: …      print(x)      isinstance(x, Tensor)

On a traced value such a test has one answer, whatever the call. `Watch` sees the functions that run during a trace.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import fx

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
OURS = (HERE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<frozen", "<string>", "<slapo_fn trace")


class Refusal(NamedTuple):
    """Why a forward is not traced.

    Attributes:
        place: File, line, and what is written there.
        reason: What is wrong with it.
        way_out: What to do about it.
    """

    place: str
    reason: str
    way_out: str = ""


class Question(NamedTuple):
    """A test, in a function's code, whether one of its variables is None."""

    name: str
    line: int


class Watch:
    """Looks, while it is entered, into every function of the user's that is called.

    Args:
        known: The value that a traced one stands for, where that is known: a parameter, say.
    """

    def __init__(self, known: Callable[[fx.Proxy], Any]) -> None:
        self.known = known
        self.refusal: Refusal | None = None
        self.changed: list[dict[str, Any]] = []
        self.own: dict[str, Any] = {"isinstance": self._isinstance, "print": self._print}

    def __enter__(self) -> Watch:
        self.before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self.before)
        for space in self.changed:
            for name, own in self.own.items():
                if space.get(name) is own:
                    del space[name]

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or self.refusal is not None:
            return
        code = frame.f_code
        asked = questions(code)
        if asked is None:
            return
        if event == "call":
            for name, own in self.own.items():  # the function's module gets these in place of the builtin ones
                if name in code.co_names and name not in frame.f_globals:
                    frame.f_globals[name] = own
                    self.changed.append(frame.f_globals)
        for question in asked:
            self._look(code, question, frame.f_locals.get(question.name))

    def _look(self, code: CodeType, question: Question, value: Any) -> None:
        if isinstance(value, fx.Proxy) and _may_be_none(value.node):
            self.refusal = Refusal(
                place(code.co_filename, question.line),
                f"asks whether {question.name} is None, and a traced value never is.",
                f"fix the argument, constants={{{str(value.node.target)!r}: None}}",
            )

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        if isinstance(value, fx.Proxy) and kinds is not fx.Proxy and self.refusal is None:
            known = self.known(value)
            if known is not None:
                return isinstance(known, kinds)
            self.refusal = self._here("asks of what class a traced value is, which is only known when the model runs.")
        return isinstance(value, kinds)

    def _print(self, *values: Any, **settings: Any) -> None:
        self.refusal = self.refusal or self._here(
            "prints, which would happen once, while it is traced.", "show values with slapo.probe instead"
        )

    @staticmethod
    def _here(reason: str, way_out: str = "") -> Refusal:
        frame = sys._getframe(2)
        return Refusal(place(frame.f_code.co_filename, frame.f_lineno), reason, way_out)


def ours(file: str) -> bool:
    """Whether a file belongs to torch or to this package, and is no affair of the user's."""
    return file.startswith(OURS)


@functools.lru_cache(maxsize=4096)
def questions(code: CodeType) -> tuple[Question, ...] | None:
    """The variables that a function's code compares with None; None for code that is no affair of the user's."""
    if ours(code.co_filename):
        return None
    found: list[Question] = []
    line, loaded = code.co_firstlineno, [("", None), ("", None)]
    for one in dis.get_instructions(code):
        if isinstance(one.starts_line, int) and not isinstance(one.starts_line, bool):
            line = one.starts_line
        names = [str(name) for kind, name in loaded if kind.startswith("LOAD_FAST")]
        if (
            "IF_NONE" in one.opname
            or "IF_NOT_NONE" in one.opname
            or (one.opname == "IS_OP" and any(kind == "LOAD_CONST" and value is None for kind, value in loaded))
        ):
            found.extend(Question(name, line) for name in names[-1:])
        loaded = [loaded[1], (one.opname, one.argval)]
    return tuple(dict.fromkeys(found))


def _may_be_none(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.args) and node.args[0] is None


def place(file: str, line: int) -> str:
    """A line of code, as an error shows it."""
    text = linecache.getline(file, line).strip()
    return f"{file}:{line} `{text}`" if text else f"{file}:{line}"


def located(error: BaseException) -> Refusal:
    """The innermost line of the user's that an error came through, and what it says."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not ours(one.filename)]
    said = str(error).strip().split("\n")[0] or type(error).__name__
    if "control flow" in said:
        said = "asks a traced value in a condition, and its answer is only known when the model runs."
    elif "cannot be iterated" in said:
        said = "iterates over a traced value, and how many there are is only known when the model runs."
    else:
        said = f"raised {type(error).__name__}: {said}"
    where = place(frames[-1].filename, frames[-1].lineno or 0) if frames else "its forward"
    return Refusal(where, said)
