"""Layers of one input, side by side in one parent, that are computed as one; the parent's forward stays as it is.

parent.q_proj(x), parent.k_proj(x)   ->   Share 0 and Share 1 of parent.qk_proj(x), which is computed once

Nothing is traced: the first of them that is called in a call of the parent computes all, and each gives its part.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._forward import Forward, layers, wrap
from ._graph.subgraph import Subgraph
from ._inherit import inherit
from ._layout.inverse import over
from ._layout.lineage import declare
from ._layout.sources import Cat, Source, Transposed, WeightMap, rename, resolved, transposed
from ._rules import Places, Rule, Site
from ._text import kind
from ._ties import broken_ties, refuse_open
from ._tree import Tree, join, own_tensors
from .errors import MisfitError, NoMatchError
from .nn.linear import FusedLinear


@dataclass(frozen=True)
class Grouped(Rule):
    """The parents of a rule's places, each with the children that are among them; parts of forwards stay as they are."""

    rule: Rule

    def resolve(self, root: nn.Module) -> Places:
        sites = self.rule.resolve(root)
        if all(isinstance(site.module, Subgraph) for site in sites):
            return sites
        parents: dict[str, Site[nn.Module]] = {}
        for path, module in sites:
            parent, _, name = path.rpartition(".")
            if path == "":
                raise NoMatchError(f"{self.rule} gives the root, which has no siblings")
            site = parents.setdefault(parent, Site(parent, root.get_submodule(parent)))
            site.children = (*site.children, name)
            site.shown = (kind(module), "")
        if alone := [
            join(site.path, name) for site in parents.values() for name in site.children if len(site.children) < 2
        ]:
            raise NoMatchError(f"{', '.join(alone)}: a layer alone has nothing to be fused with", alone)
        return list(parents.values())

    def left_out(self, root: nn.Module) -> Places:
        return self.rule.left_out(root)

    def __str__(self) -> str:
        return str(self.rule)


class Memo:
    """What was computed in a call of the parent and is not taken yet."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.x: Tensor | None = None
        self.state: object = None
        self.left: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()


class Share(nn.Module):
    """One output of a layer that computes several, in the place of the layer that computed it alone.

    Attributes:
        fused: The layer that computes all, registered beside it.
        index: Which of its outputs this is.
    """

    is_trace_leaf = True
    fused: nn.Module
    memo: Memo
    index: int

    def __init__(self, fused: nn.Module, memo: Memo, index: int) -> None:
        super().__init__()
        vars(self).update(fused=fused, memo=memo, index=index)

    @property
    def rows(self) -> slice:
        """Its rows in the fused weight."""
        sizes: Sequence[int] = self.fused.out_features  # type: ignore[assignment]
        return slice(sum(sizes[: self.index]), sum(sizes[: self.index + 1]))

    @property
    def weight(self) -> Tensor:
        """Its rows of the fused weight, (E, D)."""
        return self.fused.weight[self.rows]  # type: ignore[index]

    @property
    def bias(self) -> Tensor | None:
        """Its part of the fused bias, (E,)."""
        return None if self.fused.bias is None else self.fused.bias[self.rows]  # type: ignore[index]

    @property
    def in_features(self) -> int:
        size: int = self.fused.in_features  # type: ignore[assignment]
        return size

    @property
    def out_features(self) -> int:
        sizes: Sequence[int] = self.fused.out_features  # type: ignore[assignment]
        return sizes[self.index]

    def forward(self, input: Tensor) -> Tensor:
        memo, state = self.memo, _state(self.fused, input)
        if memo.x is not input or memo.state != state or self.index not in memo.left:
            outputs: tuple[Tensor, ...] = self.fused(input)
            memo.x, memo.state, memo.left = input, state, dict(enumerate(outputs))
        taken = memo.left.pop(self.index)
        if not memo.left:
            memo.x = None
        return taken

    def extra_repr(self) -> str:
        return f"output {self.index} of a layer that computes {len(self.fused.out_features)}"  # type: ignore[arg-type]


def _state(fused: nn.Module, x: Tensor) -> object:
    """What a layer's result depends on beside its input: what was written since, and what is switched on around it."""
    kind = x.device.type
    around = torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    if torch.compiler.is_compiling():
        return around
    held = (x, *fused._parameters.values())
    return around, [(id(one), one._version) for one in held if one is not None and not one.is_inference()]


