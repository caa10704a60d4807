"""Attention over rows in several shards: the work of one shard, and the merged result.

Shards send only small results: the partial states of a weighting and of its threshold search. So a
shard may be a thread, a process or a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qkv.engines import streaming, validation
from qkv.engines.call import Call
from qkv.engines.out_of_core import forward
from qkv.engines.streaming import BlockPasses
from qkv.errors import CombinationError
from qkv.frameworks import get_framework, load_framework, tree
from qkv.frameworks.stored_rows import StoredRows, UnreadArray
from qkv.scores import Score, ScoreLike
from qkv.util.types import Array, Arrays, Gradients, ShardPosition, Span
from qkv.weightings import State, Weighting, WeightingLike
from qkv.weightings.base import weighting_for_rows

# Re-exported: modules above this layer may not import an engine.
ScorePasses = forward.ScorePasses
PooledSums = forward.PooledSums
resolve_score_and_weighting = validation.resolve_score_and_weighting
require_one_framework = validation.require_one_framework
compute_output = streaming.compute_output
pool_values = forward.pool_values
merge_sums = forward.merge_sums
finish_sums = forward.finish_sums
sums_from_entropy = forward.sums_from_entropy
compute_entropy = forward.compute_entropy
entropy_from_sums = forward.entropy_from_sums
get_entropy = forward.get_entropy

MAX_QUERIES_PER_BATCH = 1024
"""The largest number of queries in one request to the shards."""

MAX_SEARCHED_LOST_SCORES = 2**20
"""The largest number of lost scores, rows × queries, for which a threshold search is run.

For more, `max_lost_share` returns 1.
"""

T = TypeVar("T")


def merge_pairwise(parts: Sequence[T], merge: Callable[[T, T], T]) -> T:
    """Merge all parts, neighbours first.

    The order depends only on the number of parts, so floating-point sums are reproducible.

    >>> merge_pairwise("abcde", lambda one, two: f"({one}{two})")
    '(((ab)(cd))e)'
    """
    parts = list(parts)
    while len(parts) > 1:
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        parts = [pair[0] if len(pair) == 1 else merge(*pair) for pair in pairs]
    return parts[0]


# One shard


def score_part(
    rows: StoredRows,
    query: np.ndarray | None,
    *,
    score: Score,
    weighting: Weighting,
    origin: int,
    matches: np.ndarray | None = None,
) -> tuple[ScorePasses, np.ndarray]:
    """Return the scores of one shard, and the best unscaled score of each query, (n,).

    `origin` is the position of the shard's first row among all rows.
    """
    with load_framework("numpy").use_own_settings():
        if matches is None:
            assert query is not None
            score.check_shapes(tuple(query.shape), rows.key.shape)
            matches = forward.score_rows(rows, query, score)
        seen = matches if rows.allowed is None else matches[:, rows.allowed]
        best = seen.max(axis=1, initial=-np.inf)
        return ScorePasses(weighting.scale_scores(matches), rows.allowed, weighting, origin), best


class ShardCall:
    """A call over one shard, whose first row has the position `origin` among `total` rows."""

    def __init__(
        self,
        rows: StoredRows,
        query: Array,
        score: Score,
        weighting: Weighting,
        origin: int,
        total: int,
    ) -> None:
        at = ShardPosition(0, origin, query.shape[0], total)
        self.call = call = Call(query, rows.key, rows.value, score, weighting, at=at).upcast()
        self.tiling = streaming.build_tiling(call, call.n, streaming.block_size(call)[1])

    def block_passes(self) -> BlockPasses:
        return BlockPasses(self.call, *self.tiling[0])

    def compute_gradients(self, row_facts: State, gradients: Arrays) -> list[Array | None]:
        """Return this shard's part of the gradients of query, score and weighting."""
        with self.call.fw.use_own_settings():
            return list(streaming.run_backward(self.call, self.tiling, row_facts, gradients, None))


# All shards


