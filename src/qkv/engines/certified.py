"""Weights that are proven to lie near the exact ones, from 8-bit codes of the keys.

The codes are read whole, a quarter of the bytes of the keys. Each score is then known to within
δ = ‖φ‖ · residual, and the weights to within Σ α (e^δ − 1). Where that is too much, the keys of the
rows that take the largest part in it are read in full, and in the end all of them. Of flat weights
no row has a large part: for those rows of one block stand together, whose residuals point
everywhere (`Near.spread`), so that Σ α |e| ≤ ‖α‖ · spread · ‖φ‖.
"""

from __future__ import annotations

import numpy as np

from qkv.arrays import is_array
from qkv.arrays.rows import Near, Rows, Weighed
from qkv.engines import flat, stored
from qkv.engines.coded import Coded
from qkv.engines.doubt import Doubt, from_largest
from qkv.engines.scan import Pruned, Scan
from qkv.engines.stored import Few
from qkv.errors import CombinationError
from qkv.scores import Score
from qkv.weightings import Weighting
from qkv.weightings.bound import Bound
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized
from qkv.weightings.softmax import Softmax, TopK

MANY = 8
"""A share of 1/MANY of the rows is read in full before it is quicker to read all."""

SHARE, FINER = 1e-3, 3
"""The share of the weight from which on a row is read in full, and how much finer it gets each time
that this was not enough."""

POOLED = 0.5
"""The part of the tolerance that is left for rows whose values are not read."""

SPARSE = 4
"""A share of 1/SPARSE of the values is read row by row before it is quicker to read all."""

ANY = 1 - 2**-20
"""The largest tolerance that asks for something: 1 bounds all weights, those that are NaN too."""

AT_ONCE = 2**26
"""Weights that are held at once."""

DRAWN = 4096
"""Rows that are drawn where a bound is statistical."""


