"""a(q, k): how well a key matches a query. Pick one by name, build one, or write a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from qkv.arrays.tree import Record
from qkv.errors import DtypeError
from qkv.names import Names
from qkv.scores.additive import Additive
from qkv.scores.base import Score
from qkv.scores.distance import Gaussian, Laplace
from qkv.scores.gated import Gated
from qkv.scores.modified import Function, Modified, evaluate, functions_in, hoisted, is_open
from qkv.scores.product import Cosine, Dot, Multiplicative, ScaledDot
from qkv.scores.window import Boxcar, Constant, Epanechnikov, Exact, Triangular

NAMES = Names(
    "scores",
    Score,
    dot=Dot,
    scaled_dot=ScaledDot,
    cosine=Cosine,
    multiplicative=Multiplicative,
    additive=Additive,
    gated=Gated,
    gaussian=Gaussian,
    laplace=Laplace,
    boxcar=Boxcar,
    triangular=Triangular,
    epanechnikov=Epanechnikov,
    constant=Constant,
    exact=Exact,
    modified=Modified,
)
register = NAMES.register

Name = Literal[
    "dot",
    "scaled_dot",
    "cosine",
    "gaussian",
    "laplace",
    "boxcar",
    "triangular",
    "epanechnikov",
    "constant",
    "exact",
]
"""The names that are enough for a call, to a type checker; `resolve` takes any other."""
LearnedName = Literal["multiplicative", "additive", "gated"]
"""Those for which a layer, which knows its widths, makes the arrays."""
ScoreLike = Name | Score | Callable[[Any, Any], Any]

__all__ = [
    "NAMES",
    "Additive",
    "Boxcar",
    "Constant",
    "Cosine",
    "Dot",
    "Epanechnikov",
    "Exact",
    "Gated",
    "Gaussian",
    "Laplace",
    "LearnedName",
    "Modified",
    "Multiplicative",
    "Name",
    "ScaledDot",
    "Score",
    "ScoreLike",
    "Triangular",
    "evaluate",
    "functions_in",
    "hoisted",
    "is_open",
    "register",
    "resolve",
]


def resolve(score: str | Score | Callable[..., Any]) -> Score:
    """A score from its name, itself, or a function.

    >>> resolve("gaussian")
    Gaussian(bandwidth=1.0)
    """
    found = NAMES.resolve(score)
    if found is not None:
        return found
    if isinstance(score, Record) and score.what:  # which would else be taken for a function
        what = score.what
        raise DtypeError(f"score must be a score, not the {what} {score!r}: give it as {what}=")
    if callable(score):
        return Function(score)
    raise DtypeError(f"score must be a name, a score or a function, not {type(score).__name__}")
