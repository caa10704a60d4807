"""Cells: every type comes back the same, equal keys are found, others are not."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qkv
from qkv.database.table import cells
from qkv.errors import ArgumentError, DtypeError
from qkv.util.formatting import quote_cell, to_jsonable

leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.dates()
    | st.datetimes()
    | st.times()
)
cell = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text("$abf", max_size=6) | st.just("$float"), inner)
    ),
    max_leaves=8,
)


def is_same(a, b):
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


@given(cell)
def test_a_row_comes_back_as_it_was(x):
    assert is_same(cells.load_row(cells.dump_row({"c": x}))["c"], x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool"])
def test_arrays_come_back_with_their_dtype(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    back = cells.load_row(cells.dump_row({"c": x}))["c"]
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


def test_a_decimal_comes_back():
    assert cells.load_row(cells.dump_row({"c": Decimal("1.10")}))["c"] == Decimal("1.10")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (2**60, float(2**60)),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        ((1, "a"), (1.0, "a")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Decimal("1.0"), 1),
        (np.array([1.0, 2.0]), np.array([1, 2])),
        (np.array([0.0]), np.array([-0.0])),
    ],
)
def test_equal_keys_have_one_digest(a, b):
    assert cells.key_digest(a) == cells.key_digest(b)


def test_different_keys_have_different_digests():
    keys = [
        *("", "a", "A", "1", "1.0", "true", "null", '"a"', "a\x00", " a"),
        *(0, 1, -1, 0.5, 1e300, math.inf, -math.inf, 2**70),
        *(b"", b"a", b"\x00", (), ("a",), ("a", "b"), ("ab",), (("a",), "b"), (1,)),
        *([], [1], ["a"], {}, {"a": 1}, {"a": "1"}),
        *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)),
        *(np.array([1.0]), np.array([1.0, 0.0]), np.array([[1.0]])),
    ]
    assert len({cells.key_digest(key) for key in keys}) == len(keys)


@given(st.lists(st.tuples(cell, cell), max_size=3))
def test_digests_agree_with_equality(pairs):
    for a, b in pairs:
        try:
            result = cells.key_digest(a) == cells.key_digest(b)
        except ArgumentError:
            continue
        assert result == (a == b)


def test_digests_of_an_array_are_those_of_its_rows():
    rows = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    assert cells.key_digests(rows) == [cells.key_digest(row) for row in rows]


@pytest.mark.parametrize(
    "key", [None, math.nan, np.float32("nan"), (1, math.nan), np.array([math.nan])]
)
def test_a_key_that_equals_nothing_is_refused(key):
    with pytest.raises(ArgumentError, match=r"NaN|None"):
        cells.key_digest(key)


@pytest.mark.parametrize("cell", [{"\ud800": 1}, [{"a\ud800": {}}], ("a", "\ud800"), ["\ud800"]])
def test_half_a_character_is_refused_however_deep(cell):
    for write in (cells.to_json_value, cells.key_digest):
        with pytest.raises(ArgumentError, match="lone surrogate"):
            write(cell)


@pytest.mark.parametrize("cell", [np.array(3), np.array(2.5, np.float32), np.array("M8", object)])
def test_an_array_of_no_axes_is_its_number(cell):
    assert cells.load_row(cells.dump_row({"value": cell})) == {"value": cell.item()}


def test_what_cannot_be_kept_is_said():
    with pytest.raises(DtypeError, match="a set cannot be stored"):
        cells.dump_row({"c": {1, 2}})
    with pytest.raises(DtypeError, match="names of a stored mapping must be text"):
        cells.dump_row({"c": {1: 2}})
    with pytest.raises(ArgumentError, match="lone surrogate at position 1"):
        cells.dump_row({"c": "a\ud800"})
    with pytest.raises(ArgumentError, match="lone surrogate"):
        cells.key_digest("\ud800")


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), 10**5000, Decimal("1E+1000000"), Decimal("-1E+400")],
    ids=["400", "-400", "5000", "decimal 1000000", "decimal -400"],
)
def test_a_number_beyond_floats_is_refused_at_once(number):
    with pytest.raises(ArgumentError, match="too large for a float") as caught:
        cells.key_digest(number)
    assert len(str(caught.value)) < 200
    for cell in (number, (number,), [number], {"a": number}):
        with pytest.raises(ArgumentError, match="too large for a float"):
            cells.dump_row({"a": cell})


def test_numbers_of_the_size_of_floats_are_kept():
    for number in (10**308, -(10**308), Decimal("1E+308"), Decimal("1E-1000000"), 2**64):
        assert cells.load_row(cells.dump_row({"a": number}))["a"] == number
        assert cells.key_digest(number) == cells.key_digest(type(number)(number))


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: [x], lambda x: {"a": x}])
def test_cells_that_are_nested_too_deeply_are_refused(wrap):
    cell: object = 1
    for _ in range(100_000):
        cell = wrap(cell)
    for look in (cells.key_digest, lambda x: cells.dump_row({"a": x})):
        with pytest.raises(ArgumentError, match="nested too deeply"):
            look(cell)
    assert len(quote_cell(cell)) < 100


@given(
    st.lists(st.tuples(cell, st.text(st.characters(exclude_categories=["Cs"]))), max_size=5)
    | st.lists(st.tuples(st.integers(), st.text()), max_size=5)
    | st.lists(st.tuples(st.floats(allow_nan=False), st.text('a%$é\n"\\'))),
    st.sampled_from(["value", "a %s 100%", '"é"']),
)
def test_columns_make_the_records_that_rows_make(rows, name):
    columns = {name: [row[0] for row in rows], "text": [row[1] for row in rows]}
    each = [dict(zip(columns, row, strict=True)) for row in rows]
    try:
        want = [cells.dump_row(row) for row in each]
    except ArgumentError as refused:
        with pytest.raises(ArgumentError) as error:
            cells.dump_rows(columns)
        assert type(error.value) is type(refused)
        return
    assert cells.dump_rows(columns) == want


def test_digests_of_vectors_without_numbers():
    assert cells.key_digests(np.empty((2, 0))) == [cells.key_digest(np.empty(0))] * 2
    assert cells.vector_digests(np.empty((2, 0))) == [cells.vector_digest(np.empty(0))] * 2


def test_equal_vectors_have_one_digest_whatever_their_type():
    kinds = (np.int8, np.int64, np.float16, ">f4", np.float32, np.float64, np.longdouble)
    full = [np.array([[1, 0, -3], [4, 5, 6]]).astype(kind) for kind in kinds]
    full += [np.array([[1, -0.0, -3], [4, 5, 6]]), np.asfortranarray(full[4])]
    assert len({tuple(cells.vector_digests(rows)) for rows in full}) == 1
    for rows in full:
        assert cells.vector_digests(rows) == [cells.vector_digest(row) for row in rows]


def test_vectors_are_known_by_their_float32_numbers():
    wide = np.array([[0.1, 1e30], [0.1, 2.0], [0.3, 1e-40]])
    rows = [*wide, *wide.view("f4"), *wide[::2, :1], *wide.clip(-9, 9)[:1]]
    rows += [np.array(x) for x in ([math.inf], [-math.inf], [0.0], [0.0, 0.0])]
    assert len({cells.vector_digest(row) for row in rows}) == len(rows)
    assert cells.vector_digests(wide) == cells.vector_digests(wide.astype("f4"))
    assert cells.vector_digests(wide) == [cells.vector_digest(row) for row in wide]


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_vectors_with_nan_are_refused(kind):
    with pytest.raises(ArgumentError, match="NaN"):
        cells.vector_digests(np.array([[1, 2]] * cells.VECTORS_PER_BLOCK + [[1, math.nan]], kind))


def test_many_vectors_are_digested_as_each_is():
    rows = np.random.default_rng(0).normal(size=(2 * cells.VECTORS_PER_BLOCK + 1, 3))
    assert cells.vector_digests(rows) == [cells.vector_digest(row) for row in rows]


def test_a_long_double_is_refused_and_reported():
    with pytest.raises(DtypeError, match=r"cast it to float"):
        qkv.Database({"a": np.longdouble(1.5)})
    assert to_jsonable({"x": np.longdouble(1.5)}) == {"x": "1.5"}
