"""Packed sequences: several sequences one after the other on the axis of the rows, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework, is_array
from qkv.masks.base import BlockVerdict, Mask
from qkv.masks.integers import (
    copied_to_host,
    host_values,
    per_position,
    to_framework_integers,
    validate_integers,
)
from qkv.util.types import Array, Block, Shape, Span


@dataclass(frozen=True, repr=False)
class KeySpans(Mask):
    """Query i sees the keys bounds[0, i] … bounds[1, i] − 1.

    bounds is (2, n). query_bounds (2, m) holds the queries that see each key in the same way.
    Neither the starts nor the ends of the spans decrease.
    """

    bounds: Any
    query_bounds: Any

    def __repr__(self) -> str:
        return f"key spans of {self.bounds.shape[1]} queries"

    def allowed_pairs(self, block: Block) -> Array | None:
        start, end = (
            per_position(self.bounds[side], block.rows, block)[..., :, None] for side in (0, 1)
        )
        return get_framework(block.k).xp.logical_and(block.k >= start, block.k < end)

    def with_arrays_like(self, like: Array) -> Mask:
        return KeySpans(*(to_framework_integers(x, like) for x in (self.bounds, self.query_bounds)))

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        host = self._host_rows(rows)
        return (0, m) if host is None else (int(host[0, 0]), int(host[1, -1]))

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        host = self._host_rows(rows)
        if host is None:
            return [None] * len(spans)
        (first, last_start), (first_end, end) = host[:, [0, -1]].tolist()
        return [
            False
            if x.start >= end or x.start + x.size <= first
            else (True if last_start <= x.start and x.start + x.size <= first_end else None)
            for x in spans
        ]

    def _host_rows(self, rows: Span) -> np.ndarray[Any, Any] | None:
        host = host_values(self.bounds)
        host = None if host is None else host[:, rows.start : rows.start + rows.size]
        return None if host is None or not host.size else host

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        for name, x, size in (("cu_q", self.bounds, n), ("cu_k", self.query_bounds, m)):
            have = x.shape[1]
            if None not in (have, size) and have != size:
                raise ShapeError(
                    f"masks.packed: {name} ends with {have}, but there are {size} rows"
                )


def packed(cu_q: Any, cu_k: Any = None, causal: bool = False) -> Mask:
    """Each query sees the keys of its own sequence only: sequences lie one after the other.

    Sequence s has the queries cu_q[s] … cu_q[s + 1] − 1 and the keys cu_k[s] … cu_k[s + 1] − 1;
    without cu_k the keys are those of the queries. Both are integers (sequences + 1,) that begin
    with 0 and end with the number of rows, as in `flash_attn_varlen_func`. With `causal`, the last
    query of each sequence sees all its keys, and the query before it one key less.

    Shapes: query (…, heads, rows, d), which is `q.transpose(0, 1)` of flash-attn's (rows, heads,
    d). Offsets on a device are copied to the host once, when the mask is created.

    >>> import qkv
    >>> qkv.weights([[0.0]] * 3, [[0.0]] * 3, mask=packed([0, 2, 3]))
    array([[0.5, 0.5, 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0. , 1. ]])
    """
    own, q = _read_offsets("cu_q", cu_q)
    other, k = (own, q) if cu_k is None else _read_offsets("cu_k", cu_k)
    if len(q) != len(k):
        raise ShapeError(
            f"masks.packed: cu_q has {len(q)} offsets and cu_k {len(k)}: each sequence needs one "
            "in both"
        )
    bounds = _join_spans(q, k, causal, 1)
    is_shared = cu_k is None and not causal
    return KeySpans(
        keys := _array_like(own, bounds),
        keys if is_shared else _array_like(other, _join_spans(k, q, causal, 0)),
    )


def _join_spans(rows: Any, others: Any, causal: bool, bent: int) -> np.ndarray[Any, Any]:
    """Return the first row and the end of the others that each row sees, (2, rows).

    With `causal`, the end (`bent` 1) or the start (`bent` 0) moves on with each row, so that the
    last row sees the last of the others.
    """
    sizes = np.diff(rows)
    spans = np.stack([np.repeat(x, sizes) for x in (others[:-1], others[1:])])
    if causal:
        at = np.arange(rows[-1]) + np.repeat(others[1:] - rows[1:], sizes) + bent
        spans[bent] = np.clip(at, spans[0], spans[1])
    return spans


def _read_offsets(name: str, offsets: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return the offsets as they are, and checked on the host."""
    offsets = validate_integers(f"masks.packed: {name}", offsets)
    host = copied_to_host(offsets)
    if host is None:
        raise DtypeError(
            f"masks.packed: {name} must not be traced: pass NumPy integers, or masks.documents(ids)"
        )
    if host.ndim != 1 or len(host) < 2:
        raise ShapeError(
            f"masks.packed: {name} must be (sequences + 1,), not of shape {host.shape}"
        )
    if host[0] != 0 or (np.diff(host) < 0).any():
        raise ArgumentError(
            f"masks.packed: {name} must begin with 0 and not decrease: pass cumulative lengths, "
            "such as np.cumsum([0, *lengths])"
        )
    return offsets, host.astype(np.int64)


def _array_like(like: Any, host: np.ndarray[Any, Any]) -> Any:
    """Return int32 numbers on the framework and device of `like`."""
    host = host.astype(np.int32)
    if not is_array(like) or isinstance(like, np.ndarray):
        return host
    return get_framework(like).array_from_host(host, like, "int32")
