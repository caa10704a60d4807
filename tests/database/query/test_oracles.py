"""Random databases against oracles: D[key] against a dict, `ask` and `attend` against NumPy.

QKV_ORACLE_CASES=2000 runs all cases of each; by default a sample runs.
"""

from __future__ import annotations

import datetime
import math
import os
from typing import Any, NamedTuple

import numpy as np
import pandas
import polars
import pytest
import torch

from qkv import Database
from qkv.database.encoders import Characters

jnp = pytest.importorskip("jax.numpy")

CASES = int(os.environ.get("QKV_ORACLE_CASES", "100"))
BLOCK = 40
"""Cases of one test."""
KINDS = ("text", "number", "pairs", "dates", "vectors")
DAY = datetime.date(2020, 1, 1)
LETTERS = list("abcdefgh ")


class Case(NamedTuple):
    """Rows of one kind of key, and queries near some of them."""

    kind: str
    keys: list[Any]
    values: np.ndarray
    queries: list[Any]


def make_case(rng: np.random.Generator, kind: str) -> Case:
    # Few sizes, as JAX compiles for each.
    rows, asked = int(rng.choice([1, 4, 11])), int(rng.choice([1, 2]))
    repeats = int(rng.integers(0, min(rows, 3)))
    keys = [make_key(rng, kind) for _ in range(rows - repeats)]
    keys += [keys[i] for i in rng.integers(0, len(keys), repeats)]
    queries = [
        keys[int(rng.integers(len(keys)))] if rng.random() < 0.5 else make_key(rng, kind)
        for _ in range(asked)
    ]
    return Case(kind, keys, rng.normal(0, 100, len(keys)), queries)


def make_key(rng: np.random.Generator, kind: str) -> Any:
    if kind == "text":
        return "k" + "".join(rng.choice(LETTERS, int(rng.integers(1, 9)))).strip()
    if kind == "number":
        return float(np.float32(rng.normal(50, 20)))
    if kind == "dates":
        return DAY + datetime.timedelta(days=int(rng.integers(0, 900)))
    width = 2 if kind == "pairs" else 3
    return tuple(np.float32(rng.normal(0, 3, width)).tolist())


def make_database(case: Case) -> Database:
    if case.kind == "vectors":
        return Database(np.array(case.keys, np.float32), case.values)
    pairs = list(zip(case.keys, case.values.tolist(), strict=True))
    if case.kind == "text":
        return Database(pairs, encoder=Characters(), precision="float32")
    return Database(pairs)


def expected_weights(case: Case, query: Any) -> np.ndarray:
    """The equation, in float64."""
    rows = len(case.keys)
    if case.kind == "text":
        both = Characters().encode([query, *case.keys]).astype(float)
        scores = (8 + 1.6 * np.log(rows)) * (both[1:] @ both[0])
    elif case.kind == "vectors":
        scores = described_scores(case, query)
    else:
        as_numbers = days if case.kind == "dates" else np.atleast_1d
        key = np.array([as_numbers(k) for k in case.keys], float)
        width = neighbour_bandwidth(key)
        scores = -(((key - as_numbers(query)) / width) ** 2).sum(axis=1) / 2
    alpha = np.exp(scores - scores.max())
    return alpha / alpha.sum()


def neighbour_bandwidth(key: np.ndarray) -> np.ndarray:
    """The ⌊√m⌋-th nearest other key, in the median, in units of the spread of each column."""
    deviation = key.std(axis=0)
    spread = np.zeros(key.shape[1])
    for low, high, normal in ((25, 75, 1.349), (10, 90, 2.563), (2.5, 97.5, 3.92)):
        width = np.percentile(key, high, axis=0) - np.percentile(key, low, axis=0)
        spread = np.where(spread > 0, spread, width / normal)
    spread = np.where(spread > 0, np.minimum(spread, deviation), deviation)
    spread = np.where(spread > 0, spread, 1)
    distances = np.linalg.norm((key[:, None] - key) / spread, axis=2)
    others = [np.sort(x[x > 0])[: math.isqrt(len(key))] for x in distances]
    found = [x[-1] for x in others if len(x)]
    if len(key) == 1 or not found:
        return spread * len(key) ** (-1 / (key.shape[1] + 4))
    return np.asarray(spread * np.median(found) / np.sqrt(key.shape[1] + 3))


def described_scores(case: Case, query: Any) -> np.ndarray:
    """The score of vectors that `describe` reports."""
    described = make_database(case).describe()["key"]
    keys, query = np.array(case.keys, float), np.array(query, float)
    if described["score"] == "gaussian":
        differences = (keys - query) / np.array(described["bandwidth"])
        return np.asarray(-(differences**2).sum(axis=1) / 2)
    lengths = np.linalg.norm(keys, axis=1) * np.linalg.norm(query)
    return np.asarray(keys @ query / lengths / described["temperature"])


