"""Which columns of text are columns of numbers or dates: those that lose nothing as such."""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from qkv.database.errors import MixedColumnWarning
from qkv.errors import warn_at_caller

_PLAIN_NUMBER = re.compile(r"(-?)(0|[1-9]\d*|(?=\.))(?:\.(\d+))?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Up to 17 digits and a point: a float keeps them.
_SHORT_FLOAT = re.compile(r"-?(?=.{2,18}\Z)(?:0|[1-9]\d*)?\.\d+", re.ASCII).fullmatch
_INFINITE_OR_NAN = re.compile(r"[+-]?(?i:inf|infinity)|nan|NaN").fullmatch
MISSING_WORDS = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""What a cell without anything in it is called in the tables of others, as pandas has it."""
# Numbers with a comma for the point, thousands parted by points or not; and ones that are whole.
_DECIMAL_COMMA = re.compile(
    r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:\.\d{3})+),\d+(?:[eE][+-]?\d{1,3})?", re.ASCII
).fullmatch
_INTEGER_WITH_POINTS = re.compile(r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:\.\d{3})+)", re.ASCII).fullmatch
# A price or a share with one or two digits behind its comma, which no mark of thousands has.
_CURRENCY_SIGN, _COMMA_CENTS = r"(?:[€$£¥%]|[A-Z]{3})", r"-?[0-9][0-9.]*,[0-9]{1,2}"
_PRICE = re.compile(
    rf"{_CURRENCY_SIGN}\s*{_COMMA_CENTS}|{_COMMA_CENTS}\s*{_CURRENCY_SIGN}"
).fullmatch
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2},\d{3}", re.ASCII).fullmatch
# Numbers with a point, thousands parted by commas or not.
_COMMA_THOUSANDS = re.compile(
    r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?", re.ASCII
).fullmatch
_ISO_DATE = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d(?::\d\d)?)?)?",
    re.ASCII,
).fullmatch
MIN_COLUMN_CELLS, MAX_ODD_SHARE, SAMPLE_CELLS = 20, 0.1, 1000
"""Cells that make a column, the share of words among them that is an accident, and how many are
looked at first."""
_MAX_DIGITS = 19
"""No usual way of printing a float has more; it also bounds the work on hostile digits."""


def parse_numbers(cells: list[str], missing: Sequence[str] = MISSING_WORDS) -> list[Any]:
    """The column as ints of 64 bits, or as floats, or else as it came; missing cells as None.

    "007", "+1", ints that a float would round and longer digits than a float has stay text, and
    with them their whole column. A cell is missing if it is empty or blank, or one of these words.
    "inf" and "infinity", in any letters and with a sign or none, are numbers in a column that has
    a finite number, else text.

    >>> (
    ...     parse_numbers(["1", "", "3"]),
    ...     parse_numbers(["2.50", ".4", "NA"]),
    ...     parse_numbers(["007", "8"]),
    ... )
    ([1, None, 3], [2.5, 0.4, None], ['007', '8'])
    >>> parse_numbers(["DE", "NA"]), parse_numbers(["DE", "NA"], missing=())
    (['DE', None], ['DE', 'NA'])
    """
    words = {*missing, ""}
    absent: set[str] = set()
    if not words.isdisjoint(map(str.strip, cells)):
        absent = {text for text in set(cells) if text.strip() in words}
    present = [text for text in cells if text not in absent] if absent else cells
    parsed = _parse_ints(present) or _parse_floats(present)
    if parsed is None and present and _float_keeps(present[0].strip()):
        bare = [*map(str.strip, present)]
        parsed = _parse_ints(bare) or _parse_floats(bare)
    if not absent:
        return present if parsed is None else parsed
    rest = iter(present if parsed is None else parsed)
    return [None if text in absent else next(rest) for text in cells]


def date_form(text: str) -> str | None:
    """Which kind of date an ISO text is: a day, or a moment with or without a zone; None of none.

    >>> date_form("2024-01-31"), date_form("2024-01-31 12:00Z"), date_form("31.1.2024")
    ('day', 'moment with a zone', None)
    """
    found = _ISO_DATE(text)
    if found is None:
        return None
    return "day" if found[1] is None else "moment with a zone" if found[2] else "moment"


def parse_dates(cells: list[Any]) -> list[Any]:
    """A column of ISO text as days, or as moments that all have a zone or all have none; else as
    it came.

    >>> parse_dates(["2024-01-31", None]), parse_dates(["2024-01-31", "2024-01-31 12:00"])
    ([datetime.date(2024, 1, 31), None], ['2024-01-31', '2024-01-31 12:00'])
    """
    first = next((cell for cell in cells if cell is not None), None)
    if not isinstance(first, str) or (form := date_form(first.strip())) is None:
        return cells
    read = datetime.date.fromisoformat if form == "day" else datetime.datetime.fromisoformat
    known: dict[str | None, Any] = {None: None}
    for text in set(cells) - {None}:
        if not isinstance(text, str) or date_form(text.strip()) != form:
            return cells
        try:
            known[text] = read(text.strip())
        except ValueError:  # the 30th of February
            return cells
    return [known[cell] for cell in cells]


def infer_types(
    columns: Mapping[str, list[str]], missing: Sequence[str], text: Sequence[str] | bool = ()
) -> dict[str, list[Any]]:
    """Every column as `parse_numbers` and `parse_dates` have it, but those that are to stay text
    (True: all); a warning of each that a few cells keep from being one."""
    stay = columns if text is True else text or ()
    words, found = {*missing, ""}, dict[str, list[Any]]()
    for name, cells in columns.items():
        if name in stay:
            found[name] = [None if cell.strip() in words else cell for cell in cells]
        else:
            found[name] = parse_dates(parse_numbers(cells, missing))
    for name, cells in found.items():
        if name in stay:
            continue
        odd, why = _count_odd_words(cells, _float_keeps), "are no numbers"
        if odd and all(map(_PLAIN_NUMBER.fullmatch, odd)):
            why = "a float would not keep"
        elif not odd:
            odd, why = _count_odd_words(cells, date_form), "are no such dates as the others"
        if odd:
            told = f"column {name!r} is text for {sum(odd.values()):,} of {len(cells):,} cells"
            named = [repr(word if len(word) <= 20 else f"{word[:19]}…") for word in [*odd][:3]]
            warn_at_caller(
                f"{told} that {why}, such as {', '.join(named)}: name them as missing, if that is "
                "what they mean",
                MixedColumnWarning,
            )
    return found


def replace_decimal_commas(
    columns: Mapping[str, list[str]], missing: Sequence[str]
) -> dict[str, list[str]]:
    """Text in which numbers with decimal commas have points; columns of other cells as they are.

    One column must show that a comma is no mark of thousands, if only of prices (7,50 €): then the
    commas of all are points, and points part thousands. Where none does, a warning
    names the columns that stay text.

    >>> replace_decimal_commas({"sum": ["1.234,5", "7"], "people": ["1.086", "336"]}, missing=())
    {'sum': ['1234.5', '7'], 'people': ['1086', '336']}
    """
    present = {
        name: [bare for text in cells if (bare := text.strip()) and bare not in missing]
        for name, cells in columns.items()
    }
    commas = {
        name: next((text for text in cells if "," in text), "")
        for name, cells in present.items()
        if all(_DECIMAL_COMMA(text) or _INTEGER_WITH_POINTS(text) for text in cells)
    }
    found = [name for name, comma in commas.items() if comma]
    others = (text for name in present.keys() - commas for text in present[name])
    shown = any(not _THOUSANDS(text) for name in found for text in present[name] if "," in text)
    if not shown and not any(map(_PRICE, others)):
        for name in found:
            text = commas[name]
            either = f"{text!r} may be {text.replace(',', '.')} or {text.replace(',', '')}"
            told = f"column {name!r} is text: {either}, so write which"
            warn_at_caller(told, MixedColumnWarning)
        return dict(columns)
    marks = str.maketrans({".": None, ",": "."})
    return {
        name: [text.translate(marks) if text.strip() not in missing else text for text in cells]
        if name in commas
        else cells
        for name, cells in columns.items()
    }


def remove_thousands_commas(
    columns: Mapping[str, list[str]], missing: Sequence[str]
) -> dict[str, list[str]]:
    """Text in which numbers whose thousands are parted by commas have none; other columns as they
    are.

    One cell must have a point too: then the commas of all part thousands. Where none has, a warning
    names the columns that stay text.

    >>> remove_thousands_commas(
    ...     {"sum": ["1,234.5", "7"], "people": ["12,000", "NA"]}, missing=["NA"]
    ... )
    {'sum': ['1234.5', '7'], 'people': ['12000', 'NA']}
    """
    words, found, shown = {*missing, ""}, dict[str, str](), False
    for name, cells in columns.items():
        first = next((text for text in cells if "," in text and text.strip() not in words), "")
        if not _COMMA_THOUSANDS(first.strip()):
            continue
        bare = [*map(str.strip, cells)]
        if all(_COMMA_THOUSANDS(text) or text in words for text in bare):
            found[name] = first.strip()
            shown = shown or any("," in text and "." in text for text in bare)
    if not shown:
        for name, text in found.items():
            told = f"column {name!r} is text: {text!r} may be {text.replace(',', '')} or a list"
            warn_at_caller(f"{told}; without its commas it is a number", MixedColumnWarning)
        return dict(columns)
    return {
        name: [text if text.strip() in words else strip_thousands_commas(text) for text in cells]
        if name in found
        else cells
        for name, cells in columns.items()
    }


def strip_thousands_commas(text: str) -> str:
    """A number without the commas that part its thousands; other text as it is.

    >>> strip_thousands_commas("1,234.5"), strip_thousands_commas("1,2")
    ('1234.5', '1,2')
    """
    return text.replace(",", "") if _COMMA_THOUSANDS(text.strip()) else text


def header_looks_like_row(
    names: Sequence[str], columns: Sequence[list[str]], missing: Sequence[str]
) -> bool:
    """Whether what names the columns may be a row: a number above each column of numbers, and they
    neither count, nor rise from four on, nor are years.

    >>> (
    ...     header_looks_like_row(["Li", "34"], [["Bo"], ["27"]], ()),
    ...     header_looks_like_row(["who", "2020"], [["Bo"], ["27"]], ()),
    ... )
    (True, False)
    """
    first = [parse_numbers([name.replace(",", ".")], ())[0] for name in names]
    if all(isinstance(name, str) for name in first):
        return False
    below = [set(map(type, parse_numbers(cells, missing))) for cells in columns]
    found = [x for x, kinds in zip(first, below, strict=True) if kinds & {int, float}]
    if not found or any(isinstance(name, str) for name in found):
        return False
    steps = {after - before for before, after in pairwise(found)}
    counted = steps == {1} or (len(found) > 3 and min(steps) > 0)
    return not counted and not all(type(x) is int and 1000 <= x < 3000 for x in found)


def _count_odd_words(cells: list[Any], keeps: Callable[[str], Any]) -> dict[str, int]:
    """What keeps a column from being one of numbers, or dates, and how often it stands there;
    nothing where that is much, or digits with zeros before them, as 007 has."""
    texts = [cell for cell in cells[:SAMPLE_CELLS] if cell is not None]
    if len(texts) < MIN_COLUMN_CELLS or type(texts[0]) is not str:
        return {}
    if sum(not keeps(text.strip()) for text in texts) > MAX_ODD_SHARE * len(texts):
        return {}
    texts = [cell.strip() for cell in cells if cell is not None]
    words = Counter(text for text in texts if not keeps(text))
    padded = any(text.isdigit() and not _PLAIN_NUMBER.fullmatch(text) for text in words)
    few = sum(words.values()) <= MAX_ODD_SHARE * len(texts) and not padded
    return dict(words.most_common()) if few else {}


def _parse_ints(cells: list[str]) -> list[Any] | None:
    try:
        ints = list(map(int, cells))
    except ValueError:
        return None
    fits = ints and min(ints) >= -(2**63) and max(ints) < 2**63
    return ints if fits and list(map(str, ints)) == cells else None


def _parse_floats(cells: list[str]) -> list[Any] | None:
    if not all(_SHORT_FLOAT(text) or _float_keeps(text) for text in cells):
        return None
    floats = [*map(float, cells)]
    # Ints alone that were refused above are no floats either; NaN alone is a word.
    whole = all(text.lstrip("-").isdigit() for text in cells)
    if whole or not any(map(math.isfinite, floats)):
        return None
    return floats


def _float_keeps(text: str) -> bool:
    """Whether this is a number, and a float keeps all that it says."""
    if _INFINITE_OR_NAN(text):
        return True
    found = _PLAIN_NUMBER.fullmatch(text)
    if not found or len(text) > _MAX_DIGITS + 8:
        return False
    number = float(text)
    if len(found[0]) == len(found[1]) + len(found[2]):  # an int: it must not be rounded
        return abs(number) < 2**53 and text != "-0"
    digits = (found[2] + (found[3] or "")).lstrip("0")
    return len(digits) <= (_MAX_DIGITS if "e" in text.lower() else 17) and not math.isinf(number)
