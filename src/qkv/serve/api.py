"""The routes of `/v1`: what a database does, by the names of `ask` and of the command line."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.responses import Response

import qkv
from qkv.answer import Answer
from qkv.database import spelled
from qkv.errors import ArgumentError, DtypeError
from qkv.page import tables
from qkv.serve import limits, wire
from qkv.serve.bodies import (
    ADD,
    ANSWER,
    ASK,
    AT,
    ATTEND,
    COUNT,
    INFO,
    NO_ROWS,
    NOW,
    RECORD,
    SHORT,
    TEXT,
    WEIGHTS,
    WHERE,
    list_of,
    record,
)
from qkv.serve.route import Given, Refused, Routes
from qkv.serve.served import Kept, Served, count_characters, few, options, short

ONE = "/v1/databases/{name}"

ROUTES = Routes()


@ROUTES(
    "GET", "/v1/databases", record("Databases", {"databases": list_of(record("Database", SHORT))})
)
def databases(served: Served, given: Given) -> Any:
    """The databases that are served."""
    every = list(served.databases.values())
    found = [tables.about(x.name, x.database) | {"uploaded": x.uploaded} for x in every]
    return {"databases": found}


@ROUTES("POST", f"{ONE}/ask", {"anyOf": [ANSWER, list_of(ANSWER)]}, body=ASK)
async def ask(served: Served, given: Given) -> Any:
    """Answer a query, or each of a list, from all rows: Σ α(q, k) v."""
    kept, how = given.kept, dict(given.body)
    query = how.pop("query")
    more = [name for name in ("weights", "spread") if how.pop(name, False)]
    size, characters = few(kept.size(query)), count_characters(query)
    asked = kept.batches.ask(wire.dumps(how), query, size, characters)
    answers, single = await asyncio.wrap_future(asked)
    told = [wire.told(answer, given.exactly) for answer in answers]
    if more:
        await served.work(_more, answers, more, told)
    return told[0] if single else told


def _more(answers: list[Answer], names: list[str], told: list[dict[str, Any]]) -> None:
    """What an answer says only where it is asked for: the weights of all rows, the spread."""
    if "weights" in names and sum(answer.total for answer in answers) > limits.NUMBERS:
        raise Refused(413, f"weights: at most {limits.NUMBERS:,} at a time: ask fewer queries")
    for answer, one in zip(answers, told, strict=True):
        one |= {name: getattr(answer, name) for name in names}


@ROUTES("POST", f"{ONE}/attend", record("Pooled", {"value": {}}, hint=NO_ROWS), body=ATTEND)
def attend(served: Served, given: Given) -> Any:
    """Pool the values for a query, or for each of a list, as numbers alone."""
    kept, how = given.kept, dict(given.body)
    query, version = how.pop("query"), how.pop("at", None)
    count_characters(query)
    queries, single = kept.queries(query)
    few(len(queries))
    database = kept.at(version)
    value = database.attend(queries, **options(how))
    hint = "" if value.any() else database.why_no_rows(how.get("where"))
    return {"value": value[0] if single else value, **({"hint": hint} if hint else {})}


@ROUTES(
    "GET",
    f"{ONE}/rows",
    record("Rows", {"from": COUNT, "total": COUNT, "rows": list_of(RECORD)}, hint=NO_ROWS),
    query={
        "from": {**COUNT, "maximum": 2**53, "description": "The first one; 0 is the oldest."},
        "count": {**COUNT, "maximum": limits.ROWS, "description": "How many; 20 by default."},
        "where": WHERE,
        "at": AT,
    },
)
def rows(served: Served, given: Given) -> Any:
    """Rows with all their columns, the oldest first."""
    at = given.at
    database, where = given.kept.at(at.get("at")), at.get("where")
    start, count = at.get("from", 0), at.get("count", 20)
    found = list(database.rows(where=where, start=start, count=count))
    total = database.count(where)
    hint = "" if total else database.why_no_rows(where)
    return {"from": start, "total": total, "rows": found, **({"hint": hint} if hint else {})}


@ROUTES(
    "POST",
    f"{ONE}/rows",
    record("Added", NOW, inserted=COUNT),
    right="write",
    body=ADD,
    refuses=(409,),
)
async def add(served: Served, given: Given) -> Any:
    """Add rows, all or none; they are on disk before the answer comes."""
    kept = _writable(given.kept)
    return await asyncio.wrap_future(kept.writing.submit(_added, kept, given.body, given.cells))


def _added(kept: Kept, body: dict[str, Any], exactly: bool) -> dict[str, Any]:
    database, cells = kept.database, body["rows"]
    if not exactly:
        example = kept.example({name for row in cells for name in row})
        cells = [
            {name: spelled.cell(cell, example.get(name), name) for name, cell in row.items()}
            for row in cells
        ]
    about = kept.about().info
    key, value = about["key"] or ["key"], about["value"] or ["value"]
    for i, row in enumerate(cells):
        if not isinstance(row, dict):
            raise DtypeError(f"rows[{i}] must be a mapping of columns, not {type(row).__name__}")
        for name in key:
            short(row.get(name), f"rows[{i}].{name}")
        for name, cell in row.items():
            if isinstance(cell, str | bytes) and len(cell) > limits.CELL:
                raise Refused(
                    413,
                    f"rows[{i}].{name}: at most {limits.CELL:,} characters, not {len(cell):,}: "
                    "store a value this long in a file of its own",
                )
        if any(row.get(name) is None for name in key):
            raise ArgumentError(f"rows[{i}] has no key: give {', '.join(key)}")
    if not body.get("update"):
        database.extend(cells)
        return _now(kept)
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
    return {**_now(kept), "inserted": inserted}


@ROUTES(
    "GET",
    f"{ONE}/rows/{{key}}",
    record("Found", {"key": {}}, value={}, values={"type": "array"}),
    query={
        "all": {"type": "boolean", "description": "Every value of a key that repeats."},
        "at": AT,
    },
)
def get(served: Served, given: Given) -> Any:
    """Look a key up exactly; where it is absent, the nearest are named."""
    database, key = given.kept.at(given.at.get("at")), _key(given)
    if given.at.get("all"):
        found = database.all(key) or [database[key]]
        return {"key": key, "values": list(found)}
    return {"key": key, "value": database[key]}


def _key(given: Given) -> Any:
    """The key that a path names, by its text or as it is; one of another kind is nobody's."""
    try:
        if given.cells:
            return wire.loads(given.key)
        return given.kept.cell(given.key, "the key")
    except ArgumentError as error:
        raise Refused(404, str(error), kind="AbsentKey", key=given.key, nearest=[]) from None


