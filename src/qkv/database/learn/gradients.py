"""The loss −ln α(query, right key) of a batch, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from qkv.database.encoders.learned import SIDES, HeadInput, TokenBag, pool_tokens, softmax_by_text
from qkv.frameworks import ragged
from qkv.frameworks.ragged import Ragged

Parameters = Mapping[str, np.ndarray]


class SharedWords(NamedTuple):
    """The a words that n queries share with keys.

    `query` (a, n) are the values φ of the words in the queries. The values ψ in the keys are
    sparse: entry e is the value `number` of the word `word` in the key `row`, each (e,).
    """

    query: np.ndarray
    row: np.ndarray
    word: np.ndarray
    number: np.ndarray
    key_count: int

    def compute_scores(self, weight: np.ndarray) -> np.ndarray:
        """Return Σ_w weight_w φ_w ψ_w, (n, keys). The weights are (a,)."""
        query = (self.query * weight[:, None]).astype(weight.dtype, copy=False)
        return ragged.sum_entries_by_row(query, self.row, self.word, self.number, self.key_count)

    def weight_gradient(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of the weights (a,), given the gradient of the scores (n, keys)."""
        out, along = np.zeros(len(self.query), gradient.dtype), np.ascontiguousarray(gradient.T)
        for block in ragged.entry_blocks(len(self.row), self.query.shape[1]):
            word, row = self.word[block], self.row[block]
            each = np.einsum("en,en->e", self.query[word], along[row]) * self.number[block]
            out += np.bincount(word, each, len(out)).astype(out.dtype)
        return out


def find_shared_words(
    query: HeadInput, key: HeadInput, known: np.ndarray
) -> tuple[SharedWords, np.ndarray]:
    """Return the words that both queries and keys have, and the codes (a,) of these words.

    Only words with a code in `known` (w,), ascending, count.
    """
    assert isinstance(query.x, Ragged) and isinstance(key.x, Ragged)
    shared_codes = np.intersect1d(ragged.entry_positions(query.x), known)
    row, word, entries = ragged.find_entries(key.x, shared_codes)
    phi, number = (
        ragged.gather_columns(query.x, shared_codes)[:, :-1],
        ragged.entry_values(key.x)[entries],
    )
    if query.length is not None:
        phi = phi * query.length[:, None]
    if key.length is not None:
        number = number * key.length[row]
    return SharedWords(np.ascontiguousarray(phi.T), row, word, number, len(key.x)), shared_codes


class TrainingBatch(NamedTuple):
    """A batch of n queries, c candidate keys, and the right key of each query.

    `query` and `key` have one input per head: tokens, vectors (n or c, width), or sparse vectors.
    For sparse vectors, `words` has the words that queries and keys share.

    `right_columns` (n,) are the columns of the right keys in the scores. `pair_shares` (n,) are the
    weights of the pairs, which sum to 1. `excluded_cells` are the rows and columns of other right
    keys, which must not count as wrong.
    """

    query: Sequence[HeadInput]
    key: Sequence[HeadInput]
    right_columns: np.ndarray
    pair_shares: np.ndarray
    excluded_cells: tuple[np.ndarray, np.ndarray]
    cosines: Sequence[bool]
    words: Mapping[int, SharedWords] = MappingProxyType({})

    def list_sides(self) -> list[tuple[str, int, HeadInput]]:
        """Return (side, head, input) for every head that is not sparse."""
        return [
            (side, i, x)
            for side, inputs in zip(SIDES, (self.query, self.key), strict=True)
            for i, x in enumerate(inputs)
            if i not in self.words
        ]


