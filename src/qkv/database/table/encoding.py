"""Keys turned into vectors: of new rows, and of all rows anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.database.errors import RowNotFoundError, StoreDamagedError
from qkv.database.table import cells, columns, quantization
from qkv.database.table.schema import ColumnData, Schema
from qkv.database.table.view import TableView
from qkv.errors import ArgumentError
from qkv.frameworks import threads
from qkv.frameworks.ragged import DenseAndSparse, Ragged, concat_ragged, entry_positions
from qkv.frameworks.stored_rows import RowChunk
from qkv.util.types import ProgressCallback

if TYPE_CHECKING:
    from qkv.database.encoders import Encoder

KEYS_PER_BLOCK = 8192
"""Keys that are encoded together, between two reports of progress."""

TensorBlocks = Iterator[tuple[np.ndarray, dict[str, Any]]]
"""Ids and tensors of rows, some at a time."""


def fit_encoder(wish: Encoder, keys: Any) -> tuple[Encoder, dict[str, Any]]:
    """The encoder fitted to the keys, and what the settings say: with twice how many it is fitted
    anew."""
    made = wish.fit(keys)
    learned = bool(made.arrays()) or made.settings() != wish.settings()
    learned = learned and not made.is_identity  # of vectors their width alone, which stays
    return made, describe_encoder(made, len(keys) if learned else wish.min_fit_keys // 2)


def describe_encoder(encoder: Encoder, keys: int) -> dict[str, Any]:
    """An encoder that was fitted to so many keys, as the settings of a database tell of it."""
    return {"encoder": encoder.settings(), "fitted": keys}


def encode_keys(
    encoder: Encoder,
    keys: Any,
    how: VectorPrecision,
    first: int,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The vectors of some keys as tensors, for rows with ids from `first` on: `code` (m, width),
    with `scale` (m,) where that is in 8 bits, `sparse` (m,) where the encoder has such beside, and
    what `codes` puts beside."""
    if len(keys) <= KEYS_PER_BLOCK:
        return encode_tensors(encoder, keys, how, first)
    if how.has_codes and not how.is_int8:
        found = encode_keys(encoder, keys, how._replace(has_codes=False), first, progress)
        return found | quantization.quantize_lazily(found["code"], first)
    if not (how.is_int8 or progress):
        return encode_tensors(encoder, keys, how, first)

    def encode_block(start: int) -> dict[str, Any]:
        return encode_tensors(encoder, keys[start : start + KEYS_PER_BLOCK], how, first + start)

    starts = range(0, len(keys), KEYS_PER_BLOCK)
    out: list[dict[str, Any]] = []
    many = 2 * threads.CORE_COUNT if encoder.encodes_in_parallel else 1
    for at in range(0, len(starts), many):
        few = starts[at : at + many]
        out += (
            threads.map_parallel(encode_block, few)
            if encoder.encodes_in_parallel
            else map(encode_block, few)
        )
        if progress is not None:
            progress(min(few[-1] + KEYS_PER_BLOCK, len(keys)), len(keys))
    parts = {name: [part[name] for part in out] for name in out[0]}
    return {n: concat_ragged(x) if n == "sparse" else np.concatenate(x) for n, x in parts.items()}


class VectorPrecision(NamedTuple):
    """How vectors are kept: `is_int8` to 8 bits, for good; as a type of number (None: as they
    come); with codes that bound them beside."""

    is_int8: bool
    dtype: str | None = None
    has_codes: bool = False


def choose_precision(encoder: Encoder, precision: str | None) -> VectorPrecision:
    """How the vectors of a new database are kept."""
    if precision is None and encoder.int8_safe:
        return VectorPrecision(is_int8=True)
    rounded = precision == "int8"  # whose bounds are all that is left of what they have lost
    return VectorPrecision(
        rounded, precision, has_codes=rounded or encoder.width >= quantization.MIN_CODED_WIDTH
    )


def encode_tensors(encoder: Encoder, keys: Any, how: VectorPrecision, first: int) -> dict[str, Any]:
    vectors, beside = np.asarray(encoder.encode(keys)), encoder.encode_sparse(keys)
    found: dict[str, Any] = {} if beside is None else {"sparse": beside}
    if how.dtype in ("float32", "float16"):
        vectors = _cast_vectors(vectors, how.dtype)
    if how.is_int8:
        code, scale = quantization.quantize_int8(vectors)
        found |= {"code": code, "scale": scale}
    else:
        found["code"] = vectors
    return found | (
        quantization.quantize_with_bounds(vectors, first, keep=not how.is_int8)
        if how.has_codes
        else {}
    )


