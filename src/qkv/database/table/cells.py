"""Cells: their kinds, their JSON form in the store, and the digests of keys.

A cell is text, a number, bytes, a vector, a date, a tuple of cells, None, or JSON: lists and
mappings of these. A cell that JSON lacks is stored as a mapping with one name that begins with "$",
such as {"$tuple": [1, 2]}.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b, sha256
from typing import Any

import numpy as np

from qkv.database.errors import StoreDamagedError
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import is_array, to_numpy
from qkv.util.formatting import MAX_NUMBER, quote_cell

DIGEST_BYTES = 16
_NAN_KEY_MESSAGE = "a key must not contain NaN, which equals no key"

MAX_DECIMAL_EXPONENT = sys.float_info.max_10_exp
_TOO_DEEP_MESSAGE = "tuples, lists or mappings are nested too deeply to be stored: flatten them"

# datetime comes first, because it is a subclass of date.
_DATE_TYPE_BY_TAG = {"$datetime": datetime.datetime, "$date": datetime.date, "$time": datetime.time}

MISSING_TYPE_NAMES = {"NAType", "NaTType", "MaskedConstant"}
"""The names of the types of missing cells in pandas and NumPy. pandas itself is not imported."""


def cell_kind(cell: Any) -> str:
    """Return the kind of a cell.

    >>> [cell_kind(x) for x in ("Li", 3.5, b"raw", (1, "a"), {"a": [1]}, [0.5, 1.0])]
    ['text', 'number', 'bytes', 'tuple', 'json', 'json']
    """
    if isinstance(cell, str):
        return "text"
    if isinstance(cell, int | float | np.number | Decimal) and not isinstance(cell, bool):
        return "number"
    if isinstance(cell, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(cell, tuple):
        return "tuple"
    if isinstance(cell, datetime.date | datetime.time | np.datetime64):
        return "date"
    if cell is None or isinstance(cell, bool | np.bool_ | list | Mapping):
        return "json"
    if is_array(cell):
        return "number" if len(cell.shape) == 0 else "vector"
    raise DtypeError(
        f"a {type(cell).__name__} cannot be stored: use text, a number, bytes, a vector, a date, a "
        "tuple, or JSON"
    )


def is_missing(cell: Any) -> bool:
    """Return whether a cell is missing: None, NaN of any type, NaT, NA or masked.

    >>> [is_missing(x) for x in (None, float("nan"), 0, "", "NA")]
    [True, True, False, False, False]
    """
    if cell is None:
        return True
    if isinstance(cell, float | np.floating):
        return math.isnan(cell)
    if isinstance(cell, np.datetime64):
        return bool(np.isnat(cell))
    if isinstance(cell, Decimal):
        return cell.is_nan()
    return type(cell).__name__ in MISSING_TYPE_NAMES


def to_python_datetime(cell: np.datetime64) -> Any:
    """Convert a NumPy time to a Python datetime, which has microseconds."""
    return cell.astype("M8[us]").item()


def common_kind(cells: Iterable[Any]) -> str:
    """Return the kind that all cells have, except missing ones; "any" if they differ.

    >>> common_kind(["a", None, "b"]), common_kind([1, 2.5]), common_kind([1, "a"])
    ('text', 'number', 'any')
    """
    cells = list(cells)
    types = set(map(type, cells))
    if types in ({str}, {int}):
        return "text" if types == {str} else "number"
    kinds = {cell_kind(cell) for cell in cells if not is_missing(cell)}
    return kinds.pop() if len(kinds) == 1 else "any"


def dump_row(cells: Mapping[str, Any]) -> str:
    """Return a row as JSON text. `load_row` is the inverse.

    >>> text = dump_row({"key": ("Li", b"x"), "value": float("inf")})
    >>> text
    '{"key": {"$tuple": ["Li", {"$bytes": "eA=="}]}, "value": {"$float": "inf"}}'
    >>> load_row(text)
    {'key': ('Li', b'x'), 'value': inf}
    """
    try:
        return json.dumps({n: to_json_value(x) for n, x in cells.items()}, ensure_ascii=False)
    except RecursionError:
        raise ArgumentError(_TOO_DEEP_MESSAGE) from None


def dump_rows(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return rows as the same text as `dump_row`, but faster, column by column.

    >>> dump_rows({"key": ["Li", "Mu"], "value": [1.5, None]})
    ['{"key": "Li", "value": 1.5}', '{"key": "Mu", "value": null}']
    """
    names = [_quote_text(encode_utf8(name).decode()).replace("%", "%%") for name in columns]
    form = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    return [form % row for row in zip(*map(_dump_column, columns.values()), strict=True)]


