"""The package, and what users write with it, under four type checkers.

All of them find nothing in the package and in ``typed/accepted.py``, and in ``typed/refused.py`` exactly the marked
lines. ty is young: what only ty says is a warning.

Broken on purpose once, in a copy, and found each time: ``new`` as a union with `nn.Module`, an untyped decorator on a
builder, `Any` for a site's module.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.editor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
TYPED = HERE / "typed"
CHECKERS = ["mypy", "pyright", "pyrefly", "ty"]
IGNORED = ["missing-override-decorator"]  # of pyrefly: a rule's `resolve` is an override for everybody to see

Errors = dict[str, dict[int, str]]  # file -> line -> message


def command(checker: str) -> list[str]:
    """The command line of a checker."""
    typed = [str(TYPED / "accepted.py"), str(TYPED / "refused.py")]
    package = ROOT / "slapo_fn"
    ignored = [f"--ignore={kind}" for kind in IGNORED]
    python = ["--python-interpreter-path", sys.executable]
    shown, concise = ["--output-format", "min-text"], ["--output-format", "concise"]
    files = [*map(str, sorted(package.rglob("*.py"))), *typed]
    options = {
        "mypy": ["--strict", "--no-error-summary", "--no-pretty", "--show-absolute-path", str(package), *typed],
        "pyright": ["--outputjson", "-p", str(HERE / "pyrightconfig.json"), "--pythonpath", sys.executable],
        "pyrefly": ["check", *python, "--search-path", str(ROOT), "--preset", "strict", *ignored, *shown, *files],
        "ty": ["check", "--python", str(BIN.parent), "--extra-search-path", str(ROOT), *concise, str(package), *typed],
    }
    return [str(BIN / checker), *options[checker]]


@cache
def errors(checker: str) -> Errors:
    """What a checker finds."""
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    run = subprocess.run(command(checker), capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    found: Errors = {}
    if checker == "pyright":
        report = json.loads(run.stdout[run.stdout.index("{") :])
        assert report["summary"]["filesAnalyzed"] > len(list((ROOT / "slapo_fn").rglob("*.py"))), report["summary"]
        for one in report["generalDiagnostics"]:
            if one["severity"] == "error":
                found.setdefault(str(Path(one["file"])), {})[one["range"]["start"]["line"] + 1] = one["message"]
        return found
    pattern = {
        "mypy": r"^([^:\n]*):(\d+): error: (.*)$",
        "pyrefly": r"^\s*ERROR ([^:\n]*):(\d+):(.*)$",
        "ty": r"^([^:\n]*):(\d+):\d+: error(.*)$",
    }[checker]
    for match in re.finditer(pattern, run.stdout + run.stderr, re.MULTILINE):
        found.setdefault(str((ROOT / match[1]).resolve()), {})[int(match[2])] = match[3]
    assert found, run.stdout + run.stderr  # refused.py is full of errors; finding none is a crash
    return found


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_package_is_clean(checker: str) -> None:
    mine = {file: lines for file, lines in errors(checker).items() if "slapo_fn/" in file}
    found = [f"{file}:{line}: {text}" for file, lines in mine.items() for line, text in lines.items()]
    told = "\n".join(found)
    if checker == "ty" and found:
        warnings.warn(f"ty says of the package:\n{told}", stacklevel=1)
        return
    assert not found, told


@pytest.mark.parametrize("checker", CHECKERS)
def test_what_is_right_is_accepted(checker: str) -> None:
    file = TYPED / "accepted.py"
    lines = file.read_text().splitlines()
    wanted = {n for n, line in enumerate(lines, 1) if re.search(rf"# not {checker}\b", line)}
    got = errors(checker).get(str(file), {})
    assert {n: text for n, text in got.items() if n not in wanted} == {}, "refused, but right"
    assert wanted <= set(got), "a known gap has closed: take its mark away"


@pytest.mark.parametrize("checker", CHECKERS)
def test_what_is_wrong_is_refused(checker: str) -> None:
    file = TYPED / "refused.py"
    lines = file.read_text().splitlines()
    marks = {n: m[1] or "" for n, line in enumerate(lines, 1) if (m := re.search(r"  # E(?: \((.*)\))?$", line))}
    wanted = {n for n, gap in marks.items() if f"not {checker}" not in gap}
    got = errors(checker).get(str(file), {})
    assert {n: lines[n - 1].strip() for n in wanted - set(got)} == {}, "accepted, but wrong"
    strange = {n: (lines[n - 1].strip(), got[n]) for n in set(got) - wanted}
    assert strange == {}, "refused, but right; or a known gap has closed"


def test_every_public_symbol_has_a_known_type() -> None:
    # In this mode pyright asks the `python` that it finds on the path, and none else, where packages are.
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [str(BIN / "pyright"), "--verifytypes", "slapo_fn", "--ignoreexternal", "--outputjson"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        cwd=HERE,
        check=False,
    )
    report = json.loads(run.stdout[run.stdout.index("{") :])["typeCompleteness"]
    unknown = [one["name"] for one in report["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    assert unknown == []
    assert report["completenessScore"] == 1
