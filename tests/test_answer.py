"""Answers: what they say of themselves, as text, table, page and picture."""

from __future__ import annotations

import datetime
import json
import math
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pandas
import polars
import pytest

from qkv import Database, weightings
from qkv.answer import Answer
from qkv.answer_backend import DetachedBackend, Row, ValueWeight
from qkv.errors import CombinationError
from qkv.util.formatting import format_bar, format_one_line, to_jsonable


def build_answer(weights, *, keys=None, values=None, total=None, query="q"):
    keys = keys or [f"k{i}" for i in range(len(weights))]
    values = values or [f"v{i}" for i in range(len(weights))]
    rows = [
        Row(k, v, w, i, {"key": k, "value": v})
        for i, (k, v, w) in enumerate(zip(keys, values, weights, strict=True))
    ]
    p = np.array(weights) / (sum(weights) or 1)
    entropy = float(-sum(x * math.log(x) for x in p if x))
    return Answer(
        query=query,
        value=values[0] if weights else None,
        rows=rows,
        values=[ValueWeight(v, w) for v, w in zip(values, weights, strict=True)],
        lse=0.0,
        total=len(weights) if total is None else total,
        engine="scan",
        score="Dot",
        weighting="Softmax",
        _backend=DetachedBackend(rows, np.array(weights), entropy, None),
    )


def test_effective_rows_of_equal_weights_are_their_number():
    assert build_answer([0.25] * 4).effective_rows == pytest.approx(4)
    assert build_answer([1.0]).effective_rows == 1
    assert build_answer([]).effective_rows == 0


@pytest.mark.parametrize(
    ("weights", "total", "says"),
    [
        ([0.95, 0.05], 2, ": sure (97 %)."),
        ([0.7, 0.3], 2, ": fairly sure (68 %)."),
        ([0.6, 0.4], 2, ": unsure (55 %)."),
        ([0.4, 0.3, 0.3], 100, ": unsure (41 %)."),
        ([0.1] * 10, 10, ": unsure (17 %)."),
    ],
)
def test_explain_says_how_concentrated(weights, total, says):
    text = build_answer(weights, total=total).explain()
    assert says in text
    assert "\n" not in text
    assert "scan" in text
    assert "k0" in text


def test_explain_leaves_out_a_row_that_does_not_count():
    assert "k0 counts 100 %. The" in build_answer([1.0, 5.5e-7], total=2).explain()
    assert "k1 0.06 %" in build_answer([0.9994, 6e-4], total=2).explain()


def test_keys_of_several_columns_are_distinguished_in_a_sentence():
    D = Database({(1.0, 0.2): "king", (0.9, 0.3): "queen", (0.1, 1.0): "apple"})
    explanation = D.ask((1.0, 0.1)).explain()
    assert explanation.startswith("Of 3 rows, (1, 0.2) counts 99.5 %, (0.9, 0.3) 0.5 %.")


def test_a_mean_of_many_rows_is_no_doubt():
    for keys, says in (([0.0], "one row decides"), ([0.0, 9.0, 9.1, 9.2, 9.3, 9.4], "many rows")):
        D = Database([(k, k) for k in keys])
        assert says in D.ask(9.2 if len(keys) > 1 else 0.0, weighting="average").explain()


CLAIMS = ("one row decides", "one key decides", "which decides", "agree")


YEARS = {"The Alchemist": 1988, "The Odyssey": -700, "Emma": 1815, "Dune": 1965}


def test_the_value_of_a_text_key_is_that_of_the_best_key():
    """96 % of the weight on 1988: the value is 1988, and the mean over all rows stands beside."""
    books = Database(YEARS)
    for query, right in (("the alchmist", 1988), ("The Odyssy", -700), ("Emma", 1815)):
        result = books.ask(query)
        assert result.value == right and type(result.value) is float
        assert not result.value_is_mean
        assert result.mean == pytest.approx(result.weights @ [*YEARS.values()], abs=1e-3)
        values = np.array([*YEARS.values()])
        spread = np.sqrt(result.weights @ (values - result.mean) ** 2)
        assert result.spread == pytest.approx(spread, rel=1e-4)
        assert f"around {result.mean:.4g}" in result.explain()
        assert books.attend(query) == pytest.approx(result.mean, rel=1e-5)
    exact = books.ask("The Alchemist")
    assert exact.exact and "equals a key, which decides" in str(exact)


