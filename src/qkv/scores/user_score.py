"""A user's function as a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.errors import DtypeError, ShapeError, call_user_function
from qkv.frameworks import get_framework, is_array
from qkv.scores.base import Score
from qkv.util.types import Array, Shape

USER_SCORE_LABEL = "score: the function"
SCORE_MOD_HINT = "; pass FlexAttention's score_mod as scores.Modified(score, score_mod)"


@dataclass(frozen=True)
class UserScore(Score):
    """s = function(query, key), where entry (i, j) depends only on query i and key j."""

    function: Callable[[Array, Array], Array]

    def __call__(self, query: Array, key: Array) -> Array:
        return copy_scores(self.compute_scores(query, key))

    def compute_scores(self, query: Array, key: Array) -> Array:
        """Return the function's own array, which the caller must not overwrite."""
        s = call_user_function(
            self.function,
            query,
            key,
            takes=f"{USER_SCORE_LABEL} must take (query, key)",
            hint=SCORE_MOD_HINT,
        )
        check_user_scores(USER_SCORE_LABEL, s, query, key)
        return s

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Accept all shapes: only the function knows what it can compare."""

    def numbers_per_pair(self, width: int) -> int:
        return 2 * max(width, 1)  # assume that the function builds a (…, n, m, d) array


def check_user_scores(who: str, s: Any, query: Array, key: Array) -> None:
    """Check that a user's function returned an array (…, n, m) of scores."""
    fw = get_framework(query)
    expected = (*fw.static_shape(query)[:-1], fw.static_shape(key)[-2])
    if not is_array(s) or get_framework(s) is not fw:
        kind = f"an array of {get_framework(s).name}" if is_array(s) else type(s).__name__
        raise DtypeError(
            f"{who} returned {kind}; expected an array of {fw.name} of shape {expected}"
        )
    shape = fw.static_shape(s)
    lead = zip(shape[-3::-1], expected[-3::-1], strict=False)
    fits = shape[-2:] == expected[-2:]
    fits = fits and len(shape) <= max(len(expected), len(fw.static_shape(key)))
    fits = fits and all(a in (1, b) or b == 1 for a, b in lead)
    if None not in (*shape, *expected) and not fits:
        raise ShapeError(
            f"{who} returned shape {shape} for a query {fw.static_shape(query)} and a key "
            f"{fw.static_shape(key)}; expected {expected}"
        )


def copy_scores(s: Array) -> Array:
    """Return floats that an engine may overwrite: the function may still use its array."""
    fw = get_framework(s)
    if fw.has_immutable_arrays and "float" in fw.dtype_name(s):
        return s
    return s + 0.0
