"""Which keys a query may look at. Masks combine by `&`, `|` and `~`.

`causal`, `window`, `dilated`, `strided`, `global_tokens`, `blocks`, `lengths`, `documents` and
`custom` are rules on positions; `array` holds a boolean array (True: may attend) or a float array
(added to the scores, −∞ rules out). What a rule excludes for a whole block is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.arrays import is_array, of
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.types import Array, Block, Shape, Span

__all__ = [
    "Mask",
    "array",
    "blocks",
    "causal",
    "custom",
    "dilated",
    "documents",
    "global_tokens",
    "lengths",
    "resolve",
    "strided",
    "window",
]

Verdict = bool | None
"""Of a whole block: True, all may be attended to; False, nothing may; None, it depends."""


class Mask:
    """A rule that says, for a block of positions, which pairs may attend."""

    __array_ufunc__ = None  # so that `numpy_array & mask` is ours to answer

    @property
    def relative(self) -> bool:
        """Whether the rule sees the distance of a pair alone, not where it lies."""
        return False

    def allowed(self, block: Block) -> Array | None:
        """A boolean array that broadcasts against (…, r, c), or None for all."""
        raise NotImplementedError("a mask says which pairs may attend")

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        """What holds for the whole block, as far as it is known without looking at each pair."""
        return None

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        """Keys outside start … end are ruled out for all these queries."""
        return 0, m

    def check(self, lead: Shape, n: int, m: int) -> None:
        """Raise where the mask does not fit scores of shape (*lead, n, m)."""

    def arrays(self) -> list[Array]:
        """The arrays that must be of the call's own framework."""
        return []

    def __and__(self, other: Any) -> Mask:
        return _Both(self, array(other))

    def __rand__(self, other: Any) -> Mask:
        return _Both(array(other), self)

    def __or__(self, other: Any) -> Mask:
        return _Either(_boolean(self), _boolean(array(other)))

    def __ror__(self, other: Any) -> Mask:
        return _Either(_boolean(array(other)), _boolean(self))

    def __invert__(self) -> Mask:
        return _Not(_boolean(self))


@dataclass(frozen=True, repr=False)
class _Both(Mask):
    one: Mask
    two: Mask

    @property
    def relative(self) -> bool:
        return self.one.relative and self.two.relative

    def arrays(self) -> list[Array]:
        return self.one.arrays() + self.two.arrays()

    def __repr__(self) -> str:
        return f"{_grouped(self.one)} & {_grouped(self.two)}"

    def allowed(self, block: Block) -> Array | None:
        a, b = self.one.allowed(block), self.two.allowed(block)
        if a is None or b is None:
            return b if a is None else a
        return of(a).xp.logical_and(a, b)

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        (a, b), (c, d) = (x.extent(rows, n, m) for x in (self.one, self.two))
        return max(a, c), min(b, d)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        a, b = (x.verdict(rows, cols, n, m) for x in (self.one, self.two))
        if a is False or b is False:
            return False
        return True if a and b else None

    def check(self, lead: Shape, n: int, m: int) -> None:
        self.one.check(lead, n, m)
        self.two.check(lead, n, m)


@dataclass(frozen=True, repr=False)
class _Either(Mask):
    one: Mask
    two: Mask

    @property
    def relative(self) -> bool:
        return self.one.relative and self.two.relative

    def arrays(self) -> list[Array]:
        return self.one.arrays() + self.two.arrays()

    def __repr__(self) -> str:
        return f"{_grouped(self.one)} | {_grouped(self.two)}"

    def allowed(self, block: Block) -> Array | None:
        a, b = self.one.allowed(block), self.two.allowed(block)
        return None if a is None or b is None else of(a).xp.logical_or(a, b)

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        (a, b), (c, d) = (x.extent(rows, n, m) for x in (self.one, self.two))
        return min(a, c), max(b, d)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        a, b = (x.verdict(rows, cols, n, m) for x in (self.one, self.two))
        if a or b:
            return True
        return False if a is False and b is False else None

    def check(self, lead: Shape, n: int, m: int) -> None:
        self.one.check(lead, n, m)
        self.two.check(lead, n, m)


