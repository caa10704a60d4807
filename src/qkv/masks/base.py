"""The base class of masks, combined masks, and arrays as masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from inspect import signature
from operator import add
from typing import Any, ClassVar

import numpy as np

from qkv.errors import DtypeError, ShapeError, unknown_name_error
from qkv.frameworks import as_plain_array, get_framework, is_array
from qkv.frameworks.tree import Record
from qkv.masks.integers import host_values
from qkv.util.types import Array, Block, Shape, ShardPosition, Span

BlockVerdict = bool | None
"""Says which pairs of a block count. True: all; False: none; None: each pair must be evaluated."""


class Mask(Record):
    """A rule that decides which pairs of a query and a key count."""

    role: ClassVar[str] = "mask"
    __array_ufunc__ = None  # so that NumPy leaves `numpy_array & mask` to __rand__

    has_key_axis: ClassVar[bool] = False
    """Whether a field has one entry for each key."""

    @property
    def is_relative(self) -> bool:
        """Whether the rule depends only on the distance between query and key."""
        return False

    @property
    def is_shared_by_queries(self) -> bool:
        """Whether all queries of a sequence see the same keys."""
        return False

    @property
    def is_static(self) -> bool:
        """Whether the rule depends only on positions, and has no arrays of the caller."""
        return False

    def allowed_pairs(self, block: Block) -> Array | None:
        """Return booleans that broadcast to the block's scores (…, r, c); None: all count."""
        raise NotImplementedError(f"{type(self).__name__} does not define allowed_pairs(block)")

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        """Return whether all (True) or no (False) pairs of a block count; None: unknown."""
        return None

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        """Return `block_verdict` of each span of keys. Masks with arrays read them once for all."""
        return [self.block_verdict(rows, cols, n, m) for cols in spans]

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        """Return start and end of a range of keys that contains all keys these queries may see."""
        return 0, m

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        """Raise ShapeError if the mask does not fit scores of shape (*lead, n, m)."""

    def with_arrays_like(self, like: Array) -> Mask:
        """Return the mask with its integers as arrays of the framework of `like`.

        Blocks are then no longer skipped by the values of these integers.
        """
        return self

    def list_arrays(self) -> list[Array]:
        """Return the arrays that must belong to the framework of the call."""
        return []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Combine a tensor and a mask: PyTorch calls this for `tensor & mask`."""
        name = func.__name__
        if name in ("__and__", "bitwise_and"):
            return AndMask(*map(array, args))
        if name in ("__or__", "bitwise_or"):
            return OrMask(*(_require_boolean(array(x)) for x in args))
        return NotImplemented

    def __and__(self, other: Any) -> Mask:
        return AndMask(self, array(other))

    def __rand__(self, other: Any) -> Mask:
        return AndMask(array(other), self)

    def __or__(self, other: Any) -> Mask:
        return OrMask(_require_boolean(self), _require_boolean(array(other)))

    def __ror__(self, other: Any) -> Mask:
        return OrMask(_require_boolean(array(other)), _require_boolean(self))

    def __invert__(self) -> Mask:
        return NotMask(_require_boolean(self))

    def __bool__(self) -> bool:
        raise DtypeError(
            "a mask has no truth value, and `and` would drop one of two masks: use & for and, "
            "| for or, ~ for not"
        )


class CompoundMask(Mask):
    """A mask whose fields are masks."""

    @property
    def operand_masks(self) -> tuple[Mask, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    @property
    def is_relative(self) -> bool:
        return all(part.is_relative for part in self.operand_masks)

    @property
    def is_shared_by_queries(self) -> bool:
        return all(part.is_shared_by_queries for part in self.operand_masks)

    @property
    def is_static(self) -> bool:
        return all(part.is_static for part in self.operand_masks)

    def with_arrays_like(self, like: Array) -> Mask:
        return type(self)(*(part.with_arrays_like(like) for part in self.operand_masks))

    def list_arrays(self) -> list[Array]:
        return [x for part in self.operand_masks for x in part.list_arrays()]

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        for part in self.operand_masks:
            part.check_shapes(lead, n, m)


@dataclass(frozen=True, repr=False)
class PairMask(CompoundMask):
    """A combination of two masks."""

    one: Mask
    two: Mask


class AndMask(PairMask):
    def __repr__(self) -> str:
        return f"{_parenthesize(self.one)} & {_parenthesize(self.two)}"

    def allowed_pairs(self, block: Block) -> Array | None:
        a, b = self.one.allowed_pairs(block), self.two.allowed_pairs(block)
        if a is None or b is None:
            return b if a is None else a
        return get_framework(a).xp.logical_and(a, b)

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        (a, b), (c, d) = (x.key_extent(rows, n, m) for x in (self.one, self.two))
        return max(a, c), min(b, d)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        parts = (x.block_verdicts(rows, spans, n, m) for x in (self.one, self.two))
        return [
            False if a is False or b is False else (True if a and b else None)
            for a, b in zip(*parts, strict=True)
        ]


class OrMask(PairMask):
    def __repr__(self) -> str:
        return f"{_parenthesize(self.one)} | {_parenthesize(self.two)}"

    def allowed_pairs(self, block: Block) -> Array | None:
        a, b = self.one.allowed_pairs(block), self.two.allowed_pairs(block)
        return None if a is None or b is None else get_framework(a).xp.logical_or(a, b)

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        (a, b), (c, d) = (x.key_extent(rows, n, m) for x in (self.one, self.two))
        return min(a, c), max(b, d)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        parts = (x.block_verdicts(rows, spans, n, m) for x in (self.one, self.two))
        return [
            True if a or b else (False if a is False and b is False else None)
            for a, b in zip(*parts, strict=True)
        ]


@dataclass(frozen=True, repr=False)
class NotMask(CompoundMask):
    one: Mask

    def __repr__(self) -> str:
        return f"~{_parenthesize(self.one)}"

    def allowed_pairs(self, block: Block) -> Array | None:
        a = self.one.allowed_pairs(block)
        if a is None:
            return block.q - block.k != block.q - block.k  # False everywhere
        return get_framework(a).xp.logical_not(a)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        verdicts = self.one.block_verdicts(rows, spans, n, m)
        return [None if a is None else not a for a in verdicts]


@dataclass(frozen=True, repr=False)
class ArrayMask(Mask):
    """A boolean or a float array that broadcasts to the scores."""

    values: Array
    is_bias: bool
    has_key_axis: ClassVar[bool] = True

    def __repr__(self) -> str:
        kind = "float" if self.is_bias else "boolean"
        return f"{kind} array {tuple(self.values.shape)}"

    def list_arrays(self) -> list[Array]:
        return [self.values]

    @property
    def is_shared_by_queries(self) -> bool:
        return bool(self.values.shape[-2] == 1)

    def allowed_pairs(self, block: Block) -> Array | None:
        fw = get_framework(self.values)
        part = fw.slice_span(fw.slice_span(self.values, block.rows, -2), block.cols, -1)
        if not self.is_bias:
            return part
        return None if fw.is_surely_finite(part) else part != -float("inf")

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        return self.block_verdicts(rows, [cols], n, m)[0]

    def block_verdicts(
        self, rows: Span, spans: Sequence[Span], n: int, m: int
    ) -> list[BlockVerdict]:
        host = host_values(self.values)
        if host is None:
            return [None] * len(spans)
        if host.shape[-2] != 1:
            host = host[..., rows.start : rows.start + rows.size, :]
        live = host if host.dtype == bool else host != -np.inf
        width = live.shape[-1]
        # One number for each key: the axes before it are small, or contiguous with it.
        every, some = (x(live.reshape(-1, width), axis=0) for x in (np.all, np.any))
        parts = [slice(None) if width == 1 else slice(x.start, x.start + x.size) for x in spans]
        return [
            True if every[part].all() else (None if some[part].any() else False) for part in parts
        ]

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        shape, full = tuple(self.values.shape), (*lead, n, m)
        fits = len(shape) <= len(full)
        for a, b in zip(shape[::-1], full[::-1], strict=False):
            fits = fits and (a == b or a == 1 or a is None or b is None)
        if not fits:
            raise ShapeError(
                f"mask: an array of shape {shape} does not broadcast to the scores' shape {full}: "
                "it needs one row for each query and one column for each key"
            )


@dataclass(frozen=True, repr=False)
class EvaluatedPairs(Mask):
    """The booleans of one block, which are known already."""

    values: Array

    def allowed_pairs(self, block: Block) -> Array | None:
        return self.values


NAMES: dict[str, Mask | Callable[..., Mask]] = {}
"""The masks by name. `qkv.masks` adds them. They are here because `&` and `|` accept names."""


def array(values: Any) -> Mask:
    """Return a boolean array (True: may attend) or a float array (added to the scores) as a mask.

    Also accepts a mask, or the name of a mask without parameters.

    >>> array("causal")
    causal
    """
    if isinstance(values, Mask):
        return values
    if not is_array(values):
        if isinstance(values, str):
            return _mask_by_name(values)
        if not isinstance(values, list | tuple):
            received = type(values).__name__
            if isinstance(values, bool):
                received += ": for is_causal=True pass masks.causal"
            elif callable(values):
                is_ours = getattr(values, "__module__", "").startswith("qkv.masks")
                name = getattr(values, "__name__", "")
                step = f"call it, masks.{name}(…)" if is_ours else "wrap it as masks.custom(f)"
                received = f"a function: {step}"
            elif hasattr(values, "mask_mod"):  # FlexAttention's BlockMask
                received = f"a {type(values).__name__}: pass masks.custom(mask.mask_mod)"
            raise DtypeError(
                "mask must be a mask of qkv.masks, its name, or a boolean or float array, not "
                + received
            )
        try:
            values = np.asarray(values)
        except ValueError:
            raise DtypeError("mask: the rows of the nested list differ in length") from None
    if hasattr(values, "variant"):  # PyTorch's CausalBias has a shape but uninitialized memory
        raise DtypeError(
            f"mask is PyTorch's {type(values).__name__}, which holds no numbers: pass "
            "masks.causal, or masks.causal('bottom_right') for causal_lower_right"
        )
    values = as_plain_array(values, "mask")
    kind = get_framework(values).dtype_name(values)
    if kind != "bool" and "float" not in kind:
        step = "pass mask == 1 if it holds zeros and ones"
        if len(values.shape) < 2:  # a mask usually has two axes, so this may be an array of lengths
            step = "pass masks.lengths(mask) if it holds lengths, or " + step[len("pass ") :]
        raise DtypeError(
            f"mask is an array of {kind}, which is ambiguous; expected booleans (True: may attend) "
            f"or floats (added to the scores): {step}"
        )
    while len(values.shape) < 2:
        values = values[None, ...]
    return ArrayMask(values, is_bias=kind != "bool")


def _mask_by_name(name: str) -> Mask:
    if name not in NAMES:
        raise unknown_name_error("mask", name, NAMES)
    mask = NAMES[name]
    if not isinstance(mask, Mask):
        parameters = ", ".join(signature(mask).parameters)
        raise DtypeError(f"mask {name!r} has parameters: pass masks.{name}({parameters})")
    return mask


def resolve(mask: Any) -> tuple[Mask | None, Array | None]:
    """Return the rule of a mask, and the array that it adds to the scores; each may be None."""
    if mask is None:
        return None, None
    rules, biases = _split_bias(array(mask))
    if not biases:
        return reduce(AndMask, rules), None
    bias = reduce(add, (part.values for part in biases))
    return reduce(AndMask, [*rules, ArrayMask(bias, is_bias=True)]), bias


def _parenthesize(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, PairMask) else repr(mask)


def _split_bias(mask: Mask) -> tuple[list[Mask], list[ArrayMask]]:
    if isinstance(mask, AndMask):
        one, two = _split_bias(mask.one), _split_bias(mask.two)
        return one[0] + two[0], one[1] + two[1]
    if isinstance(mask, ArrayMask) and mask.is_bias:
        return [], [mask]
    return [mask], []


def _require_boolean(mask: Mask) -> Mask:
    if _split_bias(mask)[1]:
        raise DtypeError(
            "a float mask is added to the scores, so it supports only &: use booleans for | and ~"
        )
    return mask


@dataclass(frozen=True)
class ShardMask(Mask):
    """The rule of a whole call, for one shard at the position `at` of that call.

    The methods take positions of the shard. `allowed_pairs` is missing: shards call the one of
    `rule`, because a block has global positions.
    """

    rule: Mask
    at: ShardPosition

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        at = self.at
        rows = rows._replace(start=rows.start + at.row)
        cols = cols._replace(start=cols.start + self.key_shift)
        return self.rule.block_verdict(rows, cols, at.n, m if self.rule.has_key_axis else at.m)

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        at = self.at
        rows = rows._replace(start=rows.start + at.row)
        extent = self.rule.key_extent(rows, at.n, m if self.rule.has_key_axis else at.m)
        start, end = (min(max(x - self.key_shift, 0), m) for x in extent)
        return start, end

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        self.rule.check_shapes(lead, self.at.n, m if self.rule.has_key_axis else self.at.m)

    @property
    def key_shift(self) -> int:
        return 0 if self.rule.has_key_axis else self.at.col


def localize_mask(rule: Mask, at: ShardPosition | None) -> Mask:
    """Return the rule of a whole call as a rule for one shard; `at` None: there are no shards.

    `rule` is about positions in the whole call. An array in it has one row for each query of the
    whole call, and one column for each key of the shard.

    >>> from qkv.masks import causal
    >>> shard = ShardPosition(0, 4, 8, 8)  # the shard's first key is key 4
    >>> localize_mask(causal, shard).key_extent(Span(0, 6), 8, 4)
    (0, 2)
    """
    if at is None:
        return rule
    if isinstance(rule, CompoundMask):
        return type(rule)(*(localize_mask(part, at) for part in rule.operand_masks))
    return ShardMask(rule, at)
