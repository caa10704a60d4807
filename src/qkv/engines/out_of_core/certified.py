"""Weights that are proven to lie near the exact ones, from 8-bit codes of the keys.

The codes are read whole, a quarter of the bytes of the keys. Each score is then known to within
δ = ‖φ‖ · residual, and the weights to within Σ α (e^δ − 1). Where that is too much, the keys of the
rows that take the largest part in it are read in full, and in the end all of them. Of flat weights
no row has a large part: for those rows of one block stand together, whose residuals point
everywhere (`QuantizedKeys.spread`), so that Σ α |e| ≤ ‖α‖ · spread · ‖φ‖.
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
from qkv.frameworks.stored_rows import QuantizedKeys, StoredRows, WeighedRows
from qkv.scores import Score
from qkv.weightings import Weighting
from qkv.weightings.error_bound import ErrorBound
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized
from qkv.weightings.softmax import Softmax, TopK

FULL_READ_DIVISOR = 8
"""A share of 1/MANY of the rows is read in full before it is quicker to read all."""

INITIAL_WEIGHT_SHARE, SHARE_REFINEMENT = 1e-3, 3
"""The share of the weight from which on a row is read in full, and how much finer it gets each time
that this was not enough."""

UNREAD_TOLERANCE_FRACTION = 0.5
"""The part of the tolerance that is left for rows whose values are not read."""

SPARSE_READ_DIVISOR = 4
"""A share of 1/SPARSE of the values is read row by row before it is quicker to read all."""

MAX_TOLERANCE = 1 - 2**-20
"""The largest tolerance that asks for something: 1 bounds all weights, those that are NaN too."""

MAX_WEIGHTS_PER_BATCH = 2**26
"""Weights that are held at once."""

SAMPLED_ROWS = 4096
"""Rows that are drawn where a bound is statistical."""


def weigh_rows(
    rows: StoredRows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> WeighedRows | str:
    """The weights to within the tolerance, or why they are not certified: then they are exact."""
    refused = _refusal_reason(rows, score, weighting)
    return refused or _weigh_quantized(
        QuantizedScores(rows, query, score, weighting), tolerance, confidence
    )


def _weigh_quantized(
    asked: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows | str:
    found = _proven(asked, tolerance, confidence)
    if isinstance(found, str) or asked.keys_are_lost:
        return found
    unproven = np.asarray(found.weight_error) > tolerance
    if not unproven.any():
        return found
    found = _exact_where(asked, found, unproven)
    if not unproven.all():
        return found
    why = f"not even float64 proves that the weights are within {tolerance:g} of the exact ones"
    return found._replace(bound=None, refusal=why)


def _proven(
    asked: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows | str:
    """The weights, with the least bound that can be proven."""
    if asked.weighting.max_support is not None:
        return _weigh_top_k(asked, asked.weighting.max_support, tolerance)
    if asked.profile is not None:
        return _weigh_normalized(asked, tolerance)
    return _weigh_softmax(asked, tolerance, confidence)


def _exact_where(asked: QuantizedScores, found: WeighedRows, some: np.ndarray) -> WeighedRows:
    """The same, with the answers of some queries (n,) as they are without a tolerance: a row lies
    so near to the edge of a window, or two scores so near to each other, that rounding decides."""
    exact = forward.weigh_rows(asked.rows, asked.query[some], asked.score, asked.weighting)
    error, entropy = np.array(found.weight_error), np.array(forward.get_entropy(found))
    weights = np.array(found.weights, np.result_type(found.weights, exact.weights))
    error[some], entropy[some], weights[some] = 0, forward.get_entropy(exact), exact.weights
    best, lse = np.array(found.best_score), None if found.lse is None else np.array(found.lse)
    best[some] = exact.best_score
    if lse is not None:
        lse[some] = exact.lse
    bound = found.bound
    if bound is not None:
        gain, loss = (np.where(some, 0.0, x) for x in (bound.gain, bound.loss))
        bound = bound._replace(gain=gain, loss=loss)
    sums = forward.pool_values(asked.rows, weights, mean=True)
    return found._replace(
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
    """The output alone. Flat queries are answered by sums over blocks of rows; of the others the
    weights are held, of some at a time."""
    refused = _refusal_reason(rows, score, weighting)
    if refused is not None:
        return refused
    known = (
        block_sums.attend_by_blocks(rows, query, score, weighting, tolerance)
        if len(query)
        else None
    )
    rest = query if known is None else query[~known[1]]
    step, outs = max(MAX_WEIGHTS_PER_BATCH // max(rows.shape[0], 1), 1), []
    for at in range(0, max(len(rest), known is None), step):
        asked = QuantizedScores(rows, rest[at : at + step], score, weighting)
        found = _weigh_quantized(asked, tolerance, confidence)
        if isinstance(found, str):
            return found
        outs.append(found.output)
    if known is None:
        return np.concatenate(outs)
    out, proven = known
    if outs:
        out[~proven] = np.concatenate(outs)
    return out


def _refusal_reason(rows: StoredRows, score: Score, weighting: Weighting) -> str | None:
    first = rows.first_chunk()
    if first is None or first.quantized is None or not rows.shape[0]:
        return "the rows have no codes beside their vectors"
    why = _unbounded_reason(first.quantized, rows.shape[1], score, weighting)
    if why and first.is_lossy:
        raise CombinationError(
            f"tolerance: it cannot be proven, since {why} and the vectors are kept in 8 bits. Ask "
            "without one, or keep them as float32"
        )
    return why


def _unbounded_reason(
    near: QuantizedKeys, width: int, score: Score, weighting: Weighting
) -> str | None:
    how = type(weighting)
    if how not in (Softmax, TopK, Hard, Normalized) or getattr(
        weighting, "straight_through", False
    ):
        return f"{how.__name__} has no bound"
    if how is Softmax and is_array(weighting.temperature):  # type: ignore[attr-defined]
        return "a temperature that is an array has no bound"
    form = score.affine_form(np.zeros((1, width)), np.ones(1))
    if form is None:
        return f"{type(score).__name__} is no product with a key, so codes do not bound it"
    if (how is Normalized) != hasattr(score, "profile"):
        return f"{type(score).__name__} under {how.__name__} has no bound"
    if near.norm is None and not form.key_factor is form.bias is None:
        return "the lengths of the keys are not known"
    return None


def _weigh_softmax(
    asked: QuantizedScores, tolerance: float, confidence: float | None
) -> WeighedRows:
    rows, scan = asked.rows, asked.scan_codes()
    m, pools = rows.shape[0], rows.value_width > 0
    given, tolerance = tolerance, min(tolerance, MAX_TOLERANCE)
    keep, share = tolerance * (1 - UNREAD_TOLERANCE_FRACTION * pools), INITIAL_WEIGHT_SHARE
    bound = scan.error_bound()
    while (bound.max_error > keep).any() and not asked.keys_are_lost:
        at = scan.unread_heavy_rows(share, keep)
        wanted = asked.rows_read + len(at)
        if confidence is not None and wanted > min(SAMPLED_ROWS, m // FULL_READ_DIVISOR):
            # It may be tried again, and all tries together must keep what was promised.
            confidence = (1 + confidence) / 2
            statistical = _sample_error(asked, scan, bound, tolerance, confidence)
            if (statistical <= tolerance).all():
                return _answer_from_all_rows(asked, scan, bound, statistical)._replace(
                    bound_is_probabilistic=True
                )
        # Within the tolerance, more are read only if few: then fewer values may be.
        within = (bound.max_error <= tolerance).all()
        most = (
            max(2 * asked.rows_read, m // (32 * FULL_READ_DIVISOR))
            if within
            else m // FULL_READ_DIVISOR
        )
        if wanted > min(most, m // FULL_READ_DIVISOR) or share * m * FULL_READ_DIVISOR < 1:
            break
        if len(at):
            scan.set_exact_scores(at, *asked.exact_scores(at)[:2])
            bound = scan.error_bound()
        share /= SHARE_REFINEMENT
    error = bound.max_error
    if (error > tolerance).any() and not asked.keys_are_lost:
        scan = asked.scan_keys()
        bound = scan.error_bound()
        error = bound.max_error
    if (error > tolerance).any():
        doubt = asked.code_intervals() if asked.keys_are_lost else asked.exact_intervals()
        doubt.set_weight_unit()
        bound = doubt.error_bound()
        error = np.minimum(bound.max_error, doubt.error_from_largest())
        _check_tolerance(error, given, asked.keys_are_lost)
        if asked.keys_are_lost and (error > tolerance).any():
            return _weigh_exactly(asked, error)
        return _answer_from_intervals(asked, doubt, bound, error)
    kept = scan.prune_rows(tolerance, m // SPARSE_READ_DIVISOR) if pools else None
    return (
        _answer_from_all_rows(asked, scan, bound, error)
        if kept is None
        else _answer_from_few_rows(asked, scan, kept)
    )


def _weigh_normalized(asked: QuantizedScores, tolerance: float) -> WeighedRows:
    """Scores that are weights, under `Normalized`."""
    doubt = asked.code_intervals()
    asked.largest_scores = doubt.set_weight_unit(asked.profile, asked.offset)
    bound = doubt.error_bound()
    for _ in range(3):
        at = doubt.rows_to_read(tolerance * 0.8, asked.rows.shape[0] // FULL_READ_DIVISOR)
        if (bound.max_error <= tolerance).all() or asked.keys_are_lost or not len(at):
            break
        doubt.set_exact_scores(at, asked.exact_scores(at)[0])
        bound = doubt.error_bound()
    if (bound.max_error > tolerance).any() and not asked.keys_are_lost:
        doubt = asked.exact_intervals()
        doubt.set_weight_unit(asked.profile, asked.offset)
        bound = doubt.error_bound()
    _check_tolerance(bound.max_error, tolerance, asked.keys_are_lost)
    return _answer_from_intervals(asked, doubt, bound, bound.max_error)


def _sample_error(
    asked: QuantizedScores, scan: WeightScan, bound: ErrorBound, tolerance: float, confidence: float
) -> np.ndarray:
    """The error (n,) that is not exceeded with this confidence, for each query by itself.

    Rows are drawn by their largest part in the bound and read in full: |e^error − 1| / (e^δ − 1)
    lies between 0 and 1, and its mean, times the sum of the parts, is what the bound is the largest
    of.
    """
    out = bound.max_error.copy()
    rng = np.random.default_rng(0)
    for i in np.flatnonzero(out > tolerance):
        places, most, total = scan.sample_rows(int(i), SAMPLED_ROWS, rng)
        if not len(places):
            continue
        at, back = np.unique(places, return_inverse=True)
        w = scan.weights_at(at)
        true = asked.exact_scores(at)[0][i] - scan.peak[i]
        with np.errstate(divide="ignore"):
            found = np.abs(np.expm1(true - np.log(w[i])))[back] / most
        found = np.minimum(found, 1.0)
        level, size = np.log(2 / (1 - confidence)), len(found)
        # Empirical Bernstein (Maurer and Pontil 2009).
        above = found.mean() + np.sqrt(2 * found.var(ddof=1) * level / size)
        above += 7 * level / (3 * (size - 1))
        out[i] = min(out[i], total * above / bound.total[i])
    return out


def _weigh_top_k(asked: QuantizedScores, k: int, tolerance: float) -> WeighedRows | str:
    """Softmax over the k rows that are proven to have the largest scores; for one row, 1."""
    rows, doubt = asked.rows, asked.code_intervals()
    (n, m), fixed = doubt.scores.shape, asked.keys_are_lost
    k = min(k, m if rows.allowed is None else int(np.count_nonzero(rows.allowed)))
    if not k:
        return _weigh_exactly(asked, np.zeros(n))
    at = doubt.top_k_candidates(k)
    if fixed:
        s, slack = doubt.scores[:, at].astype(float), doubt.score_errors(at)
    else:
        s, _, slack = asked.exact_scores(at, steady=True)
    if not (np.isfinite(s).all() and np.isfinite(slack).all()):
        _check_tolerance(np.ones(n), tolerance, fixed)
        return "a score is beyond what float64 holds"
    alpha = np.zeros((n, m), asked.query.dtype)
    error, tops, sums = np.zeros(n), np.full(n, -np.inf), np.zeros(n)
    for i in range(n):
        order = np.argsort(-s[i], kind="stable")
        chosen, others = order[:k], order[k:]
        if not len(chosen):
            continue
        w = np.exp(s[i, chosen] - s[i, chosen[0]])
        tops[i], sums[i] = s[i, chosen[0]], w.sum()
        alpha[i, at[chosen]] = w / w.sum()
        if k > 1:
            error[i] = (
                softmax_error_from_largest(s[i, chosen], slack[i, chosen])
                + 4 * np.finfo(alpha.dtype).eps
            )
        high, low = s[i] + slack[i], s[i] - slack[i]
        near = others[high[others] >= low[chosen].min()]
        if len(near):
            edge = chosen[low[chosen] <= high[near].max()]
            both = np.append(edge, near)  # a tie is one where neither was rounded, or keys repeat
            if slack[i, both].any() and (fixed or not _have_equal_keys(asked, at[both])):
                error[i] += alpha[i, at[edge]].sum()
    error = np.minimum(error, 1.0)
    _check_tolerance(error, tolerance, fixed)
    bound = ErrorBound(tops, sums, sums * error, sums * error)
    lse = tops + np.log(np.where(sums > 0, sums, 1.0)) if asked.weighting.has_lse else None
    return _build_answer(asked, alpha, forward.compute_entropy(alpha), lse, error, bound)


def _have_equal_keys(asked: QuantizedScores, at: np.ndarray) -> bool:
    """Whether these rows have the same key, so that the lowest of them come first."""
    key = np.concatenate([key for _, key, _ in asked.read_keys(np.sort(at))])
    return bool((key == key[0]).all())


def _check_tolerance(error: np.ndarray, tolerance: float, lost: bool) -> None:
    """Refuse what a store that keeps nothing but codes cannot prove."""
    most = float(error.max(initial=0.0))
    if lost and most > tolerance:
        raise CombinationError(
            f"tolerance: {tolerance:g} cannot be proven, but {most:.3g} can: the vectors are kept "
            "in 8 bits, and what they have lost is not there to be read. Allow more, or keep them "
            "as float32"
        )


def _answer_from_all_rows(
    asked: QuantizedScores, scan: WeightScan, bound: ErrorBound, error: np.ndarray
) -> WeighedRows:
    """The answer of all rows."""
    if not (bound.total > 0).all():
        return _weigh_exactly(asked, error)
    entropy = scan.normalize_weights(bound.total)
    alpha = scan.weights.astype(np.result_type(asked.query, np.float32), copy=False)
    return _build_answer(asked, alpha, entropy, bound.top + np.log(bound.total), error, bound)


def _answer_from_few_rows(
    asked: QuantizedScores, scan: WeightScan, kept: PrunedWeights
) -> WeighedRows:
    """The answer of few rows, with the others at 0."""
    at, w, bound = kept
    w = (w / bound.total[:, None]).astype(np.result_type(asked.query, np.float32))
    alpha = scan.keep_only(at, w)
    lse = bound.top + np.log(bound.total)
    return _build_answer(
        asked, alpha, forward.compute_entropy(w), lse, bound.max_error, bound, SparseWeights(at, w)
    )


def _answer_from_intervals(
    asked: QuantizedScores, doubt: ScoreIntervals, bound: ErrorBound, error: np.ndarray
) -> WeighedRows:
    empty = ~(bound.total > 0)
    if empty.any() and (asked.profile is None or empty.all()):
        return _weigh_exactly(asked, error)
    # Scores in float64 were needed for digits that float32 would lose again.
    alpha = np.empty(doubt.scores.shape, np.result_type(asked.query, doubt.scores))
    entropy = doubt.fill_weights(alpha)
    lse = bound.top + np.log(bound.total) if asked.weighting.has_lse else None
    if not empty.any():
        return _build_answer(asked, alpha, entropy, lse, error, bound)
    found = _weigh_exactly(asked, error, empty)
    alpha[empty], entropy[empty] = found.weights, forward.get_entropy(found)
    error = error.copy()
    error[empty] = found.weight_error
    return _build_answer(asked, alpha, entropy, lse, error, bound)


def _weigh_exactly(
    asked: QuantizedScores, error: np.ndarray, some: np.ndarray | slice = slice(None)
) -> WeighedRows:
    """Nothing lies within the window of some queries, no row is allowed, or nothing is known: the
    weighting says what then, of keys that are exact or, where these are lost, of their codes."""
    rows = asked.rows
    found = forward.weigh_rows(rows, asked.query[some], asked.score, asked.weighting)
    known = not asked.keys_are_lost or (rows.allowed is not None and not rows.allowed.any())
    return found._replace(weight_error=np.zeros_like(error[some]) if known else error[some])


def _build_answer(
    asked: QuantizedScores,
    alpha: np.ndarray,
    entropy: np.ndarray,
    lse: np.ndarray | None,
    error: np.ndarray,
    bound: ErrorBound,
    few: SparseWeights | None = None,
) -> WeighedRows:
    best = (bound.top + asked.shift) * asked.temperature
    if asked.profile is not None:
        best = asked.profile(np.maximum(-asked.largest_scores, 0))
    lse = None if lse is None else lse + asked.shift
    sums = forward.pool_values(asked.rows, alpha if few is None else few, mean=True)
    read, out = min(asked.rows_read, alpha.shape[1]), forward.finish_sums(sums)
    return WeighedRows(out, alpha, entropy, lse, best, error, read, bound, partial_sums=sums)
