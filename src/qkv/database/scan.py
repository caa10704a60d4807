"""Reading every key once: scores, pooled values, and attention with gradients over the pieces.

A piece is the keys (m, d), the values (m, d_v) and the live rows of one segment. Nothing here
holds more than a piece at a time, and one number for each query and row where weights are asked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv import attention, masks, weightings
from qkv.arrays import of, threads, to_numpy, tree
from qkv.engines.streaming import READ
from qkv.errors import FrameworkError
from qkv.scores import Dot, ScaledDot, Score
from qkv.types import Array, Span
from qkv.weightings import Weighting

NARROW = 8
"""Numbers of a value up to which its covariance with the key costs less than a second reading."""


MOST = 2**18
"""Rows of values that a core takes at a time, however narrow."""


class Piece(NamedTuple):
    """Rows that are read together; `live` (m,) marks those that count, None means all."""

    key: np.ndarray
    value: np.ndarray | None = None
    live: np.ndarray | None = None


Read = Callable[[], Iterable[Piece]]


def score_all(
    read: Read, query: np.ndarray, score: Score, rows: int, apart: bool = False
) -> np.ndarray:
    """s(q, kᵢ) for every live row: (n, d) → (n, rows), on all cores.

    With `apart` each piece is done with before the next one is read.

    >>> keys = np.arange(6.0).reshape(3, 2)
    >>> live = np.array([True, False, True])
    >>> score_all(lambda: [Piece(keys, live=live)], np.array([[1.0, 1.0]]), Dot(), 2)
    array([[1., 9.]])
    """
    fw = of(query)
    out = np.empty((len(query), rows), query.dtype)
    at = 0

    def fill(job: tuple[np.ndarray, np.ndarray]) -> None:
        key, found = job
        with fw.quiet():
            found[:] = score(query, key.astype(query.dtype, copy=False))

    for pieces in _groups(read, apart):
        jobs, kept = [], []
        for piece in pieces:
            size = len(piece.key) if piece.live is None else int(piece.live.sum())
            found = whole = out[:, at : at + size]
            if piece.live is not None:
                whole = np.empty((len(query), len(piece.key)), out.dtype)
                kept.append((found, whole, piece.live))
            for span in _spans(piece.key, score):
                some = slice(span.start, span.start + span.size)
                jobs.append((piece.key[some], whole[:, some]))
            at += size
        with threads.one_for_blas():
            threads.each(fill, jobs)
        for found, whole, live in kept:
            found[:] = whole[:, live]
    return out


def pool_all(read: Read, weights: np.ndarray, apart: bool = False) -> np.ndarray:
    """Σᵢ αᵢ vᵢ of every live row: (n, m) → (n, d_v)."""
    fw, at, total = of(weights), 0, 0.0

    def lift(job: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        alpha, value = job
        with fw.quiet():
            alpha = alpha.astype(np.result_type(alpha, value), copy=False)
            out: np.ndarray = alpha @ value
            if not np.isfinite(out).all():  # 0 · NaN brings back what does not count
                out = alpha @ np.where((alpha != 0).any(axis=0)[:, None], value, 0)
            return out

    for pieces in _groups(read, apart):
        jobs = []
        for piece in pieces:
            value = piece.value
            assert value is not None
            size = len(value) if piece.live is None else int(piece.live.sum())
            alpha = weights[:, at : at + size]
            at += size
            if piece.live is not None:
                whole = np.zeros((len(alpha), len(value)), alpha.dtype)
                whole[:, piece.live] = alpha
                alpha = whole
            for span in _spans(value, most=MOST):
                some = slice(span.start, span.start + span.size)
                jobs.append((alpha[:, some], value[some]))
        # A thread that BLAS has woken spins for a while, on a core that the next scan needs.
        with threads.one_for_blas():
            total = total + sum(threads.each(lift, jobs))
    return np.asarray(total)


def _groups(read: Read, apart: bool) -> Iterable[list[Piece]]:
    """The pieces that are read together: one by one, or all."""
    return ([piece] for piece in read()) if apart else [list(read())]


def _spans(x: np.ndarray, score: Score | None = None, most: int | None = None) -> list[Span]:
    """Rows that a core takes at a time."""
    width = max(x.shape[1], 1 if score is None else score.footprint(x.shape[1]))
    size = max(READ // max(width, 1), 512)
    size = size if most is None else min(size, most)
    return [Span(i, min(size, len(x) - i)) for i in range(0, len(x), size)]


def attend(
    read: Read, query: Array, score: Score, weighting: Weighting, *, tolerance: float | None = None
) -> Array:
    """Σᵢ α(q, kᵢ) vᵢ over all pieces, in the query's framework, with gradients for the query and
    for every array in the score.

    With softmax the pieces are merged by their log-sum-exp, and the way back reads them again.
    For a dot product and narrow values it need not: ∂out/∂q = Cov_p[v, k], whose sums are taken
    on the way forth.
    """
    fw = of(query)
    if fw.unknown(query):
        raise FrameworkError(
            "attend reads a stored database while it runs, so it cannot be traced: call it outside "
            "of jit, compile or tf.function"
        )
    if not isinstance(weighting, weightings.Softmax):
        return _whole(read, query, score, weighting)
    leaves = [query, *tree.leaves(fw, (score, weighting))]

    def rebuilt(arrays: Sequence[Array]) -> tuple[Array, Score, Weighting]:
        q, *rest = arrays
        return (q, *tree.rebuild(fw, (score, weighting), rest))

    def part(piece: Piece, arrays: Sequence[Array]) -> Array:
        """One piece's output and log-sum-exp, side by side: (n, d_v + 1)."""
        q, s, w = rebuilt(arrays)
        key, value = (_taken(fw, x, q) for x in (piece.key, piece.value))
        mask = None
        if piece.live is not None:
            mask = masks.array(fw.constant(piece.live[None], q, "bool"))
        out, lse = attention.attend(
            q, key, value, score=s, weighting=w, mask=mask, tolerance=tolerance, return_lse=True
        )
        return fw.xp.concat([out, lse[..., None]], axis=-1)

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        merged = None
        for piece in read():
            found = part(piece, arrays)
            merged = found if merged is None else _merge(fw, merged, found)
        if merged is None:
            merged = fw.full((*arrays[0].shape[:-1], 1), 0.0, arrays[0])
        return (merged[..., :-1],), (merged,)

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        out, lse = kept[0][..., :-1], kept[0][..., -1:]
        totals: list[Array | None] = [None] * len(arrays)
        for piece in read():
            found, pull = fw.vjp(lambda *x, piece=piece: part(piece, x), *arrays)
            share = _share(fw, found[..., -1:], lse)
            along = share * gradients[0]
            above = fw.xp.sum(along * (found[..., :-1] - out), axis=-1, keepdims=True)
            pulled = pull(fw.xp.concat([along, above], axis=-1))
            for i, gradient in enumerate(pulled):
                if gradient is not None:
                    old = totals[i]
                    totals[i] = gradient if old is None else old + gradient
        return tuple(totals)

    def reference(*arrays: Array) -> tuple[Array, ...]:
        return forward(*arrays)[0]

    if not fw.needs_gradient(leaves):
        return forward(*leaves)[0][0]
    scale = _dot_scale(score, weighting, query)
    if scale is not None and _narrow(read):
        return _by_covariance(fw, read, query, scale)
    return fw.custom(forward, backward, reference, leaves)[0]


