"""Attention over rows that several hold: what each does with its own, and the whole of it.

A weighting's `search` and its state are all that is merged, and nothing is read twice by two: so
the holders may be threads, processes or machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qkv.engines import block_passes as passes
from qkv.engines import streaming, validation
from qkv.engines.block_passes import BlockPasses
from qkv.engines.call import Call
from qkv.engines.out_of_core import forward as stored
from qkv.errors import CombinationError
from qkv.frameworks import get_framework, load_framework, tree
from qkv.frameworks.stored_rows import StoredRows, UnreadArray
from qkv.scores import Score, ScoreLike
from qkv.util.types import Array, Arrays, Gradients, ShardPosition, Span
from qkv.weightings import State, Weighting, WeightingLike
from qkv.weightings.base import weighting_for_rows

ScorePasses = stored.ScorePasses
PooledSums = stored.PooledSums
resolve_score_and_weighting, compute_output, require_one_framework = (
    validation.resolve_score_and_weighting,
    passes.compute_output,
    validation.require_one_framework,
)
pool_values, merge_sums, finish_sums, sums_from_entropy = (
    stored.pool_values,
    stored.merge_sums,
    stored.finish_sums,
    stored.sums_from_entropy,
)
compute_entropy, entropy_from_sums, get_entropy = (
    stored.compute_entropy,
    stored.entropy_from_sums,
    stored.get_entropy,
)

MAX_QUERIES_PER_BATCH = 1024
"""Queries that are asked together."""

MAX_SEARCHED_LOST_SCORES = 2**20
"""Scores of rows that were lost, up to which they are searched as if they were there."""

T = TypeVar("T")


def merge_pairwise(parts: Sequence[T], merge: Callable[[T, T], T]) -> T:
    """All parts, neighbours first: one tree for one number of them, so that sums repeat to the bit.

    >>> merge_pairwise("abcde", lambda one, two: f"({one}{two})")
    '(((ab)(cd))e)'
    """
    parts = list(parts)
    while len(parts) > 1:
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        parts = [pair[0] if len(pair) == 1 else merge(*pair) for pair in pairs]
    return parts[0]


# What one holder does


def score_part(
    rows: StoredRows,
    query: np.ndarray | None,
    *,
    score: Score,
    weighting: Weighting,
    origin: int,
    matches: np.ndarray | None = None,
) -> tuple[ScorePasses, np.ndarray]:
    """The scores of one holder's rows, the first of which is at the position `origin` of all; and
    the best of each query, (n,), before they are scaled."""
    with load_framework("numpy").compute_context():
        if matches is None:
            assert query is not None
            score.check_shapes(tuple(query.shape), rows.key.shape)
            matches = stored.score_rows(rows, query, score)
        seen = matches if rows.allowed is None else matches[:, rows.allowed]
        best = seen.max(axis=1, initial=-np.inf)
        return ScorePasses(weighting.scale_scores(matches), rows.allowed, weighting, origin), best


class ShardCall:
    """One holder's rows of a call, of which the first is at the position `origin` of `total`."""

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

    def compute_gradients(self, kept: State, gradients: Arrays) -> list[Array | None]:
        """The gradients of the query and of every array in score and weighting, by these rows."""
        with self.call.fw.compute_context():
            return list(streaming.run_backward(self.call, self.tiling, kept, gradients, None))


# The whole


