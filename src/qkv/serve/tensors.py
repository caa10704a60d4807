"""Tensors of the Open Inference Protocol, in JSON or as bytes after the JSON.

A tensor with the parameter `binary_data_size` has its elements in that many bytes after the JSON.
They are in row-major order and little-endian. An element of type BYTES follows its length, a number
of 4 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import ArgumentError, unknown_name_error
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
"""NumPy's dtype for each datatype of the protocol. Arrays of BYTES hold `bytes` objects."""

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
    """An output tensor: its datatype in the protocol, and its elements."""

    datatype: str
    data: np.ndarray


def read_tensors(inputs: list[Any], binary_data: bytes) -> dict[str, np.ndarray]:
    """Return the input tensors of a request as arrays by name.

    `binary_data` are the bytes after the request's JSON.

    >>> read_tensors(
    ...     [{"name": "query", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}], b""
    ... )
    {'query': array([[0.5, 1. ]], dtype=float32)}
    """
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for tensor in inputs:
        name, datatype, shape = tensor["name"], tensor["datatype"], list(map(int, tensor["shape"]))
        if name in arrays:
            raise ArgumentError(f"the input {name!r} appears twice: send it once")
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = _parse_list(tensor.get("data"), datatype, name)
        elif type(size) is not int or not 0 <= size <= len(binary_data) - offset:
            raise ArgumentError(
                f"{name}: binary_data_size must be from 0 to {len(binary_data) - offset}, the "
                f"number of bytes that are left after the JSON, not {size!r}"
            )
        else:
            flat = _parse_bytes(binary_data[offset : offset + size], datatype, name)
            offset += size
        if len(flat) != math.prod(shape):
            raise ArgumentError(
                f"{name}: the shape {shape} needs {math.prod(shape)} elements, not {len(flat)}"
            )
        arrays[name] = flat.reshape(shape)
    if offset < len(binary_data):
        raise ArgumentError(
            f"{len(binary_data) - offset} bytes after the JSON belong to no input: check "
            "binary_data_size"
        )
    return arrays


def write_tensors(
    outputs: Mapping[str, Tensor], binary: set[str]
) -> tuple[list[dict[str, Any]], bytes]:
    """Return the outputs as JSON, and the bytes to send after the JSON.

    The outputs named in `binary` have their elements in these bytes.

    >>> write_tensors({"rows": Tensor("INT64", np.array([[3]]))}, set())
    ([{'name': 'rows', 'datatype': 'INT64', 'shape': [1, 1], 'data': [3]}], b'')
    """
    descriptions, binary_parts = [], []
    for name, (datatype, data) in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(data.shape)}
        if name in binary:
            binary_parts.append(_pack_bytes(data, datatype))
            tensor["parameters"] = {"binary_data_size": len(binary_parts[-1])}
        elif datatype == "BYTES":
            tensor["data"] = [text.decode(errors="replace") for text in data.reshape(-1)]
        else:  # JSON has no NaN and no infinity
            flat = data.reshape(-1)
            tensor["data"] = [x if x == x and abs(x) != math.inf else None for x in flat.tolist()]
        descriptions.append(tensor)
    return descriptions, b"".join(binary_parts)


def select_outputs(
    request: Mapping[str, Any], available: Mapping[str, Any]
) -> tuple[list[str], set[str]]:
    """Return the names of the requested outputs, and those to send as bytes.

    `available` are the outputs that exist. By default, all of them are sent as JSON.
    """
    outputs = request.get("outputs") or [{"name": name} for name in available]
    all_binary = bool(request.get("parameters", {}).get("binary_data_output"))
    names, binary = [], set()
    for output in outputs:
        name = output["name"]
        if name not in available:
            raise unknown_name_error("output", name, available)
        names.append(name)
        if output.get("parameters", {}).get("binary_data", all_binary):
            binary.add(name)
    return list(dict.fromkeys(names)), binary


def _parse_list(data: Any, datatype: str, name: str) -> np.ndarray:
    """Return the elements of a list as a flat array. The list may contain lists."""
    if not isinstance(data, list):
        raise ArgumentError(f"{name}: data must be a list unless binary_data_size is given")
    flat, stack = [], [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            flat.append(item)
        else:
            stack.pop()
    if datatype == "BYTES":
        if not all(type(x) is str for x in flat):
            raise ArgumentError(f"{name}: data of type BYTES must hold only text")
        return _object_array([x.encode(errors="surrogatepass") for x in flat])
    kinds = {"BOOL": (bool,)}.get(datatype, (int, float) if datatype[:2] == "FP" else (int,))
    if not all(type(x) in kinds for x in flat):
        raise ArgumentError(f"{name}: data must hold only elements of type {datatype}")
    try:
        with np.errstate(over="ignore"):
            return np.asarray(flat, dtype=NUMPY_DTYPES[datatype])
    except OverflowError:
        raise ArgumentError(f"{name}: an element of data is too large for {datatype}") from None


def _parse_bytes(blob: bytes, datatype: str, name: str) -> np.ndarray:
    """Return the elements in the bytes of a tensor, as a flat array."""
    if datatype != "BYTES":
        width = np.dtype(NUMPY_DTYPES[datatype]).itemsize
        if len(blob) % width:
            raise ArgumentError(
                f"{name}: binary_data_size {len(blob)} is not a multiple of {width}, the size of "
                f"{datatype}"
            )
        return np.frombuffer(blob, NUMPY_DTYPES[datatype])
    texts, end = [], 0
    while end < len(blob):
        begin = end + 4
        end = begin + int.from_bytes(blob[end:begin], "little")
        if end > len(blob):
            raise ArgumentError(f"{name}: the last element of BYTES is incomplete")
        texts.append(blob[begin:end])
    return _object_array(texts)


def _pack_bytes(data: np.ndarray, datatype: str) -> bytes:
    """Return the elements of an array as bytes; the inverse of `_parse_bytes`."""
    if datatype != "BYTES":
        return data.astype(NUMPY_DTYPES[datatype], order="C").tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in data.reshape(-1))


def _object_array(items: list[bytes]) -> np.ndarray:
    """Return a one-dimensional array of `bytes` objects."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array
