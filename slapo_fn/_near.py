"""Why a pattern matches nothing: how far it came, what does exist there, and the names that are near."""

from __future__ import annotations

import builtins
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from ._find import find, spelled
from ._glob import parse
from ._text import count, fold
from ._tree import join
from .errors import NoMatchError

SHOWN = 8


def nothing_matches(
    root: nn.Module,
    pattern: str | re.Pattern[str],
    type: builtins.type[nn.Module],
    there: Sequence[tuple[str, nn.Module]],
) -> NoMatchError:
    """The error for a pattern that picks nothing, where ``there`` matches it by path but not by class."""
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if there or text == "**":
        return NoMatchError(_wrong_class(root, text, type, there), [text])
    kind = "" if type is nn.Module else f" of class {type.__name__}"
    if not isinstance(pattern, str):
        near = difflib.get_close_matches(text.replace("\\", ""), [path for path, _ in spelled(root)], 3, 0.5)
        hint = f" Near paths: {', '.join(near)}." if near else ""
        return NoMatchError(f"no module{kind} has a path that the expression {text!r} matches in full.{hint}", [text])
    return NoMatchError(f"nothing{kind} matches {text!r}. {_how_far(root, text)}", [text])


def _how_far(root: nn.Module, text: str) -> str:
    # How many whole segments of the pattern still match something decides what is said.
    segments = text.split(".") if "{" not in text else [text]
    reached = [("", root)]
    for done, segment in enumerate(segments):
        onward = _matches(root, ".".join(segments[: done + 1]))
        if not onward:
            return _stopped(root, reached, ".".join(segments[:done]), segment, segments[done + 1 :])
        reached = onward
    return _listing("At the root there are", _children(reached))


def _matches(root: nn.Module, text: str) -> list[tuple[str, nn.Module]]:
    try:
        glob = parse(text)
    except ValueError:  # a part of a pattern, cut inside a brace
        return []
    return find(root, glob)


def _stopped(
    root: nn.Module, reached: Sequence[tuple[str, nn.Module]], prefix: str, segment: str, rest: Sequence[str]
) -> str:
    if found := _tensor(reached, segment):
        return found
    where = f"Below {prefix!r}" if prefix else "At the root"
    children = _children(reached)
    said = [f"{where} there is no {segment!r}."]
    text = _text_of(prefix, segment, rest)
    if hint := _hint(root, text, prefix, segment, rest, children):
        said.append(hint)
    elif close := difflib.get_close_matches(text, [path for path, _ in spelled(root) if path], 3, 0.6):
        said.append(f"Near paths: {', '.join(fold(sorted(close)))}.")
    said.append(_listing("There are", children))
    return " ".join(said)


def _hint(root: nn.Module, text: str, prefix: str, segment: str, rest: Sequence[str], children: Sequence[str]) -> str:
    """What to write instead, tried on the model."""
    if segment in children:
        return "Its name has characters of the pattern language: select it by code, at(model, lambda m: […])."
    if "[" in text and _matches(root, apart := re.sub(r"(?<=[^.])\[", ".[", text)):
        return f"A range of children is a segment of its own: write {apart!r}."
    near = difflib.get_close_matches(segment, children, 3, 0.6)
    meant = [spelling for name in near if _matches(root, spelling := _text_of(prefix, name, rest))]
    if meant:
        return f"Did you mean {' or '.join(map(repr, meant))}?"
    deeper = "**." + text
    if not text.startswith("**") and (found := _matches(root, deeper)):
        return f"It does exist as {', '.join(fold(path for path, _ in found)[:SHOWN])}: write {deeper!r} for it at any depth."
    if "\\" in text or "+" in text:
        return "A regular expression is given compiled: re.compile(…)."
    if any(type(module).__name__ == text for _, module in spelled(root)):
        return f"It is the name of a class: give the class, select(model, type={text})."
    return ""


def _text_of(prefix: str, segment: str, rest: Iterable[str]) -> str:
    """The pattern's text again."""
    return ".".join(filter(None, (prefix, segment, *rest)))


def _tensor(reached: Sequence[tuple[str, nn.Module]], name: str) -> str:
    for path, module in reached:
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            if held.get(name) is not None:
                return (
                    f"{join(path, name)!r} is a {kind} of {path or 'the root'} ({type(module).__name__}), and not a "
                    f"module: select {path!r}, and give {name!r} as the name to a primitive that works on "
                    "parameters (cast, freeze, annotate)."
                )
    return ""


def _children(reached: Sequence[tuple[str, nn.Module]]) -> list[str]:
    return list(dict.fromkeys(name for _, module in reached for name in module._modules))


def _listing(start: str, names: Sequence[str]) -> str:
    if not names:
        return f"{start} no modules."
    shown = fold(names)
    return f"{start}: {', '.join(shown[:SHOWN])}{', …' if len(shown) > SHOWN else ''}."


def _wrong_class(
    root: nn.Module, text: str, type: builtins.type[nn.Module], there: Sequence[tuple[str, nn.Module]]
) -> str:
    modules = [module for _, module in there] or list(root.modules())
    overriding = Counter(m.__class__.__name__ for m in modules if isinstance(m, type))
    if overriding:
        which = "" if text == "**" else f" that {text!r} matches"
        return (
            f"no module{which} is a {type.__name__} with {type.__name__}'s own forward. Left out, since "
            f"they override it: {_tally(overriding)}; give subclasses=True to take them."
        )
    kinds = Counter(module.__class__.__name__ for module in modules)
    alike = Counter(m.__class__.__name__ for m in modules if _looks_like(m, type))
    message = f"no module is a {type.__name__}."
    if text != "**":
        message = f"{text!r} matches {count(len(modules), 'module')}, and none is a {type.__name__}."
    if alike:
        return f"{message} Look-alikes: {_tally(alike)}."
    return f"{message} They are: {_tally(kinds)}."


def _looks_like(module: nn.Module, type: builtins.type[nn.Module]) -> bool:
    mine, wanted = module.__class__.__name__.lower(), type.__name__.lower()
    if wanted in mine or difflib.SequenceMatcher(None, mine, wanted).ratio() > 0.75:
        return True
    weight = module._parameters.get("weight")
    matrix = weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
    return issubclass(type, nn.Linear) and matrix


def _tally(kinds: Counter[str]) -> str:
    shown = [f"{name} x{count}" for name, count in kinds.most_common(SHOWN)]
    return ", ".join(shown) + (", …" if len(kinds) > SHOWN else "")
