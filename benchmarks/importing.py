"""import: what ``import slapo_fn`` adds to ``import torch``, in fresh processes.

The package is copied and its bytecode written, as an installation does.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._measure import Row, ms

PAIRS = 5
PACKAGE = Path(__file__).resolve().parent.parent / "slapo_fn"
CODE = """
import sys
from time import perf_counter, process_time
start = perf_counter()
import torch
middle, busy = perf_counter(), process_time()
{extra}
end, busy = perf_counter(), process_time() - busy
print([end - start, end - middle, busy, "transformers" in sys.modules])
"""


class Imported(NamedTuple):
    """What one process took, in seconds.

    Attributes:
        whole: For all imports.
        added: For those after torch.
        busy: For those after torch, in CPU time.
        heavy: Whether transformers was imported.
    """

    whole: float
    added: float
    busy: float
    heavy: bool


def rows() -> Iterator[Row]:
    """Import both ways in turn, each time in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder, quiet=1)
        ours: list[Imported] = []
        bare: list[Imported] = []
        for number in range(PAIRS):
            for extra in ("import slapo_fn", "")[:: 1 if number % 2 else -1]:
                (ours if extra else bare).append(_run(folder, extra))
    assert not any(one.heavy for one in ours), "import slapo_fn imports transformers"
    added = statistics.median(one.busy for one in ours)
    apart = statistics.median(mine.whole - other.whole for mine, other in zip(ours, bare, strict=True))
    note = (
        f"CPU time; {ms([one.added for one in ours])} by the clock; whole processes differ by {ms(apart)} of "
        f"{ms([one.whole for one in bare])}; medians of {PAIRS} pairs; transformers is not imported"
    )
    yield Row("import slapo_fn, after import torch", ms(added), "at most 60 ms", added <= 0.06, note)


def _run(folder: str, extra: str) -> Imported:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-c", CODE.format(extra=extra)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return Imported(*json.loads(done.stdout.strip().lower()))
