"""Asking: one reading of the rows for a batch of queries, made into answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from qkv import scores
from qkv.answer import Answer, Row, Share
from qkv.arrays import is_array, threads, to_numpy
from qkv.database import cells, scan
from qkv.database.view import View
from qkv.errors import CombinationError
from qkv.weightings import Softmax, Weighting

CACHED = 2**18
"""Scores of a piece that its passes find in the cache."""

RUN = 512
"""Neighbouring rows of which only the heaviest is looked at first."""

SHARES = 1024
"""Rows whose values are compared to find the heaviest value."""


class Asked:
    """A score, a weighting and the rows that may answer; `answers` asks them."""

    def __init__(
        self,
        view: View,
        score: Any,
        weighting: Weighting,
        live: np.ndarray | None,
        top: int,
        tolerance: float | None,
    ):
        self.view, self.score, self.weighting = view, score, weighting
        self.live, self.top, self.tolerance = live, top, tolerance
        self.total = len(view.ids) if live is None else int(live.sum())
        known = type(score).__module__.startswith("qkv.") and not scores.is_open(score)
        if weighting.needs_nonnegative and known and not score.nonnegative:
            raise CombinationError(
                f"{type(weighting).__name__} divides scores by their sum, but "
                f"{type(score).__name__} can be negative: use weighting='softmax', or score='exact'"
            )

    def answers(self, queries: Any, keep: bool) -> list[Answer]:
        s, engine = self._scores(queries)
        alpha, entropy, lse = self._weights(s)
        pooled = self._pooled(alpha) if self.view.schema.pools else None
        return [
            self._answer(
                queries[i],
                alpha[i],
                float(entropy[i]),
                None if lse is None else float(lse[i]),
                None if pooled is None else pooled[i],
                engine,
                keep,
            )
            for i in range(len(alpha))
        ]

    def _scores(self, queries: Any) -> tuple[np.ndarray, str]:
        view = self.view
        if isinstance(self.score, scores.Exact):
            s = np.zeros((len(queries), len(view.ids)))
            for i, key in enumerate(queries):
                s[i, np.isin(view.ids, view.find(key))] = 1.0
            return s, "exact index"
        code = self._encoded(queries)
        pieces = 0

        def counted() -> Iterator[scan.Piece]:
            nonlocal pieces
            for piece in view.pieces()():
                pieces += 1
                yield piece

        s = scan.score_all(counted, code, self._lowered(code), len(view.ids), view.scarce)
        return s, f"scan of {len(view.ids):,} rows in {pieces} piece{'s' if pieces > 1 else ''}"

    def _lowered(self, code: np.ndarray) -> Any:
        """The score, or a faster one within the tolerance, where one is given."""
        if self.tolerance is None:
            return self.score
        keys = next(self.view.parts()).tensors["code"]
        found = self.score.lowered(code, np.asarray(keys), self.tolerance, str(code.dtype))
        return self.score if isinstance(found, str) else found[0]

    def _encoded(self, queries: Any) -> np.ndarray:
        if is_array(queries) and self.view.schema.key_kind != "vector":
            code = to_numpy(queries)  # a vector in the place of a text
        else:
            code = self.view.encoder.query(queries)
        self.view.check(code)
        return np.ascontiguousarray(code, dtype=np.result_type(code, np.float32))

    def _weights(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """α (n, m), its entropy (n), and the log-sum-exp (n) where the weighting has one."""
        weighting = self.weighting
        with np.errstate(all="ignore"):
            if type(weighting) is Softmax:
                return self._softmax(weighting.scale(s))
            live = None if self.live is None else np.broadcast_to(self.live, s.shape)
            alpha = weighting(s, live)
            lse = None
            if weighting.has_lse:
                at = np.arange(s.shape[1])
                lse = weighting.lse_of(weighting.scale(s), live, at)[:, 0]
            mass = np.abs(alpha) / np.abs(alpha).sum(axis=1, keepdims=True)
            entropy = -np.where(mass > 0, mass * np.log(mass), 0).sum(axis=1)
        return alpha, np.maximum(entropy, 0), lse

    def _softmax(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same in few passes over s, which becomes α, in pieces that stay in the cache.

        With d the lead of a score over the best, the entropy is ln Σ e^d − Σ α d.
        """
        dead = None if self.live is None else ~self.live
        if dead is not None:
            s[:, dead] = -np.inf
        top = s.max(axis=1, keepdims=True)
        safe = np.where(np.isfinite(top), top, 0)
        step = max(CACHED // len(s), 1)
        spans = [slice(at, at + step) for at in range(0, s.shape[1], step)]

        def lift(at: slice) -> np.ndarray:
            with np.errstate(all="ignore"):
                lead = s[:, at] - safe
                some = np.exp(lead, out=s[:, at])
                if dead is not None:
                    lead[:, dead[at]] = 0
                return np.stack([some.sum(axis=1), np.einsum("nm,nm->n", some, lead)])

        total, along = np.sum(threads.each(lift, spans), axis=0, dtype=float)
        factor = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)[:, None]

        def scale(at: slice) -> None:
            s[:, at] *= factor.astype(s.dtype)

        threads.each(scale, spans)
        entropy = np.log(total) - along * factor[:, 0]
        lse = np.where(total > 0, safe[:, 0] + np.log(total), -np.inf)
        return s, np.where(total > 0, np.maximum(entropy, 0), 0), lse

    def _pooled(self, alpha: np.ndarray) -> np.ndarray:
        used = (alpha != 0).any(axis=0) if self.weighting.sparse else np.ones(1)
        if used.sum() * 8 < len(used):
            at = np.flatnonzero(used)
            values = self.view.snapshot.tensor("value", self.view.ids[at])
            return np.asarray(alpha[:, at] @ values)
        return scan.pool_all(self.view.pieces(value=True), alpha, self.view.scarce)

    def _answer(
        self,
        query: Any,
        alpha: np.ndarray,
        entropy: float,
        lse: float | None,
        pooled: np.ndarray | None,
        engine: str,
        keep: bool,
    ) -> Answer:
        if isinstance(query, np.ndarray) and query.ndim == 0:
            query = query.item()
        rows = self._heaviest(alpha, self.top)
        value, values = None, []
        if rows and pooled is not None:
            value = self._value(pooled)
        elif rows:
            values = self._shares(alpha)
            value = values[0].value
        held = alpha if keep else None

        def weights() -> np.ndarray:
            if held is not None:
                return held
            return self._again(query)

        def spread() -> Any:
            return self._spread(weights(), value)

        def above(weight: float) -> list[Row]:
            found = weights()
            return self._heaviest(np.where(found >= weight, found, 0), len(found))

        return Answer(
            query=query,
            value=value,
            rows=rows,
            values=values,
            entropy=entropy,
            lse=lse,
            total=self.total,
            engine=engine,
            score=_named(self.score),
            weighting=_named(self.weighting),
            _weights=weights,
            _spread=spread,
            _above=above,
        )

    def _again(self, query: Any) -> np.ndarray:
        queries = query[None] if is_array(query) else [query]
        s, _ = self._scores(queries)
        return np.asarray(self._weights(s)[0][0])

    def _order(self, alpha: np.ndarray, top: int) -> np.ndarray:
        """Places of the heaviest rows; of equal ones the lowest comes first."""
        size = alpha if self.weighting.convex else np.abs(alpha)
        if top >= len(size):
            near = np.arange(len(size))
        else:
            # The heaviest lie where the maxima of short runs are among the largest.
            starts = np.arange(0, len(size), RUN)
            best = np.maximum.reduceat(size, starts)
            runs = starts[best >= _largest(best, top)]
            near = (runs[:, None] + np.arange(RUN)).reshape(-1)
            near = near[near < len(size)]
            near = near[size[near] >= _largest(size[near], top)]
        near = near[np.argsort(-size[near], kind="stable")][:top]
        return np.asarray(near[size[near] > 0])

    def _heaviest(self, alpha: np.ndarray, top: int) -> list[Row]:
        order = self._order(alpha, top)
        if not len(order):
            return []
        schema, rows = self.view.schema, self.view.rows(self.view.ids[order])
        return [
            Row(schema.key_of(r), schema.value_of(r), float(alpha[i]), int(i), r)
            for i, r in zip(order, rows, strict=True)
        ]

    def _shares(self, alpha: np.ndarray) -> list[Share]:
        """The weight of each value, heaviest first."""
        total: dict[bytes, list[Any]] = {}
        for row in self._heaviest(alpha, SHARES):
            mark = cells.dumps({"value": row.value}).encode()
            total.setdefault(mark, [row.value, 0.0])[1] += row.weight
        found = [Share(value, weight) for value, weight in total.values()]
        return sorted(found, key=lambda share: -share.weight)

    def _value(self, pooled: np.ndarray) -> Any:
        if self.view.schema.value_kind == "number":
            return float(pooled[0])
        if self.view.schema.value_kind == "numbers":
            return dict(zip(self.view.schema.value, map(float, pooled), strict=True))
        return pooled

    def _spread(self, alpha: np.ndarray, value: Any) -> Any:
        if value is None or not self.view.schema.pools:
            return None
        mean = np.asarray(list(value.values()) if isinstance(value, dict) else value)
        total = np.zeros_like(np.atleast_1d(mean), dtype=float)
        at = 0
        for piece in self.view.pieces(value=True)():
            values = piece.value if piece.live is None else piece.value[piece.live]  # type: ignore[index]
            assert values is not None
            some = alpha[at : at + len(values)]
            at += len(values)
            used = np.flatnonzero(some)
            total += some[used] @ (values[used].astype(float) - mean) ** 2
        return self._value(np.sqrt(np.maximum(total, 0)))


def _largest(x: np.ndarray, k: int) -> Any:
    """The k-th largest number of x, or the least where there are fewer."""
    k = min(k, len(x))
    return np.partition(x, len(x) - k)[len(x) - k]


def _named(thing: Any) -> str:
    """The name of a score or weighting, with the numbers in it that are not its own defaults."""
    told = [
        f"{field.name}={getattr(thing, field.name):.4g}"
        for field in (dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ())
        if isinstance(getattr(thing, field.name), int | float)
        and getattr(thing, field.name) != field.default
    ]
    return f"{type(thing).__name__}({', '.join(told)})" if told else type(thing).__name__
