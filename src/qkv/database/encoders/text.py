"""The default encoder of text: it combines letters, meaning and words."""

from __future__ import annotations

import math
import re
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
from qkv.database.encoders.heads import Heads, salt_positions
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.words import Words
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import (
    EncodedQuery,
    Ragged,
    build_sparse,
    concat_rowwise,
    group_words,
)
from qkv.scores import ScaledDot, Score
from qkv.util.keyword_hints import suggest_keywords

NUMBER_FIELDS = ("half", "sharp", "rare", "flat", "exact")
"""The fields that are numbers, which the settings contain."""

MIX_FIELDS = ("half", "rare", "flat")
"""The fields that only the score without `mix` has."""

MIX_LEXICAL_B = 0.4
"""`Lexical.b` of the heads of words and of beginnings of words."""

DEFAULT_DOUBT = 2.0
"""`Lexical.doubt`: known words count less if other words of the query may be misspelled."""

PLACES_PER_TEXT = 2
"""The number of sparse positions of a complete text. One collision is not enough for a match."""

MIN_FIT_KEYS = 64
"""With fewer keys, `fit` learns nothing: they do not show which words are rare."""


MIX_COEFFICIENTS = np.array(
    [
        [2.097, -1.386, -0.317, 0.180, -0.359, -0.248, -0.093, -0.381],
        [1.739, -0.741, 0.446, -0.337, -0.027, -0.476, -0.383, 0.221],
        [2.895, 0.692, 0.202, -0.856, -1.249, 0.356, 0.322, -0.319],
        [2.662, 0.326, 0.131, 0.072, 0.222, -0.140, 0.306, 0.076],
    ]
)
"""The logarithm of a head's weight is a row of this matrix times the numbers of the query.

The heads are letters, meaning, words and beginnings of words. The coefficients are fitted to the
tasks of `bench.retrieval`, with another seed than the one that it measures.
"""
MIX_LENGTH_EXPONENTS = np.array([-0.047, -0.108, -0.123, 0.397])
"""The vector of head h of a key of c letters is multiplied by ((c + 1) / `USUAL_LETTERS`)^this."""

USUAL_LETTERS = math.exp(4)
"""The length of a key whose vectors `MIX_LENGTH_EXPONENTS` does not change."""
MIX_SHARPNESS = 25.0
"""All weights are divided by this. The fit had 20, but vague queries should spread the weight."""

ALL_WORDS_BONUS, ALL_WORDS_SHARE_FACTOR, MIN_GROUP_WORDS = 0.2, 4.0, 3
"""A row with every word of a query gets 0.2 (1 + 4 s) more: s is their share of its entries.

An entry is a word or a beginning of a word, so s is at most about 1/2. The bonus comes before τ(m).
Only queries of at least three words, all of which keys have, give it: rows with one or two words
are often wrong, and would be too sure. The numbers are chosen on the tasks of `bench.retrieval`
with the seeds 0 and 1.
"""

LETTERS_OF_PREFIX = 5
MAX_SAMPLED_KEYS, MAX_PREFIX_KEYS = 1 << 12, 1 << 14
"""So many keys show how frequent letters and tokens, and beginnings of words, are."""

TEXTS_PER_SEARCH = 64
"""The number of texts in which one search looks for words with capitals inside."""

