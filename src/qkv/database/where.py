"""Which rows may answer: a condition on columns, as a mapping, an expression, or a function."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qkv.errors import ArgumentError, DtypeError, unknown

Condition = Callable[[Mapping[str, Any]], bool]

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def condition(where: Any, columns: Sequence[str]) -> Condition | None:
    """`where` as a function of a row, or None where every row passes.

    A mapping names columns and what they must equal, or a list of what they may equal. Text is an
    expression of Python's comparisons over the columns' names: == != < <= > >= in, and or not.
    A cell that cannot be compared (None < 3) does not pass.

    >>> row = {"year": 1988, "genre": "fiction", "first name": "Paulo"}
    >>> columns = list(row)
    >>> condition({"genre": ["fiction", "poetry"]}, columns)(row)
    True
    >>> condition("1900 <= year < 1980 or 'fic' in genre", columns)(row)
    True
    >>> condition("`first name` == 'Paula'", columns)(row)
    False
    """
    if where is None:
        return None
    if isinstance(where, Mapping):
        for name in where:
            _known(name, columns)

        def equal(row: Mapping[str, Any]) -> bool:
            return all(
                row.get(name) in wish
                if isinstance(wish, list | set | frozenset)
                else row.get(name) == wish
                for name, wish in where.items()
            )

        return equal
    if isinstance(where, str):
        return _expression(where, columns)
    if callable(where):
        return lambda row: bool(where(row))
    raise DtypeError(
        'where must be a mapping of columns, an expression such as "year > 1950", or a function '
        f"of a row, not {type(where).__name__}"
    )


def _known(name: str, columns: Sequence[str]) -> None:
    if name not in columns:
        raise unknown("column", name, columns)


def _expression(text: str, columns: Sequence[str]) -> Condition:
    source, quoted = _names(text)
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = getattr(error, "offset", None)
        where = f" at character {at}" if at else ""
        raise ArgumentError(
            f"where: cannot read {text!r}{where}: write comparisons of columns, such as "
            "\"year > 1950 and genre == 'fiction'\""
        ) from None

    def build(node: ast.expr) -> Callable[[Mapping[str, Any]], Any]:
        match node:
            case ast.BoolOp(op, values):
                parts = [build(value) for value in values]
                join = all if isinstance(op, ast.And) else any
                return lambda row: join(part(row) for part in parts)
            case ast.UnaryOp(ast.Not(), operand):
                inner = build(operand)
                return lambda row: not inner(row)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return lambda row: -number
            case ast.Compare(left, ops, comparators) if all(type(op) in _COMPARE for op in ops):
                sides = [build(left), *map(build, comparators)]
                return lambda row: _chain(ops, [side(row) for side in sides])
            case ast.Constant(value):
                return lambda row: value
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                members = [build(item) for item in items]
                return lambda row: [member(row) for member in members]
            case ast.Name(name):
                column = quoted.get(name, name)
                _known(column, columns)
                return lambda row: row.get(column)
        raise ArgumentError(
            f"where: {ast.unparse(node)!r} in {text!r} is not understood: only columns, constants, "
            "comparisons, in, and, or, not"
        )

    made = build(tree.body)
    return lambda row: bool(made(row))


def _chain(ops: Sequence[ast.cmpop], sides: Sequence[Any]) -> bool:
    for op, a, b in zip(ops, sides, sides[1:], strict=False):
        if isinstance(op, _ORDER) and (a is None or b is None):
            return False
        try:
            if not _COMPARE[type(op)](a, b):
                return False
        except TypeError:
            return False
    return True


def _names(text: str) -> tuple[str, dict[str, str]]:
    """The text with `column names` in backticks made into plain names."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        raise ArgumentError(f"where: a backtick in {text!r} is not closed")
    quoted = {f"_column_{i}": name for i, name in enumerate(parts[1::2])}
    for i, name in enumerate(quoted):
        parts[2 * i + 1] = name
    return "".join(parts), quoted
