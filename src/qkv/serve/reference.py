"""The API reference as HTML: the parameters, body, responses and examples of each route."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from html import escape
from typing import Any
from urllib.parse import urlencode

import qkv
from qkv.serve.openapi import (
    STATUS_DESCRIPTIONS,
    all_error_statuses,
    build_parameters,
    database_name_schema,
    operation_id,
)
from qkv.serve.route import Route
from qkv.serve.validation import Schema

MAX_EXAMPLE_DEPTH = 4
"""The number of objects inside each other in an example."""

DATABASE_PATH, MODEL_PATH = "/v1/databases/{name}", "/v2/models/{name}"
EXAMPLE_BODIES: dict[tuple[str, str], Any] = {
    ("POST", f"{DATABASE_PATH}/ask"): {"query": "the alchmist", "top": 3},
    ("POST", f"{DATABASE_PATH}/attend"): {"query": 3.5, "score": "gaussian:0.15"},
    ("POST", f"{DATABASE_PATH}/rows"): {"rows": [{"title": "The Trial", "author": "Franz Kafka"}]},
    ("POST", "/v1/weights"): {"query": [[1.0, 0.0]], "key": [[1.0, 0.0], [0.0, 1.0]]},
    ("POST", f"{MODEL_PATH}/infer"): {
        "inputs": [{"name": "query", "datatype": "BYTES", "shape": [1], "data": ["the alchmist"]}]
    },
}
"""Example bodies of routes for which an example derived from the schema would say little."""

PYTHON_EXAMPLES = {
    ("GET", "/v1/databases"): "client.databases()",
    ("POST", f"{DATABASE_PATH}/ask"): 'client.ask({name}, "the alchmist", top=3)',
    ("POST", f"{DATABASE_PATH}/attend"): 'client.attend({name}, 3.5, score="gaussian:0.15")',
    ("GET", f"{DATABASE_PATH}/rows"): "list(client.rows({name}, count=20))",
    ("POST", f"{DATABASE_PATH}/rows"): 'client.add({name}, "The Trial", "Franz Kafka")',
    ("GET", f"{DATABASE_PATH}/rows/{{key}}"): 'client[{name}]["The Trial"]',
    ("DELETE", f"{DATABASE_PATH}/rows/{{key}}"): 'client.remove({name}, "The Trial")',
    ("GET", f"{DATABASE_PATH}/versions"): "client.versions({name})",
    ("GET", f"{DATABASE_PATH}/info"): "client.info({name})",
    ("POST", f"{MODEL_PATH}/infer"): """import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient({host})
