"""The view Scores: used as a person would, and its numbers against Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.page import to_html

pytestmark = pytest.mark.sample_of_module(4)

KEYS = np.linspace(-3, 3, 41).round(2)
ONE = np.array([[1.0]])
SHOWN = {"atol": 6e-4}
"""What is written with three digits after the point."""

SIMILARITIES = {
    "dot": scores.Dot(),
    "scaled_dot": scores.ScaledDot(0.5),
    "cosine": scores.Cosine(0.5),
    "multiplicative": scores.Multiplicative(-0.8 * ONE),
    "additive": scores.Additive(ONE, 1.5 * ONE, 1.5 * ONE[0], 0 * ONE[0]),
    "gated": scores.Gated(ONE[0], 2 * ONE[0]),
    "gaussian": scores.Gaussian(0.6),
    "laplace": scores.Laplace(0.6),
    "boxcar": scores.Boxcar(1.0),
    "triangular": scores.Triangular(1.5),
    "epanechnikov": scores.Epanechnikov(1.5),
    "constant": scores.Constant(),
    "exact": scores.Exact(),
}


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Any:
    to_html({"view": "scores"}, tmp_path / "s.html")
    page.goto((tmp_path / "s.html").as_uri())
    page.get_by_text("as numbers").click()
    return page


def wait_for_frame(page: Any) -> None:
    """After the next frame is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def column(page: Any, name: str) -> np.ndarray:
    wait_for_frame(page)
    result = page.locator(f"[data-testid^='key-'][data-testid$='-{name}']").all_inner_texts()
    return np.array([float(text.replace("−", "-").replace("none", "nan")) for text in result])


def type_number(page: Any, name: str, to: float) -> None:
    page.get_by_test_id(f"{name}-number").fill(str(to))
    page.get_by_test_id(f"{name}-number").press("Enter")


def read_number(page: Any, name: str) -> float:
    return float(page.get_by_test_id(name).inner_text().split()[0].replace("−", "-"))


def test_every_score_is_pythons(opened: Any) -> None:
    type_number(opened, "scores-q", 0.9)
    query = np.array([[0.9]])
    for name, score in SIMILARITIES.items():
        opened.get_by_test_id(f"score-{name}").click()
        np.testing.assert_allclose(
            column(opened, "score"), score(query, KEYS[:, None])[0], err_msg=name, **SHOWN
        )
        alpha = qkv.weights(query, KEYS[:, None], score=score)[0]
        np.testing.assert_allclose(column(opened, "weight"), alpha, err_msg=name, **SHOWN)
        entropy = -(alpha * np.log(alpha)).sum()
        np.testing.assert_allclose(read_number(opened, "scores-entropy"), entropy, **SHOWN)
        np.testing.assert_allclose(
            read_number(opened, "scores-effective"), np.exp(entropy), atol=6e-3, err_msg=name
        )


def test_every_weighting_is_pythons(opened: Any) -> None:
    opened.get_by_test_id("score-triangular").click()
    type_number(opened, "scores-q", 1.2)
    query, score = np.array([[1.2]]), scores.Triangular(1.5)
    made = {name: kind(3) if name == "topk" else kind() for name, kind in weightings.NAMES.items()}
    for name, weighting in made.items():
        opened.get_by_test_id("scores-weighting").select_option(name)
        alpha = qkv.weights(query, KEYS[:, None], score=score, weighting=weighting)[0]
        np.testing.assert_allclose(column(opened, "weight"), alpha, err_msg=name, **SHOWN)


def test_settings_are_slid_and_typed(opened: Any) -> None:
    opened.get_by_test_id("score-gaussian").click()
    type_number(opened, "scores-q", -0.75)
    type_number(opened, "setting-bandwidth", 1.7)
    type_number(opened, "setting-temperature", 0.25)
    query = np.array([[-0.75]])
    options = {"score": scores.Gaussian(1.7), "weighting": weightings.Softmax(0.25)}
    alpha = qkv.weights(query, KEYS[:, None], **options)[0]
    np.testing.assert_allclose(column(opened, "weight"), alpha, **SHOWN)
    slider = opened.get_by_test_id("setting-bandwidth")
    slider.focus()
    before = column(opened, "score")
    slider.press("ArrowRight")
    assert column(opened, "score").min() > before.min()
    assert "σ = 1.7" in opened.get_by_test_id("scores-formula").inner_text()


def test_angles_are_unit_vectors(opened: Any) -> None:
    opened.get_by_test_id("score-cosine").click()
    opened.get_by_test_id("scores-space").select_option("angles")
    type_number(opened, "scores-q", 54)
    turn = np.radians(np.linspace(-180, 180, 41))
    vectors = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    query = np.array([[np.cos(np.radians(54)), np.sin(np.radians(54))]])
    np.testing.assert_allclose(
        column(opened, "score"), scores.Cosine(0.5)(query, vectors)[0], **SHOWN
    )
    opened.get_by_test_id("score-additive").click()  # its arrays are for numbers
    assert opened.get_by_test_id("scores-space").input_value() == "numbers"


def test_what_means_nothing_is_said(opened: Any) -> None:
    opened.get_by_test_id("score-dot").click()
    opened.get_by_test_id("scores-weighting").select_option("normalized")
    wait_for_frame(opened)
    assert "can be negative" in opened.get_by_test_id("scores-refusal").inner_text()
    assert np.isnan(column(opened, "weight")).all()
    opened.get_by_test_id("score-boxcar").click()
    wait_for_frame(opened)
    assert not opened.get_by_test_id("scores-refusal").is_visible()
    assert abs(column(opened, "weight").sum() - 1) < 0.01


def test_a_surface_moves_the_query(opened: Any) -> None:
    opened.get_by_test_id("score-dot").click()
    wait_for_frame(opened)
    opened.get_by_test_id("scores-surface").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        opened.keyboard.press(key)
    q, k = KEYS[2], KEYS[1]
    np.testing.assert_allclose(column(opened, "score"), q * KEYS, **SHOWN)
    np.testing.assert_allclose(read_number(opened, "scores-pair"), q * k, rtol=1e-3)
    opened.get_by_test_id("scores-weights").hover()
    wait_for_frame(opened)
    readout = opened.get_by_test_id("scores-weights-readout").inner_text().replace("−", "-").split()
    row, col = float(readout[0]), float(readout[2])
    alpha = qkv.weights(np.array([[row]]), KEYS[:, None], score="dot")[0]
    at = int(np.abs(KEYS - col).argmin())
    np.testing.assert_allclose(float(readout[3]), alpha[at], rtol=2e-3)
    np.testing.assert_allclose(column(opened, "weight"), alpha, **SHOWN)
