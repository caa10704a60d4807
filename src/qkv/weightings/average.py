"""Average pooling: every row counts alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import of
from qkv.types import Array, Keep, Live
from qkv.weightings.base import State, Weighting, pool


@dataclass(frozen=True)
class Average(Weighting):
    """α = 1 / m over the m live rows

    >>> import numpy as np
    >>> Average()(np.zeros((1, 4)))
    array([[0.25, 0.25, 0.25, 0.25]])
    """

    also: ClassVar[tuple[str, ...]] = ("mean", "uniform")

    convex: ClassVar[bool] = True
    smooth = False

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        fw, ones = of(scores), self.ones(scores, live)
        return ones / fw.nonzero(fw.row_sum(ones))

    def ones(self, scores: Array, live: Live) -> Array:
        fw = of(scores)
        return fw.keep(fw.astype(scores == scores, fw.dtype(scores)) * 0.0 + 1.0, live)

    def without(self, rest: Array) -> Array:
        return rest

    def init(self, rows: Array, width: int) -> State:
        return of(rows).full(rows.shape, 0.0, rows), *super().init(rows, width)

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        ones = self.ones(scores, live)
        return of(ones).row_sum(ones), pool(ones, value, live, keep)

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        count, pooled = state
        return pooled / of(count).nonzero(count), (count,), None

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return self.ones(scores, live) / of(scores).nonzero(found[0])
