"""Weights with a guaranteed error bound, from 8-bit codes of the keys.

The scan reads all codes, a quarter of the bytes of the keys. Each score then has an error of at
most δ = ‖φ‖ · residual, and the weights have an error of at most Σ α (e^δ − 1). If this bound
exceeds the tolerance, the engine reads the keys of the rows with the largest terms of the sum. If
that is not enough, it reads all keys. Nearly uniform weights have no such rows. For them the
residuals of a block are bounded together: residuals point in many directions
(`QuantizedKeys.block_spread`), so Σ α |e| ≤ ‖α‖ · spread · ‖φ‖ for the score errors e.
"""

from __future__ import annotations

import numpy as np

from qkv.engines.out_of_core import block_sums, forward
from qkv.engines.out_of_core.forward import SparseWeights
from qkv.engines.out_of_core.quantized import QuantizedScores
from qkv.engines.out_of_core.scan import PrunedWeights, WeightScan
from qkv.engines.out_of_core.score_intervals import ScoreIntervals, softmax_error_from_largest
from qkv.errors import CombinationError
from qkv.frameworks import is_array
from qkv.frameworks.stored_rows import QuantizedKeys, SelectedRows, StoredRows, WeighedRows
from qkv.scores import Score
from qkv.weightings import Weighting
from qkv.weightings.error_bound import ErrorBound
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized
from qkv.weightings.softmax import Softmax, TopK

FULL_READ_DIVISOR = 8
"""At most 1/FULL_READ_DIVISOR of the keys are read one by one. For more, reading all is faster."""

INITIAL_WEIGHT_SHARE, SHARE_REFINEMENT = 1e-3, 3
"""In the first round, keys of rows with at least this share of the weight are read. Each further
round divides the share by SHARE_REFINEMENT."""

UNREAD_TOLERANCE_FRACTION = 0.5
"""The part of the tolerance that is reserved for rows whose values are not read."""

SPARSE_READ_DIVISOR = 4
"""At most 1/SPARSE_READ_DIVISOR of the values are read one by one. For more, all are read."""

MAX_TOLERANCE = 1 - 2**-20
"""Larger tolerances are reduced to this one. Every error is at most 1, so they would accept any
weights, even NaN."""

MAX_WEIGHTS_PER_BATCH = 2**26
"""The most weights in memory at once."""

SAMPLED_ROWS = 4096
"""Rows that are drawn for a probabilistic error bound."""


