"""Attention as SQL functions of DuckDB: `register(con)`.

    SELECT * FROM qkv_ask('books.qkv', 'a whale', top := 5)
    SELECT * FROM qkv_join('orders', 'products', on_left := 'item', on_right := 'name')
    SELECT attend(q, keys, "values") FROM …                       -- Σᵢ α(q, kᵢ) vᵢ

DuckDB passes and gets Arrow data. A Python function in DuckDB has one fixed type, but the columns
of a result depend on the database or the tables. So `qkv_ask` and `qkv_join` are macros around
`query(…)`, whose SQL text is created while a statement is bound.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.attention import attend
from qkv.database import Database, encoders, open, parsing
from qkv.database.query.inputs import Batch
from qkv.database.sources.sql import quote_identifier, quote_literal
from qkv.database.table.cells import is_missing
from qkv.errors import ArgumentError, DtypeError, ShapeError, require_extra, unknown_name_error
from qkv.util.formatting import to_jsonable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["register"]

_ANSWER_ROWS_TYPE = 'STRUCT(cells VARCHAR[], weight DOUBLE, "rank" BIGINT)[]'
_PAIRS_TYPE = 'STRUCT(l BIGINT, r BIGINT, weight DOUBLE, "rank" BIGINT)[]'

# qkv_attend takes vectors: the lambdas turn each number into a vector of width 1.
_MACROS = """
CREATE OR REPLACE TEMP MACRO qkv_ask(
    path, query, top := 5, "where" := NULL, score := NULL, weighting := 'softmax'
) AS TABLE
    SELECT qkv_answer.* FROM (
        SELECT qkv_rows(path, to_json(query)::VARCHAR, to_json({
            'top': top, 'where': "where", 'score': score, 'weighting': weighting
        })::VARCHAR) AS qkv_found
    ), LATERAL (SELECT * FROM query(qkv_columns(path))) AS qkv_answer;

CREATE OR REPLACE TEMP MACRO qkv_join(
    "left", "right", on_left := NULL, on_right := NULL, top := 1, score := NULL,
    weighting := 'softmax', encoder := NULL
) AS TABLE
    SELECT * FROM query(qkv_joined("left", "right", on_left, on_right, to_json({
        'top': top, 'score': score, 'weighting': weighting, 'encoder': encoder
    })::VARCHAR));

CREATE OR REPLACE TEMP MACRO attend
    (q DOUBLE[], keys DOUBLE[][], "values" DOUBLE[][],
     score := 'scaled_dot', weighting := 'softmax') AS
        qkv_attend(q, keys, "values", score, weighting),
    (q DOUBLE, keys DOUBLE[], "values" DOUBLE[],
     score := 'scaled_dot', weighting := 'softmax') AS
        qkv_attend(if(q IS NULL, NULL, [q]), list_transform(keys, lambda k: [k]),
                   list_transform("values", lambda v: [v]), score, weighting)[1];
