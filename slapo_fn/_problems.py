"""Several problems of one schedule, told at once and folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ._text import count, fold
from .errors import ScheduleError


class Problem(NamedTuple):
    """An error with the entry that it comes from and, unless it is the selector's, the place."""

    error: Exception
    entry: str
    path: str
    placed: bool

    @property
    def hints(self) -> list[str]:
        """The notes on the error, but for the one that names the entry."""
        return [note for note in getattr(self.error, "__notes__", []) if not note.startswith(self.entry)]


def raised(problems: Sequence[Problem]) -> Exception:
    """What to raise: the one problem itself, or all of them together."""
    if len(problems) == 1:
        return problems[0].error
    entries = len({problem.entry for problem in problems})
    head = f"{count(len(problems), 'problem')} in {count(entries, 'entry')}; nothing was changed"
    return ScheduleError("\n".join([head, *told(problems)]), [problem.error for problem in problems])


def told(problems: Sequence[Problem]) -> list[str]:
    """The problems as lines, those of one entry that differ in the place only on one."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        text = f"{type(problem.error).__name__}: {problem.error}"
        groups.setdefault((problem.entry, text.replace(problem.path, "…") if problem.path else text), []).append(
            problem
        )
    lines: list[str] = []
    for (entry, _), same in groups.items():
        lines.append(f"  {entry}")
        if same[0].placed:
            lines.append(f"    at {', '.join(fold(one.path or 'the root' for one in same))}")
        text = "\n".join([f"{type(same[0].error).__name__}: {same[0].error}", *same[0].hints])
        lines.append("      " + text.replace("\n", "\n      "))
    return lines
