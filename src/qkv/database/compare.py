"""Comparisons of columns, as operations on arrays: what is equal, less, or a part of a text."""

from __future__ import annotations

import ast
import datetime
import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.database import cells, columns, spelled
from qkv.database.columns import MISSING, NUMBERS, OTHER, TEXT, WIDE, Column
from qkv.deadline import check_deadline
from qkv.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from qkv.database.piece import Piece

_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TURNED: dict[type, type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
_SAMPLE = 4096
"""Rows in which an error looks for an example."""


class Texts(NamedTuple):
    """The different texts of a column, as dates too where any is one, which of them each row has,
    (m,), −1 where none, and about how many bytes that takes."""

    texts: list[str]
    dates: list[Any]
    place: np.ndarray
    size: int


class Passed(NamedTuple):
    """Of each row whether it passes, and whether that is known: one without the cell that is
    compared neither passes nor does it pass what is not so."""

    true: np.ndarray
    known: np.ndarray

    def __invert__(self) -> Passed:
        return Passed(self.known & ~self.true, self.known)

    def __and__(self, other: Passed) -> Passed:
        false = (self.known & ~self.true) | (other.known & ~other.true)
        return Passed(self.true & other.true, (self.known & other.known) | false)

    def __or__(self, other: Passed) -> Passed:
        return ~(~self & ~other)


Condition = Callable[["Piece"], Passed]


class Name(NamedTuple):
    """A column, by its name."""

    column: str


class Written(NamedTuple):
    """A cell that is given."""

    cell: Any


Side = Name | Written


def quiet(passes: Condition) -> Condition:
    """Without warnings: the codes of text, taken for numbers, may be NaN of any kind."""

    def passed(table: Piece) -> Passed:
        with np.errstate(invalid="ignore"):
            return passes(table)

    return passed


def joined(parts: Sequence[Condition], all_of: bool) -> Condition:
    if not parts:
        return constantly(all_of)

    def passed(table: Piece) -> Passed:
        found = parts[0](table)
        for part in parts[1:]:
            check_deadline()
            found = found & part(table) if all_of else found | part(table)
        return found

    return passed


def constantly(passes: bool) -> Condition:
    return lambda table: _all(len(table), passes)


def _all(rows: int, passes: bool) -> Passed:
    return Passed(np.full(rows, passes), np.ones(rows, bool))


def truthy(name: str) -> Condition:
    """Cells that Python calls true: not 0, not False, not an empty text."""

    def passed(table: Piece) -> Passed:
        column = table.column(name)
        empty = _equals(table, name, column, 0) | _equals(table, name, column, "")
        known = column.kinds != MISSING
        return Passed(known & ~empty, known)

    return passed


def member(left: Side, members: Sequence[Side]) -> Condition:
    """left == member, for any of them. Of a constant and constants too."""
    if isinstance(left, Written):
        names = [side for side in members if isinstance(side, Name)]
        if any(_same(left.cell, side.cell) for side in members if isinstance(side, Written)):
            return constantly(True)
        return joined([member(name, [left]) for name in names], all_of=False)
    name = left.column

    def passed(table: Piece) -> Passed:
        column, true = table.column(name), np.zeros(len(table), bool)
        constants = [side.cell for side in members if isinstance(side, Written)]
        if constants and len(constants) == len(members):
            _comparable(table, name, constants)
        for side in members:
            check_deadline()
            if isinstance(side, Written):
                true |= _equals(table, name, column, side.cell)
                if (moment := spelled.moment(side.cell)) is not None:
                    _same_moment(table, name, column, moment, true)
            else:
                true |= _alike(table, name, column, side.column)
        return Passed(true, np.ones(len(table), bool))

    return passed


def _equals(table: Piece, name: str, column: Column, cell: Any) -> np.ndarray:
    """Which cells equal a constant."""
    kind = columns.kind_of(cell)
    if kind == MISSING:
        return np.asarray(column.kinds == MISSING)
    code = np.uint64(columns.code(cell, kind))
    if kind not in NUMBERS:
        same = np.asarray((column.kinds == kind) & (column.codes == code))
        if kind == OTHER and (other := _written(cell)) is not None:
            same |= (column.kinds == kind) & (column.codes == np.uint64(columns.code(other, kind)))
        return same
    near: np.ndarray = column.numbers == code.view(np.float64)
    near &= (column.kinds != MISSING) & (column.kinds != TEXT) & (column.kinds != OTHER)
    # Two numbers that are no floats may share the float that is nearest to both.
    unsure = np.flatnonzero(near & (column.kinds == WIDE)) if kind == WIDE else None
    near &= (column.kinds == WIDE) if kind == WIDE else (column.kinds != WIDE)
    if unsure is not None and len(unsure):
        near[unsure] = [_same(x, cell) for x in table.cells(name, unsure)]
    return near


def _written(cell: Any) -> Any:
    """A vector as the list of its numbers, and such a list as a vector; else None."""
    if isinstance(cell, np.ndarray) and cell.ndim == 1:
        return cell.tolist()
    return np.array(cell, float) if cells.is_numbers(cell) else None


def _alike(table: Piece, name: str, column: Column, other: str) -> np.ndarray:
    """Which cells of two columns are equal; a missing one equals a missing one."""
    second = table.column(other)
    numeric = np.isin(column.kinds, NUMBERS) & np.isin(second.kinds, NUMBERS)
    alike = (column.kinds == second.kinds) & (column.codes == second.codes)
    same: np.ndarray = np.where(numeric, column.numbers == second.numbers, alike)
    unsure = np.flatnonzero(same & numeric & ((column.kinds == WIDE) | (second.kinds == WIDE)))
    if len(unsure):
        pairs = zip(table.cells(name, unsure), table.cells(other, unsure), strict=True)
        same[unsure] = [_same(a, b) for a, b in pairs]
    return same


def order(op: ast.cmpop, left: Side, right: Side) -> Condition:
    """left < right, and the like."""
    if isinstance(left, Written):
        if isinstance(right, Written):
            if not isinstance(left.cell, str | int | float) or (
                isinstance(left.cell, str) != isinstance(right.cell, str)
            ):
                raise _unlike(cells.shown(left.cell), cells.shown(right.cell))
            passes = bool(_ORDER[type(op)](left.cell, right.cell))
            return constantly(passes)
        return order(_TURNED[type(op)](), right, left)
    compare, name = _ORDER[type(op)], left.column
    if isinstance(right, Name):
        return lambda table: _ordered_columns(table, compare, name, right.column)
    cell = columns.normal(right.cell)
    kind = columns.kind_of(cell)

    def passed(table: Piece) -> Passed:
        column = table.column(name)
        known = column.kinds != MISSING
        if kind == MISSING:
            return Passed(np.zeros(len(table), bool), np.zeros(len(table), bool))
        _comparable(table, name, [cell], order=True)
        if kind == TEXT:
            return Passed(_by_text(table, name, cell, compare), known)
        number = float(columns.coded([cell]).numbers[0])
        true = compare(column.numbers, number) & known
        if kind == WIDE or table.census(name)[WIDE]:
            near = known & (column.numbers == number)
            at = np.flatnonzero(near & ((column.kinds == WIDE) | (kind == WIDE)))
            true[at] = [bool(compare(x, cell)) for x in table.cells(name, at)]
        return Passed(true, known)

    return passed


def _ordered_columns(
    table: Piece, compare: Callable[[Any, Any], Any], one: str, two: str
) -> Passed:
    a, b = table.column(one), table.column(two)
    for name in (one, two):
        _only_comparable(name, table.census(name))
    texts = [table.census(name)[TEXT] > 0 for name in (one, two)]
    if texts[0] != texts[1] and all(table.census(name)[1:].any() for name in (one, two)):
        raise _unlike(f"column {one!r} holds {_held(table, one)}", f"column {two!r}")
    known = (a.kinds != MISSING) & (b.kinds != MISSING)
    true = np.asarray(compare(a.numbers, b.numbers)) & known
    unsure = known & ((a.kinds == TEXT) | (a.kinds == WIDE) | (b.kinds == WIDE))
    if unsure.any():
        at = np.flatnonzero(unsure)
        pairs = zip(table.cells(one, at), table.cells(two, at), strict=True)
        true[at] = [
            bool(
                compare(*_pair(one, x, spelled.moment(y)) or (columns.normal(x), columns.normal(y)))
            )
            for x, y in pairs
        ]
    return Passed(true, known)


def contains(right: Side, left: Side) -> Condition:
    """left in right: a part of a text."""
    if isinstance(right, Written) or not isinstance(left, Written):
        wish = "a list of what a column may be, or a text in a column"
        told = right.cell if isinstance(right, Written) else right.column
        raise ArgumentError(f"where: in {cells.shown(told)} is not understood: in needs {wish}")
    part, name = left.cell, right.column
    if not isinstance(part, str):
        raise ArgumentError(
            f"where: {cells.shown(part)} in {name}: only text can be a part of a column's text; "
            f"for a list of what it may be, write {name} in [{cells.shown(part)}]"
        )

    def passed(table: Piece) -> Passed:
        _comparable(table, name, [part], order=True)
        known = table.column(name).kinds != MISSING
        texts, _, place, _ = table.texts(name)
        return Passed(_spread([part in text for text in texts], place), known)

    return passed


def _by_text(table: Piece, name: str, text: str, compare: Callable[[Any, Any], Any]) -> np.ndarray:
    """Of each row its text, or the moment that it is, compared with another."""
    texts, dates, place, _ = table.texts(name)
    # A month, or a year, is where it begins.
    part = re.fullmatch(r"\d{4}(-\d\d)?", text, re.ASCII)
    moment = spelled.moment(text + "-01-01"[len(text) - 4 :] if part else text)
    if moment is None and dates and None not in dates:
        raise DtypeError(
            f"where: column {name!r} holds dates and is compared with {cells.shown(text)}: write "
            "a date as ISO text, '2024-01-31' or '2024-01-31 12:00'"
        )
    if moment is None or not dates:
        return _spread([compare(x, text) for x in texts], place)
    pairs = zip(texts, dates, strict=True)
    return _spread([compare(*_pair(name, date, moment) or (x, text)) for x, date in pairs], place)


def _spread(verdicts: Sequence[Any], place: np.ndarray) -> np.ndarray:
    """What was said of each different text, for the rows that have it."""
    return np.asarray(np.array([*map(bool, verdicts), False])[place])


def _pair(name: str, date: Any, moment: Any) -> tuple[Any, Any] | None:
    """A cell and the moment it is compared with, both as moments; None where one is none. Where
    the one that is given has no zone, the hours count that the cell's own clock showed."""
    own = None if isinstance(date, str) else spelled.moment(date)
    if (
        own is None
        or moment is None
        or isinstance(own, datetime.time) != isinstance(moment, datetime.time)
    ):
        return None
    if moment.tzinfo is None:
        return own.replace(tzinfo=None), moment
    if own.tzinfo is None:
        raise DtypeError(
            f"where: column {name!r} holds moments without a zone and is compared with one that "
            f"has one, {moment.isoformat()}: write it without one"
        )
    return own, moment


def _same_moment(table: Piece, name: str, column: Column, moment: Any, true: np.ndarray) -> None:
    """Which other cells are dates that mean this moment, in `true`. Without a zone it is what a
    cell's own clock showed, so that one with a zone has to be looked at."""
    first = table.cells(name, np.flatnonzero(column.kinds == TEXT)[:1])
    if moment.tzinfo is not None or getattr(first[0] if first else None, "tzinfo", None):
        texts, dates, place, _ = table.texts(name)
        pairs = [_pair(name, date, moment) for date in dates or texts]
        true |= _spread([pair is not None and pair[0] == pair[1] for pair in pairs], place)
        return
    for date in spelled.alike(moment):
        code = np.uint64(columns.code(date, TEXT))
        at = np.flatnonzero((column.kinds == TEXT) & (column.codes == code) & ~true)
        true[at] = [not isinstance(x, str) for x in table.cells(name, at)]


def texts_of(table: Piece, name: str) -> Texts:
    """The different texts of a column."""
    column = table.column(name)
    at = np.flatnonzero(column.kinds == TEXT)
    _, first, back = np.unique(column.codes[at], return_index=True, return_inverse=True)
    place = np.full(len(table), -1, np.int32)
    place[at] = back
    found = table.cells(name, at[first])
    texts = [str(columns.normal(x)) for x in found]
    dates = [None if isinstance(x, str) else x for x in found]
    dates = dates if any(dates) else []
    return Texts(texts, dates, place, place.nbytes + sum(map(sys.getsizeof, (*texts, *dates))))


def _same(a: Any, b: Any) -> bool:
    return bool(columns.normal(a) == columns.normal(b))


def _comparable(table: Piece, name: str, constants: Sequence[Any], order: bool = False) -> None:
    """Refuse to compare text with numbers, which would find nothing without a word."""
    census, told = table.census(name), cells.shown(constants[0])
    kinds = {columns.kind_of(cell) for cell in constants} - {MISSING}
    texts, numbers = bool(census[TEXT]), bool(census[list(NUMBERS)].any())
    if order:
        _only_comparable(name, census)
        if OTHER in kinds:
            raise ArgumentError(f"where: column {name!r} is not compared with {told}")
    if not kinds or not (texts or numbers):
        return
    if kinds == {OTHER}:
        if not census[OTHER]:
            held = columns.told(census)
            raise DtypeError(f"where: column {name!r} holds {held}, and never equals {told}")
        return
    wants_text, wants_number = TEXT in kinds, bool(kinds & set(NUMBERS))
    if order:
        wrong = numbers if wants_text else texts
    else:
        wrong = not ((wants_text and texts) or (wants_number and numbers))
    if wrong:
        raise _unlike(f"column {name!r} holds {_held(table, name)}", told)


def _held(table: Piece, name: str) -> str:
    """The kinds of a column, and one of the texts that make it one of text."""
    told = columns.told(table.census(name))
    at = np.flatnonzero(table.column(name).kinds == TEXT)[:_SAMPLE]
    texts = [str(columns.normal(x)) for x in table.cells(name, at)]
    strange = next((x for x in texts if not x[:1].isdigit()), texts[0] if texts else None)
    return told if strange is None else f"{told}, such as {cells.shown(strange)},"


def _only_comparable(name: str, census: np.ndarray) -> None:
    if census[OTHER]:
        raise ArgumentError(
            f"where: column {name!r} holds {census[OTHER]:,} cells that have no order (bytes, "
            "tuples, vectors, lists): compare columns of numbers, text or dates"
        )


def _unlike(one: str, two: str) -> DtypeError:
    return DtypeError(
        f"where: {one} and is compared with {two}: text is not compared with numbers. Write the "
        "constant as the column has it; or, where a few words stand among numbers, name them as "
        "missing when the table is read"
    )
