"""Masks by a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.arrays import is_array, of
from qkv.errors import DtypeError, ShapeError, applied
from qkv.masks.base import Compound, Mask
from qkv.types import Array, Block, Span

MOD = "(b, h, q_idx, kv_idx)"


@dataclass(frozen=True, repr=False)
class Custom(Mask):
    mask_mod: Callable[[Array, Array, Array, Array], Array]

    def __repr__(self) -> str:
        return f"custom({getattr(self.mask_mod, '__name__', self.mask_mod)})"

    def allowed(self, block: Block) -> Array | None:
        at = block.b, block.h, block.q, block.k
        out = applied(self.mask_mod, *at, takes=f"masks.custom: mask_mod must take {MOD}")
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
        while len(fw.shape(out)) < 2:  # one word for all pairs, or a row: kernels want both axes
            out = out[None, ...]
        return out


def custom(mask_mod: Callable[[Array, Array, Array, Array], Array]) -> Mask:
    """mask_mod(b, h, q_idx, kv_idx) → boolean, FlexAttention's; the positions are arrays.

    >>> import qkv
    >>> even = custom(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    >>> qkv.weights([[0.0]], [[0.0], [0.0], [0.0]], mask=even)
    array([[0.5, 0. , 0.5]])
    """
    if not callable(mask_mod):
        own = ": pass its mask_mod" if hasattr(mask_mod, "mask_mod") else ""
        raise DtypeError(
            f"masks.custom: mask_mod must be a function {MOD}, not {type(mask_mod).__name__}{own}"
        )
    return Custom(mask_mod)


@dataclass(frozen=True)
class Hoisted(Mask):
    """A rule whose functions held arrays, with those arrays among its fields."""

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def allowed(self, block: Block) -> Array | None:
        return self.function(block.q[:, 0], block.k[0, :], *self.captured)


def hoisted(rule: Mask, block: Block, place: Any) -> Mask:
    """The rule of such a block as a function of arrays alone; `place(rows, cols)` is a Block."""

    def function(q: Array, k: Array) -> Array:
        return rule.allowed(place(Span(q[0], q.shape[0]), Span(k[0], k.shape[0])))

    return Hoisted(*of(block.q).hoist(function, block.q[:, 0], block.k[0, :]))


def has_functions(rule: Any) -> bool:
    """Whether a rule holds a function of the caller's, and maybe arrays that no field shows."""
    inner = rule.parts if isinstance(rule, Compound) else ()
    return isinstance(rule, Custom) or any(map(has_functions, inner))
