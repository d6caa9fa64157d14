"""decompose: take a layer apart, so that its parts can be fused with what stands around it.

linear(x)   ->   x @ linear.weight.T, then + linear.bias          qkv_proj(x)   ->   q_proj(x), k_proj(x), v_proj(x)
"""

from __future__ import annotations

from torch import nn

from .._rules import Site, fits
from .._siblings import part_siblings
from ..errors import MisfitError
from ..nn.linear import FusedLinear, LinearWithSeparateBias
from ..schedule import Schedule, add
from ..selection import M, Target


def decompose(schedule: Schedule, target: Target[M]) -> Schedule:
    """Compute each selected linear layer as a matmul and then an addition; or take apart what `fuse` made of layers.

    An `nn.Linear` keeps its name, its state-dict keys and its very parameters; one without a bias stays as it is. A
    `FusedLinear` that stands beside the layers it computes is taken away, and they are linear layers again, with parameters of
    their own and the names that they had.

    Args:
        schedule: The schedule so far.
        target: The layers.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    When applied, it raises:
        MisfitError: A selected module is no linear layer.
        TieError: A parameter of a fused layer is tied.

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
    if isinstance(old, FusedLinear) and site.tree is not None:
        part_siblings(site.tree, old, site.path)
        return old
    if not isinstance(old, nn.Linear) or not (fits(old, nn.Linear, False) or isinstance(old, LinearWithSeparateBias)):
        raise MisfitError(
            f"{site.path or 'the root'} is a {type(old).__name__}; only an nn.Linear is taken apart: select with type=nn.Linear",
            [site.path],
        )
    if nn.parameter.is_lazy(old.weight):
        raise MisfitError(
            f"{site.path or 'the root'} has no shape yet (a lazy module): run the model once before", [site.path]
        )
    if old.bias is None or isinstance(old, LinearWithSeparateBias):
        return old
    return LinearWithSeparateBias.from_linear(old)
