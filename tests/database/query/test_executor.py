"""`ask` and `attend` of a database are `qkv.attend` on its rows, whatever the weighting."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import qkv
from qkv import scores, weightings
from qkv.errors import ArgumentError, CombinationError, QkvError
from qkv.testing.frameworks import FRAMEWORKS
from tests import cases
from tests.cli.run import data

rng = np.random.default_rng(4)
VALUE = rng.normal(size=(40, 2))
KEY, QUERY = (rng.normal(size=(n, 3)).astype("f4").astype(float) for n in (40, 3))  # as kept
QUERY[2] += 30.0  # beyond every window
GONE, ALONG = [3, 21, 39], rng.normal(size=(3, 2))
ALIVE = np.delete(np.arange(40), GONE)


@dataclass(frozen=True)
class Sharper(weightings.Softmax):
    """A softmax by its class, and of other scores."""

    def scale_scores(self, s):
        return s * 3.0


WEIGHTINGS = {
    **cases.WEIGHTINGS,
    "sharper": Sharper(),
    "nan_if_empty": weightings.Normalized("nan"),
}


@pytest.fixture(params=["memory", "disk", "segments"])
def database(request, tmp_path):
    path = None if request.param == "memory" else tmp_path / "d.qkv"
    D = qkv.Database() if path is None else qkv.open(path)
    step = 40 if request.param == "disk" else 15
    for start in range(0, 40, step):
        D.add(KEY[start : start + step], VALUE[start : start + step])
    D.remove([KEY[i] for i in GONE])
    if path is not None:
        D.close()
        D = qkv.open(path)
    yield D
    D.close()


@pytest.mark.parametrize("some", [False, True], ids=["all", "where"])
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting(database, name, some):
    weighting = WEIGHTINGS[name]
    score = scores.Epanechnikov(2.5) if weighting.needs_nonnegative else scores.ScaledDot(0.7)
    right = VALUE[ALIVE, 0] > 0
    options = {"score": score, "weighting": weighting}
    options |= {"where": lambda row: row["value"][0] > 0} if some else {}
    q = torch.tensor(QUERY, requires_grad=True)
    k, v = (torch.tensor(x[ALIVE]) for x in (KEY, VALUE))
    mask = torch.tensor(right[None]) if some else None
    out, alpha = qkv.attend(
        q, k, v, score=score, weighting=weighting, mask=mask, engine="dense", return_weights=True
    )
    got = database.attend(q, **options)
    np.testing.assert_allclose(got.detach(), out.detach(), atol=1e-12)
    result = [
        torch.autograd.grad((x * torch.tensor(ALONG)).sum() + 0 * q.sum(), q)[0] for x in (got, out)
    ]
    np.testing.assert_allclose(*result, atol=1e-12)
    answers = database.ask(QUERY, top=40, **options)
    np.testing.assert_allclose([a.weights for a in answers], alpha.detach(), rtol=1e-5, atol=2e-6)
    for answer, row in zip(answers, out.detach().numpy(), strict=True):
        if answer.value is None:
            assert not answer.rows and not row.any()
        else:
            np.testing.assert_allclose(answer.value, row, rtol=1e-5, atol=1e-5)


def test_raise_and_refusals(database):
    with pytest.raises(ArgumentError, match="no key within"):
        database.ask(QUERY, score="boxcar", weighting=weightings.Normalized("raise"))
    with pytest.raises(CombinationError, match="can be negative"):
        database.ask(QUERY, score="dot", weighting="normalized")
    with pytest.raises(CombinationError, match="distance"):
        database.ask(QUERY, score="exact", weighting=weightings.Normalized("nearest"))
    with pytest.raises(ArgumentError, match="compares vectors"):
        database.attend(QUERY, score="exact")


@pytest.mark.parametrize(
    ("keys", "query", "message"),
    [
        (np.eye(3), [np.nan, 0.0, 0.0], "query 0 contains NaN"),
        (np.eye(3), np.array([[0.0, 0.0, 1.0], [0.0, np.inf, 0.0]]), "query 1 contains NaN"),
        ([1.0, 2.0, 3.0], [2.0, np.nan], "query 1 is not a finite number$"),
        ([1.0, 2.0, 3.0], "two", "query 0 must be a number, not 'two'$"),
        (["a", "b", "c"], None, "query 0 must not be None$"),
        (["a", "b", "c"], np.full((1, qkv.Database({"a": 1}).encoder.width), np.nan), "query 0"),
    ],
)
def test_a_query_that_cannot_be_compared_is_named(keys, query, message):
    D = qkv.Database(keys, [1.0, 2.0, 3.0])
    with pytest.raises(QkvError, match=message):
        D.ask(query)
    if not isinstance(query, np.ndarray):  # of an array, attend has the gradient
        with pytest.raises(QkvError, match=message):
            D.attend(query)


def test_one_question_by_every_way(tmp_path):
    """In memory, on disk, of a version, after changes and compaction, by threads, on the command
    line: the same answer."""
    rows = {"name": list("abcdefgh"), "year": list(range(1950, 1990, 5)), "pay": VALUE[:8, 0]}
    options = {"key": "year", "value": "pay"}
    path, where = tmp_path / "pay.qkv", "year > 1955"
    memory = qkv.Database.from_columns(rows, **options)
    first = memory.ask(1971.0, where=where).to_dict()
    with qkv.Database.from_columns(rows, **options, path=path) as disk:
        for D in memory, disk:
            D.extend([{"name": "i", "year": 1991, "pay": 3.0}])
            D.remove(1975)
        past = memory.at(1), disk.at(1)
        ways = [disk.ask, disk.at(disk.version).ask, memory.ask]
        expected = memory.ask(1971.0, where=where)
        for change in (lambda: None, memory.compact, disk.compact):
            change()
            with ThreadPoolExecutor(2) as pool:
                actual = pool.map(lambda ask: ask(1971.0, where=where).to_dict(), ways * 8)
                assert all(answer == expected.to_dict() for answer in actual)
        assert disk.attend(1971.0, where=where) == pytest.approx(expected.value)
        assert [D.ask(1971.0, where=where).to_dict() for D in past] == [first] * 2
    assert data("ask", path, "1971", "--where", where) == expected.to_dict() | {
        "spread": expected.spread
    }


INF = float("inf")


@pytest.mark.parametrize(
    ("values", "value", "spread"),
    [
        ([INF, INF], INF, np.nan),
        ([INF, 1.0], INF, np.nan),
        ([-INF, 1.0], -INF, np.nan),
        ([INF, -INF], np.nan, np.nan),
        ([1e308, -1e308], 0.0, 1e308),
        ([1e308, 1e308], 1e308, 0.0),
        ([1e-200, 3e-200], 2e-200, 1e-200),
    ],
)
def test_values_at_the_ends_of_a_float(values, value, spread, recwarn):
    answer = qkv.Database(zip([1.0, 2.0], values, strict=True)).ask(1.5)
    np.testing.assert_allclose([answer.value, answer.spread], [value, spread], rtol=1e-12)
    if not np.isnan(value):
        np.testing.assert_allclose(
            qkv.attend([[1.5]], [[1.0], [2.0]], np.array(values)[:, None], score="gaussian"),
            [[value]],
        )
    assert not recwarn.list


@pytest.mark.parametrize(
    "weighting",
    ["hard", "sparsemax", "entmax15", weightings.TopK(2), "normalized", "softmax", "average"],
)
@pytest.mark.parametrize("values", [[1.0, INF, 3.0], [-INF, 2.0, INF], [1.0, -INF, -INF]])
def test_entry_points_agree_on_infinite_values(weighting, values, recwarn):
    score = "boxcar" if weighting == "normalized" else "gaussian"
    key, value = np.array([[0.0], [0.5], [1.0]]), np.array(values)[:, None]
    made = qkv.Database(key, value)
    for query in np.array([[0.0], [0.4], [1.0]]):
        answer = made.ask(query, score=score, weighting=weighting).value
        for out in (
            made.attend(query, score=score, weighting=weighting),
            qkv.attend(query[None], key, value, score=score, weighting=weighting)[0],
            qkv.attend(
                query[None], key, value, score=score, weighting=weighting, engine="streaming"
            )[0],
        ):
            np.testing.assert_array_equal(out, answer)
    assert not recwarn.list


def test_an_infinite_value_without_weight_does_not_count():
    answer = qkv.Database([(1.0, 3.0), (2.0, INF)]).ask(1.0, weighting="hard")
    assert (answer.value, answer.spread) == (3.0, 0.0)


@pytest.mark.parametrize("value", [3, 0.1, 2**63, -1e300])
@pytest.mark.parametrize("weighting", ["softmax", "sparsemax", "average"])
def test_the_mean_of_equal_values_is_theirs(value, weighting):
    made = qkv.Database((f"key {i}", [value, 7][i % 2]) for i in range(300))
    answer = made.ask("key 5", where={"value": value}, weighting=weighting)
    assert (answer.value, answer.spread) == (value, 0.0)
    assert made.ask("key 5", weighting="average").spread > 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_mean_of_equal_vectors_is_theirs(dtype):
    vector = np.array([0.1, -3.0, 1e4], dtype)
    made = qkv.Database(zip(map("key {}".format, range(40)), [vector] * 40, strict=True))
    np.testing.assert_array_equal(made.ask("key 5").value, vector)


def test_more_than_there_are_takes_no_memory():
    """The state of top k holds k entries, which would exceed any memory."""
    pay = qkv.Database([(2.9, 61.0), (3.2, 70.0), (3.4, 76.0)])
    all_of_it = weightings.TopK(10**12)
    np.testing.assert_allclose(
        pay.ask(3.3, weighting=all_of_it).weights, pay.ask(3.3, weighting="softmax").weights
    )
    query = np.array([[3.3]])
    np.testing.assert_allclose(
        pay.attend(query, weighting=all_of_it), pay.attend(query, weighting="softmax")
    )


def test_a_list_of_numbers_is_one_key_where_keys_are_such():
    rows = [[1.0, 2.0], [3.0, 4.0]]
    D, same = qkv.Database(rows, [1.0, 2.0]), qkv.Database(np.array(rows), [1.0, 2.0])
    for query in ([1.0, 2.0], [0, 5]):
        assert D.ask(query).value == pytest.approx(same.ask(query).value)
        assert D.attend(query) == pytest.approx(same.attend(query))
        assert D.ask([query])[0].value == D.ask(query).value
    assert D.ask([]) == []


def test_a_column_is_as_many_queries(recwarn):
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    D = qkv.Database({"a": 1.0, "b": 2.0})
    many = D.ask(pandas.Series(["a", "b"]))
    assert [x.value for x in many] == [x.value for x in D.ask(["a", "b"])]
    assert D.attend(pandas.Series(["a", "b"])).tolist() == D.attend(["a", "b"]).tolist()
    held = {"a": 1.0, "b": 2.0}
    assert dict(qkv.Database(held.keys(), held.values()).items()) == held
    numbers = qkv.Database(torch.arange(3), torch.arange(3) * 2)
    assert numbers[2] == 4 and numbers.ask(pandas.Series([0, 1]))[1].value > 0
    assert not recwarn.list


def test_ask_computes_scores_above_float32_next_to_an_exact_match():
    D, asked = qkv.Database(KEY, VALUE), {"score": scores.Gaussian(1e-25), "weighting": "raw"}
    query = KEY[7].astype("f4").astype(float)
    np.testing.assert_allclose(D.ask(query, **asked).value, D.attend(query, **asked), rtol=1e-6)


@pytest.mark.parametrize(
    "asked",
    [
        {"score": scores.Gaussian(1e-30)},
        {"score": scores.Gaussian(1e-60)},
        {"score": scores.Laplace(1e-60)},
        {"score": scores.ScaledDot(1e60)},
        {"score": "dot", "weighting": weightings.Softmax(1e-60)},
        {"score": scores.Gaussian(1e-22), "weighting": "sparsemax"},
    ],
)
def test_attend_holds_what_float32_does_not(asked):
    D, query = qkv.Database(KEY, VALUE), (KEY[7] + 0.01).astype("f4")
    want = D.ask(query, **asked).value
    with np.errstate(all="ignore"):
        actual = D.attend(query, **asked)
        drawn = D.attend(torch.tensor(query), **asked)
        traced = D.attend(FRAMEWORKS["jax"].make_array(query, "float32"), **asked)
    assert actual.dtype == np.float32 and drawn.dtype == torch.float32
    np.testing.assert_allclose(actual, want, rtol=1e-6)
    np.testing.assert_allclose(drawn, want, rtol=1e-6)
    np.testing.assert_allclose(traced, want, rtol=1e-6)


def test_questions_that_are_put_alike_are_answered_as_things_stand():
    D, near = qkv.Database({"Li": 1.0, "Hu": 2.0, "Mu": 3.0}), {"value": 1.0}
    assert D.ask("Li", where=near).total == 1
    near["value"] = 4.0
    assert D.ask("Li", where=near).total == 0  # the same object, and another condition
    least = [1.0]
    for least[0], rows in ((1.0, 2), (2.0, 1)):
        assert D.ask("Li", where=lambda row: row["value"] > least[0]).total == rows
    assert D.ask("Li", where="value < 3").total == D.ask("Hu", where="value < 3").total == 2
    D.add("Ma", 2.5)
    assert D.ask("Li", where="value < 3").total == 3
    try:
        for sharpness in (1.0, 50.0):  # a name that is given anew, as by a cell that runs again

            @weightings.register("put_alike")
            @dataclass(frozen=True)
            class PutAlike(weightings.Softmax):
                temperature: float = 1 / sharpness

            assert D.ask("Ma", weighting="put_alike").weighting == "PutAlike"
            actual = D.ask("Ma", weighting="put_alike").weights
            want = D.ask("Ma", weighting=weightings.Softmax(1 / sharpness)).weights
            assert np.array_equal(actual, want)
    finally:
        weightings.NAMES.pop("put_alike", None)


def test_an_answer_from_a_server_or_a_pickle_can_be_copied():
    answer = qkv.Database({"Li": 1.0, "Hu": 2.0}).ask("Li")
    again = pickle.loads(pickle.dumps(answer))
    copied = deepcopy(again)
    for one in (again, copied):
        assert (one.entropy, one.spread, one.rows) == (answer.entropy, answer.spread, answer.rows)
        assert np.array_equal(one.weights, answer.weights)


def test_no_length_of_a_key_decides_an_answer(tmp_path):
    """A row asked by its own vector comes first. Only the dot product prefers a long one."""
    keys, names = np.array([[0.6, 0.7], [3.0, 4.0], [-1.0, 0.5]]), ["short", "long", "other"]
    with qkv.open(tmp_path / "vectors.qkv") as stored:
        stored.add(keys, names)
        for D in (qkv.Database(keys, names), qkv.Database(keys.tolist(), names), stored):
            answer = D.ask([0.6, 0.7])
            assert answer.value == "short" and answer.hint == ""
            assert answer.score == "Gaussian(bandwidth=1.084)"
            assert pickle.loads(pickle.dumps(answer)).hint == deepcopy(answer).hint == answer.hint
            assert D.ask([3.0, 4.0]).hint == ""
            for score in ("cosine", "gaussian", "scaled_dot", scores.Cosine(0.05)):
                reported = D.ask([0.6, 0.7], score=score)
                assert reported.hint == "" and (reported.value == "short") == (
                    score != "scaled_dot"
                )


def test_unit_vectors_of_a_model_are_told_apart():
    """Over √d, they would all have about the same weight."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(40, 384))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    D = qkv.Database(keys, [f"row {i}" for i in range(40)])
    answer = D.ask(keys[7])
    assert answer.value == "row 7" and answer.rows[0].weight > 0.7 and answer.hint == ""
    assert D.ask(keys[7], score="scaled_dot").effective_rows > 39
    far = D.ask(np.linalg.svd(keys)[2][-1])  # a direction that is orthogonal to all keys
    assert far.effective_rows > 39 and "score='gaussian' to compare distances" in far.hint
    assert far.hint in str(far) and far.hint[1:] in far.explain()
    assert far.hint[1:] in far._repr_html_().replace("&#x27;", "'")
    assert pickle.loads(pickle.dumps(far)).hint == deepcopy(far).hint == far.hint
    sharp = D.ask(keys[7], score=scores.Cosine(0.05))
    assert sharp.value == "row 7" and sharp.rows[0].weight > 0.9 and sharp.hint == ""
    assert qkv.Database({"Li": 1.0, "Hu": 2.0}).ask("Li").hint == ""
    alone = D.ask(keys[7], where="value == 'row 7'")  # one row cannot be compared with another
    assert alone.total == 1 and alone.hint == ""


