"""A module's forward with something around it, while its names, class and signature stay.

    block.forward                 ->   Checkpointed(block) -> Compiled(block) -> type(block).forward

A layer stands in the instance's ``__dict__`` as ``forward``. It is an object and not a closure: `deepcopy` and pickle
rebind it to the copied module, `inspect.signature` sees the class's own signature, and `torch.compile` traces through.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from .errors import MisfitError


class Forward:
    """One layer around a module's forward; layers of a lower ``rank`` lie further in.

    A module has at most one layer of each class: a later one takes the place of an earlier.
    """

    rank: ClassVar[int] = 0
    as_given: ClassVar[tuple[str, ...]] = ("args",)
    __name__ = "forward"

    def __init__(self, module: nn.Module, args: Any) -> None:
        self.module = module
        self.args = args
        self.inner: Callable[..., Any] | None = None

    def over(self, module: nn.Module, inner: Callable[..., Any] | None) -> Forward:
        """The same layer, made anew, around another module or another inside."""
        made = type(self)(module, self.args)
        made.inner = inner
        return made

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What this layer is around: the next layer, the instance's own forward, or the class's."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:  # torch.export asks a forward for it
        code: types.CodeType = type(self.module).forward.__code__
        return code

    @property
    def __signature__(self) -> inspect.Signature:
        if self.inner is not None:
            return inspect.signature(self.inner)
        return inspect.signature(type(self.module).forward.__get__(self.module))


def refuse_scripted(module: nn.Module) -> None:
    """Refuse to edit inside a scripted module.

    Raises:
        MisfitError: It is one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise MisfitError(
            f"a scripted module ({module.original_name}) cannot be edited inside: transform the model before it is scripted, "
            "or replace the whole module"
        )


def layers(module: nn.Module) -> Iterator[Forward]:
    """The layers around a module's forward, the outermost first."""
    layer = vars(module).get("forward")
    while isinstance(layer, Forward):
        yield layer
        layer = layer.inner


def wrap(module: nn.Module, layer: Forward) -> None:
    """Put a layer around the module's forward, at the depth that its rank asks for.

    Raises:
        MisfitError: The module is scripted; its forward cannot be reached.
    """
    refuse_scripted(module)
    kept = [known for known in layers(module) if type(known) is not type(layer)]
    _build(module, [*kept, layer])


def _build(module: nn.Module, wanted: list[Forward]) -> None:
    core = vars(module).get("forward")
    while isinstance(core, Forward):
        core = core.inner
    for layer in sorted(wanted, key=lambda one: one.rank):
        core = layer.over(module, core)
    if core is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = core


def rewrap(old: nn.Module, new: nn.Module) -> None:
    """Move the layers around one module's forward to the module that takes its place."""
    if "forward" in vars(old) and (moved := list(layers(old))):
        _build(old, [])
        mine = {type(layer) for layer in layers(new)}
        _build(new, [*layers(new), *(layer for layer in moved if type(layer) not in mine)])
