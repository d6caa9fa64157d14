"""What an editor shows: hover, completion, signature help and go-to-definition, asked of pyright's language server, the
engine of Pylance. The sample is unfinished on purpose: that is how code looks while it is being typed.

Broken on purpose once, in a copy, and found each time: ``new`` as a union with `nn.Module` (completion in the lambda
and signature help are lost), a decorator on a builder (hover), a builder imported lazily by ``__getattr__`` (hover and
definition), a builder without docstring (hover), a relative import of ``apply`` (its definition becomes two places).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from lsp_client import Document, Server

import slapo_fn

pytestmark = pytest.mark.editor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRIMITIVES = [one.name for one in slapo_fn.primitives()]
FUNCTIONS = sorted({*PRIMITIVES, *(name for name, one in vars(slapo_fn).items() if isinstance(one, FunctionType))})
CLASSES = sorted(name for name, thing in vars(slapo_fn).items() if isinstance(thing, type))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    analysis = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    settings = {"python": {"pythonPath": sys.executable, "analysis": analysis}}
    running = Server([str(Path(sys.executable).parent / "pyright-langserver"), "--stdio"], HERE, settings)
    yield running
    running.close()


@pytest.fixture(scope="module")
def names(server: Server) -> Document:
    lines = [f"slapo.{name}  #" for name in FUNCTIONS + CLASSES]
    return server.open(HERE / "names.py", "import slapo_fn as slapo\n\n" + "\n".join(lines))


@pytest.fixture(scope="module")
def typing(server: Server) -> Document:
    return server.open(HERE / "unfinished.py", (HERE / "unfinished.txt").read_text())


def test_the_lists_are_not_empty() -> None:
    assert {"add", "apply", "at", "drop", "entries", "exactly", "plan", "replace", "select"} <= set(FUNCTIONS)
    assert {"checkpoint", "compile", "freeze", "hook", "probe", "replace", "unfreeze"} <= set(PRIMITIVES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hover_shows_signature_and_docs(names: Document, name: str) -> None:
    shown = names.hover(f"slapo.{name[0]}¦{name[1:]}  #")
    signature, rule, docs = shown.partition("\n---\n")
    assert f"def {name}(" in signature, shown
    assert "->" in signature, shown
    assert "Unknown" not in signature, shown
    assert rule, f"no docstring on hover of {name}: {shown}"
    first = (inspect.getdoc(getattr(slapo_fn, name)) or "").split("\n")[0]
    assert docs.split() != []
    assert docs.split()[:3] == first.replace("``", "`").split()[:3], docs


@pytest.mark.parametrize("name", CLASSES)
def test_hover_of_a_class_shows_docs(names: Document, name: str) -> None:
    shown = names.hover(f"slapo.{name[0]}¦{name[1:]}  #")
    assert f"class) {name}" in shown or f"class {name}" in shown, shown
    assert len(shown.partition("\n---\n")[2]) > 20, shown


@pytest.mark.parametrize("name", FUNCTIONS)
def test_definition_is_one_hop(names: Document, name: str) -> None:
    path, line = names.definition(f"slapo.{name[0]}¦{name[1:]}  #")
    code = getattr(slapo_fn, name).__code__
    assert path == Path(code.co_filename)
    assert path.read_text().splitlines()[line - 1].startswith(f"def {name}(")
    if name in PRIMITIVES:
        assert path == ROOT / "slapo_fn" / "ops" / f"{'freeze' if name == 'unfreeze' else name}.py"


@pytest.mark.parametrize(
    ("mark", "wanted"),
    [
        ("    bl¦ocks = slapo", "Selection[GPT2Block]"),
        ("    ru¦le = slapo", "Selector[GPT2MLP]"),
        ("    mi¦xed = blocks", "Selection[GPT2Block | GPT2MLP]"),
        ("lambda o¦ld: old.attn", "GPT2Block"),
        ("lambda old: old.at¦tn", "GPT2Attention"),
        ("lambda si¦te, n: site.module, 3", "Site[GPT2MLP]"),
        ("    ou¦t = slapo", "GPT2LMHeadModel"),
        ("    for ¦s in blocks", "Site[GPT2Block]"),
        ("    for ¦e in slapo", "Entry[CheckpointArgs]"),
    ],
)
def test_types_on_hover(typing: Document, mark: str, wanted: str) -> None:
    assert wanted in typing.hover(mark)


@pytest.mark.parametrize(
    ("mark", "wanted"),
    [
        ("lambda mlp: mlp.¦)", {"c_fc", "c_proj", "act", "dropout"}),
        ("lambda blk: blk.¦)", {"attn", "mlp", "ln_1"}),
        ("lambda one: one.¦)", {"attn", "mlp", "ln_1"}),
        ("lambda few: few.¦)", {"c_fc", "c_proj"}),
        ("lambda norm: norm.¦)", {"named_parameters"}),
        ("lambda whole: whole.¦)", {"transformer", "lm_head", "generate"}),
        ("lambda each, path: each.¦)", {"c_fc", "c_proj"}),
        ("lambda place, n: place.module.¦)", {"c_fc", "c_proj"}),  # pyright needs the args first to solve it
        ('GPT2MLP, weights="¦")', {'"fresh"', '"inherit"'}),
        ("checkpoint(sch, GPT2Block, ¦)", {"preserve_rng_state=", "context_fn=", "determinism_check="}),
        ('determinism_check="¦")', {'"default"', '"none"'}),
        ("        s.module.¦\n", {"attn", "mlp"}),
        ("        e.args.¦\n", {"preserve_rng_state", "context_fn", "determinism_check"}),
        ("    sch[0].¦\n", {"selector", "primitive", "args", "origin", "label", "name"}),
        ("    slapo.Phase.¦\n", {"STRUCTURE", "COMPILE", "CHECKPOINT"}),
        (".steps[0].¦\n", {"path", "before", "after", "overridden_by"}),
    ],
)
def test_completion(typing: Document, mark: str, wanted: set[str]) -> None:
    offered = typing.completion(mark)
    assert wanted <= offered, wanted - offered


def test_completion_of_the_namespace_has_every_public_name_and_no_other(server: Server) -> None:
    text = "import slapo_fn as slapo\nslapo."
    offered = server.open(HERE / "dotted.py", text).completion("slapo.¦")
    public = {name for name in vars(slapo_fn) if not name.startswith("_")}
    assert set(FUNCTIONS + CLASSES) <= offered
    assert {name for name in offered if not name.startswith("_")} <= public


def test_signature_help_is_solved_for_the_target(typing: Document) -> None:
    shown, active = typing.signature("slapo.replace(sch, blocks, ¦lambda old")
    assert "new: (GPT2Block) -> Module" in shown
    assert active == 2


def test_signature_help_is_solved_for_a_users_own_primitive(typing: Document) -> None:
    shown, active = typing.signature("slapo.add(sch, rule, ¦lambda site")
    assert "primitive: (Site[GPT2MLP], int) -> Module" in shown
    assert active == 2