@dataclass(frozen=True, repr=False)
class _Not(Mask):
    one: Mask

    @property
    def relative(self) -> bool:
        return self.one.relative

    def arrays(self) -> list[Array]:
        return self.one.arrays()

    def __repr__(self) -> str:
        return f"~{_grouped(self.one)}"

    def allowed(self, block: Block) -> Array | None:
        a = self.one.allowed(block)
        if a is None:
            return (block.q - block.q != 0) | (block.k - block.k != 0)
        return of(a).xp.logical_not(a)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        a = self.one.verdict(rows, cols, n, m)
        return None if a is None else not a

    def check(self, lead: Shape, n: int, m: int) -> None:
        self.one.check(lead, n, m)


@dataclass(frozen=True, repr=False)
class _Band(Mask):
    """Keys from i − left to i + right (None: no bound), i the query's position among the keys."""

    left: int | None
    right: int | None
    align: str = "top_left"
    offset: Any = None

    def __post_init__(self) -> None:
        if self.align not in ("top_left", "bottom_right"):
            raise ArgumentError(f"align must be 'top_left' or 'bottom_right', not {self.align!r}")
        if self.offset is not None and not isinstance(self.offset, int):
            object.__setattr__(self, "offset", _integers("offset", self.offset))

    @property
    def relative(self) -> bool:
        return self.offset is None or isinstance(self.offset, int)

    def placed(self) -> str:
        """How the positions are aligned, as its arguments."""
        told = [] if self.align == "top_left" else [f"align={self.align!r}"]
        return ", ".join(told + ([] if self.offset is None else [f"offset={self.offset!r}"]))

    def __repr__(self) -> str:
        bounds = [str(float("inf") if x is None else x) for x in (self.left, self.right)]
        return f"window({', '.join([*bounds, *filter(None, [self.placed()])])})"

    def shift(self, block: Block) -> Any:
        """How far the queries' positions lie behind the keys'."""
        if self.offset is None:
            return block.m - block.n if self.align == "bottom_right" else 0
        if isinstance(self.offset, int):
            return self.offset
        return _per_row(self.offset, block)[..., None]

    def allowed(self, block: Block) -> Array | None:
        xp = of(block.q).xp
        at = block.q + self.shift(block)
        out = None
        if self.right is not None:
            out = block.k <= at + self.right
        if self.left is not None:
            near = block.k >= at - self.left
            out = near if out is None else xp.logical_and(out, near)
        return out

    def shifts(self, n: int, m: int) -> tuple[int, int] | None:
        """The least and the largest shift, where they are known."""
        if self.offset is None:
            return (m - n, m - n) if self.align == "bottom_right" else (0, 0)
        host = _host(self.offset)
        return None if host is None or not host.size else (int(host.min()), int(host.max()))

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        shifts = self.shifts(n, m)
        if shifts is None:
            return 0, m
        start = 0 if self.left is None else rows.start + shifts[0] - self.left
        end = m if self.right is None else rows.start + rows.size + shifts[1] + self.right
        return min(max(start, 0), m), max(min(end, m), 0)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        shifts = self.shifts(n, m)
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

    def check(self, lead: Shape, n: int, m: int) -> None:
        if self.offset is not None and not isinstance(self.offset, int):
            _check_rows("causal: offset", self.offset, lead, n, None)


@dataclass(frozen=True, repr=False)
class _Causal(_Band):
    left: int | None = None
    right: int | None = 0

    def __call__(self, align: str = "top_left", offset: Any = None) -> Mask:
        """The same rule aligned otherwise: key j may be seen by query i where j ≤ i + offset.

        "top_left" is offset 0, "bottom_right" is m − n, so that the last query sees every key.
        An integer array (B,) gives each sequence of the batch its own.
        """
        return _Causal(align=align, offset=offset)

    def __repr__(self) -> str:
        return "causal" + (f"({self.placed()})" if self.placed() else "")


causal = _Causal()
"""Key j may be seen by query i where j ≤ i.

>>> import qkv
>>> qkv.weights([[0.0], [0.0]], [[0.0], [0.0]], mask=causal)
array([[1. , 0. ],
       [0.5, 0.5]])
"""


