"""Conditions against pandas: random ones, over text, numbers, dates, booleans and missing values.

150 by default; QKV_FULL=1 tries 2,000, QKV_WHERE_CASES=n so many. Each is asked of `count`, `rows`,
`ask` and `attend`, which must all use the same rows.
"""

from __future__ import annotations

import datetime
import operator
import os
import random
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

import qkv
from qkv.database.errors import NoRowsMatchWarning
from qkv.errors import DtypeError
from tests.sampling import FULL

DEFAULT = 2000 if FULL else 150
CASES = int(os.environ.get("QKV_WHERE_CASES", DEFAULT))
TABLES = 6

WORDS = ["tea", "coffee", "Tea and milk", "it's", 'say "hi"', "a=b", "", "naïve", "n > 2", "or"]
ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
COLUMNS = {
    "genre": "text",
    "other text": "text",
    "n": "number",
    "m": "number",
    "size": "number",
    "day": "date",
    "until": "date",
    "fresh": "bool",
}


class Passed(NamedTuple):
    """Which rows pass, and of which that is known."""

    true: pd.Series
    known: pd.Series


def negated(x: Passed) -> Passed:
    return Passed(x.known & ~x.true, x.known)


def combine_both(x: Passed, y: Passed) -> Passed:
    false = (x.known & ~x.true) | (y.known & ~y.true)
    return Passed(x.true & y.true, (x.known & y.known) | false)


def either(x: Passed, y: Passed) -> Passed:
    return negated(combine_both(negated(x), negated(y)))


def random_table(rng: random.Random) -> pd.DataFrame:
    """A table, each cell of which may be missing."""
    rows = rng.choice([1, 7, 40, 150])
    day = datetime.date(2024, 1, 1)

    def column(draw: Any) -> pd.Series:
        share = rng.choice([0, 0.1, 0.5])
        # All of one type: a column that is empty compares with anything.
        cells = [draw()] + [None if rng.random() < share else draw() for _ in range(rows - 1)]
        return pd.Series(cells, dtype=object)

    def date() -> datetime.date:
        return day + datetime.timedelta(days=rng.randrange(60))

    return pd.DataFrame(
        {
            "id": range(rows),
            "key": [float(rng.randrange(50)) for _ in range(rows)],
            "v": [rng.gauss(0, 1) for _ in range(rows)],
            "genre": column(lambda: rng.choice(WORDS)),
            "other text": column(lambda: rng.choice(WORDS[:4])),
            "n": column(lambda: rng.randrange(-2, 6)),
            "m": column(lambda: rng.randrange(-2, 6)),
            "size": column(lambda: rng.choice([0.0, 0.5, -1.25, 2.0, 1e10, 3])),
            "day": column(date),
            "until": column(date),
            "fresh": column(lambda: rng.random() < 0.5),
        }
    )


def draw_cell(rng: random.Random, kind: str) -> Any:
    match kind:
        case "text":
            return rng.choice([*WORDS, "absent"])
        case "number":
            return rng.choice([-2, 0, 1, 2, 5, 0.5, 2.0, -1.25, 7])
        case "bool":
            return rng.random() < 0.5
    return datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randrange(60))


def format_cell(rng: random.Random, cell: Any) -> str:
    """A cell as a condition writes it, in any of its forms."""
    if isinstance(cell, datetime.date):
        return repr(cell.isoformat())
    if isinstance(cell, bool):
        return rng.choice([repr(cell), repr(cell).lower(), repr(cell).upper()])
    if cell is None:
        return rng.choice(["None", "null", "NULL"])
    if isinstance(cell, str):
        doubled = "'" + cell.replace("'", "''") + "'"  # as SQL does
        escaped = '"' + cell.replace('"', '\\"') + '"'
        return rng.choice([repr(cell), doubled, escaped])
    return repr(cell)


def format_name(rng: random.Random, name: str) -> str:
    return name if name.isidentifier() and rng.random() < 0.8 else f"`{name}`"


def known_all(x: pd.Series) -> Passed:
    return Passed(x.astype(bool), pd.Series(True, x.index))


def equal(column: pd.Series, cells: list[Any]) -> pd.Series:
    """Which cells equal one of these; a missing one equals None."""
    values = [x for x in cells if x is not None]
    result = column.isin(values) & column.notna()
    return result | column.isna() if None in cells else result


