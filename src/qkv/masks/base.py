"""What a mask is, how masks combine, and arrays as masks."""

from __future__ import annotations

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
"""Of a whole block: True, all may be attended to; False, nothing may; None, it depends."""


class Mask(Record):
    """A rule that says, for a block of positions, which pairs may attend."""

    role: ClassVar[str] = "mask"
    __array_ufunc__ = None  # so that `numpy_array & mask` is ours to answer

    has_key_axis: ClassVar[bool] = False
    """Whether it holds something for each key."""

    @property
    def is_relative(self) -> bool:
        """Whether the rule sees the distance of a pair alone, not where it lies."""
        return False

    @property
    def is_shared_by_queries(self) -> bool:
        """Whether all queries of a sequence may look at the same keys."""
        return False

    def allowed_pairs(self, block: Block) -> Array | None:
        """A boolean array that broadcasts against (…, r, c), or None for all."""
        raise NotImplementedError("a mask says which pairs may attend")

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        """What holds for the whole block, as far as it is known without looking at each pair."""
        return None

    def key_extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        """Keys outside start … end are ruled out for all these queries."""
        return 0, m

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        """Raise where the mask does not fit scores of shape (*lead, n, m)."""

    def list_arrays(self) -> list[Array]:
        """The arrays that must be of the call's own framework."""
        return []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A mask beside a tensor: torch.compile asks here, and names the tensor first."""
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
            "a mask is neither true nor false, and `and` would drop one of two: write & for and, "
            "| for or, ~ for not"
        )


class CompoundMask(Mask):
    """A mask made of others, its fields."""

    @property
    def operand_masks(self) -> tuple[Mask, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    @property
    def is_relative(self) -> bool:
        return all(part.is_relative for part in self.operand_masks)

    @property
    def is_shared_by_queries(self) -> bool:
        return all(part.is_shared_by_queries for part in self.operand_masks)

    def list_arrays(self) -> list[Array]:
        return [x for part in self.operand_masks for x in part.list_arrays()]

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        for part in self.operand_masks:
            part.check_shapes(lead, n, m)


@dataclass(frozen=True, repr=False)
class PairMask(CompoundMask):
    """Two masks as one."""

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
        a, b = (x.block_verdict(rows, cols, n, m) for x in (self.one, self.two))
        if a is False or b is False:
            return False
        return True if a and b else None


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
        a, b = (x.block_verdict(rows, cols, n, m) for x in (self.one, self.two))
        if a or b:
            return True
        return False if a is False and b is False else None


@dataclass(frozen=True, repr=False)
class NotMask(CompoundMask):
    one: Mask

    def __repr__(self) -> str:
        return f"~{_parenthesize(self.one)}"

    def allowed_pairs(self, block: Block) -> Array | None:
        a = self.one.allowed_pairs(block)
        if a is None:
            return block.q - block.k != block.q - block.k  # nowhere
        return get_framework(a).xp.logical_not(a)

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        a = self.one.block_verdict(rows, cols, n, m)
        return None if a is None else not a


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
        return part != -float("inf") if self.is_bias else part

    def block_verdict(self, rows: Span, cols: Span, n: int, m: int) -> BlockVerdict:
        host = host_values(self.values)
        if host is None:
            return None
        high, wide = (
            slice(None) if size == 1 else slice(span.start, span.start + span.size)
            for size, span in zip(host.shape[-2:], (rows, cols), strict=True)
        )
        host = host[..., high, wide]
        live = host if host.dtype == bool else host != -np.inf
        return True if live.all() else (None if live.any() else False)

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        shape, full = tuple(self.values.shape), (*lead, n, m)
        fits = len(shape) <= len(full)
        for a, b in zip(shape[::-1], full[::-1], strict=False):
            fits = fits and (a == b or a == 1 or a is None or b is None)
        if not fits:
            raise ShapeError(
                f"mask: an array of shape {shape} does not broadcast to {full}: it has a row for "
                "each query and a column for each key"
            )


def array(values: Any) -> Mask:
    """A boolean array (True: may attend), or a float array (added; −∞ rules out), as a mask.

    A mask stays as it is; one that needs no argument may be given by its name.

    >>> array("causal")
    causal
    """
    if isinstance(values, Mask):
        return values
    if not is_array(values):
        if isinstance(values, str):
            return _mask_by_name(values)
        if not isinstance(values, list | tuple):
            told = type(values).__name__
            if isinstance(values, bool):
                told += ": masks.causal is the mask that flags such as is_causal=True stand for"
            elif callable(values):
                ours = getattr(values, "__module__", "").startswith("qkv.masks")
                name = getattr(values, "__name__", "")
                step = f"call it, masks.{name}(…)" if ours else "wrap it as masks.custom(f)"
                told = f"a function: {step}"
            elif hasattr(values, "mask_mod"):  # what FlexAttention makes of such a function
                told = f"a {type(values).__name__}: pass masks.custom(mask.mask_mod)"
            raise DtypeError(
                "mask must be a mask of qkv.masks, its name, or a boolean or float array, not "
                + told
            )
        try:
            values = np.asarray(values)
        except ValueError:
            raise DtypeError("mask is no rectangle: its rows differ in length") from None
    if hasattr(values, "variant"):  # torch's `causal_upper_left` has a shape, and memory unset
        raise DtypeError(
            f"mask is a {type(values).__name__} of torch, which holds no numbers: pass "
            "masks.causal, or masks.causal('bottom_right') for the lower right"
        )
    values = as_plain_array(values, "mask")
    kind = get_framework(values).dtype_name(values)
    if kind != "bool" and "float" not in kind:
        step = "mask == 1 of zeros and ones"
        if len(values.shape) < 2:  # a row for each query is what a mask mostly has
            step = "masks.lengths(mask) where these are lengths, " + step
        raise DtypeError(
            f"mask is an array of {kind}: pass booleans (True: may attend) or floats (added to the "
            f"scores), so that 0 and 1 cannot be misread: {step}"
        )
    while len(values.shape) < 2:
        values = values[None, ...]
    return ArrayMask(values, is_bias=kind != "bool")


def _mask_by_name(name: str) -> Mask:
    from qkv.masks import NAMES

    if name not in NAMES:
        raise unknown_name_error("mask", name, NAMES)
    found = NAMES[name]
    if not isinstance(found, Mask):
        given = ", ".join(signature(found).parameters)
        raise DtypeError(f"mask {name!r} has parameters: build it, masks.{name}({given})")
    return found


def resolve(mask: Any) -> tuple[Mask | None, Array | None]:
    """A mask as its rule and, where it adds to the scores, the array that it adds."""
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
            "a float mask adds to the scores, so it combines by & only: | and ~ take booleans"
        )
    return mask


@dataclass(frozen=True)
class ShardMask(Mask):
    """What a rule says of blocks of a call that lies at `at` of a larger one.

    `allowed_pairs` is the rule's own: a block knows the positions that it lies at.
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
        found = self.rule.key_extent(rows, at.n, m if self.rule.has_key_axis else at.m)
        start, end = (min(max(x - self.key_shift, 0), m) for x in found)
        return start, end

    def check_shapes(self, lead: Shape, n: int, m: int) -> None:
        self.rule.check_shapes(lead, self.at.n, m if self.rule.has_key_axis else self.at.m)

    @property
    def key_shift(self) -> int:
        return 0 if self.rule.has_key_axis else self.at.col


def localize_mask(rule: Mask, at: ShardPosition | None) -> Mask:
    """The rule for blocks of a call that lies there; None: it is the whole call.

    Positions are those of the whole; an array has a row for each query of the whole, and a column
    for each key that is here.

    >>> from qkv.masks import causal
    >>> localize_mask(causal, ShardPosition(0, 4, 8, 8)).key_extent(
    ...     Span(0, 6), 8, 4
    ... )  # key 4 is the first one here
    (0, 2)
    """
    if at is None:
        return rule
    if isinstance(rule, CompoundMask):
        return type(rule)(*(localize_mask(part, at) for part in rule.operand_masks))
    return ShardMask(rule, at)
