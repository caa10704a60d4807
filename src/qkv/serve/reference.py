"""The API as a page that is read: each route with what goes in, what comes out, and how it is
called by curl and from Python."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from html import escape
from typing import Any
from urllib.parse import urlencode

import qkv
from qkv.serve.fit import Schema
from qkv.serve.openapi import WHY, anchor, named, parameters, refusals
from qkv.serve.route import Route

DEPTH = 4
"""Objects within objects that an example shows."""

ONE, MODEL = "/v1/databases/{name}", "/v2/models/{name}"
EXAMPLES: dict[tuple[str, str], Any] = {
    ("POST", f"{ONE}/ask"): {"query": "the alchmist", "top": 3},
    ("POST", f"{ONE}/attend"): {"query": 3.5, "score": "gaussian:0.15"},
    ("POST", f"{ONE}/rows"): {"rows": [{"title": "The Trial", "author": "Franz Kafka"}]},
    ("POST", "/v1/weights"): {"query": [[1.0, 0.0]], "key": [[1.0, 0.0], [0.0, 1.0]]},
    ("POST", f"{MODEL}/infer"): {
        "inputs": [{"name": "query", "datatype": "BYTES", "shape": [1], "data": ["the alchmist"]}]
    },
}
"""Bodies that say more than what their schema alone would give."""

CALLS = {
    ("GET", "/v1/databases"): "client.databases()",
    ("POST", f"{ONE}/ask"): 'client.ask({name}, "the alchmist", top=3)',
    ("POST", f"{ONE}/attend"): 'client.attend({name}, 3.5, score="gaussian:0.15")',
    ("GET", f"{ONE}/rows"): "list(client.rows({name}, count=20))",
    ("POST", f"{ONE}/rows"): 'client.add({name}, "The Trial", "Franz Kafka")',
    ("GET", f"{ONE}/rows/{{key}}"): 'client[{name}]["The Trial"]',
    ("DELETE", f"{ONE}/rows/{{key}}"): 'client.remove({name}, "The Trial")',
    ("GET", f"{ONE}/versions"): "client.versions({name})",
    ("GET", f"{ONE}/info"): "client.info({name})",
    ("POST", f"{MODEL}/infer"): """import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient({host})
