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
from qkv.database.query_input import is_number_key
from qkv.errors import ArgumentError
from qkv.serve import tensors
from qkv.serve.bodies import ASK, TEXT, TEXTS, body, list_of, record
from qkv.serve.fit import fault, parsed, whole
from qkv.serve.route import Given, Routes
from qkv.serve.served import Kept, Served, count_characters, few
from qkv.serve.tensors import Tensor
from qkv.told import jsonable

LENGTH = "inference-header-content-length"
PROTOCOL = ("binary_data_output", "content_type", "headers", "priority", "timeout")
"""Parameters that clients send of themselves, and that mean nothing here."""
PARAMETERS = body(
    "Parameters",
    {},
    **{
        name: schema
        for name, schema in ASK["properties"].items()
        if name not in ("query", "weights", "spread")
    },
)


TENSORS = list_of({"type": "object"})
INFER = record(
    "Infer",
    {"inputs": list_of(tensors.TENSOR, minItems=1)},
    outputs=list_of(record("Output", {"name": TEXT}, parameters={"type": "object"})),
    parameters={"type": "object", "description": "Options of ask: top, score, weighting, where."},
    id=TEXT,
)
ONE = "/v2/models/{name}"
ROUTES = Routes()


@ROUTES("GET", "/v2", record("Server", {"name": TEXT, "version": TEXT, "extensions": TEXTS}))
def server(served: Served, given: Given) -> Any:
    """The server, and the extensions of the Open Inference Protocol that it has."""
    return {"name": "qkv", "version": qkv.__version__, "extensions": ["binary_tensor_data"]}


@ROUTES("GET", f"{ONE}/ready", record("Ready", {}))
@ROUTES("GET", "/v2/health/ready", record("Ready", {}), right=None)
@ROUTES("GET", "/v2/health/live", record("Live", {}), "Whether the server runs.", right=None)
async def well(served: Served, given: Given) -> Any:
    """Whether it answers."""
    return {}


@ROUTES(
    "GET",
    ONE,
    record(
        "Model",
        {"name": TEXT, "versions": TEXTS, "platform": TEXT, "inputs": TENSORS, "outputs": TENSORS},
    ),
)
def model(served: Served, given: Given) -> Any:
    """What a database takes and gives as a model of the Open Inference Protocol."""
    kept = given.kept
    return {
        "name": kept.name,
        "versions": [str(kept.database.version)],
        "platform": "qkv",
        "inputs": [_input(kept)],
        "outputs": [{"name": name, **told} for name, told in _outputs(kept).items()],
    }


@ROUTES(
    "POST",
    f"{ONE}/infer",
    record("Inferred", {"model_name": TEXT, "model_version": TEXT, "outputs": TENSORS}, id=TEXT),
    body=INFER,
    raw=("application/octet-stream", ""),  # the clients of Triton name no type
    also=("application/octet-stream",),
)
async def infer(served: Served, given: Given) -> Any:
    """Answer queries that come as a tensor by tensors, in JSON or as bytes behind it."""
    kept = given.kept
    request, how, queries, characters = await served.work(_read, kept, given)
    same = json.dumps(how, sort_keys=True)
    asked = kept.batches.ask(same, queries, len(queries), characters)
    answers, _ = await asyncio.wrap_future(asked)
    return await served.work(_written, kept, request, answers, how["top"])


def _read(kept: Kept, given: Given) -> tuple[dict[str, Any], dict[str, Any], Any, int]:
    """The request, its parameters, its queries, and how many characters they have."""
    request, behind = given.body, b""
    if isinstance(request, bytes):
        request, behind = _parted(request, given.headers.get(LENGTH))
    inputs = tensors.read(request["inputs"], behind)
    if set(inputs) != {"query"}:
        raise ArgumentError(f"there is one input, 'query', not {', '.join(map(repr, inputs))}")
    tensors.wanted(request, _outputs(kept))
    query = inputs["query"]
    few(query.size if query.ndim < 2 else len(query))
    characters = count_characters(query.reshape(-1).tolist()) if query.dtype == object else 0
    how, queries = _how(request), _queries(kept, query)
    few(len(queries))
    return request, how, queries, characters