def _dump_column(column: Sequence[Any]) -> Iterable[str]:
    """Return the cells of a column as JSON text. A column of one plain type is faster."""
    kinds = set(map(type, column))
    if kinds == {str}:
        if not "".join(column).isascii():
            encode_all_utf8(column)
        return map(_quote_text, column)
    if kinds == {float} and all(map(math.isfinite, column)):
        return map(float.__repr__, column)
    if kinds == {int} and min(column) >= -MAX_NUMBER and max(column) <= MAX_NUMBER:
        return map(int.__repr__, column)
    try:
        return [json.dumps(to_json_value(cell), ensure_ascii=False) for cell in column]
    except RecursionError:
        raise ArgumentError(_TOO_DEEP_MESSAGE) from None


_quote_text = json.encoder.encode_basestring
_scan_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def load_row(text: str) -> dict[str, Any]:
    """Return the cells of a row from the text of `dump_row`."""
    try:
        cells, _ = _scan_json(text, 0)  # this is faster than `json.loads`, which checks more
        if "$" in text:
            cells = {name: from_json_value(cell) for name, cell in cells.items()}
    except (StopIteration, *CELL_ERRORS):
        cells = None
    if type(cells) is not dict:
        raise StoreDamagedError(
            f"a record is damaged: {quote_cell(text)}. Run qkv check to find its file"
        )
    return cells


def to_json_value(cell: Any) -> Any:
    """Return a cell as a JSON value. `from_json_value` is the inverse."""
    if cell is None or isinstance(cell, str | bool | int):
        if isinstance(cell, str):
            encode_utf8(cell)
        elif cell is not None and not -MAX_NUMBER <= cell <= MAX_NUMBER:
            raise _too_large_error(cell)
        return cell
    if isinstance(cell, float):
        return float(cell) if math.isfinite(cell) else {"$float": str(cell)}
    if isinstance(cell, np.bool_ | np.number):
        number = cell.item()
        if isinstance(number, np.number):  # the cell is a long double
            raise DtypeError(
                f"{cell!r} has more digits than a number that can be stored: cast it to float"
            )
        return to_json_value(number)
    if isinstance(cell, Decimal):
        if cell.is_finite() and cell.adjusted() > MAX_DECIMAL_EXPONENT:
            raise _too_large_error(cell)
        return {"$decimal": str(cell)}
    if is_missing(cell):
        return None
    if isinstance(cell, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(cell).decode()}
    if isinstance(cell, tuple):
        return {"$tuple": [to_json_value(x) for x in cell]}
    if isinstance(cell, list):
        return [to_json_value(x) for x in cell]
    if isinstance(cell, Mapping):
        for name in cell:
            if not isinstance(name, str):
                raise DtypeError(f"the names of a stored mapping must be text, not {name!r}")
            encode_utf8(name)
        inner = {name: to_json_value(x) for name, x in cell.items()}
        return {"$dict": inner} if any(name.startswith("$") for name in inner) else inner
    if isinstance(cell, np.datetime64):
        cell = to_python_datetime(cell)
    for tag, kind_ in _DATE_TYPE_BY_TAG.items():
        if isinstance(cell, kind_):
            return {tag: cell.isoformat()}  # type: ignore[attr-defined]
    if is_array(cell):
        array = to_numpy(cell)
        if not array.ndim:
            return to_json_value(array[()])
        array = np.ascontiguousarray(array)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        text = base64.b64encode(array.tobytes()).decode()
        return {"$array": [array.dtype.str, list(array.shape), text]}
    cell_kind(cell)  # this raises an error that names the type
    raise AssertionError(cell)


