"""Parameters and buffers of a place, by a pattern over their dotted names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from torch import Tensor, nn

from ._find import ANY_NUMBER, spelled
from ._forward import refuse_scripted
from ._glob import parse
from ._siblings import Share
from ._text import fold, what
from ._tree import join
from .errors import ArgumentError, MisfitError, ParameterNameError, PatternError


def checked_names(names: str) -> str:
    """A pattern over tensor names, well formed.

    Raises:
        ArgumentError: It is no str.
        PatternError: It is not well formed.
    """
    if not isinstance(names, str):
        raise ArgumentError(f"names is a pattern over the names of parameters, not {what(names)}")
    if parse(names).from_end:
        raise PatternError(
            f"the names {names!r} count from the end, which only patterns of modules can: select the module"
        )
    return names


def named_tensors(path: str, module: nn.Module, names: str) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The tensors below a module whose dotted names match: ``(dotted name, its module, its own name, tensor)``.

    Raises:
        MisfitError: The module is a part of a fused one.
        ParameterNameError: None does, though a name was asked for.
    """
    if isinstance(module, Share):
        raise MisfitError(
            f"{path} is a part of a fused layer and has no weights of its own: select the fused layer", [path]
        )
    glob = parse(names)
    known: list[str] = []
    met = False
    for place, holder in spelled(module):
        for table in (holder._parameters, holder._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    dotted = join(place, name)
                    known.append(dotted)
                    if glob.accepts(glob.step(glob.start(), dotted, ANY_NUMBER)):
                        met = True
                        refuse_scripted(holder)
                        if table[name] is not tensor:
                            continue  # it has a second name here, under which it is renewed by now
                        yield dotted, holder, name, tensor
    if not met and names != "**":
        near = difflib.get_close_matches(names, known, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        there = ", ".join(fold(known)[:8]) or "none"
        raise ParameterNameError(
            f"{path or 'the root'} ({type(module).__name__}) has no parameter or buffer {names!r}{hint} It has: {there}",
            [join(path, names)],
        )
