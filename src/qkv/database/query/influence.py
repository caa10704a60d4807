"""The influence of rows: what an answer would be without a row, for every row at once.

If the other weights stay in proportion, Σⱼ αⱼ vⱼ without row i is (out − αᵢ vᵢ) / (1 − αᵢ).
`Weighting.divisor_without` says whether they do. For other weightings, the query is repeated
without each row that has weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from qkv.answer_backend import Row
from qkv.database.query.arguments import list_pairs, split_pairs
from qkv.database.query.scan import RowScan, as_batch, identify_value
from qkv.database.table.schema import normalize_columns
from qkv.database.table.view import ROWS_PER_CHUNK
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.util.formatting import quote_cell

MAX_NUMBERS_PER_BATCH = 2**22
"""Numbers in memory at a time for answers without a row."""

PICKLED_ROWS_PER_END = 1000
"""The best and the worst rows that a pickled `Valuation` contains, each."""


@dataclass(frozen=True)
class Valuation:
    """The value of each row for the answers to some queries.

    `worth` (m,) is the mean increase of the loss without the row. If it is negative, the answers
    would be better without the row. The loss is the squared error of a pooled value, else the share
    of the weight that wrong values have. `loss` is its mean over the `pairs`.
    """

    worth: np.ndarray
    loss: float
    pairs: int
    _rows: Callable[[np.ndarray], list[Row]] = field(repr=False, compare=False)

    def worst(self, count: int = 10) -> list[Row]:
        """Return the rows with the smallest worth, worst first, each with its mean weight."""
        return self._rows(np.argsort(self.worth, kind="stable")[:count])

    def best(self, count: int = 10) -> list[Row]:
        """Return the rows with the largest worth, best first."""
        return self._rows(np.argsort(-self.worth, kind="stable")[:count])

    def __getstate__(self) -> dict[str, Any]:
        # A pickle contains the best and the worst rows, and not the database.
        kept = {
            row.index: row
            for row in (*self.best(PICKLED_ROWS_PER_END), *self.worst(PICKLED_ROWS_PER_END))
        }
        return vars(self) | {"_rows": partial(_rows_from_pickle, kept)}


def _rows_from_pickle(rows_by_place: dict[int, Row], places: np.ndarray) -> list[Row]:
    if not all(place in rows_by_place for place in places.tolist()):
        raise CombinationError(
            f"a pickle contains only the {PICKLED_ROWS_PER_END:,} best and the "
            f"{PICKLED_ROWS_PER_END:,} worst rows: call value_of_rows again for more"
        )
    return [rows_by_place[place] for place in places.tolist()]


def compute_influence(scan: RowScan, query: Any, alpha: np.ndarray, value: Any) -> Any:
    """Return value − value without row i, for every row i.

    The result is (m,), (m, d_v), or a mapping of columns. If values are not pooled, it is the
    difference of the weight that the answer's value has.
    """
    measured = _measure_rows(scan, value)[None]
    whole, left = leave_one_out(scan, as_batch(query), alpha[None], measured)
    found = scan.expand_to_all_rows((whole - left)[0].T).T
    if isinstance(value, dict) and scan.view.schema.can_pool_values:
        return dict(zip(value, found.T, strict=True))
    return found if scan.view.schema.value_kind == "vector" else found[:, 0]


def compute_row_values(scan: RowScan, pairs: Iterable[Any]) -> Valuation:
    """Return the value of each row for the answers to (query, right value) pairs."""
    pairs = list_pairs(pairs, "value_of_rows", "right value")
    queries, right = split_pairs(scan.view, pairs, "value_of_rows", "right value")
    measure, loss = (
        _squared_error_loss if scan.view.schema.can_pool_values else _wrong_weight_loss
    )(scan, right)
    worth, weight, total, done = (
        np.zeros(scan.candidate_count),
        np.zeros(scan.candidate_count),
        0.0,
        0,
    )
    most = max(MAX_NUMBERS_PER_BATCH // max(measure(slice(0, 1)).size, 1), 1)
    for some, weighed, _ in scan.run_batches(queries, False, most):
        at = slice(done, done + len(some))
        whole, left = leave_one_out(scan, some, weighed.weights, measure(at))
        now = loss(whole, at)
        # NaN: no other row answers the query, so it says nothing about this row.
        worth += np.nan_to_num(loss(left, at) - now).sum(axis=0)
        weight += weighed.weights.sum(axis=0)
        total, done = total + float(now.sum()), at.stop
    mean = scan.expand_to_all_rows(weight / len(pairs))
    return Valuation(
        worth=scan.expand_to_all_rows(worth / len(pairs)),
        loss=total / len(pairs),
        pairs=len(pairs),
        _rows=lambda places: scan.rows_at_positions(places, mean[places]),
    )


MeasureFunction = Callable[[slice], np.ndarray]
LossFunction = Callable[[np.ndarray, slice], np.ndarray]


def _squared_error_loss(scan: RowScan, right: list[Any]) -> tuple[MeasureFunction, LossFunction]:
    """Return the pooled values, and their squared error as the loss."""
    schema, values = scan.view.schema, _measure_rows(scan, None)[None]
    try:
        named = {
            name: [y[name] for y in right] if len(schema.value) > 1 else right
            for name in schema.value
        }
        targets = schema.build_value_array(normalize_columns(named))
    except (TypeError, KeyError, ValueError):
        raise DtypeError(
            f"value_of_rows: a right value must be a {schema.value_kind}, like the stored values"
        ) from None
    assert targets is not None
    return lambda at: values, lambda out, at: ((out - targets[at][:, None]) ** 2).sum(axis=2)


def _wrong_weight_loss(scan: RowScan, right: list[Any]) -> tuple[MeasureFunction, LossFunction]:
    """Return whether each row has the right value, and the weight of wrong values as the loss."""
    known: dict[Any, np.ndarray] = {}
    for y in right:
        if scan.view.schema.value_kind == "text" and not isinstance(y, str):
            raise DtypeError(
                f"value_of_rows: a right value must be text, like the stored values, not {y!r}"
            )
        if identify_value(y) not in known:
            known[identify_value(y)] = _measure_rows(scan, y)
            if not known[identify_value(y)].any():
                raise ArgumentError(
                    f"value_of_rows: no row has the value {quote_cell(y)}: pass "
                    "(query, right value) pairs with values of the database"
                )
    return lambda at: np.stack(
        [known[identify_value(y)] for y in right[at]]
    ), lambda out, at: 1 - out[..., 0]


def leave_one_out(
    scan: RowScan, queries: Any, alpha: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return Σⱼ αⱼ vⱼ, (n, 1, d), and the same without row i for every i, (n, m, d).

    The weights are (n, m) and the values (n or 1, m, d). If no weight is left without a row, a
    pooled value is NaN, and a share of the weight is 0.
    """
    alpha, every = alpha.astype(float), np.arange(len(alpha))
    if scan.weighting.is_convex:  # remove the rounding of the weights
        total = alpha.sum(axis=1, keepdims=True)
        alpha /= np.where(total == 0, 1, total)
    share = np.where(alpha[..., None] != 0, alpha[..., None] * value, 0)
    # The heaviest row may dominate the sum, so the others are summed without it.
    top = every, np.abs(alpha).argmax(axis=1)
    others, light = share.copy(), alpha.copy()
    others[top], light[top] = 0, 0
    mass, pooled = light.sum(axis=1), others.sum(axis=1)
    weight_left = mass[:, None] + (alpha[top][:, None] - alpha)
    out = pooled[:, None] + (share[top][:, None] - share)
    weight_left[top], out[top] = mass, pooled
    pooled_all = share.sum(axis=1, keepdims=True)
    nothing = np.nan if scan.view.schema.can_pool_values else 0.0
    divisor = scan.weighting.divisor_without(weight_left)
    if divisor is None:
        out[:] = pooled_all
        again = alpha != 0 if scan.weighting.is_sparse else np.ones(alpha.shape, bool)
    else:
        again = (divisor == 0) & (alpha != 0)
        out = np.where(
            alpha[..., None] == 0, pooled_all, out / np.where(divisor == 0, 1, divisor)[..., None]
        )
    for i in np.flatnonzero(again.any(axis=0)).tolist():
        at = np.flatnonzero(again[:, i])
        scan_without = scan.without_row(
            i if scan.candidate_positions is None else int(scan.candidate_positions[i])
        )
        selected_queries = (
            queries[at] if isinstance(queries, np.ndarray) else [queries[j] for j in at]
        )
        for j, all_weights in zip(
            at, scan_without.compute_full_weights(selected_queries), strict=True
        ):
            own = (
                all_weights
                if scan.candidate_positions is None
                else all_weights[scan.candidate_positions]
            )
            held = value[j if len(value) > 1 else 0]
            out[j, i] = own @ np.where(own[:, None] != 0, held, 0) if own.any() else nothing
    return pooled_all, out


def _measure_rows(scan: RowScan, value: Any) -> np.ndarray:
    """Return what is pooled of each row, (m, d).

    It is the row's value. If values are not pooled, it is 1 for rows with this value, else 0.
    """
    view = scan.view
    if view.schema.can_pool_values:
        groups = view.open_vectors(scan.selection, value=True).iter_spans(ROWS_PER_CHUNK)
        return np.concatenate([cut.read_values() for group in groups for cut in group]).astype(
            float
        )
    if view.schema.value_kind == "text":
        holds = view.filter_rows({view.schema.value[0]: value})
    else:
        identity, ids = identify_value(value), view.ids.tolist()
        parts = (
            view.read_values(ids[at : at + ROWS_PER_CHUNK])
            for at in range(0, len(ids), ROWS_PER_CHUNK)
        )
        holds = np.array([identify_value(x) == identity for part in parts for x in part])
    assert holds is not None
    return (holds if scan.candidate_positions is None else holds[scan.candidate_positions])[
        :, None
    ].astype(float)
