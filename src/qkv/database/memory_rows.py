"""The rows that `nn.Memory` reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.database.query.arguments import encode_numbers, resolve_score_like
from qkv.database.table.encoding import estimate_metric
from qkv.database.table.schema import rows_to_columns
from qkv.errors import CombinationError
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import EncodedQuery
from qkv.util.types import Array

if TYPE_CHECKING:
    from qkv.database.database import Database
    from qkv.scores import Score, ScoreLike


class MemoryRows(NamedTuple):
    """The nearest rows of n queries: u distinct rows.

    `ids` (u,), the vectors `key` (u, d) and the values `value` (u, d_v) belong to these rows.
    `row_positions` (n, k) are the rows of each query, the nearest first. `is_found` (n, k) is False
    if a query has fewer than k rows.
    """

    ids: np.ndarray
    key: np.ndarray
    value: np.ndarray
    row_positions: np.ndarray
    is_found: np.ndarray


def encode_memory_query(database: Database[Any, Any], query: Array) -> Array:
    """Return queries (n, d) as vectors.

    If keys are numbers, the queries are encoded with gradients.
    """
    view = database._nonempty_view()
    if view.schema.key_kind != "number" and not view.has_number_keys:
        return query
    return encode_numbers(view, query)[0]


def own_score(database: Database[Any, Any], query: Array) -> Score:
    """Return the default score of the encoder, with its arrays on the query's device."""
    return resolve_score_like(database._nonempty_view(), None, query)


def find_memory_rows(
    database: Database[Any, Any], query: Array, k: int, score: ScoreLike | None = None
) -> MemoryRows:
    """Return the k nearest rows that have a value, for each query (n, d).

    If keys are numbers, queries have the same units.

    >>> from qkv import Database
    >>> D = Database(np.eye(3), np.array([[10.0], [20.0], [30.0]]))
    >>> rows = find_memory_rows(D, np.array([[0.0, 0.5, 1.0]]), 2)
    >>> rows.value[rows.row_positions].tolist()
    [[[30.0], [20.0]]]
    """
    from qkv.attention import find_nearest_rows

    view = database._nonempty_view()
    if not view.schema.can_pool_values:
        raise CombinationError(
            f"the values are {view.schema.value_kind}, and only numbers can be pooled: store "
            "numbers or vectors as values"
        )
    query = encode_memory_query(database, query)
    view.check_query(EncodedQuery(query))
    selection = view.select_rows()
    rows = view.open_vectors(selection)
    scores, positions = find_nearest_rows(
        rows, query, min(k, rows.shape[0]), score=resolve_score_like(view, score, query)
    )
    fw = get_framework(query)
    is_found = fw.to_numpy(scores) > -np.inf
    ids = view.ids if selection.positions is None else view.ids[selection.positions]
    ids, row_positions = np.unique(
        ids[np.where(is_found, fw.to_numpy(positions), 0)], return_inverse=True
    )
    value = view.snapshot.read_tensor("value", ids)
    return MemoryRows(
        ids, view.read_key_vectors(ids), value, row_positions.reshape(is_found.shape), is_found
    )


def can_update_keys(database: Database[Any, Any]) -> bool:
    """Return whether keys can be changed: they are vectors that no encoder has changed."""
    view = database._nonempty_view()
    return view.schema.key_kind == "vector" and view.encoder.is_identity


def update_memory_rows(
    database: Database[Any, Any], ids: np.ndarray, key: np.ndarray | None, value: np.ndarray
) -> int:
    """Write new values, and new keys unless `key` is None, as a new version.

    Return the number of updated rows. Rows that were deleted in the meantime are skipped.
    """
    with database._exclusive_lock():
        view = database._view
        exists = np.isin(ids, view.ids)
        ids, value, key = ids[exists], value[exists], None if key is None else key[exists]
        if not len(ids):
            return 0
        schema, rows = view.schema, view.read_rows(ids.tolist())
        for i, row in enumerate(rows):
            if key is not None:
                row[schema.key[0]] = key[i]
            if schema.value_kind == "vector":
                row[schema.value[0]] = value[i]
            else:
                row |= dict(zip(schema.value, value[i].tolist(), strict=True))
        database._write_rows(rows_to_columns(rows), remove=ids.tolist(), what="learn")
    return len(ids)


def forget_rows(database: Database[Any, Any], keys: Any) -> int:
    """Delete all rows with these keys, and refit the encoder without them.

    Return the number of deleted rows. If `Database.learn` was trained on pairs with these keys, the
    learned parameters still depend on them. Call `encode` with another encoder to replace these
    parameters.
    """
    with database._exclusive_lock():
        count = database.remove(keys)
        view = database._view
        if len(view) and view.setting_number("fitted"):
            if not view.encoder.is_identity:
                database.encode(what="forget")
            else:
                database._store.commit(settings=estimate_metric(view), what="forget")
    return count
