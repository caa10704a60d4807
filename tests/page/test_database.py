"""The view of a database: examples, choices and edits, against Python's own numbers."""

import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import Database, scores, weightings
from qkv.page import to_html
from qkv.page.views import build_views, suggest_question
from qkv.util.formatting import format_one_line
from tests.browser import wait_until
from tests.page.test_html_file import read_number, weights

pytestmark = pytest.mark.sample_of_module(11)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def view(page: Any, tmp_path: Path) -> Any:
    to_html({"view": "database"}, tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    page.get_by_test_id("row-0-key").wait_for()
    return page


def rows_of(page: Any) -> list[tuple[str, str]]:
    count = page.locator("tbody tr").count()
    at = page.get_by_test_id
    return [
        (at(f"row-{i}-key").input_value(), at(f"row-{i}-value").input_value()) for i in range(count)
    ]


def shown_as(page: Any, D: Any, query: Any, **options: Any) -> None:
    result, rows = D.ask(query, **options), len(D)
    assert weights(page, rows) == pytest.approx(result.weights.tolist(), abs=1e-6)
    assert read_number(page, "answer-effective") == pytest.approx(result.effective_rows, abs=1e-5)
    shown_value = page.get_by_test_id("answer-value").get_attribute("data-value")
    if isinstance(result.value, float):
        assert float(shown_value) == pytest.approx(result.value, rel=1e-6)
    else:
        assert shown_value == result.value


def letters(page: Any) -> Any:
    return Database(rows_of(page), encoder="characters")


def test_six_names_by_their_letters(view: Any) -> None:
    assert rows_of(view)[2] == ("Li", "Mu")
    shown_as(view, letters(view), "Lee")
    view.get_by_test_id("query").fill("Smith")
    shown_as(view, letters(view), "Smith")


def test_students_by_major_and_majors_by_student(view: Any) -> None:
    view.get_by_test_id("example-majors").click()
    shown_as(view, letters(view), "phychology")
    view.get_by_test_id("swap").click()
    assert rows_of(view)[0] == ("John Doe", "psychology")
    shown_as(view, letters(view), "John Doe")


def salaries(page: Any) -> Any:
    return Database([(float(k), float(v)) for k, v in rows_of(page)])


def test_gpa_to_salary_is_a_regression(view: Any) -> None:
    view.get_by_test_id("example-salary").click()
    D = salaries(view)
    assert len(D) == 14
    shown_as(view, D, 3.5)
    view.get_by_test_id("score").select_option("gaussian")
    view.get_by_test_id("score-setting").focus()
    for _ in range(5):
        view.keyboard.press("ArrowLeft")
    width = float(view.get_by_test_id("score-setting-number").input_value())
    shown_as(view, D, 3.5, score=scores.Gaussian(width))
    view.get_by_test_id("score").select_option("epanechnikov")
    view.get_by_test_id("score-setting-number").fill("0.4")
    view.keyboard.press("Tab")
    width = 0.4
    view.get_by_test_id("weighting").select_option("normalized")
    shown_as(view, D, 3.5, score=scores.Epanechnikov(width), weighting="normalized")


def test_books_are_an_excerpt_of_the_table(view: Any) -> None:
    view.get_by_test_id("example-books").click()
    with (ROOT / "examples/data/books.csv").open(encoding="utf-8", newline="") as file:
        all_books = {(row["title"], row["author"]) for row in csv.DictReader(file)}
    assert set(rows_of(view)) <= all_books
    assert view.get_by_test_id("answer-value").inner_text() == "Paulo Coelho"


@pytest.mark.parametrize(
    "weighting",
    ["softmax", "topk", "hard", "average", "raw", "sigmoid", "sparsemax", "entmax15"],
)
def test_every_weighting(view: Any, weighting: str) -> None:
    view.get_by_test_id("weighting").select_option(weighting)
    resolved_weighting: Any = weightings.TopK(2) if weighting == "topk" else weighting
    shown_as(view, letters(view), "Lee", weighting=resolved_weighting)


def test_temperature(view: Any) -> None:
    view.get_by_test_id("temperature").focus()
    view.keyboard.press("End")
    hot = float(view.get_by_test_id("temperature-number").input_value())
    assert hot == 20
    shown_as(view, letters(view), "Lee", weighting=weightings.Softmax(temperature=hot))


@pytest.mark.parametrize("score", ["cosine", "gaussian", "laplace", "boxcar"])
def test_a_score_by_its_name_is_that_of_ask(view: Any, score: str) -> None:
    view.get_by_test_id("score").select_option(score)
    shown_as(view, letters(view), "Lee", score=score)


def test_what_means_nothing_is_said_and_not_shown(view: Any) -> None:
    view.get_by_test_id("score").select_option("cosine")
    view.get_by_test_id("weighting").select_option("normalized")
    assert "can be negative" in view.get_by_test_id("trouble").inner_text()
    assert view.get_by_test_id("answer-value").inner_text() == "–"
    view.get_by_test_id("weighting").select_option("softmax")
    assert view.get_by_test_id("trouble").is_hidden()


def test_rows_are_edited_added_and_removed_by_keyboard(view: Any) -> None:
    view.get_by_test_id("row-0-key").fill("Lee")
    shown_as(view, letters(view), "Lee")
    assert view.get_by_test_id("answer-value").inner_text() == "Aston"
    view.get_by_test_id("row-0-remove").focus()
    view.keyboard.press("Enter")
    assert rows_of(view)[0][0] == "Lipton"
    shown_as(view, letters(view), "Lee")
    view.get_by_test_id("add-row").focus()
    view.keyboard.press("Enter")
    view.keyboard.type("Lee")
    view.keyboard.press("Tab")
    view.keyboard.type("Bruce")
    assert rows_of(view)[-1] == ("Lee", "Bruce")
    shown_as(view, letters(view), "Lee")
    assert view.get_by_test_id("answer-value").inner_text() == "Bruce"


def test_a_screen_reader_hears_the_answer(view: Any) -> None:
    view.get_by_test_id("query").fill("Hu")
    view.wait_for_function(
        """() => document.querySelector("main > div").shadowRoot
          .querySelector("[role=status]").textContent.startsWith("Rachel. Hu has")"""
    )


def test_every_control_has_a_name(view: Any) -> None:
    nameless = view.evaluate(
        """() => {
          const root = document.querySelector("main > div").shadowRoot;
          return [...root.querySelectorAll("input, select, button")]
            .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))
            .map((e) => e.outerHTML);
        }"""
    )
    assert nameless == []


def test_a_weight_and_its_bar_are_on_one_line(view: Any) -> None:
    cell = view.locator("td.weight.first").first
    for width in (360, 670, 720, 770, 820, 1280):
        view.set_viewport_size({"width": width, "height": 800})
        number, bar = (cell.locator(part).bounding_box() for part in (".number", ".bar"))
        assert bar["width"] > 20 and bar["x"] >= number["x"] + number["width"], width
        assert number["y"] < bar["y"] + bar["height"] / 2 < number["y"] + number["height"], width


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_it_fits_the_window(view: Any, width: int) -> None:
    view.set_viewport_size({"width": width, "height": 800})
    for example in ("names", "majors", "salary", "books"):
        view.get_by_test_id(f"example-{example}").click()
        assert view.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_is_the_systems_until_it_is_chosen(view: Any) -> None:
    background = "() => getComputedStyle(document.querySelector('main > div')).backgroundColor"
    view.emulate_media(color_scheme="dark")
    dark = view.evaluate(background)
    view.emulate_media(color_scheme="light")
    light = view.evaluate(background)
    assert dark != light
    toggle = view.get_by_test_id("theme")
    toggle.click()
    toggle.click()
    assert toggle.get_attribute("aria-label") == "Theme: dark"
    assert view.evaluate(background) == dark


def test_a_notebooks_theme_counts_more_than_the_systems(view: Any) -> None:
    box = view.locator("main > div")
    view.emulate_media(color_scheme="light")
    view.evaluate("document.body.dataset.jpThemeLight = 'false'")
    view.wait_for_function("document.querySelector('main > div').dataset.theme === 'dark'")
    view.evaluate("document.body.dataset.jpThemeLight = 'true'")
    view.wait_for_function("document.querySelector('main > div').dataset.theme === 'light'")
    assert box.get_attribute("data-theme") == "light"


def open_answer(page: Any, D: Any, query: Any, path: Path, **options: Any) -> None:
    to_html(D.ask(query, **options), path)
    page.goto(path.as_uri())


def test_vectors_as_keys_and_values(page: Any, tmp_path: Path) -> None:
    D: Any = Database(np.eye(3), np.array([[1.0, 2.0], [3.0, 5.0], [8.0, 13.0]]))
    open_answer(page, D, np.array([1.0, 0.5, 0.0]), tmp_path / "p.html")
    result = D.ask(np.array([1.0, 0.5, 0.0]))
    assert weights(page, 3) == pytest.approx(result.weights.tolist(), abs=1e-6)
    page.get_by_test_id("query").fill("0, 0, 9")
    result = D.ask(np.array([0.0, 0.0, 9.0]))
    assert weights(page, 3) == pytest.approx(result.weights.tolist(), abs=1e-6)
    shown_numbers = page.get_by_test_id("answer-value").inner_text().split(", ")
    assert [float(x) for x in shown_numbers] == pytest.approx(result.value.tolist(), rel=1e-4)
    page.get_by_test_id("query").fill("north")
    assert "separated by commas" in page.get_by_test_id("trouble").inner_text()


def test_keys_of_several_columns_and_values_that_are_records(page: Any, tmp_path: Path) -> None:
    rows = {("Li", 1): {"a": [1, None]}, ("Hu", 2): None, ("Smola", 3): "<b>"}
    D: Any = Database(rows)
    open_answer(page, D, ("Li", 1), tmp_path / "p.html")
    result = D.ask(("Li", 1))
    alpha = [result.weights[0], result.weights[2]]
    assert result.total == 2
    assert weights(page, 2) == pytest.approx(alpha, abs=1e-6)
    value = page.get_by_test_id("answer-value")
    assert value.inner_text() == "a: 1, nothing"
    assert value.get_attribute("data-value") == '{"a":[1,null]}'


def test_vectors_among_the_columns_of_a_value(page: Any, tmp_path: Path) -> None:
    D = Database.from_columns(
        {
            "name": ["a", "b"],
            "note": ["two\nlines", "one"],
            "short": [np.array([1.5, 2.0]), np.array([0.0, 1.0])],
            "long": [np.arange(12.0), np.ones(12)],
        },
        key="name",
        encoder="characters",
    )
    open_answer(page, D, "a", tmp_path / "p.html")
    vectors = "short: 1.5, 2, long: 0, 1, 2, 3, 4, 5, 6, 7, …"
    assert page.get_by_test_id("answer-value").inner_text() == f"note: two lines, {vectors}"
    assert page.get_by_test_id("row-0-value").input_value() == f"note: two⏎lines, {vectors}"


def test_a_score_of_ones_own_is_shown_as_python_found_it(page: Any, tmp_path: Path) -> None:
    D: Any = Database({1.0: 10.0, 2.0: 20.0, 4.0: 40.0})

    def near(q: Any, k: Any) -> Any:
        return -3 * abs(q - np.swapaxes(k, -1, -2))

    open_answer(page, D, 1.5, tmp_path / "p.html", score=near)
    result = D.ask(1.5, score=near)
    assert weights(page, 3) == pytest.approx(result.weights.tolist())
    assert read_number(page, "answer-value") == pytest.approx(result.value)
    assert "which the page cannot compute" in page.get_by_test_id("note").inner_text()
    page.get_by_test_id("query").fill("3")
    assert "chosen above" in page.get_by_test_id("note").inner_text()
    shown_as(page, D, 3.0)


def test_an_empty_database_says_so(page: Any, tmp_path: Path) -> None:
    to_html(Database(), tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    assert "empty" in page.get_by_test_id("trouble").inner_text()
    page.get_by_test_id("add-row").click()
    page.keyboard.type("Li")
    page.keyboard.press("Tab")
    page.keyboard.type("Mu")
    page.get_by_test_id("query").fill("Lee")
    assert page.get_by_test_id("answer-value").inner_text() == "Mu"


def test_a_text_encoder_lives_in_python_and_the_file_says_so(page: Any, tmp_path: Path) -> None:
    D: Any = Database({"Li": "Mu", "Hu": "Rachel"}, encoder="text")
    qkv.page.to_html(D.ask("Lee"), tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    shown_as(page, D, "Lee")
    page.get_by_test_id("query").fill("Hung")
    assert "needs Python" in page.get_by_test_id("note").inner_text()
    shown_as(page, letters(page), "Hung")
    page.get_by_test_id("query").fill("Lee")
    assert page.get_by_test_id("note").is_hidden()
    shown_as(page, D, "Lee")


def test_what_was_typed_is_encoded_by_python(page: Any, live: Any) -> None:
    D: Any = Database({"Li": "Mu", "Hu": "Rachel", "Smola": "Alex"}, encoder="text")
    calls = live(D.ask("Lee"), {})
    shown_as(page, D, "Lee")
    page.get_by_test_id("query").fill("Schmola")
    page.get_by_test_id("note").wait_for(state="hidden")
    shown_as(page, D, "Schmola")
    page.get_by_test_id("row-1-key").fill("Hung")
    page.get_by_test_id("note").wait_for(state="hidden")
    shown_as(page, Database(rows_of(page), encoder="text"), "Schmola")
    assert set(calls) == {"encode"}


def test_an_encoder_that_knows_its_keys_is_the_databases_own(page: Any, live: Any) -> None:
    keys = [f"{a} {b}" for a in ("red", "blue", "old", "new") for b in "abcdefghijklmnopqrst"]
    D: Any = Database([(key, key.upper()) for key in keys])
    [descriptor] = build_views(D)
    descriptor["data"]["database"] = "mine"
    live(descriptor, {"mine": D})
    page.get_by_test_id("query").fill("blew c")
    page.get_by_test_id("note").wait_for(state="hidden")
    shown_as(page, D, "blew c")


def wares(count: int) -> Any:
    """A table whose value is two columns of numbers, by names that resemble each other."""
    rng = np.random.default_rng(0)
    words = ["river", "stone", "bridge", "meadow", "harbour", "willow", "lantern", "orchard"]
    keys = [f"{words[i % 8]} {words[i // 8 % 8]} {i}" for i in range(count)]
    price, stock = rng.normal(50, 20, count).tolist(), rng.integers(0, 60, count).tolist()
    return Database.from_columns(
        {"name": keys, "price": price, "stock": stock}, key="name", value=["price", "stock"]
    )


def pooled(page: Any, D: Any, query: str, **options: Any) -> None:
    """Both columns, as Python pools them, and the best row."""
    result, best = D.ask(query, **options), D.ask(query, weighting="hard")
    shown = page.get_by_test_id("answer-value")
    shown_value = json.loads(shown.get_attribute("data-value"))
    assert shown_value == pytest.approx(result.value, rel=1e-5)
    assert shown.inner_text() == format_one_line(shown_value, 100)
    hard = json.loads(page.get_by_test_id("hard-value").get_attribute("data-value"))
    assert hard == pytest.approx(best.value)
    assert read_number(page, "answer-effective") == pytest.approx(result.effective_rows, rel=1e-4)
    for name in ("answer", "hard"):
        assert page.get_by_test_id(f"{name}-effective").inner_text().endswith(f" of {len(D):,}")
    assert page.locator(".database svg.line").count() == 0


def test_columns_of_numbers_are_pooled_in_a_file(page: Any, tmp_path: Path) -> None:
    D = wares(40)
    to_html(D, tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    pooled(page, D, suggest_question(list(D)[:10]))
    page.get_by_test_id("encoder").select_option("characters")
    page.get_by_test_id("query").fill("rivver")
    letters: Any = Database.from_columns(
        {name: [row[name] for row in D.rows()] for name in ("name", "price", "stock")},
        key="name",
        value=["price", "stock"],
        encoder="characters",
    )
    pooled(page, letters, "rivver")
    assert page.get_by_test_id("row-0-value").input_value().startswith("price: 52.51")


def test_a_table_of_more_rows_than_are_here_is_asked_in_python(page: Any, live: Any) -> None:
    D = wares(700)
    [descriptor] = build_views(D)
    descriptor["data"]["database"] = "wares"
    calls = live(descriptor, {"wares": D})
    pooled(page, D, suggest_question(list(D)[:10]))
    page.get_by_test_id("query").fill("orchard lantern 699")
    page.get_by_text("Computed from all 700 rows").wait_for()
    pooled(page, D, "orchard lantern 699")
    top = D.ask("orchard lantern 699").rows[0]
    best = page.locator(".database tr.best")
    assert best.locator("input").first.input_value() == top.key
    shown = float(best.locator(".first .number").get_attribute("data-value"))
    assert shown == pytest.approx(top.weight, rel=1e-5)
    # The best row is not among those that an average weighs first.
    page.get_by_test_id("weighting").select_option("average")
    page.get_by_text("Computed from all 700 rows").wait_for()
    pooled(page, D, "orchard lantern 699", weighting="average")
    assert set(calls) == {"answer"}
    # Rows that were changed by hand are no longer Python's.
    page.get_by_test_id("weighting").select_option("softmax")
    page.get_by_text("Computed from all 700 rows").wait_for()
    best.locator("input").first.fill("river")
    assert "from the 500 rows in this table" in page.get_by_test_id("note").inner_text()


def test_an_answer_that_does_not_come_is_reported(page: Any, live: Any) -> None:
    """The previous answer is not shown for another query, even if it arrives late."""
    page.clock.install()
    D = wares(700)
    [descriptor] = build_views(D)
    descriptor["data"]["database"] = "wares"
    calls = live(descriptor, {"wares": D})
    page.evaluate("() => { window.held = new Promise((go) => { window.answer = go; }); }")
    page.get_by_test_id("query").fill("orchard lantern 699")
    wait_until(page, lambda: calls)
    page.clock.run_for(10_000)
    trouble = page.get_by_test_id("trouble")
    trouble.filter(has_text="Python has not answered yet").wait_for()
    assert page.get_by_test_id("answer-value").inner_text() == "–"
    page.evaluate("window.answer()")
    page.get_by_text("Computed from all 700 rows").wait_for()
    pooled(page, D, "orchard lantern 699")
    assert trouble.is_hidden()


def test_a_query_among_numbers_is_a_number(view: Any) -> None:
    view.get_by_test_id("example-salary").click()
    for query in ("abc", "", "nan"):
        view.get_by_test_id("query").fill(query)
        message = view.get_by_test_id("trouble").inner_text()
        assert message == f"the query must be a number, as the column is, not '{query}'"


def test_a_query_among_dates_is_a_date(page: Any, tmp_path: Path) -> None:
    D: Any = Database({date(2023, 12, 31): 1.0, date(2024, 2, 10): 3.0, date(2024, 3, 1): 4.0})
    open_answer(page, D, "2024-02-10", tmp_path / "p.html")
    page.get_by_test_id("query").fill("2024-01-01")
    assert weights(page, 3) == pytest.approx(D.ask("2024-01-01").weights.tolist(), abs=1e-6)
    for query in ("2024", "2024-02-30", "2023-02-29", "2024-13-01"):
        page.get_by_test_id("query").fill(query)
        message = page.get_by_test_id("trouble").inner_text()
        assert message == f"the query must be a date such as 2023-12-31, not '{query}'"


def test_a_line_break_is_seen_and_kept(page: Any, tmp_path: Path) -> None:
    D: Any = Database({"Li": "Mu\nof Amazon", "Hu": "Rachel"}, encoder="characters")
    open_answer(page, D, "Li", tmp_path / "p.html")
    value = page.get_by_test_id("row-0-value")
    assert value.input_value() == "Mu⏎of Amazon"
    value.fill("Mu⏎of Boson")
    assert page.get_by_test_id("answer-value").get_attribute("data-value") == "Mu\nof Boson"


def test_a_temperature_that_means_nothing_is_refused_in_words(view: Any) -> None:
    for text in ("0", "-1", ""):
        view.get_by_test_id("temperature-number").fill(text)
        view.keyboard.press("Tab")
        trouble = view.get_by_test_id("temperature-trouble")
        assert trouble.inner_text().startswith("must be above 0")
        assert view.get_by_test_id("temperature-number").input_value() == "1"
    view.get_by_test_id("temperature-number").fill("2")
    view.keyboard.press("Tab")
    assert trouble.is_hidden()
    shown_as(view, letters(view), "Lee", weighting=weightings.Softmax(temperature=2.0))


def test_large_and_negative_weights_are_seen_whole(page: Any, tmp_path: Path) -> None:
    D: Any = Database({1.0: 3.0, -2.0: 5.0, 1e6: 2.0})
    open_answer(page, D, -1e6, tmp_path / "p.html", score="dot", weighting="raw")
    shown_weights = [page.get_by_test_id(f"row-{i}-weight").inner_text() for i in range(3)]
    assert shown_weights == ["4.444e+11", "4.444e+11", "−8.889e+11"]
    assert page.get_by_test_id("row-2-score").inner_text().endswith("−8.889e+11")
    for width in (360, 820, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for i in range(3):
            cell = page.locator("tbody tr").nth(i).locator("td.weight.first")
            number, bar = (cell.locator(part).bounding_box() for part in (".number", ".bar"))
            assert bar["x"] >= number["x"] + number["width"], width
            assert cell.locator(".number").evaluate("e => e.scrollWidth <= e.clientWidth"), width
    full, part = (
        page.locator("tbody tr").nth(i).locator("td.weight.first .bar i").bounding_box()["width"]
        for i in (2, 0)
    )
    assert part / full == pytest.approx(0.5, abs=0.02)
    # A spread, or a percent of all, means nothing to weights that are no shares.
    assert "±" not in page.get_by_test_id("view-database").inner_text()
    named: Any = Database({1.0: "a", 2.0: "b", 4.0: "b"})
    open_answer(page, named, 3.0, tmp_path / "q.html", score="constant", weighting="raw")
    assert page.locator(".answer.soft .legend").inner_text().split() == ["b", "2.000", "a", "1.000"]


def test_rows_without_a_value_are_counted(page: Any, tmp_path: Path) -> None:
    D: Any = Database({"a": None, "b": 1.0, "c": float("nan"), "d": 2.0})
    open_answer(page, D, "b", tmp_path / "p.html")
    note = page.get_by_test_id("note")
    sure = f"How sure: {D.ask('b').confidence_text}."
    assert note.inner_text() == f"{sure} 2 rows without a value are ignored."
    page.get_by_test_id("row-0-value").fill("")
    assert "3 rows without a value are ignored." in note.inner_text()


def test_the_formula_is_what_is_computed(page: Any, tmp_path: Path) -> None:
    D: Any = Database({1.0: 3.0, 2.0: 5.0, 6.0: 2.0})
    formula = page.get_by_test_id("formulas").locator("span").first
    open_answer(page, D, 4.0, tmp_path / "p.html", score="dot", weighting="raw")
    assert D.ask(4.0, score="dot", weighting="raw").weights == pytest.approx([-2.0, -1.0, 3.0])
    assert " ".join(formula.inner_text().split()) == "s = qᵀk, q and k minus the mean of the keys"
    for score, formula_text in (
        (scores.Laplace(2.0), "s = −‖q − k‖₁ / b, b = 2"),
        (scores.Boxcar(2.0), "s = 1 where ‖q − k‖ ≤ w, else 0, w = 2"),
        (scores.Cosine(0.5), "s = qᵀk / (‖q‖ ‖k‖ τ), τ = 0.5, q and k minus the mean of the keys"),
    ):
        open_answer(page, D, 4.0, tmp_path / "p.html", score=score)
        assert " ".join(formula.inner_text().split()) == formula_text


PASTE = """(field, text) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  const event = { clipboardData: data, bubbles: true, composed: true, cancelable: true };
  return field.dispatchEvent(new ClipboardEvent("paste", event));
}"""


def test_a_table_is_pasted_cell_by_cell(view: Any) -> None:
    def paste(at: str, text: str) -> bool:
        return bool(view.get_by_test_id(at).evaluate(PASTE, text))

    names = rows_of(view)
    assert not paste("row-4-key", "Ann\tart\r\nBo\tlaw\r\n\r\nCy\t\r\n")
    assert rows_of(view) == [*names[:4], ("Ann", "art"), ("Bo", "law"), ("Cy", "")]
    D: Any = Database([*rows_of(view)[:6], ("Cy", None)], encoder="characters")
    assert weights(view, 6) == pytest.approx(D.ask("Lee").weights.tolist()[:6], abs=1e-6)
    assert not paste("row-0-value", "x\ny")  # a column, from this cell down
    assert [value for _, value in rows_of(view)][:3] == ["x", "y", names[2][1]]
    note = view.get_by_test_id("pasted")
    assert note.inner_text() == "2 rows were pasted."
    assert not paste("row-0-key", "Ann\tart\t3\nBo\tlaw\t4")
    assert rows_of(view)[:2] == [("Ann", "art"), ("Bo", "law")]
    assert note.inner_text() == "2 rows were pasted; only the first 2 of their 3 columns were used."
    assert paste("row-0-key", "one line, as ever\n")  # left to the browser
    view.get_by_test_id("example-names").click()
    assert rows_of(view) == names and note.is_hidden()


def test_on_paper_it_is_light_and_bars_are_there(view: Any) -> None:
    view.emulate_media(color_scheme="dark", media="print")
    ink = "() => getComputedStyle(document.querySelector('main > div')).color"
    assert view.evaluate(ink) == "rgb(23, 32, 42)"
    bar = view.locator("td.weight .bar i").first
    assert bar.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"


def test_a_paste_is_undone(view: Any) -> None:
    """By the keys for it and by a button, as long as nothing else was changed."""
    names = rows_of(view)
    note, undo = view.get_by_test_id("pasted"), view.get_by_test_id("undo-paste")
    for take_back in (lambda: view.keyboard.press("Control+z"), undo.click):
        view.get_by_test_id("row-4-key").evaluate(PASTE, "Ann\tart\nBo\tlaw\nCy\tlaw")
        assert len(rows_of(view)) == len(names) + 1 and undo.is_visible()
        take_back()
        assert rows_of(view) == names and undo.is_hidden()
        assert note.inner_text() == "The paste was undone."
    D: Any = Database(names, encoder="characters")
    assert weights(view, len(names)) == pytest.approx(D.ask("Lee").weights.tolist(), abs=1e-6)
    view.get_by_test_id("row-4-key").evaluate(PASTE, "Ann\tart\nBo\tlaw")
    view.get_by_test_id("row-0-key").press_sequentially("x")
    view.keyboard.press("Control+z")  # of what was typed, as in any field
    assert rows_of(view)[0] == names[0] and rows_of(view)[4] == ("Ann", "art") and undo.is_hidden()


LEAVES = """() => {
  const event = new Event("beforeunload", { cancelable: true });
  return dispatchEvent(event);
}"""


def test_a_page_asks_before_rows_that_were_typed_are_lost(view: Any) -> None:
    assert view.evaluate(LEAVES)
    view.get_by_test_id("query").fill("Lii")
    assert view.evaluate(LEAVES)  # a question is soon asked again
    view.get_by_test_id("row-0-key").fill("Zhu")
    assert not view.evaluate(LEAVES)
    view.get_by_test_id("example-names").click()
    assert view.evaluate(LEAVES)
    view.get_by_test_id("row-4-key").evaluate(PASTE, "Ann\tart\nBo\tlaw")
    assert not view.evaluate(LEAVES)
    view.get_by_test_id("undo-paste").click()
    assert view.evaluate(LEAVES)
