"""The OpenAPI 3.1 description, written from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import qkv
from qkv.serve.databases import NAME_PATTERN
from qkv.serve.route import Route
from qkv.serve.schemas import TEXT_SCHEMA, object_schema, typed_schema
from qkv.serve.validation import Schema

STATUS_DESCRIPTIONS = {
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
ERROR_SCHEMA = object_schema("Error", {"error": TEXT_SCHEMA})
PATH_SCHEMAS: dict[str, Schema] = {
    "key": typed_schema("string", "The key as text; of several columns as JSON."),
    "call": {"type": "string", "pattern": "^[a-z]+$"},
}


def build_openapi(routes: Iterable[Route], names: Iterable[str], secured: bool) -> dict[str, Any]:
    """The description of these routes over databases of these names.

    >>> build_openapi([], [], secured=False)["openapi"]
    '3.1.0'
    """
    titled: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    name = database_name_schema(names)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _build_operation(
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


def database_name_schema(names: Iterable[str]) -> Schema:
    """The name of a database as a schema."""
    known = list(names)
    return {"type": "string", **({"enum": known} if known else {"pattern": NAME_PATTERN})}


def build_parameters(route: Route, name: Schema) -> list[dict[str, Any]]:
    """Those of a route's path, where databases are so named, and those behind the question mark."""
    within = {x: y for x, y in {"name": name, **PATH_SCHEMAS}.items() if f"{{{x}}}" in route.path}
    found = [_build_parameter(x, "path", schema, True) for x, schema in within.items()]
    return found + [
        _build_parameter(x, "query", schema, x in route.required_parameters)
        for x, schema in route.query.items()
    ]


def _build_operation(
    route: Route, name: Schema, secured: bool, titled: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation_id(route),
        "summary": route.summary,
        "parameters": build_parameters(route, name),
        "responses": {
            "200": {
                "description": "Done.",
                "content": {
                    route.media: {"schema": _hoist_components(route.response_schema, titled)},
                    **{media: {"schema": {}} for media in route.binary_media_types},
                },
            },
            **{
                str(status): {
                    "description": STATUS_DESCRIPTIONS[status],
                    "content": {
                        "application/json": {"schema": _hoist_components(ERROR_SCHEMA, titled)}
                    },
                }
                for status in all_error_statuses(route, secured)
            },
        },
    }
    if route.body is not None or route.raw_media_types:
        content: dict[str, Any] = {
            media: {"schema": {}} for media in route.raw_media_types if media
        }
        if route.body is not None:
            content["application/json"] = {"schema": _hoist_components(route.body, titled)}
        found["requestBody"] = {"required": True, "content": content}
    if secured and route.right is not None:
        found["security"] = [{"token": []}]
    return found


def operation_id(route: Route) -> str:
    """What a route is called where that is one word."""
    return re.sub(r"\W+", "-", f"{route.method.lower()}{route.path}").strip("-")


def all_error_statuses(route: Route, secured: bool) -> list[int]:
    """Every status but 200 that a route may answer with."""
    found = {400, 403, 421, 500, 503, *route.error_statuses}
    if secured and route.right is not None:
        found.add(401)
    if route.names_database:
        found |= {404, 422, 501}
    if route.body is not None or route.raw_media_types:
        found |= {413, 415, 422, 501}
    return sorted(found)


def _build_parameter(name: str, place: str, schema: Schema, needed: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": needed, "schema": dict(schema)}


def _hoist_components(schema: Any, named: dict[str, Any]) -> Any:
    """The schema with every titled one inside of it named once, among the components."""
    if isinstance(schema, list):
        return [_hoist_components(part, named) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    inside = {name: _hoist_components(part, named) for name, part in schema.items()}
    title = inside.get("title")
    if not isinstance(title, str):
        return inside
    named[title] = inside
    return {"$ref": f"#/components/schemas/{title}"}