class Sharing(Forward):
    """The layer around a parent's forward that lets nothing of one call be left for the next."""

    rank: ClassVar[int] = 0
    as_given: ClassVar[tuple[str, ...]] = ()  # the memos are copied with the shares that use them

    args: tuple[Memo, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.call(*args, **kwargs)
        finally:
            for memo in self.args:
                memo.clear()


def shared_name(names: Sequence[str]) -> str:
    """A name for what some layers are together.

    Example:
        >>> shared_name(["q_proj", "k_proj", "v_proj"]), shared_name(["gate_proj", "up_proj"]), shared_name(["q", "k"])
        ('qkv_proj', 'gate_up_proj', 'qk')
    """
    tail = os.path.commonprefix([name[::-1] for name in names])[::-1]  # noqa: RUF071  of characters it shall be
    tail = tail[tail.index("_") :] if "_" in tail else ""
    heads = [name.removesuffix(tail) for name in names]
    return ("" if all(len(head) == 1 for head in heads) else "_").join(heads) + tail


def layout(fused: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Source]:
    """Where the tensors of a fused layer come from, by names relative to the parent of what it was made of."""
    given: WeightMap = vars(fused)["weight_map"]
    shapes = {f"{name}.{key}": tuple(one.shape) for name, layer in layers.items() for key, one in own_tensors(layer)}
    beneath = {
        f"{name}.{key}": rename(source, partial(join, name))
        for name, layer in layers.items()
        if isinstance(known := vars(layer).get("weight_map"), WeightMap) and not known.up
        for key, source in known.sources
    }
    return {key: over(resolved(source, shapes), beneath) for key, source in given.sources}


def fuse_siblings(tree: Tree, parent: nn.Module, names: Sequence[str], fused: nn.Module, name: str) -> None:
    """Register a layer that computes several, and let each of these be its share.

    Raises:
        TieError: One of their parameters is tied to another, which would stay as it was.
    """
    memo = Memo()
    old = [parent._modules[one] for one in names]
    shares = [Share(fused, memo, index) for index in range(len(names))]
    for child, share in zip(old, shares, strict=True):
        assert child is not None
        refuse_open(tree, broken_ties(tree, child, fused))
        inherit(tree, child, share)
    tree.touch(parent)
    for child, share in zip(old, shares, strict=True):
        assert child is not None
        tree.put(child, share)
        tree.links.append((share, "fused"))
    order = list(parent._modules)
    parent._modules[name] = fused
    for one in order[order.index(names[0]) :]:  # it stands before the first of them, where its weights were
        parent._modules[one] = parent._modules.pop(one)
    fused.train(parent.training)
    known = [layer.args for layer in layers(parent) if isinstance(layer, Sharing)]
    wrap(parent, Sharing(parent, (*(known[0] if known else ()), memo)))


def part_siblings(tree: Tree, fused: FusedLinear, path: str) -> None:
    """Take away a layer that computes several, and let each of these be a linear layer of its own.

    Raises:
        MisfitError: It stands beside no layers that are its shares.
    """
    parent = next((parent for parent, _ in tree.registrations(fused)), tree.root)
    shares = {name: one for name, one in parent._modules.items() if isinstance(one, Share) and one.fused is fused}
    if not shares:
        raise MisfitError(f"{path or 'the root'} stands beside no layers that it was fused from", [path])
    refuse_open(tree, broken_ties(tree, fused, nn.Identity()))
    declared = dict(vars(fused)["weight_map"].sources)["weight"]
    for share in shares.values():
        made = nn.Linear(share.in_features, share.out_features, fused.bias is not None, device="meta")
        made.weight = nn.Parameter(share.weight.detach().clone(), fused.weight.requires_grad)
        if fused.bias is not None and share.bias is not None:
            made.bias = nn.Parameter(share.bias.detach().clone(), fused.bias.requires_grad)
        if isinstance(declared, Cat) and isinstance(declared.sources[share.index], Transposed):
            declare(made, {"weight": transposed("weight")})  # it was a Conv1D
        inherit(tree, share, made)
        tree.put(share, made)
    tree.touch(parent)
    for name in [name for name, one in parent._modules.items() if one is fused]:
        del parent._modules[name]
    tree.gone.append(fused)
