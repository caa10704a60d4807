"""The registry of scores by name, and `resolve`.

Scores that contain another score import this module. `qkv.scores` adds the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.errors import DtypeError
from qkv.frameworks.tree import Record
from qkv.scores.base import Score
from qkv.scores.user_score import UserScore
from qkv.util.registry import ClassRegistry

NAMES = ClassRegistry("scores", Score)
register = NAMES.register


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


def resolve_inner_score(owner: Any) -> None:
    """Replace the `score` field, which may be a name or a function, by a score object."""
    object.__setattr__(owner, "score", resolve(owner.score))
