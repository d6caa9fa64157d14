"""decompose: take a layer apart, so that its parts can be fused with what stands around it.

linear(x)   ->   x @ linear.weight.T, then + linear.bias
"""

from __future__ import annotations

from torch import nn

from .._rules import Site, fits
from ..errors import MisfitError
from ..nn.linear import LinearWithSeparateBias
from ..schedule import Schedule, add
from ..selection import M, Target


def decompose(schedule: Schedule, target: Target[M]) -> Schedule:
    """Compute each selected linear layer as a matmul and then an addition, on the same parameters.

    Outputs, names, state-dict keys and the parameters themselves stay. A layer without a bias stays as it is.

    Args:
        schedule: The schedule so far.
        target: The `nn.Linear` layers.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    When applied, it raises:
        MisfitError: A selected module is no linear layer.

    Example:
        >>> import slapo_fn as slapo
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> type(slapo.apply(net, slapo.decompose(slapo.Schedule(), nn.Linear))[0]).__name__
        'LinearWithSeparateBias'
    """
    return add(schedule, target, decompose_at, None)


def decompose_at(site: Site[nn.Module], args: None) -> nn.Module:
    """Lower one `decompose` entry at one place."""
    old = site.module
    if not isinstance(old, nn.Linear) or not (fits(old, nn.Linear, False) or isinstance(old, LinearWithSeparateBias)):
        raise MisfitError(
            f"{site.path or 'the root'} is a {type(old).__name__}; only an nn.Linear is taken apart: select with type=nn.Linear",
            [site.path],
        )
    if old.bias is None or isinstance(old, LinearWithSeparateBias):
        return old
    return LinearWithSeparateBias.from_linear(old)
