"""The Open Inference Protocol, version 2: a database as a model that its standard clients ask.

Input `query`: texts, BYTES (n); numbers, FP64 (n); or vectors, FP32 (n, d), as the keys are; other
keys as JSON text. Outputs: `value` (n, …), and of the `top` heaviest rows `weights`, `rows` (their
places) and `keys`, each (n, top); `entropy` (n).
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
from qkv.serve.validation import find_violation, normalize_integers, parse_json
from qkv.util.formatting import to_jsonable

HEADER_LENGTH = "inference-header-content-length"
IGNORED_PARAMETERS = ("binary_data_output", "content_type", "headers", "priority", "timeout")
"""Parameters that clients send of themselves, and that mean nothing here."""
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
    parameters={"type": "object", "description": "Options of ask: top, score, weighting, where."},
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
def get_server(served: DatabaseRegistry, given: RequestData) -> Any:
    """The server, and the extensions of the Open Inference Protocol that it has."""
    return {"name": "qkv", "version": qkv.__version__, "extensions": ["binary_tensor_data"]}


@ROUTES("GET", f"{MODEL_PATH}/ready", object_schema("Ready", {}))
@ROUTES("GET", "/v2/health/ready", object_schema("Ready", {}), right=None)
@ROUTES("GET", "/v2/health/live", object_schema("Live", {}), "Whether the server runs.", right=None)
async def check_ready(served: DatabaseRegistry, given: RequestData) -> Any:
    """Whether it answers."""
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
def get_model(served: DatabaseRegistry, given: RequestData) -> Any:
    """What a database takes and gives as a model of the Open Inference Protocol."""
    kept = given.served_database
    return {
        "name": kept.name,
        "versions": [str(kept.database.version)],
        "platform": "qkv",
        "inputs": [_describe_input(kept)],
        "outputs": [{"name": name, **told} for name, told in _describe_outputs(kept).items()],
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
    raw_media_types=("application/octet-stream", ""),  # the clients of Triton name no type
    binary_media_types=("application/octet-stream",),
)
async def run_inference(served: DatabaseRegistry, given: RequestData) -> Any:
    """Answer queries that come as a tensor by tensors, in JSON or as bytes behind it."""
    kept = given.served_database
    request, how, queries, characters = await served.run_in_thread(_read_request, kept, given)
    same = json.dumps(how, sort_keys=True)
    asked = kept.batcher.submit_queries(same, queries, len(queries), characters)
    answers, _ = await asyncio.wrap_future(asked)
    return await served.run_in_thread(_write_response, kept, request, answers, how["top"])


def _read_request(
    kept: ServedDatabase, given: RequestData
) -> tuple[dict[str, Any], dict[str, Any], Any, int]:
    """The request, its parameters, its queries, and how many characters they have."""
    request, behind = given.body, b""
    if isinstance(request, bytes):
        request, behind = _split_request(request, given.headers.get(HEADER_LENGTH))
    inputs = tensors.read_tensors(request["inputs"], behind)
    if set(inputs) != {"query"}:
        raise ArgumentError(f"there is one input, 'query', not {', '.join(map(repr, inputs))}")
    tensors.select_outputs(request, _describe_outputs(kept))
    query = inputs["query"]
    check_query_count(query.size if query.ndim < 2 else len(query))
    characters = count_characters(query.reshape(-1).tolist()) if query.dtype == object else 0
    how, queries = _parse_options(request), _parse_queries(kept, query)
    check_query_count(len(queries))
    return request, how, queries, characters


def _write_response(
    kept: ServedDatabase, request: dict[str, Any], answers: list[Answer], top: int
) -> Response:
    known = _describe_outputs(kept)
    names, binary = tensors.select_outputs(request, known)
    found = {name: _build_tensor(name, known[name], answers, top) for name in names}
    outputs, behind = tensors.write_tensors(found, binary)
    told = {"model_name": kept.name, "model_version": str(kept.database.version)}
    told |= {"id": request["id"]} if isinstance(request.get("id"), str) else {}
    text = json.dumps({**told, "outputs": outputs}, separators=(",", ":")).encode()
    if not behind:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(text + behind, media_type="application/octet-stream", headers=headers)


def _split_request(sent: bytes, length: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON of a body, and the bytes behind it."""
    end = len(sent)
    if length is not None:
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > len(sent):
            raise ArgumentError(
                f"{HEADER_LENGTH} must be a length within the body, not {length[:20]!r}"
            )
        end = int(length)
    try:
        return parse_json(sent[:end], INFER_BODY, "the request"), sent[end:]
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _parse_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `ask` among a request's parameters."""
    own = {
        name: value
        for name, value in request.get("parameters", {}).items()
        if name not in IGNORED_PARAMETERS and not name.startswith(("sequence_", "triton_"))
    }
    if told := find_violation(own, PARAMETERS_SCHEMA):
        raise ArgumentError(f"parameters: {told}")
    return {"top": 5, **normalize_integers(own, PARAMETERS_SCHEMA)}


