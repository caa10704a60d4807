"""The API's description as a page that is read: each route with what goes in, what comes out, and
how it is called by curl and from Python."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import urlencode

Schema = Mapping[str, Any]

METHODS = ("get", "post", "put", "patch", "delete")
DEPTH = 4
"""Objects within objects that an example shows."""

ONE, MODEL = "/v1/databases/{name}", "/v2/models/{name}"
EXAMPLES: dict[tuple[str, str], Any] = {
    ("post", f"{ONE}/ask"): {"query": "the alchmist", "top": 3},
    ("post", f"{ONE}/attend"): {"query": 3.5, "score": "gaussian:0.15"},
    ("post", f"{ONE}/rows"): {"rows": [{"title": "The Trial", "author": "Franz Kafka"}]},
    ("post", "/v1/weights"): {"query": [[1.0, 0.0]], "key": [[1.0, 0.0], [0.0, 1.0]]},
    ("post", f"{MODEL}/infer"): {
        "inputs": [{"name": "query", "datatype": "BYTES", "shape": [1], "data": ["the alchmist"]}]
    },
}
"""Bodies that say more than what their schema alone would give."""

CALLS = {
    ("get", "/v1/databases"): "client.databases()",
    ("post", f"{ONE}/ask"): 'client.ask({name}, "the alchmist", top=3)',
    ("post", f"{ONE}/attend"): 'client.attend({name}, 3.5, score="gaussian:0.15")',
    ("get", f"{ONE}/rows"): "list(client.rows({name}, count=20))",
    ("post", f"{ONE}/rows"): 'client.add({name}, "The Trial", "Franz Kafka")',
    ("get", f"{ONE}/rows/{{key}}"): 'client[{name}]["The Trial"]',
    ("delete", f"{ONE}/rows/{{key}}"): 'client.remove({name}, "The Trial")',
    ("get", f"{ONE}/versions"): "client.versions({name})",
    ("get", f"{ONE}/info"): "client.info({name})",
    ("post", f"{MODEL}/infer"): """import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient({host})
query = triton.InferInput("query", [1], "BYTES")
query.set_data_from_numpy(np.array(["the alchmist"], dtype=object))
client.infer({name}, [query]).as_numpy("value")""",
}
"""The same in Python, where a client has a word for it."""


def page(description: Schema, url: str) -> str:
    """The OpenAPI description as HTML; `url` is where its examples call."""
    about = description.get("info", {})
    routes = [
        (method, path, item[method])
        for path, item in description.get("paths", {}).items()
        for method in METHODS
        if method in item and not path.startswith("/page/")  # which is the page's own
    ]
    links = "".join(
        f'<li><a href="#{_anchor(method, path)}"><b>{method.upper()}</b> {escape(path)}</a></li>'
        for method, path, _ in routes
    )
    parts = "".join(_route(description, url, *route) for route in routes)
    title = escape(f"{about.get('title', 'API')} {about.get('version', '')}".strip())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page/reference.css">'
        f"<main><h1>{title}</h1>{_prose(about.get('description'))}"
        '<p><a href="/openapi.json">openapi.json</a> is the same for programs.</p>'
        f"<nav><ul>{links}</ul></nav>{parts}</main></html>"
    )


def _route(description: Schema, url: str, method: str, path: str, told: Schema) -> str:
    given = [_resolved(description, item) for item in told.get("parameters", ())]
    body = _content(_resolved(description, told.get("requestBody", {})))
    parts = [
        f'<section id="{_anchor(method, path)}"><h2><b>{method.upper()}</b> {escape(path)}</h2>',
        _prose(told.get("summary")),
        _prose(told.get("description")),
    ]
    if given:
        rows = [
            (item["name"], item["in"], item.get("schema", {}), item.get("required", False), item)
            for item in given
        ]
        parts.append(_table(description, ("parameter", "in", "type", ""), rows))
    if body is not None:
        parts.append(f"<h3>Body</h3>{_shape(description, body)}")
    parts.append("<h3>Answers</h3><dl>")
    for status, answer in told.get("responses", {}).items():
        answer = _resolved(description, answer)
        parts.append(f"<dt>{escape(str(status))}</dt><dd>{_prose(answer.get('description'))}")
        if str(status).startswith("2") and (schema := _content(answer)) is not None:
            parts.append(_shape(description, schema))
        parts.append("</dd>")
    parts.append("</dl><h3>Try it</h3>")
    name = _example(description, next((x["schema"] for x in given if x["name"] == "name"), {}))
    token = "securitySchemes" in description.get("components", {})
    takes = _resolved(description, told.get("requestBody", {})).get("content", {})
    address = shlex.quote(url.rstrip("/") + _filled(description, path, given))
    example = EXAMPLES.get((method, path)) or (body and _example(description, body))
    words = ["curl", address] if method == "get" else ["curl", "-X", method.upper(), address]
    words += ['-H "Authorization: Bearer $QKV_TOKEN"'] if token else []
    sent = None
    if "application/json" in takes:
        sent = json.dumps(example, ensure_ascii=False)
        words.append(f"--json {shlex.quote(sent)}")
    elif takes:
        words.append(f"-H 'Content-Type: {next(iter(takes))}' --data-binary @FILE")
    parts.append(_code("curl", " ".join(words)))
    if call := CALLS.get((method, path)):
        opened = f"qkv.Client({url.rstrip('/')!r}{', token' if token else ''})"
        source = call.format(name=repr(name), host=repr(url.partition("//")[2].rstrip("/")))
        lines = source if "import" in source else f"import qkv\n\nclient = {opened}\n{source}"
    else:
        lines = _plain(method, shlex.split(address)[0], token, sent, next(iter(takes), None))
    parts.append(_code("Python", lines))
    return "".join(parts) + "</section>"


def _plain(method: str, address: str, token: bool, text: str | None, media: str | None) -> str:
    """A call by the standard library alone."""
    headers = {"Content-Type": "application/json" if text else media} if media else {}
    told = [f"{name!r}: {value!r}" for name, value in headers.items()]
    told += ['"Authorization": f"Bearer {token}"'] if token else []
    more = f", method={method.upper()!r}" if method != "get" else ""
    if media:
        more += f", data={text!r}.encode()" if text else ', data=Path("FILE").read_bytes()'
    more += f", headers={{{', '.join(told)}}}" if told else ""
    start = "from pathlib import Path\n" if media and not text else ""
    return f"""{start}from urllib.request import Request, urlopen

