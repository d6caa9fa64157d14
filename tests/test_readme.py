"""The README's code runs as it stands there and prints what it says. ``UPDATE_GOLDEN=1`` writes what it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def run(code: str, line: int, names: dict[str, Any]) -> str:
    """What a piece of a file ``train.py`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + code, "train.py", "exec"), names)
    return printed.getvalue()


def test_readme_prints_what_it_says() -> None:
    text = README.read_text()
    module = sys.modules["train"] = types.ModuleType("train")
    names = vars(module)
    line, wanted, got = 0, [], []
    for block in BLOCKS.finditer(text):
        printed = run(block[1], line, names)
        line += block[1].count("\n") + 1
        wanted.append(block[2] or "")
        got.append(printed)
    if os.environ.get("UPDATE_GOLDEN"):
        outputs = iter(got)

        def renew(block: re.Match[str]) -> str:
            printed = next(outputs)
            return block[0] if block[2] is None else f"```python\n{block[1]}```\n\n```text\n{printed}```"

        README.write_text(BLOCKS.sub(renew, text))
    else:
        assert got == wanted
