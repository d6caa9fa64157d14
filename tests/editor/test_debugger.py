"""What F11 (step into) and F10 (step over) do, asked of debugpy as VS Code asks it.

Broken on purpose once, in a copy, and found each time: a decorator on a builder (one F11 lands in it), a second line in
the loop of ``apply``, an ``__enter__`` written in Python (the third F11 lands in it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dap_client import Debugger

import slapo_fn

pytestmark = pytest.mark.editor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLE = HERE / "sample_debug.py"
LINES = SAMPLE.read_text().splitlines()
PRIMITIVES = [one.name for one in slapo_fn.primitives()]

# What launch.json says for F11 to enter slapo_fn and not its machinery, however it is installed.
RULES: list[dict[str, Any]] = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"][0]["rules"]
MODES: dict[str, dict[str, Any]] = {
    "every line is mine": {"justMyCode": False},
    "just my code, and rules": {"justMyCode": True, "rules": RULES},
}


def line(text: str) -> int:
    """The number of the one line of the sample that has a text."""
    (found,) = [number for number, one in enumerate(LINES, 1) if text in one]
    return found


STARTS = ["first = slapo.apply", "second = slapo.apply", "shown = slapo.plan"]


class Walk(NamedTuple):
    """What a user saw who went through the sample once, by F11 and F10."""

    builders: dict[str, tuple[str, set[str]]]  # text of the line -> where one F11 led, and the variables there
    passes: dict[str, tuple[list[str], str, dict[str, str]]]  # where F11, F10, F11 led; the caller; the variables
    factory: list[str]  # where F10, F10, F11 led from the primitive
    loop: list[str]  # where F10 led, again and again, from the loop's head
    pane: dict[str, dict[str, str]]  # what the variables pane shows


def strings(variables: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: one["value"] for name, one in variables.items()}


@pytest.fixture(scope="module", params=list(MODES))
def walk(request: pytest.FixtureRequest) -> Iterator[Walk]:
    """One session for all questions: a launch takes longer than they do."""
    stops = [f"sch = slapo.{name}(" for name in PRIMITIVES]
    ordered = sorted([*stops, *STARTS], key=line)
    debugger = Debugger(SAMPLE, [line(one) for one in ordered], {"PYTHONPATH": str(ROOT)}, **MODES[request.param])
    seen = Walk({}, {}, [], [], {})
    try:
        for text in ordered:
            at = debugger.stopped()
            assert at == f"editor/sample_debug.py:{line(text)} <module>"
            if text in stops:
                where = debugger.into()
                seen.builders[text] = where, set(debugger.variables())
            else:
                if text == STARTS[0]:
                    open_the_pane(debugger, seen)
                trail = [debugger.into(), debugger.over(), debugger.into()]
                frames = debugger.frames()
                seen.passes[text] = trail, frames[1]["name"], strings(debugger.variables())
                if text == STARTS[0]:
                    seen.factory.extend([debugger.over(), debugger.over(), debugger.into()])
                    seen.loop.extend([debugger.out(), debugger.out(), *(debugger.over() for _ in range(4))])
            debugger.ask("continue", {"threadId": debugger.thread})
        yield seen
    finally:
        debugger.close()


def open_the_pane(debugger: Debugger, seen: Walk) -> None:
    shown = debugger.variables()
    entry = debugger.opened(shown["head"])["0"]
    fields = debugger.opened(entry)
    site = debugger.opened(debugger.opened(shown["sel"])["sites"])["0"]
    seen.pane.update(
        locals=strings(shown),
        entry={"": entry["value"], **strings(fields)},
        args=strings(debugger.opened(fields["args"])),
        site={"": site["value"], **strings(debugger.opened(site))},
        hover={"sch": debugger.hover("sch"), "sel": debugger.hover("sel")},
    )


@pytest.mark.parametrize("name", PRIMITIVES)
def test_one_step_into_a_builder_lands_in_its_own_file(walk: Walk, name: str) -> None:
    where, shown = walk.builders[f"sch = slapo.{name}("]
    assert where.startswith(f"ops/{'freeze' if name == 'unfreeze' else name}.py:")
    assert where.endswith(f" {name}")
    assert {"schedule", "target"} <= shown


@pytest.mark.parametrize(
    ("start", "goal", "caller"),
    [
        (STARTS[0], "ops/replace.py replace_at", "apply"),
        (STARTS[1], "editor/sample_debug.py mine_at", "apply"),
        (STARTS[2], "editor/sample_debug.py mine_at", "plan"),
    ],
)
def test_three_gestures_to_the_primitive(walk: Walk, start: str, goal: str, caller: str) -> None:
    """F11 into the pass, F10 over its preparation, F11 into the primitive."""
    trail, called_by, shown = walk.passes[start]
    assert trail[0].startswith(f"slapo_fn/{caller}.py:"), trail
    assert trail[1].startswith(f"slapo_fn/{caller}.py:"), trail
    assert trail[2].split(":")[0] + " " + trail[2].split()[-1] == goal, trail
    assert called_by == caller
    assert {"site", "args"} <= set(shown)
    assert shown["site"].startswith("Site('")


def test_from_the_primitive_one_more_step_enters_the_users_factory(walk: Walk) -> None:
    """Two lines of the primitive are stepped over to the call, and F11 there enters the factory."""
    assert all(where.startswith("ops/replace.py:") for where in walk.factory[:-1]), walk.factory
    assert walk.factory[-1] == f"editor/sample_debug.py:{line('made = nn.Identity()')} new"


def test_step_over_goes_from_place_to_place_and_nowhere_else(walk: Walk) -> None:
    lines = (ROOT / "slapo_fn" / "apply.py").read_text().splitlines()
    primitive, body, *trail = walk.loop
    assert primitive.startswith("ops/replace.py:")
    numbers = [int(where.split(":")[1].split()[0]) for where in (body, *trail)]
    assert all(where.startswith("slapo_fn/apply.py:") for where in (body, *trail)), trail
    told = [lines[number - 1].strip().split("  #")[0] for number in numbers]
    loop = "for entry, site in (work := prepare(model, schedule, inplace=inplace)):"
    put = "with work: work.put(site, entry.primitive(site, entry.args))"
    assert told == [put, loop, put, loop, "return work.finish()"]


def test_a_schedule_reads_well_in_the_variables_pane(walk: Walk) -> None:
    entry, written = walk.pane["entry"], line("slapo.replace(sch, sel, new)")
    assert entry[""].startswith("replace(")
    assert "Linear" in entry["selector"]
    assert "replace_at" in entry["primitive"]
    assert entry["args"].startswith("ReplaceArgs(new=<function new")
    assert entry["label"] == "'quiet'"
    assert entry["name"] == "'replace'"
    assert "sample_debug.py" in entry["origin"]
    assert f"line={written}" in entry["origin"]
    assert walk.pane["args"]["untie"] == "False"
    assert walk.pane["site"][""] == "Site('0', Linear)"
    assert walk.pane["site"]["path"] == "'0'"


def test_a_schedule_reads_well_on_hover(walk: Walk) -> None:
    shown = walk.pane["hover"]
    assert "Schedule" in shown["sch"]
    assert "Selection of 2: Linear" in shown["sel"]
    assert "Selection of 2: Linear" in walk.pane["locals"]["sel"]


def test_a_failing_factory_shows_the_users_frame_and_a_note() -> None:
    run = subprocess.run(
        [sys.executable, str(SAMPLE)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.returncode == 1
    text = run.stderr
    assert f'sample_debug.py", line {line("third = slapo.apply")}, in <module>' in text
    assert f'sample_debug.py", line {line("the factory fails")}, in broken' in text
    assert "RuntimeError: the factory fails" in text
    note = text[text.index("RuntimeError: the factory fails") :]
    assert "entry 0: replace(1, new=broken), written at sample_debug.py:" in note
    assert f"sample_debug.py:{line('bad = slapo.replace')}" in note
    assert text.count('  File "') <= 6, text
