"""A function as a module.

x   ->   function(x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .._text import short, what
from ..errors import ArgumentError


class Function(nn.Module):
    """Call a function where a module has to stand: in an `nn.Sequential`, or in the place of a part of a forward.

    Args:
        function: The function; what it is called with is handed on.

    Example:
        >>> import torch
        >>> Function(torch.relu)(torch.tensor(-1.0))
        tensor(0.)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if not callable(function):
            raise ArgumentError(f"Function takes a function, not {what(function)}")
        self.function = function

    @property
    def kind(self) -> str:
        """The function's name, as plans show it."""
        return short(self.function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.kind
