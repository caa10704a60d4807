"""Prediction sets: rows that contain the right one with a given probability.

This is split-conformal prediction on the weights. Take the weights of the right rows of n pairs.
The weight of the right row of a new query is below the k-th smallest of them with probability at
most k / (n + 1). With k = ⌊(1 − coverage)(n + 1)⌋, the rows with at least this weight therefore
contain the right row with probability `coverage`. This holds however the weights are computed, if
new queries are like those of the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.database import parsing
from qkv.database.query.arguments import list_pairs, split_pairs
from qkv.database.query.scan import RowScan
from qkv.database.table import cells
from qkv.database.table.view import TableView
from qkv.errors import ArgumentError, CombinationError, DtypeError, validate_fraction

UNCALIBRATED_MESSAGE = "call calibrate(pairs) first"

MAX_CHANGED_SHARE = 0.1
"""The calibration becomes invalid if a larger share of the rows has changed."""

FOREIGN_PAIR_STEP = 4
"""Every fourth pair calibrates the minimum of the best score. It uses half of 1 − coverage."""

ROUNDING_TOLERANCE = 1e-5
"""The relative error of a weight or score, because batch sizes round differently."""


@dataclass(frozen=True)
class Calibration:
    """The result of `Database.calibrate`.

    A prediction set contains the rows with at least the weight `weight`. It is empty if the best
    score is below `best`, because then the query is unlike the calibration pairs. `silent` is the
    share of the pairs with an empty set. `confidence_bias` and `confidence_slope` correct the logit
    of the confidence. The other fields say for which score, weighting and rows the guarantee holds.
    """

    coverage: float
    weight: float
    best: float
    pairs: int
    silent: float
    score: str | None
    weighting: str
    rows: int
    last: int
    encoded: int
    confidence_bias: float = 0.0
    confidence_slope: float = 1.0

    def __repr__(self) -> str:
        return (
            f"The prediction set contains the right row with probability {self.coverage:.4g}: "
            f"calibrated on {self.pairs:,} pairs. For {100 * self.silent:.3g} % of them, the "
            "answer abstains."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for the settings of a store."""
        return asdict(self) | {"best": self.best if math.isfinite(self.best) else None}

    @classmethod
    def read_from_view(cls, view: TableView) -> Calibration | None:
        """Return the stored calibration, or None if there is no valid one."""
        stored = view.settings.get("promise")
        if not isinstance(stored, dict) or {field.name for field in fields(cls)} != stored.keys():
            return None
        values = stored | {"best": -math.inf if stored["best"] is None else stored["best"]}
        types = {"score": str | None, "weighting": str}
        for name, x in values.items():
            if isinstance(x, bool) or not isinstance(x, types.get(name, int | float)):
                return None
        return cls(**values)

    def correct_logit(self, logit: float) -> float:
        """Return the logit of the confidence, corrected on the pairs (Platt scaling)."""
        return self.confidence_bias + self.confidence_slope * logit

    def invalid_reason(self, view: TableView, score: str | None, weighting: str) -> str | None:
        """Return why this calibration does not hold for a query; None if it does.

        `score` and `weighting` are the names in the query, and `view` has the rows that it reads.
        """
        added = view.snapshot.last_id - self.last
        changed = added + (self.rows + added - len(view))
        if view.setting_number("encoded") != self.encoded:
            return "the keys were encoded again since the calibration: call calibrate(pairs) again"
        if changed > MAX_CHANGED_SHARE * self.rows:
            return (
                f"{changed:,} rows were added or removed since the calibration on {self.rows:,}: "
                "call calibrate(pairs) again"
            )
        if (score, weighting) != (self.score, self.weighting):
            options = ((score, weighting), (self.score, self.weighting))
            requested, calibrated = (f"score={s!r} and weighting={w!r}" for s, w in options)
            return f"the query has {requested}, but the calibration has {calibrated}"
        return None


def load_calibration(view: TableView, score: Any, weighting: Any) -> Calibration | str:
    """Return the calibration that holds for this score and weighting, or the reason why not."""
    calibration = Calibration.read_from_view(view)
    if calibration is None:
        return UNCALIBRATED_MESSAGE
    try:
        names = _format_components(score, weighting)
    except (
        ArgumentError,
        DtypeError,
    ) as error:  # a function without a name cannot have been calibrated
        return str(error)
    return calibration.invalid_reason(view, *names) or calibration