"""


def register(con: DuckDBPyConnection) -> DuckDBPyConnection:
    """Add `qkv_ask`, `qkv_join` and `attend` to a connection, and return the connection.

    Nothing is written to its database. A cursor is a separate connection: register it too.

    >>> import duckdb
    >>> con = register(duckdb.connect())
    >>> con.sql("SELECT attend(2.1, [1, 2, 3], [10, 20, 30], score := 'gaussian:0.2')").fetchall()
    [(20.0004...,)]
    """
    with require_extra("duckdb", "SQL needs duckdb and pyarrow"):
        import duckdb
        import pyarrow  # noqa: F401, what goes to and fro
    if not isinstance(con, duckdb.DuckDBPyConnection):
        raise DtypeError(
            "register: con must be a connection, duckdb.connect() or duckdb.connect('file'), not a "
            f"{type(con).__name__}"
        )
    text, list_, lists = "VARCHAR", "DOUBLE[]", "DOUBLE[][]"
    for name, function, takes, gives, kind in (
        ("qkv_columns", _answer_columns_sql, [text], text, "native"),
        ("qkv_rows", _answer_rows, [text] * 3, _ANSWER_ROWS_TYPE, "arrow"),
        ("qkv_joined", _join_sql, [text] * 5, text, "native"),
        ("qkv_matched", _match_keys, [f"{text}[]"] * 2 + [text], _PAIRS_TYPE, "arrow"),
        ("qkv_attend", _attend_columns, [list_, lists, lists, text, text], list_, "arrow"),
    ):
        nulls = "default" if function in (_answer_rows, _match_keys) else "special"
        try:
            con.create_function(name, function, takes, gives, type=kind, null_handling=nulls)
        # Already registered: cursors share the functions of their connection.
        except (duckdb.CatalogException, duckdb.NotImplementedException):
            continue
    con.execute(_MACROS)
    return con


# qkv_ask


def _answer_columns_sql(path: str) -> str:
    """Return SQL for the answer's rows with the database's columns and their types."""
    if path is None:
        raise ArgumentError("qkv_ask: the path is NULL: pass the path of a database, 'books.qkv'")
    with open(path, create=False) as database:
        types = _column_types(database)
    cells = [
        f"r.cells[{at}]::{kind} AS {quote_identifier(name)}"
        for at, (name, kind) in enumerate(types.items(), start=1)
    ]
    columns = ", ".join([*cells, "r.weight AS weight", 'r."rank" AS "rank"'])
    return f"SELECT {columns} FROM (SELECT unnest(qkv_found) AS r)"


def _column_types(database: Database) -> dict[str, str]:
    known = {"bool": "BOOLEAN", "vector": "DOUBLE[]"}
    known |= dict.fromkeys(("text", "date", "empty"), "VARCHAR")
    found = {}
    for name, about in database.describe().items():
        if about["type"] == "number":
            bits = {"BIGINT": 64, "HUGEINT": 127}
            found[name] = next(
                (x for x in bits if database._is_integer_column(name, bits[x])), "DOUBLE"
            )
        else:
            found[name] = known.get(about["type"], "JSON")
    return found


def _answer_rows(paths: Any, queries: Any, options: Any) -> Any:
    """Return the heaviest rows for each query; queries with equal options run together."""
    import pyarrow

    calls = list(zip(paths.to_pylist(), options.to_pylist(), strict=True))
    texts, rows_by_position = queries.to_pylist(), dict[int, Any]()
    for path, options_json in dict.fromkeys(calls):
        places = [i for i, one in enumerate(calls) if one == (path, options_json)]
        with open(path, create=False) as database:
            types = _column_types(database)
            asked = Batch(_parse_query(database, json.loads(texts[i])) for i in places)
            for i, answer in zip(
                places, database.ask(asked, **_parse_options(options_json)), strict=True
            ):
                rows_by_position[i] = [
                    {
                        "cells": [
                            _cell_to_text(row.record.get(n), kind) for n, kind in types.items()
                        ],
                        "weight": row.weight,
                        "rank": rank,
                    }
                    for rank, row in enumerate(answer.rows, start=1)
                ]
    strings = pyarrow.list_(pyarrow.string())
    fields = {"cells": strings, "weight": pyarrow.float64(), "rank": pyarrow.int64()}
    return pyarrow.array(
        map(rows_by_position.get, range(len(calls))), pyarrow.list_(pyarrow.struct(fields))
    )


def _parse_query(database: Database, cell: Any) -> Any:
    """Convert a SQL value to a query; a key of several columns is a struct."""
    if isinstance(cell, dict) and len(key := database.info()["key"]) > 1:
        for name in cell:
            if name not in key:
                raise unknown_name_error("column", name, key)
        cell = [cell.get(name) for name in key]
    return parsing.cell_from_json(cell, next(iter(database), None))


def _parse_options(options_json: str) -> dict[str, Any]:
    """Return the options of `ask` from the JSON of a macro's arguments."""
    return parsing.parse_options(json.loads(options_json))


def _cell_to_text(cell: Any, kind: str) -> str | None:
    """Return a cell as text that DuckDB can cast back."""
    if is_missing(cell):
        return None
    if kind == "VARCHAR":
        return cell if isinstance(cell, str) else cell.isoformat()
    if kind in ("BIGINT", "HUGEINT"):
        return str(int(cell))
    return repr(float(cell)) if kind == "DOUBLE" else json.dumps(to_jsonable(cell))


# qkv_join


def _join_sql(left: str, right: str, on_left: str, on_right: str, options: str) -> str:
    """Return SQL for the soft join: every left row with its heaviest right rows."""
    if None in (left, right, on_left, on_right):
        raise ArgumentError(
            "qkv_join: give two tables by name and a column of each: qkv_join('orders', "
            "'products', on_left := 'item', on_right := 'name')"
        )

    def numbered_rows(table: str, column: str) -> str:
        return (
            "(SELECT row_number() OVER () AS qkv_row, * "
            f"FROM query_table({quote_literal(table)}) WHERE {quote_identifier(column)} IS NOT "
            "NULL)"
        )

    def key_list(side: str, column: str) -> str:
        return (
            f"(SELECT list(to_json({quote_identifier(column)})::VARCHAR ORDER BY qkv_row) FROM "
            f"{side})"
        )

    return f"""
        WITH qkv_l AS MATERIALIZED {numbered_rows(left, on_left)},
             qkv_r AS MATERIALIZED {numbered_rows(right, on_right)},
             qkv_pairs AS (SELECT unnest(qkv_matched(
                 {key_list("qkv_l", on_left)}, {key_list("qkv_r", on_right)},
                 {quote_literal(options)}
             )) AS p)
        SELECT qkv_l.* EXCLUDE (qkv_row), qkv_r.* EXCLUDE (qkv_row),
               p.weight AS weight, p."rank" AS "rank"
        FROM qkv_pairs JOIN qkv_l ON qkv_l.qkv_row = p.l JOIN qkv_r ON qkv_r.qkv_row = p.r
        ORDER BY p.l, p."rank"
    """


