"""Which rows may answer: a condition on columns, as a mapping, an expression, or a function."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database.filter import comparisons
from qkv.database.filter.comparisons import ColumnName, Condition, Constant, Operand
from qkv.errors import ArgumentError, DtypeError, unknown_name_error
from qkv.util.formatting import quote_cell

_EQUALITY_OPERATORS = {ast.Eq: True, ast.Is: True, ast.NotEq: False, ast.IsNot: False}
_MEMBERSHIP_OPERATORS = {ast.In: True, ast.NotIn: False}
_TOKENS = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:\\.|(?P=quote){2}|(?!(?P=quote)).)*)(?:(?P=quote)|\Z)"""
    r"""|`(?P<name>(?:[^`]|``)*)`(?!`)|`|(?P<word>[^\W\d]\w*)|(?P<sign><>|(?<![=<>!:])=(?!=))""",
    re.DOTALL,
)
"""A string, to the end of the text if it never closes, with a quote written twice as in SQL; a name
in backticks, with a backtick written twice; a backtick without its partner; a word; SQL's = and
<>."""
_SQL_SIGNS = {"=": "==", "<>": "!="}
_SQL_WORDS = {
    **{word: word for word in ("and", "or", "not", "in", "is")},
    **{"null": "None", "none": "None", "true": "True", "false": "False"},
}
"""Words that SQL users write in any case, as Python has them."""
_LONGEST_NAME = 1_000
"""Characters of a column's name that may be written without backticks in another Unicode form."""
_HELP = (
    (re.compile(r"\bbetween\b", re.I), "for between, write 1900 <= year <= 1950"),
    (re.compile(r"\bi?like\b", re.I), "for like, write 'part of a text' in column"),
    (re.compile(r"[&|]"), "write and for &, or for |"),
    (re.compile(r"=<|=>"), "write <= and >="),
    (re.compile(r"!(?!=)"), "write not for !"),
)
"""What people write who know another language, and what to write instead."""
_MAX_QUOTED_CHARACTERS = 60
"""Characters of a caller's text that an error quotes."""


def compile_condition(where: Any, names: Sequence[str]) -> Condition:
    """`where` as a function of rows.

    A mapping names columns and what they must equal, or a list of what they may equal. Text is an
    expression of Python's comparisons over the columns' names: == != < <= > >= in, is, and or not.
    SQL's =, <>, AND, OR, NOT, IN, IS NULL and quotes written twice mean the same here. A name that
    is no Python name stands in backticks. A missing cell equals None alone, and is neither less nor
    more than anything. Text is not compared with numbers: that is an error.
    """
    if isinstance(where, str):
        return comparisons.suppress_nan_warnings(_Expression(where, names).compile_expression())
    if isinstance(where, Mapping):
        parts = []
        for name, wish in where.items():
            _check_column(name, names)
            many = isinstance(wish, list | set | frozenset)
            parts.append(
                comparisons.membership_condition(
                    ColumnName(name), [Constant(x) for x in (wish if many else [wish])]
                )
            )
        return comparisons.suppress_nan_warnings(comparisons.combine_conditions(parts, all_of=True))
    raise DtypeError(
        'where must be a mapping of columns, an expression such as "year > 1950", or a function '
        f"of a row, not {type(where).__name__}"
    )


def columns_in(where: Any, names: Sequence[str]) -> list[str]:
    """The columns that a condition looks at, in its order; none for a function.

    >>> columns_in("year > 1950 and `first name` = 'Li'", ["first name", "year"])
    ['year', 'first name']
    """
    if isinstance(where, Mapping):
        return list(where)
    return _Expression(where, names).columns() if isinstance(where, str) else []


def as_text(where: Any) -> str:
    """A condition as an error or a hint quotes it."""
    if callable(where):
        return f"where={getattr(where, '__name__', type(where).__name__)}"
    return f"where={_quote_text(where) if isinstance(where, str) else quote_cell(where)}"


class PartialTableCondition(NamedTuple):
    """A condition on rows that are part of a table: how many cells of each kind its columns have
    in all, which decides what may be compared."""

    where: Any
    cell_kind_counts: Mapping[str, np.ndarray]