@ROUTES(
    "DELETE",
    f"{ONE}/rows/{{key}}",
    record("Removed", {"removed": COUNT, **NOW}),
    right="write",
    refuses=(409,),
)
async def remove(served: Served, given: Given) -> Any:
    """Take out every row that has a key."""
    kept = _writable(given.kept)

    def removed() -> dict[str, Any]:
        count = kept.database.remove([_key(given)])
        return {"removed": count, **_now(kept)}

    return await asyncio.wrap_future(kept.writing.submit(removed))


def _writable(kept: Kept) -> Kept:
    if not kept.durable:
        raise Refused(409, f"{kept.name} is a table in memory and cannot be written: import it")
    return kept


def _now(kept: Kept) -> dict[str, Any]:
    return {"name": kept.name, "rows": len(kept.database), "version": kept.database.version}


@ROUTES(
    "GET",
    f"{ONE}/versions",
    record("Versions", {"name": TEXT, "versions": list_of({"type": "object"})}),
)
def versions(served: Served, given: Given) -> Any:
    """Every version that is kept, the oldest first."""
    found = given.kept.database.versions()
    return {"name": given.kept.name, "versions": [asdict(version) for version in found]}


@ROUTES("GET", f"{ONE}/info", INFO, query={"at": AT})
def info(served: Served, given: Given) -> Any:
    """What a database holds: rows, columns, encoder, size."""
    database = given.kept.at(given.at.get("at"))
    about, described = dict(database.info()), database.describe()
    del about["path"]  # where it lies is the server's own
    return {
        "name": given.kept.name,
        **about,
        "types": {name: column["type"] for name, column in described.items()},
        "missing": {name: column["missing"] for name, column in described.items()},
        "uploaded": given.kept.uploaded,
    }


@ROUTES("POST", "/v1/weights", record("Weighed", {"weights": {"type": "array"}}), body=WEIGHTS)
def weights(served: Served, given: Given) -> Any:
    """α(q, k) of vectors that are given: a row for each query."""
    how = dict(given.body)
    query, key = (_array(name, how.pop(name)) for name in ("query", "key"))
    if query.shape[-2] * key.shape[-2] > limits.NUMBERS:
        raise Refused(413, f"query and key: at most {limits.NUMBERS:,} weights at a time")
    mask = how.pop("mask", None)
    if isinstance(mask, list):
        mask = _array("mask", mask, bool)
    return {"weights": qkv.weights(query, key, mask=mask, **options(how))}


def _array(name: str, given: Any, kind: type = float) -> np.ndarray:
    try:
        found: np.ndarray = np.asarray(given, dtype=kind)
    except (ValueError, OverflowError):
        found = np.zeros(0)
    if found.ndim != 2 or not found.size:
        what = "numbers" if kind is float else "booleans, one for each key"
        raise ArgumentError(f"{name} must be rows of equally many {what}")
    return found


@ROUTES("GET", "/healthz", record("Health", {"status": TEXT, "databases": COUNT}), right=None)
async def health(served: Served, given: Given) -> Any:
    """Whether the server answers."""
    return {"status": "ok", "databases": len(served.databases)}


@ROUTES("GET", "/metrics", TEXT, media="text/plain")
def metrics(served: Served, given: Given) -> Any:
    """What was counted, for Prometheus."""
    return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")
