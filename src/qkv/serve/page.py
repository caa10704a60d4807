"""The page under a server: its files, what it is given, and the calls that it makes."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from qkv.errors import ArgumentError, QkvError
from qkv.page import calls, tables
from qkv.page.html_file import read_module
from qkv.page.packing import pack_arrays
from qkv.page.views import build_views
from qkv.serve import limits
from qkv.serve.databases import NAME_PATTERN, DatabaseRegistry, build_options
from qkv.serve.route import RequestData, RequestError, Route, Routes
from qkv.serve.schemas import (
    COUNT_SCHEMA,
    SUMMARY_PROPERTIES,
    TEXT_SCHEMA,
    body_schema,
    list_schema,
    object_schema,
)

if TYPE_CHECKING:
    from qkv.database import Database

PAGE_HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>qkv</title>
<link rel="stylesheet" href="/page/page.css">
<link rel="icon" href="data:,">
<main></main>
<form hidden data-testid="token-form">
<p role="status"></p>
<label for="token">Token</label>
<input id="token" type="password" autocomplete="current-password" required>
<button>Show the page</button>
</form>
<section hidden role="alert">
<p></p>
<button>Start again</button>
</section>
<script type="module" src="/page/boot.js"></script>
</html>
"""


def _file_route(path: str, tells: str, media: str, text: Callable[[], str]) -> Route:
    """A file of the page, which anyone may read."""

    def send_file(served: DatabaseRegistry, given: RequestData) -> Any:
        return Response(text(), media_type=media)

    return Route("GET", path, send_file, tells, TEXT_SCHEMA, right=None, media=media)


def _read_static(name: str) -> str:
    return resources.files("qkv.serve").joinpath("static", name).read_text(encoding="utf-8")


UPLOAD_MEDIA_TYPES = ("text/csv", "text/tab-separated-values", "application/octet-stream")
NAME_SCHEMA = {"type": "string", "pattern": NAME_PATTERN}
COLUMNS_SCHEMA = list_schema(TEXT_SCHEMA, minItems=1, maxItems=64)
CALL_RESULT_SCHEMA = object_schema("Called", {"result": {}, "buffers": list_schema(TEXT_SCHEMA)})
SKIPPED_SCHEMA = list_schema(
    object_schema("Skipped", {"why": TEXT_SCHEMA, "rows": list_schema(COUNT_SCHEMA)}),
    description="Rows that were left out, by their numbers in the file: the first is 1.",
)
ROUTES = Routes(
    [
        _file_route("/", "The page.", "text/html", lambda: PAGE_HTML),
        _file_route("/page/qkv.js", "Its module.", "text/javascript", read_module),
        _file_route(
            "/page/boot.js", "What starts it.", "text/javascript", partial(_read_static, "boot.js")
        ),
        _file_route("/page/page.css", "Around it.", "text/css", partial(_read_static, "page.css")),
        _file_route(
            "/page/reference.css",
            "How this is set.",
            "text/css",
            partial(_read_static, "reference.css"),
        ),
    ]
)


@ROUTES(
    "POST",
    "/page/call/columns",
    CALL_RESULT_SCHEMA,
    right="upload",
    body=body_schema(
        "Columns",
        {"database": TEXT_SCHEMA, "key": COLUMNS_SCHEMA},
        name=NAME_SCHEMA,
        value=COLUMNS_SCHEMA,
    ),
    error_statuses=(409,),
)
def rekey_database(served: DatabaseRegistry, given: RequestData) -> Any:
    """What the page asks to be kept: the rows of a database by another key and value."""
    return _pack_result(_dispatch_call("columns", served, given.body, _upload_deadline()))