def _dot_scale(score: Score, weighting: Any, query: Array) -> float | None:
    """c of s = c q·k, where the score is that and nothing in it is learned."""
    if not isinstance(weighting.temperature, int | float):
        return None
    if isinstance(score, Dot):
        return 1.0 / weighting.temperature
    if isinstance(score, ScaledDot) and score.softcap is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if score.scale is None else score.scale
        return scale / weighting.temperature if isinstance(scale, int | float) else None
    return None


def _narrow(read: Read) -> bool:
    first = next(iter(read()), None)
    return first is not None and first.value is not None and first.value.shape[1] <= NARROW


def _by_covariance(fw: Any, read: Read, query: Array, scale: float) -> Array:
    """softmax(c q·k) v, whose gradient c Cov_p[v, k] is summed in the one pass over the rows."""

    def forward(q: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        xp = fw.xp
        n, d = q.shape[-2:]
        top = total = None
        for piece in read():
            step = max(READ // max(d, 1), 512)
            for at in range(0, len(piece.key), step):
                rows = slice(at, at + step)
                assert piece.value is not None
                key, value = (_taken(fw, x[rows], q) for x in (piece.key, piece.value))
                s = fw.inner(q, key) * scale
                if piece.live is not None:
                    live = fw.constant(piece.live[None, rows], q, "bool")
                    s = xp.where(live, s, -math.inf)
                best = xp.max(s, axis=-1, keepdims=True)
                new = best if top is None else xp.maximum(top, best)
                safe = xp.where(xp.isfinite(new), new, xp.zeros_like(new))
                p = xp.exp(s - safe)
                ones = fw.full((*value.shape[:-1], 1), 1.0, value)
                wide = xp.concat([ones, value], axis=-1)  # (c, 1 + d_v)
                # Σ p, Σ p v, and for each of 1, v: Σ p (1, v) k.
                parts = [xp.matmul(p, wide)]
                parts += [xp.matmul(p * wide[:, j], key) for j in range(wide.shape[-1])]
                found = xp.concat(parts, axis=-1)
                if total is None:
                    total = found
                else:
                    total = total * xp.exp(xp.where(xp.isfinite(top), top - safe, top)) + found
                top = new
        if total is None:
            empty = fw.full((n, 0), 0.0, q)
            return (empty,), (fw.full((n, 0, d), 0.0, q),)
        mass = total[:, :1]
        mean = total / xp.where(mass > 0, mass, xp.ones_like(mass))
        width = (total.shape[-1] - d - 1) // (d + 1)
        out = mean[:, 1 : 1 + width]
        sums = xp.reshape(mean[:, 1 + width :], (n, 1 + width, d))
        covariance = sums[:, 1:] - out[:, :, None] * sums[:, :1]
        return (out,), (covariance,)

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        along = gradients[0][:, :, None]
        return (fw.xp.sum(along * kept[0], axis=1) * scale,)

    def reference(q: Array) -> tuple[Array, ...]:
        return (_whole(read, q, Dot(), weightings.Softmax(1.0 / scale)),)

    return fw.custom(forward, backward, reference, [query])[0]


def _whole(read: Read, query: Array, score: Score, weighting: Weighting) -> Array:
    """The same for any weighting: one number for each query and row is held, and no key."""
    fw = of(query)
    pieces = list(read())
    if not pieces:
        return fw.full((*query.shape[:-1], 0), 0.0, query)
    s = fw.xp.concat([score(query, _taken(fw, x.key, query)) for x in pieces], axis=-1)
    live = None
    if any(piece.live is not None for piece in pieces):
        flags = [np.ones(len(x.key), bool) if x.live is None else x.live for x in pieces]
        live = fw.constant(np.concatenate(flags)[None], query, "bool")
        live = fw.xp.broadcast_to(live, tuple(s.shape))
    with fw.quiet():
        alpha = weighting(s, live)
    at, out = 0, None
    for piece in pieces:
        value = _taken(fw, piece.value, query)
        pooled = fw.xp.matmul(alpha[..., at : at + len(piece.key)], value)
        out = pooled if out is None else out + pooled
        at += len(piece.key)
    return out


def _merge(fw: Any, one: Array, two: Array) -> Array:
    """Outputs and log-sum-exps of two disjoint sets of rows as those of both."""
    xp = fw.xp
    a, b = one[..., -1:], two[..., -1:]
    top = xp.maximum(a, b)
    safe = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    lse = safe + xp.log(xp.exp(a - safe) + xp.exp(b - safe))
    out = one[..., :-1] * _share(fw, a, lse) + two[..., :-1] * _share(fw, b, lse)
    return xp.concat([out, lse], axis=-1)


def _share(fw: Any, part: Array, whole: Array) -> Array:
    """e^(part − whole): the share of the weight that a part holds."""
    xp = fw.xp
    return xp.where(xp.isfinite(part), xp.exp(part - whole), xp.zeros_like(part))


def _taken(fw: Any, x: np.ndarray | None, like: Array) -> Array:
    """A mapped array as the framework's own beside `like`, over the same memory where it can."""
    assert x is not None
    with warnings.catch_warnings():
        # Torch warns that the file must not be written to; nothing here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return fw.constant(x, like, fw.dtype(like))


def host(query: Any) -> np.ndarray:
    """A query of any framework as NumPy's."""
    return to_numpy(query) if hasattr(query, "shape") else np.asarray(query, dtype=float)
