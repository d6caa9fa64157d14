"""Measure what slapo_fn costs, and write it to RESULTS.md.

    make bench                            all groups, and write benchmarks/RESULTS.md
    python -m benchmarks                  the same
    python -m benchmarks --no-write       only print
    python -m benchmarks --only swap      one group (may be given several times); only prints

The groups, one file each:

    swap        replace every GELU of 12,001 modules, against the in-place loop that one writes by hand
    linear      time per module on 100, 1,000 and 10,000 blocks
    entries     many entries on one model, and building a schedule of a thousand
    import      what `import slapo_fn` adds to `import torch`
    running     checkpoint, hook and compile beside the same written by hand
    graphs      twelve equal blocks compile once
    patterns    find 96 places inside forwards, beside torch.fx's own matcher
    nodes       replace 400 calls of one forward, beside one pass of torch.fx by hand
    fused       q/k/v, gate/up and whole MLPs beside the same layers apart
    loss        memory and time of a head's cross entropy in chunks, beside all logits at once
    blocks      compiling each block beside compiling the whole: cold start and step
    peers       the same replacement by other tools, as far as they are installed

A row is ``ok`` or ``over`` its target; being over fails nothing, since machines differ. The exit status is 0 unless a
group crashed. Cases that are compared run in turn in one process, and the medians of the ratios within each round are
told, in CPU time, so that a busy machine changes little. Garbage is collected before each timed part, and the collector
is on within.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

from ._measure import Row

COSTS = ("swap", "linear", "entries", "import", "running", "graphs", "patterns", "nodes")
GAINS = ("fused", "loss", "blocks")
FILES = {name: name for name in (*COSTS, *GAINS, "peers")} | {"import": "importing"}
RESULTS = Path(__file__).with_name("RESULTS.md")
COMMANDS = """\
pip install --no-deps torchao   # optional: one of the peers
make bench                      # that is: python -m benchmarks"""


def main(arguments: Sequence[str]) -> int:
    """Run groups, print the table and write it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what slapo_fn costs.")
    parser.add_argument(
        "--only", action="append", choices=list(FILES), metavar="NAME", help=f"one of {', '.join(FILES)}; only prints"
    )
    parser.add_argument("--no-write", action="store_true", help="do not write RESULTS.md")
    given = parser.parse_args(arguments)
    start, crashed = perf_counter(), []
    groups: dict[str, list[Row]] = {}
    for name in given.only or FILES:
        began, rows = perf_counter(), groups.setdefault(name, [])
        print(f"\n{name}", flush=True)
        try:
            for row in importlib.import_module(f".{FILES[name]}", __package__).rows():
                rows.append(row)
                print(
                    f"  {row.verdict or '-':5} {row.measured:>9}  {row.target:13} {row.what}  [{row.note}]", flush=True
                )
        except Exception:
            crashed.append(name)
            traceback.print_exc()
        print(f"  ({perf_counter() - began:.0f} s)")
    print(f"\n{perf_counter() - start:.0f} s in all", *(["; crashed:", *crashed] if crashed else []))
    if not (given.no_write or given.only or crashed):
        RESULTS.write_text(report(groups, perf_counter() - start))
        print(f"written: {os.path.relpath(RESULTS)}")
    return 1 if crashed else 0


def report(groups: dict[str, list[Row]], took: float) -> str:
    """The table and the machine, in Markdown."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`; what each row means is in `__main__.py` and in the group's own file.",
        "",
    ]
    for name, rows in groups.items():
        lines += [f"## {name}", "", "| what | measured | target | | note |", "|---|---:|---|---|---|"]
        lines += [f"| {row.what} | {row.measured} | {row.target} | {row.verdict} | {row.note} |" for row in rows] + [""]
    lines += ["## Machine", ""]
    lines += [f"* {key}: {value}" for key, value in _machine(took).items()]
    return "\n".join([*lines, "", "```sh", COMMANDS, "```", ""])


def _machine(took: float) -> dict[str, str]:
    packages = {name: _version(name) for name in ("torch", "transformers", "accelerate", "torchao")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPUs": f"{os.cpu_count()}, {platform.machine()}, {platform.system()}",
        "load average at the end": f"{_load()}, in part from others",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name, found in packages.items()),
        "took": f"{took:.0f} s",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
