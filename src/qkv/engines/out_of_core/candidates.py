"""Attention over a few rows that were chosen for each query: the whole batch at once, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from qkv.engines.call import has_numbers_in_range
from qkv.engines.out_of_core.forward import finish_sums, pool_block
from qkv.engines.out_of_core.key_terms import load_key_terms_at
from qkv.frameworks import load_framework
from qkv.frameworks.stored_rows import Candidates, WeighedRows
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.weightings import Softmax, TopK, Weighting

MAX_GATHERED_FLOATS = 2**18
"""The number of key elements that are gathered and scored at a time, so that they stay cached."""

MAX_GATHERED_VALUES = 2**13
"""The number of rows whose values are read at a time."""

SOFTMAX = Softmax()
MAX_SORTED_SCORES = 512
"""Up to this number of scores, sorting all is faster than a search for the best ones."""


def weigh_candidates(
    rows: Candidates, query: np.ndarray, score: Score, weighting: Weighting
) -> list[tuple[np.ndarray, WeighedRows | None]]:
    """Return for each query (n, d) the ascending positions (c,) of its rows, and their weights.

    The weights are None if scores may overflow the dtype of the query.
    """
    positions, counts = rows.own, (rows.own < rows.total).sum(axis=1) + len(rows.shared)
    width = positions.shape[1] + len(rows.shared)
    is_padded = bool(counts.min(initial=width) < width)
    fits = has_numbers_in_range((score, weighting))
    scores = _score_own_rows(rows, query, score, is_padded) if fits else None
    if len(rows.shared):
        shared = np.broadcast_to(rows.shared, (len(query), len(rows.shared)))
        positions = np.concatenate([positions, shared], axis=1)
        order = positions.argsort(axis=1, kind="stable")
        row = np.arange(len(query))[:, None]
        positions = positions[row, order]
        if scores is not None:
            more = _score_block(rows, query, rows.shared, score)
            scores = np.concatenate([scores, more], axis=1)[row, order]
    results: list[WeighedRows | None] = [None] * len(query)
    if scores is not None:
        results = _weigh_scores(rows, scores, positions, counts, is_padded, weighting)
    return [
        (at[:count], result)
        for at, count, result in zip(positions, counts.tolist(), results, strict=True)
    ]


def _score_own_rows(
    rows: Candidates, query: np.ndarray, score: Score, is_padded: bool
) -> np.ndarray:
    """Return the scores (n, c) of the rows that each query has alone; −∞ where there is none."""
    own = rows.own
    at = np.where(own < rows.total, own, 0) if is_padded else own
    step = max(MAX_GATHERED_FLOATS // max(own.shape[1] * query.shape[1], 1), 1)
    blocks = []
    for start in range(0, len(query), step):
        check_deadline()
        blocks.append(
            _score_block(rows, query[start : start + step], at[start : start + step], score)
        )
    scores = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    if is_padded:
        scores[own == rows.total] = -np.inf
    return scores


def _score_block(
    rows: Candidates, query: np.ndarray, positions: np.ndarray, score: Score
) -> np.ndarray:
    """Return the scores (n, c) of rows at positions (n, c), or at (c,), the same for all."""
    if len(query) == 1:
        positions = positions.reshape(-1)
    key = rows.read_keys(positions).astype(query.dtype, copy=False)
    terms = load_key_terms_at(rows.cache, positions, score, key, query.dtype)
    if key.ndim == 3:
        query = query[:, None]
        terms = None if terms is None else terms[:, None]
    scores = np.asarray(
        score(query, key) if terms is None else score.score_with_key_terms(query, key, terms)
    )
    return scores[:, 0] if key.ndim == 3 else scores


def _weigh_scores(
    rows: Candidates,
    scores: np.ndarray,
    positions: np.ndarray,
    counts: np.ndarray,
    is_padded: bool,
    weighting: Weighting,
) -> list[WeighedRows | None]:
    """Return output and weights for the scores (n, c); None where a score overflows."""
    best = scores.max(axis=1)
    live = np.arange(scores.shape[1]) < counts[:, None] if is_padded else None
    alpha, lse = _compute_weights(weighting.scale_scores(scores), live, weighting)
    finite = np.flatnonzero(np.isfinite(best if lse is None else best + lse[:, 0])).tolist()
    sizes = counts.tolist()
    used: list[Any] = [None] * len(finite)
    values: Iterator[Any] = iter(used)
    if rows.read_values is not None:
        used = [alpha[i, : sizes[i]].nonzero()[0] for i in finite]
        at = [positions[i, x] for i, x in zip(finite, used, strict=True)]
        values = _read_values(rows.read_values, at)
    results: list[WeighedRows | None] = [None] * len(scores)
    for i, own, value in zip(finite, used, values, strict=True):
        weights, output = alpha[i : i + 1, : sizes[i]], np.zeros((1, 0), alpha.dtype)
        if rows.read_values is not None:
            output = pool_values(weights[:, own], value, weighting.is_convex)
        row_lse = None if lse is None else lse[i, :1]
        results[i] = WeighedRows(
            output, weights, None, row_lse, best[i : i + 1], rows_read=sizes[i]
        )
    return results


def _read_values(
    read_values: Callable[[np.ndarray], np.ndarray], positions: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the values at the positions of each query; several queries are read at a time."""
    start = 0
    while start < len(positions):
        stop, count = start + 1, len(positions[start])
        while stop < len(positions) and count + len(positions[stop]) <= MAX_GATHERED_VALUES:
            count += len(positions[stop])
            stop += 1
        group = positions[start:stop]
        value, end = read_values(group[0] if len(group) == 1 else np.concatenate(group)), 0
        for at in group:
            begin, end = end, end + len(at)
            yield value[begin:end]
        start = stop


def pool_values(weights: np.ndarray, value: np.ndarray, mean: bool) -> np.ndarray:
    """Return the output (1, d_v) for weights (1, c), none of them 0, and values (c, d_v)."""
    if mean and len(value) and not (value[0] == value[-1]).any():
        output = weights.astype(np.result_type(weights, value), copy=False) @ value
        if np.isfinite(output).all():
            return np.asarray(output / weights.sum(dtype=output.dtype))
    return finish_sums(pool_block(weights, value, mean))


def _compute_weights(
    scores: np.ndarray, live: np.ndarray | None, weighting: Weighting
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the weights (n, c) and the log-sum-exp (n, 1), which is None if there is none."""
    count = scores.shape[1]
    if type(weighting) is TopK:
        # The weights of the k best scores take a fraction of the time of a mask over all.
        k = min(weighting.k, count)
        if count <= MAX_SORTED_SCORES:
            order = (-scores).argsort(axis=1, kind="stable")[:, :k]
        else:
            order = load_framework("numpy").stable_topk(scores, k)[1]
        row = np.arange(len(scores))[:, None]
        some = scores[row, order]
        few, lse = SOFTMAX.weights_and_lse(some, None if live is None else live[row, order], order)
        alpha = np.zeros_like(scores)
        alpha[row, order] = few
        return alpha, lse
    return weighting.weights_and_lse(scores, live, np.arange(count, dtype=np.int32)[None])
