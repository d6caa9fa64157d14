"""The layer around a compiled module's forward.

block.forward   ->   Compiled(block, args)
"""

# pyright: reportUnknownMemberType=false
# torch.compile is only partly typed.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import NamedTuple

from ._forward import Forward


class CompileArgs(NamedTuple):
    """What `compile` was given; see there."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] | None = None


class Compiled(Forward):
    """The layer around a compiled module's forward. It compiles at the first call, and again after it was copied."""

    rank: ClassVar[int] = 6

    def __init__(self, module: nn.Module, args: CompileArgs) -> None:
        super().__init__(module, args)
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger graph there is nothing to compile apart
            return self.call(*args, **kwargs)
        if self.compiled is None:
            run = self.inner or type(self.module).forward.__get__(self.module)
            options = self.args.options
            settings: dict[str, Any] = {**self.args._asdict(), "options": None if options is None else dict(options)}
            self.compiled = torch.compile(run, **settings)
        return self.compiled(*args, **kwargs)