def run(
    rows: Rows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> Weighed | str:
    """The weights to within the tolerance, or why they are not certified: then they are exact."""
    refused = _refusal(rows, score, weighting)
    return refused or _coded(Coded(rows, query, score, weighting), tolerance, confidence)


def _coded(asked: Coded, tolerance: float, confidence: float | None) -> Weighed | str:
    found = _proven(asked, tolerance, confidence)
    if isinstance(found, str) or asked.lost:
        return found
    unproven = np.asarray(found.error) > tolerance
    if not unproven.any():
        return found
    found = _exact_where(asked, found, unproven)
    if not unproven.all():
        return found
    why = f"not even float64 proves that the weights are within {tolerance:g} of the exact ones"
    return found._replace(bound=None, refused=why)


def _proven(asked: Coded, tolerance: float, confidence: float | None) -> Weighed | str:
    """The weights, with the least bound that can be proven."""
    if asked.weighting.few is not None:
        return _best(asked, asked.weighting.few, tolerance)
    if asked.profile is not None:
        return _windowed(asked, tolerance)
    return _soft(asked, tolerance, confidence)


def _exact_where(asked: Coded, found: Weighed, some: np.ndarray) -> Weighed:
    """The same, with the answers of some queries (n,) as they are without a tolerance: a row lies
    so near to the edge of a window, or two scores so near to each other, that rounding decides."""
    exact = stored.weighed(asked.rows, asked.query[some], asked.score, asked.weighting)
    error, entropy = np.array(found.error), np.array(stored.entropy_in(found))
    weights = np.array(found.weights, np.result_type(found.weights, exact.weights))
    error[some], entropy[some], weights[some] = 0, stored.entropy_in(exact), exact.weights
    best, lse = np.array(found.best), None if found.lse is None else np.array(found.lse)
    best[some] = exact.best
    if lse is not None:
        lse[some] = exact.lse
    bound = found.bound
    if bound is not None:
        gain, loss = (np.where(some, 0.0, x) for x in (bound.gain, bound.loss))
        bound = bound._replace(gain=gain, loss=loss)
    sums = stored.sums(asked.rows, weights, mean=True)
    return found._replace(
        out=stored.averaged(sums),
        weights=weights,
        entropy=entropy,
        lse=lse,
        best=best,
        error=error,
        read=len(weights[0]),
        bound=bound,
        sums=sums,
    )


def pooled(
    rows: Rows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> np.ndarray | str:
    """The output alone. Flat queries are answered by sums over blocks of rows; of the others the
    weights are held, of some at a time."""
    refused = _refusal(rows, score, weighting)
    if refused is not None:
        return refused
    known = flat.run(rows, query, score, weighting, tolerance) if len(query) else None
    rest = query if known is None else query[~known[1]]
    step, outs = max(AT_ONCE // max(rows.shape[0], 1), 1), []
    for at in range(0, max(len(rest), known is None), step):
        asked = Coded(rows, rest[at : at + step], score, weighting)
        found = _coded(asked, tolerance, confidence)
        if isinstance(found, str):
            return found
        outs.append(found.out)
    if known is None:
        return np.concatenate(outs)
    out, proven = known
    if outs:
        out[~proven] = np.concatenate(outs)
    return out


def _refusal(rows: Rows, score: Score, weighting: Weighting) -> str | None:
    first = rows.first()
    if first is None or first.near is None or not rows.shape[0]:
        return "the rows have no codes beside their vectors"
    why = _unbounded(first.near, rows.shape[1], score, weighting)
    if why and first.lost:
        raise CombinationError(
            f"tolerance: it cannot be proven, since {why} and the vectors are kept in 8 bits. Ask "
            "without one, or keep them as float32"
        )
    return why


def _unbounded(near: Near, width: int, score: Score, weighting: Weighting) -> str | None:
    how = type(weighting)
    if how not in (Softmax, TopK, Hard, Normalized) or getattr(
        weighting, "straight_through", False
    ):
        return f"{how.__name__} has no bound"
    if how is Softmax and is_array(weighting.temperature):  # type: ignore[attr-defined]
        return "a temperature that is an array has no bound"
    form = score.affine(np.zeros((1, width)), np.ones(1))
    if form is None:
        return f"{type(score).__name__} is no product with a key, so codes do not bound it"
    if (how is Normalized) != hasattr(score, "profile"):
        return f"{type(score).__name__} under {how.__name__} has no bound"
    if near.norm is None and not form.factor is form.bias is None:
        return "the lengths of the keys are not known"
    return None


def _soft(asked: Coded, tolerance: float, confidence: float | None) -> Weighed:
    rows, scan = asked.rows, asked.scanned()
    m, pools = rows.shape[0], rows.width > 0
    given, tolerance = tolerance, min(tolerance, ANY)
    keep, share = tolerance * (1 - POOLED * pools), SHARE
    bound = scan.bound()
    while (bound.error > keep).any() and not asked.lost:
        at = scan.heavy(share, keep)
        wanted = asked.read + len(at)
        if confidence is not None and wanted > min(DRAWN, m // MANY):
            # It may be tried again, and all tries together must keep what was promised.
            confidence = (1 + confidence) / 2
            statistical = _sampled(asked, scan, bound, tolerance, confidence)
            if (statistical <= tolerance).all():
                return _shared(asked, scan, bound, statistical)._replace(statistical=True)
        # Within the tolerance, more are read only if few: then fewer values may be.
        within = (bound.error <= tolerance).all()
        most = max(2 * asked.read, m // (32 * MANY)) if within else m // MANY
        if wanted > min(most, m // MANY) or share * m * MANY < 1:
            break
        if len(at):
            scan.settle(at, *asked.exact(at)[:2])
            bound = scan.bound()
        share /= FINER
    error = bound.error
    if (error > tolerance).any() and not asked.lost:
        scan = asked.again()
        bound = scan.bound()
        error = bound.error
    if (error > tolerance).any():
        doubt = asked.coded() if asked.lost else asked.whole()
        doubt.weigh()
        bound = doubt.bound()
        error = np.minimum(bound.error, doubt.anchored())
        _reached(error, given, asked.lost)
        if asked.lost and (error > tolerance).any():
            return _nothing(asked, error)
        return _finished(asked, doubt, bound, error)
    kept = scan.prune(tolerance, m // SPARSE) if pools else None
    return _shared(asked, scan, bound, error) if kept is None else _few(asked, scan, kept)


def _windowed(asked: Coded, tolerance: float) -> Weighed:
    """Scores that are weights, under `Normalized`."""
    doubt = asked.coded()
    asked.most = doubt.weigh(asked.profile, asked.offset)
    bound = doubt.bound()
    for _ in range(3):
        at = doubt.largest(tolerance * 0.8, asked.rows.shape[0] // MANY)
        if (bound.error <= tolerance).all() or asked.lost or not len(at):
            break
        doubt.settle(at, asked.exact(at)[0])
        bound = doubt.bound()
    if (bound.error > tolerance).any() and not asked.lost:
        doubt = asked.whole()
        doubt.weigh(asked.profile, asked.offset)
        bound = doubt.bound()
    _reached(bound.error, tolerance, asked.lost)
    return _finished(asked, doubt, bound, bound.error)


def _sampled(
    asked: Coded, scan: Scan, bound: Bound, tolerance: float, confidence: float
) -> np.ndarray:
    """The error (n,) that is not exceeded with this confidence, for each query by itself.

    Rows are drawn by their largest part in the bound and read in full: |e^error − 1| / (e^δ − 1)
    lies between 0 and 1, and its mean, times the sum of the parts, is what the bound is the largest
    of.
    """
    out = bound.error.copy()
    rng = np.random.default_rng(0)
    for i in np.flatnonzero(out > tolerance):
        places, most, total = scan.drawn(int(i), DRAWN, rng)
        if not len(places):
            continue
        at, back = np.unique(places, return_inverse=True)
        w = scan.of(at)
        true = asked.exact(at)[0][i] - scan.peak[i]
        with np.errstate(divide="ignore"):
            found = np.abs(np.expm1(true - np.log(w[i])))[back] / most
        found = np.minimum(found, 1.0)
        level, size = np.log(2 / (1 - confidence)), len(found)
        # Empirical Bernstein (Maurer and Pontil 2009).
        above = found.mean() + np.sqrt(2 * found.var(ddof=1) * level / size)
        above += 7 * level / (3 * (size - 1))
        out[i] = min(out[i], total * above / bound.total[i])
    return out


def _best(asked: Coded, k: int, tolerance: float) -> Weighed | str:
    """Softmax over the k rows that are proven to have the largest scores; for one row, 1."""
    rows, doubt = asked.rows, asked.coded()
    (n, m), fixed = doubt.scores.shape, asked.lost
    k = min(k, m if rows.allowed is None else int(np.count_nonzero(rows.allowed)))
    if not k:
        return _nothing(asked, np.zeros(n))
    at = doubt.rivals(k)
    if fixed:
        s, slack = doubt.scores[:, at].astype(float), doubt.deltas(at)
    else:
        s, _, slack = asked.exact(at, steady=True)
    if not (np.isfinite(s).all() and np.isfinite(slack).all()):
        _reached(np.ones(n), tolerance, fixed)
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
            error[i] = from_largest(s[i, chosen], slack[i, chosen]) + 4 * np.finfo(alpha.dtype).eps
        high, low = s[i] + slack[i], s[i] - slack[i]
        near = others[high[others] >= low[chosen].min()]
        if len(near):
            edge = chosen[low[chosen] <= high[near].max()]
            both = np.append(edge, near)  # a tie is one where neither was rounded, or keys repeat
            if slack[i, both].any() and (fixed or not _alike(asked, at[both])):
                error[i] += alpha[i, at[edge]].sum()
    error = np.minimum(error, 1.0)
    _reached(error, tolerance, fixed)
    bound = Bound(tops, sums, sums * error, sums * error)
    lse = tops + np.log(np.where(sums > 0, sums, 1.0)) if asked.weighting.has_lse else None
    return _told(asked, alpha, stored.entropy(alpha), lse, error, bound)


def _alike(asked: Coded, at: np.ndarray) -> bool:
    """Whether these rows have the same key, so that the lowest of them come first."""
    key = np.concatenate([key for _, key, _ in asked.picked(np.sort(at))])
    return bool((key == key[0]).all())


def _reached(error: np.ndarray, tolerance: float, lost: bool) -> None:
    """Refuse what a store that keeps nothing but codes cannot prove."""
    most = float(error.max(initial=0.0))
    if lost and most > tolerance:
        raise CombinationError(
            f"tolerance: {tolerance:g} cannot be proven, but {most:.3g} can: the vectors are kept "
            "in 8 bits, and what they have lost is not there to be read. Allow more, or keep them "
            "as float32"
        )


def _shared(asked: Coded, scan: Scan, bound: Bound, error: np.ndarray) -> Weighed:
    """The answer of all rows."""
    if not (bound.total > 0).all():
        return _nothing(asked, error)
    entropy = scan.share(bound.total)
    alpha = scan.weights.astype(np.result_type(asked.query, np.float32), copy=False)
    return _told(asked, alpha, entropy, bound.top + np.log(bound.total), error, bound)


def _few(asked: Coded, scan: Scan, kept: Pruned) -> Weighed:
    """The answer of few rows, with the others at 0."""
    at, w, bound = kept
    w = (w / bound.total[:, None]).astype(np.result_type(asked.query, np.float32))
    alpha = scan.only(at, w)
    lse = bound.top + np.log(bound.total)
    return _told(asked, alpha, stored.entropy(w), lse, bound.error, bound, Few(at, w))


def _finished(asked: Coded, doubt: Doubt, bound: Bound, error: np.ndarray) -> Weighed:
    empty = ~(bound.total > 0)
    if empty.any() and (asked.profile is None or empty.all()):
        return _nothing(asked, error)
    # Scores in float64 were needed for digits that float32 would lose again.
    alpha = np.empty(doubt.scores.shape, np.result_type(asked.query, doubt.scores))
    entropy = doubt.weights(alpha)
    lse = bound.top + np.log(bound.total) if asked.weighting.has_lse else None
    if not empty.any():
        return _told(asked, alpha, entropy, lse, error, bound)
    found = _nothing(asked, error, empty)
    alpha[empty], entropy[empty] = found.weights, stored.entropy_in(found)
    error = error.copy()
    error[empty] = found.error
    return _told(asked, alpha, entropy, lse, error, bound)


def _nothing(asked: Coded, error: np.ndarray, some: np.ndarray | slice = slice(None)) -> Weighed:
    """Nothing lies within the window of some queries, no row is allowed, or nothing is known: the
    weighting says what then, of keys that are exact or, where these are lost, of their codes."""
    rows = asked.rows
    found = stored.weighed(rows, asked.query[some], asked.score, asked.weighting)
    known = not asked.lost or (rows.allowed is not None and not rows.allowed.any())
    return found._replace(error=np.zeros_like(error[some]) if known else error[some])


def _told(
    asked: Coded,
    alpha: np.ndarray,
    entropy: np.ndarray,
    lse: np.ndarray | None,
    error: np.ndarray,
    bound: Bound,
    few: Few | None = None,
) -> Weighed:
    best = (bound.top + asked.shift) * asked.cooled
    if asked.profile is not None:
        best = asked.profile(np.maximum(-asked.most, 0))
    lse = None if lse is None else lse + asked.shift
    sums = stored.sums(asked.rows, alpha if few is None else few, mean=True)
    read, out = min(asked.read, alpha.shape[1]), stored.averaged(sums)
    return Weighed(out, alpha, entropy, lse, best, error, read, bound, sums=sums)
