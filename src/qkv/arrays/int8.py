"""Products of queries with vectors that are kept in 8 bits, and what rounding the queries costs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from typing import Any

import numpy as np

LEVELS = 127
FLOATS = 2**18
"""Numbers that NumPy makes floats at a time, so that they are multiplied in cache."""


class Queries:
    """Vectors (n, d), ready to be multiplied with 8-bit ones.

    torch, where it is loaded, and simsimd, where it is installed, multiply integers: a query is
    then two of them, of which the second holds what the first has lost. NumPy takes floats.
    `rest` (n,) is the length of what is lost in the end; sums of floats lose `lost` roundings more.

    >>> queries = Queries(np.array([[0.5, 0.25]]))
    >>> bool(abs(queries.inner(np.array([[2, 4]], np.int8)) - 2.0).max() <= 5 * queries.rest[0])
    True
    """

    def __init__(self, vectors: np.ndarray):
        self._product = _product()
        if self._product is None:
            self._floats = np.ascontiguousarray(vectors, np.float32)
            left, self.lost = vectors - self._floats, vectors.shape[1]
        else:
            large = _rounded(vectors)
            rest = vectors - large[0] * large[1][:, None]
            small = _rounded(rest)
            left, self.lost = rest - small[0] * small[1][:, None], 0
            self._codes = np.ascontiguousarray(np.concatenate([large[0], small[0]]))
            self._scales = np.concatenate([np.diag(x[1]) for x in (large, small)]).T
            self._scales = np.ascontiguousarray(self._scales, np.float32)
        self.rest = np.sqrt(np.einsum("ij,ij->i", left, left)) * (1 + 1e-6)

    def inner(self, code: np.ndarray) -> np.ndarray:
        """The products with vectors (m, d) of int8, (n, m) float32."""
        if self._product is not None:
            return np.asarray(self._product(self._codes, code, self._scales))
        n, step = len(self._floats), max(FLOATS // max(code.shape[1], 1), 256)
        out = np.empty((n, len(code)), np.float32)
        for at in range(0, len(code), step):
            some = code[at : at + step].astype(np.float32)
            np.matmul(self._floats, some.T, out=out[:, at : at + step])
        return out


def _rounded(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 (n, d) and a scale (n,) that a float32 holds."""
    top = np.abs(vectors).max(axis=1, initial=0.0)
    scale = (top / LEVELS).astype(np.float32).astype(float)
    scale[scale == 0] = 1.0
    return np.clip(np.rint(vectors / scale[:, None]), -LEVELS, LEVELS).astype(np.int8), scale


def _product() -> Any:
    if hasattr(sys.modules.get("torch"), "_int_mm"):
        return _torchs
    return _simsimds() if importlib.util.find_spec("simsimd") else None


_THREAD = threading.local()


def _torchs(query: np.ndarray, code: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """scales (n, 2 n) times the products of integers, (n, m)."""
    torch = sys.modules["torch"]
    if threading.current_thread() is not threading.main_thread():
        _alone(torch)
    left, right = (torch.from_numpy(_lent(np.ascontiguousarray(x))) for x in (code, query.T))
    shape = len(code), len(query)
    whole, floats = (_held(torch, dtype, shape) for dtype in (torch.int32, torch.float32))
    floats.copy_(torch._int_mm(left, right, out=whole))
    if len(scales) == 1:  # a product so thin takes torch six times as long
        return np.asarray(scales @ floats.numpy().T)
    return np.asarray((torch.from_numpy(scales) @ floats.T).numpy())


def _held(torch: Any, dtype: Any, shape: tuple[int, int]) -> Any:
    """Room for numbers that this thread needs no longer than a call: new memory would take the
    system as long as filling it."""
    held, size = vars(_THREAD).setdefault("held", {}), shape[0] * shape[1]
    if dtype not in held or len(held[dtype]) < size:
        held[dtype] = torch.empty(size, dtype=dtype)
    return held[dtype][:size].view(shape)


def _lent(x: np.ndarray) -> np.ndarray:
    """The same memory, which torch is not to be warned of: nobody writes to it."""
    if x.flags.writeable:
        return x
    view = x.__array_interface__ | {"data": (x.ctypes.data, False)}
    holder = type("Lent", (), {"__array_interface__": view, "array": x})
    return np.asarray(holder())


def _alone(torch: Any) -> None:
    """One thread of torch's for each of ours, which are as many as there are cores."""
    if not getattr(_THREAD, "alone", False):
        torch.get_num_threads()  # it sets the number of this thread, once
        for library in _pools():
            library.set_num_threads(1)
        _THREAD.alone = True


@functools.cache
def _pools() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="openmp").lib_controllers)


@functools.cache
def _simsimds() -> Any:
    simsimd = importlib.import_module("simsimd")

    def product(query: np.ndarray, code: np.ndarray, scales: np.ndarray) -> np.ndarray:
        found = simsimd.cdist(query, code, metric="inner", out_dtype="float32")
        return np.asarray(scales @ np.asarray(found))

    return product