@pytest.mark.parametrize(
    "weighting",
    ["hard", "average", "raw", "sigmoid", "sparsemax", "entmax15", weightings.TopK(2)],
    ids=str,
)
def test_a_weighting_does_not_change_which_value_it_is(weighting):
    books = Database(YEARS)
    result = books.ask("the alchmist", weighting=weighting)
    assert result.value == 1988.0
    assert result.mean == pytest.approx(float(books.attend("the alchmist", weighting=weighting)[0]))
    assert Database(YEARS).ask("The Alchemist", weighting=weighting, top=1).value == 1988.0
    numbers = Database({float(i): float(i**2) for i in range(5)})
    assert (pooled := numbers.ask(2.2, weighting=weighting)).value == pooled.mean


def test_rows_with_the_best_key_are_averaged():
    rows = [("tea pot", 4.0), ("knife", 9.0), ("tea pot", 7.0), *[("tea pot", 7.0)] * 20]
    for top in (1, 5, 30):
        D = Database(rows, key="name", value="price")
        result = D.ask("tea pott", top=top)
        assert result.value == pytest.approx((4 + 7 * 21) / 22, rel=1e-12)
        assert D.ask("tea pott", where="price > 4", top=top).value == 7.0
        assert D.ask("tea pott", weighting=weightings.TopK(1), top=top).value == result.value
        assert D.ask("tea pott", weighting="average", top=top).value == result.value
        assert result.without(0).value == 7.0
    unique = Database(dict(rows), unique=True)
    assert unique.ask("tea pott", top=1).value == 7.0


@pytest.mark.parametrize(
    ("rows", "query", "is_mean"),
    [
        ({1.0: 10.0, 2.0: 40.0}, 1.5, True),
        ({(1.0, 2.0): 10.0, (2.0, 3.0): 40.0}, (1.5, 2.0), True),
        ({("a", 2.0): 10.0, ("b", 3.0): 40.0}, ("a", 3.0), False),
        ({datetime.date(2024, 1, 1): 1.0, datetime.date(2024, 1, 5): 5.0}, "2024-01-02", False),
        ({b"a": 1.0, b"b": 3.0}, b"a", False),
    ],
)
def test_which_keys_have_a_mean_as_value(rows, query, is_mean):
    result = Database(rows).ask(query)
    assert result.value_is_mean is is_mean
    if is_mean:
        assert result.value == result.mean == pytest.approx(result.weights @ [*rows.values()])
    else:
        assert result.value == result.rows[0].value != result.mean
    assert not Database(rows).ask(next(iter(rows)), score="exact").value_is_mean


def test_vectors_and_columns_have_the_value_of_the_best_key():
    vectors = Database(["tea pot", "knife"], np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    result = vectors.ask("tea pott", weighting="average")
    np.testing.assert_array_equal(result.value, np.array([1.0, 2.0]))
    np.testing.assert_allclose(result.mean, [2.0, 3.0])
    assert result.value.dtype == result.mean.dtype
    embedded = Database(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]])).ask(np.eye(2)[0])
    np.testing.assert_array_equal(embedded.value, embedded.mean)
    assert Database({"a": "x"}).ask("a").mean is None


def test_the_answer_of_a_pickle_and_of_a_copy_has_the_mean():
    result = Database(YEARS).ask("the alchmist")
    for other in (pickle.loads(pickle.dumps(result)), deepcopy(result)):
        assert (other.value, other.mean, other.spread) == (1988.0, result.mean, result.spread)
        assert other.confidence_text == result.confidence_text
        assert other.to_dict() == result.to_dict()


