"""Encode keys as tensors: for new rows, and for all rows again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database.errors import RowNotFoundError, StoreDamagedError
from qkv.database.table import cells, columns, quantization
from qkv.database.table.schema import ColumnData, Schema
from qkv.database.table.view import MEASURED_SETTINGS, TableView
from qkv.errors import ArgumentError, QkvError
from qkv.frameworks import threads
from qkv.frameworks.ragged import DenseAndSparse, Ragged, concat_ragged, entry_positions
from qkv.frameworks.stored_rows import RowChunk
from qkv.util.types import ProgressCallback

if TYPE_CHECKING:
    from qkv.database.encoders import Encoder

KEYS_PER_BLOCK = 8192
"""The number of keys that are encoded between two calls of `progress`."""

SPELLING_ENCODERS = ("text", "characters", "columns")
"""The kinds of encoders for which another spelling speaks against a key."""

TensorBlocks = Iterator[tuple[np.ndarray, dict[str, Any]]]
"""Yields (row ids, tensors of these rows)."""


def fit_encoder(encoder: Encoder, keys: Any) -> tuple[Encoder, dict[str, Any]]:
    """Return the encoder, fitted to the keys, and its settings.

    The settings contain the number of keys. When the database has twice as many, the encoder is
    fitted again.
    """
    fitted = encoder.fit(keys)
    has_learned = bool(fitted.arrays()) or fitted.settings() != encoder.settings()
    return fitted, describe_encoder(fitted, len(keys) if has_learned else encoder.min_fit_keys // 2)


def refit_metric(
    view: TableView, keys: Any, columns: ColumnData, remove: Collection[int]
) -> dict[str, Any] | None:
    """Return new settings if vectors that no encoder changes need a new metric, else None.

    They need one when their number has doubled since the last fit. `keys` and `columns` are those
    of new rows, and the rows with the ids `remove` are deleted.
    """
    if view.schema.key_kind != "vector" or not view.encoder.is_identity:
        return None
    count, fitted = len(view) + len(keys) - len(remove), view.setting_number("fitted")
    encoder: Any = view.encoder
    if count < 2 * fitted if fitted else encoder.metric is not None:
        return None
    try:
        return estimate_metric(view, keys, columns, remove)
    except (QkvError, OSError):
        return None  # rows that cannot be read must not prevent new rows


def estimate_metric(
    view: TableView, keys: Any = (), columns: ColumnData | None = None, remove: Collection[int] = ()
) -> dict[str, Any]:
    """Return the settings with a metric for all rows but those with the ids `remove`, and `keys`.

    The keys must be vectors that no encoder changes. `columns` are the cells of the new rows.
    """
    encoder: Any = view.encoder
    count = len(view) + len(keys) - len(remove)
    fitted = encoder.fit_metric(_sample_vectors(view, keys, remove), count)
    # The counter makes a calibration for the old metric invalid.
    encoded = {"encoded": view.setting_number("encoded") + 1}
    ids, columns = _ids_without(view, remove), columns or dict.fromkeys(view.schema.value, ())
    measured = measure_rows(view.schema, fitted, keys, columns, view, ids)
    settings = view.settings | describe_encoder(fitted, count) | encoded
    return {x: y for x, y in settings.items() if x not in MEASURED_SETTINGS} | measured


def measure_rows(
    schema: Schema,
    encoder: Encoder,
    keys: Any,
    columns: ColumnData,
    view: TableView | None = None,
    ids: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the `MEASURED_SETTINGS` that the rows have; see `describe_left_out_error`."""
    from qkv.database.query.key_match import measure_one_edit
    from qkv.database.table.left_out_rows import describe_left_out_error

    settings = describe_left_out_error(schema, encoder, keys, columns, view, ids)
    if schema.key_kind == "text" and encoder.kind in SPELLING_ENCODERS:
        settings["one_edit"] = measure_one_edit(keys)._asdict()
    return settings


def _ids_without(view: TableView, remove: Collection[int]) -> np.ndarray:
    """Return the ids of all rows but those with the ids `remove`."""
    return view.ids[~np.isin(view.ids, list(remove))] if len(remove) else view.ids


