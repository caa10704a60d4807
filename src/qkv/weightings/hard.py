"""The classical database query: one row has all the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import of
from qkv.errors import DtypeError
from qkv.types import Array, Keep, Live
from qkv.weightings.base import INFINITY, NOWHERE, State, Weighting, pool, row_max
from qkv.weightings.softmax import Softmax

SOFT = Softmax()


@dataclass(frozen=True)
class Hard(Weighting):
    """α = 1 at the largest score of the row, 0 elsewhere; ties by the lowest row.

    The weights are flat in the scores, so no gradient reaches them; with `straight_through`
    the gradient is that of the softmax in their place, whose state goes beside.

    >>> import numpy as np
    >>> Hard()(np.array([[1.0, 3.0, 3.0]]))
    array([[0., 1., 0.]])
    """

    also: ClassVar[tuple[str, ...]] = ("argmax", "hardmax", "max")

    straight_through: bool = False

    convex: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.straight_through, bool):
            raise DtypeError(
                f"Hard: straight_through must be True or False, not {self.straight_through!r}"
            )

    @property
    def few(self) -> int | None:
        return None if self.straight_through else 1

    @property
    def smooth(self) -> bool:  # type: ignore[override]
        return self.straight_through

    @property
    def centred(self) -> bool:  # type: ignore[override]
        return self.straight_through

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        top = row_max(scores, live)
        hard = self.weight(scores, live, k, (self.position(scores, live, k, top), top))
        if not self.straight_through:
            return hard
        fw = of(scores)
        soft = fw.finite(SOFT.weights(scores, live, k))
        return hard + (soft - fw.detach(soft))

    def position(self, scores: Array, live: Live, k: Array, top: Array) -> Array:
        """Where the row's first largest score stands."""
        fw = of(scores)
        if scores.shape[-1] == 0:
            return fw.astype(fw.full(top.shape, 0.0, top), "int32") + NOWHERE
        is_top = scores == top
        if live is not None:
            is_top = fw.xp.logical_and(is_top, live)
        at = fw.xp.where(is_top, k, fw.astype(k * 0 + NOWHERE, fw.dtype(k)))
        return fw.xp.min(at, axis=-1, keepdims=True)

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        fw = of(scores)
        at, top = found[:2]
        here = fw.astype(fw.xp.logical_and(k == at, top > -INFINITY), fw.dtype(scores))
        spoiled = fw.keep(scores * 0.0, fw.xp.isnan(top))  # a live NaN is not hidden
        return fw.keep(here + spoiled, live)

    def init(self, rows: Array, width: int) -> State:
        fw = of(rows)
        top = fw.full(rows.shape, -INFINITY, rows)
        at = fw.astype(fw.full(rows.shape, 0.0, rows), "int32") + NOWHERE
        soft = SOFT.init(rows, width) if self.straight_through else ()
        return top, at, *super().init(rows, width), *soft

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        top = row_max(scores, live)
        at = self.position(scores, live, k, top)
        weight = self.weight(scores, live, k, (at, top))
        pooled = pool(weight, value, live, keep, sparse=True)
        soft = SOFT.lift(scores, live, k, (), value, keep) if self.straight_through else ()
        return top, at, pooled, *soft

    def merge(self, one: State, two: State) -> State:
        xp = of(one[0]).xp
        ahead = xp.logical_or(two[0] > one[0], xp.isnan(two[0]))
        tie = xp.logical_and(two[0] == one[0], two[1] < one[1])
        second = xp.logical_or(ahead, tie)
        hard = (xp.where(second, b, a) for a, b in zip(one[:3], two[:3], strict=True))
        return *hard, *(SOFT.merge(one[3:], two[3:]) if self.straight_through else ())

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        top, at, pooled, *soft = state
        if not self.straight_through:
            return pooled, (at, top), None
        _, known, centre = SOFT.finish(tuple(soft), ())
        return pooled, (at, top, *known), centre

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        soft = SOFT.weight(scores, None, scores, found[2:])
        return SOFT.slope(scores, soft, along, centre, found[2:])
