"""A call without a gradient, made again: arrays of known shapes and strides, by launches alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

from torch import Tensor

from qkv.engines.triton import additive, ahead, hidden, norms, ops, thresholds
from qkv.engines.triton.arguments import Numbers
from qkv.engines.triton.kept import Launches
from qkv.engines.triton.records import Arrays

Band = Callable[[int, int], tuple[int | None, int | None]]
"""The least and the largest j − i that count, of n queries and m keys."""


class Repeat:
    """Calls by launches alone: `run(*arrays)` gives the output, of the first array's dtype, and
    makes what lies between by `launch.new`.

    What the launches depend on beside the sizes of the first two, strides and places must not
    change; no width is 0.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.known = Launches()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        # Launches know arrays by where they lie, so one that is given twice is told from two. Each
        # call asks all this: for three arrays it is spelled out, and strides are those of arrays
        # that have no gaps, where one may ask for that alone.
        given: tuple[int, ...]
        q, k, v = given = query.data_ptr(), key.data_ptr(), value.data_ptr()
        odd, strides = q | k | v, None
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            strides = query.stride(), key.stride(), value.stride()
        about: tuple[Any, ...] = query.numel(), key.numel(), q == k, k == v, q == v, strides
        if more:
            given = (*given, *map(Tensor.data_ptr, more))
            about = (*about, *map(Tensor.stride, more), *map(given.index, given))
            odd = reduce(or_, given)
        steps = self.known.get(about)
        found = None if steps is None else steps.again(query, given, odd)
        if found is None:
            run = partial(self.run, query, key, value, *more)
            with ahead.together(run):
                found = self.known.note(about, run, (query, key, value, *more))
        return found


def plain(
    weighting: str, number: float, scale: float, factor: float | None, band: Band
) -> Callable[..., Tensor]:
    """Σⱼ α(s)ᵢⱼ vⱼ with s = scale · q·k + factor · ‖k‖², for arrays on four axes of one dtype.

    query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d). `number` is entmax's
    alpha or top-k's k.
    """

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = None if factor is None else norms.square(key, factor)
        numbers = Numbers(scale, weighting, number, *band(query.shape[2], key.shape[2]))
        arrays = thresholds.searched(Arrays(query, key, value, bias), numbers)
        return ops.pooled(*arrays, *numbers)[0]

    return run


def additive_by(table: Tensor, grid: Tensor, band: Band) -> Callable[..., Tensor | None]:
    """The same with s = Σ_h v_h tanh(W₁q + W₂k + b)_h, of what `hidden` knows."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, grid: Tensor,
        w_query: Tensor, w_key: Tensor, v: Tensor, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        a, b, parts = hidden.hidden(query, key, w_query, w_key, bias)
        bounds = band(query.shape[2], key.shape[2])
        return additive.additive(a, b, v, value, table, grid, *bounds, None, parts)[0]

    repeat, at = Repeat(run), table.get_device()

    def bound(query: Tensor, key: Tensor, value: Tensor, score: Any, *_: Any) -> Tensor | None:
        held: tuple[Tensor, ...] = (score.w_query, score.w_key, score.v)
        held = held if score.bias is None else (*held, score.bias)
        if any(x.get_device() != at for x in held):  # which no kind tells
            return None
        return repeat(query, key, value, table, grid, *held)

    return bound
