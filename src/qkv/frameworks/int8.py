"""Inner products of queries with int8 vectors, and the error of rounding the queries."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.util.caches import memoize

MAX_LEVEL = 127
FLOATS_PER_BLOCK = 2**18
"""Codes that NumPy converts to floats at a time, so that the floats fit the CPU cache."""

CODES_PER_TORCH_CALL = 2**20
"""Codes that PyTorch multiplies at a time. It first repacks them into the CPU cache."""

MAX_SIMSIMD_QUERIES = 4
"""Up to this many queries, simsimd is faster than floats. (It multiplies one query at a time.)"""

ProductFunction = Callable[[np.ndarray], np.ndarray]


class Int8Queries:
    """Vectors (n, d), prepared for products with int8 vectors.

    PyTorch (if imported) and simsimd (if installed, for few queries) multiply integers. A query
    then becomes two int8 vectors: the second holds the rounding error of the first. NumPy
    multiplies floats. `residual_norm` (n,) is the norm of the remaining error; sums of floats add
    `rounding_count` roundings.

    >>> queries = Int8Queries(np.array([[0.5, 0.25]]))
    >>> bool(
    ...     abs(queries.inner_products(np.array([[2, 4]], np.int8)) - 2.0).max()
    ...     <= 5 * queries.residual_norm[0]
    ... )
    True
    """

    def __init__(self, vectors: np.ndarray):
        kernel = _choose_kernel(len(vectors))
        if kernel is None:
            floats = np.ascontiguousarray(vectors, np.float32)
            left, self.rounding_count = vectors - floats, vectors.shape[1]
            self._product = _float_kernel(floats)
        else:
            large = _quantize_rows(vectors)
            rest = vectors - large[0] * large[1][:, None]
            small = _quantize_rows(rest)
            left, self.rounding_count = rest - small[0] * small[1][:, None], 0
            scales = np.concatenate([np.diag(x[1]) for x in (large, small)]).T
            scales = np.ascontiguousarray(scales, np.float32)
            self._product = kernel(np.concatenate([large[0], small[0]]), scales)
        self.residual_norm = np.sqrt(np.einsum("ij,ij->i", left, left)) * (1 + 1e-6)

    def inner_products(self, code: np.ndarray) -> np.ndarray:
        """Return the dot products of the queries with int8 vectors (m, d): (n, m) float32."""
        return self._product(code)


def _quantize_rows(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes (n, d) and scales (n,) that float32 holds exactly."""
    top = np.abs(vectors).max(axis=1, initial=0.0)
    scale = (top / MAX_LEVEL).astype(np.float32).astype(float)
    scale[scale == 0] = 1.0
    return np.clip(np.rint(vectors / scale[:, None]), -MAX_LEVEL, MAX_LEVEL).astype(np.int8), scale


def _choose_kernel(n: int) -> Callable[[np.ndarray, np.ndarray], ProductFunction] | None:
    """Return a function that multiplies the codes (2 n, d) of n queries with codes (m, d).

    The result is scales (n, 2 n) times the integer products. None: use floats.
    """
    if hasattr(sys.modules.get("torch"), "_int_mm"):
        return _torch_kernel
    return (
        _simsimd_kernel
        if n <= MAX_SIMSIMD_QUERIES and importlib.util.find_spec("simsimd")
        else None
    )


def _float_kernel(query: np.ndarray) -> ProductFunction:
    def multiply_codes(code: np.ndarray) -> np.ndarray:
        step = max(FLOATS_PER_BLOCK // max(code.shape[1], 1), 256)
        out = np.empty((len(query), len(code)), np.float32)
        for at in range(0, len(code), step):
            rows = code[at : at + step].astype(np.float32)
            np.matmul(query, rows.T, out=out[:, at : at + step])
        return out

    return multiply_codes


def _simsimd_kernel(query: np.ndarray, scales: np.ndarray) -> ProductFunction:
    cdist = importlib.import_module("simsimd").cdist

    def multiply_codes(code: np.ndarray) -> np.ndarray:
        found = cdist(query, np.ascontiguousarray(code), metric="inner", out_dtype="float32")
        return np.asarray(scales @ np.asarray(found))

    return multiply_codes


_THREAD_BUFFERS = threading.local()


def _torch_kernel(query: np.ndarray, scales: np.ndarray) -> ProductFunction:
    torch = sys.modules["torch"]
    right, each = (torch.from_numpy(np.ascontiguousarray(x)) for x in (query.T, scales))
    step = max(CODES_PER_TORCH_CALL // (len(right) + 8 * len(query)), 256)

    def multiply_codes(code: np.ndarray) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            _limit_torch_threads(torch)
        left = torch.from_numpy(_writable_view(np.ascontiguousarray(code)))
        thin = len(scales) == 1  # PyTorch's product with one row is six times slower
        integers, floats = _thread_buffers(torch, (len(left) if thin else step, len(query)))
        out = None if thin else each.new_empty(len(scales), len(left))
        for at in range(0, len(left), step):
            rows = left[at : at + step]
            part = slice(at, at + step) if thin else slice(len(rows))
            torch._int_mm(rows, right, out=integers[part])
            if out is not None:
                torch.mm(each, floats[part].copy_(integers[part]).T, out=out[:, at : at + step])
        if out is None:
            return np.asarray(scales @ floats.copy_(integers).numpy().T)
        return np.asarray(out.numpy())

    return multiply_codes


def _thread_buffers(torch: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return this thread's buffers for integers and floats, valid for one call.

    Allocating new memory would take as long as the products.
    """
    if getattr(_THREAD_BUFFERS, "shape", None) != shape:
        size, held = shape[0] * shape[1], getattr(_THREAD_BUFFERS, "held", None)
        if held is None or len(held[0]) < size:
            kinds = torch.int32, torch.float32
            _THREAD_BUFFERS.held = held = [torch.empty(size, dtype=x, device="cpu") for x in kinds]
        _THREAD_BUFFERS.shape, _THREAD_BUFFERS.views = (
            shape,
            tuple(x[:size].view(shape) for x in held),
        )
    views: tuple[Any, Any] = _THREAD_BUFFERS.views
    return views


def _writable_view(x: np.ndarray) -> np.ndarray:
    """Return a writable view, since torch.from_numpy warns about read-only arrays.

    Nothing writes to the view.
    """
    if x.flags.writeable:
        return x
    view = x.__array_interface__ | {"data": (x.ctypes.data, False)}
    holder = type("ArrayInterface", (), {"__array_interface__": view, "array": x})
    return np.asarray(holder())


def _limit_torch_threads(torch: Any) -> None:
    """Let PyTorch use one thread inside each worker thread, of which there is one per core."""
    if not getattr(_THREAD_BUFFERS, "alone", False):
        torch.get_num_threads()  # the first call in a thread initializes its OpenMP settings
        for library in _openmp_controllers():
            library.set_num_threads(1)
        _THREAD_BUFFERS.alone = True


@memoize("frameworks.openmp_controllers")
def _openmp_controllers() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="openmp").lib_controllers)
