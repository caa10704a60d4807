"""Rows that are read when needed, in place of the arrays key (m, d) and value (m, d_v)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import QkvError
from qkv.frameworks.base import Framework, Tiling
from qkv.frameworks.ragged import DenseAndSparse
from qkv.util.caches import insert_bounded
from qkv.util.deadline import check_deadline
from qkv.util.progress import progress_bar
from qkv.util.types import Array, Arrays, MergeFunction, PartialStateFunction, Shape, Span

SAMPLED_ROWS = 512
"""The number of rows from which a score adapts to the keys."""

MAX_FLOATS_PER_SPAN = 2**18
"""Key elements that are converted to floats at a time, so that they stay in the CPU cache."""

MAX_GATHERED_FLOATS_PER_SPAN = 2**20
"""Key elements that are gathered at a time. For fewer, threads take longer than the arithmetic."""


MAX_CACHED_SPANS, MAX_CACHED_SPAN_SIZES = 1024, 8
"""Lists of at most this number of spans are cached, for this number of sizes."""


class QuantizedKeys(NamedTuple):
    """8-bit codes of keys: the distance of each key to scale · code is at most `residual`.

    `code` is (c, d); each row has a `scale`, a `residual` and a `norm` ‖k‖. Rows with the same
    number in `block` were quantized together: for any φ, Σ (φ·(k − scale · code))² over them is at
    most `block_spread`² ‖φ‖². Every bound is rounded up. If the keys are stored only as codes, the
    optional fields are None.
    """

    code: np.ndarray
    scale: np.ndarray
    residual: np.ndarray | None = None
    norm: np.ndarray | None = None
    block_spread: np.ndarray | None = None
    block: np.ndarray | None = None

    def slice_rows(self, at: Any) -> QuantizedKeys:
        bounds = (None if x is None else x[at] for x in self[2:])
        return QuantizedKeys(self.code[at], self.scale[at], *bounds)


class RowChunk(NamedTuple):
    """Consecutive stored rows: key (c, d), value (c, d_v), and `live` (c,), True if not deleted.

    `live` None means that no row was deleted. With a `scale` (c,), the keys are stored in 8 bits,
    and the vectors are scale · key. `quantized` holds 8-bit codes of the keys and their error
    bounds; if the keys themselves are codes, only the bounds. `check_readable` raises if the file
    of the rows was truncated.
    """

    key: np.ndarray | DenseAndSparse | SelectedRows
    value: np.ndarray | SelectedRows | None = None
    live: np.ndarray | None = None
    scale: np.ndarray | None = None
    quantized: QuantizedKeys | None = None
    check_readable: Callable[[], None] | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether the original vectors are not stored, but only codes with an error bound."""
        return (
            self.scale is not None
            and self.quantized is not None
            and self.quantized.residual is not None
        )

    def slice_rows(self, at: slice) -> RowChunk:
        quantized = None if self.quantized is None else self.quantized.slice_rows(at)
        value = None if self.value is None else self.value[at]
        live, scale = (None if x is None else x[at] for x in (self.live, self.scale))
        return RowChunk(self.key[at], value, live, scale, quantized, self.check_readable)

    def sample_keys(self) -> np.ndarray:
        """Return the vectors of the first keys, from which a score adapts to the keys."""
        return self.slice_rows(slice(0, SAMPLED_ROWS)).live_vectors()

    def live_keys_and_scale(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the stored keys of the live rows, and their scale (None: 1)."""
        if self.live is None:
            return np.asarray(self.key), self.scale
        scale = None if self.scale is None else self.scale[self.live]
        return np.asarray(self.key[self.live]), scale

    def live_vectors(self) -> np.ndarray:
        """Return the key vectors of the live rows."""
        key, scale = self.live_keys_and_scale()
        if scale is None:
            return key
        key = key.astype(scale.dtype)
        key *= scale[:, None]
        return key


class SelectedRows:
    """The rows of an array at some positions; they are gathered when they are read.

    >>> rows = SelectedRows(np.eye(3), np.array([0, 2]))
    >>> len(rows), np.asarray(rows[1:]).tolist()
    (2, [[0.0, 0.0, 1.0]])
    """

    def __init__(self, array: np.ndarray, positions: np.ndarray):
        self.array, self.positions = array, positions
        self.shape, self.dtype = (len(positions), *array.shape[1:]), array.dtype

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, rows: slice | np.ndarray) -> SelectedRows:
        return SelectedRows(self.array, self.positions[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = np.take(self.array, self.positions, axis=0)
        return rows if dtype is None else rows.astype(dtype, copy=False)


def select_from_chunks(chunks: Iterable[RowChunk], positions: np.ndarray) -> Iterator[RowChunk]:
    """Yield the rows at ascending positions, counted over the live rows of all chunks.

    Their codes are left out, unless the keys are stored as codes only.
    """
    start = 0
    for chunk in chunks:
        size = len(chunk.key) if chunk.live is None else int(np.count_nonzero(chunk.live))
        begin, end = np.searchsorted(positions, (start, start + size))
        at, start = positions[begin:end] - start, start + size
        if not len(at):
            continue
        at = at if chunk.live is None else np.flatnonzero(chunk.live)[at]
        key: Any = chunk.key
        key = key[at] if isinstance(key, DenseAndSparse) else SelectedRows(key, at)
        values: Any = chunk.value
        value = None if values is None else SelectedRows(values, at)
        scale = None if chunk.scale is None else chunk.scale[at]
        quantized = None
        if chunk.quantized is not None and chunk.scale is not None:
            quantized = chunk.quantized.slice_rows(at)
        yield RowChunk(key, value, None, scale, quantized, chunk.check_readable)


class KeyTermsCache(NamedTuple):
    """The key terms (m,) of the rows of a table, by score and dtype.

    `positions` are those of the rows that are read, or None for all rows. `read_sample` returns the
    key vectors of the first rows of the table, whichever rows are read. For each dtype, `adapted`
    has the last score that was adapted to this sample, and the adapted score.
    """

    arrays: dict[Any, np.ndarray]
    total: int
    positions: np.ndarray | None = None
    read_sample: Callable[[], np.ndarray] | None = None
    adapted: dict[str, tuple[Any, Any]] | None = None

    def rows_of(self, span: RowSpan) -> slice | np.ndarray:
        """Return where the rows of a span are in the arrays."""
        at = slice(span.start, span.start + span.size)
        return at if self.positions is None else self.positions[at]


class RowSpan(NamedTuple):
    """The live rows start … start + size − 1, read when needed."""

    start: int
    size: int
    chunk: RowChunk
    allowed: np.ndarray | None = None
    first_new: None = None
    is_unmasked: bool = False

    def check_readable(self) -> None:
        """Raise if the file was truncated: reading missing pages would kill the process."""
        if self.chunk.check_readable is not None:
            self.chunk.check_readable()

    def read_keys(self) -> np.ndarray:
        return self.chunk.live_vectors()

    def read_keys_at(self, at: np.ndarray) -> np.ndarray:
        """Return the key vectors at these positions of the span."""
        chunk = self.chunk
        at = at if chunk.live is None else np.flatnonzero(chunk.live)[at]
        scale = None if chunk.scale is None else chunk.scale[at]
        return RowChunk(np.asarray(chunk.key[at]), scale=scale).live_vectors()

    def quantized_at(self, at: np.ndarray) -> QuantizedKeys:
        """Return the error bounds at these positions of the span, without the codes."""
        quantized, live = self.chunk.quantized, self.chunk.live
        assert quantized is not None
        at = at if live is None else np.flatnonzero(live)[at]
        bounds = (None if x is None else x[at] for x in quantized[2:4])
        return QuantizedKeys(quantized.code[:0], quantized.scale[at], *bounds)

    def read_values(self, at: np.ndarray | None = None) -> np.ndarray:
        """Return the values, or those at these positions of the span."""
        value, live = self.chunk.value, self.chunk.live
        assert value is not None
        if at is not None:
            return np.asarray(value[at if live is None else np.flatnonzero(live)[at]])
        return np.asarray(value if live is None else value[live])

    def allowed_mask(self, fw: Framework, like: Array) -> Array | None:
        """Return which rows are allowed, (1, c), or None if all are."""
        return (
            None if self.allowed is None else fw.array_from_host(self.allowed[None], like, "bool")
        )


class StoredRows:
    """m live rows that are read in chunks.

    - `read_chunks()` yields all chunks in order.
    - `shape` is (m, d), and `value_width` is d_v.
    - `allowed` (m,) excludes rows; None allows all.
    - `reads_chunks_separately`: each chunk is processed before the next one is read, because the
      rows do not fit in memory.
    - `key_terms_cache` caches the key terms of scores.
    - `bounds_cache` caches bounds of row spans, by start and size, and sums over blocks of rows.
    - `prefetch_chunks(fields)` is like `read_chunks`, and may read the named fields in advance.
    - `caches_spans`: the chunks stay the same, and the spans are built once for each size.

    >>> keys = np.arange(6.0).reshape(3, 2)
    >>> rows = StoredRows(lambda: [RowChunk(keys, live=np.array([True, False, True]))], (2, 2))
    >>> [[span.read_keys().tolist() for span in spans] for spans in rows.iter_spans(2)]
    [[[[0.0, 1.0]], [[4.0, 5.0]]]]
    """

    def __init__(
        self,
        read_chunks: Callable[[], Iterable[RowChunk]],
        shape: Shape,
        value_width: int = 0,
        allowed: np.ndarray | None = None,
        reads_chunks_separately: bool = False,
        key_terms_cache: KeyTermsCache | None = None,
        bounds_cache: dict[Any, Any] | None = None,
        prefetch_chunks: Callable[[Collection[str]], Iterable[RowChunk]] | None = None,
        caches_spans: bool = False,
    ):
        self.read_chunks = read_chunks
        self.span_cache: dict[tuple[int, bool], list[RowSpan]] | None = {} if caches_spans else None
        self.prefetch_chunks = prefetch_chunks or (lambda fields: read_chunks())
        self.shape, self.value_width, self.allowed = shape, value_width, allowed
        self.reads_chunks_separately = reads_chunks_separately
        self.key_terms_cache = key_terms_cache or KeyTermsCache({}, shape[0])
        self.bounds_cache = {} if bounds_cache is None else bounds_cache

    # Not attributes: a reference cycle would keep the rows until the garbage collector runs.

    @property
    def key(self) -> UnreadArray:
        return UnreadArray(self, self.shape)

    @property
    def value(self) -> UnreadArray:
        return UnreadArray(self, (self.shape[0], self.value_width))

    def iter_spans(
        self,
        size: int,
        codes_only: bool = False,
        prefetch_fields: Collection[str] = ("key", "value"),
    ) -> RowSpans:
        """Return all rows in spans of at most `size` rows.

        Spans of 8-bit keys are shorter, so that the keys as floats fit the CPU cache. `codes_only`
        says that the keys are not converted. `prefetch_fields` may be read in advance.
        """
        return RowSpans(self, size, codes_only, prefetch_fields)

    def first_chunk(self) -> RowChunk | None:
        """Return the first chunk, or None if there are no rows."""
        return next(iter(self.read_chunks()), None)

    def load_all(self, fw: Framework, like: Array) -> tuple[Array, Array, Array | None]:
        """Return key and value of all live rows, and which are allowed, (1, m)."""
        keys: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for chunk in self.read_chunks():
            live = slice(None) if chunk.live is None else chunk.live
            value: Any = np.empty((len(chunk.key), 0)) if chunk.value is None else chunk.value
            keys.append(chunk.live_vectors())
            values.append(value[live])
        key, value = (to_framework_array(fw, np.concatenate(x), like) for x in (keys, values))
        allowed = self.allowed
        return (
            key,
            value,
            None if allowed is None else fw.array_from_host(allowed[None], like, "bool"),
        )


class Candidates(NamedTuple):
    """The rows that n queries are compared with, by their positions among all rows.

    - `own` (n, c): ascending positions for each query; the last ones may be `total`, which is none
    - `shared` (u,): ascending positions for all queries, which `own` does not contain
    - `total`: the number of all rows
    - `read_keys` returns the vectors (…, d) of keys at positions (…)
    - `read_values` returns the values (c, d_v) at positions (c,); None: there are none to pool
    - `cache` has the key terms of all rows
    """

    own: np.ndarray
    shared: np.ndarray
    total: int
    read_keys: Callable[[np.ndarray], np.ndarray]
    read_values: Callable[[np.ndarray], np.ndarray] | None
    cache: KeyTermsCache


class WeighedRows(NamedTuple):
    """The result of attention over stored rows, for n queries.

    - `output` (n, d_v): Σᵢ αᵢ vᵢ
    - `weights` (n, m): α
    - `entropy` (n,): the entropy of |α|
    - `lse` (n,): log Σ exp(score), for weightings that have one
    - `best_score` (n,)
    - `weight_error` (n,): bound of ½ Σ |α − exact α|; 0 if exact up to rounding
    - `rows_read`: number of keys that were read in full
    - `bound`: the error bound in mergeable form, if codes were read first
    - `bound_is_probabilistic`: whether the bound was estimated from sampled rows
    - `refusal`: why codes were not used, although a tolerance was given
    - `partial_sums`: sums from which the output was computed, mergeable with those of other rows
    - `scaled_scores` (n, m): the scores from which α was computed; only if the rows are a part
    """

    output: np.ndarray
    weights: np.ndarray
    entropy: np.ndarray | None
    lse: np.ndarray | None
    best_score: np.ndarray
    weight_error: np.ndarray | float = 0.0
    rows_read: int = 0
    bound: Any = None
    bound_is_probabilistic: bool = False
    refusal: str = ""
    partial_sums: Any = None
    scaled_scores: np.ndarray | None = None


class UnreadArray(NamedTuple):
    """A placeholder for the keys or values of stored rows, with the shape of an array."""

    rows: StoredRows
    shape: Shape


@dataclass(eq=False)
class RowSpans:
    """All rows in spans of at most `span_size` rows, in groups that are read together."""

    rows: StoredRows
    span_size: int
    codes_only: bool
    prefetch_fields: Collection[str]

    def __iter__(self) -> Iterator[list[RowSpan]]:
        if not self.rows.reads_chunks_separately:
            yield self._read_spans()
            return
        # Rows that do not fit in memory take a while to read: show progress.
        done, total = 0, self.rows.shape[0]
        with progress_bar("rows", total) as report:
            for group in self._span_groups(self.rows.prefetch_chunks(self.prefetch_fields)):
                yield group
                done += sum(span.size for span in group)
                report(done, total)

    def _read_spans(self) -> list[RowSpan]:
        """Return the spans of all chunks, from the cache if their files are unchanged."""
        cache, identity = self.rows.span_cache, (self.span_size, self.codes_only)
        spans = None if cache is None else cache.get(identity)
        if spans is not None:
            try:
                for span in spans:
                    span.check_readable()
                return spans
            except QkvError:
                pass  # reading the chunks again opens the file again, or raises
        chunks = self.rows.read_chunks()
        spans = [span for group in self._span_groups(chunks) for span in group]
        if cache is not None and len(spans) <= MAX_CACHED_SPANS:
            insert_bounded(cache, identity, spans, MAX_CACHED_SPAN_SIZES)
        return spans

    def _span_groups(self, chunks: Iterable[RowChunk]) -> Iterator[list[RowSpan]]:
        at, allowed = 0, self.rows.allowed
        for chunk in chunks:
            rows, step, group = len(chunk.key), self.span_size, []
            most = None
            if isinstance(chunk.key, SelectedRows):
                most = MAX_GATHERED_FLOATS_PER_SPAN
            elif chunk.scale is not None or isinstance(chunk.key, DenseAndSparse):
                most = MAX_FLOATS_PER_SPAN
            if most is not None and not self.codes_only:
                step = min(step, max(most // max(chunk.key.shape[1], 1), 512))
            for start in range(0, rows, step):
                check_deadline()
                part = chunk if rows <= step else chunk.slice_rows(slice(start, start + step))
                size = rows if part is chunk else len(part.key)
                if part.live is not None:
                    size, stored_size = int(np.count_nonzero(part.live)), size
                    part = part._replace(live=None) if size == stored_size else part
                span_allowed = None if allowed is None else allowed[at : at + size]
                if size:
                    group.append(RowSpan(at, size, part, span_allowed))
                at += size
            yield group


class RowReader:
    """Loops over stored rows. The loops run in Python: a compiled loop cannot read files."""

    def __init__(self, fw: Framework):
        self.fw = fw

    def fold_spans(
        self, step: Callable[[Any, RowSpan], Any], carry: Any, spans: Iterable[list[RowSpan]]
    ) -> Any:
        for group in spans:
            for span in group:
                check_deadline()
                span.check_readable()
                carry = step(carry, span)
        return carry

    def reduce_spans(
        self,
        lift: PartialStateFunction,
        merge: MergeFunction,
        start: Any,
        spans: Iterable[list[RowSpan]],
    ) -> Any:
        if self.fw.needs_equal_spans:
            return self.fold_spans(lambda state, span: merge(state, lift(span)), start, spans)

        def lift_checked(span: RowSpan) -> Any:
            check_deadline()
            span.check_readable()
            return lift(span)

        for group in spans:
            if len(group) == 1:
                start = merge(start, lift_checked(group[0]))
            else:
                start = self.fw.reduce_spans(lift_checked, merge, start, group)  # type: ignore[arg-type]
        return start

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        return Framework.map_tiles(self.fw, pool, tiling)

    def fold_tiles(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        return Framework.fold_tiles(self.fw, step, carry, tiling)


def to_framework_array(fw: Framework, x: np.ndarray | DenseAndSparse, like: Array) -> Array:
    """Convert an array that was read to the framework, dtype and device of `like`, if possible
    without a copy."""
    if fw.name == "numpy":
        return fw.block_from_host(np.asarray(x), like, fw.dtype_name(like))
    with warnings.catch_warnings():
        # Torch warns about arrays that are not writable; nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return fw.block_from_host(np.asarray(x), like, fw.dtype_name(like))