def _written(kept: Kept, request: dict[str, Any], answers: list[Answer], top: int) -> Response:
    known = _outputs(kept)
    names, binary = tensors.wanted(request, known)
    found = {name: _tensor(name, known[name], answers, top) for name in names}
    outputs, behind = tensors.write(found, binary)
    told = {"model_name": kept.name, "model_version": str(kept.database.version)}
    told |= {"id": request["id"]} if isinstance(request.get("id"), str) else {}
    text = json.dumps({**told, "outputs": outputs}, separators=(",", ":")).encode()
    if not behind:
        return Response(text, media_type="application/json")
    headers = {LENGTH: str(len(text))}
    return Response(text + behind, media_type="application/octet-stream", headers=headers)


def _parted(sent: bytes, length: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON of a body, and the bytes behind it."""
    end = len(sent)
    if length is not None:
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > len(sent):
            raise ArgumentError(f"{LENGTH} must be a length within the body, not {length[:20]!r}")
        end = int(length)
    try:
        return parsed(sent[:end], INFER, "the request"), sent[end:]
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _how(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `ask` among a request's parameters."""
    own = {
        name: value
        for name, value in request.get("parameters", {}).items()
        if name not in PROTOCOL and not name.startswith(("sequence_", "triton_"))
    }
    if told := fault(own, PARAMETERS):
        raise ArgumentError(f"parameters: {told}")
    return {"top": 5, **whole(own, PARAMETERS)}


def _queries(kept: Kept, given: np.ndarray) -> Any:
    """The queries as `ask` takes them: a list, or an array (n, d)."""
    if given.dtype == object:
        try:
            return [kept.cell(text.decode()) for text in given.reshape(-1)]
        except UnicodeDecodeError:
            raise ArgumentError("query: BYTES must be text in UTF-8") from None
    if given.ndim == 2 and kept.about().kind != "number":
        return given.astype(float)
    if is_number_key(kept.about().key):
        return [tuple(given.reshape(-1).tolist())]
    return given.reshape(-1).tolist()


def _input(kept: Kept) -> dict[str, Any]:
    about = kept.about()
    if about.kind == "vector":
        return {"name": "query", "datatype": "FP32", "shape": [-1, len(about.key)]}
    return {
        "name": "query",
        "datatype": "FP64" if about.kind == "number" else "BYTES",
        "shape": [-1],
    }


def _outputs(kept: Kept) -> dict[str, dict[str, Any]]:
    """The datatype and shape of each output by its name."""
    about = kept.about()
    info, row = about.info, about.row
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


def _tensor(name: str, told: Mapping[str, Any], answers: list[Answer], top: int) -> Tensor:
    """One output of all answers; where an answer has too few rows, −1 and a weight of 0."""
    datatype, shape = told["datatype"], [len(answers), *told["shape"][1:]]
    if name == "entropy":
        return Tensor(datatype, np.array([answer.entropy for answer in answers], np.float64))
    if name == "value":
        return Tensor(datatype, _values(answers, datatype, shape))
    shape[1] = top
    empty: Any = {"weights": 0, "rows": -1, "keys": b""}[name]
    found = np.full(shape, empty, tensors.DTYPES[datatype])
    for line, answer in zip(found, answers, strict=True):
        for at, row in enumerate(answer.rows):
            line[at] = {"weights": row.weight, "rows": row.index, "keys": _text(row.key)}[name]
    return Tensor(datatype, found)


def _values(answers: list[Answer], datatype: str, shape: list[int]) -> np.ndarray:
    if datatype == "BYTES":
        found = np.full(shape, b"", object)
        found[:] = [_text(answer.value) for answer in answers]
        return found
    found = np.full(shape, np.nan, tensors.DTYPES[datatype])
    for i, answer in enumerate(answers):
        if answer.value is not None:
            value = answer.value
            found[i] = list(value.values()) if isinstance(value, Mapping) else value
    return found


def _text(cell: Any) -> bytes:
    """A cell as the bytes of its text: text as it is, anything else as JSON."""
    return (cell if isinstance(cell, str) else json.dumps(jsonable(cell))).encode()
