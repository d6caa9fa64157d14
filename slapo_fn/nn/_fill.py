"""How a new module gets an old one's tensors: one map says where each comes from, and it is what fills them.

fc_in.weight: transposed("c_fc.weight")   ->   a new parameter;   fc_in.bias: "c_fc.bias"   ->   the very same one
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from .._layout.lineage import declare
from .._layout.sources import Source, cat, names, resolved, take, transposed
from .._text import fold, what
from ..errors import MisfitError

M = TypeVar("M", bound=nn.Module)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the ``Conv1D`` of GPT-2: a linear layer whose weight lies transposed, (in, out)."""
    weight = layer._parameters.get("weight")
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and weight is not None and weight.dim() == 2


def sizes(layer: nn.Module, name: str) -> tuple[int, int]:
    """The input and the output features of a linear layer of either kind.

    Raises:
        MisfitError: The layer computes something else, or its weight is not a plain parameter.
    """
    plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    weight = layer._parameters.get("weight")
    if weight is None or not (plain or is_conv1d(layer)):
        raise MisfitError(
            f"{name} is a plain nn.Linear or a Conv1D with a weight of its own, not {what(layer)}", [name]
        )
    rows, columns = weight.shape
    return (columns, rows) if plain else (rows, columns)


def fused(layers: Mapping[str, nn.Module]) -> tuple[int, tuple[int, ...], dict[str, Source]]:
    """How some linear layers over one input become one.

    Args:
        layers: The layers by the names that they have in the module to be replaced.

    Returns:
        The input features, the output features of each, and where ``weight`` and, if they have it, ``bias`` come from.

    Raises:
        MisfitError: They do not go together; it names what differs.
    """
    shapes = {name: sizes(layer, name) for name, layer in layers.items()}
    _same("in_features", {name: shape[0] for name, shape in shapes.items()})
    biased = {name: layer._parameters.get("bias") is not None for name, layer in layers.items()}
    _same("bias", biased, "; a zero bias put in for the missing would be a new trainable parameter")
    found: dict[str, Source] = {"weight": _joined([weight_of(layer, name) for name, layer in layers.items()])}
    if all(biased.values()):
        found["bias"] = _joined([f"{name}.bias" for name in layers])
    (in_features,) = {shape[0] for shape in shapes.values()}
    return in_features, tuple(shape[1] for shape in shapes.values()), found


def hang_linear(
    module: nn.Module,
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Give a module the ``weight`` and the ``bias`` of an `nn.Linear`, drawn as that draws them."""
    made = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    module.weight = made.weight
    module.register_parameter("bias", made.bias)


def weight_of(layer: nn.Module, name: str) -> Source:
    """Where a linear layer's weight comes from, as (out, in)."""
    return transposed(f"{name}.weight") if is_conv1d(layer) else f"{name}.weight"


def _joined(sources: list[Source]) -> Source:
    return cat(*sources) if len(sources) > 1 else sources[0]


def as_linear(layer: nn.Module, name: str) -> tuple[nn.Module, dict[str, Source]]:
    """A layer to keep: the very same module, or for a ``Conv1D`` an `nn.Linear` on the meta device, to be filled.

    Returns:
        The module, and where each of its tensors comes from, by its name in the layer.
    """
    if not is_conv1d(layer):
        return layer, {key: f"{name}.{key}" for key in layer.state_dict()}
    in_features, (out_features,), sources = fused({name: layer})
    return nn.Linear(in_features, out_features, bias="bias" in sources, device="meta"), sources


def below(prefix: str, sources: Mapping[str, Source]) -> dict[str, Source]:
    """The same map for a module that hangs one level deeper."""
    return {f"{prefix}.{name}": source for name, source in sources.items()}


def parts(module: nn.Module, wanted: Collection[str], kind: str) -> list[nn.Module]:
    """The children of a module by their names, where it has these and no others.

    Raises:
        MisfitError: One is missing, or there is one more, which would be lost.
    """
    there = dict(module.named_children())
    missing, more = [name for name in wanted if name not in there], [name for name in there if name not in wanted]
    if missing or more:
        told = f"lacks {', '.join(fold(missing))}" if missing else f"has {', '.join(fold(more))} besides"
        raise MisfitError(f"{kind} is made of {', '.join(wanted)}; {type(module).__name__} {told}", missing or more)
    return [there[name] for name in wanted]


def number(module: nn.Module, name: str, default: float | None = None) -> float:
    """A module's attribute that is a number.

    Raises:
        MisfitError: It is none, and there is no default.
    """
    value: object = getattr(module, name, default)
    if not isinstance(value, int | float):
        raise MisfitError(f"{what(module)} has no number {name}", [name])
    return value


def fill(new: M, olds: Mapping[str, nn.Module], sources: Mapping[str, Source], *, up: int = 0) -> M:
    """Give a module that was built on the meta device its tensors and its mode.

    Args:
        new: The new module; what it holds of the old ones' modules already is left as it is.
        olds: The modules that the names in the sources begin with; ``""`` for the module itself.
        sources: Where each tensor comes from.
        up: See `WeightMap`.

    Returns:
        The new module, with the map as its ``weight_map``.

    Raises:
        MisfitError: Tensors that become one differ in dtype, device or ``requires_grad``.
    """
    given: dict[str, Tensor] = {}
    for prefix, old in olds.items():
        given.update({f"{prefix}.{key}" if prefix else key: t for key, t in old.state_dict(keep_vars=True).items()})
    for name, source in sources.items():
        path, _, leaf = name.rpartition(".")
        owner = new.get_submodule(path)
        if isinstance(source, str) and getattr(owner, leaf) is given.get(source):
            continue
        owner.register_parameter(leaf, _parameter(source, given))
    kept = {module for old in olds.values() for module in old.modules()}
    for module in new.modules():
        if module not in kept:
            module.training = next(iter(olds.values())).training
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    declare(new, {name: resolved(source, shapes) for name, source in sources.items()}, up)
    return new


def _parameter(source: Source, given: Mapping[str, Tensor]) -> nn.Parameter:
    old = {name: given[name] for name in names(source) if name in given}
    for aspect in ("dtype", "device", "requires_grad"):
        _same(aspect, {name: getattr(tensor, aspect) for name, tensor in old.items()})
    taken = take(source, given)
    if isinstance(taken, nn.Parameter):
        return taken
    return nn.Parameter(taken, requires_grad=all(tensor.requires_grad for tensor in old.values()))


def _same(aspect: str, values: Mapping[str, object], why: str = "") -> None:
    if len(_distinct(values.values())) > 1:
        told = ", ".join(f"{name} has {value}" for name, value in values.items())
        raise MisfitError(f"layers that become one agree in {aspect}: {told}{why}", values)


def _distinct(values: Iterable[object]) -> list[object]:
    return list(dict.fromkeys(values))
