"""Look paths up on a model's real tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from ._glob import Glob, State
from ._tree import held_collector, join

Found = list[tuple[str, nn.Module]]
ANY_NUMBER = 1 << 62


def find(root: nn.Module, glob: Glob, admits: Callable[[nn.Module], bool] | None = None) -> Found:
    """The modules whose paths match, each once, at its first matching path, in module order.

    Args:
        root: Where the paths start.
        glob: The pattern.
        admits: Which modules are wanted at all; asked once for each class.
    """
    walk = Walk(glob, admits)
    start = glob.start()
    if glob.accepts(start) and walk.admitted(root):
        walk.found[id(root)] = ("", root)
    if root._modules:
        with held_collector():
            walk.below("", root, start)
    return list(walk.found.values())


class Walk:
    """A walk down a tree, as far as a pattern can still match."""

    def __init__(self, glob: Glob, admits: Callable[[nn.Module], bool] | None) -> None:
        self.glob = glob
        self.admits = admits
        self.kinds: dict[type, bool] = {}
        self.found: dict[int, tuple[str, nn.Module]] = {}
        self.seen: set[tuple[int, State]] = set()
        self.steps: dict[tuple[State, str, int], tuple[State, bool]] = {}

    def admitted(self, module: nn.Module) -> bool:
        """Whether a module is wanted."""
        kind = type(module)
        if kind not in self.kinds:
            self.kinds[kind] = self.admits is None or self.admits(module)
        return self.kinds[kind]

    def below(self, path: str, module: nn.Module, state: State) -> None:
        """Find what matches below a module whose own path brought the pattern to a state."""
        if (id(module), state) in self.seen:
            return
        self.seen.add((id(module), state))
        found, kinds, prefix = self.found, self.kinds, path + "." if path else ""
        count = _count(module) if self.glob.counts else 0
        fixed = self._step(state, "", count) if self.glob.takes_any(state) else None
        for name, child in module._modules.items():
            if child is None:
                continue
            after, accepted = fixed or self._step(state, name, count)
            if accepted:
                kind = type(child)
                if (kinds[kind] if kind in kinds else self.admitted(child)) and id(child) not in found:
                    found[id(child)] = (prefix + name, child)
            if after and child._modules:
                self.below(prefix + name, child, after)

    def _step(self, state: State, name: str, count: int) -> tuple[State, bool]:
        """Where one more step leads, and whether that is a whole match."""
        known = self.steps.get((state, name, count))
        if known is None:
            after = self.glob.step(state, name, count)
            known = self.steps[state, name, count] = (after, self.glob.accepts(after))
        return known


def _count(module: nn.Module) -> int:
    digits = [int(name) for name in module._modules if name.isdecimal()]
    return max(digits) + 1 if digits else ANY_NUMBER


def spelled(module: nn.Module, path: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its paths, in module order; one that is registered inside itself, once."""
    yield path, module
    if module._modules:
        above = above | {id(module)}
        for name, child in module._modules.items():
            if child is not None and id(child) not in above:
                yield from spelled(child, join(path, name), above)
