"""How wrong answers are for keys that a table lacks: its own keys are left out, one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from qkv.answer import MAX_LOGIT, confidence_logit
from qkv.answer_backend import SAME_WEIGHT_TOLERANCE
from qkv.database.encoders import neighbours
from qkv.database.encoders.base import normalize_rows
from qkv.database.query.logistic_fit import fit_logit
from qkv.scores import Cosine, Gaussian, Score

ENCODER_KINDS = ("numbers", "arrays")
"""The kinds of encoders of numbers, dates and vectors. Only their keys have an estimate."""

MIN_EXAMPLES = 8
"""With fewer rows, the estimate would say nothing."""

MAX_QUERIES, MIN_QUERIES = 256, 64
"""The number of keys that are left out. It is smaller if the keys are many and long."""

MAX_SCORES = 2**20
"""The scores that are computed."""

MIN_QUERIES_PER_BLOCK, SCORES_PER_BLOCK = 16, 2**20

MAX_EXACT_WIDTH = 8
"""Up to this width, distances are sums of squared differences."""

MAX_DISTINCT_SHARE = 0.5
"""If more values than this share are distinct, they are names of rows: no other row has them."""

FAR_FACTOR = 2.0
"""A query is far if its distance is more than this times the largest between nearest keys."""

USUAL_DISTANCE_PERCENTILE = 25
"""From this percentile of the distances between nearest keys on, a query is like a left-out key."""

MAX_RELATIVE_DIFFERENCE = 0.1
"""A number that is not a mean is right if it differs by at most this share of it."""


@dataclass(frozen=True)
class LeftOutError:
    """The error of answers at the keys of a table, and where the own row of a key is left out.

    The errors are root mean squares, one for each column of numbers, and `deviation` the standard
    deviations of the columns. If the value of an answer is not a mean, the error is the share of
    wrong answers, and `deviation` is empty. Then σ(a + b logit) is the share of right answers with
    this logit of the confidence, with (a, b) `at_keys_logit` or `left_out_logit`.

    `distance` is the distance between nearest keys from which a query counts as left out. Its unit
    is that of the score: a row at distance x has the weight e^(−x² / 2) of an equal key. A query
    beyond `far_distance` is far from every key. If values are not checked, the errors are empty.
    """

    at_keys: tuple[float, ...]
    left_out: tuple[float, ...]
    deviation: tuple[float, ...]
    distance: float
    at_keys_logit: tuple[float, ...] = (0.0, 1.0)
    left_out_logit: tuple[float, ...] = (0.0, 1.0)
    far_distance: float = 1e300

    @classmethod
    def from_settings(cls, settings: Any) -> LeftOutError | None:
        """Return the estimate in the settings of a store; None if there is none that is valid."""
        try:
            distance, far_distance = (float(settings[x]) for x in ("distance", "far_distance"))
            lists = {
                field.name: tuple(map(float, settings[field.name]))
                for field in fields(cls)
                if field.name not in ("distance", "far_distance")
            }
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        estimate = cls(distance=distance, far_distance=far_distance, **lists)
        columns, logits = len(estimate.at_keys), (estimate.at_keys_logit, estimate.left_out_logit)
        errors = (*estimate.at_keys, *estimate.left_out, *estimate.deviation)
        is_valid = all(0 <= x < math.inf for x in errors)
        is_valid = is_valid and 0 < distance <= far_distance < math.inf
        is_valid = is_valid and all(map(math.isfinite, (x for each in logits for x in each)))
        fits = len(estimate.left_out) == columns and len(estimate.deviation) in (0, columns)
        return estimate if is_valid and fits and {len(x) for x in logits} == {2} else None

    def to_settings(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    def expect_error(self, share: float) -> np.ndarray:
        """Return the errors for a query between a key, `share` 0, and a left-out key, 1.

        >>> LeftOutError((0.0,), (0.8,), (1.0,), 2.0).expect_error(0.25)
        array([0.2])
        """
        at_keys, left_out = np.array(self.at_keys), np.array(self.left_out)
        return np.asarray(at_keys + (left_out - at_keys) * share)

    def expect_confidence(self, share: float, logit: float) -> float:
        """Return the probability that an answer with this logit of the confidence is right."""
        at_key, left_out = (
            1 / (1 + math.exp(-min(max(bias + slope * logit, -MAX_LOGIT), MAX_LOGIT)))
            for bias, slope in (self.at_keys_logit, self.left_out_logit)
        )
        return at_key + (left_out - at_key) * share


def distance_of_score(score: Score, best_score: float) -> float:
    """Return the distance of a query from the nearest key, whose score is `best_score`.

    >>> distance_of_score(Gaussian(5.0), -2.0)
    2.0
    """
    top = 1 / float(score.temperature) if isinstance(score, Cosine) else 0.0
    return math.sqrt(max(2 * (top - best_score), 0.0))


def estimate_left_out_error(
    keys: np.ndarray, values: Sequence[Any] | np.ndarray | None, score: Score, takes_mean: bool
) -> LeftOutError | None:
    """Return the estimate for vectors (m, d) of keys and the values of these rows.

    `values` is an array (m, c) of numbers, or a sequence of hashable values. The value of an answer
    is the weighted mean with `takes_mean`. Otherwise it is that of the best key for numbers, and
    the one with the most weight for other values. Values are not checked if they are None, or if
    most of them are distinct and not numbers. Return None if there are too few rows.

    >>> x = np.linspace(0, 10, 50)[:, None]
    >>> score = Gaussian(0.2)
    >>> estimate_left_out_error(x, x, score, True).left_out[0] < 0.1
    True
    >>> estimate_left_out_error(x, np.sin(20 * x), score, True).left_out[0] > 0.5
    True
    """
    if len(keys) < MIN_EXAMPLES or not isinstance(score, Gaussian | Cosine):
        return None
    rows = _scale_keys(keys, score)
    limit = min(max(MAX_SCORES // len(rows), MIN_QUERIES), MAX_QUERIES)
    queries = neighbours.sample_positions(len(rows), limit, 2)
    check = _ValueCheck(values, takes_mean) if values is not None else None
    check = check if check is not None and check.is_possible else None
    nearest: list[np.ndarray] = []
    size = max(SCORES_PER_BLOCK // len(rows), MIN_QUERIES_PER_BLOCK)
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        scores = _compute_scores(rows, block, score)
        for is_left_out in (False, True):
            scores[np.arange(len(block)), block] = -np.inf if is_left_out else 0.0
            if check is not None:
                check.add(scores, block, is_left_out)
        nearest.append(scores.max(axis=1))
    distance = np.sqrt(np.maximum(-2 * np.concatenate(nearest), 0))
    distance = distance[distance > 0]
    if not len(distance):
        return None
    usual_distance = float(np.percentile(distance, USUAL_DISTANCE_PERCENTILE))
    far_distance = FAR_FACTOR * float(distance.max())
    errors = None if check is None else check.measure_errors()
    if errors is None:
        return LeftOutError((), (), (), usual_distance, far_distance=far_distance)
    return replace(errors, distance=usual_distance, far_distance=far_distance)


class _ValueCheck:
    """Compares the values of rows with answers at their keys."""

    def __init__(self, values: Sequence[Any] | np.ndarray, takes_mean: bool):
        self.numbers = values if isinstance(values, np.ndarray) else None
        self.takes_mean = takes_mean
        self.errors: tuple[list[np.ndarray], ...] = ([], [])  # at the keys, and left out
        self.logits: tuple[list[np.ndarray], ...] = ([], [])
        if self.numbers is None:
            codes: dict[Any, int] = {}
            self.labels = np.array([codes.setdefault(value, len(codes)) for value in values])
            self.is_possible = len(codes) <= MAX_DISTINCT_SHARE * len(self.labels)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self.deviation = self.numbers.std(axis=0, dtype=float)
            self.centred = self.numbers - self.numbers.mean(axis=0, dtype=float)
        self.labels = np.unique(self.numbers, axis=0, return_inverse=True)[1].reshape(-1)
        self.is_possible = bool(np.isfinite(self.deviation).all())

    def add(self, scores: np.ndarray, rows: np.ndarray, is_left_out: bool) -> None:
        """Compare the answers for scores (q, m) with the values of the rows (q,)."""
        weights = _softmax(scores)
        if self.takes_mean:
            self.errors[is_left_out].append((weights @ self.centred - self.centred[rows]) ** 2)
            return
        predicted, logit = _find_heaviest_labels(weights, self.labels)
        if self.numbers is None:
            is_wrong = predicted != self.labels[rows]
        else:
            best = scores >= scores.max(axis=1, keepdims=True)
            mean = best @ self.numbers / best.sum(axis=1, keepdims=True)
            difference = np.abs(mean - self.numbers[rows])
            is_wrong = (difference > MAX_RELATIVE_DIFFERENCE * np.abs(mean)).any(axis=1)
        self.errors[is_left_out].append(is_wrong.astype(float)[:, None])
        self.logits[is_left_out].append(logit)

    def measure_errors(self) -> LeftOutError | None:
        """Return the errors, with any distance; None if they overflow."""
        errors = [*map(np.concatenate, self.errors)]
        means = [each.mean(axis=0) for each in errors]
        means = [np.sqrt(mean) if self.takes_mean else mean for mean in means]
        if not np.isfinite(means).all():
            return None
        # A key has no larger error than it has without its own row.
        smaller, larger = tuple(np.minimum(*means).tolist()), tuple(means[1].tolist())
        if self.takes_mean:
            return LeftOutError(smaller, larger, tuple(self.deviation.tolist()), 1.0)
        fits = [
            fit_logit(np.concatenate(logit), 1 - error[:, 0])
            for logit, error in zip(self.logits, errors, strict=True)
        ]
        return LeftOutError(smaller, larger, (), 1.0, fits[0], fits[1])


def _scale_keys(keys: np.ndarray, score: Gaussian | Cosine) -> np.ndarray:
    """Return keys (m, d) in the units of the score, near 0."""
    if isinstance(score, Cosine):
        return np.asarray(normalize_rows(keys), np.float32)
    centred = keys.astype(float) - keys.mean(axis=0, dtype=float)
    scaled = centred / np.asarray(score.bandwidth, float)
    return np.asarray(scaled, None if keys.shape[1] <= MAX_EXACT_WIDTH else np.float32)


def _compute_scores(rows: np.ndarray, at: np.ndarray, score: Gaussian | Cosine) -> np.ndarray:
    """Return the scores (q, m) of the keys for queries equal to the keys at `at`; 0 if equal."""
    if isinstance(score, Cosine):
        cosine = (rows[at] @ rows.T).astype(float)
        return np.asarray(np.minimum(cosine - 1, 0.0) / float(score.temperature))
    if rows.shape[1] <= MAX_EXACT_WIDTH:
        out = np.zeros((len(at), len(rows)))
        for column in rows.T:
            out -= (column[at, None] - column) ** 2
        return out / 2
    square = np.einsum("ij,ij->i", rows, rows)
    product: np.ndarray = (rows[at] @ rows.T).astype(float)
    return np.asarray(np.minimum(product - (square[at][:, None] + square) / 2, 0.0))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _find_heaviest_labels(weights: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for weights (q, m) the labels with the largest total, (q,), and their logits."""
    found, shares = [], []
    top = weights >= weights.max(axis=1, keepdims=True) * (1 - SAME_WEIGHT_TOLERANCE)
    for each in weights:
        total = np.bincount(labels, each, minlength=2)
        next_share, share = np.partition(total, -2)[-2:]
        found.append(total.argmax())
        shares.append((share, next_share))
    share, next_share = np.array(shares).T
    logit = confidence_logit(share, next_share, (weights * top).sum(axis=1))
    return np.array(found), logit
