"""Every spelling of every operation of the table is matched against every other, by tracing little modules (case 25)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from slapo_fn._match.equal import table
from slapo_fn._match.matcher import find_matches, read_pattern
from slapo_fn._match.spell import MISSING, _resolve, lookup

LONG = "embedding", "and", "or", "xor", "invert"
SHAPES = {1: (2, 4, 6), 2: (2, 4, 6, 6), 3: (2, 4, 6, 6, 6)}
KINDS = ("conv", "pool", "instance_norm", "batch_norm")
TENSORS = ("weight", "bias", "running_mean", "running_var")
MADE = {  # arguments of modules
    nn.Softmax: (1,), nn.LogSoftmax: (1,), nn.Linear: (4, 4), nn.Embedding: (4, 4), nn.LayerNorm: (4,), nn.RMSNorm: (4,),
    nn.GroupNorm: (2, 4), nn.Flatten: (0, -1), nn.MaxPool1d: (3,), nn.MaxPool2d: (3,), nn.MaxPool3d: (3,),
    nn.AvgPool1d: (3,), nn.AvgPool2d: (3,), nn.AvgPool3d: (3,), nn.AdaptiveAvgPool1d: (2,), nn.AdaptiveAvgPool2d: (2,),
    nn.AdaptiveAvgPool3d: (2,), nn.AdaptiveMaxPool1d: (2,), nn.AdaptiveMaxPool2d: (2,), nn.Conv1d: (4, 4, 1),
    nn.Conv2d: (4, 4, 1), nn.Conv3d: (4, 4, 1), nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (4,),
    nn.InstanceNorm1d: (4,), nn.InstanceNorm2d: (4,), nn.InstanceNorm3d: (4,),
}  # fmt: skip
GIVEN: dict[str, Any] = {  # what is given where there is no default
    "dim": 1, "dim0": 0, "dim1": 1, "normalized_shape": (4,), "num_groups": 2, "kernel_size": 3, "output_size": 2,
    "shape": (4, -1), "dims": (1, 0), "size": (4, 4), "repeats": (2, 2), "chunks": 2, "split_size": 2, "index": 0,
    "train": False, "training": False, "p": 0.5, "dtype": torch.float32, "approximate": "none", "momentum": 0.1, "eps": 1e-5,
    "use_input_stats": True, "half_to_float": False, "cudnn_enabled": False, "rounding_mode": "floor", "min": 0.5, "max": 1.0,
}  # fmt: skip
ARGUMENTS = {  # beyond those: operations whose spellings have different defaults, or are of no use with them
    "clamp": {"min": 0.5}, "dropout": {"training": False}, "gelu": {}, "batch_norm": {"training": False},
    "softmax": {"dim": 1}, "log_softmax": {"dim": 1},
}  # fmt: skip
ALONE = {  # spellings that say one argument more than others, each with the group of its kind
    ".float": "float", ".to": "float", ".type": "float", "aten.to.dtype": "float", ".half": "half", ".double": "double",
    ".bfloat16": "bfloat16", "F.relu6": "six", "nn.ReLU6": "six", "aten.relu6": "six", "aten.squeeze.dim": "dim",
    "aten.squeeze.dims": "dim", "aten.mean.dim": "dim", "aten.sum.dim_IntList": "dim", "aten.sym_size.int": "dim",
    "aten.conv1d.padding": "padding", "aten.conv2d.padding": "padding", "aten.conv3d.padding": "padding",
    "aten.div.Tensor_mode": "mode",
    "F.max_pool1d_with_indices": "indices", "F.max_pool2d_with_indices": "indices", "F.max_pool3d_with_indices": "indices",
    "aten._assert_tensor_metadata": "asserts", "nn.Dropout": "flag", "nn.BatchNorm1d": "flag", "nn.BatchNorm2d": "flag",
    "nn.BatchNorm3d": "flag",  # in training or not as the module is
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "dim": {"dim": 1}, "float": {"dtype": torch.float32}, "padding": {"padding": "valid"}, "mode": {"rounding_mode": "floor"},
    "indices": {"return_indices": True},
}  # fmt: skip
WITHOUT = re.compile(r"operator|true_divide|torch.max_pool|aten.max_pool|aten.conv")  # do not take what others take
ALIKE = {
    "dim": "squeeze mean sum size",
    "indices": "max_pool",
    "mode": "div",
    "padding": "conv",
}  # whose others join in


def spelling(text: str) -> Any:
    bare, known = text.partition("(")[0], lookup()
    if bare[0] in ".@":
        return (known.methods if bare[0] == "." else known.attributes)[bare[1:]]
    return {**known.functions, **known.modules}[_resolve(bare)]


class Spelled(nn.Module):
    """One operation, in one spelling, of tensors that the module holds or is given."""

    def __init__(self, text: str, extra: dict[str, Any]) -> None:
        super().__init__()
        self.text, self.spelling = text.partition("(")[0], spelling(text)
        self.op = self.spelling.op
        target = None if text[0] in ".@" else _resolve(self.text)
        self.inner = target(*MADE.get(target, ())).eval() if isinstance(target, type) else None
        self.target, self.by_name = target, False
        self.extra = {**ARGUMENTS.get(self.op.name, {}), **extra}
        shapes = {"embedding": (4, 4), "linear": (4, 4), **{f"conv{n}d": (4, 4) + (1,) * n for n in (1, 2, 3)}}
        if (
            any(name in self.op.name for name in ("norm", "conv", "linear", "embedding"))
            and self.op.name != "instance_norm"
        ):
            for name in TENSORS if self.inner is None else ():
                if name in self.op.parameters:
                    shape = shapes.get(self.op.name, (4,)) if name == "weight" else (4,)
                    if name.startswith("running"):
                        self.register_buffer(name, torch.ones(shape))
                    else:
                        self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Any, y: Any) -> Any:
        if self.inner is not None:
            return self.inner(x, y) if "loss" in self.op.name or self.op.name == "cross_entropy" else self.inner(x)
        schema = getattr(self.target, "_schema", None)
        args, kwargs = [], {}
        tensors = iter((x, *y, *y) if isinstance(y, tuple) else (x, y, y, y))
        chosen = self.choose(tensors)
        for at, (name, place, spare) in enumerate(
            zip(self.spelling.names, self.spelling.places, self.spelling.spare, strict=True)
        ):
            wanted = self.op.parameters[place] if place >= 0 else name
            if wanted not in chosen and not (place < 0 and spare is MISSING and name in GIVEN):
                continue
            value = chosen.get(wanted, GIVEN.get(name))
            if (
                len(args) == at
                and name != "rounding_mode"
                and not (schema and schema.arguments[at].kwarg_only)
                and not (self.by_name and at)
            ):
                args.append(value)
            else:
                kwargs[schema.arguments[at].name if schema else name] = value
        if self.text[0] == "@":
            return getattr(args[0], self.text[1:])
        if self.text[0] == ".":
            args = [*args[:-1], *args[-1]] if self.spelling.rest and isinstance(args[-1], tuple) else args
            return getattr(args[0], self.text[1:])(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def choose(self, tensors: Any) -> dict[str, Any]:
        """A value for each of the operation's parameters that this spelling has to be given."""
        chosen: dict[str, Any] = {}
        for place, (name, default) in enumerate(zip(self.op.parameters, self.op.defaults, strict=True)):
            needed = self.spelling.start[place] is MISSING
            if name in self._parameters:
                chosen[name] = self._parameters[name]
            elif name in self._buffers:
                chosen[name] = self._buffers[name]
            elif name in self.extra:
                chosen |= {} if self.spelling.start[place] == self.extra[name] else {name: self.extra[name]}
            elif name == "tensors":
                chosen[name] = [next(tensors), next(tensors)]
            elif self.op.name == "instance_norm" and name in TENSORS and needed:
                chosen[name] = None
            elif default is MISSING and name not in GIVEN:
                chosen[name] = next(tensors)
            elif needed:
                chosen[name] = GIVEN[name] if default is MISSING or name in ("dtype", "dim") else default
        return chosen


