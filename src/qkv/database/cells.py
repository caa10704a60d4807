"""Cells: what may stand in a column, as JSON text to be kept and as a digest to be found by.

A cell is text, a number, bytes, a vector, a date, a tuple of cells, None, or JSON: lists and
mappings of these. What JSON cannot say is a mapping with one name that begins with "$".
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b, sha256
from typing import Any

import numpy as np

from qkv.arrays import is_array, to_numpy
from qkv.database.faults import Damaged
from qkv.errors import ArgumentError, DtypeError

DIGEST = 16
_NAN = "a key must not hold NaN, which equals no key"

HUGE = int(sys.float_info.max)
"""The largest number that is kept."""
DIGITS = sys.float_info.max_10_exp
_DEEP = "tuples, lists or mappings are nested too deeply to be kept: flatten them"

# A datetime is a date too, so it comes first.
_DATES = {"$datetime": datetime.datetime, "$date": datetime.date, "$time": datetime.time}

ABSENT = {"NAType", "NaTType", "MaskedConstant"}
"""What stands for a missing cell in columns of pandas and NumPy, which we do not import."""


def kind(cell: Any) -> str:
    """The kind of a cell.

    >>> [kind(x) for x in ("Li", 3.5, b"raw", (1, "a"), {"a": [1]}, [0.5, 1.0])]
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
        f"a {type(cell).__name__} cannot be kept: use text, a number, bytes, a vector, a date, a "
        "tuple, or JSON"
    )


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing: None, a NaN of any type, NaT, NA, what an array masks.

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
    return type(cell).__name__ in ABSENT


def moment(cell: np.datetime64) -> Any:
    """NumPy's time as Python's, which ends at microseconds."""
    return cell.astype("M8[us]").item()


def common(cells: Iterable[Any]) -> str:
    """The one kind that all cells have which are not missing, or "any".

    >>> common(["a", None, "b"]), common([1, 2.5]), common([1, "a"])
    ('text', 'number', 'any')
    """
    cells = list(cells)
    types = set(map(type, cells))
    if types in ({str}, {int}):
        return "text" if types == {str} else "number"
    kinds = {kind(cell) for cell in cells if not is_missing(cell)}
    return kinds.pop() if len(kinds) == 1 else "any"


def dumps(cells: Mapping[str, Any]) -> str:
    """A row as JSON text, from which `loads` makes the same cells again.

    >>> text = dumps({"key": ("Li", b"x"), "value": float("inf")})
    >>> text
    '{"key": {"$tuple": ["Li", {"$bytes": "eA=="}]}, "value": {"$float": "inf"}}'
    >>> loads(text)
    {'key': ('Li', b'x'), 'value': inf}
    """
    try:
        return json.dumps({n: plain(x) for n, x in cells.items()}, ensure_ascii=False)
    except RecursionError:
        raise ArgumentError(_DEEP) from None


