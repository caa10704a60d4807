"""Nonnegative scores that can be used as weights: windows, constant and exact match."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv.frameworks import get_framework, is_array
from qkv.frameworks.squares import (
    MAX_EXACT_SHARE,
    MAX_EXPANDED_SQUARE,
    MIN_EXPANDED_COLUMNS,
    UNIT_BY_BYTES,
)
from qkv.scores.base import AffineForm, Score, broadcast_pairs
from qkv.scores.distance import (
    MAX_SQUARE,
    SAFE_BANDWIDTHS,
    affine_squared_distance,
    expanded_distance,
    squared_distance,
)
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Shape


@dataclass(frozen=True)
class Window(Score):
    """s = profile(r²) with r = ‖q − k‖₂ / width; nonnegative, and 0 for r > 1."""

    width: float | Array = 1.0
    number_fields: ClassVar[dict[str, bool]] = {"width": True}
    compares_elementwise: ClassVar[bool] = True
    uses_sum_differences: ClassVar[bool] = True
    is_nonnegative: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        return self.profile(self.squared_ratio(query, key))

    def squared_ratio(self, query: Array, key: Array) -> Array:
        """Return r² (…, n, m)."""
        return expanded_distance(query, key, self.width, self.needs_exact_square)

    def needs_exact_square(self, square: Array, error: Any) -> Array | None:
        """Return for which pairs this error of r² is too large for the score; None: for no pair."""
        return None

    @property
    def is_radial(self) -> bool:
        return not is_array(self.width)

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        """Return the affine form of −r²; `profile` turns r² into the score."""
        return affine_squared_distance(query, norm, self.width, 1.0) if self.is_radial else None

    def adapt_to_keys(self, sample: Array) -> Score:
        least, most = SAFE_BANDWIDTHS
        if not self.is_radial or not least < self.width < most:
            return self
        if sample.shape[-1] < MIN_EXPANDED_COLUMNS:
            return self
        return CentredWindow(self.width, self, get_framework(sample).xp.mean(sample, axis=0))

    def profile(self, square: Array) -> Array:
        """Return the score at r²."""
        raise NotImplementedError(f"{type(self).__name__} does not define profile(square)")

    @property
    def ranking_score(self) -> Score:
        return RankingWindow(self)


@dataclass(frozen=True)
class RankingWindow(Score):
    """s = the window's score where it is positive, else −r²"""

    uses_sum_differences: ClassVar[bool] = True

    window: Window

    def __call__(self, query: Array, key: Array) -> Array:
        fw, square = get_framework(query), squared_distance(query, key, self.window.width)
        s = self.window.profile(square)
        return fw.xp.where(s == 0, fw.detach(square) * -1.0, s)

    def numbers_per_pair(self, width: int) -> int:
        return self.window.numbers_per_pair(width)


@dataclass(frozen=True)
class CentredWindow(Window):
    """A window for NumPy keys near a `centre` (d,), with ‖k − centre‖² as key terms.

    r² is expanded to ‖q′‖² + ‖k′‖² − 2 q′·k + 2 q′·centre with x′ = x − centre. It is computed from
    differences where the expanded square is not precise enough.
    """

    window: Any = None
    centre: Array = 0.0

    def needs_exact_square(self, square: Array, error: Any) -> Array | None:
        needed: Array | None = self.window.needs_exact_square(square, error)
        return needed

    def profile(self, square: Array) -> Array:
        return self.window.profile(square)

    @property
    def key_terms_signature(self) -> Any:
        return self.centre.tobytes()

    def key_terms(self, key: Array) -> Array | None:
        """Return ‖k − centre‖² of each key; None if one is not finite."""
        x = key - self.centre
        square = np.sum(x * x, axis=-1)
        return square if np.all(square < MAX_SQUARE) else None

    def score_with_key_terms(self, query: Array, key: Array, terms: Array) -> Array:
        square = self._expand_square(query, key, terms)
        return self(query, key) if square is None else self.profile(square)

    def _expand_square(self, query: Array, key: Array, terms: Array) -> Array | None:
        """Return r² (n, c), or None if the expanded square is not precise enough."""
        scale, centre = 1 / self.width**2, self.centre.astype(query.dtype, copy=False)
        q = query - centre
        norms = np.sum(q * q, axis=-1)
        offsets = 2 * np.sqrt(norms) * math.sqrt(float(centre @ centre))
        most = float(norms.max(initial=0)) + float(terms.max(initial=0))
        if not most * scale <= MAX_EXPANDED_SQUARE:  # a comparison with NaN is false
            return None
        if (most + float(offsets.max(initial=0))) * scale <= MAX_EXPANDED_SQUARE:
            products = get_framework(query).inner_products(q, key) - (q @ centre)[:, None]
        else:
            products, offsets = get_framework(query).inner_products(q, key - centre), 0 * offsets
        total = norms[:, None] + terms
        error = (total + offsets[:, None]) * (
            scale * (query.shape[-1] + 8) * UNIT_BY_BYTES[query.dtype.itemsize]
        )
        total -= 2 * products
        np.maximum(total, 0, out=total)
        total *= scale
        exact = self.needs_exact_square(total, error)
        if exact is None:
            return total
        rows, cols = np.nonzero(exact)
        if len(rows) > MAX_EXACT_SHARE * total.size:
            return None
        difference = query[rows] / self.width - key[cols] / self.width
        total[rows, cols] = np.sum(difference * difference, axis=-1)
        return total


