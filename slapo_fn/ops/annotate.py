"""annotate: hang a value on a parameter, for an optimizer or a runtime to read.

ln.weight   ->   ln.weight with ln.weight.sequence_parallel == True
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn
from typing_extensions import NamedTuple

from .._named import checked_names, named_tensors
from .._rules import Site
from .._text import what
from .._weights import renewed
from ..errors import ArgumentError, MisfitError
from ..schedule import Phase, Schedule, add, traits
from ..selection import M, Target


class AnnotateArgs(NamedTuple):
    """What `annotate` was given; see there."""

    names: str
    key: str
    value: Hashable


def annotate(schedule: Schedule, target: Target[M], names: str, key: str, value: Hashable) -> Schedule:
    """Hang a value, as an attribute, on parameters or buffers.

    The keys in use are those of the schedule: ``{e.args.key for e in slapo.entries(sch, slapo.AnnotateArgs)}``.

    Args:
        schedule: The schedule so far.
        target: The modules.
        names: A pattern over the dotted names of the parameters and buffers below each module.
        key: The attribute's name.
        value: Its value.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: The key is no identifier, or one that a tensor has already.

    When applied, it raises:
        ParameterNameError: ``names`` matches nothing in a module.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> sch = slapo.annotate(slapo.Schedule(), nn.LayerNorm, "*", "no_decay", True)
        >>> slapo.apply(nn.Sequential(nn.LayerNorm(2)), sch)[0].bias.no_decay
        True
    """
    if not isinstance(key, str) or not key.isidentifier():
        raise ArgumentError(f"a key is an attribute's name, not {what(key)}")
    if hasattr(Tensor, key):
        raise ArgumentError(f"every tensor has a {key!r} of its own; choose another key")
    return add(schedule, target, annotate_at, AnnotateArgs(checked_names(names), key, value))


@traits(Phase.NUMERICS, overrides=lambda earlier, later: earlier[:2] == later[:2])
def annotate_at(site: Site[nn.Module], args: AnnotateArgs) -> nn.Module:
    """Lower one `annotate` entry at one place."""
    for dotted, _, _, tensor in named_tensors(site.path, site.module, args.names):
        if nn.parameter.is_lazy(tensor):
            raise MisfitError(f"{dotted} has no shape yet (a lazy module): run the model once before you annotate it")
        made = renewed(tensor)
        setattr(made, args.key, args.value)
        site.renew(tensor, made)
    return site.module
