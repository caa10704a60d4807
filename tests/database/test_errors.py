"""What cannot be kept, asked or opened is said, in a sentence."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.database.errors import KeyNotFoundError, StoreUnwritableError, VersionNotFoundError
from qkv.errors import ArgumentError, CombinationError, DtypeError, FrameworkError, ShapeError

TEXT = qkv.Database({"a": 1.0, "b": 2.0})
NUMBERS = qkv.Database({1: 1.0, 2: 2.0})
LISTS = qkv.Database([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [1.0, 2.0])
VECTORS = qkv.Database(np.eye(3), np.arange(3.0))
DATES = qkv.Database([(datetime.date(2020, 1, 1), 1.0), (datetime.date(2021, 1, 1), 2.0)])
LEARNED = qkv.Database({"a": 1.0, "b": 2.0}, encoder="characters")
LEARNED.learn([("aa", "a"), ("bb", "b")], epochs=1)
TUPLES = qkv.Database.from_columns({"a": ["x", "y"], "b": ["p", "q"], "v": [1, 2]}, key=("a", "b"))


@pytest.mark.parametrize(
    ("made", "query", "error", "says"),
    [
        (TEXT, 5, DtypeError, r"^query 0 must be text, like the keys, not 5 \(int\): pass '5'$"),
        (TEXT, None, ArgumentError, "^query 0 must not be None$"),
        (NUMBERS, None, ArgumentError, "^query 0 must not be None$"),
        (NUMBERS, datetime.date(2020, 6, 1), DtypeError, "^query 0 must be a number, not datetime"),
        (DATES, None, ArgumentError, "^query 0 must not be None$"),
        (DATES, 7, DtypeError, "^query 0 must be a date or ISO text, like the keys, not 7"),
        (DATES, "June", DtypeError, "^query 0 must be a date or ISO text.* not 'June'"),
        (LEARNED, None, ArgumentError, "^query 0 must not be None$"),
        (LEARNED, ["a", None], ArgumentError, "^query 1 must not be None$"),
        (TEXT, ["a", 3], DtypeError, "^query 1 must be text"),
        (TEXT, "", ArgumentError, "^query 0 is empty.*: pass some text$"),
        (TEXT, ["a", " \n"], ArgumentError, "^query 1 is empty"),
        (TUPLES, "", ArgumentError, "^query 0 is empty"),
        (TUPLES, {}, ArgumentError, "^query 0 is empty.*: pass a value for 'a' or 'b'$"),
        (NUMBERS, "a", DtypeError, "^query 0 must be a number, not 'a'$"),
        (NUMBERS, [1, "a"], DtypeError, "^query 1 must be a number"),
        (NUMBERS, 10**400, ArgumentError, "^query 0 is a number of about 401 digits: too large"),
        (NUMBERS, float("nan"), ArgumentError, "^query 0 is not a finite number$"),
        (VECTORS, "a", DtypeError, "^query must be a vector of numbers"),
        (VECTORS, [[1, 2], [1]], DtypeError, "^query must be a vector of numbers"),
        (
            VECTORS,
            [1, 2],
            ShapeError,
            "^query 0 has 2 numbers, but the keys are vectors of 3 numbers$",
        ),
        (LISTS, [[1, 2], [1]], ShapeError, "^query 1 has 1 number where query 0 has 2$"),
        (NUMBERS, (1, 2), ShapeError, "^query 0 has 2 numbers, but the keys have 1 each$"),
        (
            NUMBERS,
            np.ones((2, 3)),
            ShapeError,
            r"^query has shape \(2, 3\), but each key is one num",
        ),
        (VECTORS, 5, DtypeError, "^query must be a vector, not the number 5"),
        (TEXT, np.array(5), DtypeError, "^query must be text, like the keys, or their vector"),
        (TUPLES, ("x",), ShapeError, "^query 0 must be a tuple of 2 columns"),
    ],
)
def test_a_query_of_the_wrong_type_is_called_a_query(made, query, error, says):
    with pytest.raises(error, match=says):
        made.ask(query)


def test_numbers_in_a_column_are_one_query_each_and_a_table_is_none():
    column = np.array([[1.0], [1.5]])
    assert [x.value for x in NUMBERS.ask(column)] == [NUMBERS.ask(x).value for x in (1.0, 1.5)]
    assert NUMBERS.attend(column).shape == (2, 1)
    for table in (np.ones((2, 3)), np.ones((2, 1, 1))):
        with pytest.raises(ShapeError, match=r"query has shape .*expected \(queries,\)"):
            NUMBERS.attend(table)


def test_a_number_is_asked_as_its_text_too():
    assert NUMBERS.ask("1.5").value == NUMBERS.ask(1.5).value
    assert [one.query for one in NUMBERS.ask(["2", 1, " 1.5 "])] == [2, 1, 1.5]


def test_a_date_is_asked_in_every_form():
    day = datetime.date(2020, 6, 1)
    forms = [day, "2020-06-01", "2020-06-01T00:00", np.datetime64("2020-06-01")]
    many = np.array(["2020-06-01", "2020-06-01"], "M8[D]")
    answers = [DATES.ask(form) for form in forms] + DATES.ask(many)
    means = [answer.mean for answer in answers]
    assert means == [means[0]] * 6 and round(means[0], 3) == 1.416
    assert [answer.value for answer in answers] == [1.0] * 6
    times = qkv.Database(np.array(["2020-01-01T03", "2021-01-01T05"], "M8[h]"), [1.0, 2.0])
    assert times[np.datetime64("2020-01-01T03")] == 1.0
    assert times[datetime.datetime(2021, 1, 1, 5)] == 2.0
    times.update(np.datetime64("2021-01-01T05"), 4.0)
    times.add(np.datetime64("2022-01-01"), 8.0)
    assert [*times.items()][1:] == [
        (datetime.datetime(2021, 1, 1, 5), 4.0),
        (datetime.datetime(2022, 1, 1), 8.0),
    ]


def test_the_nearest_keys_are_each_named_once():
    made = qkv.Database([("Aloe", 1), ("Aloe", 2), ("Ficus", 3)])
    with pytest.raises(KeyNotFoundError, match=r"nearest are 'Aloe', 'Ficus'$") as caught:
        made["aloe"]
    assert caught.value.nearest_keys == ["Aloe", "Ficus"]
    assert qkv.Database({"Aloe": 1}).ask("Aloe").engine == "scan of 1 row in 1 segment"


@pytest.mark.parametrize("precision", ["int8", "float16"])
def test_an_error_for_a_rounded_key_names_the_next_step(precision):
    keys = np.random.default_rng(0).normal(size=(5, 40))
    made = qkv.Database(keys, np.arange(5.0), precision=precision)
    assert made[keys[2]] == 2.0
    with pytest.raises(
        KeyNotFoundError, match=r"was stored with these numbers after rounding: .* that were added$"
    ):
        made[made.ask(keys[2]).rows[0].key]
    with pytest.raises(KeyNotFoundError, match="the nearest are") as caught:
        made[keys[2] + 0.5]
    assert "\n" not in str(caught.value)


def test_an_error_for_a_table_of_one_column_names_the_next_step():
    with pytest.raises(
        ArgumentError, match=r"no columns for the value besides the key, t: .* value='t'$"
    ):
        qkv.Database.from_columns({"t": ["a", "b"]})
    assert qkv.Database.from_columns({"t": ["a", "b"]}, value="t").ask("b").value == "b"


def test_an_empty_question_is_asked_where_a_key_is_empty():
    made = qkv.Database({"": "nobody", "Li": "Mu"})
    assert made.ask("").value == made[""] == "nobody"
    with pytest.raises(KeyNotFoundError, match=r"^no row has the key ''$"):
        TEXT[""]
    with pytest.raises(ArgumentError, match=r"^query 0 is empty"):
        TEXT.attend("")


@pytest.mark.parametrize("key", [[1], {"a": 1}, 10**400, "x", ["a"], object()])
def test_an_absent_key_is_said_in_a_few_words(key):
    key = key * 400_000 if key == "x" else key
    for made in (TEXT, NUMBERS, VECTORS):
        with pytest.raises(KeyNotFoundError) as caught:
            made[key]
        assert len(str(caught.value)) < 300
        assert key not in made and made.get(key, "none") == "none"


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"k": ["a"], "v": np.ones((1, 2, 3))}, ShapeError, "column 'v' has shape"),
        ({"k": ["a"], "v": 5}, DtypeError, "column 'v' must be a list of cells, not 5"),
        ({"k": ["a"], 1: [1], "1": [2]}, ArgumentError, "the same name"),
        ({"k": ["a"], "v": [1, 2]}, ShapeError, "equal lengths"),
        ({"k": [10**400], "v": [1]}, ArgumentError, "store it as text"),
    ],
)
def test_columns_that_are_none(columns, error, says):
    with pytest.raises(error, match=says):
        qkv.Database.from_columns(columns, key="k")


def test_arrays_of_text_dates_and_objects_are_cells():
    days = np.array(["2020-01-01", "NaT", "2021-06-01"], "M8[ns]")
    made = qkv.Database.from_columns(
        {"k": np.array(["a", "b", "c"]), "day": days, "v": np.array([1, None, "x"], object)},
        key="k",
        value="day",
    )
    assert made.describe() == {
        "k": {"type": "text", "missing": 0},
        "day": {"type": "date", "missing": 1},
        "v": {"type": "number, text", "missing": 1},
    }
    assert made.ask("a", where="day > '2020-12-31'").rows[0].key == "c"


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("a\0b", ArgumentError, "path contains a NUL character"),
        ("a\ud800", ArgumentError, "path contains a lone surrogate"),
        ("a" * 5000, StoreUnwritableError, "cannot be accessed"),
        (5, DtypeError, "path must be the name of a folder, not a int"),
    ],
)
def test_paths_that_are_none(path, error, says):
    with pytest.raises(error, match=says):
        qkv.open(path)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: TEXT.at(None), DtypeError, "^at: version must be an int"),
        (lambda: TEXT.at("1"), DtypeError, "^at: version must be an int.*'1'"),
        (lambda: TEXT.at(10**30), VersionNotFoundError, "does not exist: the newest is 1"),
        (lambda: TEXT.compact(20), DtypeError, "^progress must be a function.*not 20"),
        (lambda: qkv.Database(key=None), DtypeError, "^key must be the name of a column"),
        (lambda: qkv.Database(value=5), DtypeError, "^value must be the name of a column.*5"),
        (lambda: qkv.Database({"a": 1}, key=[["a"]]), DtypeError, "^key must be the name"),
        (lambda: TEXT.reindex(key=b"x"), DtypeError, "^key must be the name of a column"),
        (lambda: TEXT.calibrate(None), DtypeError, "^calibrate: pairs must be a list"),
        (lambda: TEXT.value_of_rows(5), DtypeError, "^value_of_rows: pairs must be a list.*int"),
        (lambda: TEXT.learn(None), DtypeError, "^learn: pairs must be a list.*NoneType"),
        (lambda: TEXT.calibrate([], None), DtypeError, "^calibrate: coverage must be a number"),
        (lambda: TEXT.calibrate([], 2), ArgumentError, "^calibrate: coverage must be between"),
        (lambda: TEXT.extend(None), DtypeError, "^rows must be a list of mappings.*NoneType"),
        (lambda: TEXT.extend({"key": "c"}), DtypeError, r"^rows must be a list.*pass \[rows\]"),
        (lambda: TEXT.learn({"aa": "c"}), ArgumentError, r"^learn: pairs\[0\] has .* key 'c'"),
        (lambda: qkv.open("x.qkv", mode="r"), TypeError, "'mode': pass create=False"),
        (lambda: TEXT.extend(["key"]), DtypeError, "a mapping of columns, not str"),
        (
            lambda: TEXT.add(["c"], np.array(3.0)),
            DtypeError,
            "^values must be a list with one value per key",
        ),
        (lambda: TEXT.ask("a").above("x"), DtypeError, "^above: weight must be a number.*'x'"),
        (lambda: TEXT.rows(count="2"), ArgumentError, "^count must be a number of rows"),
        (lambda: TEXT.rows(count=""), ArgumentError, "^count must be a number of rows"),
        (lambda: qkv.Database.from_columns("ab"), DtypeError, "^columns must be a mapping.*str"),
        (lambda: qkv.Database.from_columns(5), DtypeError, "^columns must be a mapping.*int"),
        (lambda: qkv.Database.from_source("x.csv", missing=5), DtypeError, "^missing must be"),
        (lambda: TEXT[np.array(["a"])], KeyNotFoundError, "no row has the key"),
        (lambda: VECTORS[np.array(["a"])], KeyNotFoundError, "no row has the key"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: qkv.Database({"a": 1}, path="x.qkv"), "'path'. Known.*from_columns.*qkv.open"),
        (lambda: qkv.Database({"a": 1}, encodr="text"), "'encodr': did you mean 'encoder'"),
        (lambda: qkv.open("x.qkv", uniqe=True), "'uniqe': did you mean 'unique'"),
        (lambda: qkv.Database.from_columns({"a": [1]}, keys="a"), "'keys': did you mean 'key'"),
        (lambda: qkv.Database.from_source("x.csv", vlaue="a"), "^from_source.*'value'"),
        (lambda: TEXT.ask("a", scor="dot"), "^ask.. got .* 'scor': did you mean 'score'"),
        (lambda: TEXT.attend("a", top=3), "^attend.. got .* 'top'"),
        (lambda: TEXT.learn([], epoch=3), "^learn.. got .* 'epoch': did you mean 'epochs'"),
        (lambda: TEXT.calibrate([], wieghting="hard"), "did you mean 'weighting'"),
    ],
)
def test_an_argument_by_a_wrong_name_is_named(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_a_score_or_weighting_of_another_framework_is_refused_as_attend_does():
    torch = pytest.importorskip("torch")
    key = np.random.default_rng(0).normal(size=(5, 3))
    D, one = qkv.Database(key, key), torch.tensor(1.5, dtype=torch.float64)
    for options in ({"weighting": weightings.Softmax(one)}, {"score": scores.Gaussian(one)}):
        says = f"query is an array of numpy but {next(iter(options))} is one of torch: convert"
        for function in (qkv.attend, D.ask, D.attend):
            inputs = (key, key, key) if function is qkv.attend else (key[:1],)
            with pytest.raises(FrameworkError, match=says):
                function(*inputs, **options)
        assert torch.is_tensor(D.attend(torch.tensor(key), **options))


def test_a_store_keeps_the_columns_of_its_first_rows(tmp_path):
    path = tmp_path / "a.qkv"
    for _ in range(2):  # made, and opened again
        with qkv.open(path, key="name", value="major", unique=False) as D:
            D.extend([{"name": "Ann", "major": "art"}])
    for options, says in (
        ({"key": "title"}, "^key: .*a.qkv has name, not title: .*reindex\\("),
        ({"value": ["major", "year"]}, "^value: .*a.qkv has major, not major, year"),
        ({"unique": True}, "^unique: the first rows of .*a.qkv were added without unique="),
        ({"encoder": "exact"}, "^encoder: the keys of .*a.qkv were encoded by text, not exact: "),
        (
            {"precision": "float16"},
            "^precision: the keys of .*a.qkv are stored as int8, not float16",
        ),
    ):
        with pytest.raises(CombinationError, match=says):
            qkv.open(path, **options)
    with qkv.open(path) as D, qkv.open(path, value=None, encoder="text") as same:
        assert len(D) == len(same) == 2
    with qkv.open(tmp_path / "new.qkv", encoder="exact", precision="float16"):
        pass
    with qkv.open(tmp_path / "new.qkv", encoder="words") as D:  # which has no rows yet
        D.add("Ann", "art")
