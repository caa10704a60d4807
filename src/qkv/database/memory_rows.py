"""The rows that `nn.Memory` reads and writes: the nearest rows of each query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.database.query.arguments import encode_numbers, resolve_score_like
from qkv.database.table.schema import rows_to_columns
from qkv.errors import CombinationError
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import EncodedQuery
from qkv.util.types import Array

if TYPE_CHECKING:
    from qkv.database.database import Database
    from qkv.scores import Score, ScoreLike


class MemoryRows(NamedTuple):
    """u rows for n queries.

    `ids` (u,), the vectors of the keys `key` (u, d) and the values `value` (u, d_v).
    `row_positions` (n, k) are the rows of each query, best first, and `is_found` (n, k) is False
    where a query has fewer than k rows.
    """

    ids: np.ndarray
    key: np.ndarray
    value: np.ndarray
    row_positions: np.ndarray
    is_found: np.ndarray


def encode_memory_query(database: Database[Any, Any], query: Array) -> Array:
    """Return queries (n, d) as vectors; if keys are numbers, encode them, with gradients."""
    view = database._nonempty_view()
    if view.schema.key_kind != "number" and not view.has_number_keys:
        return query
    return encode_numbers(view, query)[0]


def own_score(database: Database[Any, Any], query: Array) -> Score:
    """Return the encoder's score, with its arrays on the query's device."""
    return resolve_score_like(database._nonempty_view(), None, query)


def find_memory_rows(
    database: Database[Any, Any], query: Array, k: int, score: ScoreLike | None = None
) -> MemoryRows:
    """Return the k best rows with a value for each query (n, d); numbers are in the keys' units.

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
    scores, places = find_nearest_rows(
        rows, query, min(k, rows.shape[0]), score=resolve_score_like(view, score, query)
    )
    fw = get_framework(query)
    live = fw.to_numpy(scores) > -np.inf
    ids = view.ids if selection.positions is None else view.ids[selection.positions]
    ids, at = np.unique(ids[np.where(live, fw.to_numpy(places), 0)], return_inverse=True)
    value = view.snapshot.read_tensor("value", ids)
    return MemoryRows(ids, view.read_key_vectors(ids), value, at.reshape(live.shape), live)


def can_update_keys(database: Database[Any, Any]) -> bool:
    """Return whether the keys are vectors that are not encoded, so that they can change."""
    view = database._nonempty_view()
    return view.schema.key_kind == "vector" and view.encoder.is_identity


def update_memory_rows(
    database: Database[Any, Any], ids: np.ndarray, key: np.ndarray | None, value: np.ndarray
) -> int:
    """Write new values, and new keys unless None, as a new version; return the number of rows.

    Rows that were deleted in the meantime are skipped.
    """
    with database._exclusive_lock():
        view = database._view
        here = np.isin(ids, view.ids)
        ids, value, key = ids[here], value[here], None if key is None else key[here]
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
    """Delete all rows with these keys, and refit the encoder without them; return their number.

    If `Database.learn` used pairs with these keys, its parameters still depend on them. Call
    `encode` with another encoder to remove them.
    """
    with database._exclusive_lock():
        count = database.remove(keys)
        view = database._view
        if len(view) and view.setting_number("fitted") and not view.encoder.is_identity:
            database.encode(what="forget")
    return count