def window(
    left: float, right: float | None = None, align: str = "top_left", offset: Any = None
) -> Mask:
    """Keys from i − left to i + right; right is left where not given, and ∞ is no bound.

    Positions are aligned as for `causal`.

    >>> window(2) & window(float("inf"), 0)
    window(2, 2) & window(inf, 0)
    """
    right = left if right is None else right
    low, high = (
        None if value == float("inf") else _whole("window", name, value, 0)
        for name, value in (("left", left), ("right", right))
    )
    return _Band(low, high, align, offset)


@dataclass(frozen=True, repr=False)
class _Positions(Mask):
    """A rule on positions alone, with a name to show."""

    name: str
    rule: Callable[[Block, Any], Array]
    judge: Callable[[Span, Span], Verdict] = lambda rows, cols: None
    by_distance: bool = False

    @property
    def relative(self) -> bool:
        return self.by_distance

    def allowed(self, block: Block) -> Array | None:
        return self.rule(block, of(block.q).xp)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        return self.judge(rows, cols)

    def __repr__(self) -> str:
        return self.name


def dilated(window: int, step: int) -> Mask:
    """Every step-th key to either side of the query, `window` of them.

    >>> dilated(2, 3)  # i − 6, i − 3, i, i + 3, i + 6
    dilated(2, 3)
    """
    _whole("dilated", "window", window, 0)
    _whole("dilated", "step", step, 1)
    reach = _Band(window * step, window * step)

    def rule(block: Block, xp: Any) -> Array:
        return xp.logical_and(reach.allowed(block), _on_step(block, step))

    def judge(rows: Span, cols: Span) -> Verdict:
        verdict = reach.verdict(rows, cols, 0, 0)
        return verdict if verdict is False or step == 1 else None

    return _Positions(f"dilated({window}, {step})", rule, judge, by_distance=True)


def strided(step: int) -> Mask:
    """The keys whose distance from the query is a multiple of step.

    >>> strided(4)
    strided(4)
    """
    _whole("strided", "step", step, 1)
    return _Positions(f"strided({step})", lambda block, xp: _on_step(block, step), by_distance=True)


def _on_step(block: Block, step: int) -> Array:
    return of(block.q).xp.remainder(block.q - block.k, step) == 0


def global_tokens(count: int) -> Mask:
    """The first `count` positions see every key and are seen by every query.

    >>> global_tokens(1) | window(64)
    global_tokens(1) | window(64, 64)
    """
    _whole("global_tokens", "count", count, 0)

    def judge(rows: Span, cols: Span) -> Verdict:
        if rows.start >= count and cols.start >= count:
            return False
        inside = rows.start + rows.size <= count or cols.start + cols.size <= count
        return True if inside else None

    return _Positions(
        f"global_tokens({count})",
        lambda block, xp: xp.logical_or(block.q < count, block.k < count),
        judge,
    )


@dataclass(frozen=True, repr=False)
class _Blocks(Mask):
    layout: np.ndarray[Any, Any]
    size: tuple[int, int]

    def __repr__(self) -> str:
        return f"blocks({self.layout.shape}, {self.size})"

    def allowed(self, block: Block) -> Array | None:
        fw = of(block.q)
        rows = fw.xp.floor_divide(block.q, self.size[0])
        cols = fw.xp.floor_divide(block.k, self.size[1])
        flat = fw.constant(self.layout.reshape(-1), block.q, "bool")
        high, wide = self.layout.shape[-2:]
        at = rows * wide + cols
        if self.layout.ndim > 2:  # one layout a head
            at = at + block.h * (high * wide)
        return fw.take(flat, at)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        (tall, wide), layout = self.size, self.layout
        part = layout[
            ...,
            rows.start // tall : (rows.start + rows.size - 1) // tall + 1,
            cols.start // wide : (cols.start + cols.size - 1) // wide + 1,
        ]
        return False if not part.any() else (True if part.all() else None)

    def check(self, lead: Shape, n: int, m: int) -> None:
        high, wide = self.layout.shape[-2:]
        if high * self.size[0] < n or wide * self.size[1] < m:
            raise ShapeError(
                f"masks.blocks: a layout of {high} × {wide} blocks of {self.size[0]} × "
                f"{self.size[1]} does not cover {n} queries × {m} keys"
            )
        if self.layout.ndim > 2 and (not lead or self.layout.shape[0] != lead[-1]):
            raise ShapeError(
                f"masks.blocks: a layout for {self.layout.shape[0]} heads met scores of shape "
                f"{(*lead, n, m)}, whose axis −3 is the heads"
            )


