"""The hard weighting: the best row has all the weight, as in a classical database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.errors import DtypeError
from qkv.frameworks import get_framework
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, DropoutMask, LiveMask
from qkv.weightings.base import (
    INFINITY,
    NO_POSITION,
    State,
    Weighting,
    live_row_max,
    pool_by_weights,
)
from qkv.weightings.softmax import Softmax

SOFTMAX = Softmax()


@suggest_keywords
@dataclass(frozen=True)
class Hard(Weighting):
    """α = 1 at the largest score of the row, 0 elsewhere. The first of equal scores wins.

    The weights are piecewise constant, so scores receive no gradient. With `straight_through` they
    receive the gradient of the softmax.

    >>> import numpy as np
    >>> Hard()(np.array([[1.0, 3.0, 3.0]]))
    array([[0., 1., 0.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("argmax", "hardmax", "max")

    straight_through: bool = False

    is_convex: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.straight_through, bool):
            raise DtypeError(
                f"Hard: straight_through must be True or False, not {self.straight_through!r}"
            )

    @property
    def max_support(self) -> int | None:
        return None if self.straight_through else 1

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.straight_through

    @property
    def needs_centre(self) -> bool:  # type: ignore[override]
        return self.straight_through

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        top = live_row_max(scores, live)
        hard = self.block_weights(
            scores, live, k, (self.argmax_position(scores, live, k, top), top)
        )
        if not self.straight_through:
            return hard
        fw = get_framework(scores)
        soft = fw.replace_nonfinite(SOFTMAX.weights(scores, live, k))
        return hard + (soft - fw.detach(soft))

    def argmax_position(self, scores: Array, live: LiveMask, k: Array, top: Array) -> Array:
        """Return the position of the first largest score of each row."""
        fw = get_framework(scores)
        if fw.has_empty_axis(scores.shape[-1:]):
            return fw.astype(fw.full(top.shape, 0.0, top), "int32") + NO_POSITION
        if fw.may_be_empty(scores.shape[-1]):  # one more key, which no row attends to
            lowest = fw.full((*scores.shape[:-1], 1), -INFINITY, scores)
            beyond = fw.astype(fw.full((*k.shape[:-1], 1), 0.0, top), "int32") + NO_POSITION
            scores = fw.xp.concat([fw.fill_unless(scores, live, -INFINITY), lowest], axis=-1)
            k, live = fw.xp.concat([k, fw.astype(beyond, fw.dtype_name(k))], axis=-1), None
        if fw.has_fast_argmax:
            best = fw.xp.argmax(fw.fill_unless(scores, live, -INFINITY), axis=-1, keepdims=True)
            return fw.take_positions(fw.xp.reshape(k, (-1,)), best)
        is_top = scores == top
        if live is not None:
            is_top = fw.xp.logical_and(is_top, live)
        at = fw.xp.where(is_top, k, fw.astype(k * 0 + NO_POSITION, fw.dtype_name(k)))
        return fw.xp.min(at, axis=-1, keepdims=True)

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        fw = get_framework(scores)
        at, top = row_facts[:2]
        there = fw.xp.where(top > -INFINITY, at, at * 0 + NO_POSITION)
        here = fw.astype(k == there, fw.dtype_name(scores))
        if not fw.needs_gradient([scores]):
            has_nan = fw.concrete_value(fw.xp.any(fw.xp.isnan(top)))
            if has_nan is not None and not has_nan:
                return here
        nan_scores = fw.fill_unless(scores * 0.0, fw.xp.isnan(top))  # a live NaN must propagate
        return fw.fill_unless(here + nan_scores, live)

    def init(self, rows: Array, width: int) -> State:
        fw = get_framework(rows)
        top = fw.full(rows.shape, -INFINITY, rows)
        at = fw.astype(fw.full(rows.shape, 0.0, rows), "int32") + NO_POSITION
        soft = SOFTMAX.init(rows, width) if self.straight_through else ()
        return top, at, *super().init(rows, width), *soft

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        fw, top = get_framework(scores), live_row_max(scores, live)
        at = self.argmax_position(scores, live, k, top)
        if fw.has_fast_argmax and 0 not in scores.shape and not fw.needs_gradient([scores]):
            pooled = self._take_values(at - k[..., :1], top, value, dropout_mask)
        else:
            weight = self.block_weights(scores, live, k, (at, top))
            pooled = pool_by_weights(weight, value, live, dropout_mask, sparse=True)
        soft = (
            SOFTMAX.partial_state(scores, live, k, (), value, dropout_mask)
            if self.straight_through
            else ()
        )
        return top, at, pooled, *soft

    def pool_whole_rows(
        self, scores: Array, live: LiveMask, k: Array, value: Array, dropout_mask: DropoutMask
    ) -> Array:
        fw = get_framework(scores)
        if not fw.has_fast_argmax or self.straight_through or fw.needs_gradient([scores, value]):
            return super().pool_whole_rows(scores, live, k, value, dropout_mask)
        if 0 in scores.shape:
            return super().pool_whole_rows(scores, live, k, value, dropout_mask)
        top = live_row_max(scores, live)
        at = self.argmax_position(scores, live, k, top)
        return self._take_values(at - k[..., :1], top, value, dropout_mask)

    def _take_values(self, at: Array, top: Array, value: Array, dropout_mask: DropoutMask) -> Array:
        """Return the value at each row's position; 0 for an empty row, NaN for a NaN score."""
        fw = get_framework(value)
        has_key = top > -INFINITY
        at = fw.xp.where(has_key, at, at * 0)
        value = fw.xp.broadcast_to(value, (*at.shape[:-2], *value.shape[-2:]))
        out = fw.take_rows(value, at)
        if dropout_mask is not None:
            factor = fw.take_along_last(dropout_mask, at)
            out = fw.fill_unless(out * factor, factor != 0)
        return fw.fill_unless(fw.fill_unless(out, has_key), top == top, float("nan"))

    def merge(self, one: State, two: State) -> State:
        xp = get_framework(one[0]).xp
        ahead = xp.logical_or(two[0] > one[0], xp.isnan(two[0]))
        tie = xp.logical_and(two[0] == one[0], two[1] < one[1])
        second = xp.logical_or(ahead, tie)
        hard = (xp.where(second, b, a) for a, b in zip(one[:3], two[:3], strict=True))
        return *hard, *(SOFTMAX.merge(one[3:], two[3:]) if self.straight_through else ())

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        top, at, pooled, *soft = state
        if not self.straight_through:
            return pooled, (at, top), None
        _, known, centre = SOFTMAX.finish(tuple(soft), ())
        return pooled, (at, top, *known), centre

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        soft = SOFTMAX.block_weights(scores, None, scores, row_facts[2:])
        return SOFTMAX.score_gradient(scores, soft, weight_gradient, centre, row_facts[2:])
