"""a(q, k): how well a key matches a query. Pick one by name, build one, or write a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from qkv.errors import DtypeError, unknown
from qkv.scores.additive import Additive
from qkv.scores.base import Score
from qkv.scores.distance import Gaussian, Laplace
from qkv.scores.gated import Gated
from qkv.scores.modified import Function, Modified, evaluate, functions_in, hoisted, is_open
from qkv.scores.product import Cosine, Dot, Multiplicative, ScaledDot
from qkv.scores.window import Boxcar, Constant, Epanechnikov, Exact, Triangular

NAMES: dict[str, type[Score]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "cosine": Cosine,
    "gaussian": Gaussian,
    "laplace": Laplace,
    "boxcar": Boxcar,
    "triangular": Triangular,
    "epanechnikov": Epanechnikov,
    "constant": Constant,
    "exact": Exact,
}

LEARNED = (Multiplicative, Additive, Gated, Modified)
"""The scores that have no name, because they need arrays or a function."""

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
    "Modified",
    "Multiplicative",
    "ScaledDot",
    "Score",
    "Triangular",
    "evaluate",
    "functions_in",
    "hoisted",
    "is_open",
    "resolve",
]


def resolve(score: str | Score | Callable[..., Any]) -> Score:
    """A score from its name, itself, or a function.

    >>> resolve("gaussian")
    Gaussian(bandwidth=1.0)
    """
    if isinstance(score, str):
        if score in NAMES:
            return NAMES[score]()
        for kind in LEARNED:
            if score.lower() == kind.__name__.lower():
                fields = ", ".join(f.name for f in dataclasses.fields(kind))
                raise DtypeError(
                    f"score {score!r} has parameters: pass scores.{kind.__name__}({fields})"
                )
        raise unknown("score", score, NAMES)
    if isinstance(score, type) and issubclass(score, Score):
        raise DtypeError(f"score is the class {score.__name__}: build it, {score.__name__}(…)")
    if isinstance(score, Score):
        return score
    if callable(score):
        return Function(score)
    raise DtypeError(f"score must be a name, a score or a function, not {type(score).__name__}")
