"""Find columns of text that are numbers or dates, and convert them if no digit is lost."""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from qkv.database.errors import MixedColumnWarning
from qkv.database.parsing import parse_time_of_day
from qkv.errors import warn_at_caller

_PLAIN_NUMBER = re.compile(r"(-?)(0|[1-9]\d*|(?=\.))(?:\.(\d+))?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Matches up to 17 digits and a point, which a float represents exactly.
_SHORT_FLOAT = re.compile(r"-?(?=.{2,18}\Z)(?:0|[1-9]\d*)?\.\d+", re.ASCII).fullmatch
_INFINITE_OR_NAN = re.compile(r"[+-]?(?i:inf|infinity)|nan|NaN").fullmatch
MISSING_WORDS = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""The words that mean a missing value in CSV, as in pandas."""
# Match numbers with a decimal comma, and integers. Points may separate thousands.
_DECIMAL_COMMA = re.compile(
    r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:\.\d{3})+),\d+(?:[eE][+-]?\d{1,3})?", re.ASCII
).fullmatch
_INTEGER_WITH_POINTS = re.compile(r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:\.\d{3})+)", re.ASCII).fullmatch
# Matches a price or percentage with one or two digits after its comma: the comma is decimal.
_CURRENCY_SIGN, _COMMA_CENTS = r"(?:[€$£¥%]|[A-Z]{3})", r"-?[0-9][0-9.]*,[0-9]{1,2}"
_PRICE = re.compile(
    rf"{_CURRENCY_SIGN}\s*{_COMMA_CENTS}|{_COMMA_CENTS}\s*{_CURRENCY_SIGN}"
).fullmatch
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2},\d{3}", re.ASCII).fullmatch
# Matches numbers with a decimal point. Commas may separate thousands.
_COMMA_THOUSANDS = re.compile(
    r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?", re.ASCII
).fullmatch
_ISO_DATE = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d(?::\d\d)?)?)?",
    re.ASCII,
).fullmatch
_TIME_OF_DAY = re.compile(
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d{1,6})?)?", re.ASCII
).fullmatch
# Match an amount with a currency or percent sign, and a date that is not in ISO's form.
_AMOUNT = re.compile(rf"{_CURRENCY_SIGN}\s*-?[\d.,]*\d|-?[\d.,]*\d\s*{_CURRENCY_SIGN}").fullmatch
# Matches a number whose thousands are separated by spaces or apostrophes.
_GROUPED = re.compile(
    r"[-+]?[1-9]\d{0,2}(?:([ '’\u00a0\u202f])\d{3})(?:\1\d{3})*(?:[.,]\d+)?"
).fullmatch
# Matches a number with a unit, such as "1.2 kg", but no code such as 12B.
_MEASURE = re.compile(
    r"[-+]?\d[\d.,]*\s?(?:[kmcµu]?g|mg|lbs?|oz|t|[kcmnµ]?m|km|mi|ft|in|[mc]?l|gal|h|hrs?|min|m?s|secs?"
    r"|°\s?[CF]?|[KMG]i?B|TB|[kMG]?Hz|[kM]?Wh?|[kM]W|m?[AV]|km/h|mph|m[²³]|px|pcs?|years?|days?)"
).fullmatch
_OTHER_DATE = re.compile(
    r"(?:\d{1,2}([./-])\d{1,2}\1(?:\d{4}|\d\d)|\d{4}([./])\d{1,2}\2\d{1,2})"
    r"(?:,? \d{1,2}:\d\d(?::\d\d)?(?: ?[ap]\.?m\.?)?)?|\d{1,2}(?::\d\d){1,2} ?[ap]\.?m\.?"
    r"|(?:\d{1,2}\.? )?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
    r"(?: \d{1,2}(?:st|nd|rd|th)?,?)? \d{4}",
    re.ASCII | re.IGNORECASE,
).fullmatch
MIN_COLUMN_CELLS, MAX_ODD_SHARE, SAMPLE_CELLS = 4, 0.1, 1000
"""When to warn about a few words among numbers.

The column has at least `MIN_COLUMN_CELLS` cells, and one of them, or at most the share
`MAX_ODD_SHARE`, are words. The first `SAMPLE_CELLS` cells are checked before the others.
"""
MIN_FORM_CELLS = 3
"""A column of amounts, decimal commas or dates in other forms gets a warning if it has at least
this many cells."""
_MAX_DIGITS = 19
"""The largest number of digits with which programs print floats.

It also limits the parsing time.
"""


def parse_numbers(cells: list[str], missing: Sequence[str] = MISSING_WORDS) -> list[Any]:
    """Return a column of text as 64-bit ints or floats if no cell loses information, else as text.

    Missing cells become None. A column stays text if one cell is like "007" or "+1", or has more
    digits than a float. A cell is missing if it is blank or one of the words `missing`. "inf" and
    "infinity", in any case and with any sign, are numbers if the column also has a finite number.

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
    missing_cells: set[str] = set()
    if not words.isdisjoint(map(str.strip, cells)):
        missing_cells = {text for text in set(cells) if text.strip() in words}
    present = [text for text in cells if text not in missing_cells] if missing_cells else cells
    parsed = _parse_ints(present) or _parse_floats(present)
    if parsed is None and present and _float_keeps(present[0].strip()):
        stripped = [*map(str.strip, present)]
        parsed = _parse_ints(stripped) or _parse_floats(stripped)
    if not missing_cells:
        return present if parsed is None else parsed
    values = iter(present if parsed is None else parsed)
    return [None if text in missing_cells else next(values) for text in cells]


def date_form(text: str) -> str | None:
    """Return the form of an ISO date: a date, a datetime with or without a zone, or a time of day.

    Return None for any other text.

    >>> date_form("2024-01-31"), date_form("2024-01-31 12:00Z"), date_form("31.1.2024")
    ('date', 'datetime with zone', None)
    >>> date_form("9:30"), date_form("14:30:00")
    ('time', 'time')
    """
    match = _ISO_DATE(text)
    if match is None:
        return "time" if _TIME_OF_DAY(text) else None
    return "date" if match[1] is None else "datetime with zone" if match[2] else "datetime"


def parse_dates(cells: list[Any]) -> list[Any]:
    """Return a column of ISO text as dates, datetimes or times if all cells have the same form.

    Other columns are returned unchanged.

    >>> parse_dates(["2024-01-31", None]), parse_dates(["2024-01-31", "2024-01-31 12:00"])
    ([datetime.date(2024, 1, 31), None], ['2024-01-31', '2024-01-31 12:00'])
    """
    first = next((cell for cell in cells if cell is not None), None)
    if not isinstance(first, str) or (form := date_form(first.strip())) is None:
        return cells
    parse = {"date": datetime.date.fromisoformat, "time": parse_time_of_day}.get(
        form, datetime.datetime.fromisoformat
    )
    parsed: dict[str | None, Any] = {None: None}
    for text in set(cells) - {None}:
        if not isinstance(text, str) or date_form(text.strip()) != form:
            return cells
        try:
            parsed[text] = parse(text.strip())
        except ValueError:  # the text has the form of a date, but is not one, such as February 30
            return cells
    return [parsed[cell] for cell in cells]


def infer_types(
    columns: Mapping[str, list[str]], missing: Sequence[str], text: Sequence[str] | bool = ()
) -> dict[str, list[Any]]:
    """Convert the columns with `parse_numbers` and `parse_dates`, except the columns in `text`.

    If `text` is True, all columns stay text. A warning names each column that stays text because of
    a few cells.
    """
    as_text = columns if text is True else text or ()
    words, converted = {*missing, ""}, dict[str, list[Any]]()
    for name, cells in columns.items():
        if name in as_text:
            converted[name] = [None if cell.strip() in words else cell for cell in cells]
        else:
            converted[name] = parse_dates(parse_numbers(cells, missing))
    for name, cells in converted.items():
        if name in as_text:
            continue
        _warn_lost_zeros(name, cells, columns[name])
        odd, reason = _count_odd_words(cells, _float_keeps), "are not numbers"
        if odd and all(map(_PLAIN_NUMBER.fullmatch, odd)):
            reason = "have more digits than a float"
        elif not odd:
            odd, reason = _count_odd_words(cells, date_form), "are not dates like the others"
        if not odd:
            _warn_unread_forms(name, cells)
        else:
            examples = [repr(word if len(word) <= 20 else f"{word[:19]}…") for word in [*odd][:3]]
            warn_at_caller(
                f"column {name!r} is read as text: {sum(odd.values()):,} of its {len(cells):,} "
                f"cells {reason}, such as {', '.join(examples)}. If they mean a missing value, "
                "list them in missing= (--missing on the command line)",
                MixedColumnWarning,
            )
    return converted


def replace_decimal_commas(
    columns: Mapping[str, list[str]], missing: Sequence[str]
) -> dict[str, list[str]]:
    """Replace decimal commas by points in columns of numbers; leave other columns unchanged.

    One cell must show that commas are decimal; a price such as 7,50 € is enough. Then commas are
    decimal in all columns, and points separate thousands. Otherwise, a warning names the columns
    that stay text.

    >>> replace_decimal_commas({"sum": ["1.234,5", "7"], "people": ["1.086", "336"]}, missing=())
    {'sum': ['1234.5', '7'], 'people': ['1086', '336']}
    """
    present = {
        name: [cell for text in cells if (cell := text.strip()) and cell not in missing]
        for name, cells in columns.items()
    }
    commas = {
        name: next((text for text in cells if "," in text), "")
        for name, cells in present.items()
        if all(_DECIMAL_COMMA(text) or _INTEGER_WITH_POINTS(text) for text in cells)
    }
    with_commas = [name for name, comma in commas.items() if comma]
    others = (text for name in present.keys() - commas for text in present[name])
    is_decimal = any(
        not _THOUSANDS(text) for name in with_commas for text in present[name] if "," in text
    )
    if not is_decimal and not any(map(_PRICE, others)):
        for name in with_commas:
            text = commas[name]
            warn_at_caller(
                f"column {name!r} is read as text: {text!r} may be {text.replace(',', '.')} or "
                f"{text.replace(',', '')}. Write it without the comma, or with a decimal point",
                MixedColumnWarning,
            )
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
    """Remove commas that separate thousands from columns of numbers; leave other columns unchanged.

    One cell must also have a decimal point. Then commas separate thousands in all columns.
    Otherwise, a warning names the columns that stay text.

    >>> remove_thousands_commas(
    ...     {"sum": ["1,234.5", "7"], "people": ["12,000", "NA"]}, missing=["NA"]
    ... )
    {'sum': ['1234.5', '7'], 'people': ['12000', 'NA']}
    """
    words, examples, has_point = {*missing, ""}, dict[str, str](), False
    for name, cells in columns.items():
        first = next((text for text in cells if "," in text and text.strip() not in words), "")
        stripped = [*map(str.strip, cells)]
        if not _COMMA_THOUSANDS(first.strip()):
            _warn_decimal_commas(name, [text for text in stripped if text not in words])
            continue
        if all(_COMMA_THOUSANDS(text) or text in words for text in stripped):
            examples[name] = first.strip()
            has_point = has_point or any("," in text and "." in text for text in stripped)
    if not has_point:
        for name, text in examples.items():
            warn_at_caller(
                f"column {name!r} is read as text: {text!r} may be {text.replace(',', '')} or a "
                "list. Remove the commas to get numbers",
                MixedColumnWarning,
            )
        return dict(columns)
    return {
        name: [text if text.strip() in words else strip_thousands_commas(text) for text in cells]
        if name in examples
        else cells
        for name, cells in columns.items()
    }


def _warn_decimal_commas(name: str, cells: list[str]) -> None:
    """Warn of a column of text whose cells are numbers with a decimal comma."""
    commas = [text for text in cells if "," in text]
    if len(cells) < MIN_FORM_CELLS or not commas or any(map(_THOUSANDS, commas)):
        return
    if all(_DECIMAL_COMMA(text) or _INTEGER_WITH_POINTS(text) for text in cells):
        warn_at_caller(
            f"column {name!r} is read as text: {len(commas):,} of its {len(cells):,} cells have a "
            f"decimal comma, such as {commas[0]!r}. Write "
            f"{commas[0].replace('.', '').replace(',', '.')} to get numbers",
            MixedColumnWarning,
        )


def _warn_lost_zeros(name: str, cells: list[Any], texts: list[str]) -> None:
    """Warn of a column of numbers that may be versions, of which 1.10 becomes 1.1.

    Prices have the same number of decimals in every cell. Cells such as 2.0 lose nothing. Versions
    begin with at most two digits.
    """
    numbers = [cell for cell in cells[:SAMPLE_CELLS] if type(cell) is float]
    if not numbers or not all(0 <= number < 100 for number in numbers):
        return
    decimals = [text.strip().partition(".")[2] for text in texts[:SAMPLE_CELLS]]
    lost = [
        i for i, digits in enumerate(decimals) if digits.endswith("0") and digits.strip("0 ") != ""
    ]
    if not lost or len({len(digits) for digits in decimals if digits.strip("0 ")}) < 2:
        return
    text = texts[lost[0]].strip()
    warn_at_caller(
        f"column {name!r} is read as numbers: {len(lost):,} of its first {len(decimals):,} cells "
        f"lose a zero at the end, such as {text!r}, which becomes {cells[lost[0]]}. If they are "
        f"versions or codes, pass text=[{name!r}] (--text {name} on the command line)",
        MixedColumnWarning,
    )


def strip_thousands_commas(text: str) -> str:
    """Remove the commas that separate the thousands of a number.

    Other text is returned unchanged.

    >>> strip_thousands_commas("1,234.5"), strip_thousands_commas("1,2")
    ('1234.5', '1,2')
    """
    return text.replace(",", "") if _COMMA_THOUSANDS(text.strip()) else text


def header_looks_like_row(
    names: Sequence[str], columns: Sequence[list[str]], missing: Sequence[str]
) -> bool:
    """Return whether the header may be a row of data.

    It may be a row if it has a number above every column of numbers. These numbers must not be
    years, consecutive numbers, or four or more numbers in ascending order.

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
    numbers = [x for x, kinds in zip(first, below, strict=True) if kinds & {int, float}]
    if not numbers or any(isinstance(name, str) for name in numbers):
        return False
    steps = {after - before for before, after in pairwise(numbers)}
    is_sequence = steps == {1} or (len(numbers) > 3 and min(steps) > 0)
    return not is_sequence and not all(type(x) is int and 1000 <= x < 3000 for x in numbers)


def _count_odd_words(cells: list[Any], keeps: Callable[[str], Any]) -> dict[str, int]:
    """Count the words that prevent a column from being numbers or dates.

    `keeps(text)` says whether a cell is a number or a date. Return {} if there are many such words,
    or if one is a number with leading zeros, such as 007.
    """
    texts = [cell for cell in cells[:SAMPLE_CELLS] if cell is not None]
    if len(texts) < MIN_COLUMN_CELLS or type(texts[0]) is not str:
        return {}
    max_count = max(MAX_ODD_SHARE * len(texts), 1)
    if sum(not keeps(text.strip()) for text in texts) > max_count:
        return {}
    texts = [cell.strip() for cell in cells if cell is not None]
    words = Counter(text for text in texts if not keeps(text))
    padded = any(text.isdigit() and not _PLAIN_NUMBER.fullmatch(text) for text in words)
    few = sum(words.values()) <= max(MAX_ODD_SHARE * len(texts), 1) and not padded
    return dict(words.most_common()) if few else {}


def _warn_unread_forms(name: str, cells: list[Any]) -> None:
    """Warn of a column of text whose cells are amounts, numbers with units, or other dates."""
    texts = [cell.strip() for cell in cells[:SAMPLE_CELLS] if type(cell) is str]
    texts = [text for text in texts if any(map(str.isalnum, text))]  # a dash is a missing cell
    if len(texts) < MIN_FORM_CELLS:
        return
    for is_form, is_plain, reason, advice in (
        (_AMOUNT, _is_number, "have a currency or percent sign", "Remove it to get numbers"),
        (_GROUPED, _is_number, "have separators of thousands", "Remove them to get numbers"),
        (_MEASURE, _is_number, "have a unit", "Write numbers of one unit to get numbers"),
        (
            _OTHER_DATE,
            date_form,
            "are dates in other forms",
            "Write 2024-01-31 or 14:30 to get dates",
        ),
    ):
        unread = [text for text in texts if is_form(text)]
        plain_count = sum(bool(is_plain(text)) for text in texts)
        if unread and len(unread) + plain_count >= (1 - MAX_ODD_SHARE) * len(texts):
            warn_at_caller(
                f"column {name!r} is read as text: {len(unread):,} of its first {len(texts):,} "
                f"cells {reason}, such as {unread[0]!r}. {advice}",
                MixedColumnWarning,
            )
            return


def _is_number(text: str) -> bool:
    """Return whether the text is a number, perhaps with separators of thousands."""
    forms = (_GROUPED, _COMMA_THOUSANDS, _DECIMAL_COMMA)
    return _float_keeps(text) or any(form(text) for form in forms)


def _parse_ints(cells: list[str]) -> list[Any] | None:
    """Return the cells as ints, or None if one of them is not a 64-bit int."""
    try:
        ints = list(map(int, cells))
    except ValueError:
        return None
    fits = ints and min(ints) >= -(2**63) and max(ints) < 2**63
    return ints if fits and list(map(str, ints)) == cells else None


def _parse_floats(cells: list[str]) -> list[Any] | None:
    """Return the cells as floats, or None if they are not numbers or would lose digits."""
    if not all(_SHORT_FLOAT(text) or _float_keeps(text) for text in cells):
        return None
    floats = [*map(float, cells)]
    # If all are ints, `_parse_ints` has rejected them. If none is finite, they are words.
    only_ints = all(text.lstrip("-").isdigit() for text in cells)
    if only_ints or not any(map(math.isfinite, floats)):
        return None
    return floats


def _float_keeps(text: str) -> bool:
    """Return whether the text is a number that a float represents without loss."""
    if _INFINITE_OR_NAN(text):
        return True
    match = _PLAIN_NUMBER.fullmatch(text)
    if not match or len(text) > _MAX_DIGITS + 8:
        return False
    number = float(text)
    # An int must not be rounded.
    if len(match[0]) == len(match[1]) + len(match[2]):
        return abs(number) < 2**53 and text != "-0"
    digits = (match[2] + (match[3] or "")).lstrip("0")
    return len(digits) <= (_MAX_DIGITS if "e" in text.lower() else 17) and not math.isinf(number)
