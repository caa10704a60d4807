"""Scores and weightings that are registered in Python and have no TypeScript version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import Database, scores, weightings
from qkv.errors import ArgumentError
from qkv.page import to_html
from qkv.page.calls import run_call
from qkv.page.views import build_views
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.security import Access
from tests.page.test_database import salaries, shown_as
from tests.page.test_scores import KEYS, SHOWN, column, type_number
from tests.serve.test_page import at_work

pytestmark = pytest.mark.sample_of_module(3)


@dataclass(frozen=True)
class Stretched(scores.Score):
    """s = −power · ‖W(q − k)‖₁."""

    power: float = 3.0
    w: Any = None

    def __call__(self, query: Any, key: Any) -> Any:
        if abs(query).max() > 990:
            raise ArgumentError("stretched: the query is too far away")
        difference = query[..., :, None, :] - key[..., None, :, :]
        if self.w is not None:
            difference = difference @ np.asarray(self.w, difference.dtype).T
        return -self.power * abs(difference).sum(-1)


@dataclass(frozen=True)
class Halved(weightings.Elementwise):
    """α = exp(s) / 2: the weights do not sum to one."""

    def weights(self, scores: Any, live: Any, k: Any) -> Any:
        alpha = np.exp(scores) / 2
        return alpha if live is None else np.where(live, alpha, 0)


@pytest.fixture(autouse=True)
def registered(page: Any) -> Iterator[None]:
    page.set_default_timeout(15_000)
    scores.register("stretched", Stretched)
    weightings.register("halved", Halved)
    yield
    del scores.NAMES["stretched"], weightings.NAMES["halved"]


def wait_for_python(page: Any) -> None:
    page.get_by_text("Waiting for Python").wait_for(state="hidden")
    trouble = page.get_by_test_id("trouble")
    assert trouble.is_hidden(), trouble.inner_text()


def test_an_example_is_weighed_by_python(page: Any, live: Any) -> None:
    calls = live({"view": "database"}, {})
    page.get_by_test_id("example-salary").click()
    page.get_by_test_id("score").select_option("stretched")
    wait_for_python(page)
    D = salaries(page)
    shown_as(page, D, 3.5, score="stretched")
    page.get_by_test_id("weighting").select_option("halved")
    wait_for_python(page)
    shown_as(page, D, 3.5, score="stretched", weighting="halved")
    assert "α = halved(s)" in page.get_by_test_id("formulas").inner_text()
    page.get_by_test_id("score").select_option("gaussian")
    wait_for_python(page)
    width = float(page.get_by_test_id("score-setting-number").input_value())
    shown_as(page, D, 3.5, score=scores.Gaussian(width), weighting="halved")
    page.get_by_test_id("query").fill("3.7")
    wait_for_python(page)
    shown_as(page, D, 3.7, score=scores.Gaussian(width), weighting="halved")
    assert set(calls) == {"weigh"}


def test_rows_that_were_edited_are_weighed_by_python(page: Any, live: Any) -> None:
    D: Any = Database({"Li": "Mu", "Hu": None, "Smola": "Alex"}, encoder="text")
    live(D.ask("Lee", score=Stretched(2.0)), {})
    result = D.ask("Lee", score=Stretched(2.0))
    shown_weight = page.get_by_test_id("row-0-weight").get_attribute("data-value")
    assert float(shown_weight) == pytest.approx(result.weights[0], abs=1e-6)
    page.get_by_test_id("row-1-key").fill("Smolla")
    wait_for_python(page)
    edited = Database({"Li": "Mu", "Smolla": "Alex"}, encoder="text")
    shown_as(page, edited, "Lee", score=Stretched(2.0))


def test_a_table_that_is_larger_than_the_page_is_asked_in_python(page: Any, live: Any) -> None:
    D: Any = Database([(float(i), float(i % 7)) for i in range(900)])
    [view] = build_views(D)
    view["data"]["database"] = "mine"
    calls = live(view, {"mine": D})
    page.get_by_test_id("score").select_option("stretched")
    page.get_by_test_id("query").fill("40.25")
    page.get_by_text("Waiting for Python").wait_for(state="hidden")
    result = D.ask(40.25, score="stretched")
    shown = page.get_by_test_id("answer-value").get_attribute("data-value")
    assert float(shown) == pytest.approx(result.value, rel=1e-6)
    assert "weigh" not in calls


def test_settings_that_are_arrays_reach_python(page: Any, live: Any) -> None:
    D: Any = Database(np.eye(2), np.array([1.0, 5.0]), encoder="arrays")
    score = Stretched(1.0, w=np.array([[2.0, 0.0], [1.0, 1.0]]))
    live(D.ask(np.array([0.5, 0.1]), score=score), {})
    page.get_by_test_id("query").fill("0.25, 1")
    wait_for_python(page)
    shown_as(page, D, np.array([0.25, 1.0]), score=score)


def test_a_file_shows_pythons_numbers_and_says_that_others_need_python(
    page: Any, tmp_path: Path
) -> None:
    D: Any = Database({1.0: 10.0, 2.0: 20.0, 4.0: 40.0})
    to_html(D.ask(1.6, score=Stretched(2.0)), tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    shown_as(page, D, 1.6, score=Stretched(2.0))
    score = float(page.get_by_test_id("row-2-score").get_attribute("data-value"))
    assert score == pytest.approx(-4.8, rel=1e-6)
    page.get_by_test_id("query").fill("3")
    trouble = page.get_by_test_id("trouble").inner_text()
    assert "The score “stretched” needs Python, and this page runs without it." in trouble
    assert page.get_by_test_id("answer-value").inner_text() == "–"
    page.get_by_test_id("score").select_option("own")
    shown_as(page, D, 3.0)


def test_an_error_of_python_is_shown(page: Any, live: Any) -> None:
    live({"view": "database"}, {})
    page.get_by_test_id("example-salary").click()
    page.get_by_test_id("score").select_option("stretched")
    wait_for_python(page)
    page.get_by_test_id("query").fill("2000")
    page.get_by_text("Python: stretched: the query is too far away").wait_for()
    assert page.get_by_test_id("answer-value").inner_text() == "–"


def test_the_view_of_scores_draws_them(page: Any, live: Any) -> None:
    live({"view": "scores"}, {})
    page.get_by_test_id("score-stretched").click()
    type_number(page, "scores-q", 0.9)
    page.get_by_test_id("scores-formula").filter(has_text="stretched").wait_for()
    expected = Stretched()(np.array([[0.9]]), KEYS[:, None])[0]
    page.wait_for_timeout(500)
    page.get_by_test_id("scores-keys").locator("summary").click()
    np.testing.assert_allclose(column(page, "score"), expected, **SHOWN)
    alpha = qkv.weights([[0.9]], KEYS[:, None], score=Stretched())[0]
    np.testing.assert_allclose(column(page, "weight"), alpha, **SHOWN)
    page.get_by_test_id("scores-weighting").select_option("halved")
    page.get_by_text("α = halved(s)").wait_for()
    np.testing.assert_allclose(column(page, "weight"), np.exp(expected) / 2, **SHOWN)


def test_a_server_computes_them(page: Any) -> None:
    served = DatabaseRegistry()
    served.add_database("grades", Database({3.1: 70.0, 3.5: 82.0, 4.0: 95.0}))
    with at_work(served, Access()) as address:
        page.goto(address)
        page.get_by_test_id("data-live").click()
        page.get_by_test_id("score").select_option("stretched")
        page.get_by_test_id("query").fill("3.7")
        wait_for_python(page)
        shown_as(page, served["grades"], 3.7, score="stretched")


def test_keys_that_are_compared_by_equality() -> None:
    args = {"keys": ["Li", "Hu", "Li"], "query": "Li", "encoder": "characters", "score": "exact"}
    result = run_call("weigh", {**args, "weighting": "raw", "live": [True, True, False]}, {})
    assert result["scores"].tolist() == [1, 0, 1]
    assert result["weights"].tolist() == [1, 0, 0]
    with pytest.raises(qkv.QkvError, match="3 booleans"):
        run_call("weigh", {**args, "live": [True]}, {})
    with pytest.raises(qkv.QkvError, match="lists of vectors"):
        run_call("grid", {"queries": [1.0], "keys": [[1.0]], "score": "dot"}, {})
