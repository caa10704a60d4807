"""The Open Inference Protocol, version 2: a database as a model for standard clients.

The input `query` has the type of the keys: texts are BYTES (n), numbers FP64 (n), vectors FP32
(n, d), and other keys BYTES (n) with JSON.

The outputs `value` (n, …), `entropy` (n) and `confidence` (n) have an entry per query. The outputs
`weights`, `rows` and `keys`, each (n, top), are the weights, positions and keys of the `top`
heaviest rows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.responses import Response

import qkv
from qkv.answer import Answer
from qkv.database.query.inputs import is_number_key
from qkv.errors import ArgumentError
from qkv.serve import tensors
from qkv.serve.databases import (
    DatabaseRegistry,
    ServedDatabase,
    check_query_count,
    count_characters,
)
from qkv.serve.route import RequestData, Routes
from qkv.serve.schemas import (
    ASK_BODY,
    TEXT_LIST_SCHEMA,
    TEXT_SCHEMA,
    body_schema,
    list_schema,
    object_schema,
)
from qkv.serve.tensors import Tensor
from qkv.serve.validation import find_violation, normalize_integers, parse_validated_json
from qkv.util.formatting import to_jsonable

HEADER_LENGTH = "inference-header-content-length"
IGNORED_PARAMETERS = ("binary_data_output", "content_type", "headers", "priority", "timeout")
"""Parameters that some clients send with every request. The server ignores them."""
PARAMETERS_SCHEMA = body_schema(
    "Parameters",
    {},
    **{
        name: schema
        for name, schema in ASK_BODY["properties"].items()
        if name not in ("query", "weights", "spread")
    },
)


TENSOR_LIST_SCHEMA = list_schema({"type": "object"})
INFER_BODY = object_schema(
    "Infer",
    {"inputs": list_schema(tensors.TENSOR_SCHEMA, minItems=1)},
    outputs=list_schema(
        object_schema("Output", {"name": TEXT_SCHEMA}, parameters={"type": "object"})
    ),
    parameters={
        "type": "object",
        "description": "The options of ask: top, score, weighting, where …",
    },
    id=TEXT_SCHEMA,
)
MODEL_PATH = "/v2/models/{name}"
ROUTES = Routes()


@ROUTES(
    "GET",
    "/v2",
    object_schema(
        "Server", {"name": TEXT_SCHEMA, "version": TEXT_SCHEMA, "extensions": TEXT_LIST_SCHEMA}
    ),
)
def get_server(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Return the name and version of the server, and its protocol extensions."""
    return {"name": "qkv", "version": qkv.__version__, "extensions": ["binary_tensor_data"]}


