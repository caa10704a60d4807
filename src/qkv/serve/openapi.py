"""The OpenAPI 3.1 description, written from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import qkv
from qkv.serve.bodies import TEXT, record, typed
from qkv.serve.fit import Schema
from qkv.serve.route import Route
from qkv.serve.served import NAME

WHY = {
    400: "Not of the form that is described here.",
    401: "A token is wanted, or it is a wrong one.",
    403: "This token, or this page, may not do that.",
    404: "There is no such database, key or version.",
    409: "It does not fit what is there now.",
    413: "More than one request may ask for.",
    415: "The body is of another media type.",
    421: "The Host is not this server.",
    422: "Of the right form, but without meaning here: the sentence says why.",
    500: "A file of a database is damaged, or this is a bug.",
    501: "A package is missing here; the sentence says which.",
    503: "Too much at a time, or it took too long.",
}
ERROR = record("Error", {"error": TEXT})
PATH: dict[str, Schema] = {
    "key": typed("string", "The key as text; of several columns as JSON."),
    "call": {"type": "string", "pattern": "^[a-z]+$"},
}


def described(routes: Iterable[Route], names: Iterable[str], secured: bool) -> dict[str, Any]:
    """The description of these routes over databases of these names.

    >>> described([], [], secured=False)["openapi"]
    '3.1.0'
    """
    titled: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    name = named(names)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, name, secured, titled
        )
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "qkv",
            "version": qkv.__version__,
            "summary": "Attention as a database query, over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": titled},
    }
    if secured:
        bearer = {"type": "http", "scheme": "bearer"}
        told["components"]["securitySchemes"] = {"token": bearer}
    return told


def named(names: Iterable[str]) -> Schema:
    """The name of a database as a schema."""
    known = list(names)
    return {"type": "string", **({"enum": known} if known else {"pattern": NAME})}


def parameters(route: Route, name: Schema) -> list[dict[str, Any]]:
    """Those of a route's path, where databases are so named, and those behind the question mark."""
    within = {x: y for x, y in {"name": name, **PATH}.items() if f"{{{x}}}" in route.path}
    found = [_parameter(x, "path", schema, True) for x, schema in within.items()]
    return found + [
        _parameter(x, "query", schema, x in route.needs) for x, schema in route.query.items()
    ]


def _operation(route: Route, name: Schema, secured: bool, titled: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": anchor(route),
        "summary": route.tells,
        "parameters": parameters(route, name),
        "responses": {
            "200": {
                "description": "Done.",
                "content": {
                    route.media: {"schema": _hoisted(route.answer, titled)},
                    **{media: {"schema": {}} for media in route.also},
                },
            },
            **{
                str(status): {
                    "description": WHY[status],
                    "content": {"application/json": {"schema": _hoisted(ERROR, titled)}},
                }
                for status in refusals(route, secured)
            },
        },
    }
    if route.body is not None or route.raw:
        content: dict[str, Any] = {media: {"schema": {}} for media in route.raw if media}
        if route.body is not None:
            content["application/json"] = {"schema": _hoisted(route.body, titled)}
        found["requestBody"] = {"required": True, "content": content}
    if secured and route.right is not None:
        found["security"] = [{"token": []}]
    return found


def anchor(route: Route) -> str:
    """What a route is called where that is one word."""
    return re.sub(r"\W+", "-", f"{route.method.lower()}{route.path}").strip("-")


def refusals(route: Route, secured: bool) -> list[int]:
    """Every status but 200 that a route may answer with."""
    found = {400, 403, 421, 500, 503, *route.refuses}
    if secured and route.right is not None:
        found.add(401)
    if route.named:
        found |= {404, 422, 501}
    if route.body is not None or route.raw:
        found |= {413, 415, 422, 501}
    return sorted(found)


def _parameter(name: str, place: str, schema: Schema, needed: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": needed, "schema": dict(schema)}


def _hoisted(schema: Any, named: dict[str, Any]) -> Any:
    """The schema with every titled one inside of it named once, among the components."""
    if isinstance(schema, list):
        return [_hoisted(part, named) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    inside = {name: _hoisted(part, named) for name, part in schema.items()}
    title = inside.get("title")
    if not isinstance(title, str):
        return inside
    named[title] = inside
    return {"$ref": f"#/components/schemas/{title}"}