@pytest.mark.parametrize("weighting", ["average", weightings.Softmax(100.0), "hard"])
def test_a_weighting_that_makes_rows_alike_by_itself_is_no_fault_of_the_keys(weighting):
    keys = np.random.default_rng(0).normal(size=(40, 8))
    answer = qkv.Database(keys, np.arange(40.0)).ask(3 * keys[7], weighting=weighting)
    assert answer.hint == ""


def test_what_a_question_means_is_found_once_and_again_where_it_changes():
    D, fresh = (qkv.Database([(1.0, 10.0), (2.0, 40.0), (4.0, 0.0)]) for _ in range(2))
    D.ask(1.5, score="gaussian", top=2)
    meant = D._cached_executor
    assert D.ask(2.5, score="gaussian", top=2) == fresh.ask(2.5, score="gaussian", top=2)
    assert D._cached_executor is meant
    for options in ({"top": 1}, {"score": "cosine"}, {"weighting": "hard"}, {"where": "key > 1"}):
        assert (
            D.ask(1.5, **options) == fresh.ask(1.5, **options) and D._cached_executor is not meant
        )
    for options in ({"top": True}, {"tolerance": -1}, {"confidence": 0.9}):
        with pytest.raises(ArgumentError):
            D.ask(1.5, score="gaussian", **{"top": 2} | options)
    D.add([(1.5, 7.0)])
    assert D.ask(1.5, score="gaussian", top=2).total == 4


