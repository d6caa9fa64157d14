"""The random state of a pass: every place draws from a stream of its own, and afterwards all is as it was.

A place's stream follows from the global state, the path and the primitive. So an entry's random initialisation does not
depend on the other entries, and dropping one of them changes nothing else.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


class Rng:
    """The random state as it was when the pass began."""

    def __init__(self) -> None:
        self.generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.generators += list(torch.cuda.default_generators)
        self.states = [generator.get_state() for generator in self.generators]
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.base = hashlib.blake2b(self.states[0].numpy().tobytes(), digest_size=8)

    def begin_entry(self, entry: str) -> None:
        """Draw from an entry's own streams of Python's and numpy's random numbers from now on."""
        seed = self._seed(entry)
        random.seed(seed)
        if self.numpy is not None:
            sys.modules["numpy"].random.seed(seed % 2**32)

    def _seed(self, name: str) -> int:
        digest = self.base.copy()
        digest.update(name.encode())
        return int.from_bytes(digest.digest(), "little")

    def begin(self, place: str) -> None:
        """Draw from the stream of a place from now on."""
        seed = self._seed(place)
        for generator in self.generators:
            generator.manual_seed(seed)

    def end(self) -> None:
        """Go back to the torch state that there was when the pass began."""
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)

    def restore(self) -> None:
        """Put every global random state back."""
        self.end()
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
