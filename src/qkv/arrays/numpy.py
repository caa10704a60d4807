"""NumPy: no gradients, and its loops over queries run on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import array_api_compat.numpy
import numpy

from qkv.arrays import threads
from qkv.arrays.base import Framework, Plan
from qkv.types import Array, Span


def _one_blas_thread() -> AbstractContextManager[object]:
    """Each of our threads multiplies by itself: two pools of threads would wait for each other."""
    from threadpoolctl import ThreadpoolController

    if not _controller:
        _controller.append(ThreadpoolController())
    return _controller[0].limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


_controller: list[Any] = []


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
        with _one_blas_thread():
            first = quietly(plan[0])
            total = sum(span.size for span, _ in plan)
            outs = tuple(numpy.empty((*x.shape[:-2], total, x.shape[-1]), x.dtype) for x in first)

            def fill(item: tuple[Span, list[Span]]) -> None:
                at = slice(item[0].start, item[0].start + item[0].size)
                parts = first if item is plan[0] else quietly(item)
                for out, part in zip(outs, parts, strict=True):
                    out[..., at, :] = part

            threads.each(fill, plan)
        return outs

    def reduce(
        self,
        lift: Callable[[Span], Any],
        merge: Callable[[Any, Any], Any],
        start: Any,
        spans: Sequence[Span],
    ) -> Any:
        """Each core merges its own run of the spans, unless the queries keep the cores busy."""
        if len(spans) < 2 or threads.cores() < 2 or threads.inside():
            return super().reduce(lift, merge, start, spans)

        def quietly(span: Span) -> Any:
            with self.quiet():
                return lift(span)

        with _one_blas_thread():
            return threads.reduced(quietly, merge, start, spans)

    # The same as in base, without its temporaries.

    def exp_below(self, x: Array, top: Array, live: Array | None, spend: bool = False) -> Array:
        x = numpy.subtract(x, top, out=x if spend else None)
        numpy.exp(x, out=x)
        return x if live is None else _zero_unless(x, live)

    def above(self, x: Array, top: Array, tau: Array, live: Array | None) -> Array:
        x = x - top
        x -= tau
        numpy.maximum(x, 0, out=x)
        return x if live is None else _zero_unless(x, live)

    def picks(self, x: Array) -> bool:
        return True

    def pick(self, x: Array, mask: Array, top: Array) -> tuple[Array, Any]:
        found = numpy.flatnonzero(mask)
        rows = mask.size // (mask.shape[-1] or 1)
        counts = numpy.bincount(found // (mask.shape[-1] or 1), minlength=rows)
        width = int(counts.max(initial=0))
        filled = numpy.arange(width) < counts[:, None]
        out = numpy.full((rows, width), -numpy.inf, x.dtype)
        out[filled] = numpy.broadcast_to(x, mask.shape).reshape(-1)[found]
        out = out.reshape(*mask.shape[:-1], width)
        out -= top
        return out, (found, filled, mask.shape)

    def put(self, picked: Array, at: Any) -> Array:
        found, filled, shape = at
        out = numpy.zeros(shape, picked.dtype)
        out.reshape(-1)[found] = picked.reshape(filled.shape)[filled]
        return out

    def constant(self, data: Any, like: Array, dtype: str) -> Array:
        return numpy.asarray(data, dtype=dtype)


def _zero_unless(x: Array, live: Array) -> Array:
    numpy.copyto(x, 0, where=~live)
    return x


FRAMEWORK = NumPy()
