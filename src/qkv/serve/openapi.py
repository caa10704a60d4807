"""The OpenAPI 3.1 document of the server, built from its routes."""

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
    400: "A parameter or the body does not match its schema.",
    401: "The token is missing or wrong.",
    403: "This token, or a page from this origin, may not do that.",
    404: "The database, key or version does not exist.",
    409: "The request conflicts with the current state.",
    413: "The request exceeds a limit.",
    415: "The body has an unsupported media type.",
    421: "The Host header does not name this server.",
    422: "The request is valid but has no answer; `error` says why.",
    500: "A file of the database is damaged, or qkv has a bug.",
    501: "The server lacks an optional package; `error` names it.",
    503: "The server is busy, or the request took too long.",
}
ERROR_SCHEMA = object_schema("Error", {"error": TEXT_SCHEMA})
PATH_SCHEMAS: dict[str, Schema] = {
    "key": typed_schema("string", "The key as text. A key of several columns is a JSON array."),
    "call": {"type": "string", "pattern": "^[a-z]+$"},
}


def build_openapi(routes: Iterable[Route], names: Iterable[str], secured: bool) -> dict[str, Any]:
    """Return the OpenAPI document of these routes.

    `names` are the databases that the client may read. `secured` says whether the server needs
    tokens.

    >>> build_openapi([], [], secured=False)["openapi"]
    '3.1.0'
    """
    components: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    name = database_name_schema(names)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _build_operation(
            route, name, secured, components
        )
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "qkv",
            "version": qkv.__version__,
            "summary": "Attention as a database query, over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if secured:
        bearer = {"type": "http", "scheme": "bearer"}
        description["components"]["securitySchemes"] = {"token": bearer}
    return description


def database_name_schema(names: Iterable[str]) -> Schema:
    """Return the schema of the parameter `name`, which accepts these names of databases."""
    choices = list(names)
    return {"type": "string", **({"enum": choices} if choices else {"pattern": NAME_PATTERN})}


def build_parameters(route: Route, name: Schema) -> list[dict[str, Any]]:
    """Return the parameters of a route, those in its path first.

    `name` is the schema of `{name}`.
    """
    in_path = {x: y for x, y in {"name": name, **PATH_SCHEMAS}.items() if f"{{{x}}}" in route.path}
    return [_build_parameter(x, "path", schema, True) for x, schema in in_path.items()] + [
        _build_parameter(x, "query", schema, x in route.required_parameters)
        for x, schema in route.query.items()
    ]


def _build_operation(
    route: Route, name: Schema, secured: bool, components: dict[str, Any]
) -> dict[str, Any]:
    """Return the OpenAPI operation of a route; add the schemas that it uses to `components`."""
    operation: dict[str, Any] = {
        "operationId": operation_id(route),
        "summary": route.summary,
        "parameters": build_parameters(route, name),
        "responses": {
            "200": {
                "description": "Success.",
                "content": {
                    route.media: {"schema": _hoist_components(route.response_schema, components)},
                    **{media: {"schema": {}} for media in route.binary_media_types},
                },
            },
            **{
                str(status): {
                    "description": STATUS_DESCRIPTIONS[status],
                    "content": {
                        "application/json": {"schema": _hoist_components(ERROR_SCHEMA, components)}
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
            content["application/json"] = {"schema": _hoist_components(route.body, components)}
        operation["requestBody"] = {"required": True, "content": content}
    if secured and route.right is not None:
        operation["security"] = [{"token": []}]
    return operation


def operation_id(route: Route) -> str:
    """Return the identifier of a route in the document, such as `get-v1-databases`."""
    return re.sub(r"\W+", "-", f"{route.method.lower()}{route.path}").strip("-")


def all_error_statuses(route: Route, secured: bool) -> list[int]:
    """Return all error statuses that a route may answer with, ascending."""
    statuses = {400, 403, 421, 500, 503, *route.error_statuses}
    if secured and route.right is not None:
        statuses.add(401)
    if route.names_database:
        statuses |= {404, 422, 501}
    if route.body is not None or route.raw_media_types:
        statuses |= {413, 415, 422, 501}
    return sorted(statuses)


def _build_parameter(name: str, location: str, schema: Schema, required: bool) -> dict[str, Any]:
    return {"name": name, "in": location, "required": required, "schema": dict(schema)}


def _hoist_components(schema: Any, components: dict[str, Any]) -> Any:
    """Return a schema in which a reference replaces each part that has a title.

    The part itself is added to `components`.
    """
    if isinstance(schema, list):
        return [_hoist_components(part, components) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    resolved = {name: _hoist_components(part, components) for name, part in schema.items()}
    title = resolved.get("title")
    if not isinstance(title, str):
        return resolved
    components[title] = resolved
    return {"$ref": f"#/components/schemas/{title}"}