def groups() -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Spellings that can say the same thing, with what they say beyond what they must."""
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, _, texts in table():
        for text in texts:
            kind = ALONE.get(text.partition("(")[0], "")
            found.setdefault(f"{name} {kind}".strip(), ([], EXTRA.get(kind, {})))[0].append(text)
        for kind, whose in ALIKE.items():
            if f"{name} {kind}" in found and any(name.startswith(one) for one in whose.split()):
                found[f"{name} {kind}"][0].extend(
                    text
                    for text in found[name][0]
                    if set(EXTRA[kind]) <= {*spelling(text).names} and not WITHOUT.search(text)
                )
    return found


GROUPS = groups()


@cache
def traced(name: str) -> tuple[list[Spelled], list[fx.Graph]]:
    models = [Spelled(text, GROUPS[name][1]) for text in GROUPS[name][0]]
    return models, [fx.Tracer().trace(model) for model in models]


def pattern_of(model: Spelled, graph: fx.Graph) -> Callable[..., Any]:
    used = [node.target for node in graph.nodes if node.op == "placeholder" and node.users]
    return (lambda x: model.forward(x, x)) if used == ["x"] else (lambda x, y: model.forward(x, y))


@pytest.mark.parametrize("name", GROUPS)
def test_case_25_every_spelling_matches_every_other(name: str) -> None:
    models, graphs = traced(name)
    for model, own in zip(models, graphs, strict=True):
        pattern = read_pattern(pattern_of(model, own))
        assert len(pattern.steps) == 1
        for other, graph in zip(models, graphs, strict=True):
            found = find_matches(pattern, graph, other).found
            assert [len(match.nodes) for match in found] == [1], f"{model.text} in {other.text}: {graph}"
        if (
            model.inner is None
            and model.text[0] != "@"
            and not model.spelling.rest
            and "tensors" not in model.op.parameters
        ):
            model.by_name = True
            try:
                graph = fx.Tracer().trace(model)
            except TypeError:
                continue  # an operator's arguments have no names
            finally:
                model.by_name = False
            assert len(find_matches(pattern, graph, model).found) == 1, f"{model.text} by name: {graph}"


@pytest.mark.parametrize("name", GROUPS)
def test_case_25_all_spellings_compute_the_same(name: str) -> None:
    texts, extra = GROUPS[name]
    op = name.split()[0]
    dims = int(op[-2]) if op[-2:] in ("1d", "2d", "3d") else 1 if op in ("batch_norm", "instance_norm") else 0
    x_ = torch.rand(SHAPES[dims]) if dims else torch.rand(4, 4) + 0.25
    y_ = torch.rand(4, 4) + 0.25
    if op in LONG or "bitwise" in texts[0]:
        x_, y_ = torch.arange(4), torch.arange(4) + 1
    if op in ("where", "masked_fill"):
        x_, y_ = (x_ > 0.5, y_) if op == "where" else (x_, y_ > 0.5)
    if name == "masked_fill":
        y_ = (y_, torch.tensor(0.5))
    if op == "bmm":
        x_, y_ = x_[None], y_[None]
    if op == "attention":
        x_, y_ = x_[None, None], y_[None, None]
    models = [Spelled(text, extra) for text in texts]
    made = []
    for model in models:
        if model.inner is not None:
            for held in model.inner.parameters():
                nn.init.ones_(held)
            for held, value in model.inner.named_buffers():
                if held in ("running_mean", "running_var"):
                    nn.init.ones_(value)
        if op in ("batch_norm", "instance_norm"):
            shape = SHAPES[int(model.text[-2])] if model.text[-2:] in ("2d", "3d") else x_.shape
            if shape != x_.shape:
                continue
        try:
            made.append((model.text, model(x_.clone(), y_)))
        except RuntimeError as error:
            if "Expected a value of type" not in str(error):
                raise  # an overload for numbers, or one that takes lists only
    for text, result in made[1:]:
        assert equal(made[0][1], result), f"{made[0][0]}: {made[0][1]}, {text}: {result}"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and not isinstance(one, torch.Size):
        return all(map(equal, one, other))
    return torch.allclose(one, other, equal_nan=True) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("name", GROUPS)
def test_case_25_different_operations_never_match(name: str) -> None:
    models, graphs = traced(name)
    pattern = read_pattern(pattern_of(models[0], graphs[0]))
    for other in GROUPS:
        if other.split()[0] != name.split()[0]:
            strangers, theirs = traced(other)
            assert find_matches(pattern, theirs[0], strangers[0]).found == [], other


def test_the_table_resolves() -> None:
    missing = [
        text
        for _, _, texts in table()
        for text in texts
        if text[0] not in ".@" and _resolve(text.partition("(")[0]) is None
    ]
    assert missing == []
    assert lookup().functions[operator.iadd].writes
    assert len(lookup().ops) > 100
