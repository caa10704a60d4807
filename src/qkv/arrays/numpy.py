"""NumPy: no gradients, and its loops over queries run on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import array_api_compat.numpy
import numpy

from qkv.arrays.base import Framework, Plan
from qkv.types import Array, Span


@cache
def _workers() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(cores or 1, thread_name_prefix="qkv")


class NumPy(Framework):
    name = "numpy"
    xp = array_api_compat.numpy

    def to_numpy(self, x: Array) -> numpy.ndarray[Any, Any]:
        return x.astype(numpy.float32) if self.dtype(x) == "bfloat16" else numpy.asarray(x)

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype(x) == dtype else x.astype(dtype)  # bfloat16 is ml_dtypes' own

    def quiet(self) -> AbstractContextManager[object]:
        return numpy.errstate(all="ignore")

    def rows(self, pool: Callable[[Span, Any], tuple[Array, ...]], plan: Plan) -> tuple[Array, ...]:
        def quietly(item: tuple[Span, list[Span]]) -> tuple[Array, ...]:
            with self.quiet():
                return pool(*item)

        if len(plan) == 1:
            return quietly(plan[0])
        parts = list(_workers().map(quietly, plan))
        return tuple(numpy.concatenate(column, axis=-2) for column in zip(*parts, strict=True))

    def constant(self, data: Any, like: Array, dtype: str) -> Array:
        return numpy.asarray(data, dtype=dtype)


FRAMEWORK = NumPy()
