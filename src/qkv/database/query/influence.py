"""Whose doing an answer was: what it would have been without a row, for every row at once.

Where the other weights stay in proportion, Σⱼ αⱼ vⱼ without row i is (out − αᵢ vᵢ) / (1 − αᵢ).
Weightings say themselves whether they do (`Weighting.without`); for the others the rows that have
weight are left out one after the other, and the rest is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from qkv.answer_backend import Row
from qkv.database.query.arguments import list_pairs, split_pairs
from qkv.database.query.executor import QueryExecutor, as_batch, identify_value
from qkv.database.table.schema import normalize_columns
from qkv.database.table.view import ROWS_PER_CHUNK
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.util.formatting import quote_cell

MAX_NUMBERS_PER_BATCH = 2**22
"""Numbers of answers without a row that are held together."""

PICKLED_ROWS_PER_END = 1000
"""Rows at both ends that a pickle of what rows are worth holds."""


@dataclass(frozen=True)
class Valuation:
    """What each row does for the answers to some questions.

    `worth` (m,) is by how much the loss would grow without the row, on average over the `pairs`:
    below 0 they would be better answered without it. The loss is the square of what the value is
    off, or where values are not pooled, the share of the weight that wrong values have.
    """

    worth: np.ndarray
    loss: float
    pairs: int
    _rows: Callable[[np.ndarray], list[Row]] = field(repr=False, compare=False)

    def worst(self, count: int = 10) -> list[Row]:
        """The rows that do the most harm, the worst first; each with its mean weight."""
        return self._rows(np.argsort(self.worth, kind="stable")[:count])

    def best(self, count: int = 10) -> list[Row]:
        """The rows that help most, the best first."""
        return self._rows(np.argsort(-self.worth, kind="stable")[:count])

    def __getstate__(self) -> dict[str, Any]:
        """What it says, with the best and the worst rows; the database stays behind."""
        kept = {
            row.index: row
            for row in (*self.best(PICKLED_ROWS_PER_END), *self.worst(PICKLED_ROWS_PER_END))
        }
        return vars(self) | {"_rows": partial(_rows_from_pickle, kept)}


def _rows_from_pickle(kept: dict[int, Row], places: np.ndarray) -> list[Row]:
    if not all(place in kept for place in places.tolist()):
        raise CombinationError(
            f"a pickle holds the {PICKLED_ROWS_PER_END:,} best and the {PICKLED_ROWS_PER_END:,} "
            "worst rows: for more, valuate again"
        )
    return [kept[place] for place in places.tolist()]


def compute_influence(asked: QueryExecutor, query: Any, alpha: np.ndarray, value: Any) -> Any:
    """The answer's value minus that without row i, for every row: (m,), (m, d_v), or of several
    columns a mapping of them. Where values are not pooled, the same of the weight that the answer's
    value has."""
    measured = _measure_rows(asked, value)[None]
    whole, left = leave_one_out(asked, as_batch(query), alpha[None], measured)
    found = asked.expand_to_all_rows((whole - left)[0].T).T
    if isinstance(value, dict) and asked.view.schema.can_pool_values:
        return dict(zip(value, found.T, strict=True))
    return found if asked.view.schema.value_kind == "vector" else found[:, 0]


def compute_row_values(asked: QueryExecutor, pairs: Iterable[Any]) -> Valuation:
    """What each row does for the answers to these (query, right value) pairs."""
    pairs = list_pairs(pairs, "valuate", "right value")
    queries, right = split_pairs(asked.view, pairs, "valuate", "right value")
    measure, loss = (
        _squared_error_loss if asked.view.schema.can_pool_values else _wrong_weight_loss
    )(asked, right)
    worth, weight, total, done = (
        np.zeros(asked.candidate_count),
        np.zeros(asked.candidate_count),
        0.0,
        0,
    )
    most = max(MAX_NUMBERS_PER_BATCH // max(measure(slice(0, 1)).size, 1), 1)
    for some, weighed, _ in asked.run_batches(queries, False, most):
        at = slice(done, done + len(some))
        whole, left = leave_one_out(asked, some, weighed.weights, measure(at))
        now = loss(whole, at)
        # What only this row answers tells nothing of it.
        worth += np.nan_to_num(loss(left, at) - now).sum(axis=0)
        weight += weighed.weights.sum(axis=0)
        total, done = total + float(now.sum()), at.stop
    mean = asked.expand_to_all_rows(weight / len(pairs))
    return Valuation(
        worth=asked.expand_to_all_rows(worth / len(pairs)),
        loss=total / len(pairs),
        pairs=len(pairs),
        _rows=lambda places: asked.rows_at_positions(places, mean[places]),
    )


MeasureFunction = Callable[[slice], np.ndarray]
LossFunction = Callable[[np.ndarray, slice], np.ndarray]


def _squared_error_loss(
    asked: QueryExecutor, right: list[Any]
) -> tuple[MeasureFunction, LossFunction]:
    """Values that are pooled, and the square of what their sum is off."""
    schema, values = asked.view.schema, _measure_rows(asked, None)[None]
    try:
        named = {
            name: [y[name] for y in right] if len(schema.value) > 1 else right
            for name in schema.value
        }
        wish = schema.build_value_array(normalize_columns(named))
    except (TypeError, KeyError, ValueError):
        told = f"a {schema.value_kind}, as the values of this database are"
        raise DtypeError(f"valuate: a right value must be {told}") from None
    assert wish is not None
    return lambda at: values, lambda out, at: ((out - wish[at][:, None]) ** 2).sum(axis=2)


def _wrong_weight_loss(
    asked: QueryExecutor, right: list[Any]
) -> tuple[MeasureFunction, LossFunction]:
    """Whether a row holds the right value, and the share of the weight that wrong ones have."""
    known: dict[Any, np.ndarray] = {}
    for y in right:
        if asked.view.schema.value_kind == "text" and not isinstance(y, str):
            told = "text, as the values of this database are"
            raise DtypeError(f"valuate: a right value must be {told}, not {y!r}")
        if identify_value(y) not in known:
            known[identify_value(y)] = _measure_rows(asked, y)
            if not known[identify_value(y)].any():
                told = "so no answer could be right: pairs are (query, right value)"
                raise ArgumentError(f"valuate: no row has the value {quote_cell(y)}, {told}")
    return lambda at: np.stack(
        [known[identify_value(y)] for y in right[at]]
    ), lambda out, at: 1 - out[..., 0]


def leave_one_out(
    asked: QueryExecutor, queries: Any, alpha: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Σⱼ αⱼ vⱼ, and what it would be had row i not been there, for every i: weights (n, m) and
    values (n or 1, m, d) of the rows that were asked → (n, 1, d) and (n, m, d). Where
    nothing is left, a value is NaN, and a share 0."""
    alpha, every = alpha.astype(float), np.arange(len(alpha))
    if asked.weighting.is_convex:  # as exactly as its digits allow
        total = alpha.sum(axis=1, keepdims=True)
        alpha /= np.where(total == 0, 1, total)
    share = np.where(alpha[..., None] != 0, alpha[..., None] * value, 0)
    # The heaviest row may have all but the last digits of the sum, so that the others are summed.
    top = every, np.abs(alpha).argmax(axis=1)
    others, light = share.copy(), alpha.copy()
    others[top], light[top] = 0, 0
    mass, pooled = light.sum(axis=1), others.sum(axis=1)
    rest = mass[:, None] + (alpha[top][:, None] - alpha)
    out = pooled[:, None] + (share[top][:, None] - share)
    rest[top], out[top] = mass, pooled
    whole = share.sum(axis=1, keepdims=True)
    nothing = np.nan if asked.view.schema.can_pool_values else 0.0
    by = asked.weighting.divisor_without(rest)
    if by is None:
        out[:] = whole
        again = alpha != 0 if asked.weighting.is_sparse else np.ones(alpha.shape, bool)
    else:
        again = (by == 0) & (alpha != 0)
        out = np.where(alpha[..., None] == 0, whole, out / np.where(by == 0, 1, by)[..., None])
    for i in np.flatnonzero(again.any(axis=0)).tolist():
        at = np.flatnonzero(again[:, i])
        left = asked.without_row(
            i if asked.candidate_positions is None else int(asked.candidate_positions[i])
        )
        some = queries[at] if isinstance(queries, np.ndarray) else [queries[j] for j in at]
        for j, found in zip(at, left.compute_full_weights(some), strict=True):
            own = found if asked.candidate_positions is None else found[asked.candidate_positions]
            held = value[j if len(value) > 1 else 0]
            out[j, i] = own @ np.where(own[:, None] != 0, held, 0) if own.any() else nothing
    return whole, out


def _measure_rows(asked: QueryExecutor, value: Any) -> np.ndarray:
    """What is summed of each row that was asked, (m, d): its value, or where values are not pooled,
    1 where it is this value."""
    view = asked.view
    if view.schema.can_pool_values:
        groups = view.open_vectors(asked.allowed_rows, value=True).iter_spans(ROWS_PER_CHUNK)
        return np.concatenate([cut.read_values() for group in groups for cut in group]).astype(
            float
        )
    if view.schema.value_kind == "text":
        holds = view.filter_rows({view.schema.value[0]: value})
    else:
        wish, ids = identify_value(value), view.ids.tolist()
        parts = (
            view.read_values(ids[at : at + ROWS_PER_CHUNK])
            for at in range(0, len(ids), ROWS_PER_CHUNK)
        )
        holds = np.array([identify_value(x) == wish for part in parts for x in part])
    assert holds is not None
    return (holds if asked.candidate_positions is None else holds[asked.candidate_positions])[
        :, None
    ].astype(float)
