"""Layouts: which tensors a row has, of which types and shapes, and how rows are packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks.lazy import LazyArray
from qkv.frameworks.ragged import Ragged

IDS_TENSOR = "ids"
DTYPE_BY_CODE = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind, sizes in (("F", (8, 4, 2)), ("I", (8, 4, 2, 1)), ("U", (8, 4, 2, 1)))
    for size in sizes
} | {"BOOL": np.dtype("?")}
"""The types of tensors, by the names that safetensors has for them."""
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}


RAGGED_DIMS = (-1,)
"""The dimensions of a row in a tensor whose rows are of different lengths."""

Tensor = np.ndarray | Ragged
Tensors = Mapping[str, Any]
"""Arrays with one entry for each row; one of them may be ragged, others made as they are read."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a row: their names, types and shapes, the widest type first.

    One of them may be `ragged_name`, with as many numbers as each row needs.

    >>> layout = Layout.from_tensors({"key": np.zeros((5, 2), np.float32)})
    >>> layout.row_bytes, Layout.from_text(layout.to_text()) == layout
    (8, True)
    """

    fields: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...] = ()

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Layout:
        fields: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for name, tensor in tensors.items():
            check_tensor_name(name)
            if isinstance(tensor, Ragged):
                fields.append((name, storage_dtype(name, tensor.flat), RAGGED_DIMS))
            else:
                tensor = np.asarray(tensor[:1] if isinstance(tensor, LazyArray) else tensor)
                fields.append((name, storage_dtype(name, tensor), tuple(tensor.shape[1:])))
        if sum(dims == RAGGED_DIMS for _, _, dims in fields) > 1:
            raise ArgumentError("tensors: only one of them may be ragged")
        return cls(tuple(sorted(fields, key=lambda field: (-field[1].itemsize, field[0]))))

    @classmethod
    def from_text(cls, text: str) -> Layout:
        return cls(
            tuple((name, DTYPE_BY_CODE[code], tuple(dims)) for name, code, dims in json.loads(text))
        )

    def to_text(self) -> str:
        return json.dumps([[name, CODE_BY_DTYPE[dtype], dims] for name, dtype, dims in self.fields])

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.fields)

    @cached_property
    def ragged_name(self) -> str | None:
        """The name of the tensor whose rows are of different lengths."""
        return next((name for name, _, dims in self.fields if dims == RAGGED_DIMS), None)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, but for what is ragged."""
        return sum(
            dtype.itemsize * prod(dims) for _, dtype, dims in self.fields if dims != RAGGED_DIMS
        )

    def is_row_size(self, packed: bytes) -> bool:
        """Whether so many bytes can be a row."""
        more, name = len(packed) - self.row_bytes, self.ragged_name
        step = next((dtype.itemsize for own, dtype, _ in self.fields if own == name), 0)
        return more >= 0 and more % step == 0 if step else not more

    def check_tensors(self, tensors: Tensors, rows: int) -> dict[str, Any]:
        """The tensors as arrays of these types, or an error that says which one does not fit."""
        if set(tensors) != set(self.tensor_names):
            raise ArgumentError(
                f"tensors must be {_format_names(self.tensor_names)}, as in the rows before, not "
                f"{_format_names(tensors)}"
            )
        fitted: dict[str, Any] = {}
        for name, dtype, dims in self.fields:
            tensor = tensors[name]
            if isinstance(tensor, Ragged) and dims == RAGGED_DIMS and len(tensor) == rows:
                own = tensor.trim_flat()
                tensor = Ragged(own.flat.astype(dtype, copy=False), own.starts)
                fitted[name] = tensor
                continue
            shape = (len(tensor), *RAGGED_DIMS) if isinstance(tensor, Ragged) else np.shape(tensor)
            if shape != (rows, *dims):
                raise ShapeError(
                    f"tensors[{name!r}] must have the shape {(rows, *dims)}, not {shape}"
                )
            if not isinstance(tensor, LazyArray):
                tensor = np.asarray(tensor)
            if tensor.dtype.newbyteorder("<") != dtype:
                raise DtypeError(
                    f"tensors[{name!r}] must be {dtype.name}, as in the rows before, not "
                    f"{tensor.dtype}"
                )
            fitted[name] = tensor if tensor.dtype == dtype else np.asarray(tensor, dtype)
        return fitted

    def pack_rows(self, tensors: Tensors, rows: int) -> list[bytes]:
        """Each row's tensors as bytes, one after the other."""
        if not self.fields:
            return [b""] * rows
        name, width = self.ragged_name, self.row_bytes
        flat = [_as_row_bytes(tensors[own], rows) for own in self.tensor_names if own != name]
        text = np.concatenate(flat, axis=1).tobytes() if flat else b""
        packed = [text[i * width : (i + 1) * width] for i in range(rows)]
        if name is None:
            return packed
        more = tensors[name].split_rows()
        return [one + row.tobytes() for one, row in zip(packed, more, strict=True)]

    def unpack_rows(self, rows: Sequence[bytes]) -> dict[str, Tensor]:
        """The inverse of `pack_rows`."""
        width = self.row_bytes
        fixed = rows if self.ragged_name is None else [row[:width] for row in rows]
        packed = np.frombuffer(b"".join(fixed), np.uint8).reshape(len(rows), width)
        tensors: dict[str, Tensor] = {}
        begin = 0
        for name, dtype, dims in self.fields:
            if dims == RAGGED_DIMS:
                flat = np.frombuffer(b"".join(row[width:] for row in rows), dtype)
                sizes = [0, *((len(row) - width) // dtype.itemsize for row in rows)]
                tensors[name] = Ragged(flat, np.cumsum(sizes))
                continue
            end = begin + dtype.itemsize * int(np.prod(dims))
            column = np.ascontiguousarray(packed[:, begin:end]).reshape(-1).view(dtype)
            column.flags.writeable = False
            tensors[name] = column.reshape(len(rows), *dims)
            begin = end
        return tensors


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def check_tensor_name(name: str) -> None:
    """Refuse a name that a file keeps for itself."""
    if not isinstance(name, str) or name in (IDS_TENSOR, "__metadata__", ""):
        raise ArgumentError(f"a tensor cannot be named {name!r}: take another name")


def storage_dtype(name: str, tensor: Any, least: int = 1) -> np.dtype[Any]:
    """The type that a tensor is stored as, or an error."""
    if not isinstance(tensor, np.ndarray) or tensor.ndim < least:
        raise ShapeError(f"tensors[{name!r}] must be a NumPy array with one entry for each row")
    dtype: np.dtype[Any] = tensor.dtype.newbyteorder("<")
    if dtype not in CODE_BY_DTYPE:
        raise DtypeError(
            f"tensors[{name!r}] is {tensor.dtype}, which cannot be stored: use one of "
            f"{', '.join(sorted(known.name for known in CODE_BY_DTYPE))}"
        )
    return dtype


def _as_row_bytes(array: np.ndarray, rows: int) -> np.ndarray:
    """An array (m, …) as bytes (m, width)."""
    array = np.asarray(array)
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if not array.size:
        return np.zeros((rows, width), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(rows, width)
