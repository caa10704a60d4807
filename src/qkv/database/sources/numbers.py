"""Which columns of text are columns of numbers: those that lose none of their digits as numbers."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.database.faults import MixedColumn

_PLAIN = re.compile(r"(-?)(0|[1-9]\d*)(?:\.(\d+))?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Up to 17 digits and a point: a float keeps them.
_SHORT = re.compile(r"-?(?=.{3,18}\Z)(?:0|[1-9]\d*)\.\d+", re.ASCII).fullmatch
_NAN = {"nan", "NaN", "inf", "-inf"}
MISSING = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""What a cell without anything in it is called in the tables of others, as pandas has it."""
SOME, RARE, SAMPLE = 20, 0.1, 1000
"""Cells that make a column, the share of words among them that is an accident, and how many are
looked at first."""
_DIGITS = 19
"""No usual way of printing a float has more; it also bounds the work on hostile digits."""


def numbers(cells: list[str], missing: Sequence[str] = MISSING) -> list[Any]:
    """The column as ints of 64 bits, or as floats, or else as it came; missing cells as None.

    "007", "+1", ints that a float would round and longer digits than a float has stay text, and
    with them their whole column. A cell is missing if it is empty or blank, or one of these words.
    "inf" and "-inf" are numbers in a column that has a finite number, else text.

    >>> numbers(["1", "", "3"]), numbers(["2.50", "4", "NA"]), numbers(["007", "8"])
    ([1, None, 3], [2.5, 4.0, None], ['007', '8'])
    >>> numbers(["DE", "NA"]), numbers(["DE", "NA"], missing=())
    (['DE', None], ['DE', 'NA'])
    """
    words = {*missing, ""}
    absent: set[str] = set()
    if not words.isdisjoint(map(str.strip, cells)):
        absent = {text for text in set(cells) if text.strip() in words}
    present = [text for text in cells if text not in absent] if absent else cells
    parsed = _ints(present) or _floats(present)
    if parsed is None and present and _keeps(present[0].strip()):
        bare = [*map(str.strip, present)]
        parsed = _ints(bare) or _floats(bare)
    if not absent:
        return present if parsed is None else parsed
    rest = iter(present if parsed is None else parsed)
    return [None if text in absent else next(rest) for text in cells]


def typed(columns: Mapping[str, list[str]], missing: Sequence[str]) -> dict[str, list[Any]]:
    """Every column as `numbers` has it; a warning of each that a few words keep from being one."""
    found = {name: numbers(cells, missing) for name, cells in columns.items()}
    for name, cells in found.items():
        words = _words(cells)
        if words:
            told = f"column {name!r} is text for {sum(words.values()):,} of {len(cells):,} cells"
            named = [repr(word if len(word) <= 20 else f"{word[:19]}…") for word in [*words][:3]]
            warnings.warn(
                f"{told} that are no numbers, such as {', '.join(named)}: name such words as "
                "missing, if that is what they mean",
                MixedColumn,
                stacklevel=2,
            )
    return found


def _words(cells: list[Any]) -> dict[str, int]:
    """The words among numbers, and how often each stands there, in a column of text; none where
    they are many, or are digits themselves, as 007 is."""
    texts = [cell for cell in cells[:SAMPLE] if cell is not None]
    if len(texts) < SOME or type(texts[0]) is not str:
        return {}
    if sum(_PLAIN.fullmatch(text.strip()) is None for text in texts) > RARE * len(texts):
        return {}
    texts = [cell.strip() for cell in cells if cell is not None]
    words = Counter(text for text in texts if not _PLAIN.fullmatch(text))
    few = sum(words.values()) <= RARE * len(texts) and not any(map(str.isdigit, words))
    return dict(words.most_common()) if few else {}


def _ints(cells: list[str]) -> list[Any] | None:
    try:
        ints = list(map(int, cells))
    except ValueError:
        return None
    fits = ints and min(ints) >= -(2**63) and max(ints) < 2**63
    return ints if fits and list(map(str, ints)) == cells else None


def _floats(cells: list[str]) -> list[Any] | None:
    if not all(_SHORT(text) or _keeps(text) for text in cells):
        return None
    floats = [*map(float, cells)]
    # Ints alone that were refused above are no floats either; NaN alone is a word.
    whole = all(text in _NAN or text.lstrip("-").isdigit() for text in cells)
    if not any(map(math.isfinite, floats)) or (whole and not _NAN & set(cells)):
        return None
    return floats


def _keeps(text: str) -> bool:
    """Whether a float keeps all that this number says."""
    if text in _NAN:
        return True
    found = _PLAIN.fullmatch(text)
    if not found or len(text) > _DIGITS + 8:
        return False
    number = float(text)
    if len(found[0]) == len(found[1]) + len(found[2]):  # an int: it must not be rounded
        return abs(number) < 2**53 and text != "-0"
    digits = (found[2] + (found[3] or "")).lstrip("0")
    return len(digits) <= (_DIGITS if "e" in text.lower() else 17) and not math.isinf(number)