@ROUTES("GET", f"{MODEL_PATH}/ready", object_schema("Ready", {}))
@ROUTES("GET", "/v2/health/ready", object_schema("Ready", {}), right=None)
@ROUTES(
    "GET", "/v2/health/live", object_schema("Live", {}), "Check that the server runs.", right=None
)
async def check_ready(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Check that the server is ready, and that the database exists if the path names one."""
    return {}


@ROUTES(
    "GET",
    MODEL_PATH,
    object_schema(
        "Model",
        {
            "name": TEXT_SCHEMA,
            "versions": TEXT_LIST_SCHEMA,
            "platform": TEXT_SCHEMA,
            "inputs": TENSOR_LIST_SCHEMA,
            "outputs": TENSOR_LIST_SCHEMA,
        },
    ),
)
def get_model(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Describe a database as a model: the names, types and shapes of its inputs and outputs."""
    served = request.served_database
    return {
        "name": served.name,
        "versions": [str(served.database.version)],
        "platform": "qkv",
        "inputs": [_describe_input(served)],
        "outputs": [{"name": name, **spec} for name, spec in _describe_outputs(served).items()],
    }


@ROUTES(
    "POST",
    f"{MODEL_PATH}/infer",
    object_schema(
        "Inferred",
        {"model_name": TEXT_SCHEMA, "model_version": TEXT_SCHEMA, "outputs": TENSOR_LIST_SCHEMA},
        id=TEXT_SCHEMA,
    ),
    body=INFER_BODY,
    raw_media_types=("application/octet-stream", ""),  # Triton's clients send no media type
    binary_media_types=("application/octet-stream",),
)
async def run_inference(registry: DatabaseRegistry, request: RequestData) -> Any:
    """Answer the queries in the input tensor. The outputs are JSON, or bytes after the JSON."""
    served = request.served_database
    body, options, queries, characters = await registry.run_in_thread(
        _read_request, served, request
    )
    options_json = json.dumps(options, sort_keys=True)
    future = served.batcher.submit_queries(options_json, queries, len(queries), characters)
    answers, _ = await asyncio.wrap_future(future)
    return await registry.run_in_thread(_write_response, served, body, answers, options["top"])


def _read_request(
    served: ServedDatabase, request: RequestData
) -> tuple[dict[str, Any], dict[str, Any], Any, int]:
    """Return the parsed JSON, the options, the queries, and their number of characters."""
    body, binary_data = request.body, b""
    if isinstance(body, bytes):
        body, binary_data = _split_request(body, request.headers.get(HEADER_LENGTH))
    inputs = tensors.read_tensors(body["inputs"], binary_data)
    if set(inputs) != {"query"}:
        raise ArgumentError(
            f"the only input must be 'query', not {', '.join(map(repr, inputs)) or 'none'}"
        )
    tensors.select_outputs(body, _describe_outputs(served))
    query = inputs["query"]
    check_query_count(query.size if query.ndim < 2 else len(query))
    characters = count_characters(query.reshape(-1).tolist()) if query.dtype == object else 0
    options, queries = _parse_options(body), _parse_queries(served, query)
    check_query_count(len(queries))
    return body, options, queries, characters


def _write_response(
    served: ServedDatabase, body: dict[str, Any], answers: list[Answer], top: int
) -> Response:
    """Return the response with the outputs that the request selects."""
    specs = _describe_outputs(served)
    names, binary = tensors.select_outputs(body, specs)
    results = {name: _build_tensor(name, specs[name], answers, top) for name in names}
    outputs, binary_data = tensors.write_tensors(results, binary)
    head = {"model_name": served.name, "model_version": str(served.database.version)}
    head |= {"id": body["id"]} if isinstance(body.get("id"), str) else {}
    text = json.dumps({**head, "outputs": outputs}, separators=(",", ":")).encode()
    if not binary_data:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(text + binary_data, media_type="application/octet-stream", headers=headers)


def _split_request(body: bytes, length: str | None) -> tuple[dict[str, Any], bytes]:
    """Split a body into its parsed JSON and the bytes after the JSON.

    `length` is the header with the number of bytes of the JSON; None means the whole body.
    """
    end = len(body)
    if length is not None:
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > len(body):
            raise ArgumentError(
                f"{HEADER_LENGTH} must be a number of bytes up to {len(body)}, the length of the "
                f"body, not {length[:20]!r}"
            )
        end = int(length)
    try:
        return parse_validated_json(body[:end], INFER_BODY, "the request"), body[end:]
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _parse_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `ask` among the parameters of the request."""
    options = {
        name: value
        for name, value in body.get("parameters", {}).items()
        if name not in IGNORED_PARAMETERS and not name.startswith(("sequence_", "triton_"))
    }
    if violation := find_violation(options, PARAMETERS_SCHEMA):
        raise ArgumentError(f"parameters: {violation}")
    return {"top": 5, **normalize_integers(options, PARAMETERS_SCHEMA)}


def _parse_queries(served: ServedDatabase, tensor: np.ndarray) -> Any:
    """Convert the input tensor to queries for `ask`: a list, or an array (n, d)."""
    if tensor.dtype == object:
        try:
            return [served.parse_key(text.decode()) for text in tensor.reshape(-1)]
        except UnicodeDecodeError:
            raise ArgumentError("query: elements of type BYTES must be UTF-8 text") from None
    if tensor.ndim == 2 and served.get_profile().key_kind != "number":
        return tensor.astype(float)
    if is_number_key(served.get_profile().first_key):
        return [tuple(tensor.reshape(-1).tolist())]
    return tensor.reshape(-1).tolist()


def _describe_input(served: ServedDatabase) -> dict[str, Any]:
    """Return the name, datatype and shape of the input; −1 stands for any length."""
    profile = served.get_profile()
    if profile.key_kind == "vector":
        return {"name": "query", "datatype": "FP32", "shape": [-1, len(profile.first_key)]}
    return {
        "name": "query",
        "datatype": "FP64" if profile.key_kind == "number" else "BYTES",
        "shape": [-1],
    }


def _describe_outputs(served: ServedDatabase) -> dict[str, dict[str, Any]]:
    """Return the datatype and shape of each output by name; −1 stands for any length."""
    profile = served.get_profile()
    info, row = profile.info, profile.first_row
    value: dict[str, Any] = {"datatype": "BYTES", "shape": [-1]}
    match info["value_kind"]:
        case "number":
            value = {"datatype": "FP64", "shape": [-1]}
        case "numbers":
            value = {"datatype": "FP64", "shape": [-1, len(info["value"])]}
        case "vector":
            array = np.asarray(row[info["value"][0]])
            wide = array.dtype == np.float64
            value = {"datatype": "FP64" if wide else "FP32", "shape": [-1, array.shape[0]]}
    return {
        "value": value,
        "weights": {"datatype": "FP32", "shape": [-1, -1]},
        "rows": {"datatype": "INT64", "shape": [-1, -1]},
        "keys": {"datatype": "BYTES", "shape": [-1, -1]},
        "entropy": {"datatype": "FP64", "shape": [-1]},
        "confidence": {"datatype": "FP64", "shape": [-1]},
    }


def _build_tensor(name: str, spec: Mapping[str, Any], answers: list[Answer], top: int) -> Tensor:
    """Return one output for all answers.

    If an answer has fewer than `top` rows, the rest has the position −1 and the weight 0.
    """
    datatype, shape = spec["datatype"], [len(answers), *spec["shape"][1:]]
    if name in ("entropy", "confidence"):  # a confidence of None becomes NaN
        numbers = [getattr(answer, name) for answer in answers]
        return Tensor(datatype, np.array(numbers, np.float64))
    if name == "value":
        return Tensor(datatype, _collect_values(answers, datatype, shape))
    shape[1] = top
    empty: Any = {"weights": 0, "rows": -1, "keys": b""}[name]
    table = np.full(shape, empty, tensors.NUMPY_DTYPES[datatype])
    for line, answer in zip(table, answers, strict=True):
        for rank, row in enumerate(answer.rows):
            line[rank] = {"weights": row.weight, "rows": row.index, "keys": _encode_cell(row.key)}[
                name
            ]
    return Tensor(datatype, table)


def _collect_values(answers: list[Answer], datatype: str, shape: list[int]) -> np.ndarray:
    """Return the values of the answers; NaN or b"" for an answer without a value."""
    if datatype == "BYTES":
        values = np.full(shape, b"", object)
        values[:] = [_encode_cell(answer.value) for answer in answers]
        return values
    values = np.full(shape, np.nan, tensors.NUMPY_DTYPES[datatype])
    for i, answer in enumerate(answers):
        if answer.value is not None:
            value = answer.value
            values[i] = list(value.values()) if isinstance(value, Mapping) else value
    return values


def _encode_cell(cell: Any) -> bytes:
    """Return the UTF-8 bytes of a text cell, or of the JSON of any other cell."""
    return (cell if isinstance(cell, str) else json.dumps(to_jsonable(cell))).encode()
