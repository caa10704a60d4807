"""The conditions of `where`: mappings and expressions, compiled to functions of a chunk of rows."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database.filter import comparisons
from qkv.database.filter.comparisons import (
    ColumnName,
    Condition,
    Constant,
    FilterResult,
    Operand,
)
from qkv.database.table.column_chunk import ColumnChunk
from qkv.errors import ArgumentError, DtypeError, unknown_name_error
from qkv.util.formatting import quote_cell

_EQUALITY_OPERATORS = {ast.Eq: True, ast.Is: True, ast.NotEq: False, ast.IsNot: False}
_MEMBERSHIP_OPERATORS = {ast.In: True, ast.NotIn: False}
_TOKENS = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:\\.|(?P=quote){2}|(?!(?P=quote)).)*)(?:(?P=quote)|\Z)"""
    r"""|`(?P<name>(?:[^`]|``)*)`(?!`)|`|(?P<word>[^\W\d]\w*)|(?P<sign><>|(?<![=<>!:])=(?!=))""",
    re.DOTALL,
)
"""One token of an expression:

- a string, up to the end of the text if it is not closed; a doubled quote is a quote, as in SQL
- a name in backticks, in which a doubled backtick is a backtick; or a single backtick
- a word
- SQL's = or <>
"""
_SQL_SIGNS = {"=": "==", "<>": "!="}
_SQL_WORDS = {
    **{word: word for word in ("and", "or", "not", "in", "is")},
    **{"null": "None", "none": "None", "true": "True", "false": "False"},
}
"""Words of SQL, in lower case, and their form in Python."""
_LONGEST_NAME = 1_000
"""Longer column names are not compared in their normalized Unicode form, which would be slow."""
_FOREIGN_SYNTAX_HINTS = (
    (re.compile(r"\bbetween\b", re.I), "for between, write 1900 <= year <= 1950"),
    (re.compile(r"\bi?like\b", re.I), "for like, write 'part of a text' in column"),
    (re.compile(r"[&|]"), "write and for &, or for |"),
    (re.compile(r"=<|=>"), "write <= and >="),
    (re.compile(r"\b\d{4}-\d\d?-\d\d?\b"), "write a date in quotes, as '2024-01-31'"),
    (re.compile(r"\b\d\d?\.\d\d?\.\d{4}\b"), "write a date in quotes, as '2024-01-31'"),
    (re.compile(r"!(?!=)"), "write not for !"),
)
"""Syntax of other languages, and what to write instead."""
_MAX_QUOTED_CHARACTERS = 60
"""An error quotes this number of characters of an expression."""


class CompiledCondition(NamedTuple):
    """A function that evaluates a condition on a chunk of rows, with what a cache of results needs.

    `identity` is the same for conditions with the same meaning, or None if results must not be
    cached.
    `columns` are the columns that the condition reads.
    """

    evaluate: Condition
    identity: Hashable
    columns: list[str]

    def __call__(self, table: ColumnChunk) -> FilterResult:
        return self.evaluate(table)


def compile_condition(where: Any, names: Sequence[str]) -> CompiledCondition:
    """Compile `where` to a function that evaluates it on a chunk of rows.

    A mapping gives for each column the cell that it must equal, or a list of such cells.

    A text is an expression of column names, constants, and Python's == != < <= > >= in, is, and,
    or, not. SQL's =, <>, AND, OR, NOT, IN, IS NULL and doubled quotes are accepted too. A column
    name that is not a Python identifier is written in backticks.

    A missing cell equals only None, and passes no order comparison. Comparing text with numbers is
    an error.
    """
    if isinstance(where, str):
        return _Expression(where, names).compile_expression()
    if isinstance(where, Mapping):
        parts = []
        for name, expected in where.items():
            _check_column(name, names)
            is_list = isinstance(expected, list | set | frozenset)
            members = [Constant(x) for x in (expected if is_list else [expected])]
            parts.append(comparisons.membership_condition(ColumnName(name), members))
        evaluate = comparisons.combine_conditions(parts, all_of=True)
        return CompiledCondition(comparisons.suppress_nan_warnings(evaluate), None, list(where))
    raise DtypeError(
        'where must be a mapping of columns, an expression such as "year > 1950", or a function '
        f"of a row, not {type(where).__name__}"
    )


def columns_in(where: Any, names: Sequence[str]) -> list[str]:
    """Return the columns that a condition reads, in their order; [] for a function.

    >>> columns_in("year > 1950 and `first name` = 'Li'", ["first name", "year"])
    ['year', 'first name']
    """
    if isinstance(where, Mapping):
        return list(where)
    return _Expression(where, names).columns() if isinstance(where, str) else []


def as_text(where: Any) -> str:
    """Return a condition as errors and hints show it."""
    if callable(where):
        return f"where={getattr(where, '__name__', type(where).__name__)}"
    return f"where={_quote_text(where) if isinstance(where, str) else quote_cell(where)}"