def attend_across(
    begin: Callable[[Array, Score, Weighting], Any],
    query: Array,
    shape: tuple[int, int, int],
    *,
    score: ScoreLike,
    weighting: WeightingLike,
) -> Array:
    """Return `attend` over m rows in shards, with gradients: query (n, d) → (n, d_v).

    `shape` is (m, d_k, d_v). `begin(query, score, weighting)` sends the request to all shards and
    returns an object that merges the replies. The object has the methods `fold` and `state` of
    `BlockPasses`, and `compute_gradients` of `ShardCall`.
    """
    fw, (m, d, width) = get_framework(query), shape
    score, weighting = resolve_score_and_weighting(score, weighting, None)
    require_one_framework({"query": query}, score=score, weighting=weighting)
    weighting = weighting.limit_to_keys(m)
    score.check_shapes(tuple(query.shape), (m, d))
    key, value = (UnreadArray(None, (m, size)) for size in (d, width))  # type: ignore[arg-type]
    call = Call(query, key, value, score, weighting).upcast()
    if call.n > MAX_QUERIES_PER_BATCH:
        starts = range(0, call.n, MAX_QUERIES_PER_BATCH)
        each = [_query_batch(call, at) for at in starts]
        outs = [attend_across(begin, q, shape, score=score, weighting=w) for q, w in each]
        return fw.xp.concat(outs, axis=0)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.replace_arrays(fw, call, arrays)
        shards = begin(fresh.query, fresh.score, fresh.weighting)
        out, row_facts, centre = compute_output(shards, fresh.weighting)
        return (out,), (*row_facts, *(() if centre is None else (centre,)))

    def backward(arrays: Arrays, row_facts: Arrays, gradients: Arrays) -> Gradients:
        fresh = tree.replace_arrays(fw, call, arrays)
        shards = begin(fresh.query, fresh.score, fresh.weighting)
        return tuple(shards.compute_gradients(row_facts, gradients))

    def reference(*_: Array) -> Arrays:
        raise CombinationError(
            "second derivatives are not supported for attention over rows in shards: open the "
            "database in one process"
        )

    leaves = tree.array_leaves(fw, call)
    with fw.use_own_settings():
        out = fw.run_differentiable(forward, backward, reference, leaves)[0]
        return fw.astype(out, fw.dtype_name(query))


def _query_batch(call: Call, start: int) -> tuple[Array, Weighting]:
    span = Span(start, min(MAX_QUERIES_PER_BATCH, call.n - start))
    return call.query[start : start + span.size], weighting_for_rows(
        call.fw, call.weighting, span, call.n
    )


# Lost rows


class LostRows(NamedTuple):
    """The shards that replied, and `row_count` lost rows with scores of at most `max_score` (n, 1).

    The methods are those of `BlockPasses`. They give every lost row the score `max_score`.
    """

    shards: Any
    weighting: Weighting
    row_count: int
    max_score: np.ndarray

    def _repeat_state(self, one: State, merge: Callable[[State, State], State]) -> State:
        """Return the state of `row_count` equal rows, by doubling."""
        total, count = None, self.row_count
        while count:
            if count & 1:
                total = one if total is None else merge(total, one)
            count >>= 1
            one = merge(one, one) if count else one
        assert total is not None
        return total

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        lost = self._repeat_state(lift(self.max_score.copy(), None, _TIE_WINNING_POSITION), merge)
        return merge(self.shards.fold(lift, merge, init), lost)  # type: ignore[no-any-return]

    def state(self, row_facts: State) -> State:
        one = np.ones((1, 1), self.max_score.dtype)
        lost = self.weighting.partial_state(
            self.max_score.copy(), None, _TIE_WINNING_POSITION, row_facts, one, None
        )
        merge = self.weighting.merge
        return merge(self.shards.state(row_facts, width=1), self._repeat_state(lost, merge))


_TIE_WINNING_POSITION = np.full((1, 1), -1, np.int32)
"""A position before that of every other row, so that a lost row wins every tie."""


