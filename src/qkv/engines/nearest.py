"""The k best keys of each query, by the state of `TopK` alone: no value is read."""

from __future__ import annotations

from typing import Any

from qkv.engines.call import Call
from qkv.engines.passes import Passes
from qkv.engines.read import loops_of
from qkv.engines.streaming import block_size, tiling_of
from qkv.types import Array, Arrays, Span
from qkv.weightings import TopK


def run(call: Call, k: int) -> tuple[Array, Array]:
    """Their scores (…, n, k), the best first, and where they stand; −∞ where there are fewer."""
    best, call = TopK(k), call.precise()

    def found(rows: Span, keys: Any) -> Arrays:
        return Passes(call, rows, keys).fold(best.lift_best, best.merge_best, best.init_best)

    scores, at = loops_of(call).tiled(found, tiling_of(call, *block_size(call)))
    return scores, at
