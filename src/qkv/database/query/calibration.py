"""Prediction sets: rows that contain the right one with a given probability.

This is split-conformal prediction on the weights. Among n weights of right rows, a new one is
below the k-th smallest with probability at most k / (n + 1). With k = ⌊(1 − coverage)(n + 1)⌋, the
rows of at least that weight therefore contain the right row with probability `coverage`. This
holds for any weights, if new queries are like the calibration pairs.
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
"""The share of rows that may change before the calibration becomes invalid."""

FOREIGN_PAIR_STEP = 4
"""Every fourth pair calibrates the minimum of the best score; it uses half of 1 − coverage."""

ROUNDING_TOLERANCE = 1e-5
"""The relative difference of a weight or score between two batch sizes."""


@dataclass(frozen=True)
class Calibration:
    """The result of `Database.calibrate`.

    A prediction set contains the rows of at least `weight`. It is empty if the best score is below
    `best`: then the query is unlike the calibration pairs. `silent` is the share of the pairs whose
    set is empty. The other fields say for which score, weighting and rows the guarantee holds.
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

    def __repr__(self) -> str:
        return (
            f"The prediction set contains the right row with probability {self.coverage:.4g}: "
            f"calibrated on {self.pairs:,} pairs, {100 * self.silent:.3g} % of which abstain."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form that the settings of a store have."""
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

    def invalid_reason(self, view: TableView, score: str | None, weighting: str) -> str | None:
        """Return why it does not hold for such a query to these rows, or None if it holds."""
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
            asked, calibrated = (f"score={s!r} and weighting={w!r}" for s, w in options)
            return f"the query has {asked}, but the calibration has {calibrated}"
        return None


def load_calibration(view: TableView, score: Any, weighting: Any) -> Calibration | str:
    """Return the calibration that holds for such a query, or the reason why there is none."""
    calibration = Calibration.read_from_view(view)
    if calibration is None:
        return UNCALIBRATED_MESSAGE
    try:
        names = _format_components(score, weighting)
    except (ArgumentError, DtypeError) as error:  # an unnamed function was not calibrated
        return str(error)
    return calibration.invalid_reason(view, *names) or calibration


def calibrate(
    view: TableView, pairs: Iterable[Any], coverage: float, score: Any, weighting: Any
) -> Calibration:
    """Compute the calibration from (query, right key) pairs.

    Every fourth pair calibrates the minimum of the best score, the others the minimum weight.
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
        at = sum(map(len, parts))
        weights = scan.expand_to_all_rows(weighed.weights)
        batch_positions = positions[at : at + len(batch)]
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
    """Return a bound below which a new number falls with probability at most `share`.

    It is the k-th smallest number with k = ⌊share (n + 1)⌋, or −∞ if k is 0.

    >>> lower_quantile_bound(np.arange(1.0, 20.0), 0.1)
    2.0
    """
    k = int(share * (len(x) + 1) + ROUNDING_TOLERANCE)
    return float(np.sort(x)[k - 1]) if k else -math.inf


def _format_components(score: Any, weighting: Any) -> tuple[str | None, str]:
    """Return the names of score and weighting."""
    named = None if score is None else parsing.format_component(score, scores.NAMES)
    return named, parsing.format_component(weighting, weightings.NAMES)


def _find_row_positions(view: TableView, right: Sequence[Any]) -> list[np.ndarray]:
    """Return the positions of the rows with each of these keys."""
    positions: list[np.ndarray] = []
    known: dict[bytes, np.ndarray] = {}
    for i, key in enumerate(right):
        digest = cells.key_digest(key)
        if digest not in known:
            ids = np.array(view.find_ids(key), np.int64)
            at = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
            known[digest] = at[view.ids[at] == ids]
        if not len(known[digest]):
            raise ArgumentError(
                f"calibrate: pairs[{i}] has the right key {key!r}, which no row has: add it first"
            )
        positions.append(known[digest])
    return positions
