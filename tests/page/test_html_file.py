"""One HTML file, opened from disk: what it shows, against Python's own numbers."""

from pathlib import Path
from typing import Any

import pytest

from qkv import Database, scores, weightings
from qkv.database.encoders import Numbers
from qkv.page import to_html
from qkv.page.html_file import read_module

pytestmark = pytest.mark.sample_of_module(7)

NAMES = {"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu", "Smola": "Alex", "Hu": "Rachel"}
SALARIES = {2.5: 60.0, 3.0: 70.0, 3.2: 71.0, 3.6: 86.0, 3.9: 95.0}
EVIL = "</script><img src=x onerror=\"document.title='owned'\"><b>&lt;"


def open_html(page: Any, shown: Any, path: Path) -> None:
    to_html(shown, path)
    page.goto(path.as_uri())


def read_number(page: Any, test: str) -> float:
    return float(page.get_by_test_id(test).get_attribute("data-value"))


ALL = """
([rows, what]) => {
  const root = document.querySelector("main > div").shadowRoot;
  const cell = (i) => root.querySelector(`[data-testid="row-${i}-${what}"]`);
  return Array.from({ length: rows }, (_, i) => Number(cell(i).dataset.value));
}
"""


def weights(page: Any, rows: int, what: str = "weight") -> list[float]:
    """Those of all rows at once: a question each would take seconds."""
    page.get_by_test_id(f"row-0-{what}").wait_for(state="attached")
    result: list[float] = page.evaluate(ALL, [rows, what])
    return result


@pytest.mark.parametrize(
    ("rows", "query", "options"),
    [
        (NAMES, "Lee", {}),
        (NAMES, "Lee", {"weighting": weightings.Softmax(temperature=3)}),
        (NAMES, "Lee", {"weighting": "sparsemax"}),
        (NAMES, "Li", {"score": "exact", "weighting": "normalized"}),
        (SALARIES, 3.5, {}),
        (SALARIES, 3.5, {"score": scores.Gaussian(0.15), "weighting": weightings.TopK(3)}),
        (SALARIES, 3.5, {"score": scores.Epanechnikov(0.5), "weighting": "raw"}),
    ],
    ids=str,
)
def test_an_answer_is_computed_again_in_the_page(
    page: Any, tmp_path: Path, rows: Any, query: Any, options: Any
) -> None:
    D: Any = Database(rows)
    result = D.ask(query, **options)
    open_html(page, result, tmp_path / "a.html")
    assert weights(page, len(rows)) == pytest.approx(result.weights.tolist(), abs=1e-6)
    hard = D.ask(query, **{**options, "weighting": "hard"})
    assert weights(page, len(rows), "hard") == pytest.approx(hard.weights.tolist())
    assert read_number(page, "answer-entropy") == pytest.approx(result.entropy, abs=1e-6)
    assert read_number(page, "answer-effective") == pytest.approx(result.effective_rows, abs=1e-5)
    shown_value = page.get_by_test_id("answer-value").get_attribute("data-value")
    if isinstance(result.value, float):
        assert float(shown_value) == pytest.approx(result.value, rel=1e-6)
    else:
        assert shown_value == result.value


def test_of_many_rows_the_heaviest_are_there_with_the_weights_they_had(
    page: Any, tmp_path: Path
) -> None:
    rows = [(x / 100, float(x)) for x in range(1000)]
    D: Any = Database(rows, encoder=Numbers(bandwidth=2.0))  # every row has weight
    result = D.ask(5.0)
    open_html(page, result, tmp_path / "a.html")
    assert (
        "all 1,000 rows. The table shows the 500 with the most weight"
        in page.get_by_test_id("note").inner_text()
    )
    assert read_number(page, "answer-value") == pytest.approx(result.value)
    heaviest = sorted(result.weights)[-500:]
    assert sorted(weights(page, 500)) == pytest.approx(heaviest)