@pytest.mark.parametrize(
    ("value", "row", "decides"),
    [
        (1988.0, 1988, True),
        (1987.6, 1988, False),
        (np.array([1.0, 2.0]), np.array([1.0, 2.0]), True),
        (np.array([1.0, 2.1]), np.array([1.0, 2.0]), False),
        ({"x": 1.0, "y": 2.0}, {"x": 1, "y": 2}, True),
        ({"x": 1.0, "y": 2.5}, {"x": 1, "y": 2}, False),
    ],
)
def test_a_row_decides_where_the_value_is_its_own(value, row, decides):
    result = replace(
        build_answer([0.97, 0.03], values=[row, row]),
        value=value,
        mean=value,
        value_is_mean=True,
        values=[],
    )
    assert (result.confidence_text == "one row decides") is decides


def test_a_sum_of_raw_weights_is_no_value_of_a_row():
    result = Database([(1.0, 10.0), (9.0, 1.0)]).ask(1.0, score="dot", weighting="raw")
    assert "decides" not in result.explain()


def test_rows_that_share_a_key_or_a_value_are_one_answer():
    D = Database([("tea pot", "tea")] * 8 + [("knife", "tools")])
    assert D.ask("tea pott").confidence_text == "sure (99 %)"
    names = Database(
        [("tea pot", "tea"), ("teapot", "tea"), ("tea-pot", "tea"), ("knife", "tools")]
    )
    assert names.ask("tea pot").values[0].weight > 0.9
    assert names.ask("tea pot").confidence_text == "sure (99 %)"
    prices = Database([("tea pot", 5.0)] * 8 + [("knife", 9.0)])
    for weighting in ("softmax", weightings.TopK(8)):
        result = prices.ask("tea pot", weighting=weighting)
        assert result.value == 5 and result.confidence_text == "sure (99 %)"
    alike = Database([(float(i), 7.0) for i in range(8)])
    assert alike.ask(4.0, weighting="average").confidence_text == "rows with the same value decide"
    numbers = Database([(1.0, 4.0), (1.0, 6.0), (9.0, 9.0)])
    assert numbers.ask(1.0, weighting=weightings.TopK(2)).confidence_text == "one key decides"


def test_one_key_with_many_values_says_so():
    D = Database([("tea pot", f"kind {i}") for i in range(8)] + [("knife", "tools")])
    result = D.ask("tea pot")
    assert result.confidence_text == "unsure (19 %), one key has several values"


def test_confidence_is_the_formula_of_the_shares_of_the_values():
    """σ(a + b logit(p₁) + c t ln(p₁ / p₂)), with the part t of p₁ of the heaviest row."""
    rows = [("tea pot", 5.0), ("teapot", 5.0), ("tea spoon", 3.0), ("knife", 9.0), ("fork", 9.0)]
    for values in (lambda x: x, str):
        D = Database([(key, values(value)) for key, value in rows])
        for query in ("tea pot", "tea", "spon", "kniffe"):
            result = D.ask(query)
            totals = [
                sum(w for w, (_, v) in zip(result.weights, rows, strict=True) if values(v) == x)
                for x in {values(v) for _, v in rows}
            ]
            p1, p2, _ = np.clip(np.array(sorted(totals)[::-1], float), 1e-6, 1 - 1e-4)
            if result.value != values(rows[int(result.weights.argmax())][1]):
                continue  # the best row has not the heaviest value
            if values is not str and p1 != pytest.approx(result._value_shares[0], rel=1e-4):
                continue
            t = min(result.weights.max() / p1, 1)
            logit = -0.3 + 0.6 * math.log(p1 / (1 - p1)) + 0.65 * t * math.log(p1 / p2)
            expected = min(1 / (1 + math.exp(-logit)), 0.99)
            assert result.confidence == pytest.approx(expected, rel=1e-3)
            assert f"({100 * result.confidence:.0f} %)" in result.explain()


