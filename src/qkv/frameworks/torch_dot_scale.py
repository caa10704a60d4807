"""PyTorch: recognizes functions of the caller that compute a scaled dot product.

`lambda q, k: q @ k.mT / 8` is `ScaledDot(1 / 8)`, which has fused kernels. The function runs twice
on tensors without data, because its factor may be a random number. Only the operations below are
accepted. Everything else, such as a captured tensor or a branch on the device, raises an error in
the function, which is then not recognized. So do operations in place: they could change an alias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

READS = frozenset({"shape", "size", "ndim", "dim", "dtype", "is_floating_point"})
TRANSPOSES = frozenset({"transpose", "swapaxes", "swapdims"})
PRODUCTS = frozenset({"matmul", "__matmul__", "bmm"})
FACTORS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__"})


class NotRecognizedError(Exception):
    """The function does something else than a scaled dot product."""


class TracedRows(Tensor):  # type: ignore[misc]
    """The queries, the keys or their products, without data.

    - role: "q", "k" or "s".
    - is_transposed: the last two axes are exchanged.
    - factor: the number that the rows or the products were multiplied by.
    """

    role: str
    is_transposed: bool
    factor: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in READS:
                return func(*args, **kwargs)
            return _apply(name, args, kwargs)


def find_dot_scale(function: Any, query: Tensor, key: Tensor) -> float | None:
    """Return c if the function computes c · q·k for float32 arrays of these shapes, else None."""
    if query.ndim < 2 or key.ndim != query.ndim or query.shape[-1] != key.shape[-1]:
        return None
    factor = _trace_factor(function, query, key)
    if factor is None or _trace_factor(function, query, key) != factor:
        return None
    return factor


def _trace_factor(function: Any, query: Tensor, key: Tensor) -> float | None:
    try:
        rows = (_trace_rows(x.shape, role, False, 1.0) for x, role in ((query, "q"), (key, "k")))
        found = function(*rows)
    except Exception:  # of any kind: the call runs the function on data, and reports the error
        return None
    if type(found) is not TracedRows or found.role != "s" or found.is_transposed:
        return None
    return found.factor if math.isfinite(found.factor) and found.factor > 0 else None


def _trace_rows(shape: Any, role: str, is_transposed: bool, factor: float) -> TracedRows:
    empty = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
    made: TracedRows = empty.as_subclass(TracedRows)
    made.role, made.is_transposed, made.factor = role, is_transposed, factor
    return made


def _apply(name: str, args: Any, kwargs: Any) -> TracedRows:
    if kwargs:
        raise NotRecognizedError
    if name in PRODUCTS and len(args) == 2:
        return _multiply_rows(*args)
    if name == "einsum":
        return _sum_products(*args)
    x, *rest = args
    if type(x) is not TracedRows:
        raise NotRecognizedError
    if (name == "mT" and not rest) or (name in TRANSPOSES and _exchanges_last_axes(x, rest)):
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        return _trace_rows(shape, x.role, not x.is_transposed, x.factor)
    if name in ("neg", "__neg__", "negative") and not rest:
        return _trace_rows(x.shape, x.role, x.is_transposed, -x.factor)
    if name in FACTORS | QUOTIENTS and len(rest) == 1 and type(rest[0]) in (int, float):
        factor = x.factor * rest[0] if name in FACTORS else x.factor / rest[0]
        return _trace_rows(x.shape, x.role, x.is_transposed, factor)
    raise NotRecognizedError


def _exchanges_last_axes(x: Tensor, axes: Any) -> bool:
    if len(axes) != 2 or any(type(axis) is not int for axis in axes):
        return False
    return sorted(axis % x.ndim for axis in axes) == [x.ndim - 2, x.ndim - 1]


def _multiply_rows(x: Any, y: Any) -> TracedRows:
    if type(x) is not TracedRows or type(y) is not TracedRows:
        raise NotRecognizedError
    factor = x.factor * y.factor
    if (x.role, y.role) == ("q", "k") and y.is_transposed and not x.is_transposed:
        return _trace_rows((*x.shape[:-1], y.shape[-1]), "s", False, factor)
    if (x.role, y.role) == ("k", "q") and y.is_transposed and not x.is_transposed:
        return _trace_rows((*x.shape[:-1], y.shape[-1]), "s", True, factor)
    raise NotRecognizedError


def _sum_products(equation: Any, *rows: Any) -> TracedRows:
    """Return the products of an equation such as "bhnd,bhmd->bhnm"."""
    if type(equation) is not str or [type(x) for x in rows] != [TracedRows] * 2:
        raise NotRecognizedError
    sides, _, out = equation.replace(" ", "").partition("->")
    names = sides.split(",")
    if [x.role for x in rows] == ["k", "q"]:
        names, rows = names[::-1], rows[::-1]
    if (
        len(names) != 2
        or [x.role for x in rows] != ["q", "k"]
        or any(x.is_transposed for x in rows)
    ):
        raise NotRecognizedError
    (*lead, i, d), (*other, j, e) = map(list, names)
    letters = [x for x in (*lead, i, j, d) if x != "."]
    if lead != other or d != e or len({*letters}) < len(letters) or [*out] != [*lead, i, j]:
        raise NotRecognizedError
    shape = (*rows[0].shape[:-1], rows[1].shape[-2])
    return _trace_rows(shape, "s", False, rows[0].factor * rows[1].factor)
