"""cast: hold parameters and buffers in another floating dtype.

h.0.mlp.c_fc.weight: float32   ->   h.0.mlp.c_fc.weight: bfloat16
"""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import NamedTuple

from .._named import checked_names, named_tensors
from .._rules import Site
from .._text import what
from .._weights import renewed
from ..errors import ArgumentError, MisfitError
from ..schedule import Phase, Schedule, add, traits
from ..selection import M, Target


class CastArgs(NamedTuple):
    """What `cast` was given; see there."""

    dtype: torch.dtype
    names: str = "**"


def cast(schedule: Schedule, target: Target[M], dtype: torch.dtype, names: str = "**") -> Schedule:
    """Hold the floating parameters and buffers of each selected module, and of all below it, in another dtype.

    Integer, boolean and complex tensors stay, and so do buffers that are not saved (rotary ``inv_freq``, position
    tables), unless ``names`` asks for them. A tied parameter is one parameter: it is cast under all its names. As with
    `nn.Module.to`, what a module computes in follows from its weights and inputs; inputs are not converted.

    Args:
        schedule: The schedule so far.
        target: The modules.
        dtype: A floating dtype, such as ``torch.bfloat16``.
        names: A pattern over the dotted names of the parameters and buffers below each module.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: The dtype is none, or not a floating one.

    When applied, it raises:
        ParameterNameError: ``names`` matches nothing in a module.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> half = slapo.apply(nn.Linear(2, 2), slapo.cast(slapo.Schedule(), "", torch.bfloat16, "weight"))
        >>> half.weight.dtype, half.bias.dtype
        (torch.bfloat16, torch.float32)
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"cast takes a floating dtype, such as torch.bfloat16, not {what(dtype)}")
    return add(schedule, target, cast_at, CastArgs(dtype, checked_names(names)))


@traits(Phase.NUMERICS)
def cast_at(site: Site[nn.Module], args: CastArgs) -> nn.Module:
    """Lower one `cast` entry at one place."""
    for dotted, holder, name, tensor in named_tensors(site.path, site.module, args.names):
        if not tensor.is_floating_point() or tensor.dtype == args.dtype:
            continue
        if args.names == "**" and name in holder._non_persistent_buffers_set:
            continue
        if nn.parameter.is_lazy(tensor):
            raise MisfitError(f"{dotted} has no shape yet (a lazy module): run the model once before you cast it")
        site.renew(tensor, renewed(tensor, dtype=args.dtype))
    return site.module
