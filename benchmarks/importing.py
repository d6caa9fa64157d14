"""import: what ``import slapo_fn`` adds to ``import torch``, in fresh processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ._measure import Row, ms

PAIRS = 7
CODE = """
import sys
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
{extra}
end = perf_counter()
print([end - start, end - middle, "transformers" in sys.modules])
"""


def rows() -> Iterator[Row]:
    """Import both ways in turn, each time in a process of its own."""
    _run("import slapo_fn"), _run("")  # so that files are read and bytecode is written
    ours, bare = [], []
    for number in range(PAIRS):
        for extra in ("import slapo_fn", "")[:: 1 if number % 2 else -1]:
            (ours if extra else bare).append(_run(extra))
    assert not any(heavy for _, _, heavy in ours), "import slapo_fn imports transformers"
    added = statistics.median(after for _, after, _ in ours)
    whole = statistics.median(mine[0] - other[0] for mine, other in zip(ours, bare, strict=True))
    note = (
        f"in the same process after torch; whole processes differ by {ms(whole)} of {ms([one[0] for one in bare])}, "
        f"medians of {PAIRS} pairs; transformers is not imported"
    )
    yield Row("import slapo_fn, on top of import torch", ms(added), "at most 60 ms", added <= 0.06, note)


def _run(extra: str) -> tuple[float, float, bool]:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-c", CODE.format(extra=extra)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    total, after, heavy = json.loads(done.stdout.strip().lower())
    return total, after, heavy