CELL_ERRORS = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors that `from_json_value` raises for values that do not come from `to_json_value`."""


def from_json_value(plain: Any) -> Any:
    """Return the cell that `to_json_value` has converted to this value."""
    if isinstance(plain, list):
        return [from_json_value(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, inner),) = plain.items()
        if tag in _DECODER_BY_TAG:
            return _DECODER_BY_TAG[tag](inner)
    return {name: from_json_value(x) for name, x in plain.items()}


def _decode_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_array(parts: Sequence[Any]) -> np.ndarray:
    dtype, shape, text = parts
    return np.frombuffer(_decode_bytes(text), np.dtype(dtype)).reshape(shape)


_DECODER_BY_TAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$decimal": Decimal,
    "$bytes": _decode_bytes,
    "$tuple": lambda inner: tuple(from_json_value(x) for x in inner),
    "$dict": lambda inner: {name: from_json_value(x) for name, x in inner.items()},
    "$array": _decode_array,
    **{tag: kind_.fromisoformat for tag, kind_ in _DATE_TYPE_BY_TAG.items()},  # type: ignore[attr-defined]
}


def key_digest(key: Any) -> bytes:
    """Return the digest of a key. Keys that are equal in Python have equal digests.

    >>> key_digest(1) == key_digest(1.0) == key_digest(True), key_digest("1") == key_digest(1)
    (True, False)
    >>> noon = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)
    >>> key_digest(noon) == key_digest(
    ...     noon.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
    ... )
    True
    """
    if isinstance(key, str):
        return blake2b(b"s" + encode_utf8(key), digest_size=DIGEST_BYTES).digest()
    if key is None:
        raise ArgumentError("a key must not be None: no query could match it; leave that row out")
    if is_array(key) and len(key.shape) == 1:
        row = np.ascontiguousarray(_check_numeric(to_numpy(key)), dtype="<f8") + 0.0
        if np.isnan(row).any():
            raise ArgumentError(_NAN_KEY_MESSAGE)
        return blake2b(b"v[%d]" % len(row) + row.tobytes(), digest_size=DIGEST_BYTES).digest()
    try:
        text = json.dumps(
            _canonical_key(key), ensure_ascii=False, sort_keys=True, separators=(",", ":")
        )
    except RecursionError:
        raise ArgumentError(_TOO_DEEP_MESSAGE) from None
    return blake2b(b"j" + encode_utf8(text), digest_size=DIGEST_BYTES).digest()


def _check_numeric(array: np.ndarray) -> np.ndarray:
    """Return an array of numbers; raise `DtypeError` for another array."""
    if array.dtype.kind not in "biuf":
        raise DtypeError(f"a key must be a vector of numbers, not {quote_cell(array)}")
    return array


def is_number_list(cell: Any) -> bool:
    """Return whether a cell is a list of numbers. Such a list may be a vector.

    >>> is_number_list([1, 0.5]), is_number_list([]), is_number_list([True]), is_number_list((1, 2))
    (True, False, False, False)
    """
    return isinstance(cell, list) and bool(cell) and {*map(type, cell)} <= {int, float}


def key_digests(keys: Any) -> list[bytes]:
    """Return the digests of several keys, or of the rows of an array (m, d)."""
    if is_array(keys) and len(keys.shape) == 2:
        return [key_digest(row) for row in to_numpy(keys)]
    if set(map(type, keys)) == {str}:
        return [blake2b(b"s" + x, digest_size=DIGEST_BYTES).digest() for x in encode_all_utf8(keys)]
    return [key_digest(key) for key in keys]


def vector_digest(key: Any) -> bytes:
    """Return the digest of a key (d,) in a database of vectors. It depends on the float32 numbers.

    Stored keys contain no NaN.

    >>> same = [np.array([0.1, -0.0]), np.array([0.1, 0], np.float32)]
    >>> len({vector_digest(key) for key in same})
    1
    """
    if _IS_LITTLE_ENDIAN and key.dtype == np.float32 and type(key) is np.ndarray:
        return sha256((key + _POSITIVE_ZERO).data).digest()[:DIGEST_BYTES]
    return vector_digests(to_numpy(key)[None])[0]


def vector_digests(keys: Any) -> list[bytes]:
    """Return the digests of the rows of an array (m, d)."""
    rows, digests = _check_numeric(to_numpy(keys)), list[bytes]()
    size = 4 * rows.shape[1]
    for start in range(0, len(rows), VECTORS_PER_BLOCK):
        with np.errstate(over="ignore"):
            block = (
                rows[start : start + VECTORS_PER_BLOCK].astype("<f4", copy=False) + _POSITIVE_ZERO
            )
        if block.size and np.isnan(block.min()):
            raise ArgumentError(_NAN_KEY_MESSAGE)
        text = block.reshape(-1).view(np.uint8).data
        digests += [
            sha256(text[i * size : (i + 1) * size]).digest()[:DIGEST_BYTES]
            for i in range(len(block))
        ]
    return digests


VECTORS_PER_BLOCK = 512
"""The number of vectors whose bytes fit the processor's cache."""
_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_POSITIVE_ZERO = np.float32(0)
"""Added to vectors, so that −0 becomes 0."""


