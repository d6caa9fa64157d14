"""Where the user's code wrote an entry: the nearest frame outside this package."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Origin(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: The file's path, as Python knows it.
        line: The line, counted from 1.
        cell: In a notebook the cell, as ``In[3]``; else empty.
    """

    file: str
    line: int
    cell: str = ""

    def __str__(self) -> str:
        return f"{self.cell or os.path.basename(self.file)}:{self.line}"


def here() -> Origin:
    """The line that called into slapo_fn.

    A frame whose code has a local ``__tracebackhide__`` is passed over, so that a user's own builder can stand aside.
    """
    frame: FrameType | None = sys._getframe(1)
    last = frame
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) and "__tracebackhide__" not in code.co_varnames:
            return Origin(code.co_filename, frame.f_lineno, _cell(frame))
        last, frame = frame, frame.f_back
    return Origin(last.f_code.co_filename, last.f_lineno) if last else Origin("", 0)


def _cell(frame: FrameType) -> str:
    """The notebook cell of a frame, or nothing. IPython is asked only where it runs already."""
    interactive = sys.modules.get("IPython")
    if interactive is None or (shell := interactive.get_ipython()) is None:
        return ""
    outer: FrameType | None = frame
    nothing: dict[str, tuple[str, str]] = {}
    while outer is not None:  # the body of a cell magic such as %%time is compiled apart: its cell is further out
        named = getattr(shell.compile, "format_code_name", nothing.get)(outer.f_code.co_filename)
        if named is not None:
            return str(named[1])
        outer = outer.f_back
    return ""
