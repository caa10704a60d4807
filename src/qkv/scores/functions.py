"""Scores that contain functions of the caller: `Modified`, and any function as a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.errors import DtypeError, ShapeError, call_user_function
from qkv.frameworks import get_framework, is_array
from qkv.scores.base import Score, resolve_inner_score
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Block, Shape, Span

SCORE_MOD_SIGNATURE = "(score, b, h, q_idx, kv_idx)"
USER_SCORE_LABEL = "score: the function"
SCORE_MOD_HINT = "; pass FlexAttention's score_mod as scores.Modified(score, score_mod)"


@suggest_keywords
@dataclass(frozen=True)
class Modified(Score):
    """s = score_mod(score(q, k), b, h, q_idx, kv_idx), FlexAttention's `score_mod`.

    The four positions are integer arrays that broadcast against the scores. A function written for
    scalars works if it uses only arithmetic, indexing and `where`.

    >>> import numpy as np
    >>> from qkv.scores import Dot
    >>> nearer = Modified(Dot(), lambda s, b, h, q, k: s - abs(q - k))
    >>> nearer(np.zeros((2, 1)), np.zeros((3, 1)))
    array([[ 0., -1., -2.],
           [-1.,  0., -1.]])
    """

    score: Score
    score_mod: Callable[[Array, Array, Array, Array, Array], Array]

    def __post_init__(self) -> None:
        resolve_inner_score(self)
        if not callable(self.score_mod):
            raise DtypeError(
                f"Modified: score_mod must be a function {SCORE_MOD_SIGNATURE}, not "
                f"{type(self.score_mod).__name__}"
            )

    def __call__(self, query: Array, key: Array) -> Array:
        fw, _ = get_framework(query), get_framework(key)
        n, m = query.shape[-2], key.shape[-2]

        def make_positions(name: str) -> Array:
            size = {"q": n, "k": m}.get(name, 1)
            at = fw.position_range(0, size, query)
            return at[None, :] if name == "k" else at[:, None]

        return self.score_block(query, key, Block(Span(0, n), Span(0, m), n, m, make_positions))

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        """Return the scores of a block, with its positions in the whole call."""
        s = evaluate_block(self.score, query, key, block)
        at = block.b, block.h, block.q, block.k
        out = call_user_function(
            self.score_mod, s, *at, takes=f"score_mod must take {SCORE_MOD_SIGNATURE}"
        )
        out = check_user_scores("score_mod", out, query, key)
        # Integer positions times 0.5 are float64 in some frameworks.
        return get_framework(s).astype(out, get_framework(s).dtype_name(s))

    def check_shapes(self, query: Shape, key: Shape) -> None:
        self.score.check_shapes(query, key)

    def numbers_per_pair(self, width: int) -> int:
        return self.score.numbers_per_pair(width) + 1


@dataclass(frozen=True)
class UserScore(Score):
    """s = function(query, key), where entry (i, j) depends only on query i and key j."""

    function: Callable[[Array, Array], Array]

    def __call__(self, query: Array, key: Array) -> Array:
        s = call_user_function(
            self.function,
            query,
            key,
            takes=f"{USER_SCORE_LABEL} must take (query, key)",
            hint=SCORE_MOD_HINT,
        )
        return check_user_scores(USER_SCORE_LABEL, s, query, key)

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Accept all shapes: only the function knows what it can compare."""

    def numbers_per_pair(self, width: int) -> int:
        return 2 * max(width, 1)  # assume that it builds a (…, n, m, d) array


def check_user_scores(who: str, s: Any, query: Array, key: Array) -> Array:
    """Check that a user's function returned an array (…, n, m) of scores, and return a copy."""
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
    return s + 0.0  # the function may return an array it still uses, and engines overwrite blocks


@dataclass(frozen=True)
class HoistedScore(Score):
    """A score whose functions captured arrays, with those arrays as a field.

    As leaves of the record, the arrays receive gradients.
    """

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        return self.function(query, key, block.q[:1, 0], block.k[0, :1], *self.captured)


def hoist_score(score: Score, query: Array, key: Array, block: Block, make_block: Any) -> Score:
    """Return the score with the arrays that its functions capture as a field.

    The block is an example for tracing. `make_block(rows, cols)` returns the Block at a position.
    """

    def evaluate_at(query: Array, key: Array, top: Array, left: Array) -> Array:
        rows, cols = Span(top[0], query.shape[-2]), Span(left[0], key.shape[-2])
        return evaluate_block(score, query, key, make_block(rows, cols))

    example = (query, key, block.q[:1, 0], block.k[0, :1])
    return HoistedScore(*get_framework(query).hoist_captures(evaluate_at, *example))


def evaluate_block(score: Score, query: Array, key: Array, block: Block) -> Array:
    """Return score(query, key); scores that depend on positions receive those of the block."""
    if isinstance(score, Modified | HoistedScore):
        return score.score_block(query, key, block)
    return score(query, key)


def has_user_code(score: Any) -> bool:
    """Return whether a function of the caller computes the scores."""
    inner = getattr(score, "score", None)
    return isinstance(score, UserScore | Modified) or (inner is not None and has_user_code(inner))


def user_functions(score: Any) -> list[Callable[..., Any]]:
    """Return the caller's functions inside a score; they may capture arrays."""
    if isinstance(score, UserScore):
        return [] if dataclasses.is_dataclass(score.function) else [score.function]
    inner = user_functions(score.score) if hasattr(score, "score") else []
    return [score.score_mod, *inner] if isinstance(score, Modified) else inner