def test_confidence_needs_no_second_scan(monkeypatch):
    """A batch whose weights are not kept says the same, and scans the rows once."""
    rows = [(f"row number {i}", float(i % 7)) for i in range(300)]
    D = qkv.Database(rows)
    words = qkv.Database([(key, str(value)) for key, value in rows])
    queries = ["row numbr 12", "row 7", "number", "row number 33"]
    expected = [[x.confidence for x in made.ask(queries)] for made in (D, words)]
    monkeypatch.setattr("qkv.database.query.executor.MAX_CACHED_WEIGHTS_PER_BATCH", 1)
    for made, known in zip((D, words), expected, strict=True):
        answers = made.ask(queries)
        with monkeypatch.context() as patch:
            patch.setattr("qkv.database.query.executor.QueryExecutor.compute_weights", pytest.fail)
            assert [answer.confidence for answer in answers] == pytest.approx(known)


def test_one_key_with_contradicting_numbers_is_not_sure():
    D = qkv.Database(["a", "a", "a", "b"], [1.0, 1.0, 1000.0, 3.0])
    answer = D.ask("a")
    assert answer.value == 334.0 and answer.confidence < 0.2
    assert answer.hint == "3 rows have this key, with values from 1 to 1000"
    assert D.ask("b").hint == "" and D.ask("b").confidence > 0.9
    alike = qkv.Database(["a", "a", "b"], [4.9, 5.1, 3.0]).ask("a")
    assert alike.hint == "" and alike.confidence > 0.9
    numbers = qkv.Database([5.0, 5.0, 5.0, 900.0], [1.0, 1.0, 1000.0, 3.0])
    assert numbers.ask(5).hint == answer.hint
    assert numbers.ask(900).hint.startswith("900 is a key whose own value is 3, but")
    table = {"name": ["a", "a", "b"], "low": [2.0, 2.0, 3.0], "high": [4.0, 9.0, 5.0]}
    several = qkv.Database.from_columns(table, key="name", value=["low", "high"]).ask("a")
    assert several.hint == "2 rows have this key, with high from 4 to 9"


