"""Scores that multiply a query with a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from qkv.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    as_float,
    coerce_field_to_float,
    validate_positive,
)
from qkv.frameworks import get_framework, is_array, to_numpy
from qkv.scores.base import (
    AffineForm,
    DotProductForm,
    Lowering,
    Score,
    require_array_field,
    sizes_differ,
)
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Shape


@suggest_keywords
@dataclass(frozen=True)
class Dot(Score):
    """s = qᵀk

    >>> import numpy as np
    >>> Dot()(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [0.0, 1.0]]))
    array([[11.,  2.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("dot_product", "inner_product", "linear")

    @property
    def is_linear(self) -> bool:
        return True

    def __call__(self, query: Array, key: Array) -> Array:
        return get_framework(query).inner_products(query, key)

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        return DotProductForm(query, key)

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        return AffineForm(query)


@suggest_keywords
@dataclass(frozen=True)
class ScaledDot(Score):
    """s = qᵀk · scale, then softcap · tanh(s / softcap) if set. The default scale is 1/√d.

    >>> import numpy as np
    >>> ScaledDot()(np.array([[1.0, 1.0, 1.0, 1.0]]), np.array([[1.0, 2.0, 3.0, 4.0]]))
    array([[5.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("scaled_dot_product", "sdpa", "vaswani")

    scale: float | Array | None = None
    softcap: float | Array | None = None
    number_fields: ClassVar[dict[str, bool]] = {"scale": True, "softcap": False}

    def __post_init__(self) -> None:
        if self.softcap is not None:
            validate_positive(self, "softcap")
        if self.scale is None or is_array(self.scale):
            return
        if type(self.scale) is float and -math.inf < self.scale < math.inf:
            return  # torch.compile may pass a symbolic float here, which math.isfinite rejects
        if not isinstance(self.scale, Real):
            raise DtypeError(f"ScaledDot: scale must be a number, not {self.scale!r}")
        if not math.isfinite(as_float(self.scale)):
            raise ArgumentError(f"ScaledDot: scale must be finite, not {self.scale!r:.40}")
        coerce_field_to_float(self, "scale")

    def __call__(self, query: Array, key: Array) -> Array:
        s = get_framework(query).inner_products(query * self.scale_factor(query), key)
        if self.softcap is None:
            return s
        return get_framework(s).xp.tanh(s / self.softcap) * self.softcap

    @property
    def is_linear(self) -> bool:
        return self.softcap is None

    def scale_factor(self, query: Array) -> Any:
        if self.scale is not None:
            return self.scale
        fw = get_framework(query)
        width = fw.axis_length(query, -1)
        return (fw.astype(width, fw.dtype_name(query)) if is_array(width) else width or 1) ** -0.5

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        factor = self.scale_factor(query)
        return (
            DotProductForm(query * factor, key)
            if is_array(factor)
            else DotProductForm(query, key, scale=factor)
        )

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        if is_array(self.scale) or is_array(self.softcap):
            return None
        return AffineForm(query * self.scale_factor(query), softcap=self.softcap)

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        return (self, 0.0) if self.softcap is None else "a softcap makes the score nonlinear"


@suggest_keywords
@dataclass(frozen=True)
class Cosine(Score):
    """s = qᵀk / (‖q‖ ‖k‖ τ), with τ = temperature; 0 if a vector is zero.

    >>> import numpy as np
    >>> Cosine()(np.array([[3.0, 0.0]]), np.array([[5.0, 0.0], [0.0, 2.0]]))
    array([[1., 0.]])
    """

    temperature: float | Array = 1.0
    number_fields: ClassVar[dict[str, bool]] = {"temperature": False}

    def __call__(self, query: Array, key: Array) -> Array:
        fw, query = get_framework(query), unit_vectors(query)
        if fw.checks_values(key) and 2 * query.shape[-2] <= key.shape[-1]:  # sizes are known
            squares = _safe_squared_norms(key)
            if squares is not None:  # the scores are fewer than the numbers of the keys
                norms = fw.xp.sqrt(squares)[..., None, :]
                return fw.inner_products(query, key) / (norms * self.temperature)
        return fw.inner_products(query, unit_vectors(key)) / self.temperature

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        return DotProductForm(
            _unit_vectors_safe_gradient(query) / self.temperature, _unit_vectors_safe_gradient(key)
        )

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        if is_array(self.temperature):
            return None
        fw, is_nonzero = get_framework(norm), norm > 0
        return AffineForm(
            unit_vectors(query) / self.temperature,
            fw.fill_unless(1 / fw.fill_unless(norm, is_nonzero, 1.0), is_nonzero),
        )

    def key_terms(self, key: Array) -> Array | None:
        """Return 1 / ‖k‖, and 0 for zero vectors; None if a square overflows or underflows."""
        fw = get_framework(key)
        xp = fw.xp
        square = xp.sum(key * key, axis=-1)
        is_nonzero = square != 0
        if not xp.all(
            (square < 1e30) & ((square > 1e-30) | ~is_nonzero & xp.all(key == 0, axis=-1))
        ):
            return None
        return fw.fill_unless(1 / xp.sqrt(fw.fill_unless(square, is_nonzero, 1.0)), is_nonzero)

    def score_with_key_terms(self, query: Array, key: Array, terms: Array) -> Array:
        return (
            get_framework(query).inner_products(unit_vectors(query) / self.temperature, key) * terms
        )


def _unit_vectors_safe_gradient(x: Array) -> Array:
    """Return `unit_vectors(x)`, with a gradient that passes unchanged through nonfinite rows.

    The norm of such a row is NaN, which would turn the gradient 0 of a masked row into NaN.
    """
    fw = get_framework(x)
    if not fw.needs_gradient([x]) or fw.is_surely_finite(x):
        return unit_vectors(x)
    finite = fw.xp.all(fw.xp.isfinite(x), axis=-1, keepdims=True)
    return fw.xp.where(finite, unit_vectors(fw.fill_unless(x, finite, 1.0)), x - fw.detach(x))


def unit_vectors(x: Array) -> Array:
    """Return x / ‖x‖ along the last axis, and 0 for zero vectors.

    x is first divided by its largest component, so that no square overflows.
    """
    fw = get_framework(x)
    xp = fw.xp
    if x.shape[-1] == 0:
        return x
    squares = _safe_squared_norms(x)
    if squares is not None:
        return x / xp.sqrt(squares)[..., None]
    largest = fw.detach(xp.max(xp.abs(x), axis=-1, keepdims=True))
    is_nonzero = largest > 0
    x = x / fw.fill_unless(largest, is_nonzero, 1.0)
    square = xp.sum(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(fw.fill_unless(square, is_nonzero, 1.0))


def _safe_squared_norms(x: Array) -> Array | None:
    """Return ‖x‖² of each row, or None if one may overflow or lose digits, or be 0.

    None if reading the values would be slow, or if x needs a gradient.
    """
    fw = get_framework(x)
    if not fw.checks_values(x) or fw.dtype_name(x) not in ("float32", "float64"):
        return None
    if fw.needs_gradient([x]) or 0 in x.shape:
        return None
    squares = fw.squared_norms(x)
    least, most = fw.value_range(squares)
    return squares if least > SAFE_SQUARES[0] and most < SAFE_SQUARES[1] else None


SAFE_SQUARES = 1e-30, 1e30
"""Range of squares that float32 adds without overflow or loss of digits."""


@suggest_keywords
@dataclass(frozen=True)
class Multiplicative(Score):
    """s = qᵀWk, with w (d_q, d_k).

    >>> import numpy as np
    >>> Multiplicative(np.array([[0.0, 1.0]]))(np.array([[2.0]]), np.array([[3.0, 4.0]]))
    array([[8.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("luong", "general", "bilinear")

    w: Array

    def __post_init__(self) -> None:
        require_array_field(self, "w", "d_q", "d_k")

    def __call__(self, query: Array, key: Array) -> Array:
        return self.dot_product_form(query, key).compute_scores()

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        return DotProductForm(get_framework(query).xp.matmul(query, self.w), key)

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        return AffineForm(query @ to_numpy(self.w)) if len(self.w.shape) == 2 else None

    def check_shapes(self, query: Shape, key: Shape) -> None:
        if any(map(sizes_differ, self.w.shape[-2:], (query[-1], key[-1]))):
            raise ShapeError(
                f"Multiplicative: w must be (d_q, d_k) = ({query[-1]}, {key[-1]}), "
                f"not {tuple(self.w.shape)}"
            )
