"""Columns as arrays: for each cell its kind (one byte) and its code (8 bytes).

The code of a number is the nearest float. The code of any other cell is the first bytes of its
digest. Equal cells have equal codes, so most conditions need only a few array operations.
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
"""The kinds of cells:

- `MISSING`: a missing cell
- `NUMBER`: a number; `INEXACT_NUMBER`: a number that no float equals; `BOOLEAN`: a boolean
- `TEXT`: text or a date
- `OTHER`: bytes, a tuple, a vector, a list or a mapping
"""

KIND_NAMES = ("missing", "number", "number", "bool", "text", "other")
NUMERIC_KINDS = (NUMBER, INEXACT_NUMBER, BOOLEAN)

_NUMBER_TYPES = {int, float, type(None)}
_TEXT_TYPES = {str, type(None)}
_MAX_EXACT_FLOAT = 2.0**53


class Column(NamedTuple):
    """The cells of a column: their `kinds` (m,) uint8, and their `codes` (m,) of 8 bytes each."""

    kinds: np.ndarray
    codes: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """The codes as floats, which are the numbers in rows with a number."""
        return self.codes.view(np.float64)

    def take_rows(self, rows: np.ndarray) -> Column:
        """Return the cells of some rows, given by positions or a mask."""
        return Column(self.kinds[rows], self.codes[rows])


def normalize_cell(cell: Any) -> Any:
    """Return a cell as conditions compare it.

    A date becomes ISO text, a NumPy scalar a Python one.
    """
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    return cell.item() if isinstance(cell, np.generic) else cell


def cell_kind_code(cell: Any) -> int:
    """Return the kind of a cell as one of the numbers above.

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
    """Return the kinds and codes of the cells in a column.

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
            distinct = column  # hashing duplicates again is faster than looking them up
        hashes = [blake2b(x, digest_size=8).digest() for x in cells.encode_all_utf8(distinct)]
        codes = np.frombuffer(b"".join(hashes), "<u8")
        if distinct is not column:
            code_by_text = dict(zip(distinct, codes.tolist(), strict=True))
            codes = np.fromiter(map(code_by_text.get, column, repeat(0)), np.uint64, len(column))
        kinds = np.full(len(column), TEXT, np.uint8)
        if type(None) in types:
            kinds[[x is None for x in column]] = MISSING
        return Column(kinds, codes)
    return _encode_each_cell(column)


def _encode_each_cell(column: Sequence[Any]) -> Column:
    """Return the kinds and codes of cells of any types."""
    kinds = np.fromiter(map(cell_kind_code, column), np.uint8, len(column))
    codes = np.fromiter(map(encode_cell, column, kinds.tolist()), np.uint64, len(column))
    return Column(kinds, codes)


def encode_cell(cell: Any, kind: int) -> int:
    """Return the code of a cell, given its kind."""
    if kind == MISSING:
        return 0
    if kind in NUMERIC_KINDS:
        return int(np.float64(_to_float(cell)).view(np.uint64))
    if kind == TEXT:
        text = cells.encode_utf8(normalize_cell(cell))
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    try:
        return int.from_bytes(cells.key_digest(cell)[:8], "little")
    except ArgumentError:  # the cell contains NaN, and so equals no cell
        return 0


def _to_float(number: Any) -> float:
    """Return a number as a float; ±infinity if it is too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def build_column_tensors(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return columns as tensors of a segment. For a column of vectors (m, d), only the kinds."""
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
    """Return whether the tensor with this name belongs to a column."""
    return tensor.startswith(("kinds/", "cells/"))


def describe_kinds(counts: np.ndarray) -> str:
    """Return the kinds of cells in a column as text, given their counts (6,).

    >>> describe_kinds(np.bincount([MISSING, NUMBER, TEXT], minlength=6))
    'number, text'
    """
    return ", ".join(dict.fromkeys(KIND_NAMES[i] for i in np.flatnonzero(counts) if i)) or "empty"