def test_confidence_grows_with_the_share_and_with_the_distance_to_the_next():
    said = [build_answer([x, 0.2]).confidence for x in (0.3, 0.5, 0.7, 0.8)]
    assert said == sorted(said) and len({*said}) == 4
    said = [build_answer([0.5, x]).confidence for x in (0.5, 0.3, 0.1, 0.01)]
    assert said == sorted(said) and len({*said}) == 4
    assert build_answer([1.0]).confidence == 0.99
    alone = build_answer([0.3] + [0.001] * 700)  # none of the others comes near
    both = [ValueWeight("b", 0.7), ValueWeight("a", 0.3)]
    # Many light rows that agree are less convincing than one that has all this weight.
    light = replace(build_answer([0.1, *[0.001] * 600, 0.1, 0.1, 0.1]), values=both)
    heavy = replace(build_answer([0.7, 0.3]), values=both)
    assert alone.confidence > 0.9 and light.confidence < heavy.confidence - 0.05


def test_what_has_no_confidence():
    numbers, names = Database({1.0: 2.0, 3.0: 4.0}), Database({"a": 1.0, "b": 2.0})
    assert numbers.ask(1.2).confidence is None  # its spread says more
    assert names.ask("a", weighting="hard").confidence is None
    assert names.ask("a", weighting="hard").confidence_text == "one row decides"
    assert names.ask("a", weighting="raw").confidence is None
    assert names.ask("a", weighting="raw").confidence_text == "sure"
    assert build_answer([]).confidence is None and build_answer([]).confidence_text == "no answer"
    for result in (numbers.ask(1.2), names.ask("a")):
        assert result.to_dict()["confidence"] == result.confidence


def test_sureness_counts_rows_beyond_those_that_are_named():
    D = Database([(1.0, 5.0)] * 40 + [(9.0, 9.0)] * 2)
    few = D.ask(1.0, weighting=weightings.TopK(40), top=2)
    assert len(few.rows) == 2 and few.confidence_text == "one key decides"
    assert pickle.loads(pickle.dumps(few)).confidence_text == few.confidence_text


def test_a_key_that_is_a_vector_is_shown_as_the_number_of_its_row():
    answer = Database(np.eye(3), [10.0, 20.0, 30.0]).ask(np.eye(3)[1])
    assert [row.displayed_key for row in answer.rows] == ["row 1", "row 0", "row 2"]
    assert "row 1" in str(answer) and "row 1" in answer._repr_html_()
    assert answer.explain().startswith("Of 3 rows, row 1 counts")
    assert answer.to_dict()["rows"][0]["key"] == [0, 1, 0]


def test_the_hint_is_in_the_dictionary():
    D = Database(np.eye(3)[:2], ["x", "y"])
    result = D.ask([0.0, 0.0, 1.0], score=None)
    assert result.to_dict()["hint"] == result.hint != ""
    assert Database({"a": 1.0}).ask("a").to_dict()["hint"] == ""


def test_the_terminal_shows_bars_and_the_rest():
    text = str(build_answer([0.5, 0.25], total=1002))
    assert text.splitlines() == [
        "q → v0",
        "  0.500 ████████████             k0  v0",
        "  0.250 ██████                   k1  v1",
        "  0.250 ██████                   1,000 more rows",
        "  effective rows 1.9 of 1,002",
    ]
    assert repr(build_answer([1.0])) == str(build_answer([1.0]))