def days(day: datetime.date) -> np.ndarray:
    return np.array([float(day.toordinal())])


SERIES = (
    lambda x: pandas.Series(x, index=range(9, 9 + len(x))),
    lambda x: pandas.Index(x),
    lambda x: polars.Series(x),
)
ARRAYS = (np.array, lambda x: np.array(x, "f4"), lambda x: torch.tensor(x), jnp.array)
OBJECTS = (lambda x: np.array(x, object), *SERIES)

ONE = {
    "text": (str, np.str_, np.array, lambda x: np.array(x, object)),
    "number": (float, np.float64, np.array, torch.tensor, jnp.array),
    "pairs": (tuple, list, *ARRAYS, *OBJECTS),
    "dates": (lambda x: x, str, lambda x: np.datetime64(x), lambda x: np.array(x, "M8[D]")),
    "vectors": (list, tuple, *ARRAYS, *SERIES),
}
"""The forms of a single query."""
SEVERAL = {
    "text": (list, np.array, *OBJECTS, pandas.Categorical),
    "number": (list, *ARRAYS, *OBJECTS, lambda x: np.array(x)[:, None]),
    "pairs": (list, *ARRAYS, lambda x: [list(one) for one in x], lambda x: list(map(np.array, x))),
    "dates": (
        *(list, lambda x: np.array(x, "M8[D]"), lambda x: np.array(x, "M8[ns]"), *OBJECTS),
        lambda x: [day.isoformat() for day in x],
    ),
    "vectors": (list, *ARRAYS, lambda x: [list(one) for one in x]),
}
"""The forms of several queries."""


def cases() -> list[Any]:
    return [pytest.param(start, id=str(start)) for start in range(0, CASES, BLOCK)]


def each_case(start: int, salt: int) -> Any:
    for number in range(start, min(start + BLOCK, CASES)):
        rng = np.random.default_rng([salt, number])
        yield rng, make_case(rng, KINDS[number % len(KINDS)])


@pytest.mark.parametrize("start", cases())
def test_lookup_is_a_dict(start: int) -> None:
    for rng, case in each_case(start, 1):
        D = make_database(case)
        oracle = dict(zip(case.keys, case.values.tolist(), strict=True))
        every: dict[Any, list[float]] = {}
        for key, value in zip(case.keys, case.values.tolist(), strict=True):
            every.setdefault(key, []).append(value)
        for query in [*case.queries, *case.keys]:
            forms = ONE[case.kind]
            form = forms[int(rng.integers(len(forms)))](query)
            if case.kind == "dates" and isinstance(form, str):
                form = query  # a look-up takes no text for a date
            assert (form in D) is (query in oracle), (case, form)
            assert D.get(form, "none") == oracle.get(query, "none"), (case, form)
            assert D.get_all(form) == every.get(query, []), (case, form)
            if query in oracle:
                assert D[form] == oracle[query]
            else:
                with pytest.raises(KeyError):
                    D[form]


@pytest.mark.sample(1)
@pytest.mark.parametrize("start", cases())
def test_ask_and_attend_are_the_equation(start: int) -> None:
    for rng, case in each_case(start, 2):
        D = make_database(case)
        alpha = np.array([expected_weights(case, query) for query in case.queries])
        values = alpha @ case.values
        one, several = ONE[case.kind], SEVERAL[case.kind]
        single = one[int(rng.integers(len(one)))](case.queries[0])
        batch = several[int(rng.integers(len(several)))](case.queries)
        near: dict[str, float] = {"rtol": 1e-4, "atol": 1e-2}
        result = D.ask(single)
        np.testing.assert_allclose(
            result.weights, alpha[0], atol=1e-4, err_msg=repr((case, single))
        )
        np.testing.assert_allclose(result.mean, values[0], **near)
        np.testing.assert_allclose(np.asarray(D.attend(single)), values[:1], **near)
        answers = D.ask(batch)
        assert len(answers) == len(case.queries), (case, batch)
        for answer, weights, value in zip(answers, alpha, values, strict=True):
            np.testing.assert_allclose(answer.weights, weights, atol=1e-4)
            np.testing.assert_allclose(answer.mean, value, **near)
            assert answer.mean == pytest.approx(answer.weights @ case.values, rel=1e-4, abs=1e-2)
            if answer.value_is_mean:
                assert answer.value == answer.mean
        np.testing.assert_allclose(np.asarray(D.attend(batch))[:, 0], values, **near)