def test_a_database_is_asked_for_a_misspelled_key(page: Any, tmp_path: Path) -> None:
    D: Any = Database(NAMES)
    D.to_html(tmp_path / "d.html")
    page.goto((tmp_path / "d.html").as_uri())
    assert page.get_by_test_id("query").input_value() == "zhng"
    assert weights(page, 5) == pytest.approx(D.ask("zhng").weights.tolist(), abs=1e-6)


def test_text_never_becomes_markup(page: Any, tmp_path: Path) -> None:
    D: Any = Database({EVIL: EVIL, "b": EVIL}, value=EVIL)
    open_html(page, [D.ask(EVIL), D], tmp_path / "a.html")
    assert page.get_by_test_id("row-0-key").input_value() == EVIL
    assert page.get_by_test_id("answer-value").inner_text() == EVIL
    assert page.title() != "owned"
    assert page.locator("img").count() == 0
    assert EVIL not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_no_other_script_runs_and_no_address_is_reached(page: Any, tmp_path: Path) -> None:
    open_html(page, Database(NAMES).ask("Li"), tmp_path / "a.html")
    page.expected += ["Content Security Policy", "Content-Security-Policy"]
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "document.title = 'owned'";
          document.body.append(script);
        }"""
    )
    reached = page.evaluate("fetch('data:,x').then(() => true, () => false)")
    assert page.title() != "owned" and reached is False


def test_tabs_are_turned_by_arrow_keys(page: Any, tmp_path: Path) -> None:
    open_html(page, {"One": Database(NAMES), "Two": Database(SALARIES)}, tmp_path / "a.html")
    one, two = (page.get_by_role("tab", name=name) for name in ("One", "Two"))
    one.focus()
    page.keyboard.press("ArrowRight")
    assert two.get_attribute("aria-selected") == "true"
    assert page.get_by_role("tabpanel", name="Two").get_by_test_id("query").input_value() == "2.75"
    assert page.get_by_role("tabpanel", name="One").count() == 0  # it is hidden
    page.keyboard.press("Home")
    assert one.get_attribute("aria-selected") == "true"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.get_by_role("button", name="Your rows").evaluate("(e) => e.matches(':focus')")


def test_a_page_of_one_view_says_what_it_is(page: Any, tmp_path: Path) -> None:
    """In the place of tabs, which several views have."""
    open_html(page, {"Names": Database(NAMES)}, tmp_path / "a.html")
    assert page.get_by_role("heading", name="Names").is_visible()
    assert page.get_by_role("tab").count() == 0
    open_html(page, {"One": Database(NAMES), "Two": Database(SALARIES)}, tmp_path / "b.html")
    page.get_by_role("tab", name="One").wait_for()
    assert page.get_by_test_id("title").count() == 0


def test_a_link_opens_a_tab_and_the_back_button_returns_to_it(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    to_html({"One": Database(NAMES), "The second": Database(SALARIES)}, path)
    page.goto(f"{path.as_uri()}#The%20second")
    one, two = (page.get_by_role("tab", name=name) for name in ("One", "The second"))
    assert two.get_attribute("aria-selected") == "true"
    one.click()
    assert page.url.endswith("a.html#One")
    page.go_back()
    page.get_by_role("tab", name="The second", selected=True).wait_for()
    page.goto(f"{path.as_uri()}#nothing")
    page.reload()
    assert one.get_attribute("aria-selected") == "true"


def test_the_same_page_is_the_same_file() -> None:
    D: Any = Database(NAMES)
    assert to_html(D.ask("Li")) == to_html(D.ask("Li"))
    assert read_module() in to_html(D.ask("Li"))


def test_without_scripts_the_answer_still_shows(browser: Any, tmp_path: Path, page: Any) -> None:
    Database(NAMES).ask("Li").to_html(tmp_path / "a.html")
    context = browser[0].new_context(java_script_enabled=False)
    try:
        still = context.new_page()
        still.goto((tmp_path / "a.html").as_uri())
        assert still.locator("noscript .v").inner_text() == "Mu"
    finally:
        context.close()