def test_weights_that_are_no_shares_are_shown_as_numbers():
    D = Database({float(i): float(i) for i in range(10)})
    all_count = D.ask(4.0, score="constant", weighting="raw")
    assert [line.split()[0] for line in str(all_count).splitlines()[1:]] == ["1.000"] * 5 + [
        "…",
        "effective",
    ]
    assert "5 more rows" in str(all_count)
    explanation = all_count.explain()
    assert explanation.startswith("Of 10 rows, 0 weighs 1.000, 1 1.000.")
    assert "%" not in explanation and "many rows" in explanation and "around" not in explanation
    assert len(all_count.plot().axes[0].patches) == 5  # the others' share of 1 means nothing
    near = D.ask(4.2, score="epanechnikov", weighting="raw")
    assert "more row" not in str(near) and near.confidence_text == "a sum of a few rows"
    named = Database({"a": "x", "b": "y", "ab": "x"}).ask("a", score="dot", weighting="raw")
    assert not named.exact and "%" not in named.explain()
    assert Database({"a": "x", "b": "y"}).ask("a", score="exact", weighting="raw").exact


def test_large_and_negative_weights_line_up():
    D = Database({1.0: 3.0, -2.0: 5.0, 1e6: 2.0})
    lines = str(D.ask(-1e6, score="dot", weighting="raw")).splitlines()[1:-1]
    assert [line.split()[0] for line in lines] == ["-8.889e+11", "4.444e+11", "4.444e+11"]
    assert len({line.index("█") for line in lines}) == 1
    assert [line.count("█") for line in lines] == [24, 12, 12]


def test_wide_and_combining_letters_line_up():
    lines = str(build_answer([0.5, 0.3, 0.2], keys=["日本", "e\u0301", "abcd"])).splitlines()[1:-1]
    assert [line[33:] for line in lines] == ["日本  v0", "e\u0301     v1", "abcd  v2"]


def test_joiners_of_words_and_pictures_are_no_control_characters():
    joined = ["می\u200cخواهم", "👩\u200d👧", "❤\ufe0f\u200d🔥"]
    assert [format_one_line(x) for x in joined] == joined
    assert format_one_line("a\u200db\u200c") == r"a\u200db\u200c"  # they would be invisible


def test_rows_that_three_digits_cannot_show_join_the_rest():
    lines = str(build_answer([0.99, 0.0004, 0.0003], total=3)).splitlines()
    assert lines[2].endswith("2 more rows")
    lines = str(build_answer([0.99, 0.004, 0.0006], total=3)).splitlines()
    assert ["k1" in lines[2], "k2" in lines[3]] == [True, True], "three digits show these"


def test_json():
    fields = build_answer([0.75, 0.25], values=[1.5, float("nan")]).to_dict()
    assert json.loads(json.dumps(fields)) == {
        "query": "q",
        "value": 1.5,
        "mean": None,
        "value_is_mean": False,
        "rows": [
            {"key": "k0", "value": 1.5, "weight": 0.75, "index": 0},
            {"key": "k1", "value": None, "weight": 0.25, "index": 1},
        ],
        "entropy": pytest.approx(0.5623351),
        "effective_rows": pytest.approx(1.754765),
        "total": 2,
        "missing": 0,
        "exact": False,
        "error_bound": 0.0,
        "rows_read": 0,
        "statistical": False,
        "engine": "scan",
        "hint": "",
        "confidence": pytest.approx(0.74522, abs=1e-4),
        "confidence_text": "fairly sure (75 %)",
        "expected_error": None,
    }


def test_frames_have_all_columns():
    D = Database.from_columns({"a": ["x", "y"], "b": [1, 2], "c": [True, False]}, value="b")
    frame = D.ask("x").to_frame()
    assert isinstance(frame, pandas.DataFrame | polars.DataFrame)
    assert list(frame.columns) == ["key", "value", "weight", "index", "a", "b", "c"]
    assert list(frame["key"]) == ["x", "y"]


def test_data_does_not_steer_the_terminal():
    owned = "\x1b]0;owned\x07\x9b31m\u202e"
    D = Database({f"a{owned}": owned, f"b{owned}": {"c": owned}}, value=f"v{owned}")
    answer = D.ask(f"a{owned}")
    for text in (str(answer), repr(answer), answer.explain(), repr(D)):
        assert text.replace("\n", "").isprintable() and r"\x1b]0;owned\x07" in text
    assert answer.rows[0].value == owned