def test_nobody_is_sure_of_a_missing_value():
    answer = qkv.Database(["apple", "bean"], [None, "x"]).ask("apple")
    assert "lacks value" in answer.hint and answer.confidence == 0
    assert answer.confidence_text == "unsure (0 %)"
    assert qkv.Database(["apple", "bean"], [None, "x"]).ask("bean").confidence > 0.9


@pytest.mark.parametrize("value", [44.9, "paid"])
def test_a_typo_of_a_row_without_a_value_is_not_another_row(value):
    rows = {"Schulz, Anna": None, "Schulze, Anna": value, "Meier, Jörg": value, "Weiß, Ina": value}
    D = qkv.Database(rows)
    for typo in ("Schulz Anna", "Anna Schultz", "Schulz, Ana"):
        answer = D.ask(typo)
        assert answer.hint == "the best match, Schulz, Anna, lacks value and is left out"
        assert answer.confidence < 0.5
    assert D.ask("Schulze Anna").hint == "" and D.ask("Schulze Anna").confidence > 0.9
    # A row of the same key has the value.
    several = qkv.Database(["Paris", "Paris", "Lyon"], [None, value, None])
    assert several.ask("Pariss").hint == "" and several.ask("Pariss").confidence > 0.9
    assert several.ask("Lyonn").hint.startswith("the best match, Lyon, lacks value")
    # Rows that do not pass the condition do not matter.
    table = {"name": [*rows], "paid": [*rows.values()], "year": [1, 2, 2, 2]}
    by_name = qkv.Database.from_columns(table, key="name", value="paid")
    assert "lacks paid" in by_name.ask("Schulz Anna").hint
    assert "lacks" not in by_name.ask("Schulz Anna", where="year == 2").hint
    # Between numbers, the neighbours tell a missing value.
    assert qkv.Database({1.0: 1.0, 2.0: None, 3.0: 3.0}).ask(2.1).hint == ""
