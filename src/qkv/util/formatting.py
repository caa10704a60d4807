"""Format cells and weights: as JSON, on one line, as a bar."""

from __future__ import annotations

import datetime
import json
import math
import reprlib
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from qkv.errors import escape_control_characters

BAR_WIDTH = 24
"""The width of the longest bar, in characters."""


def format_bar(weight: float, width: int = BAR_WIDTH) -> str:
    """Return a bar for a weight between 0 and 1, in steps of an eighth of a character.

    >>> format_bar(0.5, 8)
    '████'
    """
    eighths = round(max(min(weight, 1.0), 0.0) * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).rstrip()


def bar_lengths(weights: Iterable[float]) -> list[float]:
    """Return the length of each weight's bar, from 0 to 1.

    It is |weight|. If a weight exceeds 1, all lengths are divided by the largest.

    >>> bar_lengths([0.5, 0.25]), bar_lengths([-4.0, 2.0, math.nan])
    ([0.5, 0.25], [1.0, 0.5, 0.0])
    """
    sizes = [abs(weight) for weight in weights]
    largest = max([1.0, *filter(math.isfinite, sizes)])
    return [0.0 if math.isnan(size) else min(size / largest, 1.0) for size in sizes]


def format_weight(weight: float) -> str:
    """Format a weight with three decimals, or with four digits if it is large.

    >>> format_weight(0.25), format_weight(-8.8889e11)
    ('0.250', '-8.889e+11')
    """
    return f"{weight:.3f}" if abs(weight) < 1e4 else f"{weight:.4g}"


def pad_to_width(text: str, width: int) -> str:
    """Pad a text with spaces to a width in terminal columns.

    >>> pad_to_width("日本", 6)
    '日本  '
    """
    return text + " " * (width - display_width(text))


def display_width(text: str) -> int:
    """Return the width in terminal columns: wide characters count 2, combining marks 0.

    >>> display_width("日本"), display_width("e\u0301")
    (4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me", "Cf")
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


_JSON_TYPES = frozenset({str, int, bool, type(None)})


def to_jsonable(x: Any, numbers: Callable[[np.ndarray], Any] = np.ndarray.tolist) -> Any:
    """Convert any cell of a database to JSON types: arrays become lists, unknown types text.

    `numbers` converts an array of finite numbers, for a writer that supports arrays.
    """
    if type(x) in _JSON_TYPES:
        return x
    if isinstance(x, np.ndarray):
        plain = x.dtype.kind in "biu" or (x.dtype.kind == "f" and bool(np.isfinite(x).all()))
        return numbers(x) if plain else to_jsonable(x.tolist())
    if isinstance(x, np.generic):
        item = x.item()
        return str(item) if isinstance(item, np.generic) else to_jsonable(item)
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else str(x)
    if isinstance(x, dict | Mapping):  # dict first: the check of an ABC is slow
        return {str(name): to_jsonable(item, numbers) for name, item in x.items()}
    if isinstance(x, list | tuple):
        return [to_jsonable(item, numbers) for item in x]
    if isinstance(x, bytes | bytearray):
        return x.hex()
    if isinstance(x, datetime.datetime):  # str(x) is not ISO 8601
        return x.isoformat()
    return x if x is None or isinstance(x, str | int | float | bool) else str(x)


def format_number(x: float) -> str:
    """Format a number with six significant digits, or as an integer from 10⁶ to 10¹⁵.

    >>> format_number(3.14159265), format_number(3203071.25), format_number(1e20)
    ('3.14159', '3203071', '1e+20')
    """
    return f"{x:.0f}" if 1e6 <= abs(x) < 1e15 else f"{x:.6g}"


def format_one_line(x: Any, max_characters: int = 40) -> str:
    """Format a value on one line of at most `max_characters`."""
    if isinstance(x, float | np.floating):
        text = format_number(float(x))
    elif isinstance(x, np.ndarray):
        text = np.array2string(x, precision=4, threshold=6, edgeitems=3)
    elif isinstance(x, Mapping):
        text = ", ".join(
            f"{name}: {format_one_line(item, max_characters)}" for name, item in x.items()
        )
    elif isinstance(x, tuple):
        text = ", ".join(format_one_line(item, max_characters) for item in x)
    elif isinstance(x, str | datetime.date | datetime.time):
        text = to_jsonable(x)
    else:
        text = json.dumps(to_jsonable(x), ensure_ascii=False)
    text = " ".join(escape_control_characters(text).split())
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


MAX_NUMBER = int(sys.float_info.max)
"""The largest number that a database stores: the largest finite float64."""

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxlevel, _SHORT_REPR.fillvalue = 3, "…"
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 60


def quote_cell(cell: Any) -> str:
    """Return a cell as an error message quotes it: at most a few dozen characters, on one line.

    >>> quote_cell((1, (2, (3, (4, 5))))), len(quote_cell("a" * 100_000))
    ('(1, (2, (3, (…))))', 58)
    """
    if isinstance(cell, int) and not -MAX_NUMBER <= cell <= MAX_NUMBER:
        return f"a number of about {int(cell.bit_length() * math.log10(2)) + 1:,} digits"
    text = _SHORT_REPR.repr(cell)
    return " ".join(text.split()) if hasattr(cell, "shape") else text
