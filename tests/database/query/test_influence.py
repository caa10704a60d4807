"""The answer without a row, against a database that has not got it; what rows are worth."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.answer_backend import Row
from qkv.database.encoders import Custom
from qkv.errors import ArgumentError, CombinationError, DtypeError

RNG = np.random.default_rng(0)
KEYS = RNG.normal(size=(12, 3)).astype(np.float32)
QUERY = RNG.normal(size=3)
NUMBERS = RNG.normal(size=12) * 10
VECTORS = RNG.normal(size=(12, 4))
WORDS = [("red", "blue", "green")[i] for i in RNG.integers(0, 3, 12)]

HOW: dict[str, dict[str, Any]] = {
    "softmax": {"weighting": weightings.Softmax(0.7)},
    "sharp": {"score": scores.Dot(), "weighting": weightings.Softmax(0.02)},
    "average": {"weighting": "average"},
    "normalized": {"score": scores.Epanechnikov(3.0), "weighting": "normalized"},
    "raw": {"weighting": "raw"},
    "sigmoid": {"weighting": "sigmoid"},
    "hard": {"weighting": "hard"},
    "topk": {"weighting": weightings.TopK(3)},
    "sparsemax": {"score": scores.Dot(), "weighting": "sparsemax"},
    "entmax": {"score": scores.Dot(), "weighting": "entmax15"},
}


NAMES = [f"row {i}" for i in range(12)]


class Product(Custom):
    """Compared by qᵀk/√d, which does not depend on the number of rows."""

    def default_score(self, rows: int) -> scores.Score:
        return scores.ScaledDot()


ENCODER = Product(lambda names: np.array([KEYS[int(name[4:])] for name in names]), width=3)


def build_database(values: Any, rows: Any = range(12), **more: Any) -> qkv.Database:
    """Some of the rows under keys of text, so that a query may be a vector of float64."""
    columns = {"key": NAMES, "value": values, **more}
    cases = {
        name: x[list(rows)] if isinstance(x, np.ndarray) else [x[i] for i in rows]
        for name, x in columns.items()
    }
    return qkv.Database.from_columns(cases, key="key", value="value", encoder=ENCODER)


def build_without(values: Any, *gone: int) -> qkv.Database:
    return build_database(values, [i for i in range(12) if i not in gone])


@pytest.mark.parametrize("values", [NUMBERS, VECTORS, WORDS], ids=["numbers", "vectors", "words"])
@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
def test_each_row_left_out_is_a_database_without_it(options: Any, values: Any) -> None:
    answer = build_database(values).ask(QUERY, top=12, **options)
    influence = answer.influence()
    for i in range(len(KEYS)):
        left, want = answer.without(i), build_without(values, i).ask(QUERY, top=12, **options)
        np.testing.assert_allclose(np.delete(left.weights, i), want.weights, atol=1e-10)
        assert left.weights[i] == 0 and left.total == want.total == 11
        assert [row.key for row in left.rows] == [row.key for row in want.rows]
        if values is WORDS:
            assert left.value == want.value
            ours, theirs = (
                sum(share.weight for share in x.values if share.value == answer.value)
                for x in (answer, want)
            )
        else:
            np.testing.assert_allclose(left.value, want.value, atol=1e-10)
            np.testing.assert_allclose(left.mean, want.mean, atol=1e-10)
            ours, theirs = answer.mean, want.mean
        np.testing.assert_allclose(influence[i], ours - theirs, rtol=1e-10, atol=1e-10)


def test_of_several_columns_it_is_a_mapping() -> None:
    table = {"x": [1.0, 2.0, 4.0], "a": [1.0, 2.0, 3.0], "b": [5.0, 4.0, 0.0]}
    answer = qkv.Database.from_columns(table, key="x", value=["a", "b"]).ask(2.5)
    result = answer.influence()
    for i in range(3):
        left = answer.without(i).value
        assert {name: result[name][i] for name in "ab"} == pytest.approx(
            {name: answer.value[name] - left[name] for name in "ab"}, abs=1e-5
        )


@pytest.mark.parametrize("kept", [range(6), range(2)], ids=["masked", "picked"])
def test_rows_that_were_not_asked_have_no_influence(kept: range) -> None:
    answer = build_database(NUMBERS, n=list(range(12))).ask(QUERY, where=f"n < {len(kept)}")
    alone = build_database(NUMBERS, kept).ask(QUERY)
    np.testing.assert_allclose(answer.influence()[: len(kept)], alone.influence(), atol=1e-10)
    assert not answer.influence()[len(kept) :].any()
    assert answer.without(1).value == pytest.approx(alone.without(1).value, abs=1e-10)
    with pytest.raises(ArgumentError, match="row 11 did not take part"):
        answer.without(11)


def test_missing_values_stay_left_out() -> None:
    D = qkv.Database([(1.0, 3.0), (2.0, None), (3.0, 5.0)])
    answer = D.ask(2.0)
    assert answer.without(0).value == 5 and answer.without(0).missing == 1
    np.testing.assert_allclose(answer.influence(), [-1, 0, 1])


def test_one_row_after_another() -> None:
    answer = build_database(NUMBERS).ask(QUERY)
    first, second = answer.rows[:2]
    want = build_without(NUMBERS, first.index, second.index).ask(QUERY).value
    assert answer.without(first).without(second).value == pytest.approx(want, abs=1e-10)


def test_without_the_only_row_there_is_no_answer() -> None:
    answer = qkv.Database({1.0: 2.0}).ask(1.0)
    assert answer.without(0).value is None
    assert np.isnan(answer.influence()).all()
    assert qkv.Database({"Li": "Mu"}).ask("Li").influence().tolist() == [1.0]


def test_an_answer_is_of_the_rows_that_were_there() -> None:
    D = build_database(NUMBERS)
    answer = D.ask(QUERY)
    before = answer.without(0).value
    D.remove("row 1")
    assert answer.without(0).value == before


@pytest.mark.parametrize("options", [{}, {"weighting": "hard"}], ids=["softmax", "hard"])
def test_mislabelled_rows_are_the_worst(options: Any) -> None:
    rng = np.random.default_rng(3)
    kind = rng.integers(0, 3, 120)
    keys = np.eye(3)[kind] * 4 + rng.normal(size=(120, 3)) * 0.5
    names = np.array(["ash", "oak", "elm"])
    wrong = rng.permutation(100)[:8]
    predicted = kind.copy()
    predicted[wrong] = (predicted[wrong] + 1) % 3
    D = qkv.Database(keys[:100], names[predicted[:100]].tolist())
    pairs = list(zip(keys[100:], names[kind[100:]].tolist(), strict=True))
    # As far as they are near to any question.
    result = D.value_of_rows(pairs, score=scores.Gaussian(0.3), **options)
    near = {row.index for row in result.worst(8) if result.worth[row.index] < 0}
    assert near and near <= set(wrong.tolist())
    assert set(wrong[result.worth[wrong] < 0].tolist()) <= near
    assert result.worth[result.best(1)[0].index] > 0
    assert (result.worth[wrong] <= 0).all()
    for other in (pickle.loads(pickle.dumps(result)), deepcopy(result)):
        np.testing.assert_array_equal(other.worth, result.worth)
        assert rows_as_tuples(other.worst(200)) == rows_as_tuples(result.worst(200))


def rows_as_tuples(rows: list[Row]) -> list[tuple[int, float, Any]]:
    return [(row.index, row.weight, row.value) for row in rows]


def test_a_pickle_of_worth_has_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.database.query.influence.PICKLED_ROWS_PER_END", 2)
    result = qkv.Database(KEYS, NUMBERS).value_of_rows([(QUERY, 3.0)])
    other = pickle.loads(pickle.dumps(result))
    assert rows_as_tuples(other.best(2)) == rows_as_tuples(result.best(2))
    assert rows_as_tuples(other.worst(2)) == rows_as_tuples(result.worst(2))
    with pytest.raises(CombinationError, match="call value_of_rows again"):
        other.best(3)


@pytest.mark.parametrize("values", [NUMBERS, VECTORS, WORDS], ids=["numbers", "vectors", "words"])
@pytest.mark.parametrize("options", [HOW["softmax"], HOW["topk"]], ids=["softmax", "topk"])
def test_worth_is_the_growth_of_the_loss(options: Any, values: Any) -> None:
    queries = RNG.normal(size=(4, 3))
    right = [values[i] for i in (0, 3, 3, 7)]

    def loss(D: qkv.Database) -> float:
        actual = 0.0
        for query, want in zip(queries, right, strict=True):
            answer = D.ask(query, **options)
            if values is WORDS:
                actual += 1 - sum(s.weight for s in answer.values if s.value == want)
            else:
                actual += float(np.sum((answer.mean - want) ** 2))
        return actual / len(queries)

    D = build_database(values)
    actual = D.value_of_rows(zip(queries, right, strict=True), **options)
    assert actual.loss == pytest.approx(loss(D), abs=1e-10)
    want = [loss(build_without(values, i)) - loss(D) for i in range(12)]
    np.testing.assert_allclose(actual.worth, want, atol=1e-8)


def test_what_it_refuses() -> None:
    D = qkv.Database(KEYS, NUMBERS)
    with pytest.raises(DtypeError, match=r"pairs\[0\] must be \(query, right value\)"):
        D.value_of_rows([QUERY])
    with pytest.raises(ArgumentError, match="pairs is empty"):
        D.value_of_rows([])
    with pytest.raises(DtypeError, match="right value must be a number"):
        D.value_of_rows([(QUERY, "red")])
    with pytest.raises(DtypeError, match=r"right value must be text.* not 3"):
        qkv.Database(KEYS, ["red"] * len(KEYS)).value_of_rows([(QUERY, 3)])
    with pytest.raises(ArgumentError, match="no row has the value 'green': pass"):
        qkv.Database(KEYS, ["red"] * len(KEYS)).value_of_rows([(QUERY, "red"), (QUERY, "green")])
    answer = D.ask(QUERY, where="value < 0")
    for row in ("Emma", 1.5, True):
        with pytest.raises(DtypeError, match=r"one of answer\.rows"):
            answer.without(row)
    with pytest.raises(ArgumentError, match=r"row 99 does not exist: rows are numbered 0 to 11"):
        answer.without(99)
    with pytest.raises(ArgumentError, match="did not take part"):
        answer.without(int(np.argmax(NUMBERS)))
    answer = pickle.loads(pickle.dumps(D.ask(QUERY)))
    with pytest.raises(CombinationError, match="ask the database itself"):
        answer.without(0)
