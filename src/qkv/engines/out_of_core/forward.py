"""Exact attention over stored rows: output, weights (n, m), entropy and log-sum-exp.

The keys are read once. Memory holds one number for each query and row: first the score, then the
weight. The weighting turns scores into weights in its usual passes over blocks.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Call
from qkv.engines.out_of_core.backward import choose_loops
from qkv.engines.out_of_core.key_terms import adapt_score, load_key_terms
from qkv.engines.streaming import BlockPasses, compute_output
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import DenseAndSparse
from qkv.frameworks.stored_rows import RowReader, RowSpan, StoredRows, WeighedRows
from qkv.scores import Constant, Score, evaluate_block, has_user_code
from qkv.util.types import Array, Span
from qkv.weightings import State, TopK, Weighting
from qkv.weightings.base import pool_by_weights

MAX_CACHED_SCORES = 2**18
"""Scores of a block that fits the processor's cache."""

MAX_SCORES_WITHOUT_ENTROPY = 2**24
"""The entropy of so many weights is not computed with them, but when it is read."""

MIN_ROWS_PER_SPAN = 512
"""Rows that are scored together at least."""

MAX_VALUE_ROWS_PER_READ = 2**18
"""The most rows of values that a core reads at a time."""

MAX_WEIGHTS_PER_READ = 2**18
"""The most weights that a core multiplies by values at a time, if there are several queries."""

PooledSums = tuple[Any, ...]
"""Σᵢ αᵢ vᵢ (n, d_v); for a mean also Σᵢ αᵢ (n,) and the common value of all rows with weight."""


def weigh_rows(
    rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting, part: bool = False
) -> WeighedRows:
    """Return the exact weights of all rows. They are float64 if scores overflow float32.

    `part` is that of `qkv.attention.weigh_rows`.
    """
    query = query if calls.has_numbers_in_range((score, weighting)) else query.astype(float)
    weighed = weigh_scores(rows, score_rows(rows, query, score), weighting, part)
    largest = weighed.best_score if weighed.lse is None else weighed.best_score + weighed.lse
    if get_framework(largest).is_surely_finite(largest) or np.isfinite(largest).all():
        return weighed
    if not (rows.shape[0] if rows.allowed is None else rows.allowed.any()):
        return weighed
    if query.dtype != np.float64:
        weighed = weigh_scores(rows, score_rows(rows, query.astype(float), score), weighting, part)
    if not part:
        calls.check_best_scores_finite(score, weighting, query, weighed.best_score)
    return weighed


def find_nearest(rows: StoredRows, query: Array, score: Score, k: int) -> tuple[Array, Array]:
    """Return the k best scores of each query in descending order, and their positions, (n, k).

    If there are fewer than k rows, the last scores are −∞. The values of the rows are not read.
    """
    best = TopK(k)
    call = Call(get_framework(query).detach(query), rows.key, None, score, best).upcast()

    def find_best_in_span(rows_span: Span, keys: Any) -> State:
        return BlockPasses(call, rows_span, keys).fold(
            best.partial_best, best.merge_best, best.init_best
        )

    tiling = streaming.build_tiling(call, *streaming.block_size(call))
    most, at = choose_loops(call).map_tiles(find_best_in_span, tiling)
    return most, at


def weigh_scores(
    rows: StoredRows, scores: np.ndarray, weighting: Weighting, part: bool = False
) -> WeighedRows:
    """Return output, weights and statistics of scores (n, m). The weights overwrite the scores.

    With `part`, other shards hold more rows. Then the result also has the scaled scores, from which
    the weights among all rows are computed.
    """
    scaled = None
    if part:
        scaled = np.array(weighting.scale_scores(scores))
        if rows.allowed is not None:
            scaled[:, ~rows.allowed] = -np.inf
    at = None if rows.allowed is None else np.flatnonzero(rows.allowed)
    seen = scores if at is None else np.take(scores, at, axis=1)
    best = np.maximum.reduce(seen, 1, initial=-np.inf)
    if at is None or not len(at):
        alpha, spread, lse = _compute_weights(
            weighting.scale_scores(scores), rows.allowed, weighting
        )
    else:
        allowed, spread, lse = _compute_weights(weighting.scale_scores(seen), None, weighting)
        alpha = scores
        for all_rows, allowed_rows in zip(alpha, allowed, strict=True):
            all_rows.fill(0)
            all_rows[at] = allowed_rows
    sums = pool_values(rows, alpha, mean=weighting.is_convex)
    lse = None if lse is None else lse[:, 0]
    results = (finish_sums(sums), alpha, spread, lse, best)
    return WeighedRows(*results, rows_read=rows.shape[0], partial_sums=sums, scaled_scores=scaled)