def blocks(layout: Any, size: int | tuple[int, int]) -> Mask:
    """layout[i // size, j // size] decides; layout (blocks, blocks) or (heads, blocks, blocks).

    >>> blocks([[1, 0], [1, 1]], 64).layout.tolist()
    [[True, False], [True, True]]
    """
    host = _host(layout)
    if host is None:
        raise DtypeError("masks.blocks: layout must be known outside jit: pass a NumPy array")
    if host.ndim not in (2, 3):
        raise ShapeError(f"masks.blocks: layout must have 2 or 3 axes, not shape {host.shape}")
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        raise ShapeError(f"masks.blocks: size is one number or a pair, not {size!r}")
    for side in pair:
        _whole("blocks", "size", side, 1)
    return _Blocks(host.astype(bool), pair)


@dataclass(frozen=True, repr=False)
class _Lengths(Mask):
    valid: Any

    def __repr__(self) -> str:
        return f"lengths of shape {tuple(self.valid.shape)}"

    def allowed(self, block: Block) -> Array | None:
        return block.k < _per_row(self.valid, block)[..., None]

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        host = _host(self.valid)
        return (0, m) if host is None or not host.size else (0, min(int(host.max()), m))

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        host = _host(self.valid)
        if host is None or not host.size:
            return None
        if cols.start >= host.max():
            return False
        return True if cols.start + cols.size <= host.min() else None

    def check(self, lead: Shape, n: int, m: int) -> None:
        _check_rows("masks.lengths: valid", self.valid, lead, n, None)


def lengths(valid: Any) -> Mask:
    """The first valid[b] keys of each sequence b: valid (B,), or (B, n) for each query its own.

    B is the first axis of the query.

    >>> lengths([3, 5])
    lengths of shape (2,)
    """
    return _Lengths(_integers("masks.lengths: valid", valid))


@dataclass(frozen=True, repr=False)
class _Documents(Mask):
    query_ids: Any
    key_ids: Any

    def __repr__(self) -> str:
        return f"documents of shape {tuple(self.query_ids.shape)}"

    def allowed(self, block: Block) -> Array | None:
        q = _per_position(self.query_ids, block.rows, block)
        k = _per_position(self.key_ids, block.cols, block)
        return q[..., :, None] == k[..., None, :]

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        q, k = _host(self.query_ids), _host(self.key_ids)
        if q is None or k is None:
            return None
        q = q[..., rows.start : rows.start + rows.size]
        k = k[..., cols.start : cols.start + cols.size]
        if not q.size or not k.size:
            return None
        if q.max() < k.min() or k.max() < q.min():
            return False
        return True if q.min() == q.max() == k.min() == k.max() else None

    def check(self, lead: Shape, n: int, m: int) -> None:
        _check_rows("masks.documents: ids", self.query_ids, lead, n, n)
        _check_rows("masks.documents: ids of the keys", self.key_ids, lead, m, m)


def documents(ids: Any, key_ids: Any = None) -> Mask:
    """Query i sees key j where both belong to one document: ids (n,) or (B, n), key_ids if other.

    >>> documents([0, 0, 1, 1]).query_ids
    array([0, 0, 1, 1])
    """
    ids = _integers("masks.documents: ids", ids)
    key_ids = ids if key_ids is None else _integers("masks.documents: key_ids", key_ids)
    return _Documents(ids, key_ids)


