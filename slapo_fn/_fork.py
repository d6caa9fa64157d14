"""Copy a model's structure and share its tensors.

    model: modules, attributes, tensors   ->   modules' and attributes' copies, the same tensors

It gives what ``copy.deepcopy(model, {id(t): t for t in tensors})`` gives, at a fraction of the cost: it knows what an
`nn.Module` holds in its ``__dict__`` and leaves to `deepcopy` only the objects that it does not know.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ._tree import held_collector
from .errors import ForkError

Model = TypeVar("Model", bound=nn.Module)

ATOMS: frozenset[type] = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type, torch.dtype, torch.device)
    + (torch.Size, torch.layout, types.BuiltinFunctionType, types.ModuleType, nn.Parameter, Tensor)
)
BINDING = (nn.Module, types.MethodType, types.FunctionType, functools.partial)  # what closures bind modules with
KNOWN = frozenset(vars(nn.Module()))
TABLES = tuple(key for key, value in vars(nn.Module()).items() if type(value) is OrderedDict)  # of hooks
SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # containers to copy, tensors to share
COMPILED = (
    "a module whose forward was compiled already cannot be copied. Apply the schedule first and compile the result, "
    "with slapo.compile or by hand; or give inplace=True to apply."
)


class Copier:
    """Copies values that hang on modules; modules in ``memo`` are exchanged for what stands there.

    Attributes:
        memo: ``id`` of an original to its copy, as `copy.deepcopy` wants it.
        met_module: Whether a module was exchanged since it was last cleared.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.met_module = False
        self.closures = True

    def copy(self, value: Any) -> Any:
        """A copy that shares tensors, functions and classes, and keeps sharing inside the value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, nn.Module):
            self.met_module = True
            return self.memo[id(value)] if id(value) in self.memo else self.stranger(value)
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, (Tensor, Enum, type)):
            return value
        made = HANDLERS.get(kind, Copier._unknown)(self, value)
        if made is not value:
            self.memo[id(value)] = made
        return made

    def stranger(self, module: nn.Module) -> nn.Module:
        """A module met outside the tree that is being copied."""
        return module

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        memo = self.memo
        made = memo[id(value)] = value.copy()  # keeps the kind, and a defaultdict's factory
        for key, item in value.items():
            if type(item) not in ATOMS:
                made[key] = self.copy(item)
        return made

    def _list(self, value: Any) -> Any:
        made = self.memo[id(value)] = copy.copy(value)
        made.clear()
        made.extend(map(self.copy, value))
        return made

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        made = tuple(map(self.copy, value))
        return value if all(map(lambda a, b: a is b, made, value)) else made

    def _set(self, value: Any) -> Any:
        return type(value)(map(self.copy, value))

    def _method(self, value: types.MethodType) -> types.MethodType:
        owner = value.__self__
        return types.MethodType(value.__func__, self.memo[id(owner)]) if id(owner) in self.memo else value

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        made = functools.partial(self.copy(value.func), *map(self.copy, value.args), **self._dict(value.keywords))
        vars(made).update(self._dict(vars(value)))
        return made

    def _weakref(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        return weakref.ref(self.memo[id(value())]) if id(value()) in self.memo else value

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """A closure over a module of the model is made anew over its copy; what else it closes over stays shared."""
        if not self.closures or not self._reaches(value, set()):
            return value
        if hasattr(value, "_torchdynamo_orig_callable"):
            raise ForkError(COMPILED)
        cells = [types.CellType() for _ in value.__closure__ or ()]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        self.memo[id(value)] = made
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if old != types.CellType():
                cell.cell_contents = self._closed(old.cell_contents)
        made.__defaults__ = tuple(map(self._closed, value.__defaults__ or ())) or None
        made.__kwdefaults__ = {key: self._closed(one) for key, one in (value.__kwdefaults__ or {}).items()}
        functools.update_wrapper(made, value, updated=())
        vars(made).update({key: self._closed(one) for key, one in vars(value).items()})
        return made

    def _closed(self, value: Any) -> Any:
        return self.copy(value) if isinstance(value, BINDING) else value

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """Whether a function, bound method or partial leads to a module that is copied."""
        if id(value) in seen or not isinstance(value, BINDING):
            return False
        seen.add(id(value))
        if isinstance(value, nn.Module):
            return id(value) in self.memo
        if isinstance(value, types.MethodType):
            held: list[Any] = [value.__self__]
        elif isinstance(value, functools.partial):
            held = [value.func, *value.args, *value.keywords.values()]
        else:
            held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        return any(self._reaches(one, seen) for one in held)

    def _unknown(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:  # locks, process groups, streams: what nobody can copy is shared
            return value


HANDLERS: dict[type, Callable[[Copier, Any], Any]] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict), Copier._dict),
    **dict.fromkeys((list, deque), Copier._list),
    **dict.fromkeys((set, frozenset), Copier._set),
    tuple: Copier._tuple,
    types.MethodType: Copier._method,
    types.FunctionType: Copier._function,
    functools.partial: Copier._partial,
    weakref.ref: Copier._weakref,
}


class Fork(Copier):
    """One copy of a model.

    Attributes:
        root: The copied model.
        links: ``(module, attribute)`` for each plain attribute of the copy that refers to a module of the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__({})
        self.originals: list[nn.Module] = []
        self.links: list[tuple[nn.Module, str]] = []
        with held_collector():
            self._blank(model)
            for original in reversed(self.originals):
                self._fill(original)
            self.root: nn.Module = self.copy(model)

    def _blank(self, model: nn.Module) -> None:
        """Make an empty copy of every module, so that whatever refers to one finds it."""
        memo, waiting = self.memo, [model]
        memo[id(None)] = None  # a child that is not there
        copies_itself: dict[type, bool] = {}
        for module in waiting:
            if id(module) in memo:
                continue
            kind = type(module)
            if kind not in copies_itself:
                copies_itself[kind] = hasattr(kind, "__deepcopy__")
            for tensors in (module._parameters, module._buffers):
                if tensors:
                    memo.update((id(tensor), tensor) for tensor in tensors.values())
            if not copies_itself[kind]:
                memo[id(module)] = kind.__new__(kind)
                self.originals.append(module)
                if module._modules:
                    waiting.extend(module._modules.values())  # type: ignore[arg-type]

    def _fill(self, module: nn.Module) -> None:
        made: nn.Module = self.memo[id(module)]
        held, state = vars(module), vars(made)
        state.update(held)
        _fresh_tables(state)
        if any(map(held.get, TABLES)):
            for key in TABLES:
                if held.get(key):
                    self._attribute(made, key, held[key])
        for key in SHARED:
            state[key] = held[key].copy()
        if held["_modules"]:
            state["_modules"] = self._dict(held["_modules"])
        else:
            state["_modules"] = held["_modules"].copy()
        if len(held) != len(KNOWN):
            for key in [key for key in held if key not in KNOWN]:
                if type(held[key]) not in ATOMS:
                    self._attribute(made, key, held[key])

    def _attribute(self, made: nn.Module, key: str, value: Any) -> None:
        self.met_module, self.closures = False, key not in TABLES
        try:
            vars(made)[key] = self.copy(value)
        except ForkError as error:
            refused = ForkError(COMPILED) if key == "_compiled_call_impl" else error
            refused.add_note(f"it is the attribute {key!r} of a {type(made).__name__}")
            raise refused from None
        if self.met_module:
            self.links.append((made, key))

    def stranger(self, module: nn.Module) -> nn.Module:
        """A module that knows how to copy itself (a graph module), or that hangs on a plain attribute only."""
        if hasattr(type(module), "__deepcopy__"):
            for tensor in (*module.parameters(), *module.buffers()):
                self.memo[id(tensor)] = tensor
            made: nn.Module = copy.deepcopy(module, self.memo)
            self.memo[id(module)] = made
            return made
        known = len(self.originals)
        self._blank(module)
        for original in reversed(self.originals[known:]):
            self._fill(original)
        made = self.memo[id(module)]
        return made


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
