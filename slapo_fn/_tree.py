"""Where every module and tensor of a model hangs, and the two edits that apply makes: `put` and `renew`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

class Edge(NamedTuple):
    """One registration of a module: ``parent`` has it as its child ``name``; ``path`` spells it from the root."""

    parent: nn.Module
    name: str
    path: str


def below(module: nn.Module) -> Iterator[nn.Module]:
    """The module and every distinct module below it, parents first, in definition order."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(child for child in reversed(one._modules.values()) if child is not None)


def join(prefix: str, name: str) -> str:
    """A path one step longer."""
    return f"{prefix}.{name}" if prefix else name


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that hang on this very module."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def all_tensors(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The tensors of some modules, by ``id``."""
    return {id(tensor): tensor for module in modules for _, tensor in own_tensors(module)}


class Tree:
    """A model that is being edited.

    The index of where things hang is made once, grows with every edit, and is checked against the modules when asked,
    so that an edit costs what it changes and never a walk of the model.

    Attributes:
        root: The model; a new object once the root itself was replaced.
        replaced: ``id`` of each module that was put out of the tree to the module in its place.
        journal: What every touched module's ``__dict__`` held before, kept only for an edit in place.
    """

    def __init__(self, root: nn.Module, *, keep_journal: bool = False) -> None:
        self.root = root
        self.replaced: dict[int, nn.Module] = {}
        self.shared: dict[int, nn.Module] = {}  # templates that several places share, by the given one's id
        self.gone: list[nn.Module | Tensor] = []  # keeps what was put out alive, so that no id is used twice
        self.journal: dict[int, tuple[nn.Module, dict[str, Any]]] | None = {} if keep_journal else None
        self._edges: dict[int, dict[tuple[int, str], Edge]] = {}
        self._slots: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] | None = None
        self._index(root, "")

    def _index(self, module: nn.Module, prefix: str) -> None:
        seen: set[int] = {id(module)}
        waiting = [(module, prefix)]
        while waiting:
            parent, prefix = waiting.pop()
            fresh: list[tuple[nn.Module, str]] = []
            for name, child in parent._modules.items():
                if child is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                self._edges.setdefault(id(child), {})[id(parent), name] = Edge(parent, name, path)
                if id(child) not in seen:
                    seen.add(id(child))
                    fresh.append((child, path))
            waiting.extend(reversed(fresh))

    def _index_tensors(self, top: nn.Module) -> None:
        assert self._slots is not None
        for module in below(top):
            for name, tensor in own_tensors(module):
                self._slots.setdefault(id(tensor), {})[id(module), name] = (module, name)

    # ---- where things hang

    def edges(self, module: nn.Module) -> list[Edge]:
        """Every registration of a module in the tree, in module order; none for the root."""
        known = self._edges.get(id(module), {}).values()
        return [edge for edge in known if edge.parent._modules.get(edge.name) is module and self.holds(edge.parent)]

    def holds(self, module: nn.Module) -> bool:
        """Whether a module stands in the tree."""
        return module is self.root or any(
            edge.parent._modules.get(edge.name) is module and self.holds(edge.parent)
            for edge in self._edges.get(id(module), {}).values()
        )

    def slots(self, tensor: Tensor) -> list[tuple[nn.Module, str]]:
        """Every place ``(module, name)`` that holds a tensor; more than one means that it is tied."""
        if self._slots is None:
            self._slots = {}
            self._index_tensors(self.root)
        known = self._slots.get(id(tensor), {}).values()
        return [(module, name) for module, name in known if self._held(module, name) is tensor and self.holds(module)]

    @staticmethod
    def _held(module: nn.Module, name: str) -> Tensor | None:
        return module._parameters[name] if name in module._parameters else module._buffers.get(name)

    def path(self, module: nn.Module) -> str:
        """A module's first path."""
        edges = self.edges(module)
        return edges[0].path if edges else ""

    # ---- edits

    def touch(self, module: nn.Module) -> None:
        """Note what a module holds, once, before it is edited."""
        if self.journal is not None and id(module) not in self.journal:
            held = dict(vars(module))
            for key, value in held.items():
                if isinstance(value, (dict, set, list)):
                    held[key] = value.copy()
            self.journal[id(module)] = (module, held)

    def put(self, old: nn.Module, new: nn.Module, *, only: Edge | None = None) -> None:
        """Register one module wherever another is registered, or in just one place."""
        edges = [only] if only else self.edges(old)
        if old is self.root:
            self.root = new
        for parent, name, path in edges:
            self.touch(parent)
            parent._modules[name] = new
            self._edges.setdefault(id(new), {})[id(parent), name] = Edge(parent, name, path)
        if new._modules:
            self._index(new, edges[0].path if edges else "")
        if self._slots is not None:
            self._index_tensors(new)
        self.gone.append(old)
        if only is None:
            self.replaced[id(old)] = new

    def renew(self, old: Tensor, new: Tensor) -> None:
        """Exchange a tensor for another wherever it is held, so that ties stay."""
        for module, name in self.slots(old):
            self.touch(module)
            held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            held[name] = new
            assert self._slots is not None
            self._slots.setdefault(id(new), {})[id(module), name] = (module, name)
        self.gone.append(old)

    def roll_back(self) -> None:
        """Give every touched module its old attributes back, in the very dicts that it held them in."""
        for module, held in (self.journal or {}).values():
            state = vars(module)
            now = dict(state)
            state.clear()
            state.update(held)
            for key, value in held.items():
                original = now.get(key)
                if type(original) is type(value) and isinstance(original, (dict, set, list)):
                    original.clear()
                    original.extend(value) if isinstance(original, list) else original.update(value)  # type: ignore[union-attr]
                    state[key] = original