query = triton.InferInput("query", [1], "BYTES")
query.set_data_from_numpy(np.array(["the alchmist"], dtype=object))
client.infer({name}, [query]).as_numpy("value")""",
}
"""Python code for the routes that a method of `qkv.Client` calls."""


def render_reference(routes: Iterable[Route], names: Iterable[str], secured: bool, url: str) -> str:
    """Return the reference of these routes as an HTML page.

    The examples call the server at `url`; `names` are the databases in the examples. `secured` says
    whether the server needs tokens.
    """
    shown = [route for route in routes if not route.path.startswith("/page/")]
    name = database_name_schema(names)
    links = "".join(
        f'<li><a href="#{operation_id(x)}"><b>{x.method}</b> {escape(x.path)}</a></li>'
        for x in shown
    )
    parts = "".join(_render_section(route, name, secured, url.rstrip("/")) for route in shown)
    title = f"qkv {qkv.__version__}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page/reference.css">'
        f'<main><h1>{title}</h1><p><a href="/openapi.json">openapi.json</a> describes the '
        f"same API for programs.</p><nav><ul>{links}</ul></nav>{parts}</main></html>"
    )


def _render_section(route: Route, name: Schema, secured: bool, url: str) -> str:
    parameters = build_parameters(route, name)
    parts = [
        f'<section id="{operation_id(route)}"><h2><b>{route.method}</b> {escape(route.path)}</h2>',
        _render_paragraph(route.summary),
    ]
    if parameters:
        rows = [(x["name"], x["in"], x["schema"], x["required"]) for x in parameters]
        parts.append(_render_table(("parameter", "in", "type", ""), rows))
    if route.body is not None:
        parts.append(f"<h3>Body</h3>{_render_schema(route.body)}")
    parts.append(
        f"<h3>Responses</h3><dl><dt>200</dt><dd>{_render_schema(route.response_schema)}</dd>"
    )
    for status in all_error_statuses(route, secured):
        parts.append(f"<dt>{status}</dt><dd>{_render_paragraph(STATUS_DESCRIPTIONS[status])}</dd>")
    parts.append("</dl><h3>Try it</h3>")
    return (
        "".join([*parts, *_render_examples(route, name, secured, url, parameters)]) + "</section>"
    )


def _render_examples(
    route: Route, name: Schema, secured: bool, url: str, parameters: list[dict[str, Any]]
) -> Iterable[str]:
    """Yield the HTML of two examples of a call: with curl, and in Python."""
    address, text, media = url + _fill_path(route.path, parameters), None, None
    words = ["curl", *(["-X", route.method] if route.method != "GET" else [])]
    words.append(shlex.quote(address))
    words += ['-H "Authorization: Bearer $QKV_TOKEN"'] if secured else []
    method_and_path = route.method, route.path
    if route.body is not None:
        media = "application/json"
        text = json.dumps(
            EXAMPLE_BODIES.get(method_and_path) or _example_value(route.body), ensure_ascii=False
        )
        words.append(f"--json {shlex.quote(text)}")
    elif route.raw_media_types:
        media = route.raw_media_types[0]
        words.append(f"-H 'Content-Type: {media}' --data-binary @FILE")
    yield _render_code("curl", " ".join(words))
    if call := PYTHON_EXAMPLES.get(method_and_path):
        opened = f"qkv.Client({url!r}{', token' if secured else ''})"
        source = call.format(name=repr(_example_value(name)), host=repr(url.partition("//")[2]))
        lines = source if "import" in source else f"import qkv\n\nclient = {opened}\n{source}"
    else:
        lines = _urllib_example(route.method, address, secured, text, media)
    yield _render_code("Python", lines)


def _urllib_example(
    method: str, address: str, token: bool, text: str | None, media: str | None
) -> str:
    """Return a Python example that uses only the standard library."""
    headers = [f"'Content-Type': {media!r}"] if media else []
    headers += ['"Authorization": f"Bearer {token}"'] if token else []
    more = f", method={method!r}" if method != "GET" else ""
    if media:
        more += f", data={text!r}.encode()" if text else ', data=Path("FILE").read_bytes()'
    more += f", headers={{{', '.join(headers)}}}" if headers else ""
    start = "from pathlib import Path\n" if media and not text else ""
    return f"""{start}from urllib.request import Request, urlopen

print(urlopen(Request({address!r}{more})).read().decode())"""


def _render_code(language: str, source: str) -> str:
    return f"<p>{language}</p><pre><code>{escape(source)}</code></pre>"


def _render_schema(schema: Schema) -> str:
    """Return the properties of an object schema as a table; for other schemas, the type."""
    if "properties" not in schema:
        return f"<p>{escape(_format_type(schema))}</p>"
    needed = schema.get("required", ())
    rows = [(name, None, item, name in needed) for name, item in schema["properties"].items()]
    return _render_table(("name", None, "type", ""), rows)


def _render_table(heads: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{x}</th>" for x in heads if x is not None)
    lines = []
    for name, location, schema, needed in rows:
        cells = [f"<code>{escape(name)}</code>{' *' if needed else ''}"]
        cells += [] if location is None else [escape(location)]
        cells += [escape(_format_type(schema)), _render_paragraph(schema.get("description", ""))]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _format_type(schema: Schema) -> str:
    """Return the type that a schema describes in a few words, such as "list of string"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_format_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "anything")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if "array" in kinds and "items" in schema:
        kinds[kinds.index("array")] = f"list of {_format_type(schema['items'])}"
    return " or ".join(kinds)


def _example_value(schema: Schema, depth: int = 0) -> Any:
    """Return a short value that matches a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example_value(schema["anyOf"][0], depth)
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) or not kind else kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required", ()) if depth < MAX_EXAMPLE_DEPTH else ()
        return {name: _example_value(properties[name], depth + 1) for name in names}
    if kind == "array":
        return (
            [_example_value(schema.get("items", {}), depth + 1)]
            if depth < MAX_EXAMPLE_DEPTH
            else []
        )
    return {"integer": 1, "number": 0.5, "boolean": True}.get(str(kind), "text")


def _fill_path(path: str, parameters: list[dict[str, Any]]) -> str:
    """Return a URL path in which each required parameter has an example value."""
    examples = {
        x["name"]: "The%20Trial" if x["name"] == "key" else str(_example_value(x["schema"]))
        for x in parameters
        if x["required"]
    }
    filled = re.sub(r"{([^{}]*)}", lambda match: examples.pop(match[1], match[1]), path)
    return f"{filled}?{urlencode(examples)}" if examples else filled


def _render_paragraph(text: str) -> str:
    """Return text as an HTML paragraph. Text between backticks is shown as code."""
    marked_up = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f"<p>{marked_up}</p>" if text else ""
