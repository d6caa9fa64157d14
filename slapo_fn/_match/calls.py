"""Read a call, of a pattern or of a forward: what it computes, and its arguments in one order."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# fx's arguments have no types.

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

from .spell import IGNORED, Op, Spelling, lookup

WINDOWS = ("stride", "padding", "dilation", "kernel_size", "output_size")


@dataclass(frozen=True)
class Attr:
    """A tensor of the traced module, or the ``training`` flag of a module in it, by its path."""

    name: str

    @property
    def is_flag(self) -> bool:
        """Whether it is no tensor."""
        return self.name == "training" or self.name.endswith(".training")


Mend = Callable[[Op, Spelling | None, list[Any]], None]
Leaf = Callable[[str, Any], Any]  # what stands for a module's tensor or its training flag


class Form(NamedTuple):
    """How a call is written.

    Attributes:
        key: What it computes: an operation's name in the table, or what is called.
        op: The operation, if the table has it.
        spelling: How the table spells it.
        bind: Gives the arguments in one order, or None.
        mends: What writes those arguments in one way that can be written in several.
    """

    key: Any
    op: Op | None
    spelling: Spelling | None
    bind: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    mends: tuple[Mend, ...] = ()

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None, leaf: Leaf) -> Any:
        """The arguments in one order, those that a module has among them; ``leaf`` is asked for its tensors."""
        values = self.bind(args, kwargs)
        if self.op is None or values is None:
            values = values if values is not None else (args, tuple(sorted(kwargs.items())))
            return values if module is None else (values, config(module))
        if module is not None and self.spelling is not None:
            _configured(self.op, self.spelling, values, module, leaf)
        for mend in self.mends:
            mend(self.op, self.spelling, values)
        return tuple(values)

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None) -> bool:
        """Whether the call writes into what it is given."""
        if self.spelling is None:
            name = self.key[1] if type(self.key) is tuple else getattr(self.key, "__name__", "")
            return name == "setitem" or name.partition(".")[0].rstrip("_") + "_" == name.partition(".")[0]
        if self.spelling.writes or (module is not None and getattr(module, "inplace", False)):
            return True
        names = self.spelling.names
        given = "inplace" in names and len(args) > (at := names.index("inplace")) and args[at]
        return bool(given or kwargs.get("inplace"))


@lru_cache(maxsize=4096)
def _form(kind: str, target: Any) -> Form:
    table = lookup()
    spellings: dict[str, Mapping[Any, Spelling]] = {
        "call_function": table.functions,
        "call_method": table.methods,
        "attribute": table.attributes,
    }
    where = spellings.get(kind, table.modules)
    spelling = where.get(_origin(target, where) if kind == "call_module" else target)
    if spelling is not None:
        return Form(spelling.op.name, spelling.op, spelling, spelling.bind, _mends(spelling.op))
    if kind == "call_method":
        function = getattr(torch, target, None)
        if not (callable(function) and hasattr(torch.Tensor, target)):
            return Form(("method", target), None, None, _unbound)
        target = function
    elif kind == "attribute":
        return Form(("attribute", target), None, None, _unbound)
    if kind == "call_module":
        target = _origin(target, where)
        return Form(target, None, None, _binder([inspect.signature(target.forward)], 1))
    return Form(target, None, None, _binder(_signatures(target), 0))


def form(kind: str, target: Any) -> Form:
    """How a function, a method or an attribute (by name), or a module (by class) is read."""
    return _form(kind, target)


def form_of(module: nn.Module) -> Form:
    """How a call of a module is read."""
    found = form("call_module", type(module))
    if found.op is not None and getattr(module, "padding_mode", "zeros") != "zeros":
        return Form(type(module), None, None, _unbound)
    return found


def size_item(node: torch.fx.Node) -> bool:
    """Whether a node is ``x.shape[0]`` or ``x.size()[0]``, which is ``x.size(0)``."""
    return (
        node.target is operator.getitem
        and type(node.args[1]) is int
        and isinstance(whole := node.args[0], torch.fx.Node)
        and whole_size(whole)
    )


def counts(node: torch.fx.Node) -> bool:
    """Whether a node is Python's own arithmetic, which tells about tensors if it is given only what does."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")


def whole_size(node: torch.fx.Node) -> bool:
    """Whether a node is ``x.shape`` or ``x.size()``."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and node.args[1] == "shape"


def _origin(kind: type[nn.Module], known: Mapping[Any, Any]) -> type[nn.Module]:
    """The class that a module's forward is: of bases that share it, one that the table knows, or the first."""
    same = [base for base in kind.__mro__ if getattr(base, "forward", None) is kind.forward]
    return next((base for base in same if base in known), same[-1])


def _unbound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    return None


