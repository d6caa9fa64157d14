"""The layer of a module whose forward is a graph: the class, its names and its attributes stay.

block.forward   ->   Traced(block, program)
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

from torch import nn

from .._forward import Forward, layers, wrap
from ..errors import TraceError
from .program import Graphed, Program, Run


class Traced(Forward, Graphed):
    """The innermost layer: it runs a program in the place of the class's forward."""

    rank: ClassVar[int] = -1

    args: Program

    def run(self) -> types.MethodType:
        """The function of the graph for the mode that the module is in, bound to the module."""
        return types.MethodType(self._function(), self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(self.module, *args, **kwargs)

    def _function(self) -> Run:
        training = self.module.training
        for path in self.args.inlined if len(self.args.functions) > 1 else ():
            if self.module.get_submodule(path).training is not training:
                raise TraceError(
                    f"{path} is in another mode than the module whose forward it was traced into: call train() or eval() "
                    "on the whole, or trace it as a leaf",
                    [path],
                )
        return self.args.function(training)


def program_of(module: nn.Module) -> Program | None:
    """The program that a module runs, if its forward was traced."""
    return next((layer.args for layer in layers(module) if isinstance(layer, Traced)), None)


def run_by(module: nn.Module, program: Program) -> None:
    """Let a module run a program."""
    for name, tensor in program.constants:
        module.register_buffer(name, tensor, persistent=False)
    assert program.functions  # made now, and not while the module is compiled
    wrap(module, Traced(module, program))
