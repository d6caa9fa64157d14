"""blocks: compiling each block of a model, beside compiling the whole model.

A cold start is the first forward without gradients, in a process of its own with nothing cached: all its CPU time, the C++
compiler's included. The time of a step is told side by side in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import slapo_fn as slapo

from ._measure import Row, middle, pairs
from ._tree import Block, Stack
from .running import BACKEND
from .swap import sharing_deepcopy

DEPTHS, HIDDEN, TOKENS, COUNT = (12, 30), 128, 32, 30
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def rows() -> Iterator[Row]:
    """For each depth, start cold both ways, then time the steps."""
    cold: dict[int, tuple[float, float]] = {}
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            caches = [str(Path(folder) / name) for name in ("blocks", "whole")]
            blocks, clock = _apart(str(depth), *caches[:1])
            whole, whole_clock, *steps = _apart(str(depth), *caches)
        cold[depth] = blocks, whole
        yield Row(
            f"{depth} layers, compile each block: cold start over compiling the whole, backend {BACKEND}",
            f"{blocks / whole:.2f}x",
            "at most 1x",
            blocks <= whole,
            f"{blocks:.1f} s over {whole:.1f} s of CPU time; by the clock {clock:.1f} s over {whole_clock:.1f} s",
        )
        value, base, by_hand = steps
        note = f"{base * value * 1e6:,.0f} µs over {base * 1e6:,.0f} µs; over module.compile() on each block {by_hand:.2f}x"
        yield Row(f"{depth} layers, compile each block: a forward over the whole's", f"{value:.2f}x", note=note)
    few, many = (cold[depth] for depth in DEPTHS)
    for name, first, last in zip(("each block", "the whole"), few, many, strict=True):
        most, ok = ("at most 1.2x", last <= 1.2 * first) if name == "each block" else ("", None)
        what = f"compile {name}: cold start at {DEPTHS[1]} layers over {DEPTHS[0]}"
        yield Row(what, f"{last / first:.2f}x", most, ok, f"{last:.1f} s over {first:.1f} s")


def _apart(*arguments: str) -> list[float]:
    root, one = Path(__file__).resolve().parent.parent, {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, cwd=root, env={**os.environ, **one}, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- in a process of its own


def _measured(depth: int, blocks_cache: str, whole_cache: str = "") -> list[float]:
    """Start cold: each block; or the whole, and then time its steps beside those of blocks, which are cached by now."""
    torch.manual_seed(0)
    model, x_BTD = Stack(depth, lambda: Block(HIDDEN, 4 * HIDDEN)).eval(), torch.randn(1, TOKENS, HIDDEN)
    blocks, whole = (partial(_forward, _compiled(model, where), x_BTD) for where in ("*", ""))
    os.environ[CACHE] = whole_cache or blocks_cache
    start, busy = perf_counter(), sum(os.times()[:4])
    (whole if whole_cache else blocks)()
    cold = [sum(os.times()[:4]) - busy, perf_counter() - start]
    if not whole_cache:
        return cold
    os.environ[CACHE] = blocks_cache
    alike = sharing_deepcopy(model)
    for block in alike.children():
        block.compile(backend=BACKEND)
    by_hand = partial(_forward, alike, x_BTD)
    for one in (blocks, by_hand):
        torch.testing.assert_close(one(), whole(), atol=1e-4, rtol=1e-4)
    beside, apart = pairs(blocks, whole, COUNT), pairs(blocks, by_hand, COUNT)
    value, hand = (middle([mine / other for mine, other in taken])[0] for taken in (beside, apart))
    return [*cold, value, middle([other for _, other in beside])[0], hand]


def _compiled(model: nn.Module, where: str) -> nn.Module:
    return slapo.apply(model, slapo.compile(slapo.Schedule(), where, backend=BACKEND))


def _forward(model: nn.Module, x_BTD: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x_BTD)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_measured(int(sys.argv[1]), *sys.argv[2:])))
