"""The training task: distinct keys and queries, and pairs as indices of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from qkv.database.encoders.base import Encoder
from qkv.database.encoders.learned import HeadInput, Learned, ProjectedVectors, extract_features
from qkv.database.table import cells
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks.ragged import DenseAndSparse

RECALL_DEPTHS = (1, 10, 100)
MAX_HELD_OUT_PAIRS = 2000
"""At most this number of held-out pairs are evaluated after each epoch."""

MIN_HELD_OUT_QUERIES = 100
"""From this number of queries on, a tenth of them is held out by default."""

SCORES_PER_BLOCK = 1 << 24
"""The number of scores in memory at a time."""


class IndexedPairs(NamedTuple):
    """Pairs as the index of a query and the index of a key, each (p,), with weights (p,)."""

    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray

    def take_pairs(self, indices: np.ndarray | slice) -> IndexedPairs:
        """Return the pairs at these indices."""
        return IndexedPairs(self.query[indices], self.key[indices], self.weight[indices])

    def find_other_right_keys(self) -> dict[int, np.ndarray]:
        """Return the right keys of each query that has several right keys, by query."""
        order = np.argsort(self.query, kind="stable")
        query, key = self.query[order], self.key[order]
        starts = np.flatnonzero(np.diff(query, prepend=-1))
        stops = np.append(starts[1:], len(query))
        many = np.flatnonzero(stops - starts > 1)
        return {int(query[starts[i]]): np.unique(key[starts[i] : stops[i]]) for i in many}

    def find_excluded_cells(
        self, others: Mapping[int, np.ndarray], candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, columns) of the scores that belong to another right key of the row's query.

        `others` is the result of `find_other_right_keys`. `candidates` are the keys of the columns,
        ascending.
        """
        rows, columns = [], []
        if others:
            for row, (query, key) in enumerate(zip(self.query.tolist(), self.key, strict=True)):
                for other in others.get(query, ()):
                    column = int(np.searchsorted(candidates, other))
                    if other != key and column < len(candidates) and candidates[column] == other:
                        rows.append(row)
                        columns.append(column)
        return np.array(rows, np.int64), np.array(columns, np.int64)


