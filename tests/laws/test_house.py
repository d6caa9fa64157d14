"""House rules: short files, short functions, and imports that point down only."""

from __future__ import annotations

import ast
import pathlib

import pytest

import slapo_fn

PACKAGE = pathlib.Path(slapo_fn.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
LAYERS = {
    0: "errors _origin _text _tree _glob _find _copier _fork _forward _rng _replay _layout",
    1: """_near _rules _algebra _problems _relink _weights _named _inherit _ties selection select original
       _match _graph _compiled _siblings pattern nn""",
    2: "schedule",
    3: "_places _engine apply plan ops",
    4: "_catalog __init__",
}
LAYER = {module: number for number, modules in LAYERS.items() for module in modules.split()}


def layer(module: str) -> int:
    """A module's layer: every op is at 3."""
    room = module.split(".")[0]
    assert room in LAYER, f"give {room} a layer in LAYERS"
    return LAYER[room]


def imports(file: str) -> set[str]:
    """The modules of the package that a file imports, at any depth of its code."""
    here = ("slapo_fn", *file.removesuffix(".py").split("/"))[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            whole = ".".join(filter(None, (base, node.module)))
            names = [f"{whole}.{alias.name}" if whole == "slapo_fn" else whole for alias in node.names]
        else:
            continue
        found.update(name.removeprefix("slapo_fn.") for name in names if name.startswith("slapo_fn."))
    return found


def lengths(file: str) -> dict[str, int]:
    """How long each function of a file is, without its docstring."""
    found = {}
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            said = (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            )
            found[node.name] = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if said else 0)
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_at_most_300_lines(file: str) -> None:
    assert len((PACKAGE / file).read_text().splitlines()) <= 300


@pytest.mark.parametrize("file", FILES)
def test_a_function_has_at_most_40_lines(file: str) -> None:
    assert {name: length for name, length in lengths(file).items() if length > 40} == {}


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down_only(file: str) -> None:
    mine = file.removesuffix(".py").replace("/", ".")
    for other in imports(file) - {"ops", "ops.__init__"}:
        assert layer(other) <= layer(mine), f"{mine} imports {other}, which is above it"
        assert not (mine.startswith("ops.") and other.startswith("ops.")), f"{mine} imports its sibling {other}"
        assert not (other.startswith("ops.") and layer(mine) < 4), f"{mine} imports {other}"
    if "ops" in imports(file):
        assert layer(mine) == 4


def test_the_checks_see_what_they_should() -> None:
    assert "_engine" in imports("apply.py")
    assert {"schedule", "_forward"} <= imports("ops/checkpoint.py")
    assert "ops.checkpoint" in imports("__init__.py")
    assert lengths("apply.py")["apply"] < 15
