"""The few rows that queries look at, out of the store and back into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.arrays import of
from qkv.arrays.ragged import Query
from qkv.database.queries import encode_numbers, score_beside
from qkv.database.schema import transposed
from qkv.errors import CombinationError
from qkv.types import Array

if TYPE_CHECKING:
    from qkv.database.database import Database
    from qkv.scores import Score, ScoreLike


class Touched(NamedTuple):
    """u rows by their ids, with the vectors of their keys (u, d) and their values (u, d_v); which
    of them each query looks at, (n, k), the best first; and where there is one, (n, k)."""

    ids: np.ndarray
    key: np.ndarray
    value: np.ndarray
    at: np.ndarray
    live: np.ndarray


def asked(database: Database[Any, Any], query: Array) -> Array:
    """Queries (n, d) as they are compared: keys of numbers are encoded, with gradients."""
    view = database._filled()
    if view.schema.key_kind != "number" and not view.has_number_keys:
        return query
    return encode_numbers(view, query)[0]


def own_score(database: Database[Any, Any], query: Array) -> Score:
    """The score of the database's encoder, with its arrays where the query is."""
    return score_beside(database._filled(), None, query)


def touched(
    database: Database[Any, Any], query: Array, k: int, score: ScoreLike | None = None
) -> Touched:
    """The k rows that match each query (n, d) best, of those that have a value. Numbers are in the
    keys' own units.

    >>> from qkv import Database
    >>> D = Database(np.eye(3), np.array([[10.0], [20.0], [30.0]]))
    >>> found = touched(D, np.array([[0.0, 0.5, 1.0]]), 2)
    >>> found.value[found.at].tolist()
    [[[30.0], [20.0]]]
    """
    from qkv.attention import nearest

    view = database._filled()
    if not view.schema.pools:
        raise CombinationError(
            f"the values are of type {view.schema.value_kind}, and only numbers can be pooled: "
            "keep numbers or vectors as values"
        )
    query = asked(database, query)
    view.check(Query(query))
    allowed = view.having_values(None)[0]
    rows = view.vectors(allowed)
    scores, places = nearest(
        rows, query, min(k, rows.shape[0]), score=score_beside(view, score, query)
    )
    fw = of(query)
    live = fw.to_numpy(scores) > -np.inf
    ids = view.ids if allowed is None or rows.allowed is not None else view.ids[allowed]
    ids, at = np.unique(ids[np.where(live, fw.to_numpy(places), 0)], return_inverse=True)
    value = view.snapshot.tensor("value", ids)
    return Touched(ids, view.codes(ids), value, at.reshape(live.shape), live)


def moves_keys(database: Database[Any, Any]) -> bool:
    """Whether the keys are their own vectors, so that a row may get another."""
    view = database._filled()
    return view.schema.key_kind == "vector" and view.encoder.itself


def rewritten(
    database: Database[Any, Any], ids: np.ndarray, key: np.ndarray | None, value: np.ndarray
) -> int:
    """Other values, and other keys where given, for some rows: a new version. How many there were;
    those that went meanwhile do not come back."""
    with database._alone():
        view = database._view
        here = np.isin(ids, view.ids)
        ids, value, key = ids[here], value[here], None if key is None else key[here]
        if not len(ids):
            return 0
        schema, rows = view.schema, view.rows(ids.tolist())
        for i, row in enumerate(rows):
            if key is not None:
                row[schema.key[0]] = key[i]
            if schema.value_kind == "vector":
                row[schema.value[0]] = value[i]
            else:
                row |= dict(zip(schema.value, value[i].tolist(), strict=True))
        database._write(transposed(rows), remove=ids.tolist(), what="learn")
    return len(ids)


def forget(database: Database[Any, Any], keys: Any) -> int:
    """Take out every row of these keys; what the encoder learned of them goes too.

    Answers are then as if the rows had never been there, unless `Database.learn` was told of them
    in its pairs: what it made of these stays, until `encode` with another encoder. How many went.
    """
    with database._alone():
        gone = database.remove(keys)
        view = database._view
        if len(view) and view.count("fitted") and not view.encoder.itself:
            database.encode(what="forget")
    return gone
