"""Layouts: which tensors a row has, of which types and shapes, and how rows are packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError

IDS = "ids"
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
DTYPES = {code: np.dtype(text) for code, text in _TYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}


Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """The tensors of a row: their names, types and shapes, the widest type first.

    >>> layout = Layout.of({"key": np.zeros((5, 2), np.float32)})
    >>> layout.row_bytes, Layout.parse(layout.text()) == layout
    (8, True)
    """

    fields: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, tensors: Tensors) -> Layout:
        fields = []
        for name, tensor in tensors.items():
            named(name)
            fields.append((name, storable(name, tensor), tuple(tensor.shape[1:])))
        return cls(tuple(sorted(fields, key=lambda field: (-field[1].itemsize, field[0]))))

    @classmethod
    def parse(cls, text: str) -> Layout:
        return cls(
            tuple((name, DTYPES[code], tuple(dims)) for name, code, dims in json.loads(text))
        )

    def text(self) -> str:
        return json.dumps([[name, CODES[dtype], dims] for name, dtype, dims in self.fields])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.fields)

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(dims)) for _, dtype, dims in self.fields)

    def fit(self, tensors: Tensors, rows: int) -> dict[str, np.ndarray]:
        """The tensors as arrays of these types, or an error that says which one does not fit."""
        if set(tensors) != set(self.names):
            raise ArgumentError(
                f"tensors must be {_list(self.names)}, as in the rows before, not {_list(tensors)}"
            )
        fitted = {}
        for name, dtype, dims in self.fields:
            tensor = np.asarray(tensors[name])
            if tensor.shape != (rows, *dims):
                raise ShapeError(
                    f"tensors[{name!r}] must have the shape {(rows, *dims)}, not {tensor.shape}"
                )
            if tensor.dtype.newbyteorder("<") != dtype:
                raise DtypeError(
                    f"tensors[{name!r}] must be {dtype.name}, as in the rows before, not "
                    f"{tensor.dtype}"
                )
            fitted[name] = tensor.astype(dtype, copy=False)
        return fitted

    def pack(self, tensors: Tensors, rows: int) -> list[bytes]:
        """Each row's tensors as bytes, one after the other."""
        if not self.fields:
            return [b""] * rows
        flat = [_bytes(tensors[name], rows) for name in self.names]
        packed = np.concatenate(flat, axis=1)
        width = packed.shape[1]
        text = packed.tobytes()
        return [text[i * width : (i + 1) * width] for i in range(rows)]

    def unpack(self, rows: Sequence[bytes]) -> dict[str, np.ndarray]:
        """The inverse of `pack`."""
        packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self.row_bytes)
        tensors, begin = {}, 0
        for name, dtype, dims in self.fields:
            end = begin + dtype.itemsize * int(np.prod(dims))
            column = np.ascontiguousarray(packed[:, begin:end]).reshape(-1).view(dtype)
            column.flags.writeable = False
            tensors[name] = column.reshape(len(rows), *dims)
            begin = end
        return tensors


def _list(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def named(name: str) -> None:
    """Refuse a name that a file keeps for itself."""
    if not isinstance(name, str) or name in (IDS, "__metadata__", ""):
        raise ArgumentError(f"a tensor cannot be named {name!r}: take another name")


def storable(name: str, tensor: Any, least: int = 1) -> np.dtype[Any]:
    """The type that a tensor is stored as, or an error."""
    if not isinstance(tensor, np.ndarray) or tensor.ndim < least:
        raise ShapeError(f"tensors[{name!r}] must be a NumPy array with one entry for each row")
    dtype: np.dtype[Any] = tensor.dtype.newbyteorder("<")
    if dtype not in CODES:
        raise DtypeError(
            f"tensors[{name!r}] is {tensor.dtype}, which cannot be stored: use one of "
            f"{', '.join(sorted(known.name for known in CODES))}"
        )
    return dtype


def _bytes(array: np.ndarray, rows: int) -> np.ndarray:
    """An array (m, …) as bytes (m, width)."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if not array.size:
        return np.zeros((rows, width), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(rows, width)
