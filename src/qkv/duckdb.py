"""Attention as SQL functions of DuckDB: `register(con)`.

    SELECT * FROM qkv_ask('books.qkv', 'a whale', top := 5)
    SELECT * FROM qkv_join('orders', 'products', on_left := 'item', on_right := 'name')
    SELECT attend(q, keys, "values") FROM …                       -- Σᵢ α(q, kᵢ) vᵢ

DuckDB and the Python functions exchange Arrow data. A Python function in DuckDB has one fixed
return type, but the columns of an answer depend on the database or the tables. So `qkv_ask` and
`qkv_join` are macros that call DuckDB's `query(…)`. Its SQL text is built for each statement, while
DuckDB binds the names in the statement.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.attention import attend
from qkv.database import Database, encoders, open, parsing
from qkv.database.join import can_match
from qkv.database.query.inputs import Batch
from qkv.database.sources.sql import quote_identifier, quote_literal
from qkv.database.table.cells import is_missing
from qkv.errors import ArgumentError, DtypeError, ShapeError, require_extra, unknown_name_error
from qkv.util.formatting import to_jsonable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["register"]

_ANSWER_ROWS_TYPE = 'STRUCT(cells VARCHAR[], weight DOUBLE, "rank" BIGINT, confidence DOUBLE)[]'
_PAIRS_TYPE = 'STRUCT(l BIGINT, r BIGINT, weight DOUBLE, "rank" BIGINT)[]'

# qkv_attend takes vectors: the lambdas turn each number into a vector of width 1.
_MACROS = """
CREATE OR REPLACE TEMP MACRO qkv_ask(
    path, query, top := 5, "where" := NULL, score := NULL, weighting := 'softmax',
    approximate := NULL
) AS TABLE
    SELECT qkv_answer.* FROM (
        SELECT qkv_rows(path, to_json(query)::VARCHAR, to_json({
            'top': top, 'where': "where", 'score': score, 'weighting': weighting,
            'approximate': approximate
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

    The functions are temporary: nothing is written to the DuckDB database. A cursor is a separate
    connection, so register each cursor too.

    >>> import duckdb
    >>> con = register(duckdb.connect())
    >>> con.sql("SELECT attend(2.1, [1, 2, 3], [10, 20, 30], score := 'gaussian:0.2')").fetchall()
    [(20.0004...,)]
    """
    with require_extra("duckdb", "SQL needs duckdb and pyarrow"):
        import duckdb
        import pyarrow  # noqa: F401, the functions exchange Arrow data
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
        # The function exists already: cursors share the functions of their connection.
        except (duckdb.CatalogException, duckdb.NotImplementedException):
            continue
    con.execute(_MACROS)
    return con


# qkv_ask


def _answer_columns_sql(path: str) -> str:
    """Return the SQL that unpacks an answer's rows into typed columns, weight, rank, confidence."""
    if path is None:
        raise ArgumentError("qkv_ask: the path is NULL: pass the path of a database, 'books.qkv'")
    with open(path, create=False) as database:
        types = _column_types(database)
    cells = [
        f"r.cells[{position}]::{kind} AS {quote_identifier(name)}"
        for position, (name, kind) in enumerate(types.items(), start=1)
    ]
    columns = ", ".join(
        [*cells, "r.weight AS weight", 'r."rank" AS "rank"', "r.confidence AS confidence"]
    )
    return f"SELECT {columns} FROM (SELECT unnest(qkv_found) AS r)"


def _column_types(database: Database) -> dict[str, str]:
    """Return the DuckDB type of each column of the database."""
    sql_types = {"bool": "BOOLEAN", "vector": "DOUBLE[]"}
    sql_types |= dict.fromkeys(("text", "date", "empty"), "VARCHAR")
    types = {}
    for name, about in database.describe().items():
        if about["type"] == "number":
            bits = {"BIGINT": 64, "HUGEINT": 127}
            types[name] = next(
                (x for x in bits if database._is_integer_column(name, bits[x])), "DOUBLE"
            )
        else:
            types[name] = sql_types.get(about["type"], "JSON")
    return types


def _answer_rows(paths: Any, queries: Any, options: Any) -> Any:
    """Return the heaviest rows of each query as an Arrow array of `_ANSWER_ROWS_TYPE`.

    Queries of the same database with the same options run as one batch.
    """
    import pyarrow

    calls = list(zip(paths.to_pylist(), options.to_pylist(), strict=True))
    texts, rows_by_position = queries.to_pylist(), dict[int, Any]()
    for path, options_json in dict.fromkeys(calls):
        positions = [i for i, call in enumerate(calls) if call == (path, options_json)]
        with open(path, create=False) as database:
            types = _column_types(database)
            batch = Batch(_parse_query(database, json.loads(texts[i])) for i in positions)
            for i, answer in zip(
                positions, database.ask(batch, **_parse_options(options_json)), strict=True
            ):
                rows_by_position[i] = [
                    {
                        "cells": [
                            _cell_to_text(row.record.get(n), kind) for n, kind in types.items()
                        ],
                        "weight": row.weight,
                        "rank": rank,
                        "confidence": answer.confidence,
                    }
                    for rank, row in enumerate(answer.rows, start=1)
                ]
    strings = pyarrow.list_(pyarrow.string())
    double = pyarrow.float64()
    fields = {"cells": strings, "weight": double, "rank": pyarrow.int64(), "confidence": double}
    return pyarrow.array(
        map(rows_by_position.get, range(len(calls))), pyarrow.list_(pyarrow.struct(fields))
    )


def _parse_query(database: Database, cell: Any) -> Any:
    """Convert a SQL value to a query. A struct is a key of several columns."""
    if isinstance(cell, dict) and len(key := database.info()["key"]) > 1:
        for name in cell:
            if name not in key:
                raise unknown_name_error("column", name, key)
        cell = [cell.get(name) for name in key]
    return parsing.cell_from_json(cell, next(iter(database), None))


def _parse_options(options_json: str) -> dict[str, Any]:
    """Return the options of `ask` from the JSON text of a macro's arguments."""
    return parsing.parse_options(json.loads(options_json))


def _cell_to_text(cell: Any, kind: str) -> str | None:
    """Return a cell as text that DuckDB can cast to the SQL type `kind`.

    None stands for a missing cell.
    """
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
    """Return an Arrow array of `_PAIRS_TYPE`: for each left key, its heaviest right keys.

    A pair holds the two row numbers, counted from 1, the weight and the rank.
    """
    import pyarrow

    matches = []
    for call in zip(left.to_pylist(), right.to_pylist(), options.to_pylist(), strict=True):
        queries, keys = ([json.loads(text) for text in side] for side in call[:2])
        ask_options = _parse_options(call[2])
        encoder = ask_options.pop("encoder", None)
        encoder = None if encoder is None else encoders.resolve_name(encoder)
        database = Database(keys, range(len(keys)), encoder=encoder)
        positions = [i for i, key in enumerate(queries) if can_match(key, database)]
        answers = database.ask(Batch(queries[i] for i in positions), **ask_options)
        matches.append(
            [
                {"l": position + 1, "r": row.index + 1, "weight": row.weight, "rank": rank}
                for position, answer in zip(positions, answers, strict=True)
                for rank, row in enumerate(answer.rows, start=1)
            ]
        )
    int64 = pyarrow.int64()
    fields = {"l": int64, "r": int64, "weight": pyarrow.float64(), "rank": int64}
    return pyarrow.array(matches, pyarrow.list_(pyarrow.struct(fields)))


# attend


def _attend_columns(query: Any, keys: Any, values: Any, score: Any, weighting: Any) -> Any:
    """Return Σᵢ α(q, kᵢ) vᵢ for each row of the SQL table.

    Rows with equal shapes, score and weighting share one call of `attend`.
    """
    import pyarrow

    columns = {"query": query, "keys": keys, "values": values}
    q, k, v = sides = [_VectorColumn(column, name) for name, column in columns.items()]
    # Without keys the result is NULL, like the sum of no rows in SQL.
    has_all = ~(q.is_null | k.is_null | v.is_null) & (k.vector_count > 0)
    for i in np.flatnonzero(has_all & (k.vector_count != v.vector_count))[:1]:
        counts = f"{k.vector_count[i]} keys and {v.vector_count[i]} values"
        raise ShapeError(f"attend: a row has {counts}: pass one value for each key")
    components = zip(score.to_pylist(), weighting.to_pylist(), strict=True)
    shapes = zip(
        components,
        k.vector_count.tolist(),
        *(side.vector_widths(has_all) for side in sides),
        strict=True,
    )
    groups: dict[Any, list[int]] = {}
    for i, (shape, is_used) in enumerate(zip(shapes, has_all.tolist(), strict=True)):
        if is_used:
            groups.setdefault(shape, []).append(i)
    outputs: list[Any] = [None] * len(query)
    for ((name, weights), *_), positions in groups.items():
        out = attend(
            *(side.stack_rows(positions) for side in sides),
            score=parsing.parse_score(name or "scaled_dot"),
            weighting=parsing.parse_weighting(weights or "softmax"),
        )
        for i, row in zip(positions, out[:, 0].tolist(), strict=True):
            outputs[i] = row
    return pyarrow.array(outputs, pyarrow.list_(pyarrow.float64()))


class _VectorColumn:
    """An Arrow column of vectors, or of lists of vectors, as one flat array of numbers.

    `vector_count` (rows,) is the number of vectors in each row.
    """

    def __init__(self, column: Any, name: str):
        from pyarrow import types

        array, offsets = column.combine_chunks(), []
        self.name, self.is_null = name, array.is_null().to_numpy(zero_copy_only=False)
        while types.is_list(array.type):
            offsets.append(array.offsets.to_numpy())
            array = array.values
            if array.null_count:
                raise ArgumentError(
                    f"attend: {name} contains a NULL: leave it out. For keys and values, use the "
                    "same filter for both, such as list(…) FILTER (WHERE k IS NOT NULL)"
                )
        if len(offsets) < 2:
            offsets.insert(0, np.arange(len(column) + 1))
        self._rows, self._ends = offsets
        self._flat, self.vector_count = array.to_numpy(zero_copy_only=False), np.diff(self._rows)

    def vector_widths(self, selected: np.ndarray) -> list[int]:
        """Return the length of the vectors in each row; 0 for rows that are not selected.

        `selected` (rows,) is a mask. Raises `ShapeError` if a selected row has vectors of two
        lengths.
        """
        widths, sizes = np.zeros(len(self.vector_count), int), np.diff(self._ends)[: self._rows[-1]]
        nonempty = selected & (self.vector_count > 0)
        widths[nonempty] = sizes[self._rows[:-1][nonempty]]
        row = np.repeat(np.arange(len(widths)), self.vector_count)
        for i in np.flatnonzero((sizes[self._rows[0] :] != widths[row]) & nonempty[row])[:1]:
            lengths = sorted((sizes[self._rows[0] + i], widths[row[i]]))
            raise ShapeError(
                f"attend: {self.name} has vectors of {lengths[0]} and of {lengths[1]} numbers: all "
                "vectors for one query must have the same length"
            )
        return widths.tolist()

    def stack_rows(self, rows: list[int]) -> np.ndarray:
        """Return the vectors of these rows, (rows, count, width).

        The shapes of the rows must be equal.
        """
        first = self._rows[rows[0]]
        count, width = (
            int(self.vector_count[rows[0]]),
            int(self._ends[first + 1] - self._ends[first]),
        )
        starts = self._ends[self._rows[rows]]
        flat: np.ndarray = self._flat[starts[:, None] + np.arange(count * width)]
        return flat.reshape(len(rows), count, width)
