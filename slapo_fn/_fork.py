"""Copy a model's structure and share its tensors.

    model: modules, attributes, tensors   ->   modules' and attributes' copies, the same tensors

It gives what ``copy.deepcopy(model, {id(t): t for t in tensors})`` gives, at a fraction of the cost, and follows what
that does not: closures and weak references.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from ._copier import COMPILED, Copier, is_atom
from ._tree import held_collector
from .errors import ForkError

KNOWN = frozenset(vars(nn.Module()))
TABLES = tuple(key for key, value in vars(nn.Module()).items() if type(value) is OrderedDict)  # of hooks


class Fork(Copier):
    """One copy of a model.

    Attributes:
        root: The copied model.
        links: ``(module, attribute)`` for each plain attribute of the copy that refers to a module or tensor of it.
    """

    root: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__({})
        self.originals: list[nn.Module] = []
        self.links: list[tuple[nn.Module, str]] = []
        self.versions: list[tuple[Tensor, int]] = []
        with held_collector():
            self._blank(model)
            for original in reversed(self.originals):
                self._fill(original)
            self.root = self.copy(model)

    def _blank(self, model: nn.Module) -> None:
        """Make an empty copy of every module, so that whatever refers to one finds it."""
        memo, waiting = self.memo, [model]
        memo[id(None)] = None  # a child that is not there
        copies_itself: dict[type, bool] = {}
        tensors: list[Tensor | None] = []
        for module in waiting:
            if id(module) in memo:
                continue
            kind = type(module)
            if kind not in copies_itself:
                copies_itself[kind] = _copies_itself(kind)
                if issubclass(kind, nn.parallel.DistributedDataParallel):
                    raise ForkError(
                        "a DistributedDataParallel cannot be copied: apply the schedule to its module, then wrap it"
                    )
            if module._parameters:
                tensors.extend(module._parameters.values())
            if module._buffers:
                tensors.extend(module._buffers.values())
            if not copies_itself[kind]:
                memo[id(module)] = kind.__new__(kind)
                self.originals.append(module)
                if module._modules:
                    waiting.extend(module._modules.values())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

        memo.update(zip(map(id, tensors), tensors, strict=True))
        self.versions += _versions(tensors)

    def written(self) -> list[Tensor]:
        """The shared tensors that were written to since."""
        return [tensor for tensor, version in self.versions if tensor._version != version]

    def _fill(self, module: nn.Module) -> None:
        memo, held = self.memo, vars(module)
        made: nn.Module = memo[id(module)]
        state = held.copy()
        object.__setattr__(made, "__dict__", state)
        _fresh_tables(state)
        if any(map(held.get, TABLES)):
            for key in TABLES:
                if held.get(key):
                    self._attribute(made, key, held[key])
        state["_parameters"] = held["_parameters"].copy()
        state["_buffers"] = held["_buffers"].copy()
        state["_non_persistent_buffers_set"] = held["_non_persistent_buffers_set"].copy()
        state["_modules"] = children = held["_modules"].copy()
        for name, child in children.items():
            children[name] = memo[id(child)] if id(child) in memo else self.copy(child)
        if len(held) != len(KNOWN):
            for key, value in held.items():
                if key not in KNOWN and not is_atom(value):
                    self._attribute(made, key, value)

    def _attribute(self, made: nn.Module, key: str, value: Any) -> None:
        self.met, self.in_hooks = False, key in TABLES
        try:
            vars(made)[key] = self.copy(value)
        except ForkError as error:
            refused = ForkError(COMPILED) if key == "_compiled_call_impl" else error
            refused.add_note(f"it is the attribute {key!r} of a {type(made).__name__}")
            raise refused from None
        self.in_hooks = False
        if self.met:
            self.links.append((made, key))

    def stranger(self, module: nn.Module) -> nn.Module:
        """A module that knows how to copy itself (a graph module), or that hangs on a plain attribute only."""
        outer = self.met, self.in_hooks
        if _copies_itself(type(module)):
            for tensor in (*module.parameters(), *module.buffers()):
                self.memo[id(tensor)] = tensor
            made: nn.Module = copy.deepcopy(module, self.memo)
            self.memo[id(module)] = made
            for key in (*TABLES, "forward"):
                if vars(module).get(key):
                    self._attribute(made, key, vars(module)[key])
        else:
            known = len(self.originals)
            self._blank(module)
            for original in reversed(self.originals[known:]):
                self._fill(original)
        self.met, self.in_hooks = outer
        result: nn.Module = self.memo[id(module)]
        return result


def _versions(tensors: list[Tensor | None]) -> list[tuple[Tensor, int]]:
    """How often each tensor was written to, for those that count it: lazy tensors and those of inference mode do not."""
    there = [tensor for tensor in tensors if tensor is not None]
    try:
        return [(tensor, tensor._version) for tensor in there]
    except (RuntimeError, ValueError):
        counting = [tensor for tensor in there if not nn.parameter.is_lazy(tensor) and not tensor.is_inference()]
        return [(tensor, tensor._version) for tensor in counting]


def _copies_itself(kind: type) -> bool:
    own = getattr(kind, "__deepcopy__", None)  # parametrize gives one that only copies attributes
    return own is not None and own.__module__ != "torch.nn.utils.parametrize"


def _fresh_tables(state: dict[str, Any]) -> None:
    """Give a copy empty tables of hooks. Written out, because this is the larger part of what a copy costs."""
    state["_backward_pre_hooks"] = OrderedDict()
    state["_backward_hooks"] = OrderedDict()
    state["_forward_hooks"] = OrderedDict()
    state["_forward_hooks_with_kwargs"] = OrderedDict()
    state["_forward_hooks_always_called"] = OrderedDict()
    state["_forward_pre_hooks"] = OrderedDict()
    state["_forward_pre_hooks_with_kwargs"] = OrderedDict()
    state["_state_dict_hooks"] = OrderedDict()
    state["_state_dict_pre_hooks"] = OrderedDict()
    state["_load_state_dict_pre_hooks"] = OrderedDict()
    state["_load_state_dict_post_hooks"] = OrderedDict()