query = triton.InferInput("query", [1], "BYTES")
query.set_data_from_numpy(np.array(["the alchmist"], dtype=object))
client.infer({name}, [query]).as_numpy("value")""",
}
"""The same in Python, where a client has a word for it."""


def page(routes: Iterable[Route], names: Iterable[str], secured: bool, url: str) -> str:
    """Routes over databases of these names as HTML; `url` is where its examples call."""
    shown = [route for route in routes if not route.path.startswith("/page/")]  # the page's own
    name = named(names)
    links = "".join(
        f'<li><a href="#{anchor(x)}"><b>{x.method}</b> {escape(x.path)}</a></li>' for x in shown
    )
    parts = "".join(_section(route, name, secured, url.rstrip("/")) for route in shown)
    title = f"qkv {qkv.__version__}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page/reference.css">'
        f'<main><h1>{title}</h1><p><a href="/openapi.json">openapi.json</a> is the same for '
        f"programs.</p><nav><ul>{links}</ul></nav>{parts}</main></html>"
    )


def _section(route: Route, name: Schema, secured: bool, url: str) -> str:
    given = parameters(route, name)
    parts = [
        f'<section id="{anchor(route)}"><h2><b>{route.method}</b> {escape(route.path)}</h2>',
        _prose(route.tells),
    ]
    if given:
        rows = [(x["name"], x["in"], x["schema"], x["required"]) for x in given]
        parts.append(_table(("parameter", "in", "type", ""), rows))
    if route.body is not None:
        parts.append(f"<h3>Body</h3>{_shape(route.body)}")
    parts.append(f"<h3>Answers</h3><dl><dt>200</dt><dd>{_shape(route.answer)}</dd>")
    for status in refusals(route, secured):
        parts.append(f"<dt>{status}</dt><dd>{_prose(WHY[status])}</dd>")
    parts.append("</dl><h3>Try it</h3>")
    return "".join([*parts, *_examples(route, name, secured, url, given)]) + "</section>"


def _examples(
    route: Route, name: Schema, secured: bool, url: str, given: list[dict[str, Any]]
) -> Iterable[str]:
    """The same call by curl and from Python."""
    address, text, media = url + _filled(route.path, given), None, None
    words = ["curl", *(["-X", route.method] if route.method != "GET" else [])]
    words.append(shlex.quote(address))
    words += ['-H "Authorization: Bearer $QKV_TOKEN"'] if secured else []
    known = route.method, route.path
    if route.body is not None:
        media = "application/json"
        text = json.dumps(EXAMPLES.get(known) or _example(route.body), ensure_ascii=False)
        words.append(f"--json {shlex.quote(text)}")
    elif route.raw:
        media = route.raw[0]
        words.append(f"-H 'Content-Type: {media}' --data-binary @FILE")
    yield _code("curl", " ".join(words))
    if call := CALLS.get(known):
        opened = f"qkv.Client({url!r}{', token' if secured else ''})"
        source = call.format(name=repr(_example(name)), host=repr(url.partition("//")[2]))
        lines = source if "import" in source else f"import qkv\n\nclient = {opened}\n{source}"
    else:
        lines = _plain(route.method, address, secured, text, media)
    yield _code("Python", lines)


def _plain(method: str, address: str, token: bool, text: str | None, media: str | None) -> str:
    """A call by the standard library alone."""
    told = [f"'Content-Type': {media!r}"] if media else []
    told += ['"Authorization": f"Bearer {token}"'] if token else []
    more = f", method={method!r}" if method != "GET" else ""
    if media:
        more += f", data={text!r}.encode()" if text else ', data=Path("FILE").read_bytes()'
    more += f", headers={{{', '.join(told)}}}" if told else ""
    start = "from pathlib import Path\n" if media and not text else ""
    return f"""{start}from urllib.request import Request, urlopen

print(urlopen(Request({address!r}{more})).read().decode())"""


def _code(language: str, source: str) -> str:
    return f"<p>{language}</p><pre><code>{escape(source)}</code></pre>"


def _shape(schema: Schema) -> str:
    """An object's properties as a table, anything else in a word."""
    if "properties" not in schema:
        return f"<p>{escape(_type(schema))}</p>"
    needed = schema.get("required", ())
    rows = [(name, None, item, name in needed) for name, item in schema["properties"].items()]
    return _table(("name", None, "type", ""), rows)


def _table(heads: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{x}</th>" for x in heads if x is not None)
    lines = []
    for name, place, schema, needed in rows:
        cells = [f"<code>{escape(name)}</code>{' *' if needed else ''}"]
        cells += [] if place is None else [escape(place)]
        cells += [escape(_type(schema)), _prose(schema.get("description", ""))]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _type(schema: Schema) -> str:
    """A schema in a word or two."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "anything")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if "array" in kinds and "items" in schema:
        kinds[kinds.index("array")] = f"list of {_type(schema['items'])}"
    return " or ".join(kinds)


def _example(schema: Schema, depth: int = 0) -> Any:
    """The plainest thing that fits a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], depth)
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) or not kind else kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required", ()) if depth < DEPTH else ()
        return {name: _example(properties[name], depth + 1) for name in names}
    if kind == "array":
        return [_example(schema.get("items", {}), depth + 1)] if depth < DEPTH else []
    return {"integer": 1, "number": 0.5, "boolean": True}.get(str(kind), "text")


def _filled(path: str, given: list[dict[str, Any]]) -> str:
    """A path with an example for each parameter that is needed."""
    examples = {
        x["name"]: "The%20Trial" if x["name"] == "key" else str(_example(x["schema"]))
        for x in given
        if x["required"]
    }
    filled = re.sub(r"{([^{}]*)}", lambda found: examples.pop(found[1], found[1]), path)
    return f"{filled}?{urlencode(examples)}" if examples else filled


def _prose(text: str) -> str:
    """A paragraph, with `code` between backticks."""
    told = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f"<p>{told}</p>" if text else ""
