"""Average pooling: all rows have the same weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.frameworks import get_framework
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, DropoutMask, LiveMask
from qkv.weightings.base import State, Weighting, pool_by_weights


@suggest_keywords
@dataclass(frozen=True)
class Average(Weighting):
    """α = 1 / m for each of the m keys that the mask allows

    >>> import numpy as np
    >>> Average()(np.zeros((1, 4)))
    array([[0.25, 0.25, 0.25, 0.25]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("mean", "uniform")

    is_convex: ClassVar[bool] = True
    ignores_scores: ClassVar[bool] = True
    is_differentiable = False

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw, ones = get_framework(scores), self.live_ones(scores, live)
        return ones / fw.safe_divisor(fw.row_sum(ones))

    def live_ones(self, scores: Array, live: LiveMask) -> Array:
        fw = get_framework(scores)
        return fw.fill_unless(fw.astype(scores == scores, fw.dtype_name(scores)) * 0.0 + 1.0, live)

    def divisor_without(self, remaining: Array) -> Array:
        return remaining

    def init(self, rows: Array, width: int) -> State:
        return get_framework(rows).full(rows.shape, 0.0, rows), *super().init(rows, width)

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        ones = self.live_ones(scores, live)
        return get_framework(ones).row_sum(ones), pool_by_weights(ones, value, live, dropout_mask)

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        count, pooled = state
        return pooled / get_framework(count).safe_divisor(count), (count,), None

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return self.live_ones(scores, live) / get_framework(scores).safe_divisor(row_facts[0])
