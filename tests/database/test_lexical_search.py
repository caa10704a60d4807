"""Exact words at every entry point: sparse vectors in ask, attend, filters, stores and learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.database.encoders import Characters, Encoder, Heads, Lexical
from qkv.database.table.encoding import add_word_columns, encode_as_stored
from qkv.scores import Cosine, Gaussian, ScaledDot
from qkv.weightings import Entmax, TopK

RNG = np.random.default_rng(0)
WORDS = [f"w{i}" for i in range(80)]
KEYS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 9))) for _ in range(120)]
VALUES = RNG.normal(size=(120, 2))
QUERIES = ["w3 w7 w9", "w1", "nobody has this", "w5 w5 unheard w70 w11"]


def encoder() -> Heads:
    return Heads([Lexical(), Characters(32)])


@pytest.fixture(scope="module", params=["memory", "disk", "grown"])
def D(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[qkv.Database]:
    if request.param == "memory":
        yield qkv.Database(KEYS, VALUES, encoder=encoder())
        return
    with qkv.open(tmp_path_factory.mktemp("words") / "d.qkv", encoder=encoder()) as D:
        D.add(KEYS, VALUES)
        if request.param == "grown":  # of rows that came and went, some in segments
            D.add(["w1 w2 w3"] * 5000, np.ones((5000, 2)))
            D.remove(["w1 w2 w3"])
        yield D


def encode_queries_and_keys(encoder: Encoder, queries: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys as they are kept, with a column for every word there is."""
    query, key = add_word_columns(
        encoder, queries, encode_as_stored(encoder, KEYS), encoder.encode_sparse(KEYS)
    )
    assert not key[:, -1].any()
    return query.astype(float), key.astype(float)


def expected_weights(D: qkv.Database, score: object, weighting: object = "softmax") -> np.ndarray:
    """α in the space of all words, literally."""
    assert D.encoder is not None
    query, key = encode_queries_and_keys(D.encoder, QUERIES)
    return np.asarray(qkv.weights(query, key, score=score, weighting=weighting))


@pytest.mark.parametrize("score", [None, Cosine(0.2), Gaussian(0.7), "dot"])
@pytest.mark.parametrize("weighting", ["softmax", TopK(3), Entmax(1.5), "hard"])
def test_every_score_and_weighting_is_exact(D: qkv.Database, score, weighting) -> None:
    chosen = D.encoder.default_score(len(KEYS)) if score is None else score
    alpha = expected_weights(D, chosen, weighting)
    answers = D.ask(QUERIES, score=score, weighting=weighting)
    for answer, row in zip(answers, alpha, strict=True):
        np.testing.assert_allclose(answer.weights, row, atol=2e-5)
    out = D.attend(QUERIES, score=score, weighting=weighting)
    np.testing.assert_allclose(out, alpha @ VALUES, atol=1e-4)


def test_conditions_and_versions_keep_their_words(tmp_path: Path) -> None:
    D = qkv.Database.from_columns(
        {"key": KEYS, "value": VALUES[:, 0].tolist(), "n": list(range(120))},
        key="key",
        value="value",
        encoder=encoder(),
        path=tmp_path / "d.qkv",
    )
    alpha = expected_weights(D, ScaledDot(3.0))
    for where in ("n < 10", "n < 100"):
        live = np.arange(120) < int(where.split()[-1])
        normalized = alpha * live / (alpha * live).sum(axis=1, keepdims=True)
        for answer, row in zip(
            D.ask(QUERIES, score=ScaledDot(3.0), where=where), normalized, strict=True
        ):
            np.testing.assert_allclose(answer.weights, row, atol=1e-5)
        out = D.attend(QUERIES, score=ScaledDot(3.0), where=where)
        np.testing.assert_allclose(out[:, 0], normalized @ VALUES[:, 0], atol=1e-5)
    version = D.version
    D.remove(KEYS[:60])
    past = D.at(version).ask(QUERIES[0], score=ScaledDot(3.0))
    np.testing.assert_allclose(past.weights, alpha[0], atol=1e-5)
    D.compact()
    assert np.allclose(D.ask("w1", score="dot").weights.sum(), 1)


def test_a_vector_of_the_callers_own_asks_no_words(D: qkv.Database) -> None:
    own = RNG.normal(size=(2, 32)).astype(np.float32)
    key = encode_as_stored(D.encoder, KEYS)
    alpha = qkv.weights(own, key, score="dot")
    np.testing.assert_allclose(D.attend(own, score="dot"), alpha @ VALUES, rtol=1e-4)
    np.testing.assert_allclose(D.ask(own, score="dot")[1].weights, alpha[1], rtol=1e-4)


def test_lexical_alone_needs_no_vectors() -> None:
    D = qkv.Database(KEYS, VALUES, encoder="lexical")
    query, key = D.encoder.encode_pair(QUERIES, KEYS)
    alpha = qkv.weights(query, key, score=D.encoder.default_score(120))
    np.testing.assert_allclose(D.attend(QUERIES), alpha @ VALUES, rtol=1e-4, atol=1e-6)
    assert D.encoder.width == 0


def test_an_answer_can_be_asked_again_elsewhere(D: qkv.Database) -> None:
    answer = D.ask(QUERIES[0])
    source = answer._collect_source(1000)
    assert source is not None and source.keys is not None
    alpha = qkv.weights(source.query[None], source.keys, score=source.score)
    np.testing.assert_allclose(alpha[0], answer.weights, atol=1e-6)


def test_many_queries_are_asked_some_at_a_time(D: qkv.Database) -> None:
    many = [QUERIES[i % 4] for i in range(150)]
    few, all_ = D.attend(QUERIES), D.attend(many)
    np.testing.assert_allclose(all_, few[np.arange(150) % 4], rtol=1e-5, atol=1e-6)
    assert [answer.rows[0].key for answer in D.ask(many)[:4]] == [
        answer.rows[0].key for answer in D.ask(QUERIES)
    ]