def _compute_weights(
    s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting
) -> tuple[np.ndarray, np.ndarray | None, Array | None]:
    """Return the weights of scores (n, m), their entropy (n,) or None, and the log-sum-exp.

    The entropy is None if the weights were computed at once. Large weights overwrite the scores.
    """
    fw, (n, m) = get_framework(s), s.shape
    live = None if allowed is None else allowed[None]
    if s.size <= MAX_CACHED_SCORES:
        alpha, lse = weighting.weights_and_lse(s, live, fw.position_range(0, m, s)[None])
        return alpha, None, lse
    if m <= MAX_CACHED_SCORES and s.size <= MAX_SCORES_WITHOUT_ENTROPY:
        # Some queries at a time fit the cache.
        columns, parts = fw.position_range(0, m, s)[None], list[tuple[int, Array | None]]()

        def weigh_queries(span: Span) -> None:
            at = slice(span.start, span.start + span.size)
            s[at], lse = weighting.weights_and_lse(s[at], live, columns)
            parts.append((span.start, lse))

        step = max(MAX_CACHED_SCORES // m, 1)
        spans = [Span(at, min(step, n - at)) for at in range(0, n, step)]
        fw.reduce_spans(weigh_queries, lambda one, two: None, None, spans)
        by_query: list[Any] = [lse for _, lse in sorted(parts, key=itemgetter(0))]
        return s, None, None if by_query[0] is None else np.concatenate(by_query)
    part = ScorePasses(s, allowed, weighting)
    _, row_facts, _ = compute_output(part, weighting)
    sums = part.replace_scores_with_weights(row_facts)  # s now holds the weights
    return (
        s,
        entropy_from_sums(*sums),
        weighting.lse_from_state(row_facts) if weighting.has_lse else None,
    )


def score_rows(rows: StoredRows, query: np.ndarray, score: Score) -> np.ndarray:
    """Return s(q, kᵢ) for every row, (n, m), computed on all cores."""
    if type(score) is Constant:
        return np.ones((len(query), rows.shape[0]), query.dtype)
    out = np.empty((len(query), rows.shape[0]), query.dtype)
    score = adapt_score(rows, score, query.dtype)
    has_positions = has_user_code(score) or score.needs_positions
    call = Call(query, rows.key, None, score, Weighting()) if has_positions else None
    form = score.dot_product_form(query, query[:1]) if score.is_linear else None
    projected = None if form is None else form.query * form.scale

    def fill_scores(span: RowSpan) -> None:
        block: Any = call and calls.make_block(call, None, span)  # type: ignore[arg-type]
        stored, live = span.chunk.key, span.chunk.live
        at = slice(span.start, span.start + span.size)
        if projected is not None and isinstance(stored, DenseAndSparse):
            live_keys = stored if live is None else stored[live]
            out[:, at] = live_keys.inner_products(projected)
            return
        key, scale = (
            span.chunk.live_keys_and_scale() if score.is_linear else (span.read_keys(), None)
        )
        key = key.astype(query.dtype, copy=False)
        terms = load_key_terms(rows, score, span, key, query.dtype)
        out[:, at] = evaluate_block(score, query, key, block, terms)
        if scale is not None:
            out[:, at] *= scale

    spans = rows.iter_spans(_choose_span_size(rows, query, score), prefetch_fields=("key",))
    RowReader(get_framework(query)).reduce_spans(fill_scores, lambda one, two: None, None, spans)
    return out


def _choose_span_size(rows: StoredRows, query: np.ndarray, score: Score) -> int:
    """Return how many rows are scored at a time: their keys and their scores are limited."""
    m, width = rows.shape
    if m <= MIN_ROWS_PER_SPAN:  # building a call would take a tenth of the time of a query
        return MIN_ROWS_PER_SPAN
    call = Call(query, rows.key, None, score, Weighting())
    numbers = max(len(query) * streaming.numbers_per_pair(call), 1)
    size = streaming.MAX_KEY_NUMBERS_PER_READ // max(width, 1)
    return max(min(size, streaming.MAX_NUMBERS_PER_BLOCK // numbers), MIN_ROWS_PER_SPAN)


class ScorePasses:
    """The passes over scaled scores (n, c) of some rows. The first row has the position `origin`.

    Other shards may hold the other rows. The results of `fold` and `state` of all shards can be
    merged.
    """

    def __init__(
        self, s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting, origin: int = 0
    ):
        self.scores, self.allowed, self.weighting, self.origin = s, allowed, weighting, origin
        self.fw, (n, m) = get_framework(s), s.shape
        step = max(MAX_CACHED_SCORES // max(n, 1), 1)
        self.spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]
        self.template = self.fw.full((n, 1), 0.0, s)

    def _slice_block(self, span: Span) -> tuple[Array, Array | None, Array]:
        at = slice(span.start, span.start + span.size)
        live = None if self.allowed is None else self.allowed[None, at]
        return (
            self.scores[:, at],
            live,
            self.fw.position_range(self.origin + at.start, span.size, self.scores)[None],
        )

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        """Reduce the scores of all blocks to one state. `Weighting.find_threshold` calls it."""
        start = init(self.template)
        state: State = self.fw.reduce_spans(
            lambda x: lift(*self._slice_block(x)), merge, start, self.spans
        )
        return state

    def state(self, row_facts: State, width: int = 0) -> State:
        """Return the weighting's state, for values that are all 0."""
        zeros = np.zeros((self.scores.shape[1], width), self.scores.dtype)

        def lift_span(span: Span) -> State:
            x, live, k = self._slice_block(span)
            return self.weighting.partial_state(
                x.copy(), live, k, row_facts, zeros[: span.size], None
            )

        start = self.weighting.init(self.template, width)
        state: State = self.fw.reduce_spans(lift_span, self.weighting.merge, start, self.spans)
        return state

    def replace_scores_with_weights(self, row_facts: State) -> np.ndarray:
        """Overwrite the scores with the weights; return Σ |α| and Σ |α| ln |α| per row, (2, n)."""

        def weigh_span(span: Span) -> tuple[np.ndarray, np.ndarray]:
            x, live, k = self._slice_block(span)
            x[:] = self.weighting.block_weights(x, live, k, row_facts)
            return weight_sums(x, self.weighting.is_sparse)

        start = np.zeros((2, self.scores.shape[0]))
        return np.asarray(self.fw.reduce_spans(weigh_span, np.add, start, self.spans))


def get_entropy(weighed: WeighedRows) -> np.ndarray:
    """Return the entropy (n,) of the weights, which is computed if `weighed` does not have it."""
    return compute_entropy(weighed.weights) if weighed.entropy is None else weighed.entropy


def compute_entropy(alpha: np.ndarray) -> np.ndarray:
    """Return −Σ α ln α (n,) of weights (n, m)."""
    fw, m = get_framework(alpha), alpha.shape[1]
    step = max(MAX_CACHED_SCORES // max(len(alpha), 1), 1)
    spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]

    def sum_weights_in_span(span: Span) -> np.ndarray:
        return np.asarray(weight_sums(alpha[:, span.start : span.start + span.size]))

    with fw.use_own_settings():
        return entropy_from_sums(
            *fw.reduce_spans(sum_weights_in_span, np.add, np.zeros((2, len(alpha))), spans)
        )


def weight_sums(alpha: np.ndarray, sparse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ |α| and Σ |α| ln |α| of each row, both (n,); sums of blocks can be added."""
    if sparse:
        alpha = alpha[:, alpha.any(axis=0)]
    size = np.abs(alpha)
    return np.add.reduce(size, 1), np.add.reduce(
        size * np.log(get_framework(size).safe_divisor(size)), 1
    )


def entropy_from_sums(total: np.ndarray, entropy_sum: np.ndarray) -> np.ndarray:
    """Return −Σ p ln p with p = |α| / Σ |α|; 0 for rows without weight or with NaN."""
    divisor = get_framework(total).safe_divisor(total)
    return np.asarray(np.fmax(np.log(divisor) - entropy_sum / divisor, 0))


def sums_from_entropy(total: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Return Σ |α| and Σ |α| ln |α|, (2, n), from an entropy: inverts `entropy_from_sums`."""
    return np.array([total, (np.log(get_framework(total).safe_divisor(total)) - entropy) * total])


class SparseWeights(NamedTuple):
    """Weights (n, k) of the rows at ascending positions (k,); all other rows have weight 0."""

    positions: np.ndarray
    weights: np.ndarray


def pool_values(rows: StoredRows, alpha: np.ndarray | SparseWeights, mean: bool) -> PooledSums:
    """Return the sums over all rows, in the more precise dtype of weights and values.

    Rows with weight 0 are not read. `merge_sums` merges the sums of two sets of rows.
    """
    width, sparse = rows.value_width, alpha if isinstance(alpha, SparseWeights) else None
    alpha = alpha.weights if isinstance(alpha, SparseWeights) else alpha
    start = np.zeros((len(alpha), width), alpha.dtype)
    none = (start, np.zeros(len(alpha), alpha.dtype), None)[: 3 if mean else 1]
    if not start.size:
        return none

    def pool_cut(cut: RowSpan) -> PooledSums:
        if sparse is not None:
            begin, end = np.searchsorted(sparse.positions, (cut.start, cut.start + cut.size))
            value, weights = (
                cut.read_values(sparse.positions[begin:end] - cut.start),
                alpha[:, begin:end],
            )
        else:
            weights = alpha[:, cut.start : cut.start + cut.size]
            used = None
            if np.count_nonzero(weights) * 8 < weights.size:
                used = np.flatnonzero(weights.any(axis=0))
            if used is not None and len(used) * 4 < cut.size:
                value, weights = cut.read_values(used), weights[:, used]
            else:
                value = cut.read_values()
        return pool_block(weights, value, mean)

    size = min(streaming.MAX_KEY_NUMBERS_PER_READ // width, MAX_VALUE_ROWS_PER_READ)
    size = max(min(size, MAX_WEIGHTS_PER_READ // len(alpha)), 512)
    cuts = rows.iter_spans(size, prefetch_fields=("value",) if sparse is None else ())
    sums: PooledSums = RowReader(get_framework(alpha)).reduce_spans(
        pool_cut, merge_sums, none, cuts
    )
    return sums


def pool_block(weights: np.ndarray, value: np.ndarray, mean: bool) -> PooledSums:
    """Return the sums over some rows, for their weights (n, c) and values (c, d_v)."""
    weights = weights.astype(np.result_type(weights, value), copy=False)
    total = pool_by_weights(weights, value, None, None, sparse=True)  # where 0 · ∞ is 0
    if not mean:
        return (total,)
    return total, np.add.reduce(weights, 1), _common_value(value, weights)


def merge_sums(one: PooledSums, two: PooledSums) -> PooledSums:
    """Return the sums over two sets of rows together."""
    added = [a + b for a, b in zip(one[:2], two[:2], strict=True)]
    return *added, *map(_merge_common, one[2:], two[2:])


def finish_sums(sums: PooledSums) -> np.ndarray:
    """Return the output (n, d_v) from the sums over all rows.

    Rounding moves the sum of the weights away from 1, so a mean is divided by that sum. The mean of
    equal values is exactly that value.
    """
    out, *more = sums
    if more and more[1] is not None:
        mass, common = more
        is_positive = mass > 0
        mean = out / (mass if is_positive.all() else np.where(is_positive, mass, 1))[:, None]
        if not np.isnan(common).all():
            mean = np.where(np.isnan(common) | ~is_positive[:, None], mean, common)
        return np.asarray(mean, out.dtype)
    return np.asarray(out)


def _common_value(value: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
    """Return the common value (d_v,) of all rows with nonzero weight, NaN in columns that differ.

    None if all weights are 0.
    """
    if (
        len(value)
        and weight[:, 0].any()
        and weight[:, -1].any()
        and not (value[0] == value[-1]).any()
    ):
        return np.where(False, value[0], np.nan)
    used = np.logical_or.reduce(weight != 0, 0) if len(weight) > 1 else weight[0] != 0
    begin = int(used.argmax()) if len(used) else 0
    if not len(used) or not used[begin]:
        return None
    first, last = value[begin], value[len(used) - 1 - int(used[::-1].argmax())]
    is_equal = first == last
    common = np.where(is_equal, first, np.nan)
    if is_equal.any():
        candidates = np.flatnonzero(is_equal)
        differ = ((value[:, candidates] != common[candidates]) & used[:, None]).any(axis=0)
        common[candidates[differ]] = np.nan
    return common


def _merge_common(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
    if one is None or two is None:
        return two if one is None else one
    return np.where(one == two, one, np.nan)