def compute_gradients(
    parameters: Parameters, batch: TrainingBatch
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss, and the gradient of every parameter by name.

    loss = −Σᵢ shareᵢ ln α(qᵢ, right key), α = softmax(Σ_h scale_h u_qʰ·u_kʰ), u = y/‖y‖.

    For each head and side, `parameters` has w (width, width). A head with tokens also has logits,
    vectors and places. A sparse head has words (a,). `scales` (heads,) and words are logarithms.
    """
    scales = np.exp(parameters["scales"])
    forward = {
        (side, i): _HeadSide(parameters, side, i, x, batch) for side, i, x in batch.list_sides()
    }
    heads = {i: (forward["query", i], forward["key", i]) for side, i in forward if side == "key"}
    weight = {i: scales[i] * np.exp(parameters[f"{i}.words"]) for i in batch.words}
    alike = [scales[i] * (q.vectors @ k.vectors.T) for i, (q, k) in heads.items()]
    s: Any = sum(alike + [words.compute_scores(weight[i]) for i, words in batch.words.items()])
    s[batch.excluded_cells] = -np.inf
    s -= s.max(axis=1, keepdims=True)
    rows = np.arange(len(s))
    right = s[rows, batch.right_columns]
    g = np.exp(s, out=s)
    total = g.sum(axis=1)
    loss = float(batch.pair_shares @ (np.log(total) - right))
    g *= (batch.pair_shares / total)[:, None]
    g[rows, batch.right_columns] -= batch.pair_shares

    gradients: dict[str, np.ndarray] = {"scales": np.empty_like(scales)}
    for i, (q, k) in heads.items():
        to_query = scales[i] * (g @ k.vectors)
        gradients["scales"][i] = np.einsum("ij,ij", to_query, q.vectors)
        gradients |= q.backward(to_query)
        gradients |= k.backward(scales[i] * (g.T @ q.vectors))
    for i, words in batch.words.items():
        gradients[f"{i}.words"] = slope = weight[i] * words.weight_gradient(g)
        gradients["scales"][i] = slope.sum()
    return loss, gradients


class _HeadSide:
    """The vectors u of one head for the queries or for the keys, with their backward pass."""

    def __init__(self, p: Parameters, side: str, i: int, input: HeadInput, batch: TrainingBatch):
        self.prefix = prefix = f"{i}.{side}."
        self.parameters, self.uses_cosine = p, batch.cosines[i]
        x, stretch = input
        self.row_factors = None if stretch is None else stretch[:, None]
        self.bag = x if isinstance(x, TokenBag) else None
        if isinstance(x, TokenBag):
            logits = p[prefix + "logits"][x.ids] + p[prefix + "places"][x.positions]
            self.token_weights = softmax_by_text(logits, x.offsets)
            x = pool_tokens(p[prefix + "vectors"], self.token_weights, x.ids, x.offsets)
        assert isinstance(x, np.ndarray)
        self.x = x
        y = x @ p[prefix + "w"].T
        if self.uses_cosine:
            length = np.sqrt(np.einsum("ij,ij->i", y, y))
            self.norms = np.where(length == 0, 1, length)[:, None]
            y /= self.norms
        self.unit = y
        self.vectors = y if self.row_factors is None else y * self.row_factors

    def backward(self, to_u: np.ndarray) -> dict[str, np.ndarray]:
        """Return the gradients of the parameters, given the gradient of the vectors."""
        prefix = self.prefix
        if self.row_factors is not None:
            to_u = to_u * self.row_factors
        if self.uses_cosine:
            along = np.einsum("ij,ij->i", to_u, self.unit)[:, None]
            to_u = (to_u - along * self.unit) / self.norms
        gradients = {prefix + "w": to_u.T @ self.x}
        if self.bag is None:
            return gradients
        ids, offsets, positions = self.bag
        vectors = self.parameters[prefix + "vectors"]
        to_token = np.repeat(to_u @ self.parameters[prefix + "w"], np.diff(offsets), axis=0)
        to_alpha = np.einsum("ij,ij->i", to_token, vectors[ids])
        to_token *= self.token_weights[:, None]
        gradients[prefix + "vectors"] = _sum_rows_by_id(to_token, ids, len(vectors))
        mean = np.concatenate([[0], np.cumsum(self.token_weights * to_alpha, dtype=np.float64)])
        mean = np.repeat(mean[offsets[1:]] - mean[offsets[:-1]], np.diff(offsets))
        to_logit = self.token_weights * (to_alpha - mean)
        for name, indices in (("logits", ids), ("places", positions)):
            size = len(self.parameters[prefix + name])
            gradients[prefix + name] = np.bincount(indices, to_logit, size).astype(vectors.dtype)
        return gradients


def _sum_rows_by_id(rows: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """Return the sums of the rows with the same id, (size, width); row i is the sum for id i."""
    out = np.zeros((size, rows.shape[1]), rows.dtype)
    if len(ids):
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        out[ids[order][starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return out
