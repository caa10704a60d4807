"""Scores written by the caller: a change to a score, or a function of his own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.arrays import is_array, of
from qkv.errors import DtypeError, ShapeError, applied
from qkv.scores.base import Score, inner_score
from qkv.types import Array, Block, Shape, Span

MOD = "(score, b, h, q_idx, kv_idx)"
WHO = "score: the function"
OTHER = "; a score_mod of FlexAttention's goes into scores.Modified(score, score_mod)"


@dataclass(frozen=True)
class Modified(Score):
    """s = score_mod(score(q, k), b, h, q_idx, kv_idx), FlexAttention's `score_mod`.

    The four positions are integer arrays that broadcast against the scores, so a function that
    works on scalars works here as long as it uses arithmetic, indexing and `where`.

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
        inner_score(self)
        if not callable(self.score_mod):
            raise DtypeError(
                f"Modified: score_mod must be a function {MOD}, not {type(self.score_mod).__name__}"
            )

    def __call__(self, query: Array, key: Array) -> Array:
        fw, _ = of(query), of(key)
        n, m = query.shape[-2], key.shape[-2]

        def place(name: str) -> Array:
            size = {"q": n, "k": m}.get(name, 1)
            at = fw.positions(0, size, query)
            return at[None, :] if name == "k" else at[:, None]

        return self.at(query, key, Block(Span(0, n), Span(0, m), n, m, place))

    def at(self, query: Array, key: Array, block: Block) -> Array:
        """The scores of a block, at the positions it lies at."""
        s = evaluate(self.score, query, key, block)
        at = block.b, block.h, block.q, block.k
        out = applied(self.score_mod, s, *at, takes=f"score_mod must take {MOD}")
        out = checked("score_mod", out, query, key)
        return of(s).astype(out, of(s).dtype(s))  # whole numbers times 0.5 are float64 for some

    def check(self, query: Shape, key: Shape) -> None:
        self.score.check(query, key)

    def footprint(self, width: int) -> int:
        return self.score.footprint(width) + 1


@dataclass(frozen=True)
class Function(Score):
    """s = function(query, key): any function whose every entry depends on its own pair alone."""

    function: Callable[[Array, Array], Array]

    def __call__(self, query: Array, key: Array) -> Array:
        s = applied(self.function, query, key, takes=f"{WHO} must take (query, key)", hint=OTHER)
        return checked(WHO, s, query, key)

    def check(self, query: Shape, key: Shape) -> None:
        """The function says itself what it can compare."""

    def footprint(self, width: int) -> int:
        return 2 * max(width, 1)  # it may well compare number by number


def checked(who: str, s: Any, query: Array, key: Array) -> Array:
    """What a function of the caller's gave, if those are the scores of the pairs."""
    fw = of(query)
    due = (*fw.shape(query)[:-1], fw.shape(key)[-2])
    if not is_array(s) or of(s) is not fw:
        kind = f"an array of {of(s).name}" if is_array(s) else type(s).__name__
        raise DtypeError(f"{who} gave {kind}; expected an array of {fw.name} of shape {due}")
    shape = fw.shape(s)
    lead = zip(shape[-3::-1], due[-3::-1], strict=False)
    fits = shape[-2:] == due[-2:] and len(shape) <= max(len(due), len(fw.shape(key)))
    if None not in (*shape, *due) and not (fits and all(a in (1, b) or b == 1 for a, b in lead)):
        raise ShapeError(
            f"{who} gave shape {shape} for a query {fw.shape(query)} and a key {fw.shape(key)}; "
            f"expected {due}"
        )
    return s + 0.0  # the array may be the caller's own, and blocks are overwritten


@dataclass(frozen=True)
class Hoisted(Score):
    """A score whose functions held arrays, with those arrays among its fields."""

    function: Callable[..., Array]
    captured: tuple[Array, ...]

    def at(self, query: Array, key: Array, block: Block) -> Array:
        return self.function(query, key, block.q[:1, 0], block.k[0, :1], *self.captured)


def hoisted(score: Score, query: Array, key: Array, block: Block, place: Any) -> Score:
    """The score of such a block as a function of arrays alone; `place(rows, cols)` is a Block."""

    def function(query: Array, key: Array, top: Array, left: Array) -> Array:
        rows, cols = Span(top[0], query.shape[-2]), Span(left[0], key.shape[-2])
        return evaluate(score, query, key, place(rows, cols))

    example = (query, key, block.q[:1, 0], block.k[0, :1])
    return Hoisted(*of(query).hoist(function, *example))


def evaluate(score: Score, query: Array, key: Array, block: Block) -> Array:
    """score(query, key), told where the block lies if it asks."""
    asks = isinstance(score, Modified | Hoisted)
    return score.at(query, key, block) if asks else score(query, key)  # type: ignore[attr-defined]


def is_open(score: Any) -> bool:
    """Whether the caller's own code decides what the scores are."""
    inner = getattr(score, "score", None)
    return isinstance(score, Function | Modified) or (inner is not None and is_open(inner))


def functions_in(score: Any) -> list[Callable[..., Any]]:
    """The caller's own functions inside a score: they may hold arrays that no field shows."""
    if isinstance(score, Function):
        return [] if dataclasses.is_dataclass(score.function) else [score.function]
    inner = functions_in(score.score) if hasattr(score, "score") else []
    return [score.score_mod, *inner] if isinstance(score, Modified) else inner
