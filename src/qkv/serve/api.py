"""The routes of `/v1`: a database's methods over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.responses import Response

import qkv
from qkv.answer import Answer
from qkv.database import parsing
from qkv.errors import ArgumentError, DtypeError
from qkv.page import tables
from qkv.serve import encoding, limits
from qkv.serve.databases import (
    DatabaseRegistry,
    ServedDatabase,
    build_options,
    check_query_count,
    check_text_length,
    count_characters,
)
from qkv.serve.errors import RequestError
from qkv.serve.route import RequestData, Routes
from qkv.serve.schemas import (
    ADD_BODY,
    ANSWER_SCHEMA,
    ASK_BODY,
    ATTEND_BODY,
    COUNT_SCHEMA,
    INFO_SCHEMA,
    NO_ROWS,
    RECORD_SCHEMA,
    STATE_PROPERTIES,
    SUMMARY_PROPERTIES,
    TEXT_SCHEMA,
    VERSION_SCHEMA,
    WEIGHTS_BODY,
    WHERE_SCHEMA,
    list_schema,
    object_schema,
)

DATABASE_PATH = "/v1/databases/{name}"

ROUTES = Routes()


@ROUTES(
    "GET",
    "/v1/databases",
    object_schema(
        "Databases", {"databases": list_schema(object_schema("Database", SUMMARY_PROPERTIES))}
    ),
)
def list_databases(registry: DatabaseRegistry, request: RequestData) -> Any:
    """List the databases."""
    summaries = [
        tables.summarize_database(x.name, x.database) | {"uploaded": x.uploaded}
        for x in list(registry.databases.values())
    ]
    return {"databases": summaries}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/ask",
    {"anyOf": [ANSWER_SCHEMA, list_schema(ANSWER_SCHEMA)]},
    body=ASK_BODY,
)
async def ask_database(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Answer a query, or each query of a list, with Σ α(q, k) v over all rows."""
    served, options = request.served_database, dict(request.body)
    query = options.pop("query")
    more = [name for name in ("weights", "spread") if options.pop(name, False)]
    size, characters = check_query_count(served.count_queries(query)), count_characters(query)
    future = served.batcher.submit_queries(encoding.dumps(options), query, size, characters)
    answers, single = await asyncio.wrap_future(future)
    results = [encoding.answer_to_dict(answer, request.accepts_tagged_cells) for answer in answers]
    if more:
        await registry.run_in_thread(_add_answer_details, answers, more, results)
    return results[0] if single else results


