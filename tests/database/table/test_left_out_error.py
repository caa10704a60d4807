"""The error of answers where a row is left out: measured when rows are added, and kept."""

import pickle

import numpy as np
import pytest

import qkv
from qkv.database import memory_rows
from qkv.database.table.left_out_error import LeftOutError, estimate_left_out_error
from qkv.scores import Cosine, Gaussian, Laplace

rng = np.random.default_rng(3)
ROWS = 300
VALID = LeftOutError((0.0,), (1.0,), (), 1.0).to_settings()
FUNCTIONS = {
    "slow": lambda x: np.sin(x).sum(axis=1),
    "fast": lambda x: np.sin(9 * x).sum(axis=1),
    "noise": lambda x: rng.normal(size=len(x)),
}


def make_database(keys: np.ndarray, values, as_array: bool) -> qkv.Database:
    if as_array:
        return qkv.Database(keys, values)
    cells = keys[:, 0].tolist() if keys.shape[1] == 1 else list(map(tuple, keys.tolist()))
    return qkv.Database(list(zip(cells, values, strict=True)))


def ask_all(database: qkv.Database, keys: np.ndarray, as_array: bool):
    return database.ask(keys if as_array or keys.shape[1] > 1 else keys[:, 0])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("as_array", [True, False])
@pytest.mark.parametrize("width", [1, 2])
def test_the_expected_error_is_that_of_new_queries(name: str, as_array: bool, width: int) -> None:
    keys, queries = rng.uniform(0, 10, (2, ROWS, width))
    values, right = (FUNCTIONS[name](x) for x in (keys, queries))
    answers = ask_all(make_database(keys, values.tolist(), as_array), queries, as_array)
    error = np.array([answer.value for answer in answers]) - right
    expected = np.array([answer.expected_error for answer in answers])
    assert 0.6 < expected.mean() / np.sqrt((error**2).mean()) < 1.4
    assert (np.abs(error) < 2 * expected).mean() > 0.85
    # Noise says nothing about its neighbours, and the hint says so.
    hints = [answer.hint for answer in answers if answer.hint]
    assert len(hints) > 0.8 * ROWS if name == "noise" else name == "fast" or not hints
    assert all("nearby keys say little about the value" in hint for hint in hints)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("as_array", [True, False])
