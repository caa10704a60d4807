"""Scores that are weights as they are: nonnegative, and 0 beyond a width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import is_array, of
from qkv.scores.base import Affine, Score, pairs
from qkv.scores.distance import square, squared_distance
from qkv.types import Array, Shape


@dataclass(frozen=True)
class Window(Score):
    """A nonnegative function of r = ‖q − k‖₂ / width, its `profile`; 0 where r > 1."""

    width: float | Array = 1.0
    numbers: ClassVar[dict[str, bool]] = {"width": True}
    by_number: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        return self.profile(self.square(query, key))

    def square(self, query: Array, key: Array) -> Array:
        """r²"""
        return squared_distance(query, key, self.width)

    @property
    def radial(self) -> bool:
        return not is_array(self.width)

    def affine(self, query: Array, norm: Array) -> Affine | None:
        """−r², of which the score is the `profile`."""
        return square(query, norm, self.width, 1.0) if self.radial else None

    def profile(self, square: Array) -> Array:
        """The score at r²."""
        raise NotImplementedError("a window says how a score falls with the distance")

    @property
    def closeness(self) -> Score:
        return Closeness(self)


@dataclass(frozen=True)
class Closeness(Score):
    """s = the window's score where it is above 0, else −r²"""

    window: Window

    def __call__(self, query: Array, key: Array) -> Array:
        fw, square = of(query), self.window.square(query, key)
        s = self.window.profile(square)
        return fw.xp.where(s == 0, fw.detach(square) * -1.0, s)

    def footprint(self, width: int) -> int:
        return self.window.footprint(width)


@dataclass(frozen=True)
class Boxcar(Window):
    """s = 1 where r ≤ 1, else 0

    >>> import numpy as np
    >>> Boxcar(2.0)(np.array([[0.0]]), np.array([[2.0], [2.1]]))
    array([[1., 0.]])
    """

    also: ClassVar[tuple[str, ...]] = ("uniform", "rectangular", "box")

    def profile(self, square: Array) -> Array:
        fw = of(square)
        square = fw.detach(square)
        # A NaN is neither inside nor outside, and is not hidden.
        return fw.xp.where(fw.xp.isnan(square), square, fw.astype(square <= 1, fw.dtype(square)))


@dataclass(frozen=True)
class Triangular(Window):
    """s = max(0, 1 − r)

    >>> import numpy as np
    >>> Triangular()(np.array([[0.0]]), np.array([[0.25], [2.0]]))
    array([[0.75, 0.  ]])
    """

    def profile(self, square: Array) -> Array:
        fw = of(square)
        # The root has no slope at 0, and none is needed beyond 1.
        inside = fw.xp.logical_and(square > 0, square < 1)
        inside = fw.xp.logical_or(inside, fw.xp.isnan(square))
        r = fw.xp.sqrt(fw.keep(square, inside, 1.0))
        return 1.0 - r + fw.astype(square == 0, fw.dtype(square))


@dataclass(frozen=True)
class Epanechnikov(Window):
    """s = max(0, 1 − r²)

    >>> import numpy as np
    >>> Epanechnikov()(np.array([[0.0]]), np.array([[0.5], [2.0]]))
    array([[0.75, 0.  ]])
    """

    def profile(self, square: Array) -> Array:
        fw, s = of(square), 1.0 - square
        return fw.keep(s, fw.xp.logical_not(s <= 0))


@dataclass(frozen=True)
class Constant(Score):
    """s = 1

    >>> import numpy as np
    >>> Constant()(np.zeros((1, 3)), np.zeros((2, 3)))
    array([[1., 1.]])
    """

    nonnegative: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        # Sums of zeros, so that the shape comes out right even where it is not known yet.
        fw = of(query)
        rows, cols = (fw.astype(x == x, fw.dtype(x)) * 0.0 for x in (query, key))
        ones = fw.xp.sum(rows, axis=-1)[..., :, None] + 1.0
        return ones + fw.xp.sum(cols, axis=-1)[..., None, :]

    def check(self, query: Shape, key: Shape) -> None:
        """Any two widths do."""


@dataclass(frozen=True)
class Exact(Score):
    """s = 1 where k = q, else 0: the classical database's own comparison.

    Under "normalized" a query that is no key gives 0; under "hard", the first row.

    >>> import numpy as np
    >>> Exact()(np.array([[1.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 3.0]]))
    array([[1., 0.]])
    """

    nonnegative: ClassVar[bool] = True
    by_number: ClassVar[bool] = True
    compares_keys: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        fw = of(query)
        q, k = pairs(query, key)
        return fw.astype(fw.xp.all(q == k, axis=-1), fw.dtype(query))
