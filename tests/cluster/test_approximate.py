"""Approximate answers of a cluster: every shard searches its own indexes."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.index import row_index, segment_index
from qkv.errors import ArgumentError
from qkv.weightings import TopK
from tests.cluster.local_shards import cluster

pytest.importorskip("faiss")
ROWS, WIDTH, SCORE = 18_000, 8, scores.Gaussian(0.4)
QUERIES = 20


def make_keys(count, seed):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(20, WIDTH))
    return centres[rng.integers(0, 20, count)] + 0.4 * rng.normal(size=(count, WIDTH))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One store, three stores with an index each, and the same with two indexes."""
    folder = tmp_path_factory.mktemp("stores")
    x, value = make_keys(ROWS, 1), np.arange(float(ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_index, "MIN_ROWS", 500)
        one = folder / "one.qkv"
        with qkv.open(one, create=True) as D:
            D.add(x, value)
            D.index(score=SCORE)
        stores = {"one": [str(one)], "three": [], "mixed": []}
        for i, part in enumerate(np.array_split(np.arange(ROWS), 3)):
            for kind in ("three", "mixed"):
                place = folder / f"{kind}{i}.qkv"
                with qkv.open(place, create=True) as D:
                    D.add(x[part], value[part])
                    if kind == "three" or i != 1:
                        D.index(score=SCORE)
                stores[kind].append(str(place))
    return stores


@pytest.fixture(scope="module")
def whole():
    return qkv.Database(make_keys(ROWS, 1), np.arange(float(ROWS)))


def best_rows(answer):
    return {row.index for row in answer.rows}


@pytest.mark.parametrize("kind", ["one", "three", "mixed"])
@pytest.mark.parametrize("where", [None, "value < 14_000"])
@pytest.mark.parametrize("weighting", [TopK(10), "hard", "softmax"])
def test_answers(places, whole, kind, where, weighting):
    queries = make_keys(QUERIES, 2)
    options = {"score": SCORE, "weighting": weighting, "where": where, "top": 10}
    hits, count, x = 0, 0, make_keys(ROWS, 1)
    with cluster(places[kind], 3) as c:
        answers = c.ask(queries, **options, approximate=0.3)
        one = c.ask(queries[0], **options, approximate=0.3)
        exact = whole.ask(queries, **options)
        for answer, right in zip(answers, exact, strict=True):
            read = np.asarray(answer.weights) > 0
            distance = np.square(x[read] - answer.query).sum(axis=1)
            expected = np.exp((distance.min() - distance) / (2 * 0.4**2))
            expected /= expected.sum()
            np.testing.assert_allclose(answer.weights[read], expected, rtol=1e-3, atol=1e-7)
            assert weighting == "softmax" or read.sum() <= 10
            pooled = answer.weights @ np.arange(float(ROWS))
            np.testing.assert_allclose(answer.value, pooled, rtol=1e-5)
            if where is not None:
                assert not read[14_000:].any()
            assert answer.total == right.total and answer.rows_read < answer.total
            assert answer.engine.startswith("index, ") and "shard" in answer.engine
            assert ("exactly in 1: there is no index" in answer.engine) == (kind == "mixed")
            assert answer.error_bound == 1.0 and answer.recall >= 0.95
            missing = answer.missing_weight
            assert (missing is None) == (weighting != "softmax")
            if missing is not None:
                assert 0 <= missing.low <= missing.estimate <= missing.high <= 1
                assert where is None or missing[1:] == (missing.low, 1)
            hits += len(best_rows(answer) & best_rows(right))
            count += len(right.rows)
        assert hits >= 0.93 * count
    first = answers[0]
    assert (one.rows_read, one.engine) == (first.rows_read, first.engine)
    assert one.value == pytest.approx(first.value)
    assert np.array_equal(one.weights, first.weights)
    if weighting == "softmax":
        assert one.missing_weight == pytest.approx(first.missing_weight, rel=1e-4)


@pytest.mark.parametrize("kind", ["one", "three", "mixed"])
def test_interval(places, whole, kind):
    """The interval of the missing weight holds for about 90 % of the queries, or more."""
    queries = make_keys(300, 3)
    inside, missing = 0, []
    with cluster(places[kind], 3) as c:
        exact = whole.ask(queries, score=SCORE)
        for answer, right in zip(c.ask(queries, score=SCORE, approximate=0.3), exact, strict=True):
            missing.append(1 - right.weights[np.asarray(answer.weights) > 0].sum())
            low, high = answer.missing_weight[1:]
            inside += low - 1e-6 <= missing[-1] <= high + 1e-6
    assert np.median(missing) > 1e-3
    assert inside / len(queries) > 0.85


def test_one_store_in_shards_is_one_store(places):
    """Its shards read the same rows as the database itself, and estimate the same rest."""
    queries = make_keys(QUERIES, 4)
    options = {"score": SCORE, "approximate": 0.3}
    with qkv.open(places["one"][0]) as D, cluster(places["one"], 3) as c:
        for one, other in zip(D.ask(queries, **options), c.ask(queries, **options), strict=True):
            np.testing.assert_allclose(other.weights, one.weights, atol=1e-6)
            assert other.missing_weight.estimate == pytest.approx(
                one.missing_weight.estimate, rel=0.05, abs=1e-5
            )


def test_details_of_an_answer(places, whole):
    query = make_keys(1, 5)[0]
    options = {"score": SCORE, "weighting": TopK(5)}
    with cluster(places["three"], 3) as c:
        answer, exact = c.ask(query, **options, approximate=True), whole.ask(query, **options)
        assert [row.index for row in answer.rows] == [row.index for row in exact.rows]
        for name in ("entropy", "spread", "value"):
            assert getattr(answer, name) == pytest.approx(getattr(exact, name), rel=1e-4)
        best = answer.rows[0].index
        without = answer.without(best)
        assert without.total == ROWS - 1 and best not in best_rows(without)
        assert "rows read" in answer.explain()
        empty = c.ask(query, **options, where="value < 0", approximate=True)
        assert empty.value is None and not empty.rows


@pytest.mark.parametrize("kind", ["one", "mixed"])
def test_attend(places, kind):
    torch = pytest.importorskip("torch")
    query = torch.tensor(make_keys(3, 6), requires_grad=True)
    with cluster(places[kind], 3) as c:
        out = c.attend(query, score=SCORE, approximate=0.9)
        (gradient,) = torch.autograd.grad(out.sum(), query)
        answers = c.ask(query.detach().numpy(), score=SCORE, approximate=0.9)
    x, value = make_keys(ROWS, 1), np.arange(float(ROWS))
    for i, answer in enumerate(answers):
        weights = np.asarray(answer.weights, float)
        np.testing.assert_allclose(out[i].item(), weights @ value, rtol=1e-4)
        mean = weights @ value
        slope = (weights * (value - mean)) @ x / 0.4**2  # the covariance of value and key
        np.testing.assert_allclose(gradient[i].numpy(), slope, rtol=1e-3, atol=1e-2)


def test_a_lost_shard(places):
    query = make_keys(1, 7)[0]
    with cluster(places["three"], 3, partial=True) as c:
        c._shard_set.workers.lost = {1}
        answer = c.ask(query, score=SCORE, approximate=True)
        assert "a shard is lost" in answer.engine and answer.error_bound > 0
        assert answer.missing_weight is None
    with cluster(places["three"], 3) as c:
        c._shard_set.workers.lost = {1}
        with pytest.raises(qkv.database.errors.LostShardError):
            c.ask(query, score=SCORE, approximate=True)


def test_a_damaged_index_of_a_shard(places, tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
    monkeypatch.setattr(segment_index, "MIN_ROWS", 500)
    x = make_keys(12_000, 8)
    stores = []
    for i in range(2):
        stores.append(str(tmp_path / f"{i}.qkv"))
        with qkv.open(stores[-1], create=True) as D:
            D.add(x[i::2], np.arange(6000.0))
            D.index(score=SCORE)
    options = {"score": SCORE, "weighting": "hard"}
    with cluster(stores, 2) as c:
        assert "in 2 shards" in c.ask(x[0], **options, approximate=True).engine
        file = next((tmp_path / "0.qkv").glob("index-*"))
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for q in x[:4]:
            answer = c.ask(q, **options, approximate=True)
            assert "in 1 shard, exactly in 1: most rows are in no index" in answer.engine
            assert answer.value == c.ask(q, **options).value


def test_new_rows_are_found_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_index, "MIN_ROWS", 500)
    place = tmp_path / "s.qkv"
    with qkv.open(place, create=True) as D:
        D.add(make_keys(6000, 1), np.arange(6000.0))
        D.index(score=SCORE)
    new = np.full(WIDTH, 3.0)
    with cluster([str(place)], 2) as c:
        options = {"score": SCORE, "weighting": "hard", "approximate": True}
        assert c.ask(new, **options).value != -1
        c.add(new, -1.0)
        answer = c.ask(new, **options)
        assert answer.value == -1 and answer.engine.startswith("index")
        c.remove(new)
        assert c.ask(new, **options).value != -1


def test_the_reason_of_exact_answers(places):
    query = make_keys(1, 9)[0]
    with cluster(places["one"], 2) as c:
        for options, why in (
            ({"score": "cosine"}, "was built for the metric distance"),
            ({"score": "laplace"}, "cannot find the best rows of Laplace"),
            ({"score": SCORE, "weighting": "sparsemax"}, "cannot serve the weighting Sparsemax"),
        ):
            answer, exact = c.ask(query, **options, approximate=True), c.ask(query, **options)
            assert why in answer.engine and answer.value == exact.value
            assert answer.recall == 1.0 and answer.missing_weight == (0, 0, 0)
        with pytest.raises(ArgumentError, match="between 0 and 1"):
            c.ask(query, approximate=2)