def test_the_confidence_of_classes_is_that_of_new_queries(name: str, as_array: bool) -> None:
    keys, queries = rng.uniform(0, 10, (2, ROWS, 2))
    values, right = (
        np.array(["low", "high"])[(FUNCTIONS[name](x) > 0).astype(int)] for x in (keys, queries)
    )
    answers = ask_all(make_database(keys, values.tolist(), as_array), queries, as_array)
    share = np.mean([answer.value == x for answer, x in zip(answers, right, strict=True)])
    confidence = np.array([answer.confidence for answer in answers])
    assert share - 0.15 < confidence.mean() < share + 0.15
    if name == "noise":
        assert confidence.mean() < 0.65


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "digits"])
def test_the_confidence_of_known_tables_is_the_share_of_right_answers(name: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    keys, classes = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(keys))[:500]
    known, new = order[: len(order) * 7 // 10], order[len(order) * 7 // 10 :]
    D = qkv.Database(keys[known], [f"class {x}" for x in classes[known]])
    answers = D.ask(keys[new])
    right = [answer.value == f"class {x}" for answer, x in zip(answers, classes[new], strict=True)]
    assert np.mean(right) > 0.85
    assert abs(np.mean([answer.confidence for answer in answers]) - np.mean(right)) < 0.08


def test_a_sample_of_a_large_table_is_enough() -> None:
    keys, queries = rng.uniform(0, 10, (40_000, 2)), rng.uniform(0, 10, (60, 2))
    noise = qkv.Database(keys, rng.choice(["a", "b", "c", "d"], len(keys)).tolist())
    assert np.mean([answer.confidence for answer in noise.ask(queries)]) < 0.45


def test_a_key_of_the_table_stays_sure() -> None:
    keys = rng.normal(size=(ROWS, 8))
    numbers = qkv.Database(keys, rng.normal(size=ROWS))
    answer = numbers.ask(keys[5])
    assert answer.expected_error < 0.2 and answer.hint == ""
    assert numbers.ask(keys[5] + 1.0).hint.startswith("nearby keys say little about the value")
    classes = qkv.Database(keys, rng.choice(["a", "b"], ROWS).tolist())
    assert classes.ask(keys[5]).confidence > 0.9
    assert classes.ask(keys[5] + 1.0).confidence < 0.7


def test_names_of_rows_need_no_neighbour() -> None:
    keys = rng.normal(size=(ROWS, 8))
    names = qkv.Database(keys, [f"row {i}" for i in range(ROWS)])
    assert names._view.left_out_error.left_out == ()
    assert names.ask(keys[7] + 0.1).confidence > 0.9


def test_a_vector_far_from_every_key_is_unsure(tmp_path) -> None:
    keys = rng.normal(size=(ROWS, 8)) * [1, 1, 1, 1, 100, 1, 1, 0.01] + 5
    names, classes = [f"row {i}" for i in range(ROWS)], ["a", "b"] * (ROWS // 2)
    for values in (names, classes, keys[:, 0], keys):
        with qkv.open(tmp_path / f"{len(list(tmp_path.iterdir()))}.qkv") as D:
            D.add(keys, values)
            far = D.ask(10 * keys[3])
            assert far.hint.startswith("the query is far from every key: ")
            assert (far.confidence or 0) < 0.3 and far.confidence_text.startswith("unsure")
            assert not D.ask(keys[3]).hint and not D.ask(keys[3]).confidence_text.endswith(
                "every key"
            )
            assert "far" not in D.ask(rng.normal(size=8) * [1, 1, 1, 1, 100, 1, 1, 0.01] + 5).hint
    unit = rng.normal(size=(ROWS, 16))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    assert "far" not in qkv.Database(unit, names).ask(rng.normal(size=16)).hint


def test_the_estimate_is_kept_and_follows_the_rows(tmp_path) -> None:
    keys = rng.uniform(0, 10, (64, 1))
    with qkv.open(tmp_path / "a.qkv") as D:
        D.add(keys[:32], np.sin(keys[:32, 0]))
        smooth = D.ask(keys[:1] + 0.1)[0].expected_error
        # Twice as many rows, now with noise: the estimate is made again.
        D.add(keys[32:], 5 * rng.normal(size=32))
        assert D.ask(keys[:1] + 0.1)[0].expected_error > 3 * smooth
        before = D.ask([2.5])
    with qkv.open(tmp_path / "a.qkv") as D:
        after = D.ask([2.5])
        assert after.expected_error == before.expected_error is not None
        assert pickle.loads(pickle.dumps(after)).expected_error == after.expected_error
        stored = D._view.settings["left_out_error"]
        memory_rows.forget_rows(D, keys[32:])
        assert D._view.settings["left_out_error"]["left_out"] < stored["left_out"]
        D.encode("exact")
        assert "left_out_error" not in D._view.settings


def test_a_number_column_has_an_estimate_of_its_own() -> None:
    x = rng.uniform(0, 10, ROWS)
    table = {"x": x.tolist(), "slow": np.sin(x).tolist(), "noise": rng.normal(size=ROWS).tolist()}
    D = qkv.Database.from_columns(table, key="x", value=["slow", "noise"])
    error = D.ask(5.0).expected_error
    assert error["slow"] < 0.1 and error["noise"] > 0.8
    assert "say little about noise" in D.ask(5.0).hint
    assert D.by(key="x", value="slow").ask(5.0).expected_error == pytest.approx(error["slow"])
    assert D.by(key="x", value="slow").ask(5.0).hint == ""
    for options in ({"score": "gaussian"}, {"weighting": "average"}):
        assert D.ask(5.0, **options).expected_error is None


def test_missing_values_and_few_rows() -> None:
    x = np.arange(40.0)
    values = [None if i % 4 else float(i) for i in range(40)]
    D = qkv.Database(list(zip(x.tolist(), values, strict=True)))
    assert 0 < D.ask(7.5).expected_error < 5
    few = qkv.Database({1.0: 2.0, 2.0: 3.0})
    assert few.ask(1.5).expected_error is None
    assert few.ask(1.5).confidence_text == "a mean of a few rows"
    dates = [f"2024-01-{day:02}" for day in range(1, 31)]
    noisy = qkv.Database.from_columns(
        {"day": [np.datetime64(day) for day in dates], "sum": rng.normal(size=30).tolist()}
    )
    assert noisy.ask("2024-01-10T12:00").confidence < 0.5


@pytest.mark.parametrize(
    "settings",
    [
        None,
        [],
        {},
        VALID | {"distance": 0},
        VALID | {"deviation": [1, 2]},
        VALID | {"left_out": ["x"]},
        VALID | {"at_keys": [float("nan")]},
        VALID | {"at_keys": [0, 1]},
        VALID | {"at_keys": 3},
        VALID | {"left_out_logit": [float("inf"), 1]},
        VALID | {"left_out_logit": [1]},
        VALID | {"far_distance": 0.5},
        {name: x for name, x in VALID.items() if name != "at_keys_logit"},
    ],
)
def test_damaged_settings_are_no_estimate(settings) -> None:
    assert LeftOutError.from_settings(settings) is None
    assert LeftOutError.from_settings(VALID) is not None


@pytest.mark.parametrize("score", [Gaussian(0.3), Gaussian(np.array([0.3, 0.2])), Cosine(0.05)])
def test_the_estimate_equals_the_plain_loop(score) -> None:
    keys, values = rng.normal(size=(40, 2)), rng.normal(size=(40, 1))
    weight = np.array(qkv.weights(keys, keys, score=score))
    error = []
    for i in range(40):
        own = np.arange(40) != i
        left = weight[i, own] / weight[i, own].sum()
        error.append(float(left @ values[own, 0] - values[i, 0]))
    estimate = estimate_left_out_error(keys, values, score, True)
    assert estimate is not None
    assert estimate.left_out[0] == pytest.approx(np.sqrt(np.mean(np.square(error))), rel=1e-4)
    at_keys = np.sqrt(np.mean((weight @ values - values) ** 2))
    assert estimate.at_keys[0] == pytest.approx(min(at_keys, estimate.left_out[0]), rel=1e-4)
    wide = np.concatenate([keys, np.zeros((40, 20))], axis=1)
    if not isinstance(score, Gaussian) or isinstance(score.bandwidth, float):
        same = estimate_left_out_error(wide, values, score, True)
        assert same.left_out == pytest.approx(estimate.left_out, rel=1e-3)
    assert estimate_left_out_error(keys, values, Laplace(1.0), True) is None
