"""Scores s(q, k): how well a key matches a query.

Pass a score by name, as an object of this module, or as a function (query, key) → (…, n, m).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from qkv.errors import DtypeError
from qkv.frameworks.tree import Record
from qkv.scores.additive import Additive
from qkv.scores.base import Score
from qkv.scores.distance import Gaussian, Laplace
from qkv.scores.functions import (
    Modified,
    UserScore,
    evaluate_block,
    has_user_code,
    hoist_score,
    user_functions,
)
from qkv.scores.gated import Gated
from qkv.scores.product import Cosine, Dot, Multiplicative, ScaledDot
from qkv.scores.window import Boxcar, Constant, Epanechnikov, Exact, Triangular
from qkv.util.registry import ClassRegistry

NAMES = ClassRegistry(
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
"""Names of scores without required fields, for type checkers. `resolve` also accepts aliases."""
LearnedName = Literal["multiplicative", "additive", "gated"]
"""Names of scores with parameters. Layers accept them and create the parameters."""
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
    "evaluate_block",
    "user_functions",
    "hoist_score",
    "has_user_code",
    "register",
    "resolve",
]


def resolve(score: str | Score | Callable[..., Any]) -> Score:
    """Return the score for a name, a score object or a function.

    >>> resolve("gaussian")
    Gaussian(bandwidth=1.0)
    """
    resolved = NAMES.resolve(score)
    if resolved is not None:
        return resolved
    if isinstance(score, Record) and score.role:  # a weighting or a mask is callable too
        role = score.role
        raise DtypeError(f"score must be a score, not the {role} {score!r}: pass it as {role}=")
    if callable(score):
        return UserScore(score)
    raise DtypeError(f"score must be a name, a score or a function, not {type(score).__name__}")
