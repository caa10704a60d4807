"""Text by its letters, its meaning and its words: its encoder unless the caller says how."""

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

NUMBER_FIELDS = ("half", "sharp", "rare", "flat", "exact")
"""The fields that are numbers."""

DEFAULT_DOUBT = 2.0
"""How much less words count beside others that no key has, which may be misspelled."""

PLACES_PER_TEXT = 2
"""Places of a whole text: where another shares one of them, that is not enough to decide."""

MIN_FIT_KEYS = 64
"""Keys from which it is fitted: fewer say little of which words are rare."""


@dataclass(frozen=True)
class Text(Heads):
    """s = √(c_q c_k) cos_letters + √((1−c_q)(1−c_k)) cos_meaning + `rare` lexical + `exact` [q=k].

    c = 1 / (1 + length/half) is the part of the letters: they tell names and titles apart, slips
    included, where a sentence is known by its words. At `half` letters both count the same. The
    words themselves count in so far as they are rare (`Lexical`), from 64 keys on. Then the
    temperature is fitted too, so that the heaviest weight is about the chance that its row is
    right: scores are stretched `sharp` e^(−`flat` r²) times as much as by the number of rows alone,
    where r is the share of the query that is in words of some key (`Lexical.known`). What has only
    letters to go by differs by less. And a query that is a key, to the letter, decides: it has two
    places of its own in the sparse vectors, by its digest.

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
            raise ArgumentError("Text has its own heads, weighed by length: use Heads for others")
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
        return self.add_exact_places(super().encode_sparse(keys, query), keys)

    def add_exact_places(self, found: Ragged | None, keys: Sequence[Any]) -> Ragged | None:
        """Sparse vectors of keys or queries, with the places of the whole texts after them."""
        if found is None or not self.exact:
            return found
        codes = [
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4 * PLACES_PER_TEXT).digest()
            for text in to_texts(keys)
        ]
        row = np.repeat(np.arange(len(codes)), PLACES_PER_TEXT)
        number = np.full(len(row), math.sqrt(self.exact / PLACES_PER_TEXT))
        return concat_rowwise(
            found, build_sparse(row, np.frombuffer(b"".join(codes), "<u4"), number, len(codes))
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
        cls, settings: EncoderSettings, arrays: EncoderArrays, given: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, given)
        told = {name: settings[name] for name in NUMBER_FIELDS}
        return cls(heads.heads, heads.weights, heads.names, **told)


MAX_CALIBRATION_KEYS, MAX_CALIBRATION_QUERIES = 2048, 512
"""Keys that are asked, and queries that are made of some of them, at most."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def calibrate_sharpness(encoder: Encoder, keys: list[str]) -> float:
    """The factor on the score that makes −ln α(query, its key) least, over queries made of keys.

    Each is a key of which words were dropped, to which words of others came, in which slips were
    made. The same keys give the same factor. It is not far below 1: of a short title a word or two
    tell nothing, but who asks for one types it whole.
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
    """−Σ share ln α(right key) of scores (n, m) that are measured from the right key's, times a
    factor."""
    z = s * np.float32(factor)
    top = z.max(axis=1, keepdims=True)
    return float(share @ (top[:, 0] + np.log(np.exp(z - top).sum(axis=1))))


def make_query(keys: list[str], at: int, rng: np.random.Generator) -> str:
    """A query that means one of the keys.

    >>> make_query(["the old man and the sea", "war and peace"], 0, np.random.default_rng(1))
    'swea man lod'
    """
    words = keys[at].split()
    kept = max(1, round(len(words) * rng.uniform(0.05, 0.35)))
    words = [words[i] for i in np.sort(rng.permutation(len(words))[:kept])]
    for _ in range(int(rng.integers(2 * len(words) + 1))):
        other = keys[int(rng.integers(len(keys)))].split()
        if other:
            strange = other[int(rng.integers(len(other)))]
            words.insert(int(rng.integers(len(words) + 1)), strange)
    text = list(" ".join(words))
    for _ in range(int(rng.integers(5))):
        make_typo(text, rng)
    return "".join(text)


def make_typo(text: list[str], rng: np.random.Generator) -> None:
    """One letter changed, added, left out, or exchanged with the next."""
    at, kind = int(rng.integers(len(text) + 1)), int(rng.integers(4))
    if kind == 0:
        text.insert(at, ALPHABET[int(rng.integers(26))])
    elif kind == 1:
        text[at : at + 1] = ALPHABET[int(rng.integers(26))]
    elif kind == 2:
        text[at : at + 1] = []
    else:
        text[at : at + 2] = text[at : at + 2][::-1]


def minimize_log_scale(loss: Callable[[float], float], low: float, high: float) -> float:
    """The factor between e^low and e^high of the least loss, which is convex in it.

    >>> f"{minimize_log_scale(lambda x: (x - 2) ** 2, -3, 3):.2f}"
    '2.00'
    """
    # The smallest of three narrows it down.
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
