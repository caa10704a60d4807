"""Keys turned into vectors: of new rows, and of all rows anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.arrays import threads
from qkv.arrays.ragged import Ragged, Wide, joined, places
from qkv.arrays.rows import Stored
from qkv.database import cells, codes, columns
from qkv.database.faults import Damaged, UnknownRow
from qkv.database.schema import Cells, Schema
from qkv.database.view import View
from qkv.errors import ArgumentError
from qkv.types import Progress

if TYPE_CHECKING:
    from qkv.database.encoders import Encoder

ENCODED = 8192
"""Keys that are encoded together, between two reports of progress."""

Blocks = Iterator[tuple[np.ndarray, dict[str, Any]]]
"""Ids and tensors of rows, some at a time."""


def fitted(wish: Encoder, keys: Any) -> tuple[Encoder, dict[str, Any]]:
    """The encoder fitted to the keys, and what the settings say: with twice how many it is fitted
    anew."""
    made = wish.fit(keys)
    learned = bool(made.arrays()) or made.settings() != wish.settings()
    learned = learned and not made.itself  # of vectors their width alone, which stays
    return made, told(made, len(keys) if learned else wish.begins // 2)


def told(encoder: Encoder, keys: int) -> dict[str, Any]:
    """An encoder that was fitted to so many keys, as the settings of a database tell of it."""
    return {"encoder": encoder.settings(), "fitted": keys}


def encoded(
    encoder: Encoder, keys: Any, how: Precision, first: int, progress: Progress | None = None
) -> dict[str, Any]:
    """The vectors of some keys as tensors, for rows with ids from `first` on: `code` (m, width),
    with `scale` (m,) where that is in 8 bits, `sparse` (m,) where the encoder has such beside, and
    what `codes` puts beside."""
    if len(keys) <= ENCODED:
        return tensors(encoder, keys, how, first)
    if how.coded and not how.rounded:
        found = encoded(encoder, keys, how._replace(coded=False), first, progress)
        return found | codes.later(found["code"], first)
    if not (how.rounded or progress):
        return tensors(encoder, keys, how, first)

    def some(start: int) -> dict[str, Any]:
        return tensors(encoder, keys[start : start + ENCODED], how, first + start)

    starts = range(0, len(keys), ENCODED)
    out: list[dict[str, Any]] = []
    many = 2 * threads.CORES if encoder.parallel else 1
    for at in range(0, len(starts), many):
        few = starts[at : at + many]
        out += threads.each(some, few) if encoder.parallel else map(some, few)
        if progress is not None:
            progress(min(few[-1] + ENCODED, len(keys)), len(keys))
    parts = {name: [part[name] for part in out] for name in out[0]}
    return {n: joined(x) if n == "sparse" else np.concatenate(x) for n, x in parts.items()}


class Precision(NamedTuple):
    """How vectors are kept: `rounded` to 8 bits, for good; as a type of number (None: as they
    come); with codes that bound them beside."""

    rounded: bool
    dtype: str | None = None
    coded: bool = False


def how(encoder: Encoder, precision: str | None) -> Precision:
    """How the vectors of a new database are kept."""
    if precision is None and encoder.rounds:
        return Precision(rounded=True)
    rounded = precision == "int8"  # whose bounds are all that is left of what they have lost
    return Precision(rounded, precision, coded=rounded or encoder.width >= codes.NARROW)


def tensors(encoder: Encoder, keys: Any, how: Precision, first: int) -> dict[str, Any]:
    vectors, beside = np.asarray(encoder.encode(keys)), encoder.sparse(keys)
    found: dict[str, Any] = {} if beside is None else {"sparse": beside}
    if how.dtype in ("float32", "float16"):
        vectors = _kept_as(vectors, how.dtype)
    if how.rounded:
        code, scale = codes.in_8_bits(vectors)
        found |= {"code": code, "scale": scale}
    else:
        found["code"] = vectors
    return found | (codes.near(vectors, first, keep=not how.rounded) if how.coded else {})


def _kept_as(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Vectors as a type of number that holds all of theirs."""
    with np.errstate(over="ignore"):
        cast = vectors.astype(dtype, copy=False)
    bad = np.flatnonzero(~np.isfinite(cast).all(axis=1))
    if len(bad):
        raise ArgumentError(
            f"key {bad[0]} has numbers beyond {np.finfo(dtype).max:.3g}, which {dtype} does not "
            "hold: open the database with another precision, or scale its keys"
        )
    return cast