@ROUTES(
    "POST",
    "/page/call/{call}",
    CALL_RESULT_SCHEMA,
    body={
        "title": "Call",
        "type": "object",
        "properties": {"top": {"type": "integer", "minimum": 1, "maximum": limits.MAX_TOP_ROWS}},
    },
    error_statuses=(404,),
)
def run_page_call(served: DatabaseRegistry, given: RequestData) -> Any:
    """What the page asks, by name."""
    name = given.path_params["call"]
    if name not in {"views", *calls.CALL_HANDLERS} - WRITING_CALLS:
        known = ", ".join(sorted({"views", *calls.CALL_HANDLERS} - WRITING_CALLS))
        raise RequestError(404, f"a page calls {known}, not {name[:40]!r}")
    return _pack_result(
        page_views(served) if name == "views" else _dispatch_call(name, served, given.body)
    )


MAX_DATABASE_TABS = 6
"""Databases that have a tab of their own; the others are found among "Your data"."""

WRITING_CALLS = {"upload", "columns"}
"""Calls that keep something, and so need more than to read."""


def _upload_deadline() -> float:
    return time.monotonic() + limits.UPLOAD_SECONDS


def _dispatch_call(
    name: str, served: DatabaseRegistry, args: dict[str, Any], deadline: float | None = None
) -> Any:
    try:
        if isinstance(args.get("weighting"), str):
            build_options({"weighting": args["weighting"]})
        if args.get("database") in served.databases:
            served.find_database(args["database"])
        if deadline is not None:
            return tables.rekey_database(args, served, deadline)
        return calls.run_call(name, args, served)
    except QkvError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The page knows what a call takes; whoever sends something else is told no more than this.
        told = f"{name}: these are not its arguments ({type(error).__name__}: {error})"
        raise ArgumentError(told) from error


def _pack_result(found: Any) -> dict[str, Any]:
    result, buffers = pack_arrays(found)
    texts = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
    return {"result": result, "buffers": texts}


def page_views(served: DatabaseRegistry) -> list[dict[str, Any]]:
    """The views of the page: the first databases by themselves, then those that need none."""
    first = list(served.databases.values())[:MAX_DATABASE_TABS]
    found = [view for kept in first for view in _database_views(kept.name, kept.database)]
    rest = ["data", "sentence", "regression", "scores", "model"]
    own = tables.list_databases({}, served)
    return [
        *(found or build_views({"view": "database", "data": {"examples": True}})),
        *build_views(
            [{"view": name, "data": {"databases": own} if name == "data" else {}} for name in rest]
        ),
    ]


def _database_views(name: str, database: Database) -> list[dict[str, Any]]:
    found = build_views(database)
    return [{**view, "title": name, "data": {**view["data"], "database": name}} for view in found]


@ROUTES(
    "POST",
    "/v1/databases",
    object_schema("Uploaded", SUMMARY_PROPERTIES | {"skipped": SKIPPED_SCHEMA}),
    right="upload",
    raw_media_types=UPLOAD_MEDIA_TYPES,
    max_body_bytes=limits.MAX_UPLOAD_BYTES,
    query={
        "name": NAME_SCHEMA,
        "format": {"type": "string", "enum": list(tables.FORMATS)},
        "key": {**TEXT_SCHEMA, "description": "The key's columns, with commas between."},
        "value": {**TEXT_SCHEMA, "description": "The value's columns, with commas between."},
    },
    required_parameters=("name", "format"),
    error_statuses=(409,),
)
def upload_database(served: DatabaseRegistry, given: RequestData) -> Any:
    """Read a file's rows into memory, to be asked until the server ends."""
    at = given.query_params
    how = {name: at[name].split(",") for name in ("key", "value") if at.get(name)}
    args = {"name": at["name"], "format": at["format"], "data": given.body, **how}
    return {**tables.upload_table(args, served, _upload_deadline()), "uploaded": True}


@ROUTES(
    "DELETE",
    "/v1/databases/{name}",
    object_schema("Forgotten", {"name": TEXT_SCHEMA}),
    right="upload",
    error_statuses=(409,),
)
def forget_database(served: DatabaseRegistry, given: RequestData) -> Any:
    """Forget an upload."""
    del served[given.served_database.name]
    return {"name": given.served_database.name}