def _sample_vectors(view: TableView, keys: Any, remove: Collection[int]) -> np.ndarray:
    """Return a sample of the vectors of all rows but those with the ids `remove`, and of `keys`."""
    from qkv.database.encoders.arrays import to_float32_matrix
    from qkv.database.encoders.neighbours import MAX_SAMPLED_KEYS, sample_positions

    ids = _ids_without(view, remove)
    at = sample_positions(len(ids) + len(keys), MAX_SAMPLED_KEYS)
    old, new = at[at < len(ids)], at[at >= len(ids)] - len(ids)
    return np.concatenate(
        [
            view.read_key_vectors(ids[old]) if len(old) else np.empty((0, view.encoder.width)),
            *([to_float32_matrix(np.asarray(keys)[new])] if len(new) else []),
        ]
    )


def describe_encoder(encoder: Encoder, keys: int) -> dict[str, Any]:
    """Return the settings for an encoder that was fitted to this number of keys."""
    return {"encoder": encoder.settings(), "fitted": keys}


def encode_keys(
    encoder: Encoder,
    keys: Any,
    precision: quantization.VectorPrecision,
    first_id: int,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Return the vectors of keys as tensors, for rows whose ids start at `first_id`.

    `code` (m, width) are the vectors, and `scale` (m,) the factors of int8 vectors. `sparse` (m,)
    are sparse vectors, if the encoder has them. With `precision.has_codes`, the tensors of
    `quantization.quantize_with_bounds` are included.
    """
    if len(keys) <= KEYS_PER_BLOCK:
        return encode_tensors(encoder, keys, precision, first_id)
    if precision.has_codes and not precision.is_int8:
        plain = precision._replace(has_codes=False)
        tensors = encode_keys(encoder, keys, plain, first_id, progress)
        return tensors | quantization.quantize_lazily(tensors["code"], first_id)
    if not (precision.is_int8 or progress):
        return encode_tensors(encoder, keys, precision, first_id)

    def encode_block(start: int) -> dict[str, Any]:
        block = keys[start : start + KEYS_PER_BLOCK]
        return encode_tensors(encoder, block, precision, first_id + start)

    starts = range(0, len(keys), KEYS_PER_BLOCK)
    blocks: list[dict[str, Any]] = []
    blocks_at_once = 2 * threads.CORE_COUNT if encoder.encodes_in_parallel else 1
    for start_index in range(0, len(starts), blocks_at_once):
        group = starts[start_index : start_index + blocks_at_once]
        blocks += (
            threads.map_parallel(encode_block, group)
            if encoder.encodes_in_parallel
            else map(encode_block, group)
        )
        if progress is not None:
            progress(min(group[-1] + KEYS_PER_BLOCK, len(keys)), len(keys))
    parts = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {n: concat_ragged(x) if n == "sparse" else np.concatenate(x) for n, x in parts.items()}


def choose_precision(encoder: Encoder, precision: str | None) -> quantization.VectorPrecision:
    """Return how a new database with this encoder stores its vectors."""
    if precision is None and encoder.int8_safe:
        return quantization.VectorPrecision(is_int8=True)
    rounded = precision == "int8"
    return quantization.VectorPrecision(
        rounded, precision, has_codes=rounded or encoder.width >= quantization.MIN_CODED_WIDTH
    )


def encode_tensors(
    encoder: Encoder, keys: Any, precision: quantization.VectorPrecision, first_id: int
) -> dict[str, Any]:
    """Return the tensors of one block of keys, as `encode_keys` does."""
    vectors, sparse = np.asarray(encoder.encode(keys)), encoder.encode_sparse(keys)
    tensors: dict[str, Any] = {} if sparse is None else {"sparse": sparse}
    if precision.dtype in ("float32", "float16"):
        vectors = _cast_vectors(vectors, precision.dtype)
    if precision.is_int8:
        tensors["code"], tensors["scale"] = quantization.quantize_int8(vectors)
    else:
        tensors["code"] = vectors
    if not precision.has_codes:
        return tensors
    return tensors | quantization.quantize_with_bounds(
        vectors, first_id, with_codes=not precision.is_int8
    )


def _cast_vectors(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Return vectors in another dtype; raise `ArgumentError` if a number is too large."""
    with np.errstate(over="ignore"):
        cast = vectors.astype(dtype, copy=False)
    bad = np.flatnonzero(~np.isfinite(cast).all(axis=1))
    if len(bad):
        raise ArgumentError(
            f"key {bad[0]} has numbers beyond {np.finfo(dtype).max:.3g}, the largest {dtype}: "
            "create the database with another precision, or scale its keys"
        )
    return cast


def encode_as_stored(encoder: Encoder, keys: Any) -> np.ndarray:
    """Return the vectors of keys (m, width), rounded as a database would store them."""
    tensors = encode_tensors(encoder, keys, quantization.VectorPrecision(encoder.int8_safe), 0)
    return RowChunk(tensors["code"], scale=tensors.get("scale")).live_vectors()


def add_word_columns(
    encoder: Encoder, queries: Any, key: np.ndarray, sparse: Ragged | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors of queries and keys with additional columns: one for each word of the keys.

    `key` (m, d) are the dense vectors of the keys, and `sparse` their sparse vectors.
    """
    query, words = encoder.encode_query(queries), encoder.encode_sparse(queries, query=True)
    if sparse is None or words is None:
        return query, key
    positions = np.unique(entry_positions(sparse))
    full_query = np.asarray(DenseAndSparse(query, words, positions))
    encoded = encoder.add_group_columns(full_query, positions, queries)
    assert encoded.sparse_positions is not None
    return encoded.code, np.asarray(DenseAndSparse(key, sparse, encoded.sparse_positions))


def stores_raw_keys(encoder: Encoder, schema: Schema) -> bool:
    """Return whether keys that are vectors are stored in addition to their encoded vectors."""
    return schema.key_kind == "vector" and not encoder.is_identity


def reencode_rows(
    view: TableView, encoder: Encoder, keys: Any, progress: ProgressCallback | None
) -> TensorBlocks:
    """Yield (ids, tensors) of all rows in blocks, with the keys encoded by another encoder."""
    # These ids include rows whose segment is lost.
    ids, raw = view.snapshot.live_ids(), stores_raw_keys(encoder, view.schema)
    precision = choose_precision(encoder, view.settings.get("precision"))
    # If the keys were stored as int8, only the old bounds contain the rounding errors.
    reuses_codes = (
        encoder.is_identity
        and view.encoder.is_identity
        and precision == view.vector_precision
        and precision.is_int8
    )
    names = [
        name
        for name in ("code", "scale", *quantization.BOUND_TENSORS)
        if name in view.snapshot.tensor_names
    ]
    for start in range(0, len(ids), KEYS_PER_BLOCK):
        block_ids, block_keys = (
            ids[start : start + KEYS_PER_BLOCK],
            keys[start : start + KEYS_PER_BLOCK],
        )
        if reuses_codes:
            tensors = {name: view.snapshot.read_tensor(name, block_ids) for name in names}
        else:
            tensors = encode_tensors(encoder, block_keys, precision, int(block_ids[0]))
        if raw:
            tensors["key"] = block_keys
        tensors |= _read_other_tensors(view, block_ids)
        if progress is not None:
            progress(start + len(block_ids), len(ids))
        yield block_ids, tensors


def _read_other_tensors(view: TableView, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of values and columns.

    If the segment is lost, compute them from records.
    """
    snapshot, schema = view.snapshot, view.schema
    names = [x for x in snapshot.tensor_names if x == "value" or columns.is_column_tensor(x)]
    try:
        return {name: snapshot.read_tensor(name, ids) for name in names}
    except (StoreDamagedError, RowNotFoundError):
        if schema.vector_columns:  # vectors cannot be computed: records do not contain them
            raise
    rows = list(map(cells.load_row, snapshot.read_records(ids)))
    read: ColumnData = {name: [row.get(name) for row in rows] for name in schema.columns}
    pooled = schema.build_value_array(read)
    return columns.build_column_tensors(read) | ({} if pooled is None else {"value": pooled})


def add_value_tensor(
    view: TableView, width: int, progress: ProgressCallback | None
) -> TensorBlocks:
    """Yield (ids, tensors) of all rows in blocks, with a value tensor (m, width) of NaN."""
    snapshot = view.snapshot
    ids = snapshot.live_ids()
    for start in range(0, len(ids), KEYS_PER_BLOCK):
        block_ids = ids[start : start + KEYS_PER_BLOCK]
        tensors = {name: snapshot.read_tensor(name, block_ids) for name in snapshot.tensor_names}
        if progress is not None:
            progress(start + len(block_ids), len(ids))
        yield block_ids, tensors | {"value": np.full((len(block_ids), width), np.nan)}
