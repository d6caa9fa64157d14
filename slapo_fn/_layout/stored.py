"""Tensors by name, in memory or in safetensors files: what there is, and one at a time."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# safetensors has no types.

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from .._text import what
from ..errors import ArgumentError, WeightsError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class Stored:
    """Tensors by name, to be used ``with``, which closes the files.

    Attributes:
        shapes: The shape of each.
        dtypes: The dtype of each, as far as it is known.
    """

    def __init__(self, source: object) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._source = source
        self._tensors: Mapping[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Stored:
        with ExitStack() as stack:
            self._stack = stack
            if isinstance(self._source, Mapping):
                self._take_mapping(self._source)
            elif isinstance(self._source, (str, os.PathLike)):
                self._open(Path(self._source))
            else:
                raise ArgumentError(
                    f"source is a mapping of names to tensors, or the path of safetensors, not {what(self._source)}"
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name) if name in self._files else self._tensors[name]
        return found

    def _take_mapping(self, given: Mapping[Any, Any]) -> None:
        for name, tensor in given.items():
            if not isinstance(name, str):
                raise ArgumentError(f"source is a mapping of names to tensors, and one of its keys is {what(name)}")
            if isinstance(tensor, Tensor):
                self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
            elif not name.endswith("_extra_state"):
                raise ArgumentError(f"source is a mapping of names to tensors, and {name} is {what(tensor)}")
        self._tensors = given

    def _open(self, path: Path) -> None:
        if path.is_dir():
            found = [path / name for name in (ONE, INDEX) if (path / name).is_file()]
            if not found:
                raise WeightsError(
                    f"{path} has neither {ONE} nor {INDEX}; what is stored otherwise, load by torch.load and give it"
                )
            path = found[0]
        if not path.is_file():
            raise WeightsError(f"there is no {path}")
        if path.suffix == ".json":
            self._open_shards(path)
        elif path.suffix == ".safetensors":
            self._open_file(path)
        else:
            raise WeightsError(
                f"{path} is no .safetensors file; what is stored otherwise, load by torch.load and give it"
            )

    def _open_shards(self, index: Path) -> None:
        try:
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({str(file) for file in where.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is no index of safetensors: {type(error).__name__} {error}") from error
        outside = [file for file in files if _leads_out(file)]
        if outside:
            raise WeightsError(f"{index} leads out of its directory: {', '.join(outside)}")
        if missing := [file for file in files if not (index.parent / file).is_file()]:
            raise WeightsError(f"{index} tells of files that are not there: {', '.join(missing)}")
        for file in files:
            self._open_file(index.parent / file)
        if lost := [name for name in where if name not in self.shapes]:
            raise WeightsError(f"{index} tells of tensors that its files do not hold: {', '.join(lost)}")

    def _open_file(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise WeightsError(f"to read {path} takes the package safetensors: pip install safetensors") from error
        try:
            file: Any = self._stack.enter_context(safe_open(str(path), framework="pt"))
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                told = file.get_slice(name)
                self.shapes[name] = tuple(told.get_shape())
                self._files[name] = file
                if told.get_dtype() in DTYPES:
                    self.dtypes[name] = DTYPES[told.get_dtype()]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error


def _leads_out(file: str) -> bool:
    kinds = (PurePosixPath(file), PureWindowsPath(file))
    return not file or any(kind.is_absolute() or kind.drive or ".." in kind.parts for kind in kinds)