print(urlopen(Request({address!r}{more})).read().decode())"""


def _code(language: str, source: str) -> str:
    return f"<p>{language}</p><pre><code>{escape(source)}</code></pre>"


def _shape(description: Schema, schema: Schema) -> str:
    """An object's properties as a table, anything else in a word."""
    schema = _resolved(description, schema)
    if "properties" not in schema:
        return f"<p>{escape(_type(description, schema))}</p>"
    needed = schema.get("required", ())
    rows = [(name, None, item, name in needed, item) for name, item in schema["properties"].items()]
    return _table(description, ("name", None, "type", ""), rows)


def _table(description: Schema, heads: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{x}</th>" for x in heads if x is not None)
    lines = []
    for name, place, schema, needed, about in rows:
        said = about.get("description") or _resolved(description, schema).get("description")
        cells = [f"<code>{escape(name)}</code>{' *' if needed else ''}"]
        cells += [] if place is None else [escape(place)]
        cells += [escape(_type(description, schema)), _prose(said)]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _type(description: Schema, schema: Any) -> str:
    """A schema in a word or two."""
    schema = _resolved(description, schema)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            found = (_type(description, item) for item in schema[several])
            return " or ".join(dict.fromkeys(found))
    if "enum" in schema:
        return " or ".join(json.dumps(item) for item in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type", "anything")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if "array" in kinds and "items" in schema:
        kinds[kinds.index("array")] = f"list of {_type(description, schema['items'])}"
    return " or ".join(kinds)


def _example(description: Schema, schema: Any, depth: int = 0) -> Any:
    """What a schema gives as an example, or the plainest thing that fits."""
    schema = _resolved(description, schema)
    for name in ("example", "default", "const"):
        if name in schema:
            return schema[name]
    for name in ("examples", "enum"):
        if schema.get(name):
            return schema[name][0]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _example(description, schema[several][0], depth)
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) or not kind else kind[0]
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        names = [x for x in properties if x in schema.get("required", ())] if depth < DEPTH else []
        return {name: _example(description, properties[name], depth + 1) for name in names}
    if kind == "array":
        return [_example(description, schema.get("items", {}), depth + 1)] if depth < DEPTH else []
    return {"integer": 1, "number": 0.5, "boolean": True}.get(str(kind), "text")


def _filled(description: Schema, path: str, given: list[Any]) -> str:
    """A path with an example for each parameter that is needed."""
    examples = {
        item["name"]: "The%20Trial"
        if item["name"] == "key"
        else str(_example(description, item.get("schema", {})))
        for item in given
        if item.get("required")
    }
    filled = re.sub(r"{([^}]*)}", lambda found: examples.pop(found[1], found[1]), path)
    return f"{filled}?{urlencode(examples)}" if examples else filled


def _content(told: Schema) -> Any:
    """The schema of the first form that a body or an answer has."""
    for media in told.get("content", {}).values():
        schema: Schema = media.get("schema", {})
        return {**schema, "example": media["example"]} if "example" in media else schema
    return None


def _resolved(description: Schema, item: Any) -> Any:
    while isinstance(item, Mapping) and "$ref" in item:
        found: Any = description
        for word in item["$ref"].removeprefix("#/").split("/"):
            found = found[word]
        item = found
    return item


def _prose(text: str | None) -> str:
    """Paragraphs, with `code` between backticks."""
    if not text:
        return ""
    paragraphs = (re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(x)) for x in text.split("\n\n"))
    return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)


def _anchor(method: str, path: str) -> str:
    return re.sub(r"\W+", "-", f"{method}{path}").strip("-")
