"""Calls over rows that are read: whole, in loops, and with scores left for the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qkv import masks
from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.frameworks.stored_rows import RowReader, UnreadArray
from qkv.util.types import Array, Arrays, Gradients

MAX_SAVED_SCORES = 2**25
"""Scores that are held at most: a small part of the keys that they are made of."""


def load_all_rows(call: Call) -> Call:
    """The call on arrays, with all its rows read."""
    if not isinstance(call.key, UnreadArray):
        return call
    key, value, allowed = call.key.rows.load_all(call.fw, call.query)
    rule = None if allowed is None else masks.array(allowed)
    return replace(call, key=key, value=value, rule=rule)


def choose_loops(call: Call) -> Any:
    return RowReader(call.fw) if isinstance(call.key, UnreadArray) else call.fw


class SavedScores:
    """The scores (n, c) of each cut of the rows, in their order, from one way forward.

    For a score that is φ(q)·k alone, the gradient of the query is then Σ slope k, carried through
    φ, and the keys are read twice in all.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}
        self._starts: list[int] = []

    @classmethod
    def create_for(cls, call: Call) -> SavedScores | None:
        """None where there are too many, they are bent before they are weighed, or an array other
        than the query has a gradient."""
        if (
            not isinstance(call.key, UnreadArray)
            or not call.score.is_linear
            or call.n * call.m > MAX_SAVED_SCORES
        ):
            return None
        fixed = not tree.array_leaves(call.fw, (call.score, call.weighting))
        as_they_are = call.weighting.scale_scores(call.query) is call.query
        return cls() if fixed and as_they_are and call.weighting.is_differentiable else None

    def add_block(self, start: int, s: Array) -> None:
        self._blocks[start] = s + 0.0  # a weighting may write over its scores

    def take_blocks(self) -> Arrays:
        """All of them, for the frameworks to keep."""
        self._starts = sorted(self._blocks)
        blocks, self._blocks = self._blocks, {}
        return tuple(blocks[at] for at in self._starts)

    def split_saved(self, kept: Sequence[Array]) -> tuple[Sequence[Array], dict[int, Array]]:
        """What else was kept, and the scores by where their cuts start."""
        count = len(kept) - len(self._starts)
        return kept[:count], dict(zip(self._starts, kept[count:], strict=True))


def query_gradient_function(call: Call, query: Array, key: Array) -> Callable[[Array], Gradients]:
    """Gradients of the scores of these keys to those of the query, for a linear score."""
    fw = call.fw

    def project_query(query: Array) -> Array:
        form = call.score.dot_product_form(query, key[:1])
        return form.query * form.scale

    _, pull = fw.vjp(project_query, query)
    return lambda slope: pull(fw.xp.matmul(slope, key))
