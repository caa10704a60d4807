"""Scores s(q, k): how well a key matches a query.

Pass a score by name, as an object of this module, or as a function (query, key) → (…, n, m).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from qkv.scores.additive import Additive
from qkv.scores.base import Score
from qkv.scores.distance import Gaussian, Laplace
from qkv.scores.feature_map import FeatureMap, Performer
from qkv.scores.functions import (
    Modified,
    evaluate_block,
    has_user_code,
    hoist_score,
    user_functions,
)
from qkv.scores.gated import Gated
from qkv.scores.product import Cosine, Dot, Multiplicative, ScaledDot
from qkv.scores.registry import NAMES, register, resolve
from qkv.scores.relative import (
    Alibi,
    Decay,
    Relative,
    RelativeScore,
    T5Bias,
    alibi_slopes,
    t5_buckets,
)
from qkv.scores.window import Boxcar, Constant, Epanechnikov, Exact, Triangular

NAMES.update(
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
    relative=Relative,
    decay=Decay,
    feature_map=FeatureMap,
    performer=Performer,
)

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
    "feature_map",
    "performer",
]
"""Names of scores without required fields, for type checkers. `resolve` also accepts aliases."""
LearnedName = Literal["multiplicative", "additive", "gated"]
"""Names of scores with parameters. Layers accept them and create the parameters."""
ScoreLike = Name | Score | Callable[[Any, Any], Any]

__all__ = [
    "NAMES",
    "Performer",
    "Alibi",
    "Additive",
    "Boxcar",
    "Constant",
    "Cosine",
    "Decay",
    "Dot",
    "Epanechnikov",
    "Exact",
    "FeatureMap",
    "Gated",
    "Gaussian",
    "Laplace",
    "LearnedName",
    "Modified",
    "Multiplicative",
    "Name",
    "Relative",
    "RelativeScore",
    "ScaledDot",
    "Score",
    "ScoreLike",
    "T5Bias",
    "Triangular",
    "alibi_slopes",
    "evaluate_block",
    "user_functions",
    "hoist_score",
    "has_user_code",
    "register",
    "resolve",
    "t5_buckets",
]
