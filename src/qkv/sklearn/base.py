"""The base class of the estimators: rows as keys, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from qkv import scores, weightings
from qkv.attention import attend, weights
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    ShapeError,
    unknown_name_error,
    validate_sizes,
)
from qkv.scores import Score
from qkv.scores.distance import ExpandedGaussian
from qkv.sklearn.bandwidth import (
    DEFAULT_RIDGE,
    MIN_RELATIVE_ERROR,
    RIDGE_CANDIDATES,
    Examples,
    Loss,
    apply_row_weights,
    learn_widths,
    scott_factor,
    search_coarse,
    search_common_width,
    squared_error,
)
from qkv.sklearn.columns import Features, Numbers, find_non_number, resolve_categorical
from qkv.sklearn.local_line import LocalLine, fit_line
from qkv.util.progress import progress_bar
from qkv.weightings import Normalized, Softmax, Weighting

MAX_MOMENTS_PER_BLOCK = 2**24
"""The most numbers in the moments of a block of queries."""

MIN_FLOAT32_BANDWIDTH = 1e-9
"""Below this bandwidth, or above its inverse, scaled keys may exceed float32."""

BANDWIDTH_RULES = ("auto", "scott", "loo", "learned")

MIN_ROWS_TO_LEARN = 3
"""With fewer different rows, the bandwidth follows Scott's rule."""

LEARNED_DECIMALS = 9
"""The decimals of keys, in standard deviations, and of values from which bandwidths are learned."""

RATIO_DECIMALS = 12
"""The decimals of the logarithms of ratios of columns, for the same reason."""

MAX_LINE_COLUMNS = 30
"""The most columns for which the default fits a line: its cost grows with their square."""


