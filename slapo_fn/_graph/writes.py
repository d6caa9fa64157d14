"""What a forward could write on its modules, as a value that shows any change."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# A module's attributes are of any kind.

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._forward import Forward


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, as far as a forward could write on them: by identity, and what its containers hold."""
    held: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key != "training" and not key.startswith("_tensor_constant") and not isinstance(value, Forward):
            held[key] = _content(value, 4)
    return held


def _content(value: Any, depth: int) -> Any:
    """What a value is and holds, some levels deep, so that a change shows."""
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type)):
        return id(value)
    if isinstance(value, dict):
        return id(value), [(id(key), _content(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, (list, tuple, set)):
        return id(value), [_content(one, depth - 1) for one in value]
    held = getattr(value, "__dict__", None)
    return (
        (id(value), [(key, _content(one, depth - 1)) for key, one in held.items()])
        if isinstance(held, dict)
        else id(value)
    )
