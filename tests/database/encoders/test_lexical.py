"""Lexical against BM25 as it is written."""

import math
from collections import Counter

import numpy as np
import pytest

from qkv.database.encoders import Columns, Lexical
from qkv.errors import ArgumentError

KEYS = [
    "the cat sat on the mat",
    "the dog ran after the cat",
    "a cow",
    "the the the",
    "solve a linear system of equations with a banded matrix",
    "",
]
QUERIES = ["the cat", "banded matrix unheard", "Cow!", "", "the the cat"]


def bm25(queries: list[str], keys: list[str], k1: float, b: float) -> np.ndarray:
    """Over what the query and a usual key tell."""
    bags = [Counter(key.split()) for key in keys]
    mean = sum(map(Counter.total, bags)) / len(keys)

    def idf(word: str) -> float:
        df = sum(word in bag for bag in bags)
        return math.log(1 + (len(keys) - df + 0.5) / (df + 0.5))

    usual = sum(idf(word) for bag in bags for word in bag) / len(keys)
    known = set().union(*bags)
    out = np.zeros((len(queries), len(keys)))
    for i, query in enumerate(queries):
        words = query.lower().strip("!").split()
        for j, bag in enumerate(bags):
            for word in set(words) & set(bag):
                f = words.count(word)
                long = 1 - b + b * bag.total() / mean
                out[i, j] += f * idf(word) * bag[word] * (k1 + 1) / (bag[word] + k1 * long)
        told = sum(map(idf, words))
        share = sum(idf(word) for word in words if word in known) / (told or 1)
        out[i] *= share**2 / (told + usual)
    return out


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (2.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("width", [0, 1 << 16])
def test_it_is_bm25_where_no_words_share_a_place(k1: float, b: float, width: int) -> None:
    encoder = Lexical(width, k1, b).fit(KEYS)
    query, key = encoder.pair(QUERIES, KEYS)
    np.testing.assert_allclose(query @ key.T, bm25(QUERIES, KEYS, k1, b), atol=1e-5)


def many() -> list[str]:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(400)]
    return [" ".join(rng.choice(words, 8)) for _ in range(300)]


def test_sparse_vectors_are_exact_whatever_there_is() -> None:
    keys = many()
    query, key = Lexical().fit(keys).pair(keys[:50], keys)
    expected = bm25(keys[:50], keys, 1.2, 0.75)
    np.testing.assert_allclose(query @ key.T, expected, rtol=1e-5, atol=1e-7)


def test_a_narrow_one_is_off_by_little_and_never_always_to_one_side() -> None:
    keys = many()
    encoder = Lexical(256).fit(keys)
    query, key = encoder.query(keys[:50]), encoder.encode(keys)
    off = query @ key.T - bm25(keys[:50], keys, 1.2, 0.75)
    most = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(key, axis=1) / 16
    assert abs(off.mean()) < 0.01 and 0.5 < np.sqrt((off**2).mean() / (most**2).mean()) < 1.5


def test_columns_keep_their_words_apart() -> None:
    keys = [("red", "blue"), ("blue", "red"), ("green", "green")]
    both = Columns({"one": Lexical(), "two": Lexical()}).fit(keys)
    query, key = both.pair([("red", None), (None, "red"), {"two": "green"}], keys)
    found = query @ key.T
    assert found.argmax(axis=1).tolist() == [0, 1, 2]
    assert (np.count_nonzero(found, axis=1) == 1).all()
    alone = Lexical().fit(["red", "blue", "green"])
    own, ours = alone.pair(["red"], ["red"])
    # One column is asked as sharply as if there were no other.
    np.testing.assert_allclose(found[0, 0], (own @ ours.T)[0, 0], rtol=1e-5)


def test_before_it_is_fitted_it_knows_no_word() -> None:
    for made in (Lexical(), Lexical().fit(["", "!"])):
        query, key = made.pair(["the cat"], ["the cat"])
        assert not (query @ key.T).any()
    assert not Lexical(64).encode(["the cat"]).any()
    assert not Lexical(64).fit(["", "!"]).query(["the cat"]).any()


@pytest.mark.parametrize("bad", [{"width": 4}, {"k1": -1}, {"b": 2}])
def test_bad_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Lexical(**bad)  # type: ignore[arg-type]
