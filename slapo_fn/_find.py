"""Look paths up on a model's real tree."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ._glob import Glob, State
from ._tree import join

Found = list[tuple[str, nn.Module]]
ANY_NUMBER = 1 << 62


def find(root: nn.Module, glob: Glob) -> Found:
    """The modules whose paths match, each once, at its first matching path, in module order."""
    found: Found = []
    taken: set[int] = set()
    seen: set[tuple[int, State]] = set()
    steps: dict[tuple[State, str, int], State] = {}
    waiting: list[tuple[str, nn.Module, State]] = [("", root, glob.start())]
    while waiting:
        path, module, state = waiting.pop()
        key = (id(module), state)
        if key in seen:
            continue
        seen.add(key)
        if glob.accepts(state) and id(module) not in taken:
            taken.add(id(module))
            found.append((path, module))
        if not module._modules:
            continue
        count = _count(module) if glob.counts else 0
        onward = []
        for name, child in module._modules.items():
            if child is not None:
                after = steps.get((state, name, count))
                if after is None:
                    after = steps[state, name, count] = glob.step(state, name, count)
                if after:
                    onward.append((f"{path}.{name}" if path else name, child, after))
        waiting.extend(reversed(onward))
    return found


def _count(module: nn.Module) -> int:
    digits = [int(name) for name in module._modules if name.isdecimal()]
    return max(digits) + 1 if digits else ANY_NUMBER


def spelled(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its paths, in module order."""
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        path, module = waiting.pop()
        yield path, module
        children = reversed(module._modules.items())
        waiting.extend((join(path, name), child) for name, child in children if child is not None)