def records(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """What `dumps` makes of each row, a column at a time.

    >>> records({"key": ["Li", "Mu"], "value": [1.5, None]})
    ['{"key": "Li", "value": 1.5}', '{"key": "Mu", "value": null}']
    """
    names = [_quoted(utf8(name).decode()).replace("%", "%%") for name in columns]
    form = "{" + ", ".join(f"{name}: %s" for name in names) + "}"
    return [form % row for row in zip(*map(_texts, columns.values()), strict=True)]


def _texts(column: Sequence[Any]) -> Iterable[str]:
    """Each cell as JSON text: of plain columns by what the encoder of JSON calls itself."""
    kinds = set(map(type, column))
    if kinds == {str}:
        if not "".join(column).isascii():
            all_utf8(column)
        return map(_quoted, column)
    if kinds == {float} and all(map(math.isfinite, column)):
        return map(float.__repr__, column)
    if kinds == {int} and min(column) >= -HUGE and max(column) <= HUGE:
        return map(int.__repr__, column)
    try:
        return [json.dumps(plain(cell), ensure_ascii=False) for cell in column]
    except RecursionError:
        raise ArgumentError(_DEEP) from None


_quoted = json.encoder.encode_basestring
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def loads(text: str) -> dict[str, Any]:
    try:
        cells, _ = _scan(text, 0)  # what `json.loads` comes to, of text that `dumps` made
        if "$" in text:
            cells = {name: restored(cell) for name, cell in cells.items()}
    except (StopIteration, *NO_CELLS):
        cells = None
    if type(cells) is not dict:
        raise Damaged(f"a record is not what was written: {shown(text)}. qkv check names its file")
    return cells


def plain(cell: Any) -> Any:
    """A cell as what JSON has."""
    if cell is None or isinstance(cell, str | bool | int):
        if isinstance(cell, str):
            utf8(cell)
        elif cell is not None and not -HUGE <= cell <= HUGE:
            raise _huge(cell)
        return cell
    if isinstance(cell, float):
        return float(cell) if math.isfinite(cell) else {"$float": str(cell)}
    if isinstance(cell, np.bool_ | np.number):
        number = cell.item()
        if isinstance(number, np.number):  # a long double is its own
            raise DtypeError(f"{cell!r} is wider than what is kept: cast it to float")
        return plain(number)
    if isinstance(cell, Decimal):
        if cell.is_finite() and cell.adjusted() > DIGITS:
            raise _huge(cell)
        return {"$decimal": str(cell)}
    if is_missing(cell):
        return None
    if isinstance(cell, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(cell).decode()}
    if isinstance(cell, tuple):
        return {"$tuple": [plain(x) for x in cell]}
    if isinstance(cell, list):
        return [plain(x) for x in cell]
    if isinstance(cell, Mapping):
        for name in cell:
            if not isinstance(name, str):
                raise DtypeError(f"a mapping's names must be text to be kept, not {name!r}")
            utf8(name)
        inner = {name: plain(x) for name, x in cell.items()}
        return {"$dict": inner} if any(name.startswith("$") for name in inner) else inner
    if isinstance(cell, np.datetime64):
        cell = moment(cell)
    for tag, kind_ in _DATES.items():
        if isinstance(cell, kind_):
            return {tag: cell.isoformat()}  # type: ignore[attr-defined]
    if is_array(cell):
        array = to_numpy(cell)
        if not array.ndim:
            return plain(array[()])
        array = np.ascontiguousarray(array)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        text = base64.b64encode(array.tobytes()).decode()
        return {"$array": [array.dtype.str, list(array.shape), text]}
    kind(cell)  # raises
    raise AssertionError(cell)


NO_CELLS = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What `restored` raises of what nobody's `plain` made."""


def restored(plain: Any) -> Any:
    """The cell that `plain` made."""
    if isinstance(plain, list):
        return [restored(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, inner),) = plain.items()
        if tag in _TAGS:
            return _TAGS[tag](inner)
    return {name: restored(x) for name, x in plain.items()}


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array(parts: Sequence[Any]) -> np.ndarray:
    dtype, shape, text = parts
    return np.frombuffer(_bytes(text), np.dtype(dtype)).reshape(shape)


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$decimal": Decimal,
    "$bytes": _bytes,
    "$tuple": lambda inner: tuple(restored(x) for x in inner),
    "$dict": lambda inner: {name: restored(x) for name, x in inner.items()},
    "$array": _array,
    **{tag: kind_.fromisoformat for tag, kind_ in _DATES.items()},  # type: ignore[attr-defined]
}