class AttentionEstimator(BaseEstimator):
    """Stores keys xᵢ in units of a bandwidth, and computes α(x, xᵢ) over them."""

    _loss: Loss = staticmethod(squared_error)
    _automatic_degree = 0

    def __init__(
        self,
        bandwidth: Any = "auto",
        *,
        degree: int | None = None,
        kernel: Any = "gaussian",
        weighting: Any = None,
        categorical: Any = None,
        sample: int = 2000,
        random_state: Any = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.degree = degree
        self.kernel = kernel
        self.weighting = weighting
        self.categorical = categorical
        self.sample = sample
        self.random_state = random_state

    def attention_weights(self, X: Any) -> Numbers:
        """Return α (n, m): the weight of each fitted row for each row of X.

        With `degree=1` the prediction also has a slope, which the weights do not show.
        """
        query, look, kept = self._scale_queries(X), self._resolve_attention(), self._counts > 0
        alpha = np.zeros((len(query), len(kept)), dtype=query.dtype)
        found = weights(query, self._keys, **look)
        alpha[:, kept] = apply_row_weights(found, self._counts[kept], look["weighting"])
        return alpha

    def _fit_rows(self, X: Any, values: Numbers, counts: Numbers) -> None:
        """Store the rows as keys, and find the bandwidth; values (m, p)."""
        self.degree_ = self._resolve_degree()
        kept = counts > 0
        names = getattr(self, "feature_names_in_", None)
        places = resolve_categorical(self.categorical, names, self.n_features_in_)
        self._columns = Features.from_table(X[kept], places)
        key = self._columns.to_vectors(X[kept])
        self._X, self._counts = X, counts
        self._slope_mask = self._columns.slope_mask & bool(self.degree_)
        spread = _column_spread(key, counts[kept], self._columns)
        self.bandwidth_, self.ridge_ = self._find_bandwidth(key, values[kept], counts[kept], spread)
        self._center = np.average(key, axis=0, weights=counts[kept]) * self._slope_mask
        # A line needs differences of moments, for which float32 is not precise enough.
        held = (self.bandwidth_ > MIN_FLOAT32_BANDWIDTH) & (
            self.bandwidth_ < 1 / MIN_FLOAT32_BANDWIDTH
        )
        self._dtype = np.dtype(np.float64) if self.degree_ or not held.all() else key.dtype
        self._keys = self._scale_vectors(key)

    def _resolve_degree(self) -> int:
        """Return 0 or 1. Unknown names and wrong degrees are reported before the search begins."""
        weighting, degree = self._resolve_attention()["weighting"], self.degree
        if degree is None:
            is_line = self.bandwidth == "auto" if isinstance(self.bandwidth, str) else False
            is_line = is_line and weighting.is_convex and self.n_features_in_ <= MAX_LINE_COLUMNS
            return self._automatic_degree if is_line else 0
        if not isinstance(degree, Integral) or isinstance(degree, bool) or degree not in (0, 1):
            raise ArgumentError(f"degree must be 0 (the mean) or 1 (a line), not {degree!r}")
        if degree:
            self._require_convex("degree=1")
        return int(degree)

    def _find_bandwidth(
        self, key: Numbers, value: Numbers, counts: Numbers, spread: Numbers
    ) -> tuple[Numbers, float]:
        """Return the bandwidth of each column (d,), and the ridge."""
        given, d = self.bandwidth, len(spread)
        rule = spread * scott_factor(counts.sum(), d)
        if given is None:
            return np.ones(d), DEFAULT_RIDGE
        if not isinstance(given, str):
            return _parse_bandwidth(given, d), DEFAULT_RIDGE
        if given not in BANDWIDTH_RULES:
            raise unknown_name_error(
                "bandwidth", given, BANDWIDTH_RULES, " Or a number, one for each column, or None."
            )
        if given == "scott":
            return rule, DEFAULT_RIDGE
        rows, fewer = self._sample_examples(key, value, counts, spread)
        if len(rows.key) < MIN_ROWS_TO_LEARN:
            return rule, DEFAULT_RIDGE
        return self._search_bandwidth(rows, fewer, spread)

    def _search_bandwidth(
        self, rows: Examples, fewer: float, spread: Numbers
    ) -> tuple[Numbers, float]:
        """Return the bandwidth and the ridge by leave-one-out."""
        # Try one width in original units (pixels), and one in standard deviations.
        of_all = spread.max() * np.sqrt(((spread / spread.max()) ** 2).mean())
        ratio = np.exp(np.log(of_all / spread).round(RATIO_DECIMALS))
        units = [np.ones(len(spread)), ratio]
        ridges = RIDGE_CANDIDATES if rows.slope_mask.any() else (DEFAULT_RIDGE,)
        if self.bandwidth == "loo":
            best = search_common_width(rows.leave_one_out_error, units, ridges)
        else:
            best = self._learn_bandwidths(rows, units)
        if self.bandwidth == "auto":
            common = search_common_width(rows.leave_one_out_error, units, ridges)
            best = best if _is_worth_its_columns(rows, common, best) else common
        width, ridge = best
        return spread * width * fewer, ridge

    def _learn_bandwidths(self, rows: Examples, units: list[Numbers]) -> tuple[Numbers, float]:
        """Return one width per column, in standard deviations, and the ridge."""
        plain = replace(rows, score=ExpandedGaussian(1.0), weighting=Softmax())
        with progress_bar("learning the bandwidths") as progress:
            start = search_coarse(plain.leave_one_out_error, units)
            width, ridge = learn_widths(plain, start, progress)
        if _is_same_attention(rows, plain):
            return width, ridge
        return search_common_width(rows.leave_one_out_error, [width], (ridge,))

    def _sample_examples(
        self, key: Numbers, value: Numbers, counts: Numbers, spread: Numbers
    ) -> tuple[Examples, float]:
        """Return the rows to learn from, and the factor that corrects the width for the sample."""
        validate_sizes(sample=self.sample)
        total = counts.sum()
        if len(key) > self.sample:
            rng = check_random_state(self.random_state)
            some = rng.choice(len(key), self.sample, replace=False)
            key, value, counts = key[some], value[some], counts[some]
        key = (key - np.average(key, axis=0, weights=counts)) / spread[self._columns.source_column]
        key, value, counts = _merge_equal_rows(key, value, counts)
        look = self._resolve_attention()
        found = look["score"].find_lowering(key, key, None, "float16")
        # Computed by products; centered keys keep the precision.
        score = look["score"] if isinstance(found, str) or found[1] else found[0]
        rows = Examples(key.astype(np.float64), value.astype(np.float64), counts, self._columns,
                    self._loss, self._slope_mask, score, look["weighting"])  # fmt: skip
        return rows, scott_factor(total / counts.sum(), len(spread))

    def _resolve_attention(self) -> dict[str, Any]:
        """Return the score and the weighting, as arguments of `attend`."""
        score: Score = scores.resolve(self.kernel)
        if self.weighting is not None:
            weighting = weightings.resolve(self.weighting)
            weightings.pair_score_with_weighting(score, weighting)  # raises if they do not fit
            return {"score": score, "weighting": weighting}
        inside: Weighting = Softmax()
        if score.is_nonnegative:
            inside = Normalized("zero" if score.ranking_score is None else "nearest")
        return {"score": score, "weighting": inside}

    def _scale_vectors(self, vectors: Numbers) -> Numbers:
        width = self.bandwidth_[self._columns.source_column]
        return ((vectors - self._center) / width).astype(self._dtype, copy=False)

    def _scale_queries(self, X: Any) -> Numbers:
        """Return X as vectors (n, D) in units of the bandwidth."""
        check_is_fitted(self)
        return self._scale_vectors(self._columns.to_vectors(self._validate_input(X, reset=False)))

    def _validate_input(self, X: Any, **options: Any) -> Any:
        named = self.categorical is not None
        if not named:
            options["dtype"] = [np.float64, np.float32]
        else:
            options |= {"dtype": None, "ensure_all_finite": False}
        try:
            return validate_data(self, X, **options)
        except (TypeError, ValueError) as error:
            if (found := find_non_number(X, words=not named)) is None:
                raise
            column, kind, cell = found
            step = "turn it into numbers first, or leave it out"
            if kind == "text" and "categorical" in self.get_params():
                step = f"name it, categorical=[{column!r}]"
            message = f"X: column {column!r} holds {kind}, such as {cell!r}: {step}"
            raise ArgumentError(message) from error

    def _check_sample_weight(self, sample_weight: Any, X: Numbers) -> Numbers:
        """Return how many rows each row counts as (m,)."""
        if sample_weight is None:
            return np.ones(len(X))
        counts = check_array(
            sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
        )
        if counts.ndim == 0:
            counts = np.full(len(X), float(counts))
        if counts.shape != (len(X),):
            raise ShapeError(f"sample_weight has shape {counts.shape}, but X has {len(X)} rows")
        if (counts < 0).any():
            raise ArgumentError("sample_weight must not be negative: use 0 to leave a row out")
        if not counts.any():
            raise ArgumentError("sample_weight must contain at least one non-zero number")
        return counts

    def _append_rows(
        self, X: Numbers, y: Numbers, counts: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the stored rows followed by these."""
        if y.shape[1:] != self._y.shape[1:]:
            raise ShapeError(f"y has shape {y.shape}, but the earlier y has shape {self._y.shape}")
        given = (self._X, X), (self._y, y), (self._counts, counts)
        X, y, counts = map(np.concatenate, given)
        return X, y, counts

    def _pool_values(self, query: Numbers, values: Numbers, places: Any = slice(None)) -> Numbers:
        """Return Σᵢ α(q, kᵢ) vᵢ of values (m, p); a row of weight w counts as w rows."""
        look, counts = self._resolve_attention(), self._counts[self._counts > 0]
        key, values = self._keys[:, places], values.astype(query.dtype, copy=False)
        if (counts == 1).all():
            return attend(query, key, values, **look)
        counts = counts.astype(query.dtype)[:, None]
        found = attend(query, key, np.concatenate([values * counts, counts], axis=1), **look)
        if not look["weighting"].is_convex:
            return found[:, :-1]
        return found[:, :-1] / np.where(found[:, -1:] > 0, found[:, -1:], 1)

    def _fit_lines(self, query: Numbers, values: Numbers) -> Iterator[LocalLine]:
        """Yield the mean or the line of values (m, p), in blocks of queries."""
        d, p = int(self._slope_mask.sum()), values.shape[1]
        step = max(MAX_MOMENTS_PER_BLOCK // ((d + 1) * (d + p + 1)), 1)
        key = self._keys[:, self._slope_mask]
        for at in range(0, len(query), step):
            some = query[at : at + step]
            near = some[:, self._slope_mask]
            yield fit_line(partial(self._pool_values, some), near, key, values, self.ridge_)

    def _require_convex(self, wanted: str) -> None:
        weighting = self._resolve_attention()["weighting"]
        if not weighting.is_convex:
            kind = type(weighting).__name__
            raise CombinationError(f"{wanted} needs weights that sum to 1, unlike {kind}")


def _merge_equal_rows(
    key: Numbers, value: Numbers, counts: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Return each different row once, in sorted order, with the sum of its counts.

    Leave-one-out then leaves out all copies of a row, so a row of weight 2 equals the row twice.
    Numbers are rounded, because the search would amplify different rounding of the two.
    """
    cells = np.concatenate([key, value], axis=1, dtype=np.float64).round(LEARNED_DECIMALS)
    rows, position = np.unique(cells, axis=0, return_inverse=True)
    d = key.shape[1]
    return rows[:, :d], rows[:, d:], np.bincount(position.reshape(-1), counts)


def _is_worth_its_columns(
    rows: Examples, common: tuple[Numbers, float], learned: tuple[Numbers, float]
) -> bool:
    """Return whether one bandwidth per column explains the rows better than a common one.

    The log-likelihood must grow by more than one per column (Akaike's criterion).
    """
    before, after = (rows.leave_one_out_error(*found) for found in (common, learned))
    if rows.loss is squared_error:
        before, after = (0.5 * np.log(max(error, MIN_RELATIVE_ERROR)) for error in (before, after))
    return bool(len(rows.key) * (before - after) > len(learned[0]))


def _is_same_attention(first: Examples, second: Examples) -> bool:
    """Return whether two estimators have equal parameters of attention."""
    descriptions = [repr((rows.score, rows.weighting)) for rows in (first, second)]
    return descriptions[0] == descriptions[1]


def _column_spread(key: Numbers, counts: Numbers, columns: Features) -> Numbers:
    """Return the standard deviation of each column (d,); for categories, how often rows differ."""
    apart = key - np.average(key, axis=0, weights=counts)
    unit = np.max(np.abs(apart), axis=0, initial=0)  # so that no square is too large or too small
    unit = np.where((unit > 0) & (columns.slope_mask), unit, 1)
    square = columns.sum_by_column(np.average((apart / unit) ** 2, axis=0, weights=counts))
    most = np.ones(len(square))
    most[columns.source_column] = unit
    return np.where(square > 0, np.sqrt(square) * most, 1.0)


def _parse_bandwidth(bandwidth: Any, d: int) -> Numbers:
    try:
        width = np.asarray(bandwidth, dtype=np.float64)
    except (TypeError, ValueError):
        raise DtypeError(
            "bandwidth must be a number, one for each column, or one of "
            f"{', '.join(BANDWIDTH_RULES)}, not "
            f"{bandwidth!r}"
        ) from None
    if width.shape not in ((), (d,)):
        raise ShapeError(f"bandwidth has shape {width.shape}, but X has {d} columns")
    if not (np.isfinite(width) & (width > 0)).all():
        raise ArgumentError(f"bandwidth must be above 0, not {bandwidth!r}")
    return np.broadcast_to(width, (d,)).copy()
