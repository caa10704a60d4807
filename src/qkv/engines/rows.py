"""The weights of every row that is read, beside the output: α (n, m), its entropy, its log-sum-exp.

The keys are read once. One number for each query and row is held, which is its score first and its
weight in the end; what lies between is the weighting's own pass over blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.arrays import of
from qkv.arrays.rows import Cut, Reader, Rows, Weighed
from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Call
from qkv.scores import Score, evaluate
from qkv.types import Array, Span
from qkv.weightings import State, Weighting, pool

CACHED = 2**18
"""Scores of a block that its passes find in the cache."""

MOST = 2**18
"""Rows of values that a core takes at a time, however narrow."""


def run(rows: Rows, scores: np.ndarray, weighting: Weighting) -> Weighed:
    """The output of scores (n, m) and all that is known of them; they are overwritten."""
    alpha, found, entropy = weigh(weighting.scale(scores), rows.allowed, weighting)
    lse = weighting.lse(found)[:, 0] if weighting.has_lse else None
    return Weighed(pooled(rows, alpha), alpha, entropy, lse)


def scored(rows: Rows, query: np.ndarray, score: Score) -> np.ndarray:
    """s(q, kᵢ) for every live row, (n, m), on all cores."""
    call = Call(query, rows.key, None, score, Weighting())
    out = np.empty((call.n, call.m), query.dtype)
    every = calls.all_rows(call)

    def fill(cut: Cut) -> None:
        block = calls.place(call, every, cut)  # type: ignore[arg-type]
        key = cut.key().astype(query.dtype, copy=False)
        out[:, cut.start : cut.start + cut.size] = evaluate(score, query, key, block)

    _, size = streaming.block_size(call)
    Reader(call.fw).reduce(fill, lambda one, two: None, None, rows.cuts(size))
    return out


def weigh(
    s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting
) -> tuple[np.ndarray, State, np.ndarray]:
    """The weights in place of the scores, what is known of each row of them, and its entropy."""
    fw, (n, m) = of(s), s.shape
    step = max(CACHED // max(n, 1), 1)
    spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]
    template, nothing = fw.full((n, 1), 0.0, s), np.empty((m, 0), s.dtype)

    def block(span: Span) -> tuple[Array, Array | None, Array]:
        at = slice(span.start, span.start + span.size)
        live = None if allowed is None else allowed[None, at]
        return s[:, at], live, fw.positions(span.start, span.size, s)[None]

    def fold(lift: Any, merge: Any, init: Any) -> Any:
        return fw.reduce(lambda span: lift(*block(span)), merge, init(template), spans)

    found = weighting.search(fold)

    def lift(span: Span) -> State:
        x, live, k = block(span)
        return weighting.lift(x.copy(), live, k, found, nothing[: span.size], None)

    state = fw.reduce(lift, weighting.merge, weighting.init(template, 0), spans)
    _, known, _ = weighting.finish(state, found)
    weighting.check(known)

    def weight(span: Span) -> np.ndarray:
        """α, and of the block Σ |α| and Σ |α| ln |α|."""
        x, live, k = block(span)
        x[:] = weighting.weight(x, live, k, known)
        size = np.abs(x)
        logs = np.log(size, where=size > 0, out=np.zeros_like(size))
        return np.stack([size.sum(axis=1), np.einsum("nm,nm->n", size, logs)])

    total, along = fw.reduce(weight, np.add, np.zeros((2, n)), spans)
    some = np.where(total > 0, total, 1)
    entropy = np.where(total > 0, np.log(some) - along / some, 0)
    return s, known, np.maximum(entropy, 0)


def pooled(rows: Rows, alpha: np.ndarray) -> np.ndarray:
    """Σᵢ αᵢ vᵢ (n, d_v), in the wider of the two precisions; a row without weight is not read."""
    width = rows.value.shape[-1]

    def lift(cut: Cut) -> np.ndarray:
        some = alpha[:, cut.start : cut.start + cut.size]
        used = np.flatnonzero(some.any(axis=0))
        if len(used) * 8 < cut.size:
            value, some = cut.value(used), some[:, used]
        else:
            value = cut.value()
        some = some.astype(np.result_type(some, value), copy=False)
        return np.asarray(pool(some, value, None, None, sparse=True))

    start = np.zeros((len(alpha), width), alpha.dtype)
    if not width:
        return start
    size = max(min(streaming.READ // width, MOST), 512)
    return np.asarray(Reader(of(alpha)).reduce(lift, np.add, start, rows.cuts(size)))