def max_lost_share(
    shards: Any, weighting: Weighting, count: int, max_scores: np.ndarray
) -> np.ndarray:
    """Return the largest total weight that `count` lost rows can have, (n,).

    This bounds the total variation between the weights without the lost rows and the exact weights.

    The function computes the bound as an output of attention. In it, each lost row has the value 1
    and its largest possible score, `max_scores` (n,). All other rows have the value 0. The bound is
    valid for weights that sum to one and decrease when another row's score increases. For other
    weightings the function returns 1.
    """
    unbounded = np.ones(len(max_scores))
    if not weighting.is_convex or weighting.raises_on_empty:
        return unbounded
    if weighting.needs_search and count * len(max_scores) > MAX_SEARCHED_LOST_SCORES:
        return unbounded
    with load_framework("numpy").use_own_settings():
        top = weighting.scale_scores(max_scores[:, None])
        is_finite = np.isfinite(top)
        top = np.where(is_finite, top, 0)
        lost = LostRows(shards, weighting, count, top)
        out, *_ = compute_output(lost, weighting)
        # Allow for the rounding of long sums: the bound must hold.
        bound = np.minimum(out[:, 0] * (1 + 1e-5) + 1e-7, 1.0)
    bound[bound <= 1e-7] = 0 if weighting.is_sparse else 1e-7
    # NaN, from scores that overflow their dtype, becomes 1.
    return np.where(is_finite[:, 0] & (bound <= 1), bound, 1.0)


class KeyBall(NamedTuple):
    """A ball that contains all keys of a shard.

    8-bit storage moved each key by at most `max_quantization_error`.
    """

    centre: np.ndarray
    radius: float
    row_count: int
    max_quantization_error: float = 0.0

    @classmethod
    def enclose_rows(cls, rows: StoredRows) -> KeyBall:
        """Return a ball that contains all keys. All keys are read twice."""
        size, total = (
            max(streaming.MAX_KEY_NUMBERS_PER_READ // max(rows.shape[1], 1), 512),
            np.zeros(rows.shape[1]),
        )
        for group in rows.iter_spans(size):
            for span in group:
                total += span.read_keys().sum(axis=0, dtype=float)
        centre, squared_radius, max_error = total / max(rows.shape[0], 1), 0.0, 0.0
        for group in rows.iter_spans(size):
            for span in group:
                squares = np.square(span.read_keys() - centre).sum(axis=1)
                squared_radius = max(squared_radius, float(squares.max(initial=0)))
                residual = span.chunk.quantized.residual if span.chunk.quantized else None
                if span.chunk.is_lossy and residual is not None:
                    max_error = max(max_error, float(residual.max(initial=0)))
        return cls(centre, float(np.sqrt(squared_radius)), rows.shape[0], max_error)

    def before_quantization(self) -> KeyBall:
        """Return a ball that contains the keys before they were stored in 8 bits."""
        return self._replace(radius=self.radius + self.max_quantization_error)

    def max_score(self, query: np.ndarray, score: Score) -> np.ndarray:
        """Return an upper bound on the scores of each query (n, d), (n,); ∞ if none is known."""
        query, slack = query.astype(float), 1e-5
        if score.is_linear:
            form = score.dot_product_form(query, self.centre[None])
            projected = form.query * form.scale
            size = np.linalg.norm(projected, axis=1)
            reach = size * (self.radius + slack * np.linalg.norm(self.centre))
            return np.asarray(projected @ self.centre + reach * (1 + slack))
        if score.is_radial:
            offset = query - self.centre
            distance = np.linalg.norm(offset, axis=1, keepdims=True)
            radius = self.radius * (1 + slack)
            nearest = self.centre + offset * np.minimum(radius / np.maximum(distance, 1e-300), 1)
            best = [score(q[None], k[None])[0, 0] for q, k in zip(query, nearest, strict=True)]
            rounding = 8 * np.finfo(np.float32).eps * np.abs(best)  # other scores may be float32
            return np.asarray(best) + slack + rounding
        return np.full(len(query), np.inf)
