"""Databases whose keys are vectors: the default score finds the row of a key."""

from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv import Database, scores
from qkv.database.encoders import Arrays
from qkv.database.memory_rows import forget_rows
from tests.database.vector_kinds import VECTOR_KINDS, nearest_rows, perturb_keys

KIND = pytest.mark.parametrize("kind", VECTOR_KINDS)
SEED = pytest.mark.parametrize("seed", range(3))


def default_weights(database: Database, queries: np.ndarray) -> np.ndarray:
    return np.array([answer.weights for answer in database.ask(queries)])


@KIND
@SEED
def test_a_key_gets_most_of_the_weight_of_its_row(kind: str, seed: int) -> None:
    keys = VECTOR_KINDS[kind][0](np.random.default_rng(seed))
    weights = default_weights(Database(keys, np.arange(len(keys))), keys)
    is_first = weights.argmax(axis=1) == np.arange(len(keys))
    assert np.mean(is_first & (np.diagonal(weights) >= 0.5)) >= 0.95


@KIND
@SEED
def test_a_key_with_noise_finds_its_row_as_often_as_exact_neighbours(kind: str, seed: int) -> None:
    make, metric = VECTOR_KINDS[kind]
    rng = np.random.default_rng(seed)
    keys, at = make(rng), np.arange(0, 400, 2)
    queries = perturb_keys(keys, at, metric, rng)
    weights = default_weights(Database(keys, np.arange(len(keys))), queries)
    expected = np.mean(nearest_rows(keys, queries, metric) == at)
    assert np.mean(weights.argmax(axis=1) == at) >= expected


@KIND
def test_the_weights_are_those_of_the_described_score(kind: str) -> None:
    keys = VECTOR_KINDS[kind][0](np.random.default_rng(3), 700)
    database = Database(keys, np.arange(len(keys)))
    described = database.describe()["key"]
    assert described.pop("type") == "vector"
    assert described.pop("missing") == 0
    query, x = keys[:4] * 1.01, keys.astype(np.float32).astype(float)
    if described["score"] == "cosine":
        q, x = (y / np.linalg.norm(y, axis=1, keepdims=True) for y in (query, x))
        s = q @ x.T / described["temperature"]
    else:
        bandwidth = np.asarray(described["bandwidth"])
        s = -0.5 * (((query[:, None] - x) / bandwidth) ** 2).sum(axis=2)
    expected = np.exp(s - s.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(default_weights(database, query), expected, rtol=1e-4, atol=1e-7)
    if described["score"] == "gaussian":
        score = scores.Gaussian(bandwidth if bandwidth.ndim else float(bandwidth))
        answers = [database.ask(q, score=score).weights for q in query]
        np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-7)


@KIND
def test_equal_keys_share_the_weight(kind: str) -> None:
    keys = VECTOR_KINDS[kind][0](np.random.default_rng(4))[:100]
    keys = np.concatenate([keys, keys])
    weights = default_weights(Database(keys, np.arange(200)), keys)
    np.testing.assert_allclose(weights[:, :100], weights[:, 100:], rtol=1e-4, atol=1e-7)
    own = weights[np.arange(100), np.arange(100)]
    assert np.mean(own >= 0.25) >= 0.95


def test_an_attended_key_returns_the_value_of_its_row() -> None:
    keys = VECTOR_KINDS["unit embeddings"][0](np.random.default_rng(5))
    database = Database(keys, np.arange(400.0))
    for queries in (keys[:50], keys[:50].astype(np.float32)):
        expected = [answer.value for answer in database.ask(queries)]
        np.testing.assert_allclose(database.attend(queries)[:, 0], expected, rtol=1e-3)


@KIND
def test_a_stored_database_answers_the_same_when_it_is_opened_again(
    kind: str, tmp_path: Path
) -> None:
    keys = VECTOR_KINDS[kind][0](np.random.default_rng(6))
    with qkv.open(tmp_path / "v.qkv") as database:
        database.add(keys, np.arange(400.0))
        described, weights = database.describe(), default_weights(database, keys[:3])
    with qkv.open(tmp_path / "v.qkv") as database:
        assert database.describe() == described
        np.testing.assert_array_equal(default_weights(database, keys[:3]), weights)
    in_memory = Database(keys, np.arange(400.0))
    assert in_memory.describe() == described


