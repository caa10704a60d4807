"""Every form of a query in the table of docs/database.md has the answer of the plain one."""

import datetime
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch

from qkv import Database
from qkv.errors import ArgumentError

DAYS = [datetime.date(2024, 1, 1), datetime.date(2024, 2, 1), datetime.date(2024, 3, 1)]
ISO = ["2024-01-01", "2024-02-01"]
VALUES = [1.0, 2.0, 3.0]
NUMBERS = {"a": [1.0, 2.0, 3.0], "b": [100.0, 200.0, 300.0]}
CELLS = {"a": ["x", "y", "z"], "b": [100.0, 200.0, 300.0]}
DATED = {"d": DAYS, "b": [100.0, 200.0, 300.0]}
TEXTS = ["apple", "pear"]

DATABASES = {
    "number": Database([1.0, 2.0, 3.0], VALUES),
    "numbers": Database.from_columns({**NUMBERS, "v": VALUES}, key=["a", "b"], value="v"),
    "vector": Database(np.array([[1.0, 100.0], [2.0, 200.0], [3.0, 300.0]]), VALUES),
    "cells": Database.from_columns({**CELLS, "v": VALUES}, key=["a", "b"], value="v"),
    "dated": Database.from_columns({**DATED, "v": VALUES}, key=["d", "b"], value="v"),
    "text": Database(dict(zip(["apple", "pear", "plum"], VALUES, strict=True))),
    "date": Database(dict(zip(DAYS, VALUES, strict=True))),
}

PANDAS, POLARS, ARROW = pandas.DataFrame, polars.DataFrame, pyarrow.table
TWO = {"a": [1.0, 2.0], "b": [100.0, 200.0]}
REORDERED = {"b": [100.0, 200.0], "x": ["p", "q"], "a": [1.0, 2.0]}
MIXED = {"a": ["x", "y"], "b": [100.0, 200.0]}
PAIR, PAIRS = (2.0, 200.0), [(1.0, 100.0), (2.0, 200.0)]

ONE: dict[str, list[Any]] = {
    "number": [2.0, 2, np.float32(2), np.array(2.0), torch.tensor(2.0), jnp.array(2.0)],
    "numbers": [
        PAIR,
        list(PAIR),
        np.array(PAIR),
        np.array(PAIR, object),
        torch.tensor(PAIR),
        jnp.array(PAIR),
        pandas.Series(PAIR),
        polars.Series(PAIR),
        pyarrow.array(PAIR),
        {"a": 2.0, "b": 200.0},
        {"b": 200.0, "a": 2.0},
        PANDAS(TWO).iloc[1],
        PANDAS(REORDERED).iloc[1],
        POLARS(REORDERED).row(1, named=True),
        next(PANDAS(TWO).iloc[1:].itertuples(index=False)),
    ],
    "vector": [
        PAIR,
        list(PAIR),
        np.array(PAIR),
        np.array([2, 200]),
        np.array(PAIR, object),
        torch.tensor(PAIR),
        jnp.array(PAIR),
        pandas.Series(PAIR),
        PANDAS(TWO).iloc[1],
        polars.Series(PAIR),
        pyarrow.array(PAIR),
    ],
    "cells": [
        ("y", 200.0),
        {"b": 200.0, "a": "y"},
        PANDAS(MIXED).iloc[1],
        PANDAS(MIXED)[["b", "a"]].iloc[1],
    ],
    "dated": [(DAYS[1], 200.0), {"b": 200.0, "d": DAYS[1]}],
    "text": ["pear", np.str_("pear"), np.array("pear"), np.array("pear", object)],
    "date": [DAYS[1], np.datetime64(ISO[1]), pandas.Timestamp(ISO[1]), np.array(ISO[1], "M8[D]")],
}

