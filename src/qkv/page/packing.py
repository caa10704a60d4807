"""Data for the page as JSON and buffers: arrays are sent as bytes, not as JSON numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv.util.formatting import to_jsonable

DTYPES = {"uint8": "u8", "uint16": "u16", "int32": "i32", "float32": "f32", "float64": "f64"}

MIN_DEFERRED_BYTES = 2**22
"""Weights of a model above this size are sent head by head, when a head is opened."""


def pack_arrays(thing: Any) -> tuple[Any, list[bytes]]:
    """Return JSON in which an array is `{"$": i, "dtype", "shape"}`, and the list of buffers.

    `unpack` of the page's `wire.ts` is its inverse.

    >>> pack_arrays({"x": np.array([1, 2], np.uint8), "name": "Li"})
    ({'x': {'$': 0, 'dtype': 'u8', 'shape': [2]}, 'name': 'Li'}, [b'\\x01\\x02'])
    """
    buffers: list[bytes] = []

    def pack_value(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.ndim and x.dtype.kind in "biuf":
            x = _to_known_dtype(x)
            buffers.append(x.astype(x.dtype.newbyteorder("<"), order="C", copy=False).tobytes())
            return {"$": len(buffers) - 1, "dtype": DTYPES[x.dtype.name], "shape": list(x.shape)}
        if isinstance(x, Mapping):
            # An additional $ marks names that are not references.
            named = {str(name): item for name, item in x.items()}
            return {f"${k}" if k.startswith("$") else k: pack_value(v) for k, v in named.items()}
        if isinstance(x, list | tuple):
            return [pack_value(item) for item in x]
        if type(x) is int and abs(x) > 2**53:
            return str(x)  # JavaScript's numbers would lose the last digits
        return to_jsonable(x)

    return pack_value(thing), buffers


def _to_known_dtype(x: np.ndarray) -> np.ndarray:
    """Convert to one of the five types that the page reads."""
    if x.dtype.name in DTYPES:
        return x
    if x.dtype.kind == "f":
        return x.astype(np.float32 if x.dtype.itemsize < 4 else np.float64)
    return x.astype(np.uint8 if x.dtype.kind == "b" else np.float64)


def find_deferred_buffers(views: list[Any], buffers: list[bytes]) -> dict[int, int]:
    """Return the buffers that the page loads in parts: their numbers, and the size of a part.

    A part is one head. Its size is a number of elements.
    """
    shown = [view["data"] for view in views if view["view"] == "model"]
    models = [data["weights"] for data in shown if "weights" in data]
    return {
        x["$"]: math.prod(x["shape"][-2:])
        for x in models
        if len(buffers[x["$"]]) > MIN_DEFERRED_BYTES
    }
