"""The default encoder of text: it combines letters, meaning and rare words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    check_batch,
    sharpness_for_rows,
    to_texts,
)
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.heads import Heads
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.words import Words
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import Ragged, build_sparse, concat_rowwise
from qkv.scores import ScaledDot, Score
from qkv.util.keyword_hints import suggest_keywords

NUMBER_FIELDS = ("half", "sharp", "rare", "flat", "exact")
"""The fields that are numbers, which the settings contain."""

DEFAULT_DOUBT = 2.0
"""`Lexical.doubt`: known words count less if other words of the query may be misspelled."""

PLACES_PER_TEXT = 2
"""The number of sparse positions of a complete text. One collision is not enough for a match."""

MIN_FIT_KEYS = 64
"""With fewer keys, `fit` learns nothing: they do not show which words are rare."""


@suggest_keywords
@dataclass(frozen=True)
class Text(Heads):
    """s = √(c_q c_k) cos_letters + √((1−c_q)(1−c_k)) cos_meaning + `rare` lexical + `exact` [q=k].

    c = 1 / (1 + length/half) is the share of the letters. Letters matter most for names and titles,
    also if there are typos. The meaning matters most for sentences. In a text of `half` letters,
    both count the same.

    From 64 keys on, rare words count too (`Lexical`). `fit` then also fits the temperature, so that
    the largest weight is about the probability that its row is right. Scores are multiplied by
    `sharp` e^(−`flat` r²). Here r is the share of the query in words that some key has
    (`Lexical.known_share`).

    A query that equals a key matches it exactly: the digest of a text has two positions in the
    sparse vectors.

    >>> keys = ["The Alchemist", "A shepherd travels to Egypt in search of a treasure"]
    >>> encoder = Text()
    >>> asked = ["the alchmist", "a young man looks for hidden gold"]
    >>> query, key = encoder.encode_pair(asked, keys)
    >>> (query @ key.T).argmax(axis=1).tolist()
    [0, 1]
    """

    heads: Any = ()
    half: float = 40.0
    sharp: float = 1.0
    rare: float = 2.0
    flat: float = 0.6
    exact: float = 1.0
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.heads:
            lexical = Lexical(doubt=DEFAULT_DOUBT)
            heads = {"characters": Characters(), "words": Words(), "lexical": lexical}
            object.__setattr__(self, "heads", heads)
        super().__post_init__()
        count = len(self.heads)
        if count != 3 or self.weights != (1 / count,) * count:
            raise ArgumentError(
                "Text has fixed heads, weighted by the length of the text: use Heads for others"
            )
        if not self.half > 0:
            raise ArgumentError(f"Text: half must be above 0, not {self.half!r}")
        if not self.sharp > 0:
            raise ArgumentError(f"Text: sharp must be above 0, not {self.sharp!r}")
        for name in ("rare", "flat", "exact"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"Text: {name} must be 0 or more, not {getattr(self, name)!r}")

    @property
    def min_fit_keys(self) -> int:
        return MIN_FIT_KEYS

    def fit(self, keys: Sequence[Any]) -> Text:
        if len(check_batch(keys)) < MIN_FIT_KEYS:
            return self
        made = replace(self, heads=tuple(head.fit(keys) for head in self.heads), sharp=1.0)
        return replace(made, sharp=calibrate_sharpness(made, to_texts(keys)))

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        return self.add_full_text_positions(super().encode_sparse(keys, query), keys)

    def add_full_text_positions(self, vectors: Ragged | None, keys: Sequence[Any]) -> Ragged | None:
        """Add to sparse vectors the positions that stand for the complete texts."""
        if vectors is None or not self.exact:
            return vectors
        codes = [
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4 * PLACES_PER_TEXT).digest()
            for text in to_texts(keys)
        ]
        row = np.repeat(np.arange(len(codes)), PLACES_PER_TEXT)
        number = np.full(len(row), math.sqrt(self.exact / PLACES_PER_TEXT))
        return concat_rowwise(
            vectors, build_sparse(row, np.frombuffer(b"".join(codes), "<u4"), number, len(codes))
        )

    def _head_factors(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        stretch = super()._head_factors(keys, query)
        if not query or not self.flat:
            return stretch
        flatter = np.exp(-self.flat * self.heads[2].known_share(keys) ** 2)
        return np.asarray(stretch * flatter[:, None], np.float32)

    def default_score(self, rows: int) -> Score:
        return ScaledDot(self.sharp * sharpness_for_rows(rows))

    def head_shares(self, keys: Sequence[Any]) -> np.ndarray:
        length = np.array([len(text) for text in to_texts(keys)], np.float64)
        letters = 1 / (1 + length / self.half)
        return np.stack([letters, 1 - letters, np.full(len(length), self.rare)], axis=1)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {name: getattr(self, name) for name in NUMBER_FIELDS}

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, user_encoder)
        numbers = {name: settings[name] for name in NUMBER_FIELDS}
        return cls(heads.heads, heads.weights, heads.names, **numbers)


MAX_CALIBRATION_KEYS, MAX_CALIBRATION_QUERIES = 2048, 512
"""The numbers of keys and of synthetic queries that the calibration uses."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def calibrate_sharpness(encoder: Encoder, keys: list[str]) -> float:
    """Return the factor on the score that minimizes the mean of −ln α(query, its key).

    The queries are synthetic: keys without some of their words, with words of other keys, and with
    typos. The same keys give the same factor. The factor is at least slightly below 1, because
    these queries are vague: users type a short title completely.
    """
    keys = list(dict.fromkeys(keys))
    rng = np.random.default_rng(0)
    keys = [keys[i] for i in np.sort(rng.permutation(len(keys))[:MAX_CALIBRATION_KEYS])]
    right = rng.permutation(len(keys))[:MAX_CALIBRATION_QUERIES]
    query, key = encoder.encode_pair([make_query(keys, i, rng) for i in right.tolist()], keys)
    s = np.asarray(encoder.default_score(len(keys))(query, key), np.float32)
    s -= s[np.arange(len(s)), right][:, None]
    return minimize_log_scale(partial(mean_log_loss, s, np.full(len(s), 1 / len(s))), -0.1, 1.0)


