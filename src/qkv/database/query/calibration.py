"""Sets of rows that hold the right one as often as promised: split-conformal, from the weights.

Of n weights of right rows a new one is below the k-th smallest with a probability of k / (n + 1) at
most. So the rows that weigh at least as much as that one, k = ⌊(1 − coverage)(n + 1)⌋, hold the
right row as often as was promised, whatever the weights mean, if questions are of the same kind.
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
from qkv.database.query.executor import QueryExecutor
from qkv.database.table import cells
from qkv.database.table.view import TableView
from qkv.errors import ArgumentError, CombinationError, DtypeError, validate_fraction

UNCALIBRATED_MESSAGE = "it was not calibrated: D.calibrate(pairs) first"

MAX_CHANGED_SHARE = 0.1
"""The share of rows that may come and go before the promise is no longer kept."""

FOREIGN_PAIR_STEP = 4
"""Every so many-th pair tells how well the best row fits a question at least; half of the doubt is
spent on that."""

ROUNDING_TOLERANCE = 1e-5
"""By how much a weight or a score may differ when it is asked for in another batch."""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found, and what it holds for.

    The set of an answer are the rows of at least this `weight`; none where the score of the best
    row is below `best`: a foreign question. `silent` is the share of the pairs that have no
    set.
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
            f"The right row is in the set with a probability of {self.coverage:.4g}: calibrated on "
            f"{self.pairs:,} pairs, {100 * self.silent:.3g} % of which have none."
        )

    def to_dict(self) -> dict[str, Any]:
        """As the settings of a store tell of it."""
        return asdict(self) | {"best": self.best if math.isfinite(self.best) else None}

    @classmethod
    def read_from_view(cls, view: TableView) -> Calibration | None:
        """The one that a store keeps; what is not of that form is none."""
        told = view.settings.get("promise")
        if not isinstance(told, dict) or {field.name for field in fields(cls)} != told.keys():
            return None
        found = told | {"best": -math.inf if told["best"] is None else told["best"]}
        kinds = {"score": str | None, "weighting": str}
        for name, x in found.items():
            if isinstance(x, bool) or not isinstance(x, kinds.get(name, int | float)):
                return None
        return cls(**found)

    def invalid_reason(self, view: TableView, score: str | None, weighting: str) -> str | None:
        """Why it says nothing of a question to these rows; None where it holds."""
        born = view.snapshot.last_id - self.last
        changed = born + (self.rows + born - len(view))
        if view.setting_number("encoded") != self.encoded:
            return "the keys were encoded anew since it was calibrated, so calibrate it again"
        if changed > MAX_CHANGED_SHARE * self.rows:
            told = f"{changed:,} rows came or went since it was calibrated on {self.rows:,}"
            return f"{told}, so calibrate it again"
        if (score, weighting) != (self.score, self.weighting):
            how = ((score, weighting), (self.score, self.weighting))
            asked, known = (f"score={s!r} and weighting={w!r}" for s, w in how)
            return f"it was asked with {asked} and calibrated with {known}"
        return None


def load_calibration(view: TableView, score: Any, weighting: Any) -> Calibration | str:
    """The promise that holds for such a question, or why the answer has no set."""
    promise = Calibration.read_from_view(view)
    if promise is None:
        return UNCALIBRATED_MESSAGE
    try:
        return promise.invalid_reason(view, *_format_components(score, weighting)) or promise
    except (ArgumentError, DtypeError) as fault:  # what has no name was not calibrated
        return str(fault)


def calibrate(
    view: TableView, pairs: Iterable[Any], coverage: float, score: Any, weighting: Any
) -> Calibration:
    """The promise that these (query, right key) pairs allow.

    A quarter of them (every fourth) says below which score of the best row a question is foreign,
    the rest how much the right row weighs.
    """
    pairs = list_pairs(pairs, "calibrate", "right key")
    if not 0 < validate_fraction("calibrate: coverage", coverage) < 1:
        raise ArgumentError(f"calibrate: coverage must lie between 0 and 1, not {coverage!r}")
    doubt, told, how = (
        1 - coverage,
        _format_components(score, weighting),
        weightings.resolve(weighting),
    )
    if not how.is_convex:
        raise CombinationError(
            f"calibrate: the weights of {type(how).__name__} do not sum to one, so that they "
            "cannot be compared: use softmax, or another that does"
        )
    least = math.ceil(1 / doubt - 1 - ROUNDING_TOLERANCE)
    queries, right = split_pairs(view, pairs, "calibrate", "right key")
    places = _find_row_positions(view, right)
    foreign = np.arange(len(places)) % FOREIGN_PAIR_STEP == FOREIGN_PAIR_STEP - 1
    if np.count_nonzero(~foreign) < least:
        raise ArgumentError(
            f"calibrate: a coverage of {coverage:g} needs "
            f"{math.ceil(least * FOREIGN_PAIR_STEP / 3)} pairs "
            f"at least, not {len(places)}: give more, or promise less"
        )
    asked = QueryExecutor(view, view.resolve_score(score), how, None, 1, None)
    parts: list[np.ndarray] = []
    for some, found, _ in asked.run_batches(queries, False):
        at = sum(map(len, parts))
        alpha = asked.expand_to_all_rows(found.weights)
        own = [
            row[right].max() for row, right in zip(alpha, places[at : at + len(some)], strict=True)
        ]
        parts.append(np.stack([own, alpha.max(axis=1), found.best_score], axis=1))
    own, top, best = np.concatenate(parts).astype(float).T
    limit = lower_quantile_bound(best[foreign], doubt / 2)
    limit -= ROUNDING_TOLERANCE * abs(limit) if limit > -math.inf else 0
    fits = best >= limit
    weight = max(
        lower_quantile_bound(np.where(fits, own, 0)[~foreign], doubt) * (1 - ROUNDING_TOLERANCE),
        0.0,
    )
    return Calibration(
        coverage=float(coverage),
        weight=weight,
        best=limit,
        pairs=len(places),
        silent=float(np.mean(~fits | (top < weight))),
        score=told[0],
        weighting=told[1],
        rows=len(view),
        last=view.snapshot.last_id,
        encoded=view.setting_number("encoded"),
    )


def lower_quantile_bound(x: np.ndarray, share: float) -> float:
    """A bound below which a new number of the same kind lies with this probability at most: the
    k-th smallest, k = ⌊share (n + 1)⌋; −∞ where there are too few to tell.

    >>> lower_quantile_bound(np.arange(1.0, 20.0), 0.1)
    2.0
    """
    k = int(share * (len(x) + 1) + ROUNDING_TOLERANCE)
    return float(np.sort(x)[k - 1]) if k else -math.inf


def _format_components(score: Any, weighting: Any) -> tuple[str | None, str]:
    """Score and weighting as text."""
    named = None if score is None else parsing.format_component(score, scores.NAMES)
    return named, parsing.format_component(weighting, weightings.NAMES)


def _find_row_positions(view: TableView, right: Sequence[Any]) -> list[np.ndarray]:
    """The places of the rows that have each of these keys."""
    found: list[np.ndarray] = []
    known: dict[bytes, np.ndarray] = {}
    for i, key in enumerate(right):
        mark = cells.key_digest(key)
        if mark not in known:
            ids = np.array(view.find_ids(key), np.int64)
            at = np.minimum(np.searchsorted(view.ids, ids), len(view.ids) - 1)
            known[mark] = at[view.ids[at] == ids]
        if not len(known[mark]):
            raise ArgumentError(
                f"calibrate: pairs[{i}] names the right key {key!r}, which no row has: add it first"
            )
        found.append(known[mark])
    return found
