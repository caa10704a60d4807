"""The page as the server provides it: its files, its views, and the calls that it makes."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

from starlette.responses import Response

from qkv import weightings
from qkv.errors import ArgumentError, QkvError
from qkv.page import calls, tables
from qkv.page.components import build_component
from qkv.page.html_file import read_module
from qkv.page.packing import pack_arrays
from qkv.page.views import build_views
from qkv.serve import limits
from qkv.serve.databases import NAME_PATTERN, DatabaseRegistry, check_weighting
from qkv.serve.errors import RequestError
from qkv.serve.route import RequestData, Route, Routes
from qkv.serve.schemas import (
    COUNT_SCHEMA,
    SUMMARY_PROPERTIES,
    TEXT_SCHEMA,
    body_schema,
    list_schema,
    object_schema,
)

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


def _file_route(path: str, summary: str, media: str, text: Callable[[], str]) -> Route:
    """Return the route of a file that every client may read, even without a token."""

    def send_file(registry: DatabaseRegistry, request: RequestData) -> Any:
        return Response(text(), media_type=media)

    return Route("GET", path, send_file, summary, TEXT_SCHEMA, right=None, media=media)


def _read_static(name: str) -> str:
    return resources.files("qkv.serve").joinpath("static", name).read_text(encoding="utf-8")


UPLOAD_MEDIA_TYPES = ("text/csv", "text/tab-separated-values", "application/octet-stream")
NAME_SCHEMA = {"type": "string", "pattern": NAME_PATTERN}
COLUMNS_SCHEMA = list_schema(TEXT_SCHEMA, minItems=1, maxItems=64)
CALL_RESULT_SCHEMA = object_schema("Called", {"result": {}, "buffers": list_schema(TEXT_SCHEMA)})
SKIPPED_SCHEMA = list_schema(
    object_schema("Skipped", {"why": TEXT_SCHEMA, "rows": list_schema(COUNT_SCHEMA)}),
    description="The skipped rows, by their numbers in the file; the first row is 1.",
)
ROUTES = Routes(
    [
        _file_route("/", "The page.", "text/html", lambda: PAGE_HTML),
        _file_route(
            "/page/qkv.js", "The JavaScript module of the page.", "text/javascript", read_module
        ),
        _file_route(
            "/page/boot.js",
            "The JavaScript that starts the page.",
            "text/javascript",
            partial(_read_static, "boot.js"),
        ),
        _file_route(
            "/page/page.css",
            "The stylesheet of the page.",
            "text/css",
            partial(_read_static, "page.css"),
        ),
        _file_route(
            "/page/reference.css",
            "The stylesheet of the API reference.",
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
def rekey_database(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Create a database from the rows of another database, with other columns as key and value."""
    return _pack_result(_dispatch_call("columns", registry, request.body, _upload_deadline()))


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
def run_page_call(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Run one of the page's calls by its name, and return its result."""
    name = request.path_params["call"]
    if name not in {"views", *calls.CALL_HANDLERS} - WRITING_CALLS:
        names = ", ".join(sorted({"views", *calls.CALL_HANDLERS} - WRITING_CALLS))
        raise RequestError(404, f"unknown call {name[:40]!r}; the calls are {names}")
    return _pack_result(
        page_views(registry) if name == "views" else _dispatch_call(name, registry, request.body)
    )


WRITING_CALLS = {"upload", "columns"}
"""The calls that add a database. The client needs the right to upload."""


def _upload_deadline() -> float:
    return time.monotonic() + limits.UPLOAD_TIMEOUT_SECONDS


def _dispatch_call(
    name: str, registry: DatabaseRegistry, args: dict[str, Any], deadline: float | None = None
) -> Any:
    try:
        if args.get("weighting"):
            check_weighting(build_component(weightings.NAMES, args["weighting"]))
        if args.get("database") in registry.databases:
            registry.find_database(args["database"])
        if deadline is not None:
            return tables.rekey_database(args, registry, deadline)
        return calls.run_call(name, args, registry)
    except QkvError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Only the page makes these calls, so there is no schema that checks their arguments.
        raise ArgumentError(
            f"{name}: invalid arguments ({type(error).__name__}: {error})"
        ) from error


def _pack_result(value: Any) -> dict[str, Any]:
    result, buffers = pack_arrays(value)
    texts = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
    return {"result": result, "buffers": texts}


def page_views(registry: DatabaseRegistry) -> list[dict[str, Any]]:
    """Return the views of the page: that of the databases first, then those without a database.

    Without a database, the examples come first.
    """
    summaries = tables.list_databases({}, registry)
    examples = [] if summaries else [{"view": "database", "data": {"examples": True}}]
    data = {"view": "data", "data": {"databases": summaries}}
    others = [{"view": name} for name in ("sentence", "regression", "scores", "model")]
    return build_views([*examples, data, *others])


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
        "key": {**TEXT_SCHEMA, "description": "The columns of the key, separated by commas."},
        "value": {**TEXT_SCHEMA, "description": "The columns of the value, separated by commas."},
    },
    required_parameters=("name", "format"),
    error_statuses=(409,),
)
def upload_database(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Upload a file as a database. The server keeps it in memory until it stops."""
    params = request.query_params
    columns = {name: params[name].split(",") for name in ("key", "value") if params.get(name)}
    args = {"name": params["name"], "format": params["format"], "data": request.body, **columns}
    return {**tables.upload_table(args, registry, _upload_deadline()), "uploaded": True}


@ROUTES(
    "DELETE",
    "/v1/databases/{name}",
    object_schema("Forgotten", {"name": TEXT_SCHEMA}),
    right="upload",
    error_statuses=(409,),
)
def forget_database(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Delete an uploaded database."""
    del registry[request.served_database.name]
    return {"name": request.served_database.name}
