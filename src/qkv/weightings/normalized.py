"""Weights that are the scores themselves: over their sum, as they are, or through a sigmoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import of
from qkv.errors import unknown
from qkv.types import Array
from qkv.weightings.base import State, Weighting, nonzero, pool, row_sum

ON_EMPTY = ("zero", "nan", "uniform", "nearest", "raise")


@dataclass(frozen=True)
class Normalized(Weighting):
    """αᵢ = sᵢ / Σⱼ sⱼ, for scores that are never negative

    Where every score of a row is 0 the weights are `on_empty`: "zero", "nan", "uniform" (the
    average of the live rows), "nearest" (the nearest key alone, for window scores), "raise".

    >>> import numpy as np
    >>> Normalized()(np.array([[1.0, 3.0], [0.0, 0.0]]))
    array([[0.25, 0.75],
           [0.  , 0.  ]])
    """

    on_empty: str = "zero"
    convex: ClassVar[bool] = True
    needs_nonnegative: ClassVar[bool] = True
    centred: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.on_empty not in ON_EMPTY:
            raise unknown("on_empty", self.on_empty, ON_EMPTY)

    def weights(self, scores: Array, live: Array | None, k: Array) -> Array:
        scores = of(scores).keep(scores, live)
        return scores / nonzero(row_sum(scores))

    def init(self, rows: Array, width: int) -> State:
        return of(rows).full(rows.shape, 0.0, rows), *super().init(rows, width)

    def lift(
        self,
        scores: Array,
        live: Array | None,
        k: Array,
        found: State,
        value: Array,
        keep: Array | None,
    ) -> State:
        scores = of(scores).keep(scores, live)
        return row_sum(scores), pool(scores, value, live, keep, sparse=True)

    def merge(self, one: State, two: State) -> State:
        return one[0] + two[0], one[1] + two[1]

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        total, pooled = state
        out = pooled / nonzero(total)
        return out, (total,), out

    def weight(self, scores: Array, live: Array | None, k: Array, found: State) -> Array:
        return of(scores).keep(scores, live) / nonzero(found[0])

    def slope(self, weight: Array, along: Array, centre: Array, found: State) -> Array:
        return (along - centre) / nonzero(found[0])


@dataclass(frozen=True)
class Raw(Weighting):
    """αᵢ = sᵢ: the sum of similarity times value, as it stands

    >>> import numpy as np
    >>> Raw()(np.array([[2.0, -1.0]]))
    array([[ 2., -1.]])
    """

    sparse: ClassVar[bool] = True

    def weights(self, scores: Array, live: Array | None, k: Array) -> Array:
        return of(scores).keep(scores, live)

    def weight(self, scores: Array, live: Array | None, k: Array, found: State) -> Array:
        return self.weights(scores, live, k)

    def slope(self, weight: Array, along: Array, centre: Array, found: State) -> Array:
        return along


@dataclass(frozen=True)
class Sigmoid(Weighting):
    """αᵢ = 1 / (1 + exp(−sᵢ)): each row by itself, the weights need not sum to one

    >>> import numpy as np
    >>> Sigmoid()(np.array([[0.0, 40.0]]))
    array([[0.5, 1. ]])
    """

    def weights(self, scores: Array, live: Array | None, k: Array) -> Array:
        fw = of(scores)
        return fw.keep((fw.xp.tanh(scores * 0.5) + 1.0) * 0.5, live)

    def weight(self, scores: Array, live: Array | None, k: Array, found: State) -> Array:
        return self.weights(scores, live, k)

    def slope(self, weight: Array, along: Array, centre: Array, found: State) -> Array:
        return weight * (1.0 - weight) * along
