"""Encode text by its words: BM25 as a dot product of sparse vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, to_texts
from qkv.database.encoders.characters import SPACE_CODE, mix_hash, split_blocks, to_letters
from qkv.errors import ArgumentError
from qkv.frameworks import threads
from qkv.frameworks.ragged import Ragged, build_sparse, concat_ragged
from qkv.util.keyword_hints import suggest_keywords


@suggest_keywords
@dataclass(frozen=True)
class Lexical(Encoder):
    """s(q, k) = Σ_w idf(w) · f (k₁ + 1) / (f + k₁ (1 − b + b |k|/mean)) / (Σ_w idf(w) + usual).

    This is BM25, divided by the idf of the query plus that of an average key. So two common words
    count less than a sentence. idf(w) = ln(1 + (m − df + ½)/(df + ½)) is large if df, the number of
    keys with the word w, is small among the m keys. f is the count of w in the key, and |k| the
    number of words of the key.

    The sparse vector of the query contains the idf, and that of the key the other factor. The
    position of a word is its 32-bit hash. A word that no key had in `fit` has df = 0; it matches
    keys that are added later. Before `fit`, all vectors are 0.

    With `doubt`, words that some key has count r^`doubt` times as much, where r is their share of
    Σ_w idf(w). The other words may be misspelled, and then letters should count more (`Text`).

    With `prefix`, only the first `prefix` letters of a word count. So "classify" matches
    "classifier".

    >>> encoder = Lexical().fit(["the cat sat", "the dog ran", "the cow lay"])
    >>> query, key = encoder.encode_pair(["the dog"], ["the dog ran", "the cat sat"])
    >>> right, wrong = key @ query[0]
    >>> bool(right > 5 * wrong)
    True
    """

    k1: float = 1.2
    b: float = 0.75
    doubt: float = 0.0
    mean: float = 1.0
    usual: float = 0.0
    rows: int = 0
    prefix: int | None = None
    codes: np.ndarray | None = field(default=None, compare=False, repr=False)
    counts: np.ndarray | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = "lexical"
    aliases: ClassVar[tuple[str, ...]] = ("bm25", "tfidf", "tf_idf", "keywords")
    reads_only_text: ClassVar[bool] = True
    int8_safe = True
    encodes_in_parallel = True

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or not 0 <= self.rows < 2**31:
            raise ArgumentError(
                f"Lexical: rows must be a whole number, at least 0, not {self.rows!r}"
            )
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise ArgumentError(
                f"Lexical: k1 must be 0 or more and b from 0 to 1, not {self.k1!r} and {self.b!r}"
            )
        if not 0 <= self.doubt < math.inf:
            raise ArgumentError(f"Lexical: doubt must be 0 or more, not {self.doubt!r}")
        if self.prefix is not None and (not isinstance(self.prefix, int) or self.prefix < 1):
            raise ArgumentError(
                f"Lexical: prefix must be a number of letters, at least 1, or None, not "
                f"{self.prefix!r}"
            )

    def fit(self, keys: Sequence[Any]) -> Lexical:
        keys = to_texts(keys)
        counted = threads.map_parallel(
            self._count_words, [block for _, block in split_blocks(keys)] or [[]]
        )
        total = sum(int(f.sum()) for _, _, f in counted)
        codes, counts = np.unique(
            np.concatenate([code for _, code, _ in counted]), return_counts=True
        )
        m = max(len(keys), 1)
        total_information = float(counts @ np.log1p((m - counts + 0.5) / (counts + 0.5)))
        return replace(
            self,
            mean=max(total / m, 1.0),
            usual=total_information / m,
            rows=m,
            codes=codes,
            counts=counts.astype(np.int32),
        )

    def _count_words(self, block: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return count_words(block, self.prefix)

    @property
    def width(self) -> int:
        """The number 0: all vectors are sparse."""
        return 0

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        return np.zeros((len(to_texts(keys)), 0), np.float32)

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged:
        parts = [
            build_sparse(*self._weigh_words(block, query), len(block))
            for _, block in split_blocks(to_texts(keys))
        ]
        return concat_ragged(parts) if parts else build_sparse(*self._weigh_words([], query), 0)

    def _weigh_words(
        self, block: list[str], query: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the row, hash and value, each (w,), of every word of the texts.

        `query` says that the texts are queries.
        """
        row, code, f = self._count_words(block)
        if self.codes is None:
            return row[:0], code[:0], np.empty(0)
        if not query:
            long = np.bincount(row, f, len(block))[row] / self.mean
            return row, code, f * (self.k1 + 1) / (f + self.k1 * (1 - self.b + self.b * long))
        is_known, idf, total_idf, share = self._word_statistics(row, code, f, len(block))
        weight = f * idf / (total_idf + self.usual + 1e-30)[row]
        weight[is_known] *= share[row[is_known]] ** self.doubt
        return row, code, weight

    def known_share(self, queries: Sequence[Any]) -> np.ndarray:
        """Return r (n,): for each query, the share of its idf in words that some key has."""
        return self.describe_queries(queries)[:, 0]

    def find_known_words(self, queries: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the query (e,) and the position (e,) of each distinct word.

        Queries with a word that no key has are left out.
        """
        row, code, _ = self._count_words(to_texts(queries))
        is_unknown = np.bincount(row[self._key_counts(code) == 0], minlength=len(queries)) > 0
        kept = ~is_unknown[row]
        return row[kept], code[kept]

    def describe_queries(self, queries: Sequence[Any]) -> np.ndarray:
        """Return (n, 3): for each query r, its idf Σ_w idf(w), and its number of words.

        r is the share of the idf in words that some key has.
        """
        parts = []
        for _, block in split_blocks(to_texts(queries)):
            row, code, f = self._count_words(block)
            _, _, total_idf, share = self._word_statistics(row, code, f, len(block))
            parts.append(np.stack([share, total_idf, np.bincount(row, f, len(block))], axis=1))
        return np.concatenate(parts) if parts else np.zeros((0, 3))

    def _word_statistics(
        self, row: np.ndarray, code: np.ndarray, f: np.ndarray, rows: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return four arrays: for each word whether a key has it, and its idf.

        For each row Σ idf, and r.

        The words are in `row` with the hash `code` and the count `f`.
        """
        count = self._key_counts(code)
        is_known, idf = count > 0, np.log1p((self.rows - count + 0.5) / (count + 0.5))
        total_idf, known_idf = (np.bincount(row, f * idf * x, rows) for x in (1, is_known))
        return is_known, idf, total_idf, known_idf / np.maximum(total_idf, 1e-30)

    def _key_counts(self, code: np.ndarray) -> np.ndarray:
        """Return, for each hash of a word, the number of keys that have the word, (w,)."""
        if self.codes is None or self.counts is None or not len(self.codes):
            return np.zeros(len(code), np.int32)
        indices = np.minimum(np.searchsorted(self.codes, code), len(self.codes) - 1)
        return np.where(self.codes[indices] == code, self.counts[indices], 0)


def count_words(
    block: list[str], prefix: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, 32-bit hash and count, each (w,), of every distinct word of each text.

    With `prefix`, words with the same first letters are one word.

    >>> row, _, count = count_words(["to be or not to be", "", "Be!"])
    >>> row.tolist(), sorted(count[row == 0].tolist())
    ([0, 0, 0, 0, 2], [1, 1, 2, 2])
    """
    letters, row = to_letters(block)
    inside = letters != SPACE_CODE
    first = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    if not len(first):
        return row[:0], letters[:0], np.empty(0, np.int64)
    word = np.cumsum(np.bincount(first, minlength=len(letters))) - 1
    offset = np.arange(len(letters)) - first[np.maximum(word, 0)]
    if prefix is not None:
        inside &= offset < prefix
    power = np.cumprod(np.full(int(offset[inside].max()) + 1, 16777619, np.uint32), dtype=np.uint32)
    terms = np.where(inside, (letters + np.uint32(1)) * power[np.where(inside, offset, 0)], 0)
    code = np.add.reduceat(terms.astype(np.uint32), first, dtype=np.uint32)
    both, count = np.unique(
        (row[first].astype(np.uint64) << np.uint64(32)) | mix_hash(code), return_counts=True
    )
    rows = (both >> np.uint64(32)).astype(np.int64)
    return rows, (both & np.uint64(0xFFFFFFFF)).astype(np.uint32), count
