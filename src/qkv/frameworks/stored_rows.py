"""Rows that are read when they are needed, in place of the arrays key (m, d) and value (m, d_v)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qkv.frameworks.base import Framework, Tiling
from qkv.frameworks.ragged import DenseAndSparse
from qkv.util.deadline import check_deadline
from qkv.util.progress import progress_bar
from qkv.util.types import Array, Arrays, MergeFunction, PartialStateFunction, Shape, Span

MAX_FLOATS_PER_SPAN = 2**18
"""Numbers of keys that are made floats at a time, so that they are compared in cache."""


class QuantizedKeys(NamedTuple):
    """8-bit codes beside rows: each key lies within `residual` of scale · code.

    code (c, d), and for each row: `scale`, `residual` and `norm` ‖k‖. Rows with the same number in
    `block` were rounded together: Σ (φ·(k − scale · code))² over them is at most `block_spread`²
    ‖φ‖², for any φ. Every bound is rounded up. Where the keys are the codes themselves there is
    nothing but them and their scale.
    """

    code: np.ndarray
    scale: np.ndarray
    residual: np.ndarray | None = None
    norm: np.ndarray | None = None
    block_spread: np.ndarray | None = None
    block: np.ndarray | None = None

    def slice_rows(self, at: Any) -> QuantizedKeys:
        rest = (None if x is None else x[at] for x in self[2:])
        return QuantizedKeys(self.code[at], self.scale[at], *rest)


class RowChunk(NamedTuple):
    """Rows that lie together: key (c, d), value (c, d_v), and which of them live (None: all).

    Where there is a `scale` (c,), the vectors of the keys are scale · key, kept in 8 bits. `near`
    are codes beside the keys, or what is known of keys that are codes. `check_readable` refuses
    rows whose file is not there any more.
    """

    key: np.ndarray | DenseAndSparse
    value: np.ndarray | None = None
    live: np.ndarray | None = None
    scale: np.ndarray | None = None
    quantized: QuantizedKeys | None = None
    check_readable: Callable[[], None] | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether the vectors that were given are nowhere, but for a bound."""
        return (
            self.scale is not None
            and self.quantized is not None
            and self.quantized.residual is not None
        )

    def slice_rows(self, at: slice) -> RowChunk:
        near = None if self.quantized is None else self.quantized.slice_rows(at)
        value, live, scale = (None if x is None else x[at] for x in self[1:4])
        return RowChunk(self.key[at], value, live, scale, near, self.check_readable)

    def live_keys_and_scale(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The keys that live, and what each is to be multiplied by."""
        if self.live is None:
            return np.asarray(self.key), self.scale
        scale = None if self.scale is None else self.scale[self.live]
        return np.asarray(self.key[self.live]), scale

    def live_vectors(self) -> np.ndarray:
        """The keys that live, as vectors."""
        key, scale = self.live_keys_and_scale()
        if scale is None:
            return key
        key = key.astype(scale.dtype)
        key *= scale[:, None]
        return key


class RowSpan(NamedTuple):
    """The rows at `start … start + size` among all that live, read when asked for."""

    start: int
    size: int
    chunk: RowChunk
    allowed: np.ndarray | None = None
    first_new: None = None
    is_unmasked: bool = False

    def check_readable(self) -> None:
        """Before the rows are read: the system ends a process that reads what was cut off."""
        if self.chunk.check_readable is not None:
            self.chunk.check_readable()

    def read_keys(self) -> np.ndarray:
        return self.chunk.live_vectors()

    def read_keys_at(self, at: np.ndarray) -> np.ndarray:
        """The keys of some of the rows."""
        stored = self.chunk
        at = at if stored.live is None else np.flatnonzero(stored.live)[at]
        scale = None if stored.scale is None else stored.scale[at]
        return RowChunk(np.asarray(stored.key[at]), scale=scale).live_vectors()

    def quantized_at(self, at: np.ndarray) -> QuantizedKeys:
        """What bounds the codes of some of the rows, without the codes."""
        near, live = self.chunk.quantized, self.chunk.live
        assert near is not None
        at = at if live is None else np.flatnonzero(live)[at]
        known = (None if x is None else x[at] for x in near[2:4])
        return QuantizedKeys(near.code[:0], near.scale[at], *known)

    def read_values(self, at: np.ndarray | None = None) -> np.ndarray:
        """The values, or those of some of the rows."""
        value, live = self.chunk.value, self.chunk.live
        assert value is not None
        if at is not None:
            return np.asarray(value[at if live is None else np.flatnonzero(live)[at]])
        return np.asarray(value if live is None else value[live])

    def allowed_mask(self, fw: Framework, like: Array) -> Array | None:
        """Which of the rows are allowed, (1, c); None where all are."""
        return (
            None if self.allowed is None else fw.array_from_host(self.allowed[None], like, "bool")
        )


class StoredRows:
    """m live rows. `read()` goes through them in their order; where they lie
    `reads_chunks_separately`, each of the stored is done with before the next is read. `allowed`
    (m,) rules some of them out. `key_terms_cache` has what scores have found out about the keys,
    (m,), by the kind of the score; `bounds_cache` what the rows of a cut have at most, by its start
    and size, and sums over blocks of rows. `ahead` is `read` that is told which fields are wanted
    of all rows.

    >>> keys = np.arange(6.0).reshape(3, 2)
    >>> rows = StoredRows(lambda: [RowChunk(keys, live=np.array([True, False, True]))], (2, 2))
    >>> [[cut.read_keys().tolist() for cut in cuts] for cuts in rows.iter_spans(2)]
    [[[[0.0, 1.0]], [[4.0, 5.0]]]]
    """

    def __init__(
        self,
        read: Callable[[], Iterable[RowChunk]],
        shape: Shape,
        width: int = 0,
        allowed: np.ndarray | None = None,
        apart: bool = False,
        kept: dict[Any, np.ndarray] | None = None,
        bounds: dict[Any, Any] | None = None,
        ahead: Callable[[Collection[str]], Iterable[RowChunk]] | None = None,
    ):
        self.prefetch_chunks = ahead or (lambda fields: read())
        self.read_chunks, self.allowed, self.reads_chunks_separately = read, allowed, apart
        self.key_terms_cache = {} if kept is None else kept
        self.bounds_cache = {} if bounds is None else bounds
        self.shape, self.value_width = shape, width

    # Not attributes: a ring of references would hold the rows until the collector comes by.

    @property
    def key(self) -> UnreadArray:
        return UnreadArray(self, self.shape)

    @property
    def value(self) -> UnreadArray:
        return UnreadArray(self, (self.shape[0], self.value_width))

    def iter_spans(
        self, size: int, codes: bool = False, ahead: Collection[str] = ("key", "value")
    ) -> RowSpans:
        """All rows in cuts; those whose `codes_only` alone are read need not be as short. The
        fields that are wanted of all rows may be read `ahead`."""
        return RowSpans(self, size, codes, ahead)

    def first_chunk(self) -> RowChunk | None:
        """Some of the rows, to be looked at."""
        return next(iter(self.read_chunks()), None)

    def load_all(self, fw: Framework, like: Array) -> tuple[Array, Array, Array | None]:
        """Every live row: key, value, and which are allowed, (1, m)."""
        held: list[list[np.ndarray]] = [[], []]
        for stored in self.read_chunks():
            live = slice(None) if stored.live is None else stored.live
            value = np.empty((len(stored.key), 0)) if stored.value is None else stored.value
            held[0].append(stored.live_vectors())
            held[1].append(value[live])
        key, value = (to_framework_array(fw, np.concatenate(x), like) for x in held)
        allowed = self.allowed
        return (
            key,
            value,
            None if allowed is None else fw.array_from_host(allowed[None], like, "bool"),
        )


class WeighedRows(NamedTuple):
    """What is known when all rows were read, for n queries: Σᵢ αᵢ vᵢ (n, d_v), α (n, m), the
    entropy (n,) of |α|, log Σ exp(score) (n,) for a weighting that has one, and the best score
    (n,).

    `weight_error` (n,) is how far α may lie from the exact weights (½ Σ |difference|), 0 where it
    is as exact as the dtype, `bound_is_probabilistic` where rows were drawn for it; `read` is how
    many keys were read in full; `bound` is the same as a monoid, where codes were read first;
    `refusal` says why none were, though a tolerance allowed it; `partial_sums` are what the output
    was made of, which those of other rows can be added to, and `scaled` (n, m) the scores behind α,
    if they were kept.
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
    """The keys or the values of rows, in the place of an array."""

    rows: StoredRows
    shape: Shape


@dataclass(eq=False)
class RowSpans:
    """All rows in cuts of at most so many, in groups that are read together."""

    rows: StoredRows
    span_size: int
    codes_only: bool
    prefetch_fields: Collection[str]

    def __iter__(self) -> Iterator[list[RowSpan]]:
        if not self.rows.reads_chunks_separately:
            yield [cut for group in self._span_groups(self.rows.read_chunks()) for cut in group]
            return
        # What is more than memory holds takes a while.
        done, total = 0, self.rows.shape[0]
        with progress_bar("rows", total) as tell:
            for group in self._span_groups(self.rows.prefetch_chunks(self.prefetch_fields)):
                yield group
                done += sum(cut.size for cut in group)
                tell(done, total)

    def _span_groups(self, parts: Iterable[RowChunk]) -> Iterator[list[RowSpan]]:
        at, allowed = 0, self.rows.allowed
        for stored in parts:
            rows, step, group = len(stored.key), self.span_size, []
            if not self.codes_only and (
                stored.scale is not None or isinstance(stored.key, DenseAndSparse)
            ):
                step = min(step, max(MAX_FLOATS_PER_SPAN // max(stored.key.shape[1], 1), 512))
            for start in range(0, rows, step):
                check_deadline()
                some = stored if rows <= step else stored.slice_rows(slice(start, start + step))
                size = rows if some is stored else len(some.key)
                if some.live is not None:
                    size, whole = int(np.count_nonzero(some.live)), size
                    some = some._replace(live=None) if size == whole else some
                own = None if allowed is None else allowed[at : at + size]
                if size:
                    group.append(RowSpan(at, size, some, own))
                at += size
            yield group


class RowReader:
    """The loops of a framework over rows that are read: no compiled loop can open a file."""

    def __init__(self, fw: Framework):
        self.fw = fw

    def fold_spans(
        self, step: Callable[[Any, RowSpan], Any], carry: Any, cuts: Iterable[list[RowSpan]]
    ) -> Any:
        for group in cuts:
            for cut in group:
                check_deadline()
                cut.check_readable()
                carry = step(carry, cut)
        return carry

    def reduce_spans(
        self,
        lift: PartialStateFunction,
        merge: MergeFunction,
        start: Any,
        cuts: Iterable[list[RowSpan]],
    ) -> Any:
        if self.fw.needs_equal_spans:
            return self.fold_spans(lambda state, cut: merge(state, lift(cut)), start, cuts)

        def lift_checked(cut: RowSpan) -> Any:
            check_deadline()
            cut.check_readable()
            return lift(cut)

        for group in cuts:
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
    """An array that was read, as the framework's own beside `like`; where it can, not copied."""
    with warnings.catch_warnings():
        # Torch warns that the file must not be written to; nothing here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return fw.block_from_host(np.asarray(x), like, fw.dtype_name(like))
