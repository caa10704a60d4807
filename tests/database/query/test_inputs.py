"""Queries: every form of a query (array, Series, tensor, list, tuple) has one meaning."""

from __future__ import annotations

import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import polars
import pytest
import torch

from qkv import Database
from qkv.errors import DtypeError, ShapeError

PAIRS = {(100.0, 1.0): 1.0, (120.0, 3.0): 2.0, (160.0, 2.0): 4.0, (90.0, 9.0): 8.0}
NAMES = {"apple": 1.0, "pear": 2.0, "plum": 3.0}
DAYS = {datetime.date(2024, 1, 1): 1.0, datetime.date(2024, 2, 1): 2.0}

FORMS = {
    "array": np.array,
    "float32 array": lambda x: np.array(x, "f4"),
    "int array": lambda x: np.array(x, int),
    "object array": lambda x: np.array(x, object),
    "Series": lambda x: pandas.Series(x, index=[7, 3]),
    "Index": pandas.Index,
    "extension array": pandas.array,
    "polars": polars.Series,
    "torch": torch.tensor,
    "torch ints": lambda x: torch.tensor(x).int(),
    "jax": jnp.array,
    "list": list,
    "tuple": tuple,
}


def tensorflow(x):
    return pytest.importorskip("tensorflow").constant(x)


@pytest.mark.parametrize("form", [*FORMS.values(), tensorflow], ids=[*FORMS, "tensorflow"])
def test_array_query(form):
    D = Database(PAIRS)
    want = D.ask((100.0, 1.0))
    actual = D.ask(form([100.0, 1.0]))
    assert actual.value == pytest.approx(want.value, rel=1e-6)
    assert actual.query == (100.0, 1.0) and isinstance(actual.query, tuple)
    assert actual.rows == want.rows and actual.exact == want.exact
    np.testing.assert_allclose(np.asarray(D.attend(form([100.0, 1.0]))), [want.value], rtol=1e-5)
    assert D[form([100.0, 1.0])] == 1.0 and form([100.0, 1.0]) in D
    assert D.ask(form([100.0, 1.0]), score="exact", weighting="normalized").value == 1.0


@pytest.mark.parametrize("name", ["array", "float32 array", "object array", "torch", "jax"])
def test_rows_of_an_array_are_keys(name):
    D, rows = Database(PAIRS), [(100.0, 1.0), (130.0, 4.0), (90.0, 2.0)]
    want = [answer.value for answer in D.ask(rows)]
    actual = D.ask(FORMS[name](rows))
    assert [answer.value for answer in actual] == pytest.approx(want, rel=1e-6)
    np.testing.assert_allclose(np.asarray(D.attend(FORMS[name](rows)))[:, 0], want, rtol=1e-5)
    square = D.ask(FORMS[name](rows[:2]))  # as many rows as columns: still a batch
    assert [answer.query for answer in square] == rows[:2]


def test_a_batch_may_hold_arrays_lists_and_tuples():
    D = Database(PAIRS)
    mixed = [np.array([100.0, 1.0]), [100.0, 1.0], (100.0, 1.0), torch.tensor([100.0, 1.0])]
    assert {answer.value for answer in D.ask(mixed)} == {D.ask((100.0, 1.0)).value}
    assert [answer.query for answer in D.ask(mixed)] == [(100.0, 1.0)] * 4
    assert D.ask([]) == [] and D.ask(np.zeros((0, 2))) == []
    assert D.attend(np.zeros((0, 2))).shape == (0, 1)


def test_an_array_of_another_width_is_refused_with_the_width_of_the_keys():
    D = Database(PAIRS)
    for query in (np.zeros(3), torch.zeros(3), [1.0, 2.0, 3.0], np.zeros((4, 3)), (1.0, 2.0, 3.0)):
        for call in (D.ask, D.attend):
            with pytest.raises(ShapeError, match=r"3 numbers, but the keys have 2"):
                call(query)
    for call in (D.ask, D.attend):
        with pytest.raises(ShapeError, match=r"\(1, 2, 2\)"):
            call(np.zeros((1, 2, 2)))


def test_the_gradient_reaches_a_pair_in_its_own_units():
    D = Database(PAIRS)
    q = torch.tensor([110.0, 2.0], dtype=torch.float64, requires_grad=True)
    out = D.attend(q)
    (grad,) = torch.autograd.grad(out.sum(), q)
    step = 1e-3
    want = [
        (D.attend((110.0 + a, 2.0 + b)) - D.attend((110.0 - a, 2.0 - b))).item() / (2 * step)
        for a, b in ((step, 0), (0, step))
    ]
    np.testing.assert_allclose(grad, want, rtol=5e-3)
    other = jax.grad(lambda x: D.attend(x).sum())(jnp.array([110.0, 2.0]))
    np.testing.assert_allclose(other, grad, rtol=1e-4)
    assert out.dtype == torch.float64
    assert D.attend(q.detach().float()).dtype == torch.float32


@pytest.mark.parametrize("form", [torch.tensor, jnp.array, np.array])
def test_attend_loses_no_digits_of_keys_far_from_zero(form):
    """A float32 query of keys about 1e6 is compared as `ask` compares it."""
    D = Database([(1_000_000.03 + 0.25 * i, float(i)) for i in range(16)])
    query = np.array([1_000_001.5], "f4")
    want = [answer.value for answer in D.ask(query)]
    np.testing.assert_allclose(np.asarray(D.attend(form(query)))[:, 0], want, rtol=1e-4)


