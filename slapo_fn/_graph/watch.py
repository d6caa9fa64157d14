"""What a trace would get wrong without a sound: tests of a value that is not known yet.

    if mask is None: …      print(x)      isinstance(x, Tensor)

On a traced value such a test has one answer, whatever the call. `Watch` sees the functions that run during a trace.
"""

# pyright: reportUnknownMemberType=false
# torch's functions are only partly typed.

from __future__ import annotations

import dis
import functools
import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
ASKING: dict[str, Callable[..., Any]] = {"type": type, "hasattr": hasattr, "callable": callable, "str": str}
FORBIDDEN = {
    torch.autocast.__enter__.__code__: "computes under autocast",
    torch.inference_mode.__enter__.__code__: "computes in inference mode",
    torch.autograd.Function.apply.__code__: "calls a function with a backward pass of its own",
    torch.manual_seed.__code__: "seeds the random state",
    torch.is_tensor.__code__: "asks whether a traced value is a tensor",
}
FORBIDDEN_C: dict[Any, str] = {
    torch.is_grad_enabled: "asks whether gradients are on",
    torch.is_autocast_enabled: "asks whether autocast is on",
    torch.is_inference_mode_enabled: "asks whether it is inference mode",
}
DICE = random.seed.__self__  # type: ignore[attr-defined]
OURS = (HERE, TORCH, "<frozen", "<string>", "<slapo_fn trace")


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
    """A test, in a function's code, whether one of its variables is None, or is the very value that another one is."""

    name: str
    line: int
    of_none: bool


class Tracing(Protocol):
    """What a watch asks of a tracer, and tells it."""

    def known(self, proxy: fx.Proxy) -> Any: ...
    def guard(self, node: fx.Node, name: str) -> None: ...


class Watch:
    """Looks, while it is entered, into every function of the user's that is called."""

    def __init__(self, tracer: Tracing) -> None:
        self.tracer = tracer
        self.refusal: Refusal | None = None
        self.changed: list[dict[str, Any]] = []
        self.codes: dict[int, tuple[CodeType, tuple[Question, ...] | None, str]] = {}
        self.own: dict[str, Any] = {"isinstance": self._isinstance, "print": self._print, "getattr": self._getattr}
        for name, ask in ASKING.items():
            self.own[name] = functools.partial(self._ask, name, ask)

    def __enter__(self) -> Watch:
        self.before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        set_profile(self.before)
        for space in self.changed:
            for name, own in self.own.items():
                if space.get(name) is own:
                    del space[name]

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        known = self.codes.get(id(code))  # by identity, for a code's own hash reads all of it
        if known is None:
            known = self.codes[id(code)] = (code, questions(code), FORBIDDEN.get(code, ""))
        _, asked, forbidden = known
        if forbidden and event == "call":
            self._forbid(frame, forbidden)
        if asked is None or self.refusal is not None or event == "c_return":
            return
        if event == "c_call":
            self._called(frame, arg)
        elif event in ("call", "return"):
            if event == "call":
                self._enter(code, frame.f_globals)
            for question in asked:
                self._look(code, question, frame.f_locals.get(question.name))

    def _enter(self, code: CodeType, space: dict[str, Any]) -> None:
        """Give a function's module our own in place of the builtin ones that it uses."""
        for name, own in self.own.items():
            if name in code.co_names and name not in space:
                space[name] = own
                self.changed.append(space)

    def _called(self, frame: FrameType, function: Any) -> None:
        is_random = getattr(function, "__self__", None) is DICE
        if is_random or function in FORBIDDEN_C:
            what = "draws a random number of python's" if is_random else FORBIDDEN_C[function]
            self.refusal = Refusal(
                place(frame.f_code.co_filename, frame.f_lineno), f"{what}, once, while it is traced."
            )

    def _forbid(self, frame: FrameType, what: str) -> None:
        if self.refusal is not None:
            return
        outer: FrameType | None = frame.f_back
        while outer is not None and outer.f_code.co_filename.startswith(TORCH):
            outer = outer.f_back
        if outer is not None and not ours(outer.f_code.co_filename):
            reason = f"{what}, which a graph does not hold."
            self.refusal = Refusal(place(outer.f_code.co_filename, outer.f_lineno), reason, "trace it as a leaf")

    def _look(self, code: CodeType, question: Question, value: Any) -> None:
        if not isinstance(value, fx.Proxy):
            return
        where = place(code.co_filename, question.line)
        if not question.of_none:
            self.refusal = Refusal(where, f"asks whether {question.name} is another value, which is not known.")
        elif _may_be_none(value.node):
            self.refusal = Refusal(
                where,
                f"asks whether {question.name} is None, and a traced value never is.",
                f"fix the argument, constants={{{str(value.node.target)!r}: None}}",
            )
        elif value.node.op in ("placeholder", "call_module"):
            self.tracer.guard(value.node, question.name)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        return bool(self._ask("isinstance", isinstance, value, kinds))

    def _ask(self, name: str, ask: Callable[..., Any], value: Any, *rest: Any) -> Any:
        if isinstance(value, fx.Proxy) and not (rest and rest[0] is fx.Proxy):
            known = self.tracer.known(value)
            if known is not None:
                return ask(known, *rest)
            self._refuse(f"asks {name}(…) of a traced value, which is only known when the model runs.")
        return ask(value, *rest)

    def _getattr(self, value: Any, name: str, *default: Any) -> Any:
        return self._ask("getattr", getattr, value, name, *default) if default else getattr(value, name)

    def _print(self, *values: Any, **settings: Any) -> None:
        self._refuse("prints, which would happen once, while it is traced.", "show values with slapo.probe instead")

    def _refuse(self, reason: str, way_out: str = "") -> None:
        self.refusal = self.refusal or here(reason, way_out)


def set_profile(profile: Any) -> None:
    """Let a profile go on: a function, or a profiler such as cProfile's, which is none."""
    if profile is None or callable(profile):
        sys.setprofile(profile)
    else:
        profile.enable()


def here(reason: str, way_out: str = "") -> Refusal:
    """A refusal of the innermost line of the user's that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and ours(frame.f_code.co_filename):
        frame = frame.f_back
    return Refusal(place(frame.f_code.co_filename, frame.f_lineno) if frame else "its forward", reason, way_out)


def ours(file: str) -> bool:
    """Whether a file belongs to torch, to this package or to Python itself, and is no affair of the user's."""
    return file.startswith(OURS) or (file.startswith(PYTHON) and "site-packages" not in file)


@functools.lru_cache(maxsize=4096)
def questions(code: CodeType) -> tuple[Question, ...] | None:
    """The variables that a function's code compares with None; None for code that is no affair of the user's."""
    if ours(code.co_filename):
        return None
    found: list[Question] = []
    line, loaded = code.co_firstlineno, [("", None)] * 4
    for one in dis.get_instructions(code):
        if isinstance(one.starts_line, int) and not isinstance(one.starts_line, bool):
            line = one.starts_line
        names = [str(name) for kind, name in loaded if kind.startswith(("LOAD_FAST", "LOAD_DEREF"))]
        of_none = any(kind == "LOAD_CONST" and value is None for kind, value in loaded[2:])
        if "IF_NONE" in one.opname or "IF_NOT_NONE" in one.opname or (one.opname == "IS_OP" and of_none):
            found.extend(Question(name, line, True) for name in names[-1:])
        elif one.opname == "IS_OP":
            found.extend(Question(name, line, False) for name in names)
        loaded = [*loaded[1:], (one.opname, one.argval)]
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
