"""Run a forward a second time without writing a second time: to a key-value cache, or to running statistics."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ._copier import Copier
from ._tree import below


def is_cache(value: object) -> bool:
    """Whether an argument is a key-value cache, as transformers makes them."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def snapshot(cache: Any) -> Any:
    """A cache's structure copied and its tensors shared: writing to the copy leaves the original alone."""
    return Copier({}).copy(cache)


def running_norms(module: nn.Module) -> tuple[nn.Module, ...]:
    """The batch norms below a module that keep running statistics."""
    return tuple(norm for norm in below(module) if "running_mean" in norm._buffers)


@contextmanager
def set_aside(norms: Sequence[nn.Module]) -> Generator[None]:
    """Let norms write their running statistics to copies that are thrown away."""
    held = [(norm, name, buffer) for norm in norms for name, buffer in norm._buffers.items() if buffer is not None]
    for norm, name, buffer in held:
        norm._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for norm, name, buffer in held:
            norm._buffers[name] = buffer


class Replay:
    """A forward whose first call writes to the caches and running statistics that it meets, and each later call to copies
    of how the caches were, and to none of the statistics.
    """

    def __init__(self, run: Callable[..., Any], norms: Sequence[nn.Module] = ()) -> None:
        self.run = run
        self.norms = norms
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
        with set_aside(self.norms):
            return self.run(*replayed, **{**kwargs, **{key: snapshot(value) for key, value in old_kwargs.items()}})