def test_the_metric_is_estimated_again_when_the_rows_have_doubled() -> None:
    keys = VECTOR_KINDS["unit embeddings"][0](np.random.default_rng(9))
    database = Database(keys[:100], np.arange(100.0))
    first = database.encoder
    database.add(keys[100:199], np.arange(99.0))
    assert database.encoder == first
    version = database.version
    database.add(keys[199:200], [1.0])
    assert database.encoder == Arrays().fit(keys[:200]) != first
    assert database.version == version + 1
    assert database.at(version).encoder == first


def test_rows_added_one_at_a_time_find_their_metric() -> None:
    keys = VECTOR_KINDS["raw measurements"][0](np.random.default_rng(10))
    database = Database()
    for i in range(64):
        database.add(keys[i : i + 1], [float(i)])
    assert database.encoder == Arrays().fit(keys[:64])
    assert [answer.rows[0].index for answer in database.ask(keys[:5])] == [0, 1, 2, 3, 4]


def test_removed_rows_are_left_out_of_a_new_estimate() -> None:
    keys = VECTOR_KINDS["raw measurements"][0](np.random.default_rng(11))
    database = Database(keys[:50], np.arange(50.0))
    database.remove(list(keys[:20]))
    database.add(keys[50:150], np.arange(100.0))
    assert database.encoder == Arrays().fit(keys[20:150])


def test_a_new_estimate_ends_a_calibration() -> None:
    keys = VECTOR_KINDS["unit embeddings"][0](np.random.default_rng(12))
    database = Database(keys[:100], np.arange(100.0))
    database.add(keys[100:195], np.arange(95.0))
    database.calibrate([(key, key) for key in keys[:60]])
    assert database.ask(keys[0]).coverage == 0.9
    database.add(keys[195:200], np.arange(5.0))
    assert database.ask(keys[0]).coverage is None


def test_forgotten_rows_leave_no_trace_in_the_metric() -> None:
    keys = VECTOR_KINDS["raw measurements"][0](np.random.default_rng(13))
    database = Database(keys[:50], np.arange(50.0))
    forget_rows(database, list(keys[:10]))
    assert database.encoder == Arrays().fit(keys[10:50])


def test_a_query_far_from_all_directions_gets_a_hint() -> None:
    database = Database(np.eye(4)[:3], ["a", "b", "c"])
    assert "same angle" in database.ask([0.0, 0.0, 0.0, 1.0]).hint
    assert "zero vector" in database.ask([0.0, 0.0, 0.0, 0.0]).hint
    assert database.ask([1.0, 0.1, 0.0, 0.0]).hint == ""


@pytest.mark.parametrize("score", ["dot", "cosine", "gaussian", scores.Cosine(0.2)])
def test_a_score_replaces_the_estimated_one(score: object) -> None:
    keys = VECTOR_KINDS["unit embeddings"][0](np.random.default_rng(14)).astype(np.float32)
    weights = Database(keys, np.arange(400)).ask(keys[3], score=score).weights
    expected = qkv.weights(keys[3:4], keys, score=score)[0]  # type: ignore[arg-type]
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_an_updated_key_is_found_by_its_original_numbers(precision):
    """The stored vector may be rounded; three updates are still one row."""
    keys = np.random.default_rng(0).normal(size=(50, 8))
    columns = {"k": keys, "y": np.arange(50.0)}
    D = Database.from_columns(columns, key="k", value="y", precision=precision)
    for value in (97.0, 98.0, 99.0):
        assert D.update(keys[3], value) == 0
    assert keys[3] in D and len(D) == 50 and D.get(keys[3]) == 99.0
    D.remove(keys[3])
    assert keys[3] not in D and len(D) == 49
