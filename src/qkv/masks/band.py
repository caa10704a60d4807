"""Masks on positions: causal, windows, strides and global tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from qkv.errors import ArgumentError
from qkv.frameworks import get_framework, is_array
from qkv.masks.base import BlockVerdict, Mask
from qkv.masks.integers import (
    MAX_POSITION,
    check_row_shape,
    host_values,
    per_row,
    to_framework_integers,
    validate_integer,
    validate_integers,
)
from qkv.util.types import Array, Block, Shape, Span


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """Allows keys i − left … i + right for the query that is aligned to key i; None: no bound."""

    left: int | None
    right: int | None
    align: str = "top_left"
    offset: Any = None

    def __post_init__(self) -> None:
        if is_array(self.align) or self.align not in ("top_left", "bottom_right"):
            received = "an array" if is_array(self.align) else repr(self.align)
            raise ArgumentError(f"align must be 'top_left' or 'bottom_right', not {received}")
        if isinstance(self.offset, int):
            clipped = max(-MAX_POSITION, min(self.offset, MAX_POSITION))
            object.__setattr__(self, "offset", clipped)
        elif self.offset is not None:
            object.__setattr__(self, "offset", validate_integers("offset", self.offset))

    @property
    def is_relative(self) -> bool:
        return self.offset is None or isinstance(self.offset, int)

    @property
    def is_static(self) -> bool:
        return self.is_relative

    def format_alignment(self) -> str:
        """Return the arguments `align` and `offset` as source text, without defaults."""
        arguments = [] if self.align == "top_left" else [f"align={self.align!r}"]
        return ", ".join(arguments + ([] if self.offset is None else [f"offset={self.offset!r}"]))

    def __repr__(self) -> str:
        bounds = [str(float("inf") if x is None else x) for x in (self.left, self.right)]
        return f"window({', '.join([*bounds, *filter(None, [self.format_alignment()])])})"

    def position_shift(self, block: Block) -> Any:
        """Return the position of query 0 among the keys."""
        if self.offset is None:
            return block.m - block.n if self.align == "bottom_right" else 0
        if isinstance(self.offset, int):
            return self.offset
        return per_row(self.offset, block)

    def allowed_pairs(self, block: Block) -> Array | None:
        xp = get_framework(block.q).xp
        at = block.q + self.position_shift(block)
        out = None
        if self.right is not None:
            out = block.k <= at + self.right
        if self.left is not None:
            near = block.k >= at - self.left
            out = near if out is None else xp.logical_and(out, near)
        return out

    def with_arrays_like(self, like: Array) -> Mask:
        if not is_array(self.offset):
            return self
        return replace(self, offset=to_framework_integers(self.offset, like))

    def shift_range(self, n: int, m: int) -> tuple[int, int] | None:
        """Return the smallest and the largest shift; None if offsets are traced or on a device."""
        if self.offset is None:
            return (m - n, m - n) if self.align == "bottom_right" else (0, 0)
        host = host_values(self.offset)
        return None if host is None or not host.size else (int(host.min()), int(host.max()))

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        shifts = self.shift_range(n, m)
        if shifts is None:
            return 0, m
        start = 0 if self.left is None else rows.start + shifts[0] - self.left
        end = m if self.right is None else rows.start + rows.size + shifts[1] + self.right
        return min(max(start, 0), m), max(min(end, m), 0)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        shifts = self.shift_range(n, m)
        if shifts is None:
            return None
        low, high = shifts
        top, bottom = rows.start, rows.start + rows.size - 1
        start, end = cols.start, cols.start + cols.size - 1
        inside = True
        if self.right is not None:
            if start > bottom + high + self.right:
                return False
            inside = inside and end <= top + low + self.right
        if self.left is not None:
            if end < top + low - self.left:
                return False
            inside = inside and start >= bottom + high - self.left
        return True if inside else None

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        if self.offset is not None and not isinstance(self.offset, int):
            check_row_shape("causal: offset", self.offset, lead, n, None)


@dataclass(frozen=True, repr=False)
class Causal(Band):
    left: int | None = None
    right: int | None = 0

    def __call__(self, align: str = "top_left", offset: Any = None) -> Mask:
        """Return the causal mask with another alignment: query i sees key j if j ≤ i + offset.

        "top_left" is offset 0. "bottom_right" is offset m − n: the last query sees every key.
        An integer array (B,) holds one offset for each sequence of the batch.
        """
        return Causal(align=align, offset=offset)

    def __repr__(self) -> str:
        return "causal" + (f"({self.format_alignment()})" if self.format_alignment() else "")


def is_plain_causal(rule: Mask | None) -> bool:
    """Return whether a rule is `causal` without options, which fused kernels support."""
    return isinstance(rule, Causal) and rule.align == "top_left" and rule.offset is None


causal = Causal()
"""Query i sees key j if j ≤ i.

