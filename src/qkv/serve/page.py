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
from qkv.page.file import module
from qkv.page.pack import pack
from qkv.page.views import views
from qkv.serve import limits
from qkv.serve.bodies import COUNT, SHORT, TEXT, body, list_of, record
from qkv.serve.route import Given, Refused, Route, Routes
from qkv.serve.served import NAME, Served, options

if TYPE_CHECKING:
    from qkv.database import Database

HTML = """<!doctype html>
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


def _file(path: str, tells: str, media: str, text: Callable[[], str]) -> Route:
    """A file of the page, which anyone may read."""

    def file(served: Served, given: Given) -> Any:
        return Response(text(), media_type=media)

    return Route("GET", path, file, tells, TEXT, right=None, media=media)


def _static(name: str) -> str:
    return resources.files("qkv.serve").joinpath("static", name).read_text(encoding="utf-8")


FILE = ("text/csv", "text/tab-separated-values", "application/octet-stream")
NAMED = {"type": "string", "pattern": NAME}
PICKED = list_of(TEXT, minItems=1, maxItems=64)
CALLED = record("Called", {"result": {}, "buffers": list_of(TEXT)})
SKIPPED = list_of(
    record("Skipped", {"why": TEXT, "rows": list_of(COUNT)}),
    description="Rows that were left out, by their numbers in the file: the first is 1.",
)
ROUTES = Routes(
    [
        _file("/", "The page.", "text/html", lambda: HTML),
        _file("/page/qkv.js", "Its module.", "text/javascript", module),
        _file("/page/boot.js", "What starts it.", "text/javascript", partial(_static, "boot.js")),
        _file("/page/page.css", "Around it.", "text/css", partial(_static, "page.css")),
        _file(
            "/page/reference.css", "How this is set.", "text/css", partial(_static, "reference.css")
        ),
    ]
)


@ROUTES(
    "POST",
    "/page/call/columns",
    CALLED,
    right="upload",
    body=body("Columns", {"database": TEXT, "key": PICKED}, name=NAMED, value=PICKED),
    refuses=(409,),
)
def columns(served: Served, given: Given) -> Any:
    """What the page asks to be kept: the rows of a database by another key and value."""
    return _packed(_answered("columns", served, given.body, _upload_deadline()))


@ROUTES(
    "POST",
    "/page/call/{call}",
    CALLED,
    body={
        "title": "Call",
        "type": "object",
        "properties": {"top": {"type": "integer", "minimum": 1, "maximum": limits.TOP}},
    },
    refuses=(404,),
)
def call(served: Served, given: Given) -> Any:
    """What the page asks, by name."""
    name = given.path["call"]
    if name not in {"views", *calls.CALLS} - KEEPS:
        known = ", ".join(sorted({"views", *calls.CALLS} - KEEPS))
        raise Refused(404, f"a page calls {known}, not {name[:40]!r}")
    return _packed(shown(served) if name == "views" else _answered(name, served, given.body))


TABS = 6
"""Databases that have a tab of their own; the others are found among "Your data"."""

KEEPS = {"upload", "columns"}
"""Calls that keep something, and so need more than to read."""


def _upload_deadline() -> float:
    return time.monotonic() + limits.UPLOAD_SECONDS


def _answered(
    name: str, served: Served, args: dict[str, Any], deadline: float | None = None
) -> Any:
    try:
        if isinstance(args.get("weighting"), str):
            options({"weighting": args["weighting"]})
        if args.get("database") in served.databases:
            served.find(args["database"])
        if deadline is not None:
            return tables.columns(args, served, deadline)
        return calls.call(name, args, served)
    except QkvError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The page knows what a call takes; whoever sends something else is told no more than this.
        told = f"{name}: these are not its arguments ({type(error).__name__}: {error})"
        raise ArgumentError(told) from error


def _packed(found: Any) -> dict[str, Any]:
    result, buffers = pack(found)
    texts = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
    return {"result": result, "buffers": texts}


def shown(served: Served) -> list[dict[str, Any]]:
    """The views of the page: the first databases by themselves, then those that need none."""
    first = list(served.databases.values())[:TABS]
    found = [view for kept in first for view in _view(kept.name, kept.database)]
    rest = ["data", "sentence", "regression", "scores", "model"]
    own = tables.databases({}, served)
    return [
        *(found or views({"view": "database", "data": {"examples": True}})),
        *views(
            [{"view": name, "data": {"databases": own} if name == "data" else {}} for name in rest]
        ),
    ]


def _view(name: str, database: Database) -> list[dict[str, Any]]:
    found = views(database)
    return [{**view, "title": name, "data": {**view["data"], "database": name}} for view in found]


@ROUTES(
    "POST",
    "/v1/databases",
    record("Uploaded", SHORT | {"skipped": SKIPPED}),
    right="upload",
    raw=FILE,
    most=limits.UPLOAD,
    query={
        "name": NAMED,
        "format": {"type": "string", "enum": list(tables.FORMATS)},
        "key": {**TEXT, "description": "The key's columns, with commas between."},
        "value": {**TEXT, "description": "The value's columns, with commas between."},
    },
    needs=("name", "format"),
    refuses=(409,),
)
def upload(served: Served, given: Given) -> Any:
    """Read a file's rows into memory, to be asked until the server ends."""
    at = given.at
    how = {name: at[name].split(",") for name in ("key", "value") if at.get(name)}
    args = {"name": at["name"], "format": at["format"], "data": given.body, **how}
    return {**tables.upload(args, served, _upload_deadline()), "uploaded": True}


@ROUTES(
    "DELETE",
    "/v1/databases/{name}",
    record("Forgotten", {"name": TEXT}),
    right="upload",
    refuses=(409,),
)
def forget(served: Served, given: Given) -> Any:
    """Forget an upload."""
    del served[given.kept.name]
    return {"name": given.kept.name}
