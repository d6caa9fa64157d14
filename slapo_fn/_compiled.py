"""The layer around a compiled module's forward.

block.forward   ->   Compiled(block, args)
"""

# pyright: reportUnknownMemberType=false
# torch.compile is only partly typed.

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import NamedTuple

from ._forward import Forward
from ._graph.program import Graphed
from .errors import ArgumentError


class CompileArgs(NamedTuple):
    """What `compile` was given; see there."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] | None = None


def check_backend(backend: object) -> None:
    """Refuse the name of a backend that torch does not have.

    Raises:
        ArgumentError: It has no such backend.
    """
    if isinstance(backend, str) and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ArgumentError(f"torch.compile has no backend {backend!r}; it has {', '.join(known)}")


class Compiled(Forward):
    """The layer around a compiled module's forward. It compiles at the first call, and again after it was copied."""

    rank: ClassVar[int] = 6

    args: CompileArgs

    def __init__(self, module: nn.Module, args: CompileArgs) -> None:
        super().__init__(module, args)
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger graph there is nothing to compile apart
            return self.call(*args, **kwargs)
        run = self._run()
        key = getattr(run, "__func__", run)
        if key not in self.compiled:
            settings: dict[str, Any] = {**self.args._asdict(), "mode": None, "options": self._options()}
            self.compiled[key] = torch.compile(run, **settings)
        return self.compiled[key](*args, **kwargs)

    def _run(self) -> Callable[..., Any]:
        """What is compiled: a function bound to what it is of, with code that no other kind of module shares.

        torch counts compilations by code, and gives up after some; so modules of different classes need code of their own.
        """
        inner, kind = self.inner, type(self.module)
        around = self.module if inner is None else inner
        if isinstance(around, Graphed):
            return around.run()
        if inner is None:
            return types.MethodType(kind.forward, self.module)
        if isinstance(inner, Forward):
            return types.MethodType(_own_code(type(inner).__call__, kind.__qualname__), inner)
        return inner

    def _options(self) -> dict[str, Any]:
        options = dict(self.args.options or ())
        if self.args.mode is not None:
            options = dict(torch._inductor.list_mode_options(self.args.mode))
        return {"guard_filter_fn": _without_layers, **options}


def _without_layers(guards: Sequence[Any]) -> list[bool]:
    """Which guards are kept: a layer is told by its class and by what it holds, and not by its identity, so that equal blocks
    with layers inside are compiled once.
    """
    identity = ("CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH")
    return [guard.guard_type not in identity or not isinstance(guard.value, Forward) for guard in guards]


@functools.lru_cache(maxsize=256)
def _own_code(function: Any, kind: str) -> types.FunctionType:
    code = function.__code__.replace(co_name=f"{kind}.forward")
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
