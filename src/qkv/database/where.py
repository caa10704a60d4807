"""Which rows may answer: a condition on columns, as a mapping, an expression, or a function."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from qkv.database import cells, columns
from qkv.database.columns import MISSING, NUMBERS, OTHER, TEXT, WIDE, Column
from qkv.errors import ArgumentError, DtypeError, unknown

_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUAL = {ast.Eq: True, ast.Is: True, ast.NotEq: False, ast.IsNot: False}
_IN = {ast.In: True, ast.NotIn: False}
_TURNED: dict[type, type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
_SAMPLE = 4096
"""Rows whose texts are looked at before all are sorted by their texts."""
_SHOWN = 60
"""Characters of a caller's text that an error quotes."""


class Table(Protocol):
    """Some rows whose columns are looked at."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> Column: ...

    def cells(self, name: str, at: np.ndarray) -> list[Any]:
        """The cells themselves of the rows at these places."""

    def census(self, name: str) -> np.ndarray:
        """How many cells of each kind the whole column has, (6,), in these rows and all others."""


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


Condition = Callable[[Table], Passed]


def condition(where: Any, names: Sequence[str]) -> Condition | None:
    """`where` as a function of rows, or None where every row passes.

    A mapping names columns and what they must equal, or a list of what they may equal. Text is an
    expression of Python's comparisons over the columns' names: == != < <= > >= in, is, and or not;
    a name that is no Python name stands in backticks. A missing cell equals None alone, and is
    neither less nor more than anything. Text is not compared with numbers: that is an error.
    """
    if where is None:
        return None
    if isinstance(where, str):
        return _quiet(_Expression(where, names).compiled())
    if isinstance(where, Mapping):
        parts = []
        for name, wish in where.items():
            _known(name, names)
            many = isinstance(wish, list | set | frozenset)
            parts.append(_member(_Name(name), [_Constant(x) for x in (wish if many else [wish])]))
        return _quiet(_joined(parts, all_of=True))
    raise DtypeError(
        'where must be a mapping of columns, an expression such as "year > 1950", or a function '
        f"of a row, not {type(where).__name__}"
    )


class _Name(NamedTuple):
    column: str


class _Constant(NamedTuple):
    cell: Any


_Side = _Name | _Constant


class _Expression:
    """An expression of Python's grammar, of which comparisons and and, or, not are understood."""

    def __init__(self, text: str, names: Sequence[str]):
        self.text, self.names = text, names

    def compiled(self) -> Condition:
        source, self.quoted = self._plain()
        try:
            tree = ast.parse(source.strip(), mode="eval")
            return self._built(tree.body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise self._unread(getattr(error, "offset", None)) from None

    def _unread(self, at: int | None) -> ArgumentError:
        where = f" at character {at}" if at else ""
        return ArgumentError(
            f"where: cannot read {_quoted(self.text)}{where}: write comparisons of columns, such "
            "as \"year > 1950 and genre == 'fiction'\""
        )

    def _plain(self) -> tuple[str, dict[str, str]]:
        """The text with `column names` in backticks made into names that no column has."""
        if "`" not in self.text:
            return self.text, {}
        parts: list[str] = []
        quoted: dict[str, str] = {}
        at = 0
        while at < len(self.text):
            letter = self.text[at]
            if letter in "'\"":
                end = _closing(self.text, at)
            elif letter == "`":
                end = self.text.find("`", at + 1) + 1
                if not end:
                    raise ArgumentError(f"where: a backtick in {_quoted(self.text)} is not closed")
                place = next(
                    name
                    for i in range(len(self.names) + 1)
                    if (name := f"_column_{len(quoted)}_{i}") not in self.names
                )
                quoted[place] = self.text[at + 1 : end - 1]
                parts.append(place)
                at = end
                continue
            else:
                end = at + 1
            parts.append(self.text[at:end])
            at = end
        return "".join(parts), quoted

    def _built(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(op, values):
                return _joined(list(map(self._built, values)), isinstance(op, ast.And))
            case ast.UnaryOp(ast.Not(), operand):
                inner = self._built(operand)
                return lambda table: ~inner(table)
            case ast.Compare(left, ops, comparators):
                sides = [left, *comparators]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return _joined([self._pair(op, a, b) for op, a, b in pairs], all_of=True)
            case ast.Name(name):
                return _truthy(self._column(name))
            case ast.Constant(bool() as value):
                return lambda table: _all(len(table), value)
        raise self._strange(node)

    def _pair(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Condition:
        if type(op) in _IN:
            wished = _IN[type(op)]
            if isinstance(right, ast.List | ast.Tuple | ast.Set):
                found = _member(self._side(left), list(map(self._side, right.elts)))
            else:
                found = _contains(self._side(right), self._side(left))
        elif type(op) in _EQUAL:
            wished, found = _EQUAL[type(op)], _equal(self._side(left), self._side(right))
        else:
            return _order(op, self._side(left), self._side(right))
        return found if wished else lambda table: ~found(table)

    def _side(self, node: ast.expr) -> _Side:
        match node:
            case ast.Name(name):
                return _Name(self._column(name))
            case ast.Constant(value) if not isinstance(value, complex | type(...)):
                return _Constant(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return _Constant(-number)
        raise self._strange(node)

    def _column(self, name: str) -> str:
        column = self.quoted.get(name, name)
        _known(column, self.names)
        return column

    def _strange(self, node: ast.expr) -> ArgumentError:
        return ArgumentError(
            f"where: {_quoted(ast.unparse(node))} in {_quoted(self.text)} is not understood: only "
            "columns, constants, comparisons, in, and, or, not"
        )


def _known(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise unknown("column", name, names)


def _closing(text: str, at: int) -> int:
    """Where the string that opens here ends; the end of the text where it never does."""
    quote = text[at] * 3 if text.startswith(text[at] * 3, at) else text[at]
    at += len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    return len(text)


def _quoted(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _quiet(passes: Condition) -> Condition:
    """Without warnings: the codes of text, taken for numbers, may be NaN of any kind."""

    def passed(table: Table) -> Passed:
        with np.errstate(invalid="ignore"):
            return passes(table)

    return passed


def _joined(parts: Sequence[Condition], all_of: bool) -> Condition:
    def passed(table: Table) -> Passed:
        found = _all(len(table), all_of)
        for part in parts:
            found = found & part(table) if all_of else found | part(table)
        return found

    return passed


def _all(rows: int, passes: bool) -> Passed:
    return Passed(np.full(rows, passes), np.ones(rows, bool))


def _truthy(name: str) -> Condition:
    """Cells that Python calls true: not 0, not False, not an empty text."""

    def passed(table: Table) -> Passed:
        column = table.column(name)
        empty = _equals(table, name, column, 0) | _equals(table, name, column, "")
        known = column.kinds != MISSING
        return Passed(known & ~empty, known)

    return passed


def _equal(left: _Side, right: _Side) -> Condition:
    return _member(left, [right])


def _member(left: _Side, members: Sequence[_Side]) -> Condition:
    """left == member, for any of them. Of a constant and constants too."""
    if isinstance(left, _Constant):
        names = [side for side in members if isinstance(side, _Name)]
        if any(_same(left.cell, side.cell) for side in members if isinstance(side, _Constant)):
            return lambda table: _all(len(table), True)
        return _joined([_member(name, [left]) for name in names], all_of=False)
    name = left.column

    def passed(table: Table) -> Passed:
        column, true = table.column(name), np.zeros(len(table), bool)
        constants = [side.cell for side in members if isinstance(side, _Constant)]
        if constants and len(constants) == len(members):
            _comparable(name, table.census(name), constants)
        for side in members:
            if isinstance(side, _Constant):
                true |= _equals(table, name, column, side.cell)
            else:
                true |= _alike(table, name, column, side.column)
        return Passed(true, np.ones(len(table), bool))

    return passed


def _equals(table: Table, name: str, column: Column, cell: Any) -> np.ndarray:
    """Which cells equal a constant."""
    kind = columns.kind_of(cell)
    if kind == MISSING:
        return np.asarray(column.kinds == MISSING)
    code = np.uint64(columns.code(cell, kind))
    if kind not in NUMBERS:
        return np.asarray((column.kinds == kind) & (column.codes == code))
    near: np.ndarray = column.numbers == code.view(np.float64)
    near &= (column.kinds != MISSING) & (column.kinds != TEXT) & (column.kinds != OTHER)
    # Two numbers that are no floats may share the float that is nearest to both.
    unsure = np.flatnonzero(near & (column.kinds == WIDE)) if kind == WIDE else None
    near &= (column.kinds == WIDE) if kind == WIDE else (column.kinds != WIDE)
    if unsure is not None and len(unsure):
        near[unsure] = [_same(x, cell) for x in table.cells(name, unsure)]
    return near


def _alike(table: Table, name: str, column: Column, other: str) -> np.ndarray:
    """Which cells of two columns are equal."""
    second = table.column(other)
    numeric = np.isin(column.kinds, NUMBERS) & np.isin(second.kinds, NUMBERS)
    same: np.ndarray = np.where(
        numeric,
        column.numbers == second.numbers,
        (column.kinds == second.kinds) & (column.codes == second.codes),
    )
    unsure = np.flatnonzero(same & numeric & ((column.kinds == WIDE) | (second.kinds == WIDE)))
    if len(unsure):
        pairs = zip(table.cells(name, unsure), table.cells(other, unsure), strict=True)
        same[unsure] = [_same(a, b) for a, b in pairs]
    return same


def _order(op: ast.cmpop, left: _Side, right: _Side) -> Condition:
    """left < right, and the like."""
    if isinstance(left, _Constant):
        if isinstance(right, _Constant):
            if not isinstance(left.cell, str | int | float) or (
                isinstance(left.cell, str) != isinstance(right.cell, str)
            ):
                raise _unlike(_cut(repr(left.cell)), _cut(repr(right.cell)))
            passes = bool(_ORDER[type(op)](left.cell, right.cell))
            return lambda table: _all(len(table), passes)
        return _order(_TURNED[type(op)](), right, left)
    compare, name = _ORDER[type(op)], left.column
    if isinstance(right, _Name):
        return lambda table: _ordered_columns(table, compare, name, right.column)
    cell = columns.normal(right.cell)
    kind = columns.kind_of(cell)

    def passed(table: Table) -> Passed:
        column = table.column(name)
        known = column.kinds != MISSING
        if kind == MISSING:
            return Passed(np.zeros(len(table), bool), np.zeros(len(table), bool))
        _comparable(name, table.census(name), [cell], order=True)
        if kind == TEXT:
            return Passed(_by_text(table, name, column, lambda text: compare(text, cell)), known)
        number = float(columns.coded([cell]).numbers[0])
        true = compare(column.numbers, number) & known
        unsure = known & (column.numbers == number) & ((column.kinds == WIDE) | (kind == WIDE))
        if unsure.any():
            at = np.flatnonzero(unsure)
            true[at] = [bool(compare(x, cell)) for x in table.cells(name, at)]
        return Passed(true, known)

    return passed


def _ordered_columns(
    table: Table, compare: Callable[[Any, Any], Any], one: str, two: str
) -> Passed:
    a, b = table.column(one), table.column(two)
    for name in (one, two):
        _only_comparable(name, table.census(name))
    texts = [table.census(name)[TEXT] > 0 for name in (one, two)]
    if texts[0] != texts[1] and all(table.census(name)[1:].any() for name in (one, two)):
        raise _unlike(f"column {one!r}", f"column {two!r}")
    known = (a.kinds != MISSING) & (b.kinds != MISSING)
    true = np.asarray(compare(a.numbers, b.numbers)) & known
    unsure = known & ((a.kinds == TEXT) | (a.kinds == WIDE) | (b.kinds == WIDE))
    if unsure.any():
        at = np.flatnonzero(unsure)
        pairs = zip(table.cells(one, at), table.cells(two, at), strict=True)
        true[at] = [bool(compare(columns.normal(x), columns.normal(y))) for x, y in pairs]
    return Passed(true, known)


def _contains(right: _Side, left: _Side) -> Condition:
    """left in right: a part of a text."""
    if isinstance(right, _Constant) or not isinstance(left, _Constant):
        wish = "a list of what a column may be, or a text in a column"
        told = right.cell if isinstance(right, _Constant) else right.column
        raise ArgumentError(f"where: in {_quoted(str(told))} is not understood: in needs {wish}")
    part, name = left.cell, right.column
    if not isinstance(part, str):
        raise ArgumentError(
            f"where: {part!r} in {name}: only text can be a part of a column's text; for a list of "
            f"what it may be, write {name} in [{part!r}]"
        )

    def passed(table: Table) -> Passed:
        _comparable(name, table.census(name), [part], order=True)
        column = table.column(name)
        return Passed(
            _by_text(table, name, column, lambda text: part in text), column.kinds != MISSING
        )

    return passed


def _by_text(table: Table, name: str, column: Column, passes: Callable[[str], Any]) -> np.ndarray:
    """What a function says of each text, asked once for each different one."""
    true, at = np.zeros(len(table), bool), np.flatnonzero(column.kinds == TEXT)
    # Most columns of text have few different ones, which the first rows have already.
    size = _SAMPLE
    while len(at):
        rows, size = at[:size], len(at)
        codes, first = np.unique(column.codes[rows], return_index=True)
        texts = table.cells(name, rows[first])
        verdicts = np.fromiter((bool(passes(columns.normal(x))) for x in texts), bool, len(texts))
        place = np.minimum(np.searchsorted(codes, column.codes[at]), len(codes) - 1)
        known = codes[place] == column.codes[at]
        true[at[known]] = verdicts[place[known]]
        at = at[~known]
    return true


def _same(a: Any, b: Any) -> bool:
    return bool(columns.normal(a) == columns.normal(b))


def _comparable(
    name: str, census: np.ndarray, constants: Sequence[Any], order: bool = False
) -> None:
    """Refuse to compare text with numbers, which would find nothing without a word."""
    kinds = {columns.kind_of(cell) for cell in constants} - {MISSING}
    texts, numbers = census[TEXT] > 0, census[list(NUMBERS)].any()
    if order:
        _only_comparable(name, census)
        if OTHER in kinds:
            raise ArgumentError(f"where: column {name!r} is not compared with {constants[0]!r}")
    if kinds == {OTHER} and not census[OTHER] and (texts or numbers):
        raise DtypeError(
            f"where: column {name!r} holds {columns.told(census)}, and never equals "
            f"{cells.shown(constants[0])}"
        )
    if not kinds or kinds == {OTHER} or not (texts or numbers):
        return
    wants_text = TEXT in kinds
    wants_number = bool(kinds & set(NUMBERS))
    wrong = (numbers if wants_text else texts) if order else None
    if wrong is None:
        wrong = not ((wants_text and texts) or (wants_number and numbers))
    if wrong:
        raise _unlike(f"column {name!r}", _cut(repr(constants[0])), columns.told(census))


def _only_comparable(name: str, census: np.ndarray) -> None:
    if census[OTHER]:
        raise ArgumentError(
            f"where: column {name!r} holds {census[OTHER]:,} cells that have no order (bytes, "
            "tuples, vectors, lists): compare columns of numbers, text or dates"
        )


def _unlike(one: str, two: str, held: str = "") -> DtypeError:
    holds = f" holds {held}" if held else ""
    return DtypeError(
        f"where: {one}{holds} and is compared with {two}: text is not compared with numbers; write "
        "the constant as the column has it, or make the column numbers, where missing cells are "
        "empty"
    )