_INNER_CAPITAL = re.compile(r"[a-z0-9][A-Z]")
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where an identifier has a capital inside, as in readCsv."""


def split_identifiers(texts: Sequence[Any]) -> list[Any]:
    """Return the texts, each followed by the parts of its words that have capitals inside.

    >>> split_identifiers(["use readCsv", "a plain text"])
    ['use readCsv read Csv', 'a plain text']
    """
    out = list(texts)
    for start in range(0, len(out), TEXTS_PER_SEARCH):
        block = out[start : start + TEXTS_PER_SEARCH]
        if _INNER_CAPITAL.search("\n".join(x for x in block if isinstance(x, str))):
            out[start : start + TEXTS_PER_SEARCH] = map(_split_identifiers, block)
    return out


def _split_identifiers(text: Any) -> Any:
    if not isinstance(text, str) or not _INNER_CAPITAL.search(text):
        return text
    words = [word for word in text.split() if _INNER_CAPITAL.search(word)]
    return " ".join([text, *(WORD_BORDER.sub(" ", word) for word in words)])


@suggest_keywords
@dataclass(frozen=True)
class Text(Heads):
    """s = Σ_h w_h(q) g_h(k) s_h(q, k) + `exact` [q=k]: letters, meaning, words, parts of words.

    The heads compare n-grams of letters (`Characters` with idf), vectors of words (`Words` with
    idf), words (`Lexical`, which is BM25) and the first five letters of words (`Lexical` with
    `prefix`). A word with capitals inside also counts as its parts.

    The weights w_h depend on the query: on its length, beside that of a usual key; on the share of
    its words that some key has; and on how rare they are. A query whose words are all known relies
    on words, and one with an unknown word on letters, because it may be misspelled. g_h depends on
    the length of the key.

    With fewer than 64 keys, and with `mix=False`, the score is
    √(c_q c_k) cos_letters + √((1−c_q)(1−c_k)) cos_meaning + `rare` lexical + `exact` [q=k], where
    c = 1 / (1 + length/half) is the share of the letters. Below 64 keys, lexical is 0. From 64 keys
    on, `fit` then also fits the temperature `sharp`, and scores are multiplied by e^(−`flat` r²).
    Here r is the share of the query in words that some key has (`Lexical.known_share`). `mix=None`
    means False if `half`, `rare`, `flat` or the heads are not the default ones, else True.

    A row that has every word of the query gets a bonus, which is larger for a shorter row: see
    `ALL_WORDS_BONUS`. A query that equals a key matches it exactly: the digest of a text has two
    positions in the sparse vectors.

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
    mix: bool | None = None
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.heads:
            lexical = Lexical(doubt=DEFAULT_DOUBT)
            heads = {"characters": Characters(), "words": Words(), "lexical": lexical}
            object.__setattr__(self, "heads", heads)
            if self.mix is None:
                defaults = [Text.__dataclass_fields__[name].default for name in MIX_FIELDS]
                is_default = [getattr(self, name) for name in MIX_FIELDS] == defaults
                object.__setattr__(self, "mix", is_default)
        object.__setattr__(self, "mix", bool(self.mix))
        super().__post_init__()
        count = len(self.heads)
        if count not in (3, 4) or self.weights != (1 / count,) * count:
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

    @property
    def is_mixed(self) -> bool:
        """Whether the weights of the heads depend on the query: `mix`, after `fit`."""
        return bool(self.mix) and len(self.heads) == 4

    def fit(self, keys: Sequence[Any]) -> Text:
        if len(check_batch(keys)) < MIN_FIT_KEYS:
            return self
        texts = to_texts(keys)
        if self.mix:
            return self._fit_mixed(texts)
        made = replace(self, heads=tuple(head.fit(texts) for head in self.heads), sharp=1.0)
        return replace(made, sharp=calibrate_sharpness(made, texts))

    def _fit_mixed(self, texts: list[str]) -> Text:
        """Return the encoder with its four heads fitted to the keys."""
        letters, meaning, words = self.heads[:3]
        sample = texts[:: -(-len(texts) // MAX_SAMPLED_KEYS)]
        split = split_identifiers(texts)
        prefix_sample = split[:: -(-len(texts) // MAX_PREFIX_KEYS)]
        heads = {
            "characters": _flatten_idf(replace(letters, idf=True).fit(sample)),
            "words": replace(meaning, idf=True).fit(split_identifiers(sample)),
            "lexical": replace(words, b=MIX_LEXICAL_B, doubt=0.0).fit(split),
            "beginnings": Lexical(b=MIX_LEXICAL_B, prefix=LETTERS_OF_PREFIX).fit(prefix_sample),
        }
        return replace(self, heads=heads, weights=None, names=())

    def _split_keys(self, keys: Sequence[Any], query: bool) -> list[Sequence[Any]]:
        if not self.is_mixed:
            return super()._split_keys(keys, query)
        split = split_identifiers(keys)
        return [keys, split, split, split]

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

    def add_group_columns(
        self, code: np.ndarray, positions: np.ndarray, queries: Sequence[Any]
    ) -> EncodedQuery:
        """Return the vectors of queries with a column for all words of each one, if keys have them.

        A row that has all of these words gets `ALL_WORDS_BONUS`, and a short row more.
        """
        row, words = np.zeros(0, int), np.zeros(0, np.uint32)
        if self.is_mixed:
            row, words = self.heads[2].find_known_words(split_identifiers(to_texts(queries)))
        is_long = np.bincount(row, minlength=len(code))[row] >= MIN_GROUP_WORDS
        row, words = row[is_long], words[is_long]
        if not len(row):
            return EncodedQuery(code, positions)
        value = math.sqrt(ALL_WORDS_BONUS)
        members = salt_positions(words, 2)
        groups = group_words(positions, row, members, value, ALL_WORDS_SHARE_FACTOR)
        query = row[np.flatnonzero(np.diff(row, prepend=-1))]
        columns = np.zeros((len(code), len(query)), code.dtype)
        columns[query, np.arange(len(query))] = value
        return EncodedQuery(np.concatenate([code[:, :-1], columns, code[:, -1:]], axis=1), groups)

    def _head_factors(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        if self.is_mixed:
            return self._mixed_factors(to_texts(keys), query)
        stretch = super()._head_factors(keys, query)
        if not query or not self.flat:
            return stretch
        flatter = np.exp(-self.flat * self.heads[2].known_share(keys) ** 2)
        return np.asarray(stretch * flatter[:, None], np.float32)

    def _mixed_factors(self, texts: list[str], query: bool) -> np.ndarray:
        """Return w_h(q) of queries, or g_h(k) of keys: (m, 4)."""
        if not query:
            exponents = _log_lengths(texts)[:, None] * MIX_LENGTH_EXPONENTS
            return np.asarray(np.exp(exponents), np.float32)
        log_weights = self.describe_queries(texts) @ MIX_COEFFICIENTS.T
        return np.asarray(np.exp(log_weights) / MIX_SHARPNESS, np.float32)

    def describe_queries(self, texts: list[str]) -> np.ndarray:
        """Return the numbers of each query on which the weights of the heads depend: (n, 8).

        They are 1; the share of the idf in words that some key has; the logarithm of the number of
        letters; the logarithm of the number of words relative to that of a usual key; that of the
        mean idf; whether a key has each word; and the fourth number times the last one and squared.
        """
        words = self.heads[2]
        share, total_idf, count = words.describe_queries(split_identifiers(texts)).T
        relative = np.clip(np.log((count + 1) / (words.mean + 1)), -2, 2)
        idf = np.log(total_idf / np.maximum(count, 1) / math.log1p(words.rows) + 0.1) + 0.5
        is_known = np.where(share > 0.999, 0.5, -0.5)
        described: np.ndarray = np.stack(
            [
                np.ones(len(texts)),
                share - 0.7,
                _log_lengths(texts),
                relative,
                idf,
                is_known,
                is_known * relative,
                relative**2,
            ],
            axis=1,
        )
        return described

    def default_score(self, rows: int) -> Score:
        return ScaledDot(self.sharp * sharpness_for_rows(rows))

    def head_shares(self, keys: Sequence[Any]) -> np.ndarray:
        length = np.array([len(text) for text in to_texts(keys)], np.float64)
        letters = 1 / (1 + length / self.half)
        return np.stack([letters, 1 - letters, np.full(len(length), self.rare)], axis=1)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {name: getattr(self, name) for name in (*NUMBER_FIELDS, "mix")}

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, user_encoder)
        numbers = {name: settings[name] for name in NUMBER_FIELDS}
        mix = bool(settings.get("mix", False))
        return cls(heads.heads, heads.weights, heads.names, **numbers, mix=mix)


def _flatten_idf(letters: Characters) -> Characters:
    """Return the encoder with the square root of its idf: names with typos need a flat one."""
    assert letters.table is not None
    return replace(letters, table=np.sqrt(letters.table))


def _log_lengths(texts: list[str]) -> np.ndarray:
    """Return the logarithm of the number of letters of each text, relative to a usual one: (m,)."""
    lengths = np.array([len(text) for text in texts], np.float64)
    return np.clip(np.log((lengths + 1) / USUAL_LETTERS), -3, 2.5)


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
