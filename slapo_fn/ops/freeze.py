"""freeze: take parameters out of training, or with `unfreeze` back into it.

wte.weight: requires_grad=True   ->   wte.weight: requires_grad=False
"""

from __future__ import annotations

from torch import nn
from typing_extensions import NamedTuple

from .._named import checked_names, named_tensors
from .._rules import Site
from .._weights import renewed
from ..errors import MisfitError
from ..schedule import Phase, Schedule, add, traits
from ..selection import M, Target


class FreezeArgs(NamedTuple):
    """What `freeze` or `unfreeze` was given; see there."""

    names: str = "**"
    requires_grad: bool = False


def freeze(schedule: Schedule, target: Target[M], names: str = "**") -> Schedule:
    """Take the parameters of each selected module, and of all below it, out of training.

    It has its turn among the structural entries, in the order as written: what a later entry adds is trainable, and what
    it puts in a frozen module's place is frozen, too. A tied parameter is one parameter: it is frozen under all its names.

    Args:
        schedule: The schedule so far.
        target: The modules.
        names: A pattern over the dotted names of the parameters below each module.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: ``names`` is no pattern.

    When applied, it raises:
        ParameterNameError: ``names`` matches nothing in a module.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> fixed = slapo.apply(nn.Linear(2, 2), slapo.freeze(slapo.Schedule(), "", "bias"))
        >>> fixed.weight.requires_grad, fixed.bias.requires_grad
        (True, False)
    """
    return add(schedule, target, freeze_at, FreezeArgs(checked_names(names)))


def unfreeze(schedule: Schedule, target: Target[M], names: str = "**") -> Schedule:
    """Take the parameters of each selected module, and of all below it, back into training.

    Args:
        schedule: The schedule so far.
        target: The modules.
        names: A pattern over the dotted names of the parameters below each module.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: ``names`` is no pattern.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> sch = slapo.unfreeze(slapo.freeze(slapo.Schedule(), ""), "1")
        >>> tuned = slapo.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sch)
        >>> [parameter.requires_grad for parameter in tuned.parameters()]
        [False, False, True, True]
    """
    return add(schedule, target, unfreeze_at, FreezeArgs(checked_names(names), requires_grad=True))


@traits(Phase.STRUCTURE, overrides=lambda earlier, later: earlier.names == later.names)
def freeze_at(site: Site[nn.Module], args: FreezeArgs) -> nn.Module:
    """Lower one `freeze` or `unfreeze` entry at one place."""
    for dotted, _, _, tensor in named_tensors(site.path, site.module, args.names):
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad == args.requires_grad:
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue  # has no gradient
        if nn.parameter.is_lazy(tensor):
            raise MisfitError(f"{dotted} has no shape yet (a lazy module): run the model once before you freeze it")
        site.renew(tensor, renewed(tensor, requires_grad=args.requires_grad))
    return site.module


@traits(Phase.STRUCTURE, overrides=lambda earlier, later: earlier.names == later.names)
def unfreeze_at(site: Site[nn.Module], args: FreezeArgs) -> nn.Module:
    """Lower one `unfreeze` entry at one place."""
    return freeze_at(site, args)
