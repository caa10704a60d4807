"""Scores that decrease with the distance between a query and a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from qkv.frameworks import divide_unless_one, get_framework, is_array, tree
from qkv.frameworks.squares import MIN_EXPANDED_COLUMNS, NeedsExact
from qkv.scores.base import AffineForm, DotProductForm, Lowering, Score, broadcast_pairs
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array


def sum_differences(query: Array, key: Array, power: int) -> Array:
    """Return Σ |q − k|ᵖ over the columns (…, n, m), for the power 1 or 2.

    Frameworks that can avoid the array of differences (…, n, m, d) do so.

    >>> import numpy as np
    >>> sum_differences(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]), 2)
    array([[4.]])
    """
    fw, _ = get_framework(query), get_framework(key)  # raises our error for a list
    fast = fw.sum_differences(query, key, power)
    if fast is not None:
        return fast
    q, k = broadcast_pairs(query, key)
    difference = q - k
    powers = fw.xp.abs(difference) if power == 1 else difference * difference
    return fw.xp.sum(powers, axis=-1)


def expanded_distance(
    query: Array, key: Array, width: float | Array, needs_exact: NeedsExact
) -> Array:
    """Return ‖q − k‖² / width² (…, n, m), from a product if that is precise; see `squares`."""
    fw, _ = get_framework(query), get_framework(key)  # raises our error for a list
    least, most = SAFE_BANDWIDTHS
    if type(width) is not float or not least <= width <= most:
        query, key = divide_unless_one(query, width), divide_unless_one(key, width)
        width = 1.0
    square = fw.expand_squares(query, key, width, needs_exact)
    return squared_distance(query, key, width) if square is None else square


def squared_distance(query: Array, key: Array, width: float | Array) -> Array:
    """Return ‖q − k‖² / width² (…, n, m), computed from differences.

    The expanded square would lose precision far from the origin. Dividing before squaring keeps a
    small width from underflowing.
    """
    return sum_differences(divide_unless_one(query, width), divide_unless_one(key, width), 2)


@suggest_keywords
@dataclass(frozen=True)
class Gaussian(Score):
    """s = −‖q − k‖² / 2σ²; its softmax is the Nadaraya–Watson estimator.

    >>> import numpy as np
    >>> Gaussian(0.5)(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[-0., -2.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("rbf", "l2", "euclidean", "nadaraya_watson")

    bandwidth: float | Array = 1.0
    number_fields: ClassVar[dict[str, bool]] = {"bandwidth": True}
    compares_elementwise: ClassVar[bool] = True
    uses_sum_differences: ClassVar[bool] = True
    needs_range: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        return expanded_distance(query, key, self.bandwidth, lambda *_: None) * -0.5

    @property
    def is_radial(self) -> bool:
        return not is_array(self.bandwidth)

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        return affine_squared_distance(query, norm, self.bandwidth, 0.5) if self.is_radial else None

    def adapt_to_keys(self, sample: Array) -> Score:
        if sample.shape[-1] < MIN_EXPANDED_COLUMNS or len(getattr(self.bandwidth, "shape", ())) > 1:
            return self
        return CentredGaussian(self.bandwidth, get_framework(sample).xp.mean(sample, axis=0))

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        if dtype in ("float16", "bfloat16"):
            # Products of 16-bit numbers are exact in float32. Its sums lose less precision, at any
            # range, than the rounding to 16 bits has already lost.
            return ExpandedGaussian(self.bandwidth), 0.0
        if 0 in (*query.shape, *key.shape):
            return "an array is empty"
        expanded = self.expand(key)
        squares = self.measure_range(query, key, expanded)
        error = self.error_in_range(squares, query.shape[-1], tolerance, dtype)
        return error if isinstance(error, str) else (expanded, error)

    def expand(self, key: Array) -> ExpandedGaussian:
        """Return the score as an expanded square around the mean key."""
        fw = get_framework(key)
        rows = fw.xp.reshape(fw.detach(key), (-1, key.shape[-1]))
        return ExpandedGaussian(self.bandwidth, fw.xp.sum(rows, axis=0) / rows.shape[0])

    def measure_range(
        self, query: Array, key: Array, expanded: ExpandedGaussian | None = None
    ) -> tuple[Array, Array]:
        """Return the largest ‖q′‖² and ‖k′‖² of `ExpandedGaussian`, on which its error depends."""
        fw = get_framework(query)
        # Detach, because an activation checkpoint counts the nodes that a call adds to the graph.
        detached = tree.map_arrays(fw, fw.detach, expanded or self.expand(key))
        query, key = (detached.center_and_scale(fw.detach(x)) for x in (query, key))
        return tuple(fw.xp.max(fw.xp.sum(x * x, axis=-1)) for x in (query, key))

    def error_in_range(
        self, squares: tuple[Any, Any], width: int, tolerance: float | None, dtype: str
    ) -> float | str:
        """Return the error of the expanded score in the range that `measure_range` returned.

        If the expanded score is not precise enough, return why.
        """
        norm_sum = sum(math.sqrt(float(x)) for x in squares)
        unit = 2.0**-53 if dtype == "float64" else 2.0**-24
        rounding = norm_sum * norm_sum * unit
        error = rounding * (width + 3)
        if rounding <= unit * MAX_SQUARED_NORM_SUM or (
            tolerance is not None and error <= tolerance
        ):
            return error
        return (
            f"queries and keys are up to {norm_sum:.3g} bandwidths from the mean key, where the "
            f"expanded square has an error of up to {error:.1g}"
        )


MAX_SQUARED_NORM_SUM = 2.0**10
"""Up to this (‖q‖ + ‖k‖)² / σ², the expanded square is as precise as a dot product."""


@dataclass(frozen=True)
class ExpandedGaussian(Score):
    """s = q′ᵀk′ − ‖q′‖²/2 − ‖k′‖²/2, with x′ = (x − centre) / σ: the Gaussian score, expanded.

    >>> import numpy as np
    >>> ExpandedGaussian(0.5, np.zeros(1))(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[ 0., -2.]])
    """

    bandwidth: float | Array
    centre: Array | None = None

    def __call__(self, query: Array, key: Array) -> Array:
        return self.dot_product_form(query, key).compute_scores()

    def center_and_scale(self, x: Array) -> Array:
        if self.centre is not None:
            # Add the axes explicitly: JAX can be set to reject implicit rank promotion.
            x = x - self.centre[(*[None] * (len(x.shape) - 1), ...)]
        return divide_unless_one(_repeat_heads_for(x, self.bandwidth), self.bandwidth)

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        if self.centre is None and not is_array(self.bandwidth):
            # 16-bit vectors stay as they are; only bias and offset are float32.
            scale = 1 / self.bandwidth**2
            bias, offset = (_squared_norm(x, -0.5 * scale) for x in (key, query))
            return DotProductForm(query, key, bias, offset, scale=scale)
        query, key = self.center_and_scale(query), self.center_and_scale(key)
        return DotProductForm(query, key, _squared_norm(key, -0.5), _squared_norm(query, -0.5))


@dataclass(frozen=True)
class CentredGaussian(Gaussian):
    """The Gaussian score for NumPy keys near a `centre` (d,), with ‖k − centre‖² as key terms.

    s = q′·k / σ² − ‖q′‖²/2σ² − ‖k′‖²/2σ² − q′·centre / σ², with x′ = x − centre. Where this loses
    precision, the score is computed from differences.

    >>> import numpy as np
    >>> score, key = CentredGaussian(0.5, np.zeros(1)), np.array([[1.0], [2.0]])
    >>> score.score_with_key_terms(np.array([[1.0]]), key, score.key_terms(key))
    array([[ 0., -2.]])
    """

    centre: Array = 0.0

    @property
    def key_terms_signature(self) -> Any:
        width: Any = self.bandwidth
        return self.centre.tobytes(), width.tobytes() if is_array(width) else None

    def key_terms(self, key: Array) -> Array | None:
        """Return ‖k − centre‖² of each key; with a bandwidth per column, in units of these."""
        x = key - self.centre
        if is_array(self.bandwidth):
            x /= self.bandwidth
        xp = get_framework(key).xp
        square = xp.sum(x * x, axis=-1)
        return square if xp.all(square < MAX_SQUARE) else None

    def score_with_key_terms(self, query: Array, key: Array, terms: Array) -> Array:
        xp, fw = get_framework(query).xp, get_framework(query)
        scale = 1.0 if is_array(self.bandwidth) else 1 / self.bandwidth**2
        shifted = query - self.centre
        phi = shifted / self.bandwidth if is_array(self.bandwidth) else shifted
        square, centre = xp.sum(phi * phi, axis=-1), self.centre / self.bandwidth
        # (‖q′‖ + ‖k′‖) / σ, and the length that the centre adds to a key.
        reach = (math.sqrt(float(square.max())) + math.sqrt(float(terms.max()))) * math.sqrt(scale)
        offset = math.sqrt(float(xp.sum(centre * centre)))
        if not reach * reach <= MAX_SQUARED_NORM_SUM:
            return super().__call__(query, key)
        phi = phi / self.bandwidth if is_array(self.bandwidth) else phi
        if reach * (reach + offset) <= MAX_SQUARED_NORM_SUM:
            products = fw.inner_products(phi, key) - xp.sum(phi * self.centre, axis=-1)[:, None]
        else:
            products = fw.inner_products(phi, key - self.centre)
        products -= (square[:, None] + terms) * 0.5
        return xp.minimum(products * scale, 0.0)


MAX_SQUARE = 1e30
"""Squares up to this can be added in float32."""

SAFE_BANDWIDTHS = (1e-6, 1e6)
"""Range of bandwidths whose squares every dtype can represent."""


@dataclass(frozen=True)
class QuickGaussian(Gaussian, new_formula=True):
    """The Gaussian score for small calls: expanded if that is precise, else by differences.

    `__call__` itself decides. A separate `find_lowering` would take longer than a small call.

    >>> import numpy as np
    >>> QuickGaussian(0.5)(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[ 0., -2.]])
    """

    def __call__(self, query: Array, key: Array) -> Array:
        fw, scale = get_framework(query), self.bandwidth**-2
        squares = [fw.row_sum(x * x) for x in (query, key)]
        norm_sum = sum(math.sqrt(float(fw.detach(x).max())) for x in squares)
        if not norm_sum * norm_sum * scale <= MAX_SQUARED_NORM_SUM:
            return super().__call__(query, key)
        half = (squares[0] + fw.xp.matrix_transpose(squares[1])) * 0.5
        return (fw.inner_products(query, key) - half) * scale


def _repeat_heads_for(x: Array, bandwidth: float | Array) -> Array:
    """Return x with its shared heads repeated, if `bandwidth` (…, h, 1, 1) has more heads."""
    heads = tuple(getattr(bandwidth, "shape", ()))[-3:-2]
    shared_heads = x.shape[-3:-2]
    if () in (heads, shared_heads) or heads[0] == 1 or shared_heads[0] in (1, heads[0]):
        return x
    return get_framework(x).repeat_heads(x, heads[0])


def _squared_norm(x: Array, factor: float) -> Array:
    """Return ‖x‖² · factor (…, r, 1), at least in float32."""
    fw = get_framework(x)
    x = fw.astype(x, "float32") if fw.dtype_name(x) in ("float16", "bfloat16") else x
    return fw.xp.sum(x * x, axis=-1, keepdims=True) * factor


def affine_squared_distance(
    query: Array, norm: Array, width: float, factor: float
) -> AffineForm | None:
    """Return the form of −factor ‖q − k‖² / width²; None if width² overflows or underflows."""
    if not 1e-150 < width < 1e150:
        return None
    factor /= width**2
    offset = get_framework(query).xp.sum(query * query, axis=-1)
    return AffineForm(query * (2 * factor), None, norm * norm * -factor, offset * -factor)


@suggest_keywords
@dataclass(frozen=True)
class Laplace(Score):
    """s = −‖q − k‖₁ / b

    >>> import numpy as np
    >>> Laplace()(np.array([[1.0, 1.0]]), np.array([[1.0, 3.0]]))
    array([[-2.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("l1", "manhattan", "laplacian")

    bandwidth: float | Array = 1.0
    number_fields: ClassVar[dict[str, bool]] = {"bandwidth": False}
    compares_elementwise: ClassVar[bool] = True
    uses_sum_differences: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        return sum_differences(query, key, 1) / self.bandwidth * -1.0
