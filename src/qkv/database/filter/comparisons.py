"""Comparisons of columns as array operations: equality, order and substrings."""

from __future__ import annotations

import ast
import datetime
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database import parsing
from qkv.database.table import cells, columns
from qkv.database.table.column_chunk import ColumnChunk
from qkv.database.table.columns import INEXACT_NUMBER, MISSING, NUMERIC_KINDS, OTHER, TEXT, Column
from qkv.errors import ArgumentError, DtypeError
from qkv.util.deadline import check_deadline
from qkv.util.formatting import quote_cell

_ORDER_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MIRRORED_OPERATORS: dict[type, type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
_SAMPLE_ROWS = 4096
"""The number of rows in which an error message searches for an example."""


class FilterResult(NamedTuple):
    """Which rows pass a condition, and for which rows this is known: three-valued logic.

    A row with a missing cell passes neither a comparison nor its negation.
    """

    passes: np.ndarray
    is_known: np.ndarray

    def __invert__(self) -> FilterResult:
        return FilterResult(self.is_known & ~self.passes, self.is_known)

    def __and__(self, other: FilterResult) -> FilterResult:
        false = (self.is_known & ~self.passes) | (other.is_known & ~other.passes)
        return FilterResult(self.passes & other.passes, (self.is_known & other.is_known) | false)

    def __or__(self, other: FilterResult) -> FilterResult:
        return ~(~self & ~other)


Condition = Callable[[ColumnChunk], FilterResult]


class ColumnName(NamedTuple):
    """A column in a comparison."""

    column: str


class Constant(NamedTuple):
    """A constant in a comparison."""

    cell: Any


Operand = ColumnName | Constant


def suppress_nan_warnings(passes: Condition) -> Condition:
    """Return the condition without NumPy's warnings.

    Codes of text that are read as numbers may be NaN.
    """

    def evaluate_quietly(table: ColumnChunk) -> FilterResult:
        with np.errstate(invalid="ignore"):
            return passes(table)

    return evaluate_quietly


def combine_conditions(parts: Sequence[Condition], all_of: bool) -> Condition:
    """Return the condition that all parts hold, or that one of them holds (`all_of` False)."""
    if not parts:
        return constant_condition(all_of)

    def evaluate_all(table: ColumnChunk) -> FilterResult:
        result = parts[0](table)
        for part in parts[1:]:
            check_deadline()
            result = result & part(table) if all_of else result | part(table)
        return result

    return evaluate_all


def constant_condition(passes: bool) -> Condition:
    """Return the condition that every row passes, or that no row passes."""
    return lambda table: _uniform_result(len(table), passes)


def _uniform_result(rows: int, passes: bool) -> FilterResult:
    """Return the same known result for all rows."""
    return FilterResult(np.full(rows, passes), np.ones(rows, bool))


def truth_condition(name: str) -> Condition:
    """Return the condition that a cell counts as true: it is not 0, False or empty text."""

    def evaluate_truth(table: ColumnChunk) -> FilterResult:
        column = table.read_column(name)
        empty = _equal_to_constant(table, name, column, 0) | _equal_to_constant(
            table, name, column, ""
        )
        is_known = column.kinds != MISSING
        return FilterResult(is_known & ~empty, is_known)

    return evaluate_truth


def membership_condition(left: Operand, members: Sequence[Operand]) -> Condition:
    """Return the condition that `left` equals one of the members."""
    if isinstance(left, Constant):
        names = [side for side in members if isinstance(side, ColumnName)]
        if any(
            _cells_equal(left.cell, side.cell) for side in members if isinstance(side, Constant)
        ):
            return constant_condition(True)
        return combine_conditions(
            [membership_condition(name, [left]) for name in names], all_of=False
        )
    name = left.column

    def evaluate_membership(table: ColumnChunk) -> FilterResult:
        column, true = table.read_column(name), np.zeros(len(table), bool)
        constants = [side.cell for side in members if isinstance(side, Constant)]
        if constants and len(constants) == len(members):
            _check_comparable(table, name, constants)
        for side in members:
            check_deadline()
            if isinstance(side, Constant):
                true |= _equal_to_constant(table, name, column, side.cell)
                if (moment := parsing.parse_moment(side.cell)) is not None:
                    _mark_same_moments(table, name, column, moment, true)
            else:
                true |= _equal_columns(table, name, column, side.column)
        return FilterResult(true, np.ones(len(table), bool))

    return evaluate_membership


def _equal_to_constant(table: ColumnChunk, name: str, column: Column, cell: Any) -> np.ndarray:
    """Return a mask of the cells that equal a constant."""
    kind = columns.cell_kind_code(cell)
    if kind == MISSING:
        return np.asarray(column.kinds == MISSING)
    code = np.uint64(columns.encode_cell(cell, kind))
    if kind not in NUMERIC_KINDS:
        same = np.asarray((column.kinds == kind) & (column.codes == code))
        if kind == OTHER and (other := _alternative_vector_form(cell)) is not None:
            same |= (column.kinds == kind) & (
                column.codes == np.uint64(columns.encode_cell(other, kind))
            )
        return same
    is_equal: np.ndarray = column.numbers == code.view(np.float64)
    is_equal &= (column.kinds != MISSING) & (column.kinds != TEXT) & (column.kinds != OTHER)
    # Different numbers may round to the same float, so compare these cells themselves.
    unsure = (
        np.flatnonzero(is_equal & (column.kinds == INEXACT_NUMBER))
        if kind == INEXACT_NUMBER
        else None
    )
    is_equal &= (
        (column.kinds == INEXACT_NUMBER)
        if kind == INEXACT_NUMBER
        else (column.kinds != INEXACT_NUMBER)
    )
    if unsure is not None and len(unsure):
        is_equal[unsure] = [_cells_equal(x, cell) for x in table.read_cells(name, unsure)]
    return is_equal


def _alternative_vector_form(cell: Any) -> Any:
    """Return a vector as a list, or a list of numbers as a vector; None for other cells."""
    if isinstance(cell, np.ndarray) and cell.ndim == 1:
        return cell.tolist()
    return np.array(cell, float) if cells.is_number_list(cell) else None


def _equal_columns(table: ColumnChunk, name: str, column: Column, other: str) -> np.ndarray:
    """Return a mask of the rows in which two columns are equal. Two missing cells are equal."""
    second = table.read_column(other)
    numeric = np.isin(column.kinds, NUMERIC_KINDS) & np.isin(second.kinds, NUMERIC_KINDS)
    alike = (column.kinds == second.kinds) & (column.codes == second.codes)
    same: np.ndarray = np.where(numeric, column.numbers == second.numbers, alike)
    unsure = np.flatnonzero(
        same & numeric & ((column.kinds == INEXACT_NUMBER) | (second.kinds == INEXACT_NUMBER))
    )
    if len(unsure):
        pairs = zip(table.read_cells(name, unsure), table.read_cells(other, unsure), strict=True)
        same[unsure] = [_cells_equal(a, b) for a, b in pairs]
    return same


def order_condition(op: ast.cmpop, left: Operand, right: Operand) -> Condition:
    """Return the condition left < right, or that of another order operator `op`."""
    if isinstance(left, Constant):
        if isinstance(right, Constant):
            if not isinstance(left.cell, str | int | float) or (
                isinstance(left.cell, str) != isinstance(right.cell, str)
            ):
                raise _type_mismatch_error(quote_cell(left.cell), quote_cell(right.cell))
            passes = bool(_ORDER_OPERATORS[type(op)](left.cell, right.cell))
            return constant_condition(passes)
        return order_condition(_MIRRORED_OPERATORS[type(op)](), right, left)
    compare, name = _ORDER_OPERATORS[type(op)], left.column
    if isinstance(right, ColumnName):
        return lambda table: _order_columns(table, compare, name, right.column)
    cell = columns.normalize_cell(right.cell)
    kind = columns.cell_kind_code(cell)

    def evaluate_order(table: ColumnChunk) -> FilterResult:
        column = table.read_column(name)
        is_known = column.kinds != MISSING
        if kind == MISSING:
            return FilterResult(np.zeros(len(table), bool), np.zeros(len(table), bool))
        _check_comparable(table, name, [cell], order=True)
        if kind == TEXT:
            return FilterResult(_compare_text(table, name, cell, compare), is_known)
        number = float(columns.encode_column([cell]).numbers[0])
        true = compare(column.numbers, number) & is_known
        if kind == INEXACT_NUMBER or table.cell_kind_counts(name)[INEXACT_NUMBER]:
            near = is_known & (column.numbers == number)
            positions = np.flatnonzero(
                near & ((column.kinds == INEXACT_NUMBER) | (kind == INEXACT_NUMBER))
            )
            true[positions] = [bool(compare(x, cell)) for x in table.read_cells(name, positions)]
        return FilterResult(true, is_known)

    return evaluate_order


def _order_columns(
    table: ColumnChunk, compare: Callable[[Any, Any], Any], first: str, second: str
) -> FilterResult:
    """Compare two columns by order, row by row."""
    a, b = table.read_column(first), table.read_column(second)
    for name in (first, second):
        _check_ordered_kinds(name, table.cell_kind_counts(name))
    texts = [table.cell_kind_counts(name)[TEXT] > 0 for name in (first, second)]
    if texts[0] != texts[1] and all(
        table.cell_kind_counts(name)[1:].any() for name in (first, second)
    ):
        raise _type_mismatch_error(
            f"column {first!r}, which holds {_describe_column_content(table, first)},",
            f"column {second!r}",
        )
    is_known = (a.kinds != MISSING) & (b.kinds != MISSING)
    true = np.asarray(compare(a.numbers, b.numbers)) & is_known
    unsure = is_known & (
        (a.kinds == TEXT) | (a.kinds == INEXACT_NUMBER) | (b.kinds == INEXACT_NUMBER)
    )
    if unsure.any():
        positions = np.flatnonzero(unsure)
        pairs = zip(
            table.read_cells(first, positions), table.read_cells(second, positions), strict=True
        )
        true[positions] = [
            bool(
                compare(
                    *_comparable_moments(first, x, parsing.parse_moment(y))
                    or (columns.normalize_cell(x), columns.normalize_cell(y))
                )
            )
            for x, y in pairs
        ]
    return FilterResult(true, is_known)


def substring_condition(right: Operand, left: Operand) -> Condition:
    """Return the condition that the text `left` is a part of the cells in the column `right`."""
    if isinstance(right, Constant) or not isinstance(left, Constant):
        operand = right.cell if isinstance(right, Constant) else right.column
        raise ArgumentError(
            f"where: in {quote_cell(operand)} is not supported: write column in [1, 2] or "
            "'text' in column"
        )
    part, name = left.cell, right.column
    if not isinstance(part, str):
        raise ArgumentError(
            f"where: {quote_cell(part)} in {name}: only text can be a part of the column's text; "
            f"to compare with a list, write {name} in [{quote_cell(part)}]"
        )

    def evaluate_substring(table: ColumnChunk) -> FilterResult:
        _check_comparable(table, name, [part], order=True)
        is_known = table.read_column(name).kinds != MISSING
        texts, _, text_index, _ = table.read_texts(name)
        return FilterResult(_expand_to_rows([part in text for text in texts], text_index), is_known)

    return evaluate_substring


def _compare_text(
    table: ColumnChunk, name: str, text: str, compare: Callable[[Any, Any], Any]
) -> np.ndarray:
    """Return a mask of the rows whose text, or date, compares like this with a text."""
    texts, dates, text_index, _ = table.read_texts(name)
    # A year or a month stands for its first day.
    part = re.fullmatch(r"\d{4}(-\d\d)?", text, re.ASCII)
    moment = parsing.parse_moment(text + "-01-01"[len(text) - 4 :] if part else text)
    if moment is None and dates and None not in dates:
        raise DtypeError(
            f"where: column {name!r} holds dates and is compared with {quote_cell(text)}: write a "
            "date as ISO text, '2024-01-31' or '2024-01-31 12:00'"
        )
    if moment is None or not dates:
        return _expand_to_rows([compare(x, text) for x in texts], text_index)
    pairs = zip(texts, dates, strict=True)
    return _expand_to_rows(
        [compare(*_comparable_moments(name, date, moment) or (x, text)) for x, date in pairs],
        text_index,
    )


def _expand_to_rows(verdicts: Sequence[Any], text_index: np.ndarray) -> np.ndarray:
    """Return for each row the result for its text. `text_index` is −1 for rows without text."""
    return np.asarray(np.array([*map(bool, verdicts), False])[text_index])


def _comparable_moments(name: str, date: Any, moment: Any) -> tuple[Any, Any] | None:
    """Return a cell and a moment so that they can be compared; None if one is not a moment.

    If the moment has no time zone, the local time of the cell is compared.
    """
    cell_moment = None if isinstance(date, str) else parsing.parse_moment(date)
    if (
        cell_moment is None
        or moment is None
        or isinstance(cell_moment, datetime.time) != isinstance(moment, datetime.time)
    ):
        return None
    if moment.tzinfo is None:
        return cell_moment.replace(tzinfo=None), moment
    if cell_moment.tzinfo is None:
        raise DtypeError(
            f"where: column {name!r} holds times without a time zone and is compared with "
            f"{moment.isoformat()}: write the time without a time zone"
        )
    return cell_moment, moment


def _mark_same_moments(
    table: ColumnChunk, name: str, column: Column, moment: Any, true: np.ndarray
) -> None:
    """Set `true` for the cells that are dates and equal this moment.

    If the moment has no time zone, the local time of a cell is compared.
    """
    first = table.read_cells(name, np.flatnonzero(column.kinds == TEXT)[:1])
    if moment.tzinfo is not None or getattr(first[0] if first else None, "tzinfo", None):
        texts, dates, text_index, _ = table.read_texts(name)
        pairs = [_comparable_moments(name, date, moment) for date in dates or texts]
        true |= _expand_to_rows(
            [pair is not None and pair[0] == pair[1] for pair in pairs], text_index
        )
        return
    for date in parsing.equivalent_dates(moment):
        code = np.uint64(columns.encode_cell(date, TEXT))
        positions = np.flatnonzero((column.kinds == TEXT) & (column.codes == code) & ~true)
        true[positions] = [not isinstance(x, str) for x in table.read_cells(name, positions)]


def _cells_equal(a: Any, b: Any) -> bool:
    """Return whether two cells are equal in a condition."""
    return bool(columns.normalize_cell(a) == columns.normalize_cell(b))


def _check_comparable(
    table: ColumnChunk, name: str, constants: Sequence[Any], order: bool = False
) -> None:
    """Raise an error if the column and the constants can never match, such as text and numbers.

    `order` says that the operator compares by order.
    """
    counts, constant = table.cell_kind_counts(name), quote_cell(constants[0])
    kinds = {columns.cell_kind_code(cell) for cell in constants} - {MISSING}
    texts, numbers = bool(counts[TEXT]), bool(counts[list(NUMERIC_KINDS)].any())
    if order:
        _check_ordered_kinds(name, counts)
        if OTHER in kinds:
            raise ArgumentError(f"where: column {name!r} cannot be compared with {constant}")
    if not kinds or not (texts or numbers):
        return
    if kinds == {OTHER}:
        if not counts[OTHER]:
            kinds_text = columns.describe_kinds(counts)
            raise DtypeError(
                f"where: column {name!r} holds {kinds_text}, which never equals {constant}"
            )
        return
    wants_text, wants_number = TEXT in kinds, bool(kinds & set(NUMERIC_KINDS))
    if order:
        wrong = numbers if wants_text else texts
    else:
        wrong = not ((wants_text and texts) or (wants_number and numbers))
    if wrong:
        raise _type_mismatch_error(
            f"column {name!r}, which holds {_describe_column_content(table, name)},", constant
        )


def _describe_column_content(table: ColumnChunk, name: str) -> str:
    """Return the kinds of cells in a column as text, with an example of its text."""
    kinds = columns.describe_kinds(table.cell_kind_counts(name))
    positions = np.flatnonzero(table.read_column(name).kinds == TEXT)[:_SAMPLE_ROWS]
    texts = [str(columns.normalize_cell(x)) for x in table.read_cells(name, positions)]
    example = next((x for x in texts if not x[:1].isdigit()), texts[0] if texts else None)
    return kinds if example is None else f"{kinds}, such as {quote_cell(example)}"


def _check_ordered_kinds(name: str, counts: np.ndarray) -> None:
    """Raise `ArgumentError` if a column has cells without an order."""
    if counts[OTHER]:
        raise ArgumentError(
            f"where: column {name!r} holds {counts[OTHER]:,} cells that have no order (bytes, "
            "tuples, vectors, lists): compare columns of numbers, text or dates"
        )


def _type_mismatch_error(column: str, other: str) -> DtypeError:
    return DtypeError(
        f"where: {column} is compared with {other}: text cannot be compared with numbers. Write "
        "the constant in the column's type. If the column has a few words among its numbers, list "
        "these words in missing= when the table is read"
    )
