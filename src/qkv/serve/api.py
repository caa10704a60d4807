"""The routes of `/v1`: what a database does, by the names of `ask_database` and of the command
line."""

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
from qkv.serve.route import RequestData, RequestError, Routes
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
def list_databases(served: DatabaseRegistry, given: RequestData) -> Any:
    """The databases that are served."""
    every = list(served.databases.values())
    found = [
        tables.summarize_database(x.name, x.database) | {"uploaded": x.uploaded} for x in every
    ]
    return {"databases": found}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/ask",
    {"anyOf": [ANSWER_SCHEMA, list_schema(ANSWER_SCHEMA)]},
    body=ASK_BODY,
)
async def ask_database(served: DatabaseRegistry, given: RequestData) -> Any:
    """Answer a query, or each of a list, from all rows: Σ α(q, k) v."""
    kept, how = given.served_database, dict(given.body)
    query = how.pop("query")
    more = [name for name in ("weights", "spread") if how.pop(name, False)]
    size, characters = check_query_count(kept.count_queries(query)), count_characters(query)
    asked = kept.batcher.submit_queries(encoding.dumps(how), query, size, characters)
    answers, single = await asyncio.wrap_future(asked)
    told = [encoding.answer_to_dict(answer, given.accepts_tagged_cells) for answer in answers]
    if more:
        await served.run_in_thread(_add_answer_details, answers, more, told)
    return told[0] if single else told


def _add_answer_details(
    answers: list[Answer], names: list[str], told: list[dict[str, Any]]
) -> None:
    """What an answer says only where it is asked for: the weights of all rows, the spread."""
    if "weights" in names and sum(answer.total for answer in answers) > limits.MAX_NUMBERS:
        raise RequestError(
            413, f"weights: at most {limits.MAX_NUMBERS:,} at a time: ask fewer queries"
        )
    for answer, one in zip(answers, told, strict=True):
        one |= {name: getattr(answer, name) for name in names}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/attend",
    object_schema("Pooled", {"value": {}}, hint=NO_ROWS),
    body=ATTEND_BODY,
)
def attend_database(served: DatabaseRegistry, given: RequestData) -> Any:
    """Pool the values for a query, or for each of a list, as numbers alone."""
    kept, how = given.served_database, dict(given.body)
    query, version = how.pop("query"), how.pop("at", None)
    count_characters(query)
    queries, single = kept.parse_queries(query)
    check_query_count(len(queries))
    database = kept.at_version(version)
    value = database.attend(queries, **build_options(how))
    hint = "" if value.any() else database.why_no_rows(how.get("where"))
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
            "description": "The first one; 0 is the oldest.",
        },
        "count": {
            **COUNT_SCHEMA,
            "maximum": limits.MAX_ROWS,
            "description": "How many; 20 by default.",
        },
        "where": WHERE_SCHEMA,
        "at": VERSION_SCHEMA,
    },
)
def list_rows(served: DatabaseRegistry, given: RequestData) -> Any:
    """Rows with all their columns, the oldest first."""
    at = given.query_params
    database, where = given.served_database.at_version(at.get("at")), at.get("where")
    start, count = at.get("from", 0), at.get("count", 20)
    found = list(database.rows(where=where, start=start, count=count))
    total = database.count(where)
    hint = "" if total else database.why_no_rows(where)
    return {"from": start, "total": total, "rows": found, **({"hint": hint} if hint else {})}


@ROUTES(
    "POST",
    f"{DATABASE_PATH}/rows",
    object_schema("Added", STATE_PROPERTIES, inserted=COUNT_SCHEMA),
    right="write",
    body=ADD_BODY,
    error_statuses=(409,),
)
async def add_rows(served: DatabaseRegistry, given: RequestData) -> Any:
    """Add rows, all or none; they are on disk before the answer comes."""
    kept = _require_writable(given.served_database)
    return await asyncio.wrap_future(
        kept.write_executor.submit(_write_rows, kept, given.body, given.has_tagged_cells)
    )


def _write_rows(kept: ServedDatabase, body: dict[str, Any], exactly: bool) -> dict[str, Any]:
    database, cells = kept.database, body["rows"]
    if not exactly:
        example = kept.example_cells({name for row in cells for name in row})
        cells = [
            {
                name: parsing.cell_from_json(cell, example.get(name), name)
                for name, cell in row.items()
            }
            for row in cells
        ]
    about = kept.get_profile().info
    key, value = about["key"] or ["key"], about["value"] or ["value"]
    for i, row in enumerate(cells):
        if not isinstance(row, dict):
            raise DtypeError(f"rows[{i}] must be a mapping of columns, not {type(row).__name__}")
        for name in key:
            check_text_length(row.get(name), f"rows[{i}].{name}")
        for name, cell in row.items():
            if isinstance(cell, str | bytes) and len(cell) > limits.CELL:
                raise RequestError(
                    413,
                    f"rows[{i}].{name}: at most {limits.CELL:,} characters, not {len(cell):,}: "
                    "store a value this long in a file of its own",
                )
        if any(row.get(name) is None for name in key):
            raise ArgumentError(f"rows[{i}] has no key: give {', '.join(key)}")
    if not body.get("update"):
        database.extend(cells)
        return _current_state(kept)
    changed: list[tuple[Any, Any]] = []
    for i, row in enumerate(cells):
        if set(row) - {*key, *value}:
            raise ArgumentError(
                f"rows[{i}]: an update has the key {', '.join(key)} and of the others "
                f"{', '.join(value)}"
            )
        parts = tuple(row[name] for name in key)
        told = {name: row[name] for name in value if name in row}
        one = parts if len(key) > 1 else parts[0]
        changed.append((one, told if len(value) > 1 else told.get(value[0])))
    inserted = database.update(changed)
    return {**_current_state(kept), "inserted": inserted}