>>> import qkv
>>> qkv.weights([[0.0], [0.0]], [[0.0], [0.0]], mask=causal)
array([[1. , 0. ],
       [0.5, 0.5]])
"""


def window(
    left: float, right: float | None = None, align: str = "top_left", offset: Any = None
) -> Mask:
    """Query i sees keys i − left to i + right. right=None means left; ∞ means no bound.

    `align` and `offset` are those of `causal`.

    >>> window(2) & window(float("inf"), 0)
    window(2, 2) & window(inf, 0)
    """
    right = left if right is None else right
    low, high = (
        validate_integer("window", name, value, 0) if is_array(value) or value != math.inf else None
        for name, value in (("left", left), ("right", right))
    )
    return Band(low, high, align, offset)


@dataclass(frozen=True, repr=False)
class Strided(Mask):
    step: int
    is_relative = is_static = True

    def __repr__(self) -> str:
        return f"strided({self.step})"

    def allowed_pairs(self, block: Block) -> Array | None:
        return get_framework(block.q).xp.remainder(block.q - block.k, self.step) == 0


def strided(step: int) -> Mask:
    """Query i sees key j if i − j is a multiple of step.

    >>> strided(4)
    strided(4)
    """
    return Strided(validate_integer("strided", "step", step, 1))


@dataclass(frozen=True, repr=False)
class Dilated(Strided):
    window: int

    def __repr__(self) -> str:
        return f"dilated({self.window}, {self.step})"

    @property
    def outer_band(self) -> Band:
        far = min(self.window * self.step, MAX_POSITION)
        return Band(far, far)

    def allowed_pairs(self, block: Block) -> Array | None:
        near = self.outer_band.allowed_pairs(block)
        return get_framework(block.q).xp.logical_and(near, super().allowed_pairs(block))

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        return self.outer_band.key_extent(rows, n, m)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        verdict = self.outer_band.block_verdict(rows, cols, n, m)
        return verdict if verdict is False or self.step == 1 else None


def dilated(window: int, step: int) -> Mask:
    """Query i sees every step-th key on both sides, `window` keys on each.

    >>> dilated(2, 3)  # i − 6, i − 3, i, i + 3, i + 6
    dilated(2, 3)
    """
    window = validate_integer("dilated", "window", window, 0)
    return Dilated(validate_integer("dilated", "step", step, 1), window)


@dataclass(frozen=True, repr=False)
class GlobalTokens(Mask):
    count: int
    is_static = True

    def __repr__(self) -> str:
        return f"global_tokens({self.count})"

    def allowed_pairs(self, block: Block) -> Array | None:
        return get_framework(block.q).xp.logical_or(block.q < self.count, block.k < self.count)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        if rows.start >= self.count and cols.start >= self.count:
            return False
        inside = rows.start + rows.size <= self.count or cols.start + cols.size <= self.count
        return True if inside else None


def global_tokens(count: int) -> Mask:
    """The first `count` positions see every key and are seen by every query.

    >>> global_tokens(1) | window(64)
    global_tokens(1) | window(64, 64)
    """
    return GlobalTokens(validate_integer("global_tokens", "count", count, 0))
