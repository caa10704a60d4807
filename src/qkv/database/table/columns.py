"""Columns as arrays: for each cell its kind (one byte) and its code (8 bytes).

The code of a number is the nearest float. The code of any other cell is the first bytes of its
digest. Equal cells have equal codes, so most conditions are a few array operations.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from qkv.database.table import cells
from qkv.errors import ArgumentError

MISSING, NUMBER, INEXACT_NUMBER, BOOLEAN, TEXT, OTHER = range(6)
"""The kind of a cell: missing; a number; a number that no float equals; a boolean; text or a date;
bytes, a tuple, a vector, a list or a mapping."""

KIND_NAMES = ("missing", "number", "number", "bool", "text", "other")
NUMERIC_KINDS = (NUMBER, INEXACT_NUMBER, BOOLEAN)

_NUMBER_TYPES = {int, float, type(None)}
_TEXT_TYPES = {str, type(None)}
_MAX_EXACT_FLOAT = 2.0**53


class Column(NamedTuple):
    """Cells of a column: `kinds` (m,) as above, and `codes` (m,) of 8 bytes each."""

    kinds: np.ndarray
    codes: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        return self.codes.view(np.float64)

    def take_rows(self, at: np.ndarray) -> Column:
        return Column(self.kinds[at], self.codes[at])


def normalize_cell(cell: Any) -> Any:
    """Return a cell as conditions compare it: dates as ISO text, NumPy scalars as Python's."""
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    return cell.item() if isinstance(cell, np.generic) else cell


def cell_kind_code(cell: Any) -> int:
    """Return the kind of a cell.

    >>> [KIND_NAMES[cell_kind_code(x)] for x in (None, 3, True, "Li", b"raw")]
    ['missing', 'number', 'bool', 'text', 'other']
    """
    if cells.is_missing(cell):
        return MISSING
    if isinstance(cell, str | datetime.date | datetime.time):
        return TEXT
    if isinstance(cell, bool | np.bool_):
        return BOOLEAN
    if isinstance(cell, int | float | np.number | Decimal):
        return NUMBER if _to_float(cell) == cell else INEXACT_NUMBER
    return OTHER


def encode_column(column: Sequence[Any]) -> Column:
    """Encode the cells of a column.

    >>> column = encode_column([1988, None, "Li"])
    >>> [KIND_NAMES[kind] for kind in column.kinds], column.numbers[:1].tolist()
    (['number', 'missing', 'text'], [1988.0])
    """
    types = set(map(type, column))
    if types <= _NUMBER_TYPES:
        try:
            numbers = np.array(column, dtype=float)
        except OverflowError:
            return _encode_each_cell(column)
        if not (np.abs(numbers) >= _MAX_EXACT_FLOAT).any():
            absent = np.isnan(numbers)
            numbers[absent] = 0
            return Column(np.where(absent, MISSING, NUMBER).astype(np.uint8), numbers.view("u8"))
    if types <= _TEXT_TYPES:
        distinct: Sequence[str] = list(set(column) - {None})
        if 2 * len(distinct) > len(column) and type(None) not in types:
            distinct = column  # faster than looking up duplicates
        hashes = [blake2b(x, digest_size=8).digest() for x in cells.encode_all_utf8(distinct)]
        codes = np.frombuffer(b"".join(hashes), "<u8")
        if distinct is not column:
            known = dict(zip(distinct, codes.tolist(), strict=True))
            codes = np.fromiter(map(known.get, column, repeat(0)), np.uint64, len(column))
        kinds = np.full(len(column), TEXT, np.uint8)
        if type(None) in types:
            kinds[[x is None for x in column]] = MISSING
        return Column(kinds, codes)
    return _encode_each_cell(column)


def _encode_each_cell(column: Sequence[Any]) -> Column:
    kinds = np.fromiter(map(cell_kind_code, column), np.uint8, len(column))
    codes = np.fromiter(map(encode_cell, column, kinds.tolist()), np.uint64, len(column))
    return Column(kinds, codes)


def encode_cell(cell: Any, kind: int) -> int:
    """Return the code of a cell of this kind."""
    if kind == MISSING:
        return 0
    if kind in NUMERIC_KINDS:
        return int(np.float64(_to_float(cell)).view(np.uint64))
    if kind == TEXT:
        text = cells.encode_utf8(normalize_cell(cell))
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    try:
        return int.from_bytes(cells.key_digest(cell)[:8], "little")
    except ArgumentError:  # a list or mapping with NaN equals nothing
        return 0


def _to_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def build_column_tensors(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return columns as tensors of a segment; for vectors (m, d) only the kinds."""
    tensors: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            absent = np.isnan(column).any(axis=1)
            tensors[f"kinds/{name}"] = np.where(absent, MISSING, OTHER).astype(np.uint8)
        else:
            tensors[f"kinds/{name}"], tensors[f"cells/{name}"] = encode_column(column)
    return tensors


def read_column(tensors: Mapping[str, np.ndarray], name: str) -> Column:
    """Return a column from the tensors of a segment."""
    kinds = tensors[f"kinds/{name}"]
    return Column(kinds, tensors.get(f"cells/{name}", np.zeros(len(kinds), np.uint64)))


def is_column_tensor(tensor: str) -> bool:
    """Return whether a tensor of this name belongs to a column."""
    return tensor.startswith(("kinds/", "cells/"))


def describe_kinds(counts: np.ndarray) -> str:
    """Return the kinds of a column as text, given the number of cells of each kind.

    >>> describe_kinds(np.bincount([MISSING, NUMBER, TEXT], minlength=6))
    'number, text'
    """
    return ", ".join(dict.fromkeys(KIND_NAMES[i] for i in np.flatnonzero(counts) if i)) or "empty"