@ROUTES(
    "GET",
    f"{DATABASE_PATH}/rows/{{key}}",
    object_schema("Found", {"key": {}}, value={}, values={"type": "array"}),
    query={
        "all": {"type": "boolean", "description": "Every value of a key that repeats."},
        "at": VERSION_SCHEMA,
    },
)
def get_row(served: DatabaseRegistry, given: RequestData) -> Any:
    """Look a key up exactly; where it is absent, the nearest are named."""
    database, key = (
        given.served_database.at_version(given.query_params.get("at")),
        _parse_path_key(given),
    )
    if given.query_params.get("all"):
        found = database.get_all(key) or [database[key]]
        return {"key": key, "values": list(found)}
    return {"key": key, "value": database[key]}


def _parse_path_key(given: RequestData) -> Any:
    """The key that a path names, by its text or as it is; one of another kind is nobody's."""
    try:
        if given.has_tagged_cells:
            return encoding.loads(given.path_key)
        return given.served_database.parse_key(given.path_key, "the key")
    except ArgumentError as error:
        raise RequestError(
            404, str(error), kind="KeyNotFoundError", key=given.path_key, nearest=[]
        ) from None


@ROUTES(
    "DELETE",
    f"{DATABASE_PATH}/rows/{{key}}",
    object_schema("Removed", {"removed": COUNT_SCHEMA, **STATE_PROPERTIES}),
    right="write",
    error_statuses=(409,),
)
async def remove_rows(served: DatabaseRegistry, given: RequestData) -> Any:
    """Take out every row that has a key."""
    kept = _require_writable(given.served_database)

    def remove_and_report() -> dict[str, Any]:
        count = kept.database.remove([_parse_path_key(given)])
        return {"removed": count, **_current_state(kept)}

    return await asyncio.wrap_future(kept.write_executor.submit(remove_and_report))


def _require_writable(kept: ServedDatabase) -> ServedDatabase:
    if not kept.is_durable:
        raise RequestError(
            409, f"{kept.name} is a table in memory and cannot be written: import it"
        )
    return kept


def _current_state(kept: ServedDatabase) -> dict[str, Any]:
    return {"name": kept.name, "rows": len(kept.database), "version": kept.database.version}


@ROUTES(
    "GET",
    f"{DATABASE_PATH}/versions",
    object_schema("Versions", {"name": TEXT_SCHEMA, "versions": list_schema({"type": "object"})}),
)
def list_versions(served: DatabaseRegistry, given: RequestData) -> Any:
    """Every version that is kept, the oldest first."""
    found = given.served_database.database.versions()
    return {"name": given.served_database.name, "versions": [asdict(version) for version in found]}


@ROUTES("GET", f"{DATABASE_PATH}/info", INFO_SCHEMA, query={"at": VERSION_SCHEMA})
def get_info(served: DatabaseRegistry, given: RequestData) -> Any:
    """What a database holds: rows, columns, encoder, size."""
    database = given.served_database.at_version(given.query_params.get("at"))
    about, described = dict(database.info()), database.describe()
    del about["path"]  # where it lies is the server's own
    return {
        "name": given.served_database.name,
        **about,
        "types": {name: column["type"] for name, column in described.items()},
        "missing": {name: column["missing"] for name, column in described.items()},
        "uploaded": given.served_database.uploaded,
    }


@ROUTES(
    "POST",
    "/v1/weights",
    object_schema("Weighed", {"weights": {"type": "array"}}),
    body=WEIGHTS_BODY,
)
def compute_weights(served: DatabaseRegistry, given: RequestData) -> Any:
    """α(q, k) of vectors that are given: a row for each query."""
    how = dict(given.body)
    query, key = (_parse_matrix(name, how.pop(name)) for name in ("query", "key"))
    if query.shape[-2] * key.shape[-2] > limits.MAX_NUMBERS:
        raise RequestError(413, f"query and key: at most {limits.MAX_NUMBERS:,} weights at a time")
    mask = how.pop("mask", None)
    if isinstance(mask, list):
        mask = _parse_matrix("mask", mask, bool)
    return {"weights": qkv.weights(query, key, mask=mask, **build_options(how))}


def _parse_matrix(name: str, given: Any, kind: type = float) -> np.ndarray:
    try:
        found: np.ndarray = np.asarray(given, dtype=kind)
    except (ValueError, OverflowError):
        found = np.zeros(0)
    if found.ndim != 2 or not found.size:
        what = "numbers" if kind is float else "booleans, one for each key"
        raise ArgumentError(f"{name} must be rows of equally many {what}")
    return found


@ROUTES(
    "GET",
    "/healthz",
    object_schema("Health", {"status": TEXT_SCHEMA, "databases": COUNT_SCHEMA}),
    right=None,
)
async def check_health(served: DatabaseRegistry, given: RequestData) -> Any:
    """Whether the server answers."""
    return {"status": "ok", "databases": len(served.databases)}


@ROUTES("GET", "/metrics", TEXT_SCHEMA, media="text/plain")
def get_metrics(served: DatabaseRegistry, given: RequestData) -> Any:
    """What was counted, for Prometheus."""
    return Response(served.metrics.render_text(), media_type="text/plain; version=0.0.4")