def test_the_page_needs_nothing_else_and_escapes(tmp_path):
    a = build_answer([0.5, 0.5], keys=["<script>alert(1)</script>", "b"], query="<b>q</b>")
    page = a.to_html()
    assert a.to_html(tmp_path / "a.html") is None
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page
    assert page.count("<script") == 2  # the data and the module, which no row can follow
    assert "<script>alert" not in page and "<b>q" not in page
    assert "&lt;script&gt;" in page
    assert page.count("://") == page.count("http://www.w3.org/2000/svg")
    # Where scripts do not run, it is what it was.
    assert f"<noscript>{a._repr_html_()}</noscript>" in page
    assert "width:50.0%" in page


def test_the_glance_takes_the_colours_of_a_notebook_light_or_dark():
    style = build_answer([0.5, 0.5])._repr_html_().partition("</style>")[0]
    assert re.findall(r"[{;]color:", style) == []


def test_the_picture(tmp_path):
    figure = build_answer([0.5, 0.2], keys=["$x", "b"], total=9).plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.5, 0.2, 0.3])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$x", "b", "7 other rows"]
    with pytest.raises(CombinationError, match="nothing to draw"):
        build_answer([]).plot()


def test_letters_that_a_font_lacks_are_reported_once(tmp_path):
    with pytest.warns(UserWarning) as caught:
        build_answer([0.5, 0.5], keys=["さようなら世界", "b"]).plot(tmp_path / "a.png")
    (one,) = caught
    assert one.filename == __file__
    assert re.match(
        "the font DejaVu Sans lacks さようなら世界, which are drawn as boxes", str(one.message)
    )


def test_an_answer_of_nothing():
    a = build_answer([], total=5)
    assert "nothing" in str(a)
    assert "No row answers q" in a.explain()
    assert "nothing" in a.to_html()
    assert a.to_dict()["value"] is None


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (1 / 3, "0.333333"),
        ("a\n b", "a b"),
        ("x" * 50, "x" * 39 + "…"),
        ({"a": 1.5, "b": "c"}, "a: 1.5, b: c"),
        (("a", 2), "a, 2"),
        (None, "null"),
        (b"\x01", '"01"'),
        (datetime.date(2024, 1, 5), "2024-01-05"),
        (datetime.datetime(2024, 1, 5, 12), "2024-01-05T12:00:00"),
        (datetime.time(12, 30), "12:30:00"),
        (np.array([1.0, 2.0]), "[1. 2.]"),
    ],
)
def test_short(x, text):
    assert format_one_line(x) == text


def test_bars_and_json_of_anything():
    assert [format_bar(w, 2) for w in (0, 1 / 16, 0.5, 1, 2, -1)] == ["", "▏", "█", "██", "██", ""]
    assert to_jsonable({"a": (np.float32(1), np.arange(2), b"\xff", math.inf)}) == {
        "a": [1.0, [0, 1], "ff", "inf"]
    }


def test_values_of_several_types_make_a_frame():
    result = Database([("x", 1.5), ("z", "t")]).ask("x").to_frame()
    assert list(result["value"]) == [1.5, "t"]


def test_rows_whose_keys_are_vectors_compare_by_their_numbers():
    D = Database(np.eye(2), np.array([[10.0], [20.0]]))
    first, again = (D.ask(np.array([1.0, 0.0])).rows for _ in range(2))
    assert first == again and first[0] != first[1] and first[0] != "row"


def test_the_weights_of_one_answer_do_not_wait_for_those_of_another():
    # As where a client asks a server of its own process, whose answer must be made meanwhile.
    both = threading.Barrier(2)

    class Met(DetachedBackend):
        def compute_weights(self):
            both.wait(timeout=300)
            return super().compute_weights()

    behind = Met([], np.ones(1), 0.0, None)
    result = [replace(build_answer([1.0]), _backend=behind) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert [list(x) for x in pool.map(lambda one: one.weights, result)] == [[1.0], [1.0]]