@dataclass(frozen=True, repr=False)
class _Custom(Mask):
    mask_mod: Callable[[Array, Array, Array, Array], Array]

    def __repr__(self) -> str:
        return f"custom({getattr(self.mask_mod, '__name__', self.mask_mod)})"

    def allowed(self, block: Block) -> Array | None:
        out = self.mask_mod(block.b, block.h, block.q, block.k)
        fw = of(block.q)
        if not is_array(out) or of(out) is not fw or fw.dtype(out) != "bool":
            kind = fw.dtype(out) if is_array(out) else type(out).__name__
            raise DtypeError(f"masks.custom: mask_mod must give booleans of {fw.name}, not {kind}")
        shape, due = fw.shape(out), (block.rows.size, block.cols.size)
        near = zip(shape[::-1], due[::-1], strict=False)
        if len(shape) > block.axes + 2 or any(a not in (1, b, None) for a, b in near):
            raise ShapeError(
                f"masks.custom: mask_mod gave shape {shape}, which does not broadcast to "
                f"the scores' {due}"
            )
        return out


def custom(mask_mod: Callable[[Array, Array, Array, Array], Array]) -> Mask:
    """mask_mod(b, h, q_idx, kv_idx) → boolean, FlexAttention's; the positions are arrays.

    >>> import qkv
    >>> even = custom(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    >>> qkv.weights([[0.0]], [[0.0], [0.0], [0.0]], mask=even)
    array([[0.5, 0. , 0.5]])
    """
    if not callable(mask_mod):
        raise DtypeError(
            f"masks.custom: mask_mod must be a function (b, h, q_idx, kv_idx), not "
            f"{type(mask_mod).__name__}"
        )
    return _Custom(mask_mod)


@dataclass(frozen=True)
class _Hoisted(Mask):
    """A rule whose functions held arrays, with those arrays among its fields."""

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def allowed(self, block: Block) -> Array | None:
        return self.function(block.q[:, 0], block.k[0, :], *self.captured)


def hoisted(rule: Mask, block: Block, place: Any) -> Mask:
    """The rule of such a block as a function of arrays alone; `place(rows, cols)` is a Block."""

    def function(q: Array, k: Array) -> Array:
        return rule.allowed(place(Span(q[0], q.shape[0]), Span(k[0], k.shape[0])))

    return _Hoisted(*of(block.q).hoist(function, block.q[:, 0], block.k[0, :]))


def has_functions(rule: Any) -> bool:
    """Whether a rule holds a function of the caller's, and maybe arrays that no field shows."""
    inner = (getattr(rule, name, None) for name in ("one", "two"))
    return isinstance(rule, _Custom) or any(has_functions(x) for x in inner if x is not None)


@dataclass(frozen=True, repr=False)
class _Array(Mask):
    """A boolean or a float array that broadcasts to the scores."""

    values: Array

    def __repr__(self) -> str:
        kind = "float" if self.is_bias else "boolean"
        return f"{kind} array {tuple(self.values.shape)}"

    @property
    def is_bias(self) -> bool:
        return of(self.values).dtype(self.values) != "bool"

    def arrays(self) -> list[Array]:
        return [self.values]

    def allowed(self, block: Block) -> Array | None:
        part = self.part(block)
        return part > -float("inf") if self.is_bias else part

    def part(self, block: Block) -> Array:
        fw = of(self.values)
        return fw.cut(fw.cut(self.values, block.rows, -2), block.cols, -1)

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        host = _host(self.values)
        if host is None:
            return None
        for axis, span in ((-2, rows), (-1, cols)):
            if host.shape[axis] != 1:
                host = np.take(host, range(span.start, span.start + span.size), axis=axis)
        live = host > -np.inf if self.is_bias else host
        return False if not live.any() else (True if live.all() else None)

    def check(self, lead: Shape, n: int, m: int) -> None:
        shape, full = tuple(self.values.shape), (*lead, n, m)
        fits = len(shape) <= len(full) and all(
            a in (1, b) or a is None or b is None
            for a, b in zip(shape[::-1], full[::-1], strict=False)
        )
        if not fits:
            raise ShapeError(f"mask: an array of shape {shape} does not broadcast to {full}")