def _cast_vectors(vectors: np.ndarray, dtype: str) -> np.ndarray:
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


def encode_as_stored(encoder: Encoder, keys: Any) -> np.ndarray:
    """The vectors of some keys as a database would keep them, (m, width)."""
    made = encode_tensors(encoder, keys, VectorPrecision(encoder.int8_safe), 0)
    return RowChunk(made["code"], scale=made.get("scale")).live_vectors()


def add_word_columns(
    encoder: Encoder, queries: Any, key: np.ndarray, beside: Ragged | None
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of queries and keys (m, d) with a column for each word of these keys `beside` them:
    whoever asks the same keys next finds them as they were."""
    query, words = encoder.encode_query(queries), encoder.encode_sparse(queries, query=True)
    if beside is None or words is None:
        return query, key
    asked = np.unique(entry_positions(beside))
    return np.asarray(DenseAndSparse(query, words, asked)), np.asarray(
        DenseAndSparse(key, beside, asked)
    )


def stores_raw_keys(encoder: Encoder, schema: Schema) -> bool:
    """Whether keys that are vectors are kept beside what the encoder makes of them."""
    return schema.key_kind == "vector" and not encoder.is_identity


def reencode_rows(
    view: TableView, encoder: Encoder, keys: Any, progress: ProgressCallback | None
) -> TensorBlocks:
    """The ids and tensors of all rows of a view, block by block, with other vectors of its keys."""
    # All that live, those among them whose file is lost.
    ids, raw = view.snapshot.live_ids(), stores_raw_keys(encoder, view.schema)
    kept = choose_precision(encoder, view.settings.get("precision"))
    # Vectors in 8 bits that are the keys: what they had lost is told by their old bounds alone.
    same = (
        encoder.is_identity
        and view.encoder.is_identity
        and kept == view.vector_precision
        and kept.is_int8
    )
    names = [
        name
        for name in ("code", "scale", *quantization.BOUND_TENSORS)
        if name in view.snapshot.tensor_names
    ]
    for start in range(0, len(ids), KEYS_PER_BLOCK):
        some, fresh = ids[start : start + KEYS_PER_BLOCK], keys[start : start + KEYS_PER_BLOCK]
        if same:
            made = {name: view.snapshot.read_tensor(name, some) for name in names}
        else:
            made = encode_tensors(encoder, fresh, kept, int(some[0]))
        if raw:
            made["key"] = fresh
        made |= _read_other_tensors(view, some)
        if progress is not None:
            progress(start + len(some), len(ids))
        yield some, made


def _read_other_tensors(view: TableView, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of some rows beside their keys' vectors: of the values and of the columns, from
    the records where their file is lost."""
    snapshot, schema = view.snapshot, view.schema
    kept = [x for x in snapshot.tensor_names if x == "value" or columns.is_column_tensor(x)]
    try:
        return {name: snapshot.read_tensor(name, ids) for name in kept}
    except (StoreDamagedError, RowNotFoundError):
        if schema.vector_columns:  # which are in no record
            raise
    rows = list(map(cells.load_row, snapshot.read_records(ids)))
    read: ColumnData = {name: [row.get(name) for row in rows] for name in schema.columns}
    pooled = schema.build_value_array(read)
    return columns.build_column_tensors(read) | ({} if pooled is None else {"value": pooled})


def add_value_tensor(
    view: TableView, width: int, progress: ProgressCallback | None
) -> TensorBlocks:
    """The ids and tensors of all rows of a view, block by block, with so many numbers as values
    beside them, of which none is there yet."""
    snapshot = view.snapshot
    ids = snapshot.live_ids()
    for start in range(0, len(ids), KEYS_PER_BLOCK):
        some = ids[start : start + KEYS_PER_BLOCK]
        found = {name: snapshot.read_tensor(name, some) for name in snapshot.tensor_names}
        if progress is not None:
            progress(start + len(some), len(ids))
        yield some, found | {"value": np.full((len(some), width), np.nan)}
