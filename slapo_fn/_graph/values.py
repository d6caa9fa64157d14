"""What stands for a value while a forward is traced, and what the graph checks of values at each call."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's proxies have no types.

from __future__ import annotations

import sys
from typing import Any

from torch import fx
from torch.fx.proxy import Attribute

from ..errors import TraceError
from .watch import ours


def not_none(value: Any, name: str) -> None:
    """Refuse None for a value of which the forward asks whether it is None: it was traced for one that is not."""
    if value is None:
        raise TraceError(f"this forward was traced for {name} not None, and it is None")


def several(values: Any, count: int) -> Any:
    """Refuse another number of values than the places that they go to."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        told = f"{len(values)} values" if isinstance(values, (tuple, list)) else f"one {type(values).__name__}"
        raise TraceError(
            f"what was put in the place of a part with {count} outputs gave {told}: it has to give {count} values"
        )
    return values


class Value(fx.Proxy):
    """A traced value. What cannot be known of it, its text say, is refused."""

    def __getattr__(self, k: str) -> Attribute:
        return ValueAttribute(self, k)

    def __str__(self) -> str:
        return _told(self)

    def __format__(self, form: str) -> str:
        return _told(self)


class ValueAttribute(Attribute):
    """An attribute of a traced value, or a method that is about to be called."""

    def __str__(self) -> str:
        return _told(self)

    def __format__(self, form: str) -> str:
        return _told(self)


def _told(value: fx.Proxy) -> str:
    frame = sys._getframe(2)
    if not ours(frame.f_code.co_filename):
        tracer: Any = value.tracer
        tracer.refuse("makes a text of a traced value, which is only known when the model runs.")
    return "Value(…)"


def fixed(value: Any, expected: Any, name: str) -> None:
    """Refuse another value of an argument than the one that a forward was traced with."""
    if isinstance(value, fx.Proxy):  # the traced forward is traced again
        value.tracer.create_proxy("call_function", fixed, (value, expected, name), {})
        return
    if value is not expected and (type(value) is not type(expected) or value != expected):
        raise TraceError(f"this forward was traced with {name}={expected!r}, and is called with another value of it")
