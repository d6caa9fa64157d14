"""What can go wrong: one class a cause, each also a builtin error, its facts as attributes.

Everything that slapo_fn raises on purpose is a `SlapoError`. Most carry ``paths``, the modules that they are about, and
notes that say which entry of the schedule it was and where that entry was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class SlapoError(Exception):
    """The base of every error that slapo_fn raises on purpose.

    Args:
        message: What is wrong, where, and what to do.
        paths: The dotted paths that the error is about.
    """

    paths: tuple[str, ...] = ()

    def __init__(self, message: str, paths: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


class ArgumentError(SlapoError, TypeError):
    """A builder, a selector or `apply` was given a thing of the wrong kind."""


class PatternError(SlapoError, ValueError):
    """A path pattern is not well formed."""


class NoMatchError(SlapoError, LookupError):
    """A selector, or one pattern of several, picks no module."""


class CountError(SlapoError, ValueError):
    """`exactly(n, …)` found another number of modules."""


class MisfitError(SlapoError, TypeError):
    """A primitive was asked to work on a module, or got back a thing, that it cannot take."""


class ParameterNameError(SlapoError, AttributeError):
    """A module has no parameter or buffer of that name."""


class TraceError(SlapoError, RuntimeError):
    """A forward cannot be turned into a graph, or a traced one was called in a way that it was not traced for."""


class WeightsError(SlapoError, ValueError):
    """The old module's weights do not fit the new one by name and shape."""


class TieError(SlapoError, ValueError):
    """An entry would separate parameters that are tied, or modules that are shared."""


class HookError(SlapoError, ValueError):
    """Hooks on modules inside a replaced one would be lost."""


class SizeError(SlapoError, ValueError):
    """Sizes do not go together: heads do not divide the hidden size, say."""


class UnsupportedError(SlapoError, NotImplementedError):
    """A module was asked for something that it does not compute."""


class ForkError(SlapoError, TypeError):
    """A module cannot be copied apart from its original."""


class ScheduleError(SlapoError, ExceptionGroup[Exception]):
    """Several problems of one schedule, found in one pass; nothing was changed.

    The problems themselves are in ``exceptions``, in the order in which they were met.
    """

    def __new__(cls, message: str, problems: Sequence[Exception]) -> ScheduleError:
        return super().__new__(cls, message, problems)

    def __init__(self, message: str, problems: Sequence[Exception]) -> None:
        super().__init__(message, [path for problem in problems for path in getattr(problem, "paths", ())])

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (ScheduleError, (self.message, list(self.exceptions)))

    def derive(self, excs: Sequence[Exception], /) -> ScheduleError:  # type: ignore[override]
        """A part of the group is a group of the same class (`split`, `subgroup` and ``except*`` ask for it)."""
        return ScheduleError(self.message, excs)