def _parse_queries(kept: ServedDatabase, given: np.ndarray) -> Any:
    """The queries as `ask` takes them: a list, or an array (n, d)."""
    if given.dtype == object:
        try:
            return [kept.parse_key(text.decode()) for text in given.reshape(-1)]
        except UnicodeDecodeError:
            raise ArgumentError("query: BYTES must be text in UTF-8") from None
    if given.ndim == 2 and kept.get_profile().key_kind != "number":
        return given.astype(float)
    if is_number_key(kept.get_profile().first_key):
        return [tuple(given.reshape(-1).tolist())]
    return given.reshape(-1).tolist()


def _describe_input(kept: ServedDatabase) -> dict[str, Any]:
    about = kept.get_profile()
    if about.key_kind == "vector":
        return {"name": "query", "datatype": "FP32", "shape": [-1, len(about.first_key)]}
    return {
        "name": "query",
        "datatype": "FP64" if about.key_kind == "number" else "BYTES",
        "shape": [-1],
    }


def _describe_outputs(kept: ServedDatabase) -> dict[str, dict[str, Any]]:
    """The datatype and shape of each output by its name."""
    about = kept.get_profile()
    info, row = about.info, about.first_row
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
    }


def _build_tensor(name: str, told: Mapping[str, Any], answers: list[Answer], top: int) -> Tensor:
    """One output of all answers; where an answer has too few rows, −1 and a weight of 0."""
    datatype, shape = told["datatype"], [len(answers), *told["shape"][1:]]
    if name == "entropy":
        return Tensor(datatype, np.array([answer.entropy for answer in answers], np.float64))
    if name == "value":
        return Tensor(datatype, _collect_values(answers, datatype, shape))
    shape[1] = top
    empty: Any = {"weights": 0, "rows": -1, "keys": b""}[name]
    found = np.full(shape, empty, tensors.NUMPY_DTYPES[datatype])
    for line, answer in zip(found, answers, strict=True):
        for at, row in enumerate(answer.rows):
            line[at] = {"weights": row.weight, "rows": row.index, "keys": _encode_cell(row.key)}[
                name
            ]
    return Tensor(datatype, found)


def _collect_values(answers: list[Answer], datatype: str, shape: list[int]) -> np.ndarray:
    if datatype == "BYTES":
        found = np.full(shape, b"", object)
        found[:] = [_encode_cell(answer.value) for answer in answers]
        return found
    found = np.full(shape, np.nan, tensors.NUMPY_DTYPES[datatype])
    for i, answer in enumerate(answers):
        if answer.value is not None:
            value = answer.value
            found[i] = list(value.values()) if isinstance(value, Mapping) else value
    return found


def _encode_cell(cell: Any) -> bytes:
    """A cell as the bytes of its text: text as it is, anything else as JSON."""
    return (cell if isinstance(cell, str) else json.dumps(to_jsonable(cell))).encode()
