"""Attention sinks: one more key without a value, whose score is the same for every query.

The weights of the keys then sum to less than 1: the sink has the rest of the weight.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from qkv.errors import ArgumentError, CombinationError, DtypeError, as_float, coerce_field_to_float
from qkv.frameworks import get_framework
from qkv.util.types import Array, LiveMask, Shape
from qkv.weightings.base import NO_POSITION, FoldFunction, State, Weighting
from qkv.weightings.power import broadcast_to_rows, check_row_shape


def validate_sink(weighting: Any) -> None:
    """Check that the field `sink` is None, a finite number or an array, and that it has effect."""
    sink, name = weighting.sink, type(weighting).__name__
    has_effect = isinstance(weighting, SinkWeighting)
    if sink is None and not has_effect:
        return
    if isinstance(sink, Real) and not isinstance(sink, bool):
        if not abs(as_float(sink)) < float("inf"):
            raise ArgumentError(f"{name}: sink must be finite, not {sink!r:.40}")
        coerce_field_to_float(weighting, "sink")
    elif not hasattr(sink, "dtype"):
        raise DtypeError(f"{name}: sink must be a number or one number per head, not {sink!r}")
    if not has_effect:
        raise CombinationError(
            f"{name} overrides the formula of its base class, which knows nothing of a sink: use "
            "Softmax(sink=…) or Entmax(alpha, sink=…)"
        )


class SinkWeighting(Weighting):
    """The weights of another weighting over the keys and the sink, without that of the sink.

    A class lists this one before the weighting that it extends. The sink's score is scaled as the
    scores are, its value is 0, and no mask excludes it.
    """

    sink: Any

    def without_sink(self, scores: Array) -> Weighting:
        """Return the weighting of scaled scores like these (…, n, m) that the sink is added to."""
        raise NotImplementedError

    def check_shapes(self, lead: Shape, n: int) -> None:
        super().check_shapes(lead, n)
        check_row_shape(f"{type(self).__name__}: sink", self.sink, lead, n)

    def sink_scores(self, rows: Array) -> Array:
        """Return the scaled score of the sink for rows like `rows` (…, r, 1)."""
        fw = get_framework(rows)
        s = self.scale_scores(broadcast_to_rows(self.sink, rows))
        return s + fw.full(rows.shape, 0.0, rows)  # a new array, which a weighting may overwrite

    def sink_position(self, rows: Array) -> Array:
        """Return the position of the sink, behind all keys."""
        fw = get_framework(rows)
        return fw.astype(fw.full((1, 1), 0.0, rows), "int32") + NO_POSITION

    def add_column(self, scores: Array, live: LiveMask) -> tuple[Array, LiveMask]:
        """Return whole rows of scores, and their mask, with the sink as the last key."""
        fw = get_framework(scores)
        column = self.sink_scores(fw.full((*scores.shape[:-1], 1), 0.0, scores))
        if live is not None:
            live = fw.xp.broadcast_to(live, fw.dynamic_shape(scores))
            live = fw.xp.concat([live, column == column], axis=-1)
        return fw.xp.concat([scores, column], axis=-1), live

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        scores, live = self.add_column(scores, live)
        return self.without_sink(scores).weights(scores, live, k)[..., :-1]

    def compute_lse(self, scores: Array, live: LiveMask, k: Array) -> Array:
        scores, live = self.add_column(scores, live)
        return self.without_sink(scores).compute_lse(scores, live, k)

    def divisor_without(self, remaining: Array) -> Array | None:
        return None  # the sum of the other weights does not say how much the sink has

    def fold_with_sink(self, fold: FoldFunction) -> FoldFunction:
        """Return the fold over the keys and the sink."""

        def fold_all(lift: Any, merge: Any, init: Any) -> State:
            state = fold(lift, merge, init)
            rows = state[0][..., :1]
            sink = lift(self.sink_scores(rows), None, self.sink_position(rows))
            merged: State = merge(state, sink)
            return merged

        return fold_all

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        rows = state[0][..., :1]
        fw = get_framework(rows)
        width = max(fw.static_shape(x)[-1] for x in state)
        none = fw.full((1, width), 0.0, rows)
        sink = self.partial_state(
            self.sink_scores(rows), None, self.sink_position(rows), row_facts, none, None
        )
        return super().finish(self.merge(state, sink), row_facts)