def _add_answer_details(
    answers: list[Answer], names: list[str], results: list[dict[str, Any]]
) -> None:
    """Add the requested fields to the results: "weights" (of all rows) or "spread"."""
    if "weights" in names and sum(answer.total for answer in answers) > limits.MAX_NUMBERS:
        raise RequestError(
            413,
            f"weights: at most {limits.MAX_NUMBERS:,} weights in one response: send fewer queries",
        )
    for answer, result in zip(answers, results, strict=True):
        result |= {name: getattr(answer, name) for name in names}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/attend",
    object_schema("Pooled", {"value": {}}, hint=NO_ROWS),
    body=ATTEND_BODY,
)
def attend_database(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Return only the pooled value Σ α(q, k) v of a query, or of each query of a list."""
    served, options = request.served_database, dict(request.body)
    query, version = options.pop("query"), options.pop("at", None)
    count_characters(query)
    queries, single = served.parse_queries(query)
    check_query_count(len(queries))
    database = served.at_version(version)
    value = database.attend(queries, **build_options(options))
    hint = "" if value.any() else database.why_no_rows(options.get("where"))
    return {"value": value[0] if single else value, **({"hint": hint} if hint else {})}


@ROUTES(
    "GET",
    f"{DATABASE_PATH}/rows",
    object_schema(
        "Rows",
        {"from": COUNT_SCHEMA, "total": COUNT_SCHEMA, "rows": list_schema(RECORD_SCHEMA)},
        hint=NO_ROWS,
    ),
    query={
        "from": {
            **COUNT_SCHEMA,
            "maximum": 2**53,
            "description": "Position of the first row; 0 is the oldest.",
        },
        "count": {
            **COUNT_SCHEMA,
            "maximum": limits.MAX_ROWS,
            "description": "Number of rows; 20 by default.",
        },
        "where": WHERE_SCHEMA,
        "at": VERSION_SCHEMA,
    },
)
def list_rows(registry: DatabaseRegistry, request: RequestData) -> Any:
    """List rows with all their columns, the oldest first."""
    params = request.query_params
    database, where = request.served_database.at_version(params.get("at")), params.get("where")
    start, count = params.get("from", 0), params.get("count", 20)
    rows = list(database.rows(where=where, start=start, count=count))
    total = database.count(where)
    hint = "" if total else database.why_no_rows(where)
    return {"from": start, "total": total, "rows": rows, **({"hint": hint} if hint else {})}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/rows",
    object_schema("Added", STATE_PROPERTIES, inserted=COUNT_SCHEMA),
    right="write",
    body=ADD_BODY,
    error_statuses=(409,),
)
async def add_rows(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Add all rows, or none if one is invalid. The rows are on disk when the response is sent."""
    served = _require_writable(request.served_database)
    return await asyncio.wrap_future(
        served.write_executor.submit(_write_rows, served, request.body, request.has_tagged_cells)
    )


def _write_rows(served: ServedDatabase, body: dict[str, Any], exactly: bool) -> dict[str, Any]:
    """Add or update the rows in `body`.

    `exactly` says that the cells are tagged, so that no text needs parsing.
    """
    database, cells = served.database, body["rows"]
    if not exactly:
        example = served.example_cells({name for row in cells for name in row})
        cells = [
            {
                name: parsing.cell_from_json(cell, example.get(name), name)
                for name, cell in row.items()
            }
            for row in cells
        ]
    about = served.get_profile().info
    key, value = about["key"] or ["key"], about["value"] or ["value"]
    for i, row in enumerate(cells):
        if not isinstance(row, dict):
            raise DtypeError(f"rows[{i}] must be a mapping of columns, not {type(row).__name__}")
        for name in key:
            check_text_length(row.get(name), f"rows[{i}].{name}")
        for name, cell in row.items():
            if isinstance(cell, str | bytes) and len(cell) > limits.MAX_CELL_CHARACTERS:
                raise RequestError(
                    413,
                    f"rows[{i}].{name}: at most {limits.MAX_CELL_CHARACTERS:,} characters, "
                    f"not {len(cell):,}: "
                    "store the long value in a file, and its path in the row",
                )
        if any(row.get(name) is None for name in key):
            raise ArgumentError(f"rows[{i}] has no key: set the column {', '.join(key)}")
    if not body.get("update"):
        database.extend(cells)
        return _current_state(served)
    changed: list[tuple[Any, Any]] = []
    for i, row in enumerate(cells):
        if set(row) - {*key, *value}:
            raise ArgumentError(
                f"rows[{i}]: an update may set only the key ({', '.join(key)}) and the value "
                f"({', '.join(value)})"
            )
        parts = tuple(row[name] for name in key)
        value_of_row = {name: row[name] for name in value if name in row}
        key_of_row = parts if len(key) > 1 else parts[0]
        changed.append((key_of_row, value_of_row if len(value) > 1 else value_of_row.get(value[0])))
    inserted = database.update(changed)
    return {**_current_state(served), "inserted": inserted}


@ROUTES(
    "GET",
    f"{DATABASE_PATH}/rows/{{key}}",
    object_schema("Found", {"key": {}}, value={}, values={"type": "array"}),
    query={
        "all": {"type": "boolean", "description": "Return the values of all rows with the key."},
        "at": VERSION_SCHEMA,
    },
)
def get_row(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Look up a key and return its value.

    If no row has the key, the error names the nearest keys.
    """
    database, key = (
        request.served_database.at_version(request.query_params.get("at")),
        _parse_path_key(request),
    )
    if request.query_params.get("all"):
        return {"key": key, "values": list(database.get_all(key) or [database[key]])}
    return {"key": key, "value": database[key]}


def _parse_path_key(request: RequestData) -> Any:
    """Return the key that the path contains.

    Text that no key can have gives the error for a missing key.
    """
    try:
        if request.has_tagged_cells:
            return encoding.loads(request.path_key)
        return request.served_database.parse_key(request.path_key, "the key")
    except ArgumentError as error:
        raise RequestError(
            404, str(error), kind="KeyNotFoundError", key=request.path_key, nearest=[]
        ) from None


@ROUTES(
    "DELETE",
    f"{DATABASE_PATH}/rows/{{key}}",
    object_schema("Removed", {"removed": COUNT_SCHEMA, **STATE_PROPERTIES}),
    right="write",
    error_statuses=(409,),
)
async def remove_rows(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Delete every row with this key."""
    served = _require_writable(request.served_database)

    def remove_and_report() -> dict[str, Any]:
        count = served.database.remove([_parse_path_key(request)])
        return {"removed": count, **_current_state(served)}

    return await asyncio.wrap_future(served.write_executor.submit(remove_and_report))


def _require_writable(served: ServedDatabase) -> ServedDatabase:
    """Return the database; raise `RequestError` if it is held in memory, since it is read-only."""
    if not served.is_durable:
        raise RequestError(
            409,
            f"{served.name} is a table in memory and read-only: create a store with qkv import",
        )
    return served


def _current_state(served: ServedDatabase) -> dict[str, Any]:
    """Return the name, the number of rows and the version of a database."""
    return {"name": served.name, "rows": len(served.database), "version": served.database.version}


@ROUTES(
    "GET",
    f"{DATABASE_PATH}/versions",
    object_schema("Versions", {"name": TEXT_SCHEMA, "versions": list_schema({"type": "object"})}),
)
def list_versions(registry: DatabaseRegistry, request: RequestData) -> Any:
    """List the versions, the oldest first."""
    served = request.served_database
    versions = [asdict(version) for version in served.database.versions()]
    return {"name": served.name, "versions": versions}


def _default_score(described: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the name of a column, and how it is compared by default."""
    name, column = described
    return name, {x: column[x] for x in column if x not in ("type", "missing")}


@ROUTES("GET", f"{DATABASE_PATH}/info", INFO_SCHEMA, query={"at": VERSION_SCHEMA})
def get_info(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Describe a database: its number of rows, columns, encoder and size."""
    database = request.served_database.at_version(request.query_params.get("at"))
    info, described = dict(database.info()), database.describe()
    del info["path"]  # do not reveal paths of the server
    return {
        "name": request.served_database.name,
        **info,
        "types": {name: column["type"] for name, column in described.items()},
        "missing": {name: column["missing"] for name, column in described.items()},
        "scores": {
            name: column for name, column in map(_default_score, described.items()) if column
        },
        "uploaded": request.served_database.uploaded,
    }


@ROUTES(
    "POST",
    "/v1/weights",
    object_schema("Weighed", {"weights": {"type": "array"}}),
    body=WEIGHTS_BODY,
)
def compute_weights(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Compute the weights α(q, k) of vectors: one row per query, one column per key."""
    options = dict(request.body)
    query, key = (_parse_matrix(name, options.pop(name)) for name in ("query", "key"))
    if query.shape[-2] * key.shape[-2] > limits.MAX_NUMBERS:
        raise RequestError(
            413,
            f"query and key: at most {limits.MAX_NUMBERS:,} weights in one response: send fewer "
            "queries or keys",
        )
    mask = options.pop("mask", None)
    if isinstance(mask, list):
        mask = _parse_matrix("mask", mask, bool)
    return {"weights": qkv.weights(query, key, mask=mask, **build_options(options))}


def _parse_matrix(name: str, rows: Any, kind: type = float) -> np.ndarray:
    """Return the rows of a request as an array (rows, columns) of floats or booleans."""
    try:
        matrix: np.ndarray = np.asarray(rows, dtype=kind)
    except (ValueError, OverflowError):
        matrix = np.zeros(0)
    if matrix.ndim != 2 or not matrix.size:
        content = "numbers" if kind is float else "booleans, one per key"
        raise ArgumentError(f"{name} must be a list of lists of equal length with {content}")
    return matrix


@ROUTES(
    "GET",
    "/healthz",
    object_schema("Health", {"status": TEXT_SCHEMA, "databases": COUNT_SCHEMA}),
    right=None,
)
async def check_health(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Check that the server answers requests."""
    return {"status": "ok", "databases": len(registry.databases)}


@ROUTES("GET", "/metrics", TEXT_SCHEMA, media="text/plain")
def get_metrics(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Return the metrics for Prometheus."""
    return Response(registry.metrics.render_text(), media_type="text/plain; version=0.0.4")
