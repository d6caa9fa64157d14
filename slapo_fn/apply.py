"""apply: materialise a schedule on a model, in one loop that can be stepped through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from ._engine import prepare
from .schedule import Entry

Model = TypeVar("Model", bound=nn.Module)


def apply(model: Model, schedule: Iterable[Entry[Any]], *, inplace: bool = False) -> Model:
    """Materialise a schedule: a new model of the same class, which shares every tensor that no entry touches.

    Entries are lowered in order of their primitives' phases, and within a phase in the order in which they were written.
    Each entry sees the model as the entries before it left it. A pass sets the global random state and puts it back, so one
    thread applies at a time.

    Args:
        model: The model; it stays as it was, its tensors, hooks and flags, and the random state, too.
        schedule: A schedule, or any tuple of entries.
        inplace: Edit the given model itself, and give it back; if there is a problem it is as it was.

    Raises:
        SlapoError: The one problem that there is, of the class that says its kind; or a `ScheduleError` with all of
            them. Notes name the entry, the place and the line that wrote the entry. Nothing was changed.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> fast = slapo.apply(net, slapo.replace(slapo.Schedule(), nn.GELU, nn.ReLU()))
        >>> type(fast[1]).__name__, type(net[1]).__name__, fast[0].weight is net[0].weight
        ('ReLU', 'GELU', True)
    """
    for entry, site in (work := prepare(model, schedule, inplace=inplace)):
        with work: work.put(site, entry.primitive(site, entry.args))  # noqa: E701  one line is one step of a debugger
    return work.finish()
