"""The rows from which `left_out_error` estimates how wrong answers are: new ones, or of a view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qkv.database.encoders import neighbours
from qkv.database.encoders.base import Encoder
from qkv.database.table import cells
from qkv.database.table.left_out_error import (
    ENCODER_KINDS,
    MIN_EXAMPLES,
    MIN_QUERIES,
    estimate_left_out_error,
)
from qkv.database.table.schema import ColumnData, Schema
from qkv.database.table.view import TableView
from qkv.errors import QkvError
from qkv.frameworks import is_array, to_numpy

MAX_ROWS, MAX_NUMBERS = 2**14, 2**25
"""The rows that are read, and the numbers in their keys."""


def describe_left_out_error(
    schema: Schema,
    encoder: Encoder,
    keys: Any,
    columns: ColumnData,
    view: TableView | None = None,
    ids: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the estimate as a setting; empty if there is none.

    `keys` and `columns` are new rows. `ids` are the ids of older rows of the view. If `columns` is
    empty, `keys` are those of all rows of the view instead: they get new vectors.
    """
    if encoder.kind not in ENCODER_KINDS:
        return {}
    try:
        if not columns and view is not None:
            ids = view.ids
            if len(ids) != len(keys):  # some rows of the store are lost
                return {}
        old_count = 0 if ids is None else len(ids)
        count = old_count + (len(keys) if columns else 0)
        if count < MIN_EXAMPLES:
            return {}
        most = min(MAX_ROWS, max(MAX_NUMBERS // max(encoder.width, 1), MIN_QUERIES))
        at = neighbours.sample_positions(count, most)
        old, new = at[at < old_count], at[at >= old_count] - old_count
        parts = []
        if len(old):
            assert view is not None and ids is not None
            vectors = None if columns else encoder.encode(_take(keys, old))
            parts.append(_read_examples(view, ids[old], vectors))
        if len(new):
            cells_by_name = {name: _take(columns[name], new) for name in schema.value}
            parts.append((encoder.encode(_take(keys, new)), _read_values(schema, cells_by_name)))
    except (QkvError, OSError):  # rows that cannot be read must not prevent new rows
        return {}
    vectors = np.concatenate([part[0] for part in parts])
    values: Any = [value for part in parts for value in part[1]]
    if schema.value_kind == "vector":
        values, is_present = None, np.ones(len(vectors), bool)
    elif schema.can_pool_values:
        values = np.array(values)
        is_present = np.isfinite(values).all(axis=1)
        values = values[is_present]
    else:
        is_present = np.array([value is not None for value in values])
        values = [value for value in values if value is not None]
    score, takes_mean = encoder.default_score(count), _takes_mean(schema, keys, view)
    estimate = estimate_left_out_error(vectors[is_present], values, score, takes_mean)
    if estimate is None:
        return {}
    # In the whole table, keys are nearer to each other than in the sample.
    shrink = (len(at) / count) ** (1 / vectors.shape[1])
    estimate = replace(estimate, distance=estimate.distance * shrink)
    return {"left_out_error": estimate.to_settings()}


def _read_examples(
    view: TableView, ids: np.ndarray, vectors: np.ndarray | None
) -> tuple[np.ndarray, Any]:
    """Return the vectors, unless they are passed, and the values of rows of a view."""
    vectors = view.read_key_vectors(ids) if vectors is None else vectors
    if view.schema.can_pool_values:
        return vectors, view.snapshot.read_tensor("value", ids)
    rows = view.read_rows(ids.tolist())
    return vectors, _read_values(view.schema, {x: [r[x] for r in rows] for x in view.schema.value})


def _read_values(schema: Schema, columns: ColumnData) -> Any:
    """Return values as an array (m, c) of numbers, or as hashable objects; None if missing."""
    if schema.can_pool_values:
        return schema.build_value_array(columns)
    rows = zip(*columns.values(), strict=True)
    if len(columns) == 1:
        return [None if cells.is_missing(cell) else _identify(cell) for (cell,) in rows]
    return [None if all(map(cells.is_missing, row)) else _identify(row) for row in rows]


def _take(column: Any, at: np.ndarray) -> Any:
    """Return the cells at these positions."""
    if len(at) == len(column):
        return column
    return to_numpy(column)[at] if is_array(column) else [column[i] for i in at.tolist()]


def _identify(value: Any) -> Any:
    """Return a hashable object that is equal for equal values."""
    return value if type(value) is str else cells.dump_row({"value": value})


def _takes_mean(schema: Schema, keys: Any, view: TableView | None) -> bool:
    """Return whether the value of an answer is the mean over all rows."""
    if not schema.can_pool_values:
        return False
    if schema.key_kind in ("number", "vector"):
        return True
    if view is not None and view.is_initialized and len(view):
        return view.has_only_number_keys
    key = keys[0]
    if schema.key_kind == "tuple" or isinstance(key, tuple):
        return all(cells.cell_kind(cell) == "number" for cell in key)
    return schema.key_kind == "json" and cells.is_number_list(key)