def _canonical_key(key: Any) -> Any:
    """Return a key in a form that is the same for all equal keys."""
    if isinstance(key, str) or key is None:
        return key
    if isinstance(key, bool | np.bool_ | int | np.integer):
        if not -MAX_NUMBER <= int(key) <= MAX_NUMBER:
            raise _too_large_error(key)
        return int(key)
    if isinstance(key, Decimal):
        if key.is_nan():
            return _canonical_key(math.nan)
        if key.is_finite() and key.adjusted() > MAX_DECIMAL_EXPONENT:
            raise _too_large_error(key)
        key = int(key) if key.is_finite() and key == key.to_integral_value() else float(key)
        return _canonical_key(key)
    if isinstance(key, float | np.floating):
        number = float(key)
        if math.isnan(number):
            raise ArgumentError("a key must not be NaN, which equals no key, not even itself")
        if number.is_integer():
            return int(number)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(key, tuple):
        return {"$tuple": [_canonical_key(x) for x in key]}
    if isinstance(key, list):
        return [_canonical_key(x) for x in key]
    if isinstance(key, Mapping):
        return {"$dict": {str(name): _canonical_key(x) for name, x in key.items()}}
    if isinstance(key, datetime.datetime) and key.utcoffset():
        with contextlib.suppress(OverflowError):  # in the years 1 and 9999, keep the time as it is
            key = key.astimezone(datetime.UTC)
    if is_array(key):
        array = to_numpy(key)
        if array.ndim == 0:
            return _canonical_key(array.item())
        return {"$vector": key_digests(array.reshape(1, -1))[0].hex(), "shape": list(array.shape)}
    return to_json_value(key)


def _too_large_error(number: Any) -> ArgumentError:
    return ArgumentError(
        f"{quote_cell(number)} is too large for a float and cannot be compared: store it as text"
    )


def encode_utf8(text: str) -> bytes:
    """Return text as UTF-8; raise `ArgumentError` if it contains a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"the text {text[:40]!r} contains a lone surrogate at position {error.start}, which no "
            "file can store: decode the text with the right encoding first"
        ) from None


def encode_all_utf8(texts: Iterable[str]) -> list[bytes]:
    """Return several texts as UTF-8."""
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        return [encode_utf8(text) for text in texts]