def draw_comparison(rng: random.Random, table: pd.DataFrame) -> tuple[str, Passed]:
    name = rng.choice(list(COLUMNS))
    kind, column = COLUMNS[name], table[name]
    own, known = format_name(rng, name), column.notna()
    gap = rng.choice(["", " "])
    form = rng.random()
    if form < 0.3:
        cell = draw_cell(rng, kind)
        sign = rng.choice(["==", "=", "!=", "<>"])
        result = known_all(equal(column, [cell]))
        text = f"{own}{gap}{sign}{gap}{format_cell(rng, cell)}"
        return text, result if "=" in sign[0] else negated(result)
    if form < 0.5 and kind != "bool":
        cell, sign = draw_cell(rng, kind), rng.choice(list(ORDERS))
        true = known & column.map(lambda x: x is not None and ORDERS[sign](x, cell)).astype(bool)
        if rng.random() < 0.3:
            return f"{format_cell(rng, cell)} {TURNED[sign]} {own}", Passed(true, known)
        return f"{own}{gap}{sign}{gap}{format_cell(rng, cell)}", Passed(true, known)
    if form < 0.6:
        cells = [draw_cell(rng, kind) for _ in range(rng.randrange(1, 4))]
        cells += [None] * (rng.random() < 0.2)
        open_, close = rng.choice(["[]", "()"])
        text = f"{open_}{', '.join(format_cell(rng, x) for x in cells)},{close}"
        word = rng.choice(["in", "IN", "not in", "NOT IN"])
        result = known_all(equal(column, cells))
        return f"{own} {word} {text}", negated(result) if "not" in word.lower() else result
    if form < 0.7:
        word = rng.choice(
            ["is None", "is null", "IS NULL", "== None", "is not None", "IS NOT NULL"]
        )
        result = known_all(column.isna())
        return f"{own} {word}", negated(result) if "not" in word.lower() else result
    if form < 0.8 and kind == "text":
        part = rng.choice(["tea", "and", "'", "=", "x", "T"])
        true = known & column.map(lambda x: x is not None and part in x).astype(bool)
        return f"{format_cell(rng, part)} in {own}", Passed(true, known)
    if form < 0.9:
        others = [x for x in COLUMNS if COLUMNS[x] == kind and x != name]
        if others and kind != "bool":
            other = rng.choice(others)
            right = table[other]
            pairs = list(zip(column, right, strict=True))
            if rng.random() < 0.4:
                same = pd.Series([x == y for x, y in pairs], table.index)
                return f"{own} == {format_name(rng, other)}", known_all(same)
            sign, some = rng.choice(list(ORDERS)), known & right.notna()
            true = [x is not None and y is not None and ORDERS[sign](x, y) for x, y in pairs]
            text = f"{own} {sign} {format_name(rng, other)}"
            return text, Passed(pd.Series(true, table.index), some)
    if kind == "bool":
        return own, Passed(known & column.map(bool), known)
    low, high = draw_cell(rng, "number"), draw_cell(rng, "number")
    column = table["n"]
    true = column.map(lambda x: x is not None and low <= x < high).astype(bool)
    text = f"{low!r} <= n < {high!r}"
    # Of a chain each comparison is known by itself, as of two with `and`.
    return text, Passed(true, column.notna())


def draw_condition(rng: random.Random, table: pd.DataFrame, depth: int) -> tuple[str, Passed]:
    if depth == 0 or rng.random() < 0.3:
        return draw_comparison(rng, table)
    if rng.random() < 0.25:
        text, result = draw_condition(rng, table, depth - 1)
        return f"{rng.choice(['not', 'NOT', 'Not'])} ({text})", negated(result)
    one, two = (draw_condition(rng, table, depth - 1) for _ in range(2))
    word = rng.choice(["and", "or"])
    result = (combine_both if word == "and" else either)(one[1], two[1])
    word = rng.choice([word, word.upper()])
    return f"({one[0]}) {word} ({two[0]})", result


def draw_mapping(rng: random.Random, table: pd.DataFrame) -> tuple[dict[str, Any], pd.Series]:
    passed, where = pd.Series(True, table.index), dict[str, Any]()
    for name in rng.sample(list(COLUMNS), rng.randrange(1, 3)):
        cells = [draw_cell(rng, COLUMNS[name]) for _ in range(rng.randrange(1, 4))]
        cells += [None] * (rng.random() < 0.2)
        where[name] = rng.choice([cells, cells[0]])
        passed &= equal(table[name], cells if isinstance(where[name], list) else cells[:1])
    return where, passed


def database(table: pd.DataFrame, parts: int) -> qkv.Database:
    """The rows of a table, added in so many parts."""
    rows = table.to_dict("records")
    cells = {name: [row[name] for row in rows] for name in table}
    size = -(-len(rows) // parts)
    first = {name: column[:size] for name, column in cells.items()}
    made = qkv.Database.from_columns(first, key="key", value="v")
    for start in range(size, len(rows), size):
        made.extend(rows[start : start + size])
    return made


def check(made: qkv.Database, table: pd.DataFrame, where: Any, passed: pd.Series) -> None:
    """Every way to ask uses the rows that pandas finds."""
    ids = table["id"][passed].tolist()
    assert made.count(where) == len(ids), where
    assert [row["id"] for row in made.rows(where=where)] == ids, where
    options: dict[str, Any] = {"score": "constant", "weighting": "average", "where": where}
    answer = made.ask(3.0, **options)
    assert answer.total == len(ids), where
    expected = np.where(passed, 1 / max(len(ids), 1), 0)
    np.testing.assert_allclose(answer.weights, expected, rtol=1e-6, err_msg=str(where))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = made.attend([3.0], **options)
    mean = table["v"][passed].mean() if ids else 0.0
    np.testing.assert_allclose(out.ravel(), [mean], rtol=1e-5, atol=1e-6, err_msg=str(where))
    assert any(x.category is NoRowsMatchWarning for x in caught) == (not ids)
    if ids:
        assert not answer.hint.startswith("No rows match")
    else:
        assert answer.hint.startswith("No rows match where=") and answer.value is None


@pytest.mark.parametrize("seed", range(TABLES))
def test_conditions_pass_the_rows_that_pandas_finds(seed):
    rng = random.Random(seed)
    table = random_table(rng)
    stored = database(table, parts=rng.choice([1, 3]))
    for _ in range(-(-CASES // TABLES)):
        text, result = draw_condition(rng, table, depth=3)
        if rng.random() < 0.1:
            where, passed = draw_mapping(rng, table)
            check(stored, table, where, passed)
        elif rng.random() < 0.1:
            ids = set(table["id"][result.true])
            check(stored, table, lambda row, ids=ids: row["id"] in ids, result.true)
        else:
            check(stored, table, text, result.true)


def test_an_array_of_booleans_is_refused_with_what_to_write():
    stored = database(random_table(random.Random(1)), 1)
    with pytest.raises(DtypeError, match=re.escape("where must be a mapping of columns")):
        stored.count(np.ones(len(stored), bool))
