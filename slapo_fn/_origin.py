"""Where the user's code wrote an entry: the nearest frame outside this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
            return _written(frame)
        last, frame = frame, frame.f_back
    return Origin(last.f_code.co_filename, last.f_lineno) if last else Origin("", 0)


def _written(frame: FrameType) -> Origin:
    """A frame's line, and in a notebook its cell. IPython is asked only where it runs already."""
    code, line = frame.f_code, frame.f_lineno
    name = _cell_names()
    own = name(code.co_filename) if name else None
    if name is None or (own is None and not code.co_filename.startswith("<")):
        return Origin(code.co_filename, line)  # a module, be it one that a notebook imports
    if own is not None and code.co_name != "<module>":
        return Origin(code.co_filename, line, own[1])  # a function: the cell that defines it
    cell, magics, bodies = "", 0, -1
    outer: FrameType | None = frame
    while outer is not None:  # the body of a cell magic is compiled apart, without the magic's own line
        named = name(outer.f_code.co_filename)
        if outer.f_code.co_name == "<module>" and (named is not None or outer.f_code.co_filename.startswith("<")):
            bodies += 1
            if named is not None:
                cell, magics = named[1], bodies
        outer = outer.f_back
    return Origin(code.co_filename, line + magics, cell)


def _cell_names() -> Callable[[str], tuple[str, str] | None] | None:
    """IPython's own way from a file's name to a cell's, if it runs."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(getattr(shell, "compile", None), "format_code_name", None)