SEVERAL: dict[str, list[Any]] = {
    "number": [
        [1.0, 2.0],
        np.array([1.0, 2.0]),
        np.array([[1.0], [2.0]]),
        np.array([1.0, 2.0], object),
        torch.tensor([1.0, 2.0]),
        jnp.array([1.0, 2.0]),
        pandas.Series([1, 2], dtype="Int64"),
        pandas.Index([1.0, 2.0]),
        polars.Series([1.0, 2.0]),
        pyarrow.chunked_array([[1.0], [2.0]]),
        PANDAS({"key": [1.0, 2.0]}),
    ],
    "numbers": [
        PAIRS,
        list(map(list, PAIRS)),
        list(map(np.array, PAIRS)),
        list(map(torch.tensor, PAIRS)),
        [PANDAS(TWO).iloc[0], PANDAS(TWO).iloc[1]],
        [{"a": 1.0, "b": 100.0}, {"b": 200.0, "a": 2.0}],
        np.array(PAIRS),
        torch.tensor(PAIRS),
        jnp.array(PAIRS),
        *(make(x) for make in (PANDAS, POLARS, ARROW) for x in (TWO, REORDERED)),
    ],
    "vector": [
        PAIRS,
        list(map(list, PAIRS)),
        list(map(np.array, PAIRS)),
        np.array(PAIRS),
        np.array(PAIRS).astype(int),
        torch.tensor(PAIRS),
        jnp.array(PAIRS),
        pandas.Series(list(map(np.array, PAIRS))),
        polars.Series(list(map(list, PAIRS))),
        *(make(TWO) for make in (PANDAS, POLARS, ARROW)),
        POLARS({"key": list(map(list, PAIRS))}),
    ],
    "cells": [
        [("x", 100.0), ("y", 200.0)],
        np.array([("x", 100.0), ("y", 200.0)], object),
        PANDAS(MIXED)[["b", "a"]],
        *(make(MIXED) for make in (PANDAS, POLARS, ARROW)),
    ],
    "dated": [
        [(DAYS[0], 100.0), (DAYS[1], 200.0)],
        [(ISO[0], 100.0), (ISO[1], 200.0)],
        *(make({"d": DAYS[:2], "b": [100.0, 200.0]}) for make in (PANDAS, POLARS, ARROW)),
        PANDAS({"d": pandas.to_datetime(ISO), "b": [100.0, 200.0]}),
    ],
    "text": [
        TEXTS,
        np.array(TEXTS),
        np.array(TEXTS, object),
        np.array(TEXTS)[:, None],
        pandas.Series(TEXTS),
        pandas.Series(TEXTS, dtype="category"),
        pandas.Index(TEXTS),
        polars.Series(TEXTS),
        pyarrow.array(TEXTS),
        *(make({"key": TEXTS}) for make in (PANDAS, POLARS, ARROW)),
        PANDAS({"fruit": TEXTS}),
    ],
    "date": [
        DAYS[:2],
        ISO,
        np.array(ISO, "M8[D]"),
        pandas.Series(pandas.to_datetime(ISO)),
        pandas.to_datetime(ISO),
        polars.Series(DAYS[:2]),
    ],
}


def cases(forms: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(kind, query, id=f"{kind}-{i}-{type(query).__module__}")
        for kind, queries in forms.items()
        for i, query in enumerate(queries)
    ]


@pytest.mark.parametrize(("kind", "query"), cases(ONE))
def test_one_query(kind: str, query: Any) -> None:
    database = DATABASES[kind]
    expected, answer = database.ask(ONE[kind][0]), database.ask(query)
    assert answer.rows[0].value == 2.0
    np.testing.assert_allclose(answer.weights, expected.weights, rtol=1e-5, atol=1e-8)
    value = np.asarray(database.attend(query)).reshape(-1)
    np.testing.assert_allclose(value, expected.mean, rtol=1e-5)
    assert database[query] == database.get(query) == 2.0
    assert query in database


@pytest.mark.parametrize(("kind", "query"), cases(SEVERAL))
def test_several_queries(kind: str, query: Any) -> None:
    database = DATABASES[kind]
    expected, answers = database.ask(SEVERAL[kind][0]), database.ask(query)
    assert [answer.rows[0].value for answer in answers] == [1.0, 2.0]
    for answer, other in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer.weights, other.weights, rtol=1e-5, atol=1e-8)
    values = np.asarray(database.attend(query))
    np.testing.assert_allclose(values[:, 0], [x.mean for x in expected], rtol=1e-5)


@pytest.mark.parametrize("make", [PANDAS, POLARS, ARROW])
def test_a_frame_of_one_row_gives_a_list_of_one_answer(make: Any) -> None:
    [answer] = DATABASES["numbers"].ask(make({"a": [2.0], "b": [200.0]}))
    assert answer.rows[0].value == 2.0


@pytest.mark.parametrize("kind", ["number", "numbers", "cells", "date"])
def test_a_frame_without_a_key_column_is_an_error(kind: str) -> None:
    with pytest.raises(ArgumentError, match=r"frame without the column '(key|a|d)' of the key"):
        DATABASES[kind].ask(POLARS({"other": [1.0], "b": [200.0]}))