def _signatures(function: Any) -> list[inspect.Signature]:
    if signatures := get_signature_for_torch_op(function):
        return signatures
    try:
        return [inspect.signature(function)]
    except (TypeError, ValueError):
        return []


def _binder(signatures: list[inspect.Signature], skip: int) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Bind by the first signature that fits."""

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for signature in signatures:
            try:
                bound = signature.bind(*(None,) * skip, *args, **kwargs)
            except TypeError:
                continue
            bound.apply_defaults()
            return tuple(
                (name, plain(value)) for name, value in [*bound.arguments.items()][skip:] if name not in IGNORED
            )
        return None

    return bind


def plain(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """A value with its containers as tuples, and its nodes exchanged."""
    if isinstance(value, (list, tuple)):
        return tuple([plain(one, leaf) for one in value])
    if isinstance(value, torch.fx.Node):
        return leaf(value) if leaf else value
    if isinstance(value, slice):
        return (slice, plain(value.start, leaf), plain(value.stop, leaf), plain(value.step, leaf))
    if isinstance(value, dict):
        return (dict, *((key, plain(one, leaf)) for key, one in sorted(value.items())))
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two constants are equal; ``2`` is ``2.0``, ``True`` is not ``1``, ``nan`` is ``nan``."""
    if type(one) is type(other) and type(one) in (str, int, bool):
        return bool(one == other)
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, tuple) or isinstance(other, tuple):
        return (
            isinstance(one, tuple)
            and isinstance(other, tuple)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    return one is other or bool(one == other) or (one != one and other != other)


def config(module: nn.Module) -> tuple[Any, ...]:
    """What a module was made with: its plain attributes and its tensors' shapes, and the same of its children."""
    own = sorted(
        (name, plain(value))
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and isinstance(value, (int, float, str, tuple, list, torch.dtype))
    )
    shapes = [(name, tuple(one.shape)) for name, one in module._parameters.items() if one is not None]
    inner = [(name, type(child), config(child)) for name, child in module._modules.items() if child is not None]
    return (tuple(own), tuple(shapes), tuple(inner))


def _configured(op: Op, spelling: Spelling, values: list[Any], module: nn.Module, leaf: Leaf) -> None:
    """Fill in what a module has as its attributes."""
    for at, name in enumerate(op.parameters):
        if at in spelling.places:
            continue
        if name == "use_input_stats":  # an instance norm's, which has no such attribute
            name = "training" if getattr(module, "track_running_stats", False) else name
        elif name == "training" and getattr(module, "running_mean", module) is None:
            values[at] = True  # a batch norm without statistics always takes the batch's
            continue
        if hasattr(module, name):
            value = getattr(module, name)
            values[at] = leaf(name, value) if isinstance(value, Tensor) or name == "training" else plain(value)


@lru_cache(maxsize=1024)
def called_with(kind: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Gives the arguments of a module's forward by name; None where they do not fit."""
    return _binder([inspect.signature(kind.forward)], 1)


# ---- arguments that are written in several ways


def _mends(op: Op) -> tuple[Mend, ...]:
    found: list[Mend] = []
    if any(name in op.parameters for name in (*WINDOWS, "dim", "normalized_shape")):
        found.append(_numbers)
    if "pool" in op.name and "stride" in op.parameters:
        found.append(_stride)
    return (*found, *filter(None, [{"to": _to, "contiguous": _memory, "embedding": _padding}.get(op.name)]))


def _numbers(op: Op, spelling: Spelling | None, values: list[Any]) -> None:
    """A tuple of one number, over and over, is the number; a shape of one number is a tuple."""
    for at, name in enumerate(op.parameters):
        value = values[at]
        if name == "normalized_shape" and isinstance(value, int):
            values[at] = (value,)
        elif (
            type(value) is tuple
            and (name in WINDOWS or (name == "dim" and len(value) == 1))
            and all(type(one) is int and one == value[0] for one in value)
        ):
            values[at] = value[0] if value else value


def _stride(op: Op, spelling: Spelling | None, values: list[Any]) -> None:
    at = op.parameters.index("stride")
    if values[at] is None or values[at] == ():
        values[at] = values[op.parameters.index("kernel_size")]


def _to(op: Op, spelling: Spelling | None, values: list[Any]) -> None:
    """A device may stand where a dtype does."""
    if isinstance(values[1], (str, torch.device)):
        values[1], values[2] = values[2], values[1]
    if isinstance(values[2], torch.device):
        values[2] = str(values[2])


def _memory(op: Op, spelling: Spelling | None, values: list[Any]) -> None:
    if values[1] in (0, torch.contiguous_format):
        values[1] = None


def _padding(op: Op, spelling: Spelling | None, values: list[Any]) -> None:
    """To the operator, unlike the function, ``-1`` is no row."""
    if values[2] == -1 and spelling is not None and not spelling.text.startswith("F."):
        values[2] = None
