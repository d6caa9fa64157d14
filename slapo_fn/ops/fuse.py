"""fuse: compute several operations, or several layers of one input, as one.

q_proj(x), k_proj(x), v_proj(x)   ->   qkv_proj(x)          gelu(fc(x))   ->   FusedLinear_0(x), or one compiled kernel
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn
from typing_extensions import NamedTuple

from .._compiled import CompileArgs, Compiled, check_backend
from .._forward import wrap
from .._graph.subgraph import Subgraph
from .._layout.lineage import declare
from .._rules import Site
from .._siblings import Grouped, Share, fuse_siblings, layout, shared_name
from .._text import fold, what
from ..errors import ArgumentError, MisfitError
from ..nn.linear import FusedLinear
from ..schedule import Schedule, add
from ..select import as_selector
from ..selection import M, Selector, Target


class FuseArgs(NamedTuple):
    """What `fuse` was given; see there."""

    into: Callable[[Any], nn.Module] | None = None
    backend: str | Callable[..., Any] | None = "inductor"
    name: str | None = None


def fuse(
    schedule: Schedule,
    target: Target[M],
    into: Callable[[M], nn.Module] | None = None,
    *,
    backend: str | Callable[..., Any] | None = "inductor",
    name: str | None = None,
) -> Schedule:
    """Compute several operations, or several layers of one input, as one.

    Layers are given by their paths: those of one parent (``"**.{q,k,v}_proj"``, `nn.Linear` or ``Conv1D``) become one
    `FusedLinear` beside them, registered as ``qkv_proj``, and each of them gives its part of the result, its weight and its
    sizes, so that the parent's code and what reads their attributes go on as they were. Nothing is traced. Select layers that
    are called with one input: one that gets another is right, but all of them are computed for it. A plain checkpoint is
    then loaded by `from_original`, and saved by `to_original`.

    Operations are given by a `pattern`. They become the module that ``into`` makes of them, or, without it, a compiled
    function, and then every name stays as it is.

    Args:
        schedule: The schedule so far.
        target: The layers, or a pattern of operations.
        into: For a pattern: called with the `Subgraph` at each place, gives the module that computes it. The modules that
            it calls are ``subgraph.calls``.
        backend: For a pattern without ``into``: the backend of `torch.compile`; None puts a chain of modules in an
            `nn.Sequential`.
        name: What the new module is registered as; else it is named after the layers, in the order in which the parent has
            them, or after its class, with a number.

    Returns:
        The schedule with one more entry.

    Raises:
        ArgumentError: An argument is of the wrong kind.

    When applied, it raises:
        MisfitError: Layers differ in their input, dtype, device, frozenness or bias, or are no linear layers.
        TieError: A parameter of theirs is tied.
        NoMatchError: A layer has no siblings among the others.

    Example:
        >>> import slapo_fn as slapo, torch
        >>> from torch import nn
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.q_proj(x).sum() + self.k_proj(x).sum()
        >>> net = Attention()
        >>> fast = slapo.apply(net, slapo.fuse(slapo.Schedule(), "{q,k}_proj"))
        >>> torch.allclose(fast(torch.ones(1, 4)), net(torch.ones(1, 4))), [*fast.state_dict()]
        (True, ['qk_proj.weight', 'qk_proj.bias'])
    """
    if into is not None and not callable(into):
        raise ArgumentError(f"into is a function Subgraph -> module, not {what(into)}")
    check_backend(backend)
    if name is not None and not name.isidentifier():
        raise ArgumentError(f"a name is one that an attribute can have, not {what(name)}")
    grouped: Selector[Any] = Selector(Grouped(as_selector(target).rule))
    return add(schedule, grouped, fuse_at, FuseArgs(into, backend, name))


def fuse_at(site: Site[nn.Module], args: FuseArgs) -> nn.Module:
    """Lower one `fuse` entry at one place: a part of a forward, or the parent of some layers."""
    module = site.module
    if not isinstance(module, Subgraph):
        return _layers(site, args)
    if args.into is not None:
        return args.into(module)
    if args.backend is None:
        return _sequential(module, site.path)
    wrap(module, Compiled(module, CompileArgs(backend=args.backend)))
    return module


def _layers(site: Site[nn.Module], args: FuseArgs) -> nn.Module:
    assert site.tree is not None
    if args.into is not None:
        raise MisfitError(
            f"{', '.join(fold(site.children))}: layers given by their paths become a FusedLinear; to make another module of "
            "them, give a pattern that calls them",
            [site.path],
        )
    parent, names = site.module, site.children
    if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        raise MisfitError(
            f"{site.path or 'the root'} is a {type(parent).__name__}, and what it holds is called by its number or name: only "
            "the layers of a module with a forward of its own are fused",
            [site.path],
        )
    if any(isinstance(parent._modules.get(name), Share) for name in names):
        raise MisfitError(f"{', '.join(names)} of {site.path or 'the root'} are fused already", [site.path])
    children = [parent.get_submodule(name) for name in names]
    if len(set(map(id, children))) < len(children):
        raise MisfitError(f"{', '.join(names)} are one shared layer", [site.path])
    name = args.name or shared_name(names)
    if hasattr(parent, name):
        raise MisfitError(
            f"{site.path or 'the root'} has an attribute {name} already: give another, name=…", [site.path]
        )
    fused = FusedLinear.from_linears(*children, names=names)
    declare(fused, layout(fused, dict(zip(names, children, strict=True))), up=1)
    fuse_siblings(site.tree, parent, names, fused, name)
    site.shown = (site.shown[0], name)
    return parent


def _sequential(part: Subgraph, path: str) -> nn.Module:
    chain = part.nodes
    straight = all(mine.args == (before,) and not mine.kwargs for before, mine in pairwise(chain))
    if any(node.op != "call_module" for node in chain) or not straight or len(part.paths) < len(chain):
        raise MisfitError(
            f"{part.kind} at {path} is no chain of different modules, and without a backend only such a chain can be put in "
            "one module: give a backend, or into=…",
            [path],
        )
    return nn.Sequential(*part.calls)
