"""Tensors of the Open Inference Protocol: in its JSON, or as bytes behind it.

A body is JSON; where a tensor says `binary_data_size`, so many bytes of what follows the JSON are
its elements, row by row and little-endian, and those of BYTES each have their length, 4 bytes,
before them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import ArgumentError
from qkv.serve.schemas import TEXT_SCHEMA, object_schema
from qkv.serve.validation import Schema

NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "O",
}
"""Datatypes by name; an array of BYTES holds `bytes`."""

SIZE_SCHEMA: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
TENSOR_SCHEMA = object_schema(
    "Tensor",
    {
        "name": TEXT_SCHEMA,
        "datatype": {"enum": list(NUMPY_DTYPES)},
        "shape": {"type": "array", "items": SIZE_SCHEMA, "maxItems": 8},
    },
    data={"type": "array"},
    parameters={"type": "object"},
)


class Tensor(NamedTuple):
    """An output: its datatype, and its elements as an array of the shape that they have."""

    datatype: str
    data: np.ndarray


def read_tensors(inputs: list[Any], behind: bytes) -> dict[str, np.ndarray]:
    """The inputs of a request, which fit `TENSOR_SCHEMA`, as arrays by name; `behind` are the
    bytes after its JSON.

    >>> read_tensors(
    ...     [{"name": "query", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}], b""
    ... )
    {'query': array([[0.5, 1. ]], dtype=float32)}
    """
    found: dict[str, np.ndarray] = {}
    at = 0
    for given in inputs:
        name, datatype, shape = given["name"], given["datatype"], list(map(int, given["shape"]))
        if name in found:
            raise ArgumentError(f"input {name!r} comes twice")
        size = given.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = _parse_list(given.get("data"), datatype, name)
        elif type(size) is not int or not 0 <= size <= len(behind) - at:
            raise ArgumentError(
                f"{name}: binary_data_size must lie within the {len(behind)} bytes after the JSON"
            )
        else:
            flat = _parse_bytes(behind[at : at + size], datatype, name)
            at += size
        if len(flat) != math.prod(shape):
            raise ArgumentError(
                f"{name}: {len(flat)} elements came for the shape {shape}, which has "
                f"{math.prod(shape)}"
            )
        found[name] = flat.reshape(shape)
    if at < len(behind):
        raise ArgumentError(f"{len(behind) - at} bytes after the JSON belong to no input")
    return found


def write_tensors(
    outputs: Mapping[str, Tensor], binary: set[str]
) -> tuple[list[dict[str, Any]], bytes]:
    """The outputs as the JSON has them, and the bytes behind it of those that are to be `binary`.

    >>> write_tensors({"rows": Tensor("INT64", np.array([[3]]))}, set())
    ([{'name': 'rows', 'datatype': 'INT64', 'shape': [1, 1], 'data': [3]}], b'')
    """
    told, behind = [], []
    for name, (datatype, data) in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(data.shape)}
        if name in binary:
            behind.append(_pack_bytes(data, datatype))
            tensor["parameters"] = {"binary_data_size": len(behind[-1])}
        elif datatype == "BYTES":
            tensor["data"] = [text.decode(errors="replace") for text in data.reshape(-1)]
        else:  # JSON has no NaN
            flat = data.reshape(-1)
            tensor["data"] = [x if x == x and abs(x) != math.inf else None for x in flat.tolist()]
        told.append(tensor)
    return told, b"".join(behind)


def select_outputs(
    request: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[list[str], set[str]]:
    """The names of the outputs that a request asks for, and which of them as bytes."""
    given = request.get("outputs") or [{"name": name} for name in known]
    every = bool(request.get("parameters", {}).get("binary_data_output"))
    names, binary = [], set()
    for output in given:
        name = output["name"]
        if name not in known:
            raise ArgumentError(f"there is no output {name!r}: there are {', '.join(known)}")
        names.append(name)
        if output.get("parameters", {}).get("binary_data", every):
            binary.add(name)
    return list(dict.fromkeys(names)), binary


def _parse_list(data: Any, datatype: str, name: str) -> np.ndarray:
    """The elements of a list, which may be nested as the shape is."""
    if not isinstance(data, list):
        raise ArgumentError(f"{name}: data must be a list, or binary_data_size say where it is")
    flat, rest = [], [iter(data)]
    while rest:
        for item in rest[-1]:
            if isinstance(item, list):
                rest.append(iter(item))
                break
            flat.append(item)
        else:
            rest.pop()
    if datatype == "BYTES":
        if not all(type(x) is str for x in flat):
            raise ArgumentError(f"{name}: the elements of BYTES must be text")
        return _object_array([x.encode(errors="surrogatepass") for x in flat])
    kinds = {"BOOL": (bool,)}.get(datatype, (int, float) if datatype[:2] == "FP" else (int,))
    if not all(type(x) in kinds for x in flat):
        raise ArgumentError(f"{name}: an element of data is no {datatype}")
    try:
        with np.errstate(over="ignore"):
            return np.asarray(flat, dtype=NUMPY_DTYPES[datatype])
    except OverflowError:
        raise ArgumentError(f"{name}: an element of data is too large for {datatype}") from None


def _parse_bytes(blob: bytes, datatype: str, name: str) -> np.ndarray:
    if datatype != "BYTES":
        width = np.dtype(NUMPY_DTYPES[datatype]).itemsize
        if len(blob) % width:
            raise ArgumentError(f"{name}: {len(blob)} bytes are no whole number of {datatype}")
        return np.frombuffer(blob, NUMPY_DTYPES[datatype])
    texts, at = [], 0
    while at < len(blob):
        begin = at + 4
        at = begin + int.from_bytes(blob[at:begin], "little")
        if at > len(blob):
            raise ArgumentError(f"{name}: the last of the BYTES is cut short")
        texts.append(blob[begin:at])
    return _object_array(texts)


def _pack_bytes(data: np.ndarray, datatype: str) -> bytes:
    if datatype != "BYTES":
        return data.astype(NUMPY_DTYPES[datatype], order="C").tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in data.reshape(-1))


def _object_array(items: list[bytes]) -> np.ndarray:
    made = np.empty(len(items), dtype=object)
    made[:] = items
    return made
