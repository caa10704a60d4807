"""Weightings α: how scores become weights. Pass one by name or as an object of this module."""

from __future__ import annotations

from typing import Literal

from qkv.errors import CombinationError, DtypeError
from qkv.scores import Score
from qkv.util.registry import ClassRegistry
from qkv.weightings import graph_nodes as _nodes  # noqa: F401, registers the nodes by name
from qkv.weightings.average import Average
from qkv.weightings.base import Elementwise, State, Weighting, pool_by_weights
from qkv.weightings.entmax import Entmax, Sparsemax
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized, Raw, Sigmoid
from qkv.weightings.softmax import Softmax, TopK

NAMES = ClassRegistry(
    "weightings",
    Weighting,
    softmax=Softmax,
    topk=TopK,
    hard=Hard,
    average=Average,
    normalized=Normalized,
    raw=Raw,
    sigmoid=Sigmoid,
    sparsemax=Sparsemax,
    entmax15=Entmax,
)
register = NAMES.register

Name = Literal[
    "softmax", "hard", "average", "normalized", "raw", "sigmoid", "sparsemax", "entmax15"
]
"""Names of weightings without required fields, for type checkers. `resolve` accepts aliases too."""
WeightingLike = Name | Weighting

__all__ = [
    "NAMES",
    "Average",
    "Elementwise",
    "Entmax",
    "Hard",
    "Name",
    "Normalized",
    "Raw",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "State",
    "TopK",
    "Weighting",
    "WeightingLike",
    "pair_score_with_weighting",
    "pool_by_weights",
    "register",
    "resolve",
]


def pair_score_with_weighting(score: Score, weighting: Weighting, biased: bool = False) -> Score:
    """Return the score in the form that the weighting needs; raise if they do not fit each other.

    `biased` says whether a float mask is added to the scores.
    """
    reason = weighting.incompatible_reason(score, biased)
    if reason:
        raise CombinationError(reason)
    return weighting.adapt_score(score)


def resolve(weighting: str | Weighting) -> Weighting:
    """Return the weighting for a name or a weighting object.

    >>> resolve("entmax15")
    Entmax(alpha=1.5)
    """
    resolved = NAMES.resolve(weighting)
    if resolved is None:
        kind = type(weighting).__name__
        raise DtypeError(f"weighting must be a name or a weighting, not {kind}")
    return resolved