def array(values: Any) -> Mask:
    """A boolean array (True: may attend), or a float array (added; −∞ rules out), as a mask."""
    if isinstance(values, Mask):
        return values
    if isinstance(values, list | tuple):
        values = np.asarray(values)
    if not is_array(values):
        raise DtypeError(
            "mask must be a mask of qkv.masks, or a boolean or float array, not "
            + ("a function: wrap it as masks.custom(f)" if callable(values) else str(type(values)))
        )
    fw = of(values)
    if fw.dtype(values) != "bool" and "float" not in fw.dtype(values):
        raise DtypeError(
            f"mask is an array of {fw.dtype(values)}: pass booleans (True: may attend) or floats "
            "(added to the scores), so that 0 and 1 cannot be misread"
        )
    values = fw.plain(values)
    while len(values.shape) < 2:
        values = values[None, ...]
    return _Array(values)


def resolve(mask: Any) -> tuple[Mask | None, Array | None]:
    """A mask as its rule and, where it adds to the scores, the array that it adds."""
    if mask is None:
        return None, None
    rules, biases = _split(array(mask))
    rule: Mask | None = None
    for part in rules:
        rule = part if rule is None else _Both(rule, part)
    bias = None
    for part in biases:
        bias = part.values if bias is None else bias + part.values
    if bias is not None:
        rule = _Array(bias) if rule is None else _Both(rule, _Array(bias))
    return rule, bias


def _grouped(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Both | _Either) else repr(mask)


def _split(mask: Mask) -> tuple[list[Mask], list[_Array]]:
    if isinstance(mask, _Both):
        one, two = _split(mask.one), _split(mask.two)
        return one[0] + two[0], one[1] + two[1]
    if isinstance(mask, _Array) and mask.is_bias:
        return [], [mask]
    return [mask], []


def _boolean(mask: Mask) -> Mask:
    if _split(mask)[1]:
        raise DtypeError(
            "a float mask adds to the scores, so it combines by & only: | and ~ take booleans"
        )
    return mask


def _whole(owner: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DtypeError(f"masks.{owner}: {name} must be a whole number, not {value!r}")
    if value < least:
        raise ArgumentError(f"masks.{owner}: {name} must be at least {least}, not {value}")
    return int(value)


def _integers(what: str, values: Any) -> Any:
    values = values if is_array(values) else np.asarray(values)
    if "int" not in of(values).dtype(values):
        told = values if values.ndim == 0 else of(values).dtype(values)
        raise DtypeError(f"{what} must be whole numbers, not {told}")
    return values


def _host(values: Any) -> np.ndarray[Any, Any] | None:
    """The numbers on the host, where they are known and at hand."""
    return of(values).concrete(values) if is_array(values) else np.asarray(values)


def _beside(values: Any, block: Block) -> Array:
    """Whole numbers as an array of the call's own framework."""
    fw = of(block.q)
    if is_array(values) and of(values) is fw:
        return fw.astype(values, fw.dtype(block.q))
    return fw.constant(values, block.q, fw.dtype(block.q))


def _check_rows(what: str, values: Any, lead: Shape, n: int, last: int | None) -> None:
    shape = tuple(values.shape)
    batch = lead[:1]
    good = [(*batch, n)] + ([(n,)] if last is not None else [batch])
    if shape not in good and None not in (*lead, n):
        told = " or ".join(str(x) for x in good)
        raise ShapeError(f"{what} must have shape {told}, not {shape}")


def _per_row(values: Any, block: Block) -> Array:
    """(B,) or (B, n) numbers as (B, 1, …, r or 1), beside the queries of the block."""
    x = _beside(values, block)
    if len(x.shape) == 2:
        x = of(x).cut(x, block.rows, -1)
    elif len(x.shape) == 1:
        x = x[:, None]
    return _under_lead(x, block)


def _per_position(values: Any, span: Span, block: Block) -> Array:
    x = of(block.q).cut(_beside(values, block), span, -1)
    return _under_lead(x, block) if len(x.shape) == 2 else x


def _under_lead(x: Array, block: Block) -> Array:
    """(B, r) as (B, 1, …, 1, r): B stays the first axis of the scores."""
    for _ in range(block.axes - 1):
        x = x[:, None, ...]
    return x
