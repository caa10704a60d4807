"""Every view in every host: a number of each, against Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.page import to_html
from qkv.page.calls import run_call
from qkv.page.heads import heads_view
from qkv.serve.security import Access
from tests.browser import fill_query
from tests.page.jupyter import Lab
from tests.page.test_sentence import numbers, softmax
from tests.serve.conftest import serving
from tests.serve.test_page import at_work

pytestmark = pytest.mark.sample_of_module(2)

NAMES = {
    "Zhang": "Aston",
    "Lipton": "Zachary",
    "Li": "Mu",
    "Smola": "Alex",
    "Hu": "Rachel",
    "Werness": "Brent",
}
ALPHA = [[[[0.75, 0.25], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]]
VIEWS = [{"view": name} for name in ("database", "sentence", "regression", "scores", "data")]
CSV = "gpa,salary\n3.1,70\n3.5,82\n3.6,86\n4.0,95\n"
ROWS = [(3.1, 70), (3.5, 82), (3.6, 86), (4.0, 95)]


def read_number(at: Any, test: str) -> float:
    return float(at.get_by_test_id(test).inner_text().split()[0].replace("−", "-"))


def type_number(at: Any, test: str, to: float) -> None:
    at.get_by_test_id(f"{test}-number").fill(str(to))
    at.get_by_test_id(f"{test}-number").press("Enter")


def database(at: Any) -> None:
    D: Any = qkv.Database(NAMES, encoder="characters")
    at.get_by_test_id("query").fill("Smole")
    for row in D.ask("Smole", top=6).rows:
        shown = at.get_by_test_id(f"row-{row.index}-weight").get_attribute("data-value")
        assert float(shown) == pytest.approx(row.weight, abs=1e-6)


def sentence(at: Any) -> None:
    at.get_by_test_id("step-3").click()
    scaled = numbers(at, "step-row")
    at.get_by_test_id("step-4").click()
    alpha = numbers(at, "step-row")
    assert len(alpha) > 2 and np.allclose(softmax(scaled), alpha, atol=2e-3)


def regression(at: Any) -> None:
    type_number(at, "regression-bandwidth", 0.5)
    type_number(at, "regression-query", 1.5)
    at.get_by_text("as numbers").locator("visible=true").click()
    read = "(all) => all.map((input) => Number(input.value))"
    x, y = (
        np.array(at.locator(f"[data-testid$='-{axis}'][type=number]").evaluate_all(read))
        for axis in "xy"
    )
    value = qkv.attend([[1.5]], x[:, None], y[:, None], score=scores.Gaussian(0.5))[0, 0]
    at.get_by_test_id("regression-value").filter(has_text=f"{value:.2f}"[:-1]).wait_for()
    assert read_number(at, "regression-value") == pytest.approx(value, abs=1e-3)


def similarity(at: Any) -> None:
    at.get_by_test_id("score-gaussian").click()
    type_number(at, "scores-q", 0.9)
    keys = np.linspace(-3, 3, 41).round(2)[:, None]
    alpha = qkv.weights([[0.9]], keys, score=scores.Gaussian(0.6))[0]
    expected = -(alpha * np.log(alpha)).sum()
    at.get_by_test_id("scores-entropy").filter(has_text=f"{expected:.2f}").wait_for()
    assert read_number(at, "scores-entropy") == pytest.approx(expected, abs=6e-4)


def data(at: Any) -> None:
    at.get_by_test_id("data-file").set_input_files(
        {"name": "gpa.csv", "mimeType": "text/csv", "buffer": CSV.encode()}
    )
    at.get_by_text("gpa: 4 rows").wait_for()
    fill_query(at, "3.55")
    at.get_by_test_id("data-row-3-weight").wait_for()
    D: Any = qkv.Database(ROWS)
    for i, row in enumerate(D.ask(3.55).rows):
        shown = at.get_by_test_id(f"data-row-{i}-weight").get_attribute("data-value")
        assert float(shown) == pytest.approx(row.weight, abs=1e-6)


def model(at: Any) -> None:
    assert read_number(at, "entropy-0-1") == pytest.approx(np.log(2), abs=0.006)


TOUR = {
    "database": database,
    "sentence": sentence,
    "regression": regression,
    "scores": similarity,
    "data": data,
    "model": model,
}


def toured(at: Any, without: tuple[str, ...] = (), **instead: Any) -> None:
    for name, look in (TOUR | instead).items():
        if name in without:
            continue
        at.get_by_test_id(f"tab-{name}").click()
        look(at.get_by_test_id(f"view-{name}"))


def test_a_file(page: Any, tmp_path: Path) -> None:
    to_html([*VIEWS, heads_view(np.array(ALPHA), ["layer"])], tmp_path / "all.html")
    page.goto((tmp_path / "all.html").as_uri())
    toured(page)


def test_a_server(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")

    def tables(at: Any) -> None:
        at.get_by_test_id("data-live").click()
        at.get_by_test_id("example-names").click()
        database(at)
        at.get_by_test_id("data-live").click()
        data(at)

    def minilm(at: Any) -> None:
        for reported in (None, "Time flies."):
            if reported is not None:
                at.get_by_test_id("model-text").fill(reported)
                at.get_by_test_id("model-read").click()
            text = reported or at.get_by_test_id("model-text").input_value()
            alpha = run_call("sentence", {"text": text}, {})["weights"]
            with np.errstate(divide="ignore", invalid="ignore"):
                expected = -np.nansum(alpha * np.log(alpha), -1).mean(-1)
            words = f"Entropy {expected[0, 0]:.3f}"
            at.get_by_test_id("head-entropy").filter(has_text=words).wait_for()
            for i, j in np.ndindex(*expected.shape):
                assert read_number(at, f"entropy-{i}-{j}") == pytest.approx(
                    expected[i, j], abs=0.006
                )

    def read(at: Any) -> None:
        sentence(at)
        expected = run_call("sentence", {"text": at.get_by_test_id("sentence").input_value()}, {})
        assert expected["words"] == expected["tokens"]
        at.get_by_test_id("sentence-model").select_option("minilm")
        at.get_by_test_id("head-5-11").wait_for()
        row = expected["weights"].reshape(-1, *expected["weights"].shape[2:])[expected["first"], 0]
        for j, weight in enumerate(row):
            assert read_number(at, f"weight-{j}") == pytest.approx(weight, abs=6e-4)

    with at_work(serving(tmp_path), Access()) as url:
        page.goto(url)
        toured(page, without=("database",), data=tables, sentence=read, model=minilm)
        page.goto("about:blank")


def test_a_notebook(page: Any, lab: Lab) -> None:
    lab.run(
        page,
        "import numpy as np, qkv\nfrom qkv.page.heads import heads_view\n"
        f"qkv.show(*{VIEWS}, heads_view(np.array({ALPHA}), ['layer']))",
    )
    cell = page.locator(".jp-CodeCell").first
    cell.get_by_test_id("tab-database").wait_for()
    toured(cell)
