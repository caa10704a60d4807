"""What a score is: a function of a query and a key, and a few facts about it."""

from __future__ import annotations

from typing import Any, ClassVar

from qkv.arrays import is_array
from qkv.errors import DtypeError, ShapeError
from qkv.types import Array, Shape


class Score:
    """s = score(query, key): (…, n, d_q), (…, m, d_k) → (…, n, m).

    Every entry depends on its own pair alone, so any block of scores can be made by itself.
    Subclasses are frozen dataclasses; each array among their fields receives gradients.
    """

    nonnegative: ClassVar[bool] = False
    """Whether no score is ever below zero, so that scores can be weights as they are."""

    def __call__(self, query: Array, key: Array) -> Array:
        raise NotImplementedError("a score says how a query and a key are compared")

    def check(self, query: Shape, key: Shape) -> None:
        """Raise where arrays of these shapes cannot be compared."""
        same_width(self, query, key)

    def footprint(self, width: int) -> int:
        """Numbers held at once per pair, for vectors of this width: it sets the block size."""
        return 1


def same_width(score: Score, query: Shape, key: Shape) -> None:
    if query[-1] != key[-1]:
        raise ShapeError(
            f"{type(score).__name__} compares vectors of one width: query has {query[-1]} "
            f"numbers a row and key {key[-1]}. Multiplicative and Additive take two widths."
        )


def array_of(owner: Any, name: str, *axes: str) -> Shape:
    """The shape of an array field, refused unless it has these axes."""
    value = getattr(owner, name)
    if not is_array(value):
        raise DtypeError(
            f"{type(owner).__name__}: {name} must be an array ({', '.join(axes)}), "
            f"not {type(value).__name__}"
        )
    shape = tuple(value.shape)
    if len(shape) != len(axes):
        raise ShapeError(
            f"{type(owner).__name__}: {name} must be ({', '.join(axes)}), not of shape {shape}"
        )
    return shape


def agree(owner: Any, what: str, **sizes: int) -> None:
    """Refuse sizes that should be one size."""
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{type(owner).__name__}: {what} must be one number, but {told}")


def pairs(query: Array, key: Array) -> tuple[Array, Array]:
    """(…, n, 1, d) and (…, 1, m, d), ready to be compared number by number."""
    return query[..., :, None, :], key[..., None, :, :]


def inner_score(owner: Any) -> None:
    """Let the `score` field of a score be given by name or as a function too."""
    from qkv.scores import resolve

    object.__setattr__(owner, "score", resolve(owner.score))