class _Expression:
    """An expression of Python's grammar, of which comparisons and and, or, not are understood."""

    def __init__(self, text: str, names: Sequence[str]):
        self.text, self.names = text, names
        self.quoted_columns: dict[str, str] = {}
        self.lines: list[bytes] = []
        """Lines of what Python parses: it counts columns in bytes."""

    def compile_expression(self) -> Condition:
        try:
            return self._build_condition(self._parsed())
        except (ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise self._syntax_error(None) from None

    def columns(self) -> list[str]:
        """The columns that are named, in their order."""
        nodes = (node for node in ast.walk(self._parsed()) if isinstance(node, ast.Name))
        ordered = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
        return list(dict.fromkeys(map(self._resolve_column, ordered)))

    def _parsed(self) -> ast.expr:
        source, self.quoted_columns = self._replace_quoted_names()
        try:
            # In brackets, so that it may go over several lines; on lines of its own, so that one
            # which closes them itself is told from the others by where it begins.
            bracketed = f"(\n{source.strip()}\n)"
            body = ast.parse(bracketed, mode="eval").body
            self.lines = [line.encode() for line in re.split(r"\r\n|\r|\n", bracketed)]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, at = getattr(error, "lineno", None), getattr(error, "offset", None)
            same = line == 2 and source == self.text
            raise self._syntax_error(at if same else None) from None
        if isinstance(body, ast.Tuple):
            raise self._syntax_error(None, "write and, or or, between conditions, not a comma")
        if body.lineno == 1:
            raise self._syntax_error(None)
        return body

    def _syntax_error(self, at: int | None, instead: str = "") -> ArgumentError:
        where = f" at character {at}" if at else ""
        write = "write comparisons of columns, such as \"year > 1950 and genre == 'fiction'\""
        return ArgumentError(
            f"where: cannot read {_quote_text(self.text)}{where}: "
            f"{instead or self._help() or write}"
            f"{self._backtick_advice()}"
        )

    def _help(self) -> str:
        """What to write for the words and signs of other languages, outside of quotes."""
        bare = _TOKENS.sub(lambda x: x[0] if x["word"] or x["sign"] else " ", self.text)
        return "; ".join(help for sign, help in _HELP if sign.search(bare))

    def _backtick_advice(self) -> str:
        """What to write for a column whose name is not read as one."""
        quoted = set(self.quoted_columns.values())
        odd = (x for x in self.names if x in self.text and not x.isidentifier() and x not in quoted)
        longest = max(odd, key=len, default=None)
        return "" if longest is None else f"; column {longest!r} stands in backticks: `{longest}`"

    def _replace_quoted_names(self) -> tuple[str, dict[str, str]]:
        """The text as Python writes it, with `column names` in backticks made into names that no
        column has."""
        quoted: dict[str, str] = {}

        def replace_name(found: re.Match[str]) -> str:
            if found[0] == "`":
                raise ArgumentError(f"where: a backtick in {_quote_text(self.text)} is not closed")
            if found["sign"]:
                return _SQL_SIGNS[found["sign"]]
            if found["word"]:
                # A column of this very name is meant first; None, True and False are Python's.
                known = found["word"] in self.names or found["word"] in ("None", "True", "False")
                return found[0] if known else _SQL_WORDS.get(found["word"].lower(), found[0])
            if found["name"] is None:
                twice = (found["quote"] or "") * 2
                if twice and twice in found["text"]:
                    end = found[0][1 + len(found["text"]) :]
                    return found["quote"] + _unescaped(found["text"], found["quote"]) + end
                return found[0]
            tried = (f"_column_{len(quoted)}_{i}" for i in range(len(self.names) + 1))
            place = next(free for free in tried if free not in self.names)
            quoted[place] = found["name"].replace("``", "`")
            return f" {place} "

        return _TOKENS.sub(replace_name, self.text), quoted

    def _build_condition(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(op, values):
                return comparisons.combine_conditions(
                    list(map(self._build_condition, values)), isinstance(op, ast.And)
                )
            case ast.UnaryOp(ast.Not(), operand):
                inner = self._build_condition(operand)
                return lambda table: ~inner(table)
            case ast.Compare(left, ops, comparators):
                sides = [left, *comparators]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return comparisons.combine_conditions(
                    [self._build_comparison(op, a, b) for op, a, b in pairs], all_of=True
                )
            case ast.Name():
                return comparisons.truth_condition(self._resolve_column(node))
            case ast.Constant(bool() as value):
                return comparisons.constant_condition(value)
        raise self._unsupported_error(node)

    def _build_comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Condition:
        self._refuse_quoted_columns(left, right)
        if type(op) in _MEMBERSHIP_OPERATORS:
            wished = _MEMBERSHIP_OPERATORS[type(op)]
            if isinstance(right, ast.List | ast.Tuple | ast.Set):
                found = comparisons.membership_condition(
                    self._build_operand(left), list(map(self._build_operand, right.elts))
                )
            else:
                found = comparisons.substring_condition(
                    self._build_operand(right), self._build_operand(left)
                )
        elif type(op) in _EQUALITY_OPERATORS:
            wished, found = (
                _EQUALITY_OPERATORS[type(op)],
                comparisons.membership_condition(
                    self._build_operand(left), [self._build_operand(right)]
                ),
            )
        else:
            return comparisons.order_condition(
                op, self._build_operand(left), self._build_operand(right)
            )
        return found if wished else lambda table: ~found(table)

    def _refuse_quoted_columns(self, *sides: ast.expr) -> None:
        """Refuse a comparison of two constants of which one is a column's name in quotes, as SQL
        and JSON write names: it would find nothing without a word."""
        if all(isinstance(side, ast.Constant) for side in sides):
            for side in sides:
                if isinstance(name := getattr(side, "value", None), str) and name in self.names:
                    plain = name if name.isidentifier() else f"`{name.replace('`', '``')}`"
                    raise ArgumentError(
                        f"where: {_quote_text(self.text)} compares two constants: quotes are for "
                        f"text; write the column as {plain}"
                    )

    def _build_operand(self, node: ast.expr) -> Operand:
        match node:
            case ast.Name():
                return ColumnName(self._resolve_column(node))
            case ast.Constant(value) if not isinstance(value, complex | type(...)):
                return Constant(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return Constant(-number)
            case ast.UnaryOp(ast.UAdd(), ast.Constant(int() | float() as number)):
                return Constant(number)
        raise self._unsupported_error(node)

    def _resolve_column(self, node: ast.Name) -> str:
        """The column that is written there, or the only one that looks the same: to Python µ is μ,
        and é is one letter, where a table may have both."""
        column = self.quoted_columns.get(node.id)
        if column is None:
            # As it was written: ast.get_source_segment would split all lines for each name.
            column = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            if column not in self.names:
                # Longer names are no Python names, and would take long to normalize.
                names = [x for x in self.names if len(x) <= _LONGEST_NAME]
                alike = [x for x in names if unicodedata.normalize("NFKC", x) == node.id]
                column = alike[0] if len(alike) == 1 else column
        _check_column(
            column, self.names, "" if node.id in self.quoted_columns else " Text stands in quotes."
        )
        return column

    def _unsupported_error(self, node: ast.expr) -> ArgumentError:
        told = ast.unparse(node)
        for place, column in self.quoted_columns.items():
            told = told.replace(place, f"`{column}`")
        only = "only columns, constants, comparisons, in, and, or, not"
        return ArgumentError(
            f"where: {_quote_text(told)} in {_quote_text(self.text)} is not understood: "
            f"{self._help() or only}{self._backtick_advice()}"
        )


def _check_column(name: str, names: Sequence[str], more: str = "") -> None:
    if name not in names:
        told = unknown_name_error("column", name, names)
        raise told if "did you mean" in str(told) else ArgumentError(f"{told}{more}")


def _unescaped(text: str, quote: str) -> str:
    """The inside of a string with each quote that is written twice as Python escapes it."""
    return re.sub(rf"\\.|{quote}{quote}", lambda x: x[0] if x[0][0] == "\\" else f"\\{quote}", text)


def _quote_text(text: str) -> str:
    return repr(
        text if len(text) <= _MAX_QUOTED_CHARACTERS else text[: _MAX_QUOTED_CHARACTERS - 1] + "…"
    )