class PartialTableCondition(NamedTuple):
    """A condition for a shard, with the counts of cell kinds in the whole table.

    The counts decide which comparisons are errors. So all shards raise the same errors.
    """

    where: Any
    cell_kind_counts: Mapping[str, np.ndarray]


class _Expression:
    """An expression in Python's grammar: comparisons, combined by and, or, not."""

    def __init__(self, text: str, names: Sequence[str]):
        self.text, self.names = text, names
        self.quoted_columns: dict[str, str] = {}
        self.lines: list[bytes] = []
        """The lines of the parsed text as bytes, because `ast` counts offsets in bytes."""

    def compile_expression(self) -> CompiledCondition:
        try:
            body = self._parse_where()
            evaluate = comparisons.suppress_nan_warnings(self._build_condition(body))
            names: list[ast.Name] = []
            # The same placeholder of a quoted name can stand for different columns in two texts.
            identity = (_identify_node(body, names), *self.quoted_columns.items())
            return CompiledCondition(evaluate, identity, self._resolve_columns(names))
        except (ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise self._syntax_error(None) from None

    def columns(self) -> list[str]:
        """Return the columns in the expression, in their order."""
        names: list[ast.Name] = []
        _identify_node(self._parse_where(), names)
        return self._resolve_columns(names)

    def _resolve_columns(self, names: Sequence[ast.Name]) -> list[str]:
        return list(dict.fromkeys(map(self._resolve_column, names)))

    def _parse_where(self) -> ast.expr:
        """Parse the text; raise `ArgumentError` if it is not an expression."""
        source, self.quoted_columns = self._replace_quoted_names()
        try:
            # Brackets allow line breaks. If the text itself closes the bracket, the expression
            # begins on line 1 and is rejected below.
            bracketed = f"(\n{source.strip()}\n)"
            body = ast.parse(bracketed, mode="eval").body
            self.lines = [line.encode() for line in re.split(r"\r\n|\r|\n", bracketed)]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, offset = getattr(error, "lineno", None), getattr(error, "offset", None)
            same = line == 2 and source == self.text
            raise self._syntax_error(offset if same else None) from None
        if isinstance(body, ast.Tuple):
            decimal = re.search(r"[<>=]\s*[-+]?(\d+),(\d+)\s*$", self.text)
            instead = "combine conditions with and / or, not with a comma"
            if decimal:
                instead = f"write {decimal[1]}.{decimal[2]}, with a decimal point"
            raise self._syntax_error(None, instead)
        if body.lineno == 1:
            raise self._syntax_error(None)
        return body

    def _syntax_error(self, at: int | None, instead: str = "") -> ArgumentError:
        """Return the error for an expression that cannot be parsed.

        `at` is the position of the problem in the text, and `instead` the advice.
        """
        where = f" at character {at}" if at else ""
        write = "write comparisons of columns, such as \"year > 1950 and genre == 'fiction'\""
        return ArgumentError(
            f"where: cannot parse {_quote_text(self.text)}{where}: "
            f"{instead or self._foreign_syntax_hint() or write}"
            f"{self._backtick_advice()}"
        )

    def _foreign_syntax_hint(self) -> str:
        """Return what to write instead of syntax from other languages; "" if the text has none."""
        bare = _TOKENS.sub(lambda x: x[0] if x["word"] or x["sign"] else " ", self.text)
        return "; ".join(help for sign, help in _FOREIGN_SYNTAX_HINTS if sign.search(bare))

    def _backtick_advice(self) -> str:
        """Return advice for a column in the text whose name needs backticks.

        "" if there is none.
        """
        quoted = set(self.quoted_columns.values())
        odd = (x for x in self.names if x in self.text and not x.isidentifier() and x not in quoted)
        longest = max(odd, key=len, default=None)
        return "" if longest is None else f"; write column {longest!r} in backticks: `{longest}`"

    def _replace_quoted_names(self) -> tuple[str, dict[str, str]]:
        """Convert the text to Python's syntax, and replace names in backticks by placeholders.

        Also return the column name for each placeholder.
        """
        quoted: dict[str, str] = {}

        def replace_token(token: re.Match[str]) -> str:
            if token[0] == "`":
                raise ArgumentError(f"where: a backtick in {_quote_text(self.text)} is not closed")
            if token["sign"]:
                return _SQL_SIGNS[token["sign"]]
            if token["word"]:
                # If a column has this name, the word means the column.
                is_known = token["word"] in self.names or token["word"] in ("None", "True", "False")
                return token[0] if is_known else _SQL_WORDS.get(token["word"].lower(), token[0])
            if token["name"] is None:
                doubled = (token["quote"] or "") * 2
                if doubled and doubled in token["text"]:
                    end = token[0][1 + len(token["text"]) :]
                    return token["quote"] + _escape_quotes(token["text"], token["quote"]) + end
                return token[0]
            candidates = (f"_column_{len(quoted)}_{i}" for i in range(len(self.names) + 1))
            placeholder = next(name for name in candidates if name not in self.names)
            quoted[placeholder] = token["name"].replace("``", "`")
            return f" {placeholder} "

        return _TOKENS.sub(replace_token, self.text), quoted

    def _build_condition(self, node: ast.expr) -> Condition:
        """Return the condition for a node of the syntax tree."""
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
        """Return the condition for one comparison."""
        self._check_quoted_columns(left, right)
        if type(op) in _MEMBERSHIP_OPERATORS:
            is_positive = _MEMBERSHIP_OPERATORS[type(op)]
            if isinstance(right, ast.List | ast.Tuple | ast.Set):
                condition = comparisons.membership_condition(
                    self._build_operand(left), list(map(self._build_operand, right.elts))
                )
            else:
                condition = comparisons.substring_condition(
                    self._build_operand(right), self._build_operand(left)
                )
        elif type(op) in _EQUALITY_OPERATORS:
            is_positive, condition = (
                _EQUALITY_OPERATORS[type(op)],
                comparisons.membership_condition(
                    self._build_operand(left), [self._build_operand(right)]
                ),
            )
        else:
            return comparisons.order_condition(
                op, self._build_operand(left), self._build_operand(right)
            )
        return condition if is_positive else lambda table: ~condition(table)

    def _check_quoted_columns(self, *sides: ast.expr) -> None:
        """Raise `ArgumentError` for two constants of which one is the name of a column.

        SQL and JSON put names in quotes. Such a comparison would match no rows.
        """
        if all(isinstance(side, ast.Constant) for side in sides):
            for side in sides:
                if isinstance(name := getattr(side, "value", None), str) and name in self.names:
                    plain = name if name.isidentifier() else f"`{name.replace('`', '``')}`"
                    raise ArgumentError(
                        f"where: {_quote_text(self.text)} compares two constants: quotes are for "
                        f"text; write the column as {plain}"
                    )

    def _build_operand(self, node: ast.expr) -> Operand:
        """Return the column or the constant of a node."""
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
        """Return the column with this name.

        Python normalizes identifiers: µ becomes μ. If there is no column with the name, the only
        column whose normalized name is equal counts.
        """
        column = self.quoted_columns.get(node.id)
        if column is None:
            # Get the name before normalization. ast.get_source_segment would be slow for many
            # lines.
            column = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            if column not in self.names:
                # Normalizing very long names would be slow.
                names = [x for x in self.names if len(x) <= _LONGEST_NAME]
                alike = [x for x in names if unicodedata.normalize("NFKC", x) == node.id]
                column = alike[0] if len(alike) == 1 else column
        _check_column(
            column, self.names, "" if node.id in self.quoted_columns else " Write text in quotes."
        )
        return column

    def _unsupported_error(self, node: ast.expr) -> ArgumentError:
        part = ast.unparse(node)
        for placeholder, column in self.quoted_columns.items():
            part = part.replace(placeholder, f"`{column}`")
        supported = "use only columns, constants, comparisons, in, and, or, not"
        return ArgumentError(
            f"where: {_quote_text(part)} in {_quote_text(self.text)} is not supported: "
            f"{self._foreign_syntax_hint() or supported}{self._backtick_advice()}"
        )


def _identify_node(node: Any, names: list[ast.Name]) -> Hashable:
    """Return the syntax tree of a node as nested tuples, and append its names to `names`.

    `ast.unparse` takes ten times as long.
    """
    kind = type(node)
    if kind is ast.Name:
        names.append(node)
        return str(node.id)
    if kind is ast.Constant:
        return type(node.value), node.value
    if kind is list:
        return tuple([_identify_node(part, names) for part in node])
    fields = [_identify_node(getattr(node, name), names) for name in node._fields if name != "ctx"]
    return (kind, *fields)


def _check_column(name: str, names: Sequence[str], more: str = "") -> None:
    """Raise an error that suggests the nearest name if there is no such column."""
    if name not in names:
        error = unknown_name_error("column", name, names)
        raise error if "did you mean" in str(error) else ArgumentError(f"{error}{more}")


def _escape_quotes(text: str, quote: str) -> str:
    """Replace doubled quotes inside a string by escaped quotes."""
    return re.sub(rf"\\.|{quote}{quote}", lambda x: x[0] if x[0][0] == "\\" else f"\\{quote}", text)


def _quote_text(text: str) -> str:
    return repr(
        text if len(text) <= _MAX_QUOTED_CHARACTERS else text[: _MAX_QUOTED_CHARACTERS - 1] + "…"
    )
