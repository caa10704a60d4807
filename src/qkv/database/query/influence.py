"""The influence of rows: what an answer would be without each row.

For some weightings, the other weights stay in proportion when row i is removed. Then Σⱼ αⱼ vⱼ
without row i is (out − αᵢ vᵢ) / (1 − αᵢ); `Weighting.divisor_without` returns the divisor. For
other weightings, the query is repeated without each row that has weight.
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
"""The number of numbers in memory at a time while answers without each row are computed."""

PICKLED_ROWS_PER_END = 1000
"""A pickled `Valuation` contains this number of the best rows, and of the worst rows."""


@dataclass(frozen=True)
class Valuation:
    """The value of each row for the answers to some queries.

    `worth` (m,) says for each row by how much the mean loss increases without the row. If it is
    negative, the answers are better without the row. For values that are numbers, the loss is the
    squared error. For other values, it is the share of the weight on wrong values. `loss` is the
    mean loss over all pairs, and `pairs` is the number of pairs.
    """

    worth: np.ndarray
    loss: float
    pairs: int
    _rows: Callable[[np.ndarray], list[Row]] = field(repr=False, compare=False)

    def worst(self, count: int = 10) -> list[Row]:
        """Return the rows with the smallest worth, the smallest first, with their mean weights."""
        return self._rows(np.argsort(self.worth, kind="stable")[:count])

    def best(self, count: int = 10) -> list[Row]:
        """Return the rows with the largest worth, the largest first, with their mean weights."""
        return self._rows(np.argsort(-self.worth, kind="stable")[:count])

    def __getstate__(self) -> dict[str, Any]:
        # A pickle contains only the best and the worst rows, but not the database.
        rows = {
            row.index: row
            for row in (*self.best(PICKLED_ROWS_PER_END), *self.worst(PICKLED_ROWS_PER_END))
        }
        return vars(self) | {"_rows": partial(_rows_from_pickle, rows)}


def _rows_from_pickle(rows_by_position: dict[int, Row], positions: np.ndarray) -> list[Row]:
    """Return the rows at these positions, or raise if the pickle does not contain them."""
    if not all(position in rows_by_position for position in positions.tolist()):
        raise CombinationError(
            f"a pickle contains only the {PICKLED_ROWS_PER_END:,} best and the "
            f"{PICKLED_ROWS_PER_END:,} worst rows: call value_of_rows again for more"
        )
    return [rows_by_position[position] for position in positions.tolist()]


def compute_influence(scan: RowScan, query: Any, alpha: np.ndarray, value: Any) -> Any:
    """Return the effect of each row i on an answer: its value minus its value without row i.

    The result is (m,) for numbers, (m, d_v) for vectors, and a mapping for several columns. If
    values are not pooled, it says how much each row increases the weight of the answer's value.
    """
    measured = _measure_rows(scan, value)[None]
    with_all, without_one = leave_one_out(scan, as_batch(query), alpha[None], measured)
    differences = scan.expand_to_all_rows((with_all - without_one)[0].T).T
    if isinstance(value, dict) and scan.view.schema.can_pool_values:
        return dict(zip(value, differences.T, strict=True))
    return differences if scan.view.schema.value_kind == "vector" else differences[:, 0]


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
    for batch, weighed, _ in scan.run_batches(queries, False, most):
        span = slice(done, done + len(batch))
        with_all, without_one = leave_one_out(scan, batch, weighed.weights, measure(span))
        batch_loss = loss(with_all, span)
        # NaN: without this row, no row answers the query, so the pair does not count for this row.
        worth += np.nan_to_num(loss(without_one, span) - batch_loss).sum(axis=0)
        weight += weighed.weights.sum(axis=0)
        total, done = total + float(batch_loss.sum()), span.stop
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
    """Return two functions: one returns the values to pool, the other their squared error."""
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
    """Return two functions, for values that are not pooled.

    One returns whether each row has the right value. The other returns the weight of wrong values.
    """
    has_value: dict[Any, np.ndarray] = {}
    for y in right:
        if scan.view.schema.value_kind == "text" and not isinstance(y, str):
            raise DtypeError(
                f"value_of_rows: a right value must be text, like the stored values, not {y!r}"
            )
        if identify_value(y) not in has_value:
            has_value[identify_value(y)] = _measure_rows(scan, y)
            if not has_value[identify_value(y)].any():
                raise ArgumentError(
                    f"value_of_rows: no row has the value {quote_cell(y)}: pass "
                    "(query, right value) pairs with values of the database"
                )
    return lambda at: np.stack(
        [has_value[identify_value(y)] for y in right[at]]
    ), lambda out, at: 1 - out[..., 0]


def leave_one_out(
    scan: RowScan, queries: Any, alpha: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return Σⱼ αⱼ vⱼ over all rows, (n, 1, d), and the same sum without each row i, (n, m, d).

    `alpha` are the weights (n, m), and `value` the values (n or 1, m, d). If no other row has
    weight, the sum without a row is NaN for pooled values, and 0 for shares of the weight.
    """
    alpha, every = alpha.astype(float), np.arange(len(alpha))
    if scan.weighting.is_convex:  # correct the rounding errors of the weights
        total = alpha.sum(axis=1, keepdims=True)
        alpha /= np.where(total == 0, 1, total)
    share = np.where(alpha[..., None] != 0, alpha[..., None] * value, 0)
    # The heaviest row may dominate the sum and so hide the others: sum them without it.
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
        is_repeated = alpha != 0 if scan.weighting.is_sparse else np.ones(alpha.shape, bool)
    else:
        is_repeated = (divisor == 0) & (alpha != 0)
        out = np.where(
            alpha[..., None] == 0, pooled_all, out / np.where(divisor == 0, 1, divisor)[..., None]
        )
    for i in np.flatnonzero(is_repeated.any(axis=0)).tolist():
        queries_to_repeat = np.flatnonzero(is_repeated[:, i])
        scan_without = scan.without_row(
            i if scan.candidate_positions is None else int(scan.candidate_positions[i])
        )
        selected_queries = (
            queries[queries_to_repeat]
            if isinstance(queries, np.ndarray)
            else [queries[j] for j in queries_to_repeat]
        )
        for j, all_weights in zip(
            queries_to_repeat, scan_without.compute_full_weights(selected_queries), strict=True
        ):
            candidate_weights = (
                all_weights
                if scan.candidate_positions is None
                else all_weights[scan.candidate_positions]
            )
            values = value[j if len(value) > 1 else 0]
            out[j, i] = (
                candidate_weights @ np.where(candidate_weights[:, None] != 0, values, 0)
                if candidate_weights.any()
                else nothing
            )
    return pooled_all, out


def _measure_rows(scan: RowScan, value: Any) -> np.ndarray:
    """Return the number that is pooled for each row, (m, d).

    It is the row's value if values are pooled. Otherwise it is 1 if the row has the value `value`,
    else 0.
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
            view.read_values(ids[start : start + ROWS_PER_CHUNK])
            for start in range(0, len(ids), ROWS_PER_CHUNK)
        )
        holds = np.array([identify_value(x) == identity for part in parts for x in part])
    assert holds is not None
    return (holds if scan.candidate_positions is None else holds[scan.candidate_positions])[
        :, None
    ].astype(float)
