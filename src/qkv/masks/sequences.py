"""Masks from data about each sequence: its length, its documents, its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv.errors import DtypeError, ShapeError
from qkv.frameworks import get_framework
from qkv.masks.base import BlockVerdict, Mask
from qkv.masks.integers import (
    check_row_shape,
    copied_to_host,
    host_values,
    per_position,
    per_row,
    to_framework_integers,
    validate_integer,
    validate_integers,
)
from qkv.util.types import Array, Block, Shape, Span


@dataclass(frozen=True, repr=False)
class Blocks(Mask):
    layout: np.ndarray[Any, Any]
    size: tuple[int, int]
    static_fields: ClassVar[tuple[str, ...]] = ("layout",)
    is_static = True

    def __repr__(self) -> str:
        return f"blocks({self.layout.shape}, {self.size})"

    def allowed_pairs(self, block: Block) -> Array | None:
        fw = get_framework(block.q)
        rows = fw.xp.floor_divide(block.q, self.size[0])
        cols = fw.xp.floor_divide(block.k, self.size[1])
        flat = fw.xp.reshape(fw.cached_constant(self.layout, block.q, "bool"), (-1,))
        high, wide = self.layout.shape[-2:]
        at = rows * wide + cols
        if self.layout.ndim > 2:  # one layout for each head
            at = at + block.h * (high * wide)
        return fw.take_positions(flat, at)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        (tall, wide), layout = self.size, self.layout
        part = layout[
            ...,
            rows.start // tall : (rows.start + rows.size - 1) // tall + 1,
            cols.start // wide : (cols.start + cols.size - 1) // wide + 1,
        ]
        return False if not part.any() else (True if part.all() else None)

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        high, wide = self.layout.shape[-2:]
        if None not in (n, m) and (high * self.size[0] < n or wide * self.size[1] < m):
            raise ShapeError(
                f"masks.blocks: a layout of {high} × {wide} blocks of {self.size[0]} × "
                f"{self.size[1]} does not cover {n} queries × {m} keys"
            )
        if self.layout.ndim > 2 and (not lead or lead[-1] not in (self.layout.shape[0], None)):
            raise ShapeError(
                f"masks.blocks: the layout is for {self.layout.shape[0]} heads, but the scores "
                f"have shape {(*lead, n, m)}, whose axis −3 is the heads"
            )


def blocks(layout: Any, size: int | tuple[int, int]) -> Mask:
    """Query i sees key j if layout[i // size, j // size] is True.

    The layout is (blocks, blocks) or (heads, blocks, blocks). `size` is one number or a pair. A
    layout on a device is copied to the host once, when the mask is created.

    >>> blocks([[1, 0], [1, 1]], 64).layout.tolist()
    [[True, False], [True, True]]
    """
    host = copied_to_host(layout)
    if host is None:
        raise DtypeError("masks.blocks: layout must not be traced: pass a NumPy array")
    if host.ndim not in (2, 3):
        raise ShapeError(f"masks.blocks: layout must have 2 or 3 axes, not shape {host.shape}")
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        raise ShapeError(f"masks.blocks: size must be one number or a pair, not {size!r}")
    tall, wide = (validate_integer("blocks", "size", side, 1) for side in pair)
    return Blocks(host.astype(bool), (tall, wide))


@dataclass(frozen=True, repr=False)
class Lengths(Mask):
    valid: Any

    def __repr__(self) -> str:
        return f"lengths of shape {tuple(self.valid.shape)}"

    @property
    def is_shared_by_queries(self) -> bool:
        return len(self.valid.shape) == 1

    def allowed_pairs(self, block: Block) -> Array | None:
        return block.k < per_row(self.valid, block)

    def with_arrays_like(self, like: Array) -> Mask:
        return Lengths(to_framework_integers(self.valid, like))

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        host = host_values(self.valid)
        return (0, m) if host is None or not host.size else (0, min(int(host.max()), m))

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        host = host_values(self.valid)
        if host is None or not host.size:
            return None
        if cols.start >= host.max():
            return False
        return True if cols.start + cols.size <= host.min() else None

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        check_row_shape("masks.lengths: valid", self.valid, lead, n, None)


def lengths(valid: Any) -> Mask:
    """Queries see the first valid[b] keys of sequence b. valid is (B,), or (B, n) for each query.

    B is the first axis of the query. For a query without one, valid is a number, or (n,).

    >>> lengths([3, 5])
    lengths of shape (2,)
    """
    return Lengths(validate_integers("masks.lengths: valid", valid))


@dataclass(frozen=True, repr=False)
class Documents(Mask):
    query_ids: Any
    key_ids: Any
    has_key_axis: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"documents of shape {tuple(self.query_ids.shape)}"

    def allowed_pairs(self, block: Block) -> Array | None:
        q = per_position(self.query_ids, block.rows, block)
        k = per_position(self.key_ids, block.cols, block)
        fw = get_framework(block.q)
        if fw.dtype_name(q) != fw.dtype_name(k):
            q, k = (fw.astype(x, "int64") for x in (q, k))
        return q[..., :, None] == k[..., None, :]

    def with_arrays_like(self, like: Array) -> Mask:
        ids = (self.query_ids, self.key_ids)
        return Documents(*(to_framework_integers(x, like, clips=False) for x in ids))

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        q, k = host_values(self.query_ids), host_values(self.key_ids)
        if q is None or k is None:
            return [None] * len(spans)
        q = q[..., rows.start : rows.start + rows.size]
        if not q.size or not k.size:
            return [None] * len(spans)
        least, most = q.min(), q.max()
        parts = (k[..., cols.start : cols.start + cols.size] for cols in spans)
        ends = ((part.min(), part.max()) for part in parts)
        return [
            False
            if most < low or high < least
            else (True if least == most == low == high else None)
            for low, high in ends
        ]

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        check_row_shape("masks.documents: ids", self.query_ids, lead, n, n)
        check_row_shape("masks.documents: ids of the keys", self.key_ids, lead, m, m)


def documents(ids: Any, key_ids: Any = None) -> Mask:
    """Query i sees key j if both have the same id. ids is (n,) or (B, n).

    Pass key_ids, (m,) or (B, m), if the keys are not those of the queries.

    >>> documents([0, 0, 1, 1]).query_ids
    array([0, 0, 1, 1])
    """
    ids = validate_integers("masks.documents: ids", ids)
    key_ids = ids if key_ids is None else validate_integers("masks.documents: key_ids", key_ids)
    return Documents(*_renumber_ids(ids, key_ids))


def _renumber_ids(ids: Any, key_ids: Any) -> tuple[Any, Any]:
    """Renumber NumPy ids that do not fit 32 bits: other frameworks may have no 64-bit integers."""
    if not (type(ids) is type(key_ids) is np.ndarray):
        return ids, key_ids
    known, at = np.unique(np.concatenate([ids.ravel(), key_ids.ravel()]), return_inverse=True)
    if not known.size or -(2**31) <= known[0] <= known[-1] < 2**31:
        return ids, key_ids
    return at[: ids.size].reshape(ids.shape), at[ids.size :].reshape(key_ids.shape)
