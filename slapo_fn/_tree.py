"""Where every module and tensor of a model hangs, and the two edits that apply makes: `put` and `renew`."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from .errors import MisfitError

Registration: TypeAlias = tuple[nn.Module, str]
CONTAINERS = (dict, OrderedDict, set, list)


class Edge(NamedTuple):
    """One registration of a module: ``parent`` has it as its child ``name``; ``path`` spells it from the root."""

    parent: nn.Module
    name: str
    path: str


def below(module: nn.Module) -> Iterator[nn.Module]:
    """The module and every distinct module below it, parents first, in definition order."""
    if not module._modules:
        yield module
        return
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(child for child in reversed(one._modules.values()) if child is not None)


@contextmanager
def held_collector() -> Generator[None]:
    """Hold the garbage collector during a burst of objects that are none: it would scan them again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
        exchanged: ``id`` of each module and tensor that was put out of the tree to what took its place.
        first: ``id`` of each module that was there at first.
        journal: What every touched module's ``__dict__`` held before, kept only for an edit in place.
    """

    def __init__(self, root: nn.Module, *, keep_journal: bool = False) -> None:
        self.root: nn.Module = root
        self.exchanged: dict[int, nn.Module | Tensor] = {}
        self.templates: dict[int, nn.Module] = {}  # templates that several places share, by the given one's id
        self.gone: list[nn.Module | Tensor] = []  # keeps what was put out alive, so that no id is used twice
        self.journal: dict[int, tuple[nn.Module, dict[str, Any], dict[str, Any]]] | None = {} if keep_journal else None
        self.tensors: dict[
            int, tuple[Tensor, Tensor, bool, Tensor | None, dict[str, Any]]
        ] = {}  # and what tensors were
        self.links: list[
            tuple[nn.Module, str]
        ] = []  # plain attributes of what was made in this pass, that lead to modules
        self.puts: list[tuple[nn.Module, str, nn.Module]] = []  # of an edit in place: what stood where
        self._parents: dict[int, Registration] = {}  # of each module, one of its registrations
        self._others: dict[int, list[Registration]] = {}  # and whatever further ones it has or had
        self._cut = False  # whether some of these may belong to modules that were put out of the tree
        self._slots: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] | None = None
        with held_collector():
            self.first: list[nn.Module] = self._index(root)

    def _index(self, top: nn.Module) -> list[nn.Module]:
        """Take a module's children in; gives those that are new to the index, after the module itself."""
        parents, waiting, new = self._parents, [top], [top]
        done: set[int] = set()
        for parent in waiting:
            for name, child in parent._modules.items():
                if child is None:
                    continue
                key = id(child)
                if key not in parents:
                    parents[key] = (parent, name)
                    new.append(child)
                elif parents[key] != (parent, name):
                    self.register(child, parent, name)
                if child._modules and key not in done:
                    done.add(key)
                    waiting.append(child)
        return new

    def register(self, child: nn.Module, parent: nn.Module, name: str) -> None:
        """Take in that a module was registered under another one."""
        known = [self._parents.get(id(child)), *self._others.get(id(child), ())]
        if known[0] is None:
            self._parents[id(child)] = (parent, name)
        elif (parent, name) not in known:
            self._others.setdefault(id(child), []).append((parent, name))

    def _index_tensors(self, top: nn.Module) -> None:
        assert self._slots is not None
        for module in below(top):
            for name, tensor in own_tensors(module):
                self._slots.setdefault(id(tensor), {})[id(module), name] = (module, name)

    # ---- where things hang

    def edges(self, module: nn.Module) -> list[Edge]:
        """Every registration of a module in the tree, the first one first; none for the root."""
        return [Edge(parent, name, join(self.path(parent), name)) for parent, name in self.registrations(module)]

    def paths(self, module: nn.Module) -> list[str]:
        """Every path of a module, through every registration of it and of what it is in."""
        if module is self.root:
            return [""]
        return [join(path, name) for parent, name in self.registrations(module) for path in self.paths(parent)]

    def shared(self, module: nn.Module) -> bool:
        """Whether a module has several paths."""
        while self._others and module is not self.root:
            known = self.registrations(module)
            if len(known) != 1:
                return bool(known)
            module = known[0][0]
        return False

    def registrations(self, module: nn.Module) -> list[Registration]:
        """Every ``(parent, name)`` in the tree under which a module is registered, the first one first."""
        first = self._parents.get(id(module))
        if first is None:
            return []
        known = [first, *self._others[id(module)]] if id(module) in self._others else [first]
        return [one for one in known if one[0]._modules.get(one[1]) is module and (not self._cut or self.holds(one[0]))]

    def holds(self, module: nn.Module) -> bool:
        """Whether a module stands in the tree."""
        return module is self.root or bool(self.registrations(module))

    def path(self, module: nn.Module) -> str:
        """A module's first path."""
        names: list[str] = []
        while module is not self.root and (known := self.registrations(module)):
            module, name = known[0]
            names.append(name)
            if vars(module).get("is_drawn_out"):  # a part of a forward: what it calls keeps its path
                module = vars(module)["owner"]
        return ".".join(reversed(names))

    def slots(self, tensor: Tensor) -> list[tuple[nn.Module, str]]:
        """Every place ``(module, name)`` that holds a tensor; more than one means that it is tied."""
        if self._slots is None:
            self._slots = {}
            self._index_tensors(self.root)
        known = self._slots.get(id(tensor), {}).values()
        return [(module, name) for module, name in known if self._held(module, name) is tensor and self.holds(module)]

    def names(self, tensor: Tensor) -> list[str]:
        """Every dotted name of a tensor."""
        return [join(self.path(module), name) for module, name in self.slots(tensor)]

    @staticmethod
    def _held(module: nn.Module, name: str) -> Tensor | None:
        return module._parameters[name] if name in module._parameters else module._buffers.get(name)

    # ---- edits

    def touch(self, *modules: nn.Module) -> None:
        """Note what modules hold, once, before they are edited."""
        journal = self.journal
        if journal is not None:
            for module in modules:
                if id(module) not in journal:
                    state = vars(module).copy()
                    held = {key: value.copy() for key, value in state.items() if type(value) in CONTAINERS and value}
                    journal[id(module)] = (module, state, held)

    def put(self, old: nn.Module, new: nn.Module, *, only: Registration | None = None) -> None:
        """Register one module wherever another is registered, or in just one place."""
        places = [only] if only else self.registrations(old)
        if not places and old is not self.root:
            raise MisfitError(f"the {type(old).__name__} to be replaced no longer stands in the model")
        self._cut = self._cut or bool(old._modules) or only is not None or old is self.root
        if old is self.root:
            self.root = new
        for parent, name in places:
            if self.journal is not None and id(parent) not in self.journal:
                self.puts.append((parent, name, old))
            parent._modules[name] = new
            self.register(new, parent, name)
        if new._modules:
            self._index(new)
        if self._slots is not None:
            self._index_tensors(new)
        self.gone.append(old)
        if only is None:
            self.exchanged[id(old)] = new

    def refresh(self, module: nn.Module) -> None:
        """Take in what was registered on a module and below it by its own hand."""
        if module._modules:
            self._index(module)
        if self._slots is not None:
            self._index_tensors(module)

    def renew(self, old: Tensor, new: Tensor) -> None:
        """Exchange a tensor for another wherever it is held, so that ties stay.

        In place a parameter stays the same object, since an optimizer may hold it, and takes the new one's values.
        """
        if self.journal is not None and type(new) is type(old) and new.shape == old.shape and old.is_leaf:
            if id(old) not in self.tensors:
                self.tensors[id(old)] = (old, old.data, old.requires_grad, old.grad, dict(vars(old)))
            _take(old, new.data, new.requires_grad, dict(vars(new)))
            return
        for module, name in self.slots(old):
            self.touch(module)
            held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            held[name] = new
            assert self._slots is not None
            self._slots.setdefault(id(new), {})[id(module), name] = (module, name)
        self.gone.append(old)
        self.exchanged[id(old)] = new

    def roll_back(self) -> None:
        """Undo every edit: give the touched modules their old attributes, in the very containers that held them."""
        for module, state, held in reversed((self.journal or {}).values()):
            vars(module).clear()
            vars(module).update(state)
            for key, value in state.items():
                if type(value) in CONTAINERS and (value or key in held):
                    value.clear()
                    getattr(value, "extend" if type(value) is list else "update")(held.get(key, ()))
        for tensor, values, requires_grad, grad, held_by_it in self.tensors.values():
            tensor.grad = None
            _take(tensor, values, requires_grad, held_by_it)
            tensor.grad = grad
        for parent, name, child in reversed(self.puts):
            parent._modules[name] = child


def _take(tensor: Tensor, values: Tensor, requires_grad: bool, held: dict[str, Any]) -> None:
    """Let a tensor be another, as `nn.Module.to` does."""
    if tensor.grad is not None and tensor.grad.dtype != values.dtype:
        grad, tensor.grad = tensor.grad, None
        tensor.data = values
        tensor.grad = grad.to(values.dtype)
    else:
        tensor.data = values
    tensor.requires_grad_(requires_grad)
    vars(tensor).clear()
    vars(tensor).update(held)
