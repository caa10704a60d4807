"""Queries far outside number and date keys: the nearest row wins, and nobody is sure of it."""

from __future__ import annotations

import datetime
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import qkv

YEARS = list(range(1900, 2021, 5))
VALUES = [float(year - 1900) for year in YEARS]


@pytest.mark.parametrize("scale", [1e3, 1e8, 1.7e12, 1e20, 1e30])
@pytest.mark.parametrize("width", [1, 2])
def test_the_best_row_is_the_nearest_at_every_distance(scale, width):
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 50, (40, width)).astype(float)
    keys = np.unique(keys, axis=0)
    D = qkv.Database(list(map(tuple, keys)) if width > 1 else keys[:, 0].tolist(), keys[:, 0])
    queries = [sign * scale * rng.uniform(0.5, 1, width) for sign in (1, -1)]
    queries.append(np.array([scale, 7.0][:width]))  # one column within the keys
    for query in queries:
        exact = [
            sum(
                (Fraction(float(q)) - Fraction(float(k))) ** 2
                for q, k in zip(query, key, strict=True)
            )
            for key in keys
        ]
        nearest = int(np.argmin(exact))
        asked = tuple(query.tolist()) if width > 1 else float(query[0])
        for weighting in ("softmax", "hard", qkv.weightings.TopK(3), "sparsemax"):
            answer = D.ask(asked, weighting=weighting)
            assert answer.rows[0].index == nearest
            assert answer.value == pytest.approx(keys[nearest, 0])
        attended = D.attend(query if width > 1 else query[0])
        assert float(np.squeeze(attended)) == pytest.approx(keys[nearest, 0])


def test_attend_far_away_in_torch():
    D = qkv.Database(YEARS, VALUES)
    assert D.attend(torch.tensor([1.7e12, -1e8])).flatten().tolist() == [120.0, 0.0]


def test_a_window_far_away_stays_empty():
    D = qkv.Database(YEARS, VALUES)
    assert D.ask(1e9, score=qkv.scores.Boxcar(50.0), weighting="normalized").rows == []


def test_a_far_query_is_unsure_and_says_why():
    labels = qkv.Database(YEARS, list(map(str, YEARS)))
    answer = labels.ask(1.7e12)
    assert answer.value == "2020"
    assert answer.confidence < 0.01 and answer.confidence_text == "unsure (0 %)"
    assert answer.hint == "the query 1700000000000 is far outside the keys, 1900 to 2020"
    again = pickle.loads(pickle.dumps(answer))
    assert (again.hint, again.confidence) == (answer.hint, answer.confidence)
    assert answer.to_dict()["confidence"] == answer.confidence
    near = labels.ask(2020)
    assert near.hint == "" and near.confidence > answer.confidence
    means = qkv.Database(YEARS, VALUES)
    assert means.ask(-5000).confidence_text == "unsure, far from every key"
    assert means.ask(-5000).hint == "the query -5000 is far outside the keys, 1900 to 2020"
    assert means.ask(2025).hint == means.ask(1893).hint == ""


def test_a_gap_between_the_keys():
    D = qkv.Database([*range(100), *range(10_000, 10_100)], [1.0] * 200)
    assert D.ask(5000).hint == "the query 5000 is far from every key; the nearest is 99"
    assert D.ask(50.5).hint == ""


def test_far_dates_and_tuples():
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=9 * i) for i in range(40)]
    answer = qkv.Database(days, list(map(str, days))).ask(datetime.date(2301, 1, 1))
    assert answer.value == str(days[-1]) and answer.confidence < 0.1
    assert answer.hint.endswith("is far outside the keys, 2020-01-01 to 2020-12-17")
    grid = {"x": [i % 5 for i in range(25)], "y": [i // 5 for i in range(25)], "z": VALUES}
    D = qkv.Database.from_columns(grid, key=["x", "y"], value="z")
    assert D.ask((2, 90)).hint == "the query (2, 90) is far outside the keys, where y is 0 to 4"
    assert D.ask((2, 4)).hint == ""


def test_a_far_number_beside_a_text():
    rows = {
        "city": ["Paris", "Paris", "Rome", "Rome"],
        "year": [1990, 2000, 1990, 2010],
        "id": list("abcd"),
    }
    by_columns = qkv.Database.from_columns(rows, key=["city", "year"], value="id")
    by_tuples = qkv.Database(list(zip(rows["city"], rows["year"], strict=True)), rows["id"])
    for D, name in ((by_columns, "year"), (by_tuples, "the number")):
        answer = D.ask(("Rome", 1e12))
        assert answer.value == "d" and answer.confidence < 0.1
        assert answer.hint == f"{name} 1000000000000 is far outside the keys, 1990 to 2010"
        assert D.ask(("Rome", 2011)).hint == "" and D.ask(("Rome", 2011)).confidence > 0.9
    assert by_columns.ask({"year": 1e12}).hint == answer.hint.replace("the number", "year")


def test_an_answer_in_a_gap_between_the_keys_is_not_sure():
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(x) for x in (4, 7, 41, 60, 64, 66, 68)]
    marks = qkv.Database(days, [1.5, 3.5, 1.0, 5.0, 2.0, 4.0, 3.0])
    answer = marks.ask(datetime.date(2024, 2, 1))
    assert answer.value == 1.0 and answer.confidence < 0.6  # the nearest key is 10 days away
    assert marks.ask(days[2]).confidence > 0.9


def test_answers_to_numbers_that_say_0_9_are_right():
    rng = np.random.default_rng(5)
    right = []
    for count in (8, 12, 20, 40) * 4:
        keys, queries = rng.normal(0, 2, count), rng.normal(0, 2, 12)
        labels = ["abcd"[int(2 + 1.99 * np.sin(1.3 * x))] for x in (*keys, *queries)]
        answers = qkv.Database(keys.tolist(), labels[:count]).ask(queries.tolist())
        pairs = zip(answers, labels[count:], strict=True)
        right += [answer.value == label for answer, label in pairs if answer.confidence >= 0.9]
    assert len(right) > 20 and np.mean(right) >= 0.8
