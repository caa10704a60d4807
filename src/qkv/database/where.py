"""Which rows may answer: a condition on columns, as a mapping, an expression, or a function."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database import compare
from qkv.database.compare import Condition, Name, Side, Written
from qkv.errors import ArgumentError, DtypeError, unknown

_EQUAL = {ast.Eq: True, ast.Is: True, ast.NotEq: False, ast.IsNot: False}
_IN = {ast.In: True, ast.NotIn: False}
_QUOTED = re.compile(
    r"""("{3}|'{3}|["'])(?:\\.|(?!\1).)*(?:\1|\Z)|`(?P<name>(?:[^`]|``)*)`(?!`)|`""", re.DOTALL
)
"""A string, to the end where it never closes; a name in backticks, one of its own written twice; a
backtick that opens none."""
_ASSIGNS = re.compile(r"(?<![=<>!])=(?!=)")
_LONGEST_NAME = 1_000
"""Characters of a column's name that may be written without backticks in another Unicode form."""
_SHOWN = 60
"""Characters of a caller's text that an error quotes."""


def condition(where: Any, names: Sequence[str]) -> Condition:
    """`where` as a function of rows.

    A mapping names columns and what they must equal, or a list of what they may equal. Text is an
    expression of Python's comparisons over the columns' names: == != < <= > >= in, is, and or not;
    a name that is no Python name stands in backticks. A missing cell equals None alone, and is
    neither less nor more than anything. Text is not compared with numbers: that is an error.
    """
    if isinstance(where, str):
        return compare.quiet(_Expression(where, names).compiled())
    if isinstance(where, Mapping):
        parts = []
        for name, wish in where.items():
            _known(name, names)
            many = isinstance(wish, list | set | frozenset)
            parts.append(
                compare.member(Name(name), [Written(x) for x in (wish if many else [wish])])
            )
        return compare.quiet(compare.joined(parts, all_of=True))
    raise DtypeError(
        'where must be a mapping of columns, an expression such as "year > 1950", or a function '
        f"of a row, not {type(where).__name__}"
    )


class Among(NamedTuple):
    """A condition on rows that are part of a table: how many cells of each kind its columns have
    in all, which decides what may be compared."""

    where: Any
    census: Mapping[str, np.ndarray]


class _Expression:
    """An expression of Python's grammar, of which comparisons and and, or, not are understood."""

    def __init__(self, text: str, names: Sequence[str]):
        self.text, self.names = text, names
        self.quoted: dict[str, str] = {}
        self.lines: list[bytes] = []
        """Lines of what Python parses: it counts columns in bytes."""

    def compiled(self) -> Condition:
        source, self.quoted = self._plain()
        try:
            # In brackets, so that it may go over several lines; on lines of its own, so that one
            # which closes them itself is told from the others by where it begins.
            source = f"(\n{source.strip()}\n)"
            body = ast.parse(source, mode="eval").body
            self.lines = [line.encode() for line in re.split(r"\r\n|\r|\n", source)]
            if body.lineno == 1:
                raise self._unread(None)
            return self._built(body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ArgumentError):
                raise
            line, at = getattr(error, "lineno", None), getattr(error, "offset", None)
            raise self._unread(at if line == 2 else None) from None

    def _unread(self, at: int | None) -> ArgumentError:
        where = f" at character {at}" if at else ""
        equals = "== for =, in " if _ASSIGNS.search(self.text) else ""
        return ArgumentError(
            f"where: cannot read {_quoted(self.text)}{where}: write {equals}comparisons of "
            f"columns, such as \"year > 1950 and genre == 'fiction'\"{self._advice()}"
        )

    def _advice(self) -> str:
        """What to write for a column whose name is not read as one."""
        quoted = set(self.quoted.values())
        odd = (x for x in self.names if x in self.text and not x.isidentifier() and x not in quoted)
        longest = max(odd, key=len, default=None)
        return "" if longest is None else f"; column {longest!r} stands in backticks: `{longest}`"

    def _plain(self) -> tuple[str, dict[str, str]]:
        """The text with `column names` in backticks made into names that no column has."""
        quoted: dict[str, str] = {}

        def named(found: re.Match[str]) -> str:
            if found[0] == "`":
                raise ArgumentError(f"where: a backtick in {_quoted(self.text)} is not closed")
            if found["name"] is None:
                return found[0]
            tried = (f"_column_{len(quoted)}_{i}" for i in range(len(self.names) + 1))
            place = next(free for free in tried if free not in self.names)
            quoted[place] = found["name"].replace("``", "`")
            return f" {place} "

        return _QUOTED.sub(named, self.text), quoted

    def _built(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(op, values):
                return compare.joined(list(map(self._built, values)), isinstance(op, ast.And))
            case ast.UnaryOp(ast.Not(), operand):
                inner = self._built(operand)
                return lambda table: ~inner(table)
            case ast.Compare(left, ops, comparators):
                sides = [left, *comparators]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return compare.joined([self._pair(op, a, b) for op, a, b in pairs], all_of=True)
            case ast.Name():
                return compare.truthy(self._column(node))
            case ast.Constant(bool() as value):
                return compare.constantly(value)
        raise self._strange(node)

    def _pair(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Condition:
        if type(op) in _IN:
            wished = _IN[type(op)]
            if isinstance(right, ast.List | ast.Tuple | ast.Set):
                found = compare.member(self._side(left), list(map(self._side, right.elts)))
            else:
                found = compare.contains(self._side(right), self._side(left))
        elif type(op) in _EQUAL:
            wished, found = _EQUAL[type(op)], compare.member(self._side(left), [self._side(right)])
        else:
            return compare.order(op, self._side(left), self._side(right))
        return found if wished else lambda table: ~found(table)

    def _side(self, node: ast.expr) -> Side:
        match node:
            case ast.Name():
                return Name(self._column(node))
            case ast.Constant(value) if not isinstance(value, complex | type(...)):
                return Written(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return Written(-number)
            case ast.UnaryOp(ast.UAdd(), ast.Constant(int() | float() as number)):
                return Written(number)
        raise self._strange(node)

    def _column(self, node: ast.Name) -> str:
        """The column that is written there, or the only one that looks the same: to Python µ is μ,
        and é is one letter, where a table may have both."""
        column = self.quoted.get(node.id)
        if column is None:
            # As it was written: ast.get_source_segment would split all lines for each name.
            column = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            if column not in self.names:
                # Longer names are no Python names, and would take long to normalize.
                names = [x for x in self.names if len(x) <= _LONGEST_NAME]
                alike = [x for x in names if unicodedata.normalize("NFKC", x) == node.id]
                column = alike[0] if len(alike) == 1 else column
        _known(column, self.names, "" if node.id in self.quoted else " Text stands in quotes.")
        return column

    def _strange(self, node: ast.expr) -> ArgumentError:
        told = ast.unparse(node)
        for place, column in self.quoted.items():
            told = told.replace(place, f"`{column}`")
        return ArgumentError(
            f"where: {_quoted(told)} in {_quoted(self.text)} is not understood: only "
            f"columns, constants, comparisons, in, and, or, not{self._advice()}"
        )


def _known(name: str, names: Sequence[str], more: str = "") -> None:
    if name not in names:
        told = unknown("column", name, names)
        raise told if "did you mean" in str(told) else ArgumentError(f"{told}{more}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