def kept(encoder: Encoder, keys: Any) -> np.ndarray:
    """The vectors of some keys as a database would keep them, (m, width)."""
    made = tensors(encoder, keys, Precision(encoder.rounds), 0)
    return Stored(made["code"], scale=made.get("scale")).vectors()


def at_words(
    encoder: Encoder, queries: Any, key: np.ndarray, beside: Ragged | None
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of queries and keys (m, d) with a column for each word of these keys `beside` them:
    whoever asks the same keys next finds them as they were."""
    query, words = encoder.query(queries), encoder.sparse(queries, query=True)
    if beside is None or words is None:
        return query, key
    asked = np.unique(places(beside))
    return np.asarray(Wide(query, words, asked)), np.asarray(Wide(key, beside, asked))


def keeps_keys(encoder: Encoder, schema: Schema) -> bool:
    """Whether keys that are vectors are kept beside what the encoder makes of them."""
    return schema.key_kind == "vector" and not encoder.itself


def anew(view: View, encoder: Encoder, keys: Any, progress: Progress | None) -> Blocks:
    """The ids and tensors of all rows of a view, block by block, with other vectors of its keys."""
    # All that live, those among them whose file is lost.
    ids, raw = view.snapshot.ids(), keeps_keys(encoder, view.schema)
    kept = how(encoder, view.settings.get("precision"))
    # Vectors in 8 bits that are the keys: what they had lost is told by their old bounds alone.
    same = encoder.itself and view.encoder.itself and kept == view.kept and kept.rounded
    names = [name for name in ("code", "scale", *codes.BESIDE) if name in view.snapshot.names]
    for start in range(0, len(ids), ENCODED):
        some, fresh = ids[start : start + ENCODED], keys[start : start + ENCODED]
        if same:
            made = {name: view.snapshot.tensor(name, some) for name in names}
        else:
            made = tensors(encoder, fresh, kept, int(some[0]))
        if raw:
            made["key"] = fresh
        made |= _beside(view, some)
        if progress is not None:
            progress(start + len(some), len(ids))
        yield some, made


def _beside(view: View, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of some rows beside their keys' vectors: of the values and of the columns, from
    the records where their file is lost."""
    snapshot, schema = view.snapshot, view.schema
    kept = [x for x in snapshot.names if x == "value" or columns.is_column(x)]
    try:
        return {name: snapshot.tensor(name, ids) for name in kept}
    except (Damaged, UnknownRow):
        if schema.vectors:  # which are in no record
            raise
    rows = list(map(cells.loads, snapshot.records(ids)))
    read: Cells = {name: [row.get(name) for row in rows] for name in schema.columns}
    pooled = schema.pooled(read)
    return columns.tensors(read) | ({} if pooled is None else {"value": pooled})


def valued(view: View, width: int, progress: Progress | None) -> Blocks:
    """The ids and tensors of all rows of a view, block by block, with so many numbers as values
    beside them, of which none is there yet."""
    snapshot = view.snapshot
    ids = snapshot.ids()
    for start in range(0, len(ids), ENCODED):
        some = ids[start : start + ENCODED]
        found = {name: snapshot.tensor(name, some) for name in snapshot.names}
        if progress is not None:
            progress(start + len(some), len(ids))
        yield some, found | {"value": np.full((len(some), width), np.nan)}
