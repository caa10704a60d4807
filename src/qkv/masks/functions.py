"""Masks from a user's functions, as in FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from qkv.errors import DtypeError, ShapeError, call_user_function
from qkv.frameworks import get_framework, is_array
from qkv.masks.base import CompoundMask, Mask
from qkv.util.types import Array, Block, Span

MASK_MOD_SIGNATURE = "(b, h, q_idx, kv_idx)"


@dataclass(frozen=True, repr=False)
class CustomMask(Mask):
    mask_mod: Callable[[Array, Array, Array, Array], Array]
    function_field: ClassVar[str] = "mask_mod"

    def __repr__(self) -> str:
        return f"custom({getattr(self.mask_mod, '__name__', self.mask_mod)})"

    def allowed_pairs(self, block: Block) -> Array | None:
        at = block.b, block.h, block.q, block.k
        out = call_user_function(
            self.mask_mod, *at, takes=f"masks.custom: mask_mod must take {MASK_MOD_SIGNATURE}"
        )
        fw = get_framework(block.q)
        if not is_array(out) or get_framework(out) is not fw or fw.dtype_name(out) != "bool":
            kind = fw.dtype_name(out) if is_array(out) else type(out).__name__
            raise DtypeError(
                f"masks.custom: mask_mod must return booleans of {fw.name}, not {kind}"
            )
        shape, expected = fw.static_shape(out), (block.rows.size, block.cols.size)
        sizes = zip(shape[::-1], expected[::-1], strict=False)
        if len(shape) > block.lead_axes + 2 or any(a not in (1, b, None) for a, b in sizes):
            raise ShapeError(
                f"masks.custom: mask_mod returned shape {shape}, which does not broadcast to "
                f"the scores' shape {expected}"
            )
        while len(fw.static_shape(out)) < 2:  # kernels need both axes
            out = out[None, ...]
        return out


def custom(mask_mod: Callable[[Array, Array, Array, Array], Array]) -> Mask:
    """Query q_idx sees key kv_idx if mask_mod(b, h, q_idx, kv_idx) is True, as in FlexAttention.

    The four positions are integer arrays that broadcast against the scores.

    >>> import qkv
    >>> even = custom(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    >>> qkv.weights([[0.0]], [[0.0], [0.0], [0.0]], mask=even)
    array([[0.5, 0. , 0.5]])
    """
    if not callable(mask_mod):
        own = ": pass its mask_mod" if hasattr(mask_mod, "mask_mod") else ""
        raise DtypeError(
            f"masks.custom: mask_mod must be a function {MASK_MOD_SIGNATURE}, not "
            f"{type(mask_mod).__name__}{own}"
        )
    return CustomMask(mask_mod)


@dataclass(frozen=True)
class HoistedMask(Mask):
    """A mask whose functions capture arrays. The arrays are a field, so the call can list them."""

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def allowed_pairs(self, block: Block) -> Array | None:
        return self.function(block.q[:, 0], block.k[0, :], *self.captured)


def hoist_mask(rule: Mask, block: Block, make_block: Any) -> Mask:
    """Return a `HoistedMask` with the arrays that the functions of the rule capture.

    `block` is an example for tracing. `make_block(rows, cols)` returns the Block at a position.
    """

    def allowed_at(q: Array, k: Array) -> Array:
        return rule.allowed_pairs(make_block(Span(q[0], q.shape[0]), Span(k[0], k.shape[0])))

    return HoistedMask(
        *get_framework(block.q).hoist_captures(allowed_at, block.q[:, 0], block.k[0, :])
    )


def has_user_functions(rule: Any) -> bool:
    """Return whether a rule contains a user's function, which may capture arrays."""
    inner = rule.operand_masks if isinstance(rule, CompoundMask) else ()
    return isinstance(rule, CustomMask) or any(map(has_user_functions, inner))