def test_a_key_of_dates_and_numbers_is_asked_by_an_array():
    D = Database({(datetime.date(2024, 1, 1), 5.0): 1.0, (datetime.date(2024, 6, 1), 7.0): 2.0})
    key = (datetime.date(2024, 1, 1), 5.0)
    want = D.ask(key)
    for query in (np.array(key, object), list(key), pandas.Series(list(key))):
        assert D.ask(query).value == want.value
        assert D[query] == 1.0
    assert D.ask([key])[0].value == want.value


def test_a_learned_encoder_of_pairs_is_asked_by_arrays_too():
    D = Database(PAIRS)
    D.learn([((101.0, 1.0), (100.0, 1.0)), ((150.0, 2.0), (160.0, 2.0))], epochs=1)
    want = D.ask((110.0, 2.0)).value
    assert D.ask(np.array([110.0, 2.0])).value == pytest.approx(want)
    out = D.attend(torch.tensor([110.0, 2.0]))
    assert torch.is_tensor(out) and out.item() == pytest.approx(want, rel=1e-5)


def test_vectors_stay_vectors():
    D = Database(np.eye(2), np.array([[10.0], [20.0]]))
    for query in ([1.0, 0.0], np.array([1.0, 0.0]), torch.tensor([1.0, 0.0])):
        assert D.ask(query).value == pytest.approx(D.ask(np.array([1.0, 0.0])).value)
        np.testing.assert_allclose(np.asarray(D.attend(query)), D.ask(query).value, rtol=1e-6)


def test_numbers_far_from_any_text_are_its_encoded_vector():
    D = Database(NAMES)
    code = D.encoder.encode_query(["aple"])
    if D.encoder.encode_sparse(["aple"], query=True) is None:
        assert D.ask(code[0]).value == pytest.approx(D.ask("aple").value)
    np.testing.assert_allclose(D.attend(code)[0], D.ask(code)[0].mean, rtol=1e-5)


TEXTS = {
    "array": np.array,
    "object array": lambda x: np.array(x, object),
    "column": lambda x: np.array(x)[:, None],
    "string array": lambda x: pandas.array(x, dtype="string"),
    "Series": lambda x: pandas.Series(x, index=[7, 3]),
    "string Series": lambda x: pandas.Series(x, dtype="string"),
    "Index": pandas.Index,
    "categorical": pandas.Categorical,
    "Series of categories": lambda x: pandas.Series(x, index=[5, 5], dtype="category"),
    "polars": polars.Series,
    "polars categories": lambda x: polars.Series(x, dtype=polars.Categorical),
    "np.str_": lambda x: [np.str_(one) for one in x],
}


@pytest.mark.parametrize("form", [*TEXTS.values(), tensorflow], ids=[*TEXTS, "tensorflow"])
def test_an_array_of_texts_is_a_list_of_queries(form):
    D, texts = Database(NAMES), ["aple", "peer"]
    want, actual = D.ask(texts), D.ask(form(texts))
    assert [answer.value for answer in actual] == [answer.value for answer in want]
    assert [answer.query for answer in actual] == texts
    assert all(type(answer.query) is str for answer in actual)
    np.testing.assert_array_equal(D.attend(form(texts)), D.attend(texts))


@pytest.mark.parametrize("form", [np.array, np.str_, lambda x: np.array(x, object)])
def test_one_text_of_numpy_is_one_query(form):
    D = Database(NAMES)
    result = D.ask(form("aple"))
    assert (result.query, result.value) == ("aple", D.ask("aple").value)
    assert type(result.query) is str
    assert D[form("apple")] == 1.0 and form("apple") in D
    np.testing.assert_array_equal(D.attend(form("aple")), D.attend("aple"))


@pytest.mark.parametrize(
    "form",
    [
        lambda x: np.array(x, "M8[D]"),
        lambda x: np.array(x, "M8[ns]"),
        lambda x: np.array(x, object),
        lambda x: np.array([day.isoformat() for day in x]),
        lambda x: pandas.Series(pandas.to_datetime(x), index=[4, 2]),
        pandas.DatetimeIndex,
        lambda x: pandas.array(pandas.to_datetime(x)),
        polars.Series,
        lambda x: [np.datetime64(day) for day in x],
    ],
)
def test_an_array_of_dates_is_a_list_of_queries(form):
    D, days = Database(DAYS), [datetime.date(2024, 1, 3), datetime.date(2024, 1, 28)]
    want = [answer.value for answer in D.ask(days)]
    assert [answer.value for answer in D.ask(form(days))] == want
    np.testing.assert_array_equal(D.attend(form(days)), D.attend(days))
    one = D.ask(np.array(days[0], "M8[D]"))
    assert one.value == want[0] and D[np.array("2024-01-01", "M8[D]")] == 1.0


def test_numbers_ask_no_dates():
    D = Database(DAYS)
    for query in ([738_000.0], np.array([738_000.0]), torch.tensor([738_000.0]), 738_000.0):
        for call in (D.ask, D.attend):
            with pytest.raises(DtypeError, match="must be a date"):
                call(query)


def test_texts_of_several_columns_are_asked_by_rows_of_an_array():
    D = Database({("Ada", "Byron"): 1.0, ("Mary", "Shelley"): 2.0})
    rows = [("Ada", "Biron"), ("Mary", "Shely")]
    want = [answer.value for answer in D.ask(rows)]
    for query in (np.array(rows), np.array(rows, object), [list(row) for row in rows]):
        assert [answer.value for answer in D.ask(query)] == want
        assert [answer.query for answer in D.ask(query)] == rows
    names = ["Ada", "Shelly"]  # each may match either column, as in a list
    assert [a.value for a in D.ask(np.array(names))] == [a.value for a in D.ask(names)]


def test_an_array_of_texts_of_two_dimensions_is_refused():
    with pytest.raises(ShapeError, match=r"\(2, 2\).*text"):
        Database(NAMES).ask(np.array([["a", "b"], ["c", "d"]]))
