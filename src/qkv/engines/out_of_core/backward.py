"""Calls over stored rows in the streaming engine: loops, and scores saved for the backward pass."""

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
"""The most scores that are saved for the backward pass. The keys have far more numbers."""


def load_all_rows(call: Call) -> Call:
    """Return the call with all stored rows loaded into arrays."""
    if not isinstance(call.key, UnreadArray):
        return call
    key, value, allowed = call.key.rows.load_all(call.fw, call.query)
    rule = None if allowed is None else masks.array(allowed)
    return replace(call, key=key, value=value, rule=rule)


def choose_loops(call: Call) -> Any:
    """Return the object whose methods loop over blocks: a `RowReader` or the framework."""
    return RowReader(call.fw) if isinstance(call.key, UnreadArray) else call.fw


class SavedScores:
    """The scores (n, c) of each span of stored rows, saved by the forward pass.

    For a linear score φ(q)·k, the gradient of φ(q) is Σ (∂L/∂s) k. With saved scores, the backward
    pass does not compute the scores again, and it reads the keys once.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}
        self._starts: list[int] = []

    @classmethod
    def create_for(cls, call: Call) -> SavedScores | None:
        """Return an empty object, or None if this call cannot use saved scores.

        That is so if there are too many scores, if `scale_scores` changes them, or if an array
        other than the query receives a gradient.
        """
        if (
            not isinstance(call.key, UnreadArray)
            or not call.score.is_linear
            or call.n * call.m > MAX_SAVED_SCORES
        ):
            return None
        has_parameters = bool(tree.array_leaves(call.fw, (call.score, call.weighting)))
        is_unscaled = call.weighting.scale_scores(call.query) is call.query
        if has_parameters or not is_unscaled or not call.weighting.is_differentiable:
            return None
        return cls()

    def add_block(self, start: int, s: Array) -> None:
        self._blocks[start] = s + 0.0  # a copy: a weighting may overwrite its scores

    def take_blocks(self) -> Arrays:
        """Return all saved scores and drop them here: the framework saves them for backward."""
        self._starts = sorted(self._blocks)
        blocks, self._blocks = self._blocks, {}
        return tuple(blocks[at] for at in self._starts)

    def split_saved(self, saved: Sequence[Array]) -> tuple[Sequence[Array], dict[int, Array]]:
        """Split the saved arrays into row facts, and a dict from the start of a span to scores."""
        count = len(saved) - len(self._starts)
        return saved[:count], dict(zip(self._starts, saved[count:], strict=True))


def query_gradient_function(call: Call, query: Array, key: Array) -> Callable[[Array], Gradients]:
    """Return the vjp from the scores of these keys to the query, for a linear score."""
    fw = call.fw

    def project_query(query: Array) -> Array:
        form = call.score.dot_product_form(query, key[:1])
        return form.query * form.scale

    _, query_vjp = fw.vjp(project_query, query)
    return lambda score_gradient: query_vjp(fw.xp.matmul(score_gradient, key))
