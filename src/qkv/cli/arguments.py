"""Parse assignments `column=text` and conditions in which text needs no quotes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qkv.database.parsing import parse_cell_like, parse_number
from qkv.errors import ArgumentError

# Match `column=`, but none of ==, <=, >=, !=.
_ASSIGNMENT = re.compile(r"(?P<column>[^=<>!'\"`]*[^=<>!'\"`\s])\s*=(?!=)\s*")
_CONJUNCTION = re.compile(r"\s(?:and|or)\s", re.I)
_QUOTED_TEXT = re.compile(
    r"""(?P<quote>['"])
    (?:(?:\\.|(?P=quote){2}|(?!(?P=quote)).)*+|(?:(?P=quote){2}|(?!(?P=quote)).)*+)
    (?P=quote)(?=[\s)]|$)""",
    re.VERBOSE,
)
"""A string in quotes. A backslash escapes a quote.

If the string would then have no end, backslashes are ordinary characters.
"""
_TOKEN = re.compile(
    r"""(?P<quote>["'])(?:(?:\\.|(?P=quote){2}|(?!(?P=quote)).)*+|.*)(?P=quote)|`[^`]*+`|\w+|.""",
    re.DOTALL,
)
"""One token: a string, a name in backticks, a word, or a single character.

If every further quote of a string is escaped, the string ends at the last quote.
"""
_WHITESPACE = re.compile(r"\s*")
_BEFORE_COMPARISON = re.compile(r"(?:\s*(?:\(|not\b(?=\s*[^\s=<>!])))+\s*", re.I)
"""Text before a comparison: opening brackets and `not`."""
_AFTER_COMPARISON = re.compile(
    r"\s*\)(?:\s*\))*\s*(?:(?:and|or)\b\s*|$)|\s+(?:and|or)\s+|\s+$", re.I
)
"""Text after a comparison: closing brackets, `and`, `or`."""
_CONJUNCTION_WITH_BRACKETS = re.compile(r"\s+(?:and|or)\s+(?:\(\s*)*", re.I)
_COMPARISON_START = re.compile(
    r"""(?:not\s++)?(?:\(\s*+)*+(?:
        (?:`[^`]*+`\s*?|(?:(?!\s(?:and|or)\s)[^=<>!'"`()])+?)
        (?:
            [=<>] | !=
            | \s(?:not\s+)?in\s*[(\[]
            | \sis\s+(?:not\s+)?(?:none|null)\b
            | \s(?:not\s+)?(?:between\s|like\s*['"])
        )
        | (?:'[^'\n]*+'|"[^"\n]*+")\s+(?:not\s+)?in\s
    )""",
    re.I | re.VERBOSE,
)
"""The start of a comparison after `and` or `or`."""
_SECOND_COMPARISON = re.compile(
    r"(?:(?P<sign>&&?|\|\|?)\s*+|[,;]\s*+|(?<!\s)\s++)"
    r"(?P<name>[^\W\d]\w*+)\s*+(?P<sign_after>[<>]=?|!=|==?)"
)
"""A second comparison inside a text without quotes, such as `& n=2` in `genre=tea & n=2`."""


def check_text(text: str, what: str) -> None:
    """Raise `ArgumentError` if an argument is not valid UTF-8. `what` names it in the message."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not valid UTF-8: {text!a}") from None


def parse_assignment(text: str, example: Mapping[str, Any]) -> tuple[str, Any]:
    """Parse `column=text`; return the column and a cell of the type that `example` has there.

    >>> (
    ...     parse_assignment("year=1988", {"year": 1965}),
    ...     parse_assignment("title=1984", {"title": "Emma"}),
    ... )
    (('year', 1988), ('title', '1984'))
    """
    column, equals, cell = text.partition("=")
    if not equals or not column:
        raise ArgumentError(f"--set: expected COLUMN=TEXT, not {text!r}")
    return column, parse_cell_like(cell, example.get(column), column)


def join_conditions(conditions: Sequence[str] | None, columns: Collection[str] = ()) -> str | None:
    """Join conditions into one expression, and put the texts in `column=text` in quotes.

    Text without quotes ends before ` and ` or ` or ` if a condition follows. So `title=Pride and
    Prejudice` is one text, but `genre=tea and n=2` is two conditions. Raises `ArgumentError` if a
    text seems to contain another comparison of `columns`.

    >>> join_conditions(["genre=science fiction", "year > 1950"])
    "(`genre` == 'science fiction') and (year > 1950)"
    >>> join_conditions(["genre = 'drama'"])
    "`genre` == 'drama'"
    >>> join_conditions(["genre=tea and n=2"])
    "`genre` == 'tea' and `n` in (2, '2')"
    """
    parts = [_Condition(text, columns).build_expression() for text in conditions or ()]
    if len(parts) < 2:
        return parts[0] if parts else None
    return " and ".join(f"({part})" for part in parts)


class _Condition:
    """A parser of one condition from left to right.

    `at` is the current position in the text, and `open` is the number of open brackets.
    """

    def __init__(self, text: str, columns: Collection[str]):
        self.text, self.columns = text, columns
        self.at = self.open = 0

    def build_expression(self) -> str:
        """Return the condition with its texts in quotes."""
        parts: list[str] = []
        while self.at < len(self.text):
            if lead := _BEFORE_COMPARISON.match(self.text, self.at):
                self.open += lead[0].count("(")
            else:
                lead = _WHITESPACE.match(self.text, self.at)
            assert lead is not None
            parts.append(lead[0])
            self.at = lead.end()
            parts.append(self._read_comparison())
            if end := _AFTER_COMPARISON.match(self.text, self.at):
                self.open -= end[0].count(")")
                parts.append(end[0])
                self.at = end.end()
        return "".join(parts).strip() if self.text.strip() else self.text

    def _read_comparison(self) -> str:
        """Return one comparison, up to `and`, `or` or a closing bracket."""
        begin, equals = self.at, _ASSIGNMENT.match(self.text, self.at)
        column = "" if equals is None else equals["column"].strip()
        if equals is not None and (column in self.columns or not _CONJUNCTION.search(column)):
            value = _QUOTED_TEXT.match(self.text, equals.end())
            if value is not None:  # the text is in quotes, as in SQL
                self.at = value.end()
                return f"`{column}` == {value[0]}"
            if self.text[equals.end() : equals.end() + 1] != "`":
                self.at = self._end_of_text(equals.end())
                text = self.text[equals.end() : self.at]
                return f"`{column}` {self._right_side(text, column)}"
        depth, self.at = 0, begin
        while self.at < len(self.text):
            if depth == 0 and _AFTER_COMPARISON.match(self.text, self.at):
                break
            token = _TOKEN.match(self.text, self.at)
            assert token is not None
            depth += (token[0] in "([{") - (token[0] in ")]}")
            self.at = token.end()
        return self.text[begin : self.at]

    def _end_of_text(self, at: int) -> int:
        """Return where a text without quotes ends: before a condition or a closing bracket.

        `at` is the position where the text begins.
        """
        depth = 0
        while at < len(self.text):
            if _CONJUNCTION_WITH_BRACKETS.match(self.text, at) and self._begins_condition(
                _CONJUNCTION_WITH_BRACKETS.match(self.text, at).end()  # type: ignore[union-attr]
            ):
                return at
            depth += (self.text[at] == "(") - (self.text[at] == ")")
            if depth < 0 and self.open and _AFTER_COMPARISON.match(self.text, at):
                return at
            at += 1
        return at

    def _begins_condition(self, at: int) -> bool:
        """Return whether a comparison or a column name begins at this position."""
        if _COMPARISON_START.match(self.text, at):
            return True
        word = re.match(r"(?:not\s+)?([^\s()]+)\s*(?=\)|$)", self.text[at:], re.I)
        return word is not None and word[1] in self.columns

    def _right_side(self, text: str, column: str) -> str:
        """Return the operator and the literal that compare a column with a text without quotes.

        Raises `ArgumentError` if the text seems to contain a second comparison.
        """
        text = text.rstrip() if self.at < len(self.text) else text
        other = next(
            (
                match
                for match in _SECOND_COMPARISON.finditer(text)
                if match["sign"] or match["name"].strip() in self.columns
            ),
            None,
        )
        if other is not None:
            name, first = other["name"].strip(), text[: other.start()].rstrip(" ,;")
            both = "or" if "|" in (other["sign"] or "") else "and"
            raise ArgumentError(
                f"--where: {self.text!r} compares {column!r} with the text {text!r}, which seems "
                f"to compare {name!r} too. Write \"{column}='{first}' {both} "
                f'{name}{other["sign_after"]}…" for two conditions, or put the text in quotes: '
                f"{column}={text!r}"
            )
        value: Any = parse_number(text)
        if value is None:
            value = {"true": True, "false": False}.get(text.lower())
        # The column may hold numbers or text: compare it with both.
        return f"== {text!r}" if value is None else f"in ({value!r}, {text!r})"
