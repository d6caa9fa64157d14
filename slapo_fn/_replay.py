"""Run a forward a second time without writing a key-value cache a second time."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor


def is_cache(value: object) -> bool:
    """Whether an argument is a key-value cache, as transformers makes them."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def snapshot(value: Any) -> Any:
    """A cache's structure copied and its tensors shared: writing to the copy leaves the original alone."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(snapshot, value))
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, Tensor) or not hasattr(value, "__dict__") or isinstance(value, type):
        return value
    if not is_cache(value) and not hasattr(value, "update"):
        return value
    made = copy.copy(value)
    vars(made).update({key: snapshot(item) for key, item in vars(value).items()})
    return made


class Replay:
    """A forward whose first call works on the caches that it is given, and each later call on copies of how they were."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.before: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is None:
            self.before = (
                tuple(snapshot(value) if is_cache(value) else None for value in args),
                {key: snapshot(value) for key, value in kwargs.items() if is_cache(value)},
            )
            return self.run(*args, **kwargs)
        old_args, old_kwargs = self.before
        replayed = [value if old is None else snapshot(old) for value, old in zip(args, old_args, strict=True)]
        return self.run(*replayed, **{**kwargs, **{key: snapshot(value) for key, value in old_kwargs.items()}})