def mean_log_loss(s: np.ndarray, share: np.ndarray, factor: float) -> float:
    """Return −Σ share ln α(right key). Scores (n, m) are differences to that of the right key."""
    z = s * np.float32(factor)
    top = z.max(axis=1, keepdims=True)
    return float(share @ (top[:, 0] + np.log(np.exp(z - top).sum(axis=1))))


def make_query(keys: list[str], index: int, rng: np.random.Generator) -> str:
    """Return a synthetic query for the key with index `at`.

    >>> make_query(["the old man and the sea", "war and peace"], 0, np.random.default_rng(1))
    'swea man lod'
    """
    words = keys[index].split()
    kept_count = max(1, round(len(words) * rng.uniform(0.05, 0.35)))
    words = [words[i] for i in np.sort(rng.permutation(len(words))[:kept_count])]
    for _ in range(int(rng.integers(2 * len(words) + 1))):
        other = keys[int(rng.integers(len(keys)))].split()
        if other:
            inserted = other[int(rng.integers(len(other)))]
            words.insert(int(rng.integers(len(words) + 1)), inserted)
    text = list(" ".join(words))
    for _ in range(int(rng.integers(5))):
        make_typo(text, rng)
    return "".join(text)


def make_typo(text: list[str], rng: np.random.Generator) -> None:
    """Change the list of letters `text` in place.

    One letter is inserted, replaced, deleted, or swapped with the next one.
    """
    position, kind = int(rng.integers(len(text) + 1)), int(rng.integers(4))
    if kind == 0:
        text.insert(position, ALPHABET[int(rng.integers(26))])
    elif kind == 1:
        text[position : position + 1] = ALPHABET[int(rng.integers(26))]
    elif kind == 2:
        text[position : position + 1] = []
    else:
        text[position : position + 2] = text[position : position + 2][::-1]


def minimize_log_scale(loss: Callable[[float], float], low: float, high: float) -> float:
    """Return the factor in [e^low, e^high] that minimizes a convex loss.

    >>> f"{minimize_log_scale(lambda x: (x - 2) ** 2, -3, 3):.2f}"
    '2.00'
    """
    # This is a golden-section search.
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = loss(math.exp(a)), loss(math.exp(b))
    for _ in range(14):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = loss(math.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = loss(math.exp(b))
    return math.exp(a if at_a < at_b else b)