def attend_across(
    begin: Callable[[Array, Score, Weighting], Any],
    query: Array,
    shape: tuple[int, int, int],
    *,
    score: ScoreLike,
    weighting: WeightingLike,
) -> Array:
    """`attend` over m rows that others hold, with gradients: query (n, d) → (n, d_v).

    `shape` is (m, d_k, d_v); `begin` tells the holders what is asked, and gives what asks all of
    them and merges what they say: `fold` and `state`, as `BlockPasses` has them, and
    `slopes(kept, gradients)`, those of the query and of every array in score and weighting.
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
        holders = begin(fresh.query, fresh.score, fresh.weighting)
        out, known, centre = compute_output(holders, fresh.weighting)
        return (out,), (*known, *(() if centre is None else (centre,)))

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Gradients:
        fresh = tree.replace_arrays(fw, call, arrays)
        holders = begin(fresh.query, fresh.score, fresh.weighting)
        return tuple(holders.compute_gradients(kept, gradients))

    def reference(*_: Array) -> Arrays:
        raise CombinationError(
            "rows that others hold have first derivatives alone: for second ones, open the "
            "database in one process"
        )

    leaves = tree.array_leaves(fw, call)
    with fw.compute_context():
        out = fw.run_differentiable(forward, backward, reference, leaves)[0]
        return fw.astype(out, fw.dtype_name(query))


def _query_batch(call: Call, start: int) -> tuple[Array, Weighting]:
    span = Span(start, min(MAX_QUERIES_PER_BATCH, call.n - start))
    return call.query[start : start + span.size], weighting_for_rows(
        call.fw, call.weighting, span, call.n
    )


# Rows that were lost


class LostRows(NamedTuple):
    """Holders beside which some `row_count` are lost, none of which scores above `max_score` (n,
    1)."""

    holders: Any
    weighting: Weighting
    row_count: int
    max_score: np.ndarray

    def _repeat_state(self, one: State, merge: Callable[[State, State], State]) -> State:
        """The state of so many equal rows, by doubling."""
        found, rest = None, self.row_count
        while rest:
            if rest & 1:
                found = one if found is None else merge(found, one)
            rest >>= 1
            one = merge(one, one) if rest else one
        assert found is not None
        return found

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        lost = self._repeat_state(lift(self.max_score.copy(), None, _TIE_WINNING_POSITION), merge)
        return merge(self.holders.fold(lift, merge, init), lost)  # type: ignore[no-any-return]

    def state(self, found: State) -> State:
        one = np.ones((1, 1), self.max_score.dtype)
        lost = self.weighting.partial_state(
            self.max_score.copy(), None, _TIE_WINNING_POSITION, found, one, None
        )
        merge = self.weighting.merge
        return merge(self.holders.state(found, width=1), self._repeat_state(lost, merge))


_TIE_WINNING_POSITION = np.full((1, 1), -1, np.int32)
"""The position of a row that wins every tie."""


def max_lost_share(holders: Any, weighting: Weighting, count: int, most: np.ndarray) -> np.ndarray:
    """The largest weight that `count` lost rows can have together, (n,): the total variation by
    which weights without them are wrong at most.

    For weights that sum to one and fall when another row's score rises. It is the output where the
    lost rows have the value 1, the largest score that they can have, and all others the value 0.
    """
    whole = np.ones(len(most))
    if not weighting.is_convex or weighting.raises_on_empty:
        return whole
    if weighting.needs_search and count * len(most) > MAX_SEARCHED_LOST_SCORES:
        return whole
    with load_framework("numpy").compute_context():
        top = weighting.scale_scores(most[:, None])
        sure = np.isfinite(top)
        top = np.where(sure, top, 0)
        lost = LostRows(holders, weighting, count, top)
        out, *_ = compute_output(lost, weighting)
        # Sums of so many terms are rounded; the bound must not be.
        bound = np.minimum(out[:, 0] * (1 + 1e-5) + 1e-7, 1.0)
    bound[bound <= 1e-7] = 0 if weighting.is_sparse else 1e-7
    # One that is NaN, of scores that their dtype does not hold, proves nothing.
    return np.where(sure[:, 0] & (bound <= 1), bound, 1.0)


class KeyBall(NamedTuple):
    """Keys that lie within a radius of a centre; none lay farther than `max_quantization_error`
    from where it lies before it was kept in 8 bits."""

    centre: np.ndarray
    radius: float
    row_count: int
    max_quantization_error: float = 0.0

    @classmethod
    def enclose_rows(cls, rows: StoredRows) -> KeyBall:
        """One that holds all keys; they are read twice."""
        size, total = (
            max(streaming.MAX_KEY_NUMBERS_PER_READ // max(rows.shape[1], 1), 512),
            np.zeros(rows.shape[1]),
        )
        for group in rows.iter_spans(size):
            for cut in group:
                total += cut.read_keys().sum(axis=0, dtype=float)
        centre, far, moved = total / max(rows.shape[0], 1), 0.0, 0.0
        for group in rows.iter_spans(size):
            for cut in group:
                far = max(
                    far, float(np.square(cut.read_keys() - centre).sum(axis=1).max(initial=0))
                )
                off = cut.chunk.quantized.residual if cut.chunk.quantized else None
                if cut.chunk.is_lossy and off is not None:
                    moved = max(moved, float(off.max(initial=0)))
        return cls(centre, float(np.sqrt(far)), rows.shape[0], moved)

    def before_quantization(self) -> KeyBall:
        """One that held the keys before they were kept in 8 bits."""
        return self._replace(radius=self.radius + self.max_quantization_error)

    def max_score(self, query: np.ndarray, score: Score) -> np.ndarray:
        """The largest score that any of the keys can have with each query, (n,); ∞ where it is not
        known."""
        query, slack = query.astype(float), 1e-5
        if score.is_linear:
            form = score.dot_product_form(query, self.centre[None])
            moved = form.query * form.scale
            size = np.linalg.norm(moved, axis=1)
            reach = size * (self.radius + slack * np.linalg.norm(self.centre))
            return np.asarray(moved @ self.centre + reach * (1 + slack))
        if score.is_radial:
            away = query - self.centre
            far = np.linalg.norm(away, axis=1, keepdims=True)
            nearest = away * (np.minimum(self.radius * (1 + slack) / np.maximum(far, 1e-300), 1))
            nearest += self.centre
            found = [score(q[None], k[None])[0, 0] for q, k in zip(query, nearest, strict=True)]
            rough = 8 * np.finfo(np.float32).eps * np.abs(found)  # as scores beside them may be
            return np.asarray(found) + slack + rough
        return np.full(len(query), np.inf)
