"""Scores that are products of a query and a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from qkv.arrays import is_array, of, to_numpy
from qkv.errors import ArgumentError, DtypeError, ShapeError, as_float, plain, positive
from qkv.scores.base import Affine, Form, Lowering, Score, array_of, differ
from qkv.types import Array, Shape


@dataclass(frozen=True)
class Dot(Score):
    """s = qᵀk

    >>> import numpy as np
    >>> Dot()(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [0.0, 1.0]]))
    array([[11.,  2.]])
    """

    also: ClassVar[tuple[str, ...]] = ("dot_product", "inner_product", "linear")

    @property
    def linear(self) -> bool:
        return True

    def __call__(self, query: Array, key: Array) -> Array:
        return of(query).inner(query, key)

    def form(self, query: Array, key: Array) -> Form:
        return Form(query, key)

    def affine(self, query: Array, norm: Array) -> Affine | None:
        return Affine(query)


@dataclass(frozen=True)
class ScaledDot(Score):
    """s = qᵀk · scale, scale = 1/√d unless given; then softcap · tanh(s / softcap) if asked.

    >>> import numpy as np
    >>> ScaledDot()(np.array([[1.0, 1.0, 1.0, 1.0]]), np.array([[1.0, 2.0, 3.0, 4.0]]))
    array([[5.]])
    """

    also: ClassVar[tuple[str, ...]] = ("scaled_dot_product", "sdpa", "vaswani")

    scale: float | Array | None = None
    softcap: float | Array | None = None
    numbers: ClassVar[dict[str, bool]] = {"scale": True, "softcap": False}

    def __post_init__(self) -> None:
        if self.softcap is not None:
            positive(self, "softcap")
        if self.scale is None or is_array(self.scale):
            return
        if type(self.scale) is float and -math.inf < self.scale < math.inf:
            return  # also one that torch.compile leaves open, which nothing of math takes
        if not isinstance(self.scale, Real):
            raise DtypeError(f"ScaledDot: scale must be a number, not {self.scale!r}")
        if not math.isfinite(as_float(self.scale)):
            raise ArgumentError(f"ScaledDot: scale must be finite, not {self.scale!r:.40}")
        plain(self, "scale")

    def __call__(self, query: Array, key: Array) -> Array:
        s = of(query).inner(query * self.factor(query), key)
        if self.softcap is None:
            return s
        return of(s).xp.tanh(s / self.softcap) * self.softcap

    @property
    def linear(self) -> bool:
        return self.softcap is None

    def factor(self, query: Array) -> Any:
        if self.scale is not None:
            return self.scale
        fw = of(query)
        width = fw.length(query, -1)
        return (fw.astype(width, fw.dtype(query)) if is_array(width) else width or 1) ** -0.5

    def form(self, query: Array, key: Array) -> Form:
        factor = self.factor(query)
        return Form(query * factor, key) if is_array(factor) else Form(query, key, scale=factor)

    def affine(self, query: Array, norm: Array) -> Affine | None:
        if is_array(self.scale) or is_array(self.softcap):
            return None
        return Affine(query * self.factor(query), cap=self.softcap)

    def lowered(self, query: Array, key: Array, tolerance: float | None, dtype: str) -> Lowering:
        return (self, 0.0) if self.softcap is None else "a softcap bends the dot product"


@dataclass(frozen=True)
class Cosine(Score):
    """s = qᵀk / (‖q‖ ‖k‖ τ); 0 where a vector is zero.

    >>> import numpy as np
    >>> Cosine()(np.array([[3.0, 0.0]]), np.array([[5.0, 0.0], [0.0, 2.0]]))
    array([[1., 0.]])
    """

    temperature: float | Array = 1.0
    numbers: ClassVar[dict[str, bool]] = {"temperature": False}

    def __call__(self, query: Array, key: Array) -> Array:
        return of(query).inner(unit(query), unit(key)) / self.temperature

    def form(self, query: Array, key: Array) -> Form:
        return Form(_settled(query) / self.temperature, _settled(key))

    def affine(self, query: Array, norm: Array) -> Affine | None:
        if is_array(self.temperature):
            return None
        fw, some = of(norm), norm > 0
        return Affine(unit(query) / self.temperature, fw.keep(1 / fw.keep(norm, some, 1.0), some))

    def aside(self, key: Array) -> Array | None:
        """1 / ‖k‖, and 0 for 0; None where a square would overflow or vanish."""
        fw = of(key)
        xp = fw.xp
        square = xp.sum(key * key, axis=-1)
        some = square != 0
        if not xp.all((square < 1e30) & ((square > 1e-30) | ~some & xp.all(key == 0, axis=-1))):
            return None
        return fw.keep(1 / xp.sqrt(fw.keep(square, some, 1.0)), some)

    def beside(self, query: Array, key: Array, aside: Array) -> Array:
        return of(query).inner(unit(query) / self.temperature, key) * aside


def _settled(x: Array) -> Array:
    """unit(x), where a row that is not finite passes its gradient on as it comes: by its length,
    which is NaN, the 0 that comes from behind a mask would be NaN too."""
    fw = of(x)
    if not fw.needs_gradient([x]) or fw.surely_finite(x):
        return unit(x)
    finite = fw.xp.all(fw.xp.isfinite(x), axis=-1, keepdims=True)
    return fw.xp.where(finite, unit(fw.keep(x, finite, 1.0)), x - fw.detach(x))


def unit(x: Array) -> Array:
    """x / ‖x‖ along the last axis, and 0 for 0: scaled first, so that no square overflows."""
    fw = of(x)
    xp = fw.xp
    if x.shape[-1] == 0:
        return x
    largest = fw.detach(xp.max(xp.abs(x), axis=-1, keepdims=True))
    some = largest > 0
    x = x / fw.keep(largest, some, 1.0)
    square = xp.sum(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(fw.keep(square, some, 1.0))


@dataclass(frozen=True)
class Multiplicative(Score):
    """s = qᵀWk, with w (d_q, d_k).

    >>> import numpy as np
    >>> Multiplicative(np.array([[0.0, 1.0]]))(np.array([[2.0]]), np.array([[3.0, 4.0]]))
    array([[8.]])
    """

    also: ClassVar[tuple[str, ...]] = ("luong", "general", "bilinear")

    w: Array

    def __post_init__(self) -> None:
        array_of(self, "w", "d_q", "d_k")

    def __call__(self, query: Array, key: Array) -> Array:
        return self.form(query, key).scores()

    def form(self, query: Array, key: Array) -> Form:
        return Form(of(query).xp.matmul(query, self.w), key)

    def affine(self, query: Array, norm: Array) -> Affine | None:
        return Affine(query @ to_numpy(self.w)) if len(self.w.shape) == 2 else None

    def check(self, query: Shape, key: Shape) -> None:
        if any(map(differ, self.w.shape[-2:], (query[-1], key[-1]))):
            raise ShapeError(
                f"Multiplicative: w must be (d_q, d_k) = ({query[-1]}, {key[-1]}), "
                f"not {tuple(self.w.shape)}"
            )