@dataclass(frozen=True)
class TrainingTask:
    """The distinct keys and queries, and the training and held-out pairs."""

    encoder: Encoder
    keys: Sequence[Any]
    queries: Sequence[Any]
    train_pairs: IndexedPairs
    held_pairs: IndexedPairs
    holds_out: bool
    key_features: list[HeadInput]
    query_features: list[HeadInput]
    other_right_keys: dict[int, np.ndarray]
    fingerprint: str

    @cached_property
    def key_numbers(self) -> np.ndarray:
        """The indices of all keys, (m,)."""
        return np.arange(len(self.keys))

    def ranks_before(self) -> np.ndarray:
        """Return, for each held-out pair, how many wrong keys the original encoder ranks higher."""
        encoder, score = self.encoder, self.encoder.default_score(len(self.keys))
        key, sparse = encoder.encode(self.keys), encoder.encode_sparse(self.keys)

        def score_block(block: slice) -> np.ndarray:
            queries = _select_keys(self.queries, self.held_pairs.query[block])
            query, words = encoder.encode_full_query(queries)
            if sparse is None or words is None:
                return np.asarray(score(query, key))
            cuts = (
                DenseAndSparse(key[keys], sparse[keys], words)
                for keys in split_blocks(len(key), 1 << 14)
            )
            return np.concatenate([np.asarray(score(query, np.asarray(x))) for x in cuts], axis=1)

        return self._compute_ranks(score_block)

    def ranks_after(self, learned: Learned, key: ProjectedVectors) -> np.ndarray:
        """Return, for each held-out pair, how many wrong keys the learned encoder ranks higher.

        `key` are the vectors of all keys from this encoder.
        """

        def score_block(block: slice) -> np.ndarray:
            features = take_inputs(self.query_features, self.held_pairs.query[block])
            return learned.project_inputs(features, "query").compute_scores(key)

        return self._compute_ranks(score_block)

    def project_all(self, learned: Learned, side: str) -> ProjectedVectors:
        """Return the projected vectors of all keys (`side` "key") or of all queries."""
        features = self.key_features if side == "key" else self.query_features
        count = len(self.keys) if side == "key" else len(self.queries)
        out = np.empty((count, learned.width), np.float32)
        for block in split_blocks(count, 1 << 14):
            out[block] = learned.project_dense(
                take_inputs(features, np.arange(block.start, block.stop)), side
            )
        return ProjectedVectors(out, learned.project_sparse(features, side))

    def _compute_ranks(self, scores: Callable[[slice], np.ndarray]) -> np.ndarray:
        """Return, for each held-out pair, how many wrong keys rank higher than the right key.

        `scores(slice)` returns the scores of these held-out pairs with all keys.
        """
        ranks = np.empty(len(self.held_pairs.query), np.int64)
        for block in split_blocks(len(ranks), max(1, SCORES_PER_BLOCK // len(self.keys))):
            s, pairs = scores(block), self.held_pairs.take_pairs(block)
            right_score = s[np.arange(len(s)), pairs.key][:, None]
            s[pairs.find_excluded_cells(self.other_right_keys, self.key_numbers)] = -np.inf
            # A wrong key with the same score counts as ranked higher.
            ranks[block] = (s >= right_score).sum(axis=1) - 1
        return ranks

    def compute_recall(self, ranks: np.ndarray) -> dict[int, float]:
        """Return the share of the held-out pairs with a rank below each of `RECALL_DEPTHS`."""
        return {
            k: float(np.average(ranks < k, weights=self.held_pairs.weight)) for k in RECALL_DEPTHS
        }


def build_task(
    encoder: Encoder, keys: Sequence[Any], pairs: Sequence[Any], held_out: Any, seed: int
) -> TrainingTask:
    """Build the task from keys and pairs. A part of the pairs is held out for evaluation."""
    index_by_digest: dict[bytes, int] = {}
    first = [
        i
        for i, code in enumerate(cells.key_digests(keys))
        if index_by_digest.setdefault(code, i) == i
    ]
    if len(first) < 2:
        raise ArgumentError("learn: there must be at least two different keys")
    number = {code: index for index, code in enumerate(index_by_digest)}
    distinct = _select_keys(keys, np.array(first))
    queries: list[Any] = []
    seen: dict[bytes, int] = {}
    every = _index_pairs(pairs, "pairs", number, queries, seen)
    rng = np.random.default_rng([seed, 1])
    if held_out is None:  # with few queries, train on all of them
        held_out = 0.1 if len(queries) >= MIN_HELD_OUT_QUERIES else 0
    if isinstance(held_out, int | float):
        if not 0 <= held_out < 1:
            raise ArgumentError(f"learn: held_out must be at least 0 and below 1, not {held_out!r}")
        count = round(held_out * len(queries))
        if held_out and len(queries) > 1:
            count = min(max(count, 1), len(queries) - 1)
        is_held = np.isin(every.query, rng.permutation(len(queries))[:count])
        train, held_pairs = every.take_pairs(~is_held), every.take_pairs(is_held)
    else:
        train, held_pairs = every, _index_pairs(held_out, "held_out", number, queries, seen)
    holds_out = bool(len(held_pairs.query))
    evaluated = held_pairs if holds_out else train
    if len(evaluated.query) > MAX_HELD_OUT_PAIRS:
        evaluated = evaluated.take_pairs(
            np.sort(rng.choice(len(evaluated.query), MAX_HELD_OUT_PAIRS, replace=False))
        )
    code = blake2b(digest_size=16)
    for part in (*index_by_digest, *seen):
        code.update(part)
    for numbers in (*train, *evaluated):
        code.update(numbers.tobytes())
    code.update(json.dumps(encoder.settings(), sort_keys=True, default=str).encode())
    return TrainingTask(
        encoder=encoder,
        keys=distinct,
        queries=queries,
        train_pairs=train,
        held_pairs=evaluated,
        holds_out=holds_out,
        key_features=_extract_features(encoder, distinct, "key"),
        query_features=_extract_features(encoder, queries, "query"),
        other_right_keys=IndexedPairs(
            *map(np.concatenate, zip(train, held_pairs, strict=True))
        ).find_other_right_keys(),
        fingerprint=code.hexdigest(),
    )


def _index_pairs(
    pairs: Sequence[Any],
    name: str,
    number: Mapping[bytes, int],
    queries: list[Any],
    seen: dict[bytes, int],
) -> IndexedPairs:
    """Return pairs as indices; new queries are appended to `queries`."""
    if not len(pairs):
        raise ArgumentError(f"learn: {name} is empty: pass (query, right key) pairs")
    rows: list[tuple[int, int, float]] = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DtypeError(
                f"learn: {name}[{i}] must be (query, right key) or (query, right key, weight), "
                f"not {pair!r}"
            )
        query, key = pair[:2]
        weight = pair[2] if len(pair) == 3 else 1.0
        if isinstance(weight, bool | str) or not 0 < float(weight) < math.inf:
            raise ArgumentError(f"learn: the weight of {name}[{i}] must be above 0, not {weight!r}")
        index = number.get(cells.key_digest(key))
        if index is None:
            raise ArgumentError(
                f"learn: {name}[{i}] has the right key {key!r}, which no row has: add it first"
            )
        if query is None:
            raise ArgumentError(f"learn: {name}[{i}] has no query: pass (query, right key)")
        code = cells.key_digest(query)
        if code not in seen:
            seen[code] = len(queries)
            queries.append(query)
        rows.append((seen[code], index, float(weight)))
    query, key, weight = zip(*rows, strict=True)
    return IndexedPairs(np.array(query), np.array(key), np.array(weight, np.float32))


def _extract_features(encoder: Encoder, keys: Sequence[Any], side: str) -> list[HeadInput]:
    """Return the inputs of the base encoder's heads for these keys or queries."""
    base = encoder.base if isinstance(encoder, Learned) else encoder
    return extract_features(base, keys, side)


def take_inputs(inputs: Sequence[HeadInput], texts: np.ndarray) -> list[HeadInput]:
    """Return the inputs of each head for the texts at these indices."""
    return [input.take_texts(texts) for input in inputs]


def _select_keys(keys: Sequence[Any], indices: np.ndarray) -> Sequence[Any]:
    """Return the keys at these indices."""
    if hasattr(keys, "shape"):
        return keys[indices]  # type: ignore[call-overload, no-any-return]
    return [keys[i] for i in indices.tolist()]


def split_blocks(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` rows that together cover `count` rows."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