@suggest_keywords
@dataclass(frozen=True)
class Boxcar(Window):
    """s = 1 where r ≤ 1, else 0

    >>> import numpy as np
    >>> Boxcar(2.0)(np.array([[0.0]]), np.array([[2.0], [2.1]]))
    array([[1., 0.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("uniform", "rectangular", "box")

    def needs_exact_square(self, square: Array, error: Any) -> Array | None:
        return abs(square - 1.0) <= error

    def profile(self, square: Array) -> Array:
        fw = get_framework(square)
        square = fw.detach(square)
        inside = fw.astype(square <= 1, fw.dtype_name(square))
        if fw.is_surely_finite(square):
            return inside
        # NaN stays NaN: `square <= 1` would turn it into 0.
        return fw.xp.where(fw.xp.isnan(square), square, inside)


@suggest_keywords
@dataclass(frozen=True)
class Triangular(Window):
    """s = max(0, 1 − r)

    >>> import numpy as np
    >>> Triangular()(np.array([[0.0]]), np.array([[0.25], [2.0]]))
    array([[0.75, 0.  ]])
    """

    def needs_exact_square(self, square: Array, error: Any) -> Array | None:
        # √ turns an error e of r² into e / 2r. With r ≥ 1/8 it is at most 4 e.
        return square < 1.0 / 64

    def profile(self, square: Array) -> Array:
        fw = get_framework(square)
        if not fw.needs_gradient([square]):
            return 1.0 - fw.xp.sqrt(fw.xp.clip(square, max=1.0))
        # sqrt has no derivative at 0, and none is needed for r > 1.
        inside = fw.xp.logical_and(square > 0, square < 1)
        inside = fw.xp.logical_or(inside, fw.xp.isnan(square))
        r = fw.xp.sqrt(fw.fill_unless(square, inside, 1.0))
        return 1.0 - r + fw.astype(square == 0, fw.dtype_name(square))


@suggest_keywords
@dataclass(frozen=True)
class Epanechnikov(Window):
    """s = max(0, 1 − r²)

    >>> import numpy as np
    >>> Epanechnikov()(np.array([[0.0]]), np.array([[0.5], [2.0]]))
    array([[0.75, 0.  ]])
    """

    def profile(self, square: Array) -> Array:
        fw, s = get_framework(square), 1.0 - square
        if not fw.needs_gradient([square]):
            return fw.xp.clip(s, min=0.0)
        return fw.fill_unless(s, fw.xp.logical_not(s <= 0))


@suggest_keywords
@dataclass(frozen=True)
class Constant(Score):
    """s = 1

    >>> import numpy as np
    >>> Constant()(np.zeros((1, 3)), np.zeros((2, 3)))
    array([[1., 1.]])
    """

    is_nonnegative: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        # Sums of zeros give the right shape even if a graph does not know the lengths yet.
        fw = get_framework(query)
        rows, cols = (
            fw.astype(x == x, fw.dtype_name(x)) * 0.0 for x in (query[..., :1], key[..., :1])
        )
        ones = fw.xp.sum(rows, axis=-1)[..., :, None] + 1.0
        return ones + fw.xp.sum(cols, axis=-1)[..., None, :]

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Accept all shapes: the score does not depend on the vectors."""


@suggest_keywords
@dataclass(frozen=True)
class Exact(Score):
    """s = 1 if k = q, else 0: the comparison of a classical database.

    For a query that equals no key, weighting "normalized" gives 0 and "hard" the first row.

    >>> import numpy as np
    >>> Exact()(np.array([[1.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 3.0]]))
    array([[1., 0.]])
    """

    is_nonnegative: ClassVar[bool] = True
    compares_elementwise: ClassVar[bool] = True
    compares_keys: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        q, k = broadcast_pairs(query, key)
        return fw.astype(fw.xp.all(q == k, axis=-1), fw.dtype_name(query))
