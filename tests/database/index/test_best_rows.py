"""The k best rows of a batch, built together, are those that each answer alone would have."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.index import best_rows
from qkv.weightings import TopK

pytest.importorskip("faiss")
ROWS, WIDTH = 9000, 8


def make_keys():
    rng = np.random.default_rng(3)
    return rng.normal(size=(20, WIDTH))[rng.integers(0, 20, ROWS)] + rng.normal(size=(ROWS, WIDTH))


KEYS = make_keys()
VALUES = {
    "number": lambda: np.arange(float(ROWS)),
    "vector": lambda: KEYS[:, :3] + 1,
    "text": lambda: [f"row {i % 4000}" for i in range(ROWS)],
    "equal": lambda: np.full(ROWS, 0.1),
}
CASES = {
    "number": scores.Cosine(0.05),
    "vector": scores.Gaussian(0.5),
    "text": scores.Dot(),
    "equal": scores.ScaledDot(),
}


@pytest.fixture(scope="module", params=CASES)
def database(request):
    D = qkv.Database(KEYS, VALUES[request.param]())
    D.index(score=CASES[request.param])
    return D, CASES[request.param]


def describe(answer):
    """Everything that a caller can read."""
    return (
        [(row.index, row.record) for row in answer.rows],
        [row.weight for row in answer.rows],
        answer.value if isinstance(answer.value, str) else np.asarray(answer.value),
        [value for value, _ in answer.values],
        answer.mean,
        answer.weights,
        answer.entropy,
        answer.spread,
        answer.lse,
        answer.hint,
        answer.confidence,
        answer.confidence_text,
        len(str(answer).splitlines()),
    )


def assert_same(first, second):
    for mine, other in zip(describe(first), describe(second), strict=True):
        if mine is None or isinstance(mine, str) or (isinstance(mine, list) and len(mine)):
            if isinstance(mine, list) and isinstance(mine[0], tuple):
                assert [x[0] for x in mine] == [x[0] for x in other]
                for (_, a), (_, b) in zip(mine, other, strict=True):
                    assert a.keys() == b.keys()
                    assert all(np.array_equal(a[name], b[name]) for name in a)
            elif isinstance(mine, list) and isinstance(mine[0], float):
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-12)
            else:
                assert mine == other
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"top": 10}, np.float32), ({"top": 3}, np.float64), ({"where": True}, np.float32)],
)
def test_as_alone(database, options, dtype, monkeypatch):
    D, score = database
    if "where" in options:
        options = {"where": lambda row: bool(row["key"][0] > 0)}
    shared = {"score": score, "weighting": TopK(10), "approximate": True} | options
    queries = (KEYS[:12] * 1.01).astype(dtype)
    batch = D.ask(queries, **shared)
    alone = [D.ask(q, **shared) for q in queries]
    assert all("rows" not in vars(answer) for answer in batch + alone)
    monkeypatch.setattr(best_rows, "MAX_BEST_ROWS", 0)
    D._cached_view.index_cache.pop("plan")
    for mine, single, q in zip(batch, alone, queries, strict=True):
        other = D.ask(q, **shared)
        assert "rows" in vars(other) and mine.engine == other.engine
        assert mine.rows_read == other.rows_read and mine.total == other.total
        assert_same(mine, other)
        assert_same(single, other)
        row = other.rows[0]
        assert_same(mine.without(row), other.without(row))
        np.testing.assert_allclose(mine.influence(), other.influence(), rtol=1e-3, atol=0.05)
    D._cached_view.index_cache.pop("plan")


def test_copies(database):
    D, score = database
    options = {"score": score, "weighting": TopK(10), "approximate": True, "top": 10}

    def make():
        return D.ask(KEYS[5], **options)

    for copied in (
        pickle.loads(pickle.dumps(make())),
        copy.deepcopy(make()),
        copy.copy(make()),
        replace(make(), version=0),
    ):
        answer = make()
        assert [x.index for x in copied.rows] == [x.index for x in answer.rows]
        assert np.array_equal(copied.value, answer.value) and copied.values == answer.values
        assert np.array_equal(copied.weights, answer.weights)
    assert make().to_dict()["rows"] == make().to_dict()["rows"] != []
    with pytest.raises(AttributeError, match="'Answer' object has no attribute 'row'"):
        _ = make().row


def test_rows_are_read_before_the_database_is_closed(tmp_path):
    with qkv.open(tmp_path / "s.qkv") as D:
        D.add(KEYS, np.arange(float(ROWS)))
        D.index(score="cosine")
        options = {"score": "cosine", "weighting": TopK(10), "approximate": True, "top": 10}
        wanted, answer = D.ask(KEYS[5], **options), D.ask(KEYS[5], **options)
        rows = wanted.rows
    assert [(x.index, x.value) for x in answer.rows] == [(x.index, x.value) for x in rows]
    assert answer.value == wanted.value and np.array_equal(answer.rows[0].key, rows[0].key)
    assert answer.weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_lengths_beyond_float32(database, scale):
    """Squares that float32 cannot hold: the answers of the engine, or exact ones."""
    D, score = database
    options = {"score": score, "weighting": TopK(5)}
    answer = D.ask(KEYS[7] * scale, approximate=True, **options)
    exact = D.ask(KEYS[7] * scale, **options)
    assert sum(x.weight for x in answer.rows) == pytest.approx(1, rel=1e-5)
    if isinstance(score, scores.Cosine):  # for others, such a query is unlike the keys
        assert [x.index for x in answer.rows] == [x.index for x in exact.rows]
        assert answer.rows[0].weight == pytest.approx(exact.rows[0].weight, rel=1e-3)


def test_batches(database):
    D, score = database
    options = {"score": score, "weighting": TopK(3), "approximate": True, "top": 3}
    queries = np.repeat(KEYS[:30], 10, axis=0)  # 300: two batches
    answers = D.ask(queries, **options)
    for i in (0, 9, 255, 256, 299):
        single = D.ask(queries[i], **options)
        assert [x.index for x in answers[i].rows] == [x.index for x in single.rows]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_single_query_must_be_finite(database, number):
    D, score = database
    query = np.float32(KEYS[3])
    query[2] = number
    with pytest.raises(qkv.errors.ArgumentError, match="query 0 contains"):
        D.ask(query, score=score, weighting=TopK(10), approximate=True)


def test_float16_store():
    """The weights of a single query are as precise as those of a batch, and do not underflow."""
    D = qkv.Database(KEYS, VALUES["number"](), precision="float16")
    score = scores.Gaussian(0.3)
    D.index(score=score, queries=list(KEYS[:20]))
    options = {"score": score, "weighting": TopK(10), "top": 10, "approximate": True}
    queries = np.float32(KEYS[:8] + 0.3)
    for query, other in zip(queries, D.ask(queries, **options), strict=True):
        answer = D.ask(query, **options)
        assert "exactly" not in answer.engine
        assert len(answer.rows) == len(other.rows)
        assert [row.index for row in answer.rows] == [row.index for row in other.rows]
        weights = [row.weight for row in answer.rows], [row.weight for row in other.rows]
        np.testing.assert_allclose(*weights, rtol=1e-5)
        np.testing.assert_allclose(answer.lse, other.lse, rtol=1e-6)
