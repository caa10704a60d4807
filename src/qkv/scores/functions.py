"""`Modified`, a score changed by a user's function, and how engines evaluate such scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from qkv.errors import DtypeError, call_user_function
from qkv.frameworks import get_framework
from qkv.frameworks.tree import Record
from qkv.scores.base import Score
from qkv.scores.registry import resolve_inner_score
from qkv.scores.user_score import UserScore, check_user_scores, copy_scores
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Block, Shape, Span

SCORE_MOD_SIGNATURE = "(score, b, h, q_idx, kv_idx)"


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

    needs_positions: ClassVar[bool] = True

    score: Score
    score_mod: Callable[[Array, Array, Array, Array, Array], Array]
    function_field: ClassVar[str] = "score_mod"

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
        return self.modify(evaluate_block(self.score, query, key, block), query, key, block)

    def modify(self, s: Array, query: Array, key: Array, block: Block) -> Array:
        """Return the scores s of a block after `score_mod`."""
        at = block.b, block.h, block.q, block.k
        out = call_user_function(
            self.score_mod, s, *at, takes=f"score_mod must take {SCORE_MOD_SIGNATURE}"
        )
        check_user_scores("score_mod", out, query, key)
        out = copy_scores(out)
        # Integer positions times 0.5 are float64 in some frameworks.
        return get_framework(s).astype(out, get_framework(s).dtype_name(s))

    def check_shapes(self, query: Shape, key: Shape) -> None:
        self.score.check_shapes(query, key)

    def numbers_per_pair(self, width: int) -> int:
        return self.score.numbers_per_pair(width) + 1


@dataclass(frozen=True)
class HoistedScore(Score):
    """A score whose functions capture arrays. The arrays are a field, so they receive gradients."""

    needs_positions: ClassVar[bool] = True

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        return self.function(query, key, block.q[:1, 0], block.k[0, :1], *self.captured)


@dataclass(frozen=True)
class EvaluatedScore(Score):
    """Scores of a whole call that exist already, as an array (…, n, m)."""

    needs_positions: ClassVar[bool] = True

    values: Array

    def __call__(self, query: Array, key: Array) -> Array:
        return self.values

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        fw = get_framework(self.values)
        return fw.slice_span(fw.slice_span(self.values, block.rows, -2), block.cols, -1)

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Accept all shapes: the function that computed the scores has compared them."""


def hoist_score(score: Score, query: Array, key: Array, block: Block, make_block: Any) -> Score:
    """Return a `HoistedScore` with the arrays that the functions of the score capture.

    `block` is an example for tracing. `make_block(rows, cols)` returns the Block at a position.
    """

    def evaluate_at(query: Array, key: Array, top: Array, left: Array) -> Array:
        rows, cols = Span(top[0], query.shape[-2]), Span(left[0], key.shape[-2])
        return evaluate_block(score, query, key, make_block(rows, cols))

    example = (query, key, block.q[:1, 0], block.k[0, :1])
    return HoistedScore(*get_framework(query).hoist_captures(evaluate_at, *example))


def evaluate_block(
    score: Score, query: Array, key: Array, block: Block, key_terms: Array | None = None
) -> Array:
    """Return score(query, key); scores that depend on positions receive those of the block.

    `key_terms` are those of the keys, if they are known.
    """
    if score.needs_positions:
        scores: Array = score.score_block(query, key, block)  # type: ignore[attr-defined]
        return scores
    if key_terms is not None:
        return score.score_with_key_terms(query, key, key_terms)
    return score(query, key)


def has_user_code(score: Any) -> bool:
    """Return whether a user's function computes the scores."""
    inner, bias = getattr(score, "score", None), getattr(score, "bias", None)
    if inner is not None and callable(bias) and not isinstance(bias, Record):
        return True
    if callable(getattr(score, "phi", None)):
        return True
    return isinstance(score, UserScore | Modified | EvaluatedScore) or (
        inner is not None and has_user_code(inner)
    )


def user_functions(score: Any) -> list[Callable[..., Any]]:
    """Return the user's functions inside a score. They may capture arrays."""
    if isinstance(score, UserScore):
        return [] if dataclasses.is_dataclass(score.function) else [score.function]
    inner = user_functions(score.score) if hasattr(score, "score") else []
    bias, phi = getattr(score, "bias", None), getattr(score, "phi", None)
    if callable(phi):
        return [] if dataclasses.is_dataclass(phi) else [phi]
    if callable(bias) and not dataclasses.is_dataclass(bias):
        return [bias, *inner]
    return [score.score_mod, *inner] if isinstance(score, Modified) else inner