def calibrate(
    view: TableView, pairs: Iterable[Any], coverage: float, score: Any, weighting: Any
) -> Calibration:
    """Compute the calibration from (query, right key) pairs.

    Every fourth pair calibrates the minimum of the best score. The others calibrate the minimum
    weight.
    """
    pairs = list_pairs(pairs, "calibrate", "right key")
    if not 0 < validate_fraction("calibrate: coverage", coverage) < 1:
        raise ArgumentError(f"calibrate: coverage must be between 0 and 1, not {coverage!r}")
    miss_rate, names = 1 - coverage, _format_components(score, weighting)
    resolved = weightings.resolve(weighting)
    if not resolved.is_convex:
        raise CombinationError(
            f"calibrate: the weights of {type(resolved).__name__} do not sum to 1 and cannot be "
            "compared: use a weighting such as softmax"
        )
    min_pairs = math.ceil(1 / miss_rate - 1 - ROUNDING_TOLERANCE)
    queries, right_keys = split_pairs(view, pairs, "calibrate", "right key")
    positions = _find_row_positions(view, right_keys)
    is_score_pair = np.arange(len(positions)) % FOREIGN_PAIR_STEP == FOREIGN_PAIR_STEP - 1
    if np.count_nonzero(~is_score_pair) < min_pairs:
        raise ArgumentError(
            f"calibrate: a coverage of {coverage:g} needs at least "
            f"{math.ceil(min_pairs * FOREIGN_PAIR_STEP / 3)} pairs, not {len(positions)}: pass "
            "more pairs or a smaller coverage"
        )
    scan = RowScan(view, view.resolve_score(score), resolved, view.select_rows())
    parts: list[np.ndarray] = []
    for batch, weighed, _ in scan.run_batches(queries, False):
        start = sum(map(len, parts))
        weights = scan.expand_to_all_rows(weighed.weights)
        batch_positions = positions[start : start + len(batch)]
        right = [row[rows].max() for row, rows in zip(weights, batch_positions, strict=True)]
        parts.append(np.stack([right, weights.max(axis=1), weighed.best_score], axis=1))
    right_weight, top_weight, best_score = np.concatenate(parts).astype(float).T
    min_score = lower_quantile_bound(best_score[is_score_pair], miss_rate / 2)
    min_score -= ROUNDING_TOLERANCE * abs(min_score) if min_score > -math.inf else 0
    is_familiar = best_score >= min_score
    min_weight = lower_quantile_bound(
        np.where(is_familiar, right_weight, 0)[~is_score_pair], miss_rate
    )
    min_weight = max(min_weight * (1 - ROUNDING_TOLERANCE), 0.0)
    return Calibration(
        coverage=float(coverage),
        weight=min_weight,
        best=min_score,
        pairs=len(positions),
        silent=float(np.mean(~is_familiar | (top_weight < min_weight))),
        score=names[0],
        weighting=names[1],
        rows=len(view),
        last=view.snapshot.last_id,
        encoded=view.setting_number("encoded"),
    )


def lower_quantile_bound(x: np.ndarray, share: float) -> float:
    """Return a bound such that a new number is below it with probability at most `share`.

    The bound is the k-th smallest number of x with k = ⌊share (n + 1)⌋, or −∞ if k is 0.

    >>> lower_quantile_bound(np.arange(1.0, 20.0), 0.1)
    2.0
    """
    k = int(share * (len(x) + 1) + ROUNDING_TOLERANCE)
    return float(np.sort(x)[k - 1]) if k else -math.inf


def _format_components(score: Any, weighting: Any) -> tuple[str | None, str]:
    """Return the names of the score (None for the default) and the weighting, with parameters."""
    named = None if score is None else parsing.format_component(score, scores.NAMES)
    return named, parsing.format_component(weighting, weightings.NAMES)


def _find_row_positions(view: TableView, right: Sequence[Any]) -> list[np.ndarray]:
    """Return, for each key, the positions (array) of the rows with this key."""
    positions: list[np.ndarray] = []
    positions_by_digest: dict[bytes, np.ndarray] = {}
    for i, key in enumerate(right):
        digest = cells.key_digest(key)
        if digest not in positions_by_digest:
            ids = np.array(view.find_ids(key), np.int64)
            candidates = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
            positions_by_digest[digest] = candidates[view.ids[candidates] == ids]
        if not len(positions_by_digest[digest]):
            raise ArgumentError(
                f"calibrate: pairs[{i}] has the right key {key!r}, which no row has: add it first"
            )
        positions.append(positions_by_digest[digest])
    return positions
