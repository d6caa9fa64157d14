"""What happens at the places of one entry: a module takes the place of another, and nothing that should stay is lost."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ._graph.outline import Outline, outlines
from ._graph.subgraph import Subgraph, lift_hooks
from ._inherit import inherit
from ._layout.lineage import record
from ._rules import Site
from ._ties import Break, broken_ties, only_place, refuse_open, refuse_split
from ._tree import Tree, below
from .errors import MisfitError, TieError


class Places:
    """The places of the entry that has its turn.

    Args:
        tree: The model that is edited.
        originals: ``id`` of each module of the given model to its copy; empty in place.
    """

    def __init__(self, tree: Tree, originals: Mapping[int, Any]) -> None:
        self.tree, self.originals = tree, originals
        self.open_ties: list[tuple[Site[nn.Module], list[Break]]] = []
        self.outlines: dict[int, Outline] = {}

    def open(self, sites: Iterable[Site[nn.Module]]) -> None:
        """Begin an entry: draw the parts of forwards that are among its places out, as modules."""
        self.outlines = outlines(self.tree, sites)

    def put(self, site: Site[nn.Module], new: nn.Module, args: object, *, shared: bool) -> str:
        """Let a module take the place of another; gives the path where it stands.

        An entry says otherwise by fields of its args: ``untie``, ``share``, ``inherit``, and for a part of a forward
        ``name`` and ``constants``.

        Raises:
            MisfitError: It stands elsewhere already, or takes other inputs.
            TieError: It would separate tied parameters.
            HookError: It would lose hooks.
        """
        old, untie = site.module, getattr(args, "untie", False)
        self._refuse_strangers(site, new, share=getattr(args, "share", False))
        if isinstance(old, Subgraph):
            lift_hooks(old, new)
        broken = broken_ties(self.tree, old, new)
        if not untie:
            refuse_split(self.tree, old, new)
            if broken:
                self.open_ties.append((site, broken))
        only = only_place(self.tree, old, site.path) if untie and shared else None
        record(new, old, site.path, site.path.rpartition(".")[0] if isinstance(old, Subgraph) else None)
        if getattr(args, "inherit", True):
            inherit(self.tree, old, new)
        self.tree.put(old, new, only=only)
        if broken and untie:
            _tell_config(self.tree)
        if not isinstance(old, Subgraph):
            return site.path
        name: str | None = getattr(args, "name", None)
        fixed: tuple[tuple[str, Any], ...] | None = getattr(args, "constants", ())
        constants = dict(fixed or ()) if hasattr(args, "constants") else None
        return self.outlines[id(old.owner)].rename(old, new, site.path, name, constants)

    def close(self) -> Iterator[tuple[Site[nn.Module], TieError]]:
        """End an entry: what of the parts is left goes back; ties that it opened and did not close are told."""
        for outline in self.outlines.values():
            outline.close()
        self.outlines = {}
        for site, broken in self.open_ties:
            try:
                refuse_open(self.tree, broken)
            except TieError as error:
                yield site, error
        self.open_ties.clear()

    def _refuse_strangers(self, site: Site[nn.Module], new: nn.Module, *, share: bool) -> None:
        old = site.module
        if not share and self.tree.holds(new) and all(new is not module for module in below(old)):
            raise MisfitError(
                f"the module for {site.path!r} stands at {self.tree.path(new)!r} already: give each place a module of its "
                "own, or share=True to share one on purpose.",
                [site.path],
            )
        known = self.originals
        if known and (strange := [module for module in below(new) if known.get(id(module), module) is not module]):
            raise MisfitError(
                f"the module for {site.path!r} holds a {type(strange[0]).__name__} of the model that was given to apply, "
                "which has to stay apart: build it from the module that the factory is called with.",
                [site.path],
            )


def _tell_config(tree: Tree) -> None:
    """Say in the model's own config that its embeddings are no longer tied, so that a saved model loads as it is."""
    config = getattr(tree.root, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    made: Any = copy.copy(config)
    made.tie_word_embeddings = False
    for module in below(tree.root):
        if vars(module).get("config") is config:
            tree.touch(module)
            vars(module)["config"] = made
