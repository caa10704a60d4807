"""Lexical against BM25 as it is written."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.database.encoders import Columns, Lexical, load
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


def bm25(
    queries: list[str], keys: list[str], k1: float, b: float, doubt: float = 0.0
) -> np.ndarray:
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
        information = sum(map(idf, words))
        share = sum(idf(word) for word in words if word in known) / (information or 1)
        out[i] *= share**doubt / (information + usual)
    return out


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (2.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("doubt", [0.0, 2.0])
def test_it_is_bm25(k1: float, b: float, doubt: float) -> None:
    encoder = Lexical(k1, b, doubt).fit(KEYS)
    query, key = encoder.encode_pair(QUERIES, KEYS)
    np.testing.assert_allclose(query @ key.T, bm25(QUERIES, KEYS, k1, b, doubt), atol=1e-5)


@pytest.mark.parametrize("doubt", [0.0, 2.0])
def test_words_that_came_after_the_fit_are_as_rare_as_can_be(doubt: float) -> None:
    encoder = Lexical(doubt=doubt).fit(KEYS)
    query, key = encoder.encode_pair(["cow zork", "zork"], ["zork", "a cow", "the cat"])
    idf = {"zork": math.log(1 + 6.5 / 0.5), "cow": math.log(1 + 5.5 / 1.5)}
    information = np.array([sum(idf.values()), idf["zork"]]) + encoder.usual
    r = idf["cow"] / sum(idf.values())
    part = [2.2 / (1 + 1.2 * (0.25 + 0.75 * n / encoder.mean)) for n in (1, 2)]
    expected = [
        [idf["zork"] * part[0], r**doubt * idf["cow"] * part[1], 0],
        [idf["zork"] * part[0], 0, 0],
    ]
    np.testing.assert_allclose(query @ key.T, expected / information[:, None], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("prefix", [1, 3, 5, 100])
def test_prefix_counts_only_the_first_letters_of_words(prefix: int) -> None:
    keys = [*KEYS, "banding systems", "sat on a sailing boat"]
    short = [" ".join(word[:prefix] for word in key.split()) for key in keys]
    queries = ["the cats", "bands of systematic sailors", "matric banded banding"]
    short_queries = [" ".join(word[:prefix] for word in query.split()) for query in queries]
    encoder = Lexical(prefix=prefix).fit(keys)
    query, key = encoder.encode_pair(queries, keys)
    np.testing.assert_allclose(query @ key.T, bm25(short_queries, short, 1.2, 0.75), atol=1e-5)
    assert load(encoder.settings(), encoder.arrays()) == encoder


def test_describe_queries_returns_share_idf_and_count() -> None:
    found = Lexical().fit(KEYS).describe_queries(["cow zork cow", ""])
    idf = {"zork": math.log(1 + 6.5 / 0.5), "cow": math.log(1 + 5.5 / 1.5)}
    total = 2 * idf["cow"] + idf["zork"]
    np.testing.assert_allclose(found, [[2 * idf["cow"] / total, total, 3], [0, 0, 0]], rtol=1e-6)


def random_texts() -> list[str]:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(400)]
    return [" ".join(rng.choice(words, 8)) for _ in range(300)]


def test_sparse_vectors_are_exact_whatever_there_is() -> None:
    keys = random_texts()
    query, key = Lexical().fit(keys).encode_pair(keys[:50], keys)
    expected = bm25(keys[:50], keys, 1.2, 0.75)
    np.testing.assert_allclose(query @ key.T, expected, rtol=1e-5, atol=1e-7)


def test_columns_keep_their_words_apart() -> None:
    keys = [("red", "blue"), ("blue", "red"), ("green", "green")]
    both = Columns({"one": Lexical(), "two": Lexical()}).fit(keys)
    query, key = both.encode_pair([("red", None), (None, "red"), {"two": "green"}], keys)
    result = query @ key.T
    assert result.argmax(axis=1).tolist() == [0, 1, 2]
    assert (np.count_nonzero(result, axis=1) == 1).all()
    alone = Lexical().fit(["red", "blue", "green"])
    own, ours = alone.encode_pair(["red"], ["red"])
    # One column is asked as sharply as if there were no other.
    np.testing.assert_allclose(result[0, 0], (own @ ours.T)[0, 0], rtol=1e-5)


def test_before_it_is_fitted_it_knows_no_word() -> None:
    query, key = Lexical().encode_pair(["the cat"], ["the cat"])
    assert not (query @ key.T).any()
    query, key = Lexical().fit(["", "!"]).encode_pair(["the cat"], ["the cat", "", "a cat"])
    (result,) = query @ key.T
    assert result[0] > result[2] > result[1] == 0


def house_texts() -> list[str]:
    adjectives, streets = ("red", "old", "tall"), ("oak", "elm")
    return [
        f"the {adjectives[i % 3]} house number {i} on {streets[i % 2]} street" for i in range(70)
    ]


LATER = ["single 3", "single 4", "a lone pine"]


def test_rows_that_came_later_are_found_by_new_words() -> None:
    D = qkv.Database(house_texts(), list(range(70)), encoder="lexical")
    D.add(LATER, [100, 101, 102])
    assert D.encoder.rows == 70
    for query, key in (("single 3", "single 3"), ("the pine", LATER[2]), ("lone pine", LATER[2])):
        first = D.ask(query).rows[0]
        assert first.key == key and first.weight > 0.6, (query, first)


@pytest.mark.parametrize(
    "bad", [{"k1": -1}, {"b": 2}, {"doubt": -1}, {"rows": None}, {"rows": 2**62}, {"prefix": 0}]
)
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Lexical(**bad)