def weigh_rows(
    rows: StoredRows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> WeighedRows | str:
    """Return weights within the tolerance, or the reason why no bound exists for this call."""
    refusal = _refusal_reason(rows, score, weighting)
    return refusal or _weigh_quantized(
        QuantizedScores(rows, query, score, weighting), tolerance, confidence
    )


def _weigh_quantized(
    scores: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows | str:
    weighed = _weigh_with_bound(scores, tolerance, confidence)
    if isinstance(weighed, str) or scores.keys_are_lost:
        return weighed
    unproven = np.asarray(weighed.weight_error) > tolerance
    if not unproven.any():
        return weighed
    weighed = _exact_where(scores, weighed, unproven)
    if not unproven.all():
        return weighed
    refusal = f"float64 is not precise enough to prove an error of at most {tolerance:g}"
    return weighed._replace(bound=None, refusal=refusal)


def _weigh_with_bound(
    scores: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows | str:
    """Return weights and a proven error bound, or the reason why nothing can be proven."""
    if scores.weighting.max_support is not None:
        return _weigh_top_k(scores, scores.weighting.max_support, tolerance)
    if scores.profile is not None:
        return _weigh_normalized(scores, tolerance)
    return _weigh_softmax(scores, tolerance, confidence)


def _exact_where(
    scores: QuantizedScores, weighed: WeighedRows, selected: np.ndarray
) -> WeighedRows:
    """Return the result with exact answers for the selected queries (n,).

    For these, rounding decides: a row is too close to the edge of a window, or two scores are too
    close to each other.
    """
    exact = forward.weigh_rows(scores.rows, scores.query[selected], scores.score, scores.weighting)
    error, entropy = np.array(weighed.weight_error), np.array(forward.get_entropy(weighed))
    weights = np.array(weighed.weights, np.result_type(weighed.weights, exact.weights))
    error[selected], entropy[selected], weights[selected] = (
        0,
        forward.get_entropy(exact),
        exact.weights,
    )
    best, lse = np.array(weighed.best_score), None if weighed.lse is None else np.array(weighed.lse)
    best[selected] = exact.best_score
    if lse is not None:
        lse[selected] = exact.lse
    bound = weighed.bound
    if bound is not None:
        gain, loss = (np.where(selected, 0.0, x) for x in (bound.gain, bound.loss))
        bound = bound._replace(gain=gain, loss=loss)
    sums = forward.pool_values(scores.rows, weights, mean=True)
    return weighed._replace(
        output=forward.finish_sums(sums),
        weights=weights,
        entropy=entropy,
        lse=lse,
        best_score=best,
        weight_error=error,
        rows_read=len(weights[0]),
        bound=bound,
        partial_sums=sums,
    )


def attend_rows(
    rows: StoredRows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> np.ndarray | str:
    """Return the output within the tolerance, or the reason why no bound exists for this call.

    Sums over blocks of rows answer queries with nearly uniform weights. The other queries are
    answered in batches, with their weights in memory.
    """
    refusal = _refusal_reason(rows, score, weighting)
    if refusal is not None:
        return refusal
    by_blocks = (
        block_sums.attend_by_blocks(rows, query, score, weighting, tolerance)
        if len(query)
        else None
    )
    remaining = query if by_blocks is None else query[~by_blocks[1]]
    step, outs = max(MAX_WEIGHTS_PER_BATCH // max(rows.shape[0], 1), 1), []
    for at in range(0, max(len(remaining), by_blocks is None), step):
        scores = QuantizedScores(rows, remaining[at : at + step], score, weighting)
        weighed = _weigh_quantized(scores, tolerance, confidence)
        if isinstance(weighed, str):
            return weighed
        outs.append(weighed.output)
    if by_blocks is None:
        return np.concatenate(outs)
    out, proven = by_blocks
    if outs:
        out[~proven] = np.concatenate(outs)
    return out


def _refusal_reason(rows: StoredRows, score: Score, weighting: Weighting) -> str | None:
    """Return why codes give no error bound, or None.

    Raise CombinationError if there is no bound and the exact keys are not stored either.
    """
    first = rows.first_chunk()
    if first is not None and isinstance(first.key, SelectedRows) and not first.is_lossy:
        return "so few rows pass the condition that their keys are faster to read than codes"
    if first is None or first.quantized is None or not rows.shape[0]:
        return "the rows have no 8-bit codes"
    reason = _unbounded_reason(first.quantized, rows.shape[1], score, weighting)
    if reason and first.is_lossy:
        raise CombinationError(
            f"tolerance: an error bound cannot be proven: {reason}, and the vectors are stored in "
            "8 bits only. Ask without a tolerance, or store the vectors as float32"
        )
    return reason


def _unbounded_reason(
    codes: QuantizedKeys, width: int, score: Score, weighting: Weighting
) -> str | None:
    kind = type(weighting)
    if kind not in (Softmax, TopK, Hard, Normalized) or getattr(
        weighting, "straight_through", False
    ):
        return f"the weighting {kind.__name__} has no error bound"
    if kind is Softmax and is_array(weighting.temperature):  # type: ignore[attr-defined]
        return "a temperature that is an array has no error bound"
    form = score.affine_form(np.zeros((1, width)), np.ones(1))
    if form is None:
        return f"{type(score).__name__} is not linear in the key, so 8-bit codes give no bound"
    if (kind is Normalized) != hasattr(score, "profile"):
        return f"{type(score).__name__} with {kind.__name__} has no error bound"
    if codes.norm is None and not form.key_factor is form.bias is None:
        return "the norms of the keys are not stored"
    return None


def _weigh_softmax(
    scores: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows:
    rows, scan = scores.rows, scores.scan_codes()
    m, pools = rows.shape[0], rows.value_width > 0
    requested_tolerance, tolerance = tolerance, min(tolerance, MAX_TOLERANCE)
    weight_tolerance, share = (
        tolerance * (1 - UNREAD_TOLERANCE_FRACTION * pools),
        INITIAL_WEIGHT_SHARE,
    )
    bound = scan.error_bound()
    while (bound.max_error > weight_tolerance).any() and not scores.keys_are_lost:
        at = scan.unread_heavy_rows(share, weight_tolerance)
        read_count = scores.rows_read + len(at)
        if confidence is not None and read_count > min(SAMPLED_ROWS, m // FULL_READ_DIVISOR):
            # Sampling may be repeated. The failure probabilities of all rounds must add up to less
            # than 1 − confidence.
            confidence = (1 + confidence) / 2
            statistical = _sample_error(scores, scan, bound, tolerance, confidence)
            if (statistical <= tolerance).all():
                return _answer_from_all_rows(scores, scan, bound, statistical)._replace(
                    bound_is_probabilistic=True
                )
        # Even if the bound meets the tolerance, reading a few more keys may save reading values.
        is_within = (bound.max_error <= tolerance).all()
        max_read = (
            max(2 * scores.rows_read, m // (32 * FULL_READ_DIVISOR))
            if is_within
            else m // FULL_READ_DIVISOR
        )
        if read_count > min(max_read, m // FULL_READ_DIVISOR) or share * m * FULL_READ_DIVISOR < 1:
            break
        if len(at):
            scan.set_exact_scores(at, *scores.exact_scores(at)[:2])
            bound = scan.error_bound()
        share /= SHARE_REFINEMENT
    error = bound.max_error
    if (error > tolerance).any() and not scores.keys_are_lost:
        scan = scores.scan_keys()
        bound = scan.error_bound()
        error = bound.max_error
    if (error > tolerance).any():
        intervals = scores.code_intervals() if scores.keys_are_lost else scores.exact_intervals()
        intervals.set_weight_unit()
        bound = intervals.error_bound()
        error = np.minimum(bound.max_error, intervals.error_from_largest())
        _check_tolerance(error, requested_tolerance, scores.keys_are_lost)
        if scores.keys_are_lost and (error > tolerance).any():
            return _weigh_exactly(scores, error)
        return _answer_from_intervals(scores, intervals, bound, error)
    pruned = scan.prune_rows(tolerance, m // SPARSE_READ_DIVISOR) if pools else None
    return (
        _answer_from_all_rows(scores, scan, bound, error)
        if pruned is None
        else _answer_from_few_rows(scores, scan, pruned)
    )


def _weigh_normalized(scores: QuantizedScores, tolerance: float) -> WeighedRows:
    """Weigh rows by scores that are weights themselves, under `Normalized`."""
    intervals = scores.code_intervals()
    scores.largest_scores = intervals.set_weight_unit(scores.profile, scores.offset)
    bound = intervals.error_bound()
    for _ in range(3):
        at = intervals.rows_to_read(tolerance * 0.8, scores.rows.shape[0] // FULL_READ_DIVISOR)
        if (bound.max_error <= tolerance).all() or scores.keys_are_lost or not len(at):
            break
        intervals.set_exact_scores(at, scores.exact_scores(at)[0])
        bound = intervals.error_bound()
    if (bound.max_error > tolerance).any() and not scores.keys_are_lost:
        intervals = scores.exact_intervals()
        intervals.set_weight_unit(scores.profile, scores.offset)
        bound = intervals.error_bound()
    _check_tolerance(bound.max_error, tolerance, scores.keys_are_lost)
    return _answer_from_intervals(scores, intervals, bound, bound.max_error)


def _sample_error(
    scores: QuantizedScores,
    scan: WeightScan,
    bound: ErrorBound,
    tolerance: float,
    confidence: float,
) -> np.ndarray:
    """Return an error bound (n,) that each query exceeds with probability 1 − confidence at most.

    Rows are drawn with probabilities proportional to their share of the error bound, and their keys
    are read. For each, |e^error − 1| / (e^δ − 1) is in [0, 1]. The mean of this ratio times the sum
    of all shares bounds the error.
    """
    out = bound.max_error.copy()
    rng = np.random.default_rng(0)
    for i in np.flatnonzero(out > tolerance):
        drawn, max_changes, total = scan.sample_rows(int(i), SAMPLED_ROWS, rng)
        if not len(drawn):
            continue
        at, inverse = np.unique(drawn, return_inverse=True)
        w = scan.weights_at(at)
        true = scores.exact_scores(at)[0][i] - scan.peak[i]
        with np.errstate(divide="ignore"):
            ratios = np.abs(np.expm1(true - np.log(w[i])))[inverse] / max_changes
        ratios = np.minimum(ratios, 1.0)
        level, size = np.log(2 / (1 - confidence)), len(ratios)
        # Empirical Bernstein (Maurer and Pontil 2009).
        upper_mean = ratios.mean() + np.sqrt(2 * ratios.var(ddof=1) * level / size)
        upper_mean += 7 * level / (3 * (size - 1))
        out[i] = min(out[i], total * upper_mean / bound.total[i])
    return out


def _weigh_top_k(scores: QuantizedScores, k: int, tolerance: float) -> WeighedRows | str:
    """Weigh by softmax the k rows that are proven to have the largest scores."""
    rows, intervals = scores.rows, scores.code_intervals()
    (n, m), keys_are_lost = intervals.scores.shape, scores.keys_are_lost
    k = min(k, m if rows.allowed is None else int(np.count_nonzero(rows.allowed)))
    if not k:
        return _weigh_exactly(scores, np.zeros(n))
    at = intervals.top_k_candidates(k)
    if keys_are_lost:
        s, errors = intervals.scores[:, at].astype(float), intervals.score_errors(at)
    else:
        s, _, errors = scores.exact_scores(at, is_reproducible=True)
    if not (np.isfinite(s).all() and np.isfinite(errors).all()):
        _check_tolerance(np.ones(n), tolerance, keys_are_lost)
        return "a score overflows float64"
    alpha = np.zeros((n, m), scores.query.dtype)
    error, largest, sums = np.zeros(n), np.full(n, -np.inf), np.zeros(n)
    for i in range(n):
        order = np.argsort(-s[i], kind="stable")
        chosen, others = order[:k], order[k:]
        if not len(chosen):
            continue
        w = np.exp(s[i, chosen] - s[i, chosen[0]])
        largest[i], sums[i] = s[i, chosen[0]], w.sum()
        alpha[i, at[chosen]] = w / w.sum()
        if k > 1:
            error[i] = (
                softmax_error_from_largest(s[i, chosen], errors[i, chosen])
                + 4 * np.finfo(alpha.dtype).eps
            )
        high, low = s[i] + errors[i], s[i] - errors[i]
        rivals = others[high[others] >= low[chosen].min()]
        if len(rivals):
            edge = chosen[low[chosen] <= high[rivals].max()]
            both = np.append(edge, rivals)  # an exact tie needs scores without error, or equal keys
            if errors[i, both].any() and (keys_are_lost or not _have_equal_keys(scores, at[both])):
                error[i] += alpha[i, at[edge]].sum()
    error = np.minimum(error, 1.0)
    _check_tolerance(error, tolerance, keys_are_lost)
    bound = ErrorBound(largest, sums, sums * error, sums * error)
    lse = largest + np.log(np.where(sums > 0, sums, 1.0)) if scores.weighting.has_lse else None
    return _build_answer(scores, alpha, forward.compute_entropy(alpha), lse, error, bound)


def _have_equal_keys(scores: QuantizedScores, at: np.ndarray) -> bool:
    """Return whether these rows have the same key; the order of rows then breaks the tie."""
    key = np.concatenate([key for _, key, _ in scores.read_keys(np.sort(at))])
    return bool((key == key[0]).all())


def _check_tolerance(error: np.ndarray, tolerance: float, keys_are_lost: bool) -> None:
    """Raise if the keys are stored as codes only and these cannot prove the tolerance."""
    provable = float(error.max(initial=0.0))
    if keys_are_lost and provable > tolerance:
        raise CombinationError(
            f"tolerance: {tolerance:g} cannot be proven: the vectors are stored in 8 bits only, "
            f"which proves {provable:.3g}. Use a larger tolerance, or store the vectors as float32"
        )


def _answer_from_all_rows(
    scores: QuantizedScores, scan: WeightScan, bound: ErrorBound, error: np.ndarray
) -> WeighedRows:
    """Build the answer from the weights of all rows."""
    if not (bound.total > 0).all():
        return _weigh_exactly(scores, error)
    entropy = scan.normalize_weights(bound.total)
    alpha = scan.weights.astype(np.result_type(scores.query, np.float32), copy=False)
    return _build_answer(scores, alpha, entropy, bound.top + np.log(bound.total), error, bound)


def _answer_from_few_rows(
    scores: QuantizedScores, scan: WeightScan, pruned: PrunedWeights
) -> WeighedRows:
    """Build the answer from the rows with the largest weights; all others get weight 0."""
    at, w, bound = pruned
    w = (w / bound.total[:, None]).astype(np.result_type(scores.query, np.float32))
    alpha = scan.keep_only(at, w)
    lse = bound.top + np.log(bound.total)
    return _build_answer(
        scores, alpha, forward.compute_entropy(w), lse, bound.max_error, bound, SparseWeights(at, w)
    )


def _answer_from_intervals(
    scores: QuantizedScores, intervals: ScoreIntervals, bound: ErrorBound, error: np.ndarray
) -> WeighedRows:
    empty = ~(bound.total > 0)
    if empty.any() and (scores.profile is None or empty.all()):
        return _weigh_exactly(scores, error)
    # Float64 scores were computed for their precision, so the weights keep their dtype.
    alpha = np.empty(intervals.scores.shape, np.result_type(scores.query, intervals.scores))
    entropy = intervals.fill_weights(alpha)
    lse = bound.top + np.log(bound.total) if scores.weighting.has_lse else None
    if not empty.any():
        return _build_answer(scores, alpha, entropy, lse, error, bound)
    exact = _weigh_exactly(scores, error, empty)
    alpha[empty], entropy[empty] = exact.weights, forward.get_entropy(exact)
    error = error.copy()
    error[empty] = exact.weight_error
    return _build_answer(scores, alpha, entropy, lse, error, bound)


def _weigh_exactly(
    scores: QuantizedScores, error: np.ndarray, selected: np.ndarray | slice = slice(None)
) -> WeighedRows:
    """Return the answer of the exact scan for the selected queries.

    Used if no row is inside a query's window, if no row is allowed, or if nothing can be proven. If
    only codes are stored, the scan computes with their vectors.
    """
    rows = scores.rows
    weighed = forward.weigh_rows(rows, scores.query[selected], scores.score, scores.weighting)
    is_exact = not scores.keys_are_lost or (rows.allowed is not None and not rows.allowed.any())
    return weighed._replace(
        weight_error=np.zeros_like(error[selected]) if is_exact else error[selected]
    )


def _build_answer(
    scores: QuantizedScores,
    alpha: np.ndarray,
    entropy: np.ndarray,
    lse: np.ndarray | None,
    error: np.ndarray,
    bound: ErrorBound,
    sparse: SparseWeights | None = None,
) -> WeighedRows:
    best = (bound.top + scores.shift) * scores.temperature
    if scores.profile is not None:
        best = scores.profile(np.maximum(-scores.largest_scores, 0))
    lse = None if lse is None else lse + scores.shift
    sums = forward.pool_values(scores.rows, alpha if sparse is None else sparse, mean=True)
    read, out = min(scores.rows_read, alpha.shape[1]), forward.finish_sums(sums)
    return WeighedRows(out, alpha, entropy, lse, best, error, read, bound, partial_sums=sums)
