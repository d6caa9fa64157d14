"""Copy what hangs on modules: structure is copied, tensors are shared, modules are exchanged by a memo."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# A copier takes values of any kind.

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ._layout.sources import WeightMap
from .errors import ForkError

ATOMS: frozenset[type] = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type, torch.dtype, torch.device)
    + (WeightMap, torch.Size, torch.layout, types.BuiltinFunctionType, types.ModuleType)
)
BINDING = (
    nn.Module,
    Tensor,
    types.MethodType,
    types.FunctionType,
    functools.partial,
    weakref.ref,
    list,
    tuple,
    dict,
    set,
)
COMPILED = (
    "a forward that was compiled by hand, with compile() or torch.compile, cannot be copied. Apply the schedule first and "
    "compile the result, with slapo.compile or by hand; or give inplace=True to apply."
)


def is_atom(value: Any) -> bool:
    """Whether a value can neither be edited nor lead to anything: a number, a name, a tuple of such."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and all(type(one) in ATOMS for one in value))


class Copier:
    """Copies values that hang on modules.

    Attributes:
        memo: ``id`` of an original to what stands for it, as `copy.deepcopy` wants it. What is to be shared stands for
            itself.
        met: Whether a module or tensor of the memo was met since this was last cleared.
        changed: Whether one that stands for another was met.
        in_hooks: Whether a table of hooks is copied: its functions and what they close over are the user's, and shared.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.met = False
        self.changed = False
        self.in_hooks = False

    def copy(self, value: Any) -> Any:
        """A copy that shares tensors, functions and classes, and keeps sharing inside the value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if issubclass(kind, (nn.Module, Tensor)):
            if id(value) in self.memo:
                return self._known(value)
            return self.stranger(value) if issubclass(kind, nn.Module) else value
        if id(value) in self.memo:
            self.met = True  # it may have been, the first time
            return self.memo[id(value)]
        if isinstance(value, (Enum, type)):
            return value
        made = getattr(self, HANDLERS.get(kind, "_tuple" if isinstance(value, tuple) else "_object"))(value)
        if made is not value:
            self.memo[id(value)] = made
        return made

    def stranger(self, module: nn.Module) -> nn.Module:
        """A module that the memo does not have."""
        return module

    def _known(self, value: Any) -> Any:
        made = self.memo[id(value)]
        self.met, self.changed = True, self.changed or made is not value
        return made

    # ---- containers

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = value.copy()  # keeps the kind, and a defaultdict's factory
        self.memo[id(value)] = made
        if any(isinstance(key, nn.Module) for key in value):
            made.clear()
            made.update((self.copy(key), self.copy(item)) for key, item in value.items())
            return made
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
        if all(mine is theirs for mine, theirs in zip(made, value, strict=True)):
            return value
        remake: Callable[[tuple[Any, ...]], tuple[Any, ...]] = getattr(type(value), "_make", type(value))
        return remake(made)

    def _set(self, value: Any) -> Any:
        return type(value)(map(self.copy, value))

    # ---- what refers to modules

    def _method(self, value: types.MethodType) -> Any:
        owner = self.copy(value.__self__) if id(value.__self__) in self.memo else value.__self__
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        made = functools.partial(self.copy(value.func), *map(self.copy, value.args), **self._dict(value.keywords))
        vars(made).update(self._dict(vars(value)))
        return made

    def _weakref(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        target = value()
        if target is None or id(target) not in self.memo:
            return value
        made = self._known(target)
        return value if made is target else weakref.ref(made)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """A closure over a module of the memo is made anew; whatever else it closes over stays shared."""
        if self.in_hooks or not self._reaches(value, set()):
            return value
        if hasattr(value, "_torchdynamo_orig_callable"):
            raise ForkError(COMPILED)
        cells = [types.CellType() for _ in value.__closure__ or ()]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        self.memo[id(value)] = made
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if old != types.CellType():
                cell.cell_contents = self._closed(old.cell_contents)
        functools.update_wrapper(made, value, updated=())
        made.__defaults__ = tuple(map(self._closed, value.__defaults__ or ())) or None
        made.__kwdefaults__ = {key: self._closed(one) for key, one in (value.__kwdefaults__ or {}).items()}
        vars(made).update({key: self._closed(one) for key, one in vars(value).items()})
        return made

    def _closed(self, value: Any) -> Any:
        return self.copy(value) if self._reaches(value, set()) else value

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """Whether a function, bound method, partial or container leads to a module of the memo."""
        if id(value) in seen or not isinstance(value, BINDING):
            return False
        seen.add(id(value))
        if isinstance(value, (nn.Module, Tensor)):
            return self.memo.get(id(value), value) is not value
        return any(self._reaches(one, seen) for one in _held(value))

    # ---- the rest

    def _object(self, value: Any) -> Any:
        if self.in_hooks and not any(self._reaches(one, set()) for one in getattr(value, "__dict__", {}).values()):
            return value
        if not hasattr(value, "__dict__") or hasattr(type(value), "__deepcopy__"):
            try:
                return copy.deepcopy(value, self.memo)
            except Exception:  # locks, process groups, streams: what nobody can copy is shared
                return value
        try:
            made = copy.copy(value)
        except Exception:
            return value
        held: Any = vars(made)
        if made is not value and isinstance(held, dict):
            self.memo[id(value)] = made
            given = getattr(value, "as_given", ())  # what an entry of a schedule gave is the schedule's
            held.update({key: self.copy(one) for key, one in held.items() if key not in given})
            self._items(made)
        return made

    def _items(self, made: Any) -> None:
        """Copy what a user's own kind of dict or list holds, beside its attributes."""
        if isinstance(made, dict):
            items = [(self.copy(key), self.copy(one)) for key, one in dict.items(made)]
            dict.clear(made)
            dict.update(made, items)
        elif isinstance(made, list):
            list.__setitem__(made, slice(None), [self.copy(one) for one in list.__iter__(made)])


def _held(value: Any) -> list[Any]:
    """What a thing that binds others holds."""
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


HANDLERS: dict[type, str] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict), "_dict"),
    **dict.fromkeys((list, deque), "_list"),
    **dict.fromkeys((set, frozenset), "_set"),
    tuple: "_tuple",
    types.MethodType: "_method",
    types.FunctionType: "_function",
    functools.partial: "_partial",
    weakref.ref: "_weakref",
}