def _match_keys(left: Any, right: Any, options: Any) -> Any:
    """Return for each left key the positions and weights of its heaviest right keys."""
    import pyarrow

    matches = []
    for call in zip(left.to_pylist(), right.to_pylist(), options.to_pylist(), strict=True):
        queries, keys = ([json.loads(text) for text in side] for side in call[:2])
        ask_options = _parse_options(call[2])
        encoder = ask_options.pop("encoder", None)
        encoder = None if encoder is None else encoders.resolve_name(encoder)
        database = Database(keys, range(len(keys)), encoder=encoder)
        # A blank query matches nothing, like NULL, unless a key is equal to it.
        places = [i for i, key in enumerate(queries) if not _is_blank(key) or key in database]
        answers = database.ask(Batch(queries[i] for i in places), **ask_options)
        matches.append(
            [
                {"l": place + 1, "r": row.index + 1, "weight": row.weight, "rank": rank}
                for place, answer in zip(places, answers, strict=True)
                for rank, row in enumerate(answer.rows, start=1)
            ]
        )
    int64 = pyarrow.int64()
    fields = {"l": int64, "r": int64, "weight": pyarrow.float64(), "rank": int64}
    return pyarrow.array(matches, pyarrow.list_(pyarrow.struct(fields)))


def _is_blank(key: Any) -> bool:
    return isinstance(key, str) and not key.strip()


# attend


def _attend_columns(query: Any, keys: Any, values: Any, score: Any, weighting: Any) -> Any:
    """Return Σᵢ α(q, kᵢ) vᵢ for each row; rows of equal shapes share one call of `attend`."""
    import pyarrow

    given = {"query": query, "keys": keys, "values": values}
    q, k, v = sides = [_VectorColumn(column, name) for name, column in given.items()]
    # The sum of nothing is NULL, as in SQL.
    live = ~(q.is_null | k.is_null | v.is_null) & (k.vector_count > 0)
    for i in np.flatnonzero(live & (k.vector_count != v.vector_count))[:1]:
        counts = f"{k.vector_count[i]} keys and {v.vector_count[i]} values"
        raise ShapeError(f"attend: {counts}: pass one value for each key")
    ways = zip(score.to_pylist(), weighting.to_pylist(), strict=True)
    shapes = zip(
        ways, k.vector_count.tolist(), *(side.vector_widths(live) for side in sides), strict=True
    )
    groups: dict[Any, list[int]] = {}
    for i, (shape, there) in enumerate(zip(shapes, live.tolist(), strict=True)):
        if there:
            groups.setdefault(shape, []).append(i)
    found: list[Any] = [None] * len(query)
    for ((name, weights), *_), at in groups.items():
        out = attend(
            *(side.stack_rows(at) for side in sides),
            score=parsing.parse_score(name or "scaled_dot"),
            weighting=parsing.parse_weighting(weights or "softmax"),
        )
        for i, row in zip(at, out[:, 0].tolist(), strict=True):
            found[i] = row
    return pyarrow.array(found, pyarrow.list_(pyarrow.float64()))


class _VectorColumn:
    """An Arrow column of vectors, or of lists of vectors, as flat numbers."""

    def __init__(self, column: Any, name: str):
        from pyarrow import types

        array, offsets = column.combine_chunks(), []
        self.name, self.is_null = name, array.is_null().to_numpy(zero_copy_only=False)
        while types.is_list(array.type):
            offsets.append(array.offsets.to_numpy())
            array = array.values
            if array.null_count:
                raise ArgumentError(
                    f"attend: {name} holds a NULL: leave it out, as in list(k) FILTER (WHERE k IS "
                    "NOT NULL), for keys and values alike"
                )
        if len(offsets) < 2:
            offsets.insert(0, np.arange(len(column) + 1))
        self._rows, self._ends = offsets
        self._flat, self.vector_count = array.to_numpy(zero_copy_only=False), np.diff(self._rows)

    def vector_widths(self, live: np.ndarray) -> list[int]:
        """Return the width of each vector in the selected rows."""
        found, sizes = np.zeros(len(self.vector_count), int), np.diff(self._ends)[: self._rows[-1]]
        some = live & (self.vector_count > 0)
        found[some] = sizes[self._rows[:-1][some]]
        row = np.repeat(np.arange(len(found)), self.vector_count)
        for i in np.flatnonzero((sizes[self._rows[0] :] != found[row]) & some[row])[:1]:
            two = sorted((sizes[self._rows[0] + i], found[row[i]]))
            raise ShapeError(
                f"attend: {self.name} has vectors of {two[0]} and of {two[1]} numbers: all "
                "vectors for one query must have the same length"
            )
        return found.tolist()

    def stack_rows(self, rows: list[int]) -> np.ndarray:
        """Return the vectors of rows of one shape, (rows, count, width)."""
        first = self._rows[rows[0]]
        count, width = (
            int(self.vector_count[rows[0]]),
            int(self._ends[first + 1] - self._ends[first]),
        )
        starts = self._ends[self._rows[rows]]
        flat: np.ndarray = self._flat[starts[:, None] + np.arange(count * width)]
        return flat.reshape(len(rows), count, width)