def digest(key: Any) -> bytes:
    """What a key is found by: equal for keys that Python calls equal, else different.

    >>> digest(1) == digest(1.0) == digest(True), digest("1") == digest(1)
    (True, False)
    >>> noon = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)
    >>> digest(noon) == digest(noon.astimezone(datetime.timezone(datetime.timedelta(hours=9))))
    True
    """
    if isinstance(key, str):
        return blake2b(b"s" + utf8(key), digest_size=DIGEST).digest()
    if key is None:
        raise ArgumentError("a key must not be None: nothing could ask for it")
    if is_array(key) and len(key.shape) == 1:
        row = np.ascontiguousarray(_numeric(to_numpy(key)), dtype="<f8") + 0.0
        if np.isnan(row).any():
            raise ArgumentError(_NAN)
        return blake2b(b"v[%d]" % len(row) + row.tobytes(), digest_size=DIGEST).digest()
    try:
        text = json.dumps(_same(key), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ArgumentError(_DEEP) from None
    return blake2b(b"j" + utf8(text), digest_size=DIGEST).digest()


def _numeric(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise DtypeError(f"a key must be a vector of numbers, not {shown(array)}")
    return array


def is_numbers(cell: Any) -> bool:
    """Whether it is a list of numbers, as a vector may be written: one key, not several.

    >>> is_numbers([1, 0.5]), is_numbers([]), is_numbers([True]), is_numbers((1, 2))
    (True, False, False, False)
    """
    return isinstance(cell, list) and bool(cell) and {*map(type, cell)} <= {int, float}


def digests(keys: Any) -> list[bytes]:
    """One for each key of a sequence, or for each row of an array (m, d)."""
    if is_array(keys) and len(keys.shape) == 2:
        return [digest(row) for row in to_numpy(keys)]
    if set(map(type, keys)) == {str}:
        return [blake2b(b"s" + x, digest_size=DIGEST).digest() for x in all_utf8(keys)]
    return [digest(key) for key in keys]


def vector_digest(key: Any) -> bytes:
    """What a key is found by where keys are vectors (d,): its numbers as float32, as they are kept.
    One with NaN finds nothing, since none is kept.

    >>> same = [np.array([0.1, -0.0]), np.array([0.1, 0], np.float32)]
    >>> len({vector_digest(key) for key in same})
    1
    """
    if _LITTLE and key.dtype == np.float32 and type(key) is np.ndarray:
        return sha256((key + _ZERO).data).digest()[:DIGEST]
    return vector_digests(to_numpy(key)[None])[0]


def vector_digests(keys: Any) -> list[bytes]:
    """One for each row of an array (m, d)."""
    rows, found = _numeric(to_numpy(keys)), list[bytes]()
    size = 4 * rows.shape[1]
    for start in range(0, len(rows), SOME):
        with np.errstate(over="ignore"):
            block = rows[start : start + SOME].astype("<f4", copy=False) + _ZERO
        if block.size and np.isnan(block.min()):
            raise ArgumentError(_NAN)
        text = block.reshape(-1).view(np.uint8).data
        parts = (text[i * size : (i + 1) * size] for i in range(len(block)))
        found += [sha256(part).digest()[:DIGEST] for part in parts]
    return found


SOME = 512
"""Vectors whose bytes stay in the cache between two steps."""
_LITTLE = sys.byteorder == "little"
_ZERO = np.float32(0)
"""Which makes −0 the same as 0."""


def _same(key: Any) -> Any:
    """A key in the one form that all its equals share."""
    if isinstance(key, str) or key is None:
        return key
    if isinstance(key, bool | np.bool_ | int | np.integer):
        if not -HUGE <= int(key) <= HUGE:
            raise _huge(key)
        return int(key)
    if isinstance(key, Decimal):
        if key.is_nan():
            return _same(math.nan)
        if key.is_finite() and key.adjusted() > DIGITS:
            raise _huge(key)
        key = int(key) if key.is_finite() and key == key.to_integral_value() else float(key)
        return _same(key)
    if isinstance(key, float | np.floating):
        number = float(key)
        if math.isnan(number):
            raise ArgumentError("a key must not be NaN, which equals no key, not even itself")
        if number.is_integer():
            return int(number)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(key, tuple):
        return {"$tuple": [_same(x) for x in key]}
    if isinstance(key, list):
        return [_same(x) for x in key]
    if isinstance(key, Mapping):
        return {"$dict": {str(name): _same(x) for name, x in key.items()}}
    if isinstance(key, datetime.datetime) and key.utcoffset():
        with contextlib.suppress(OverflowError):  # at the end of time, as it is written
            key = key.astimezone(datetime.UTC)
    if is_array(key):
        array = to_numpy(key)
        if array.ndim == 0:
            return _same(array.item())
        return {"$vector": digests(array.reshape(1, -1))[0].hex(), "shape": list(array.shape)}
    return plain(key)


def _huge(number: Any) -> ArgumentError:
    return ArgumentError(
        f"{shown(number)} is more than a float can hold, and cannot be compared: keep it as text"
    )


def shown(cell: Any) -> str:
    """A cell as an error quotes it: some characters of it, however long or deep it is.

    >>> shown((1, (2, (3, (4, 5))))), len(shown("a" * 100_000))
    ('(1, (2, (3, (…))))', 58)
    """
    if isinstance(cell, int) and not -HUGE <= cell <= HUGE:
        return f"a number of about {int(cell.bit_length() * math.log10(2)) + 1:,} digits"
    told = _SHORT.repr(cell)
    return " ".join(told.split()) if is_array(cell) else told


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.fillvalue = 3, "…"
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def utf8(text: str) -> bytes:
    """The text in UTF-8, refused where it has no such form."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"the text {text[:40]!r} holds a lone surrogate at {error.start}, which no file can "
            "keep: decode it with the right encoding first"
        ) from None


def all_utf8(texts: Iterable[str]) -> list[bytes]:
    """Each of them likewise."""
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        return [utf8(text) for text in texts]
