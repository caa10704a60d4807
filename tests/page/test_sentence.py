"""A sentence that attends to itself: as MiniLM reads it, and as the page shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError
from qkv.page import to_html
from qkv.page.calls import run_call
from qkv.page.sentence import sentence

RNG = np.random.default_rng(14)
NINE = "I like Natural Language Processing, a lot!"


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray = e / e.sum(-1, keepdims=True)
    return result


def numbers(page: Any, test: str) -> np.ndarray:
    """What the step shows of the word's row."""
    text = page.get_by_test_id(test).inner_text().rpartition(":")[2].replace("−", "-")
    return np.array([float(x) for x in text.partition("…")[0].split()])


def weights(page: Any, count: int) -> np.ndarray:
    return np.array([float(page.get_by_test_id(f"weight-{j}").inner_text()) for j in range(count)])


def bars(page: Any) -> np.ndarray:
    """Of their whole length."""
    read = "(all) => all.map((bar) => parseFloat(bar.style.width) / 100)"
    return np.array(page.locator(".links-key .bar i").evaluate_all(read))


def open_view(page: Any, path: Path, view: dict[str, Any]) -> None:
    to_html(view, path)
    page.goto(path.as_uri())


def test_the_nine_words_of_the_seeds_step_by_step(page: Any, tmp_path: Path) -> None:
    open_view(page, tmp_path / "nine.html", sentence(NINE))
    names = [page.get_by_test_id(f"word-{i}").inner_text() for i in range(9)]
    assert names == ["I", "like", "Natural", "Language", "Processing", ",", "a", "lot", "!"]

    says = {}
    for i in range(6):
        page.get_by_test_id(f"step-{i}").click()
        says[i] = page.get_by_test_id("step-says").inner_text()
        if i == 3:
            scaled = numbers(page, "step-row")
        if i == 4:
            alpha = numbers(page, "step-row")
    assert "(9 × 24) · (24 × 16) = 9 × 16" in says[1]
    assert "(9 × 16) · (16 × 9) = 9 × 9" in says[2]
    assert "√16 = 4" in says[3]
    assert "(9 × 9) · (9 × 16) = 9 × 16" in says[5] and "4 heads together: 9 × 64" in says[5]
    # The weights are the softmax of the scaled scores; the lines show the same.
    assert np.allclose(softmax(scaled), alpha, atol=2e-3)
    assert np.allclose(weights(page, 9), alpha, atol=1e-9)
    assert page.get_by_test_id("links-sum").inner_text() == "One row: 1.000 in total."


def test_heads_words_and_the_other_way_round(page: Any, tmp_path: Path) -> None:
    open_view(page, tmp_path / "nine.html", sentence(NINE))
    page.get_by_test_id("head-0-1").click()
    assert page.get_by_test_id("head-title").inner_text() == "Head 2: previous word"
    page.get_by_test_id("word-3").focus()
    assert page.get_by_test_id("links-title").inner_text() == "“Language” attends to"
    row = weights(page, 9)
    assert row.argmax() == 2 and row[2] > 0.5
    assert np.allclose(bars(page), row, atol=1e-3)  # the whole length is 1, as in every view
    page.keyboard.press("ArrowDown")
    assert page.get_by_test_id("links-title").inner_text() == "“Processing” attends to"
    assert weights(page, 9).argmax() == 3
    assert "Language 0." in page.get_by_test_id("announce").inner_text()

    # Hover shows a word for as long as it lasts; clicks add words up.
    page.get_by_test_id("word-3").click()
    page.get_by_test_id("word-0").click()  # it was chosen from the start
    page.get_by_test_id("word-4").click()
    page.mouse.move(0, 0)
    page.get_by_test_id("sentence").focus()
    assert page.get_by_test_id("links-title").inner_text() == "“Language” + “Processing” attend to"
    assert page.get_by_test_id("links-sum").inner_text() == "Sum of 2 rows: 2.000 in total."
    both = weights(page, 9)
    assert np.allclose(bars(page), both / 2, atol=1e-3)
    page.get_by_test_id("word-4").focus()
    assert np.allclose(both, row + weights(page, 9), atol=1.5e-3)

    page.get_by_test_id("sentence-way").select_option("from")
    page.get_by_test_id("word-2").focus()
    assert page.get_by_test_id("links-title").inner_text() == "“Natural” is attended by"
    assert abs(weights(page, 9)[3] - row[2]) < 1e-9


def test_a_sentence_is_typed_and_stays_text(page: Any, tmp_path: Path) -> None:
    open_view(page, tmp_path / "nine.html", sentence(NINE))
    page.get_by_test_id("sentence").fill("<img src=x onerror=alert(1)> & me")
    assert page.get_by_test_id("word-0").inner_text() == "<"
    assert page.get_by_test_id("word-1").inner_text() == "img"
    assert page.locator("img").count() == 0
    page.get_by_test_id("sentence").fill(" ")
    assert "at least one word" in page.get_by_test_id("sentence-error").inner_text()


def reading() -> dict[str, Any]:
    """Two heads over four tokens, of which two are pieces of one word."""
    x = RNG.standard_normal((1, 4, 6))
    q, k, v = RNG.standard_normal((3, 1, 2, 4, 3))
    alpha = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(3))
    tokens = ["[CLS]", "over", "##joyed", "<b>"]
    words = ["[CLS]", "overjoyed", "<b>"]
    named = {"model": "a model", "tokens": tokens, "words": words, "groups": [0, 1, 1, 2]}
    return named | {"x": x, "q": q, "k": k, "v": v, "weights": alpha, "first": 1}


def test_what_a_model_read_is_static_in_a_file(page: Any, tmp_path: Path) -> None:
    read = reading()
    alpha = read["weights"][0, 1]
    view = sentence("overjoyed <b>")
    view["data"]["read"] = read
    open_view(page, tmp_path / "model.html", view)
    assert page.get_by_test_id("sentence").is_disabled()
    assert page.get_by_test_id("head-title").inner_text() == "Head: layer 0, head 1"
    means = np.array([[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]])
    sums = (means > 0).astype(float)
    merged = means @ alpha @ sums.T
    page.get_by_test_id("word-1").focus()
    assert page.get_by_test_id("links-title").inner_text() == "“overjoyed” attends to"
    assert np.allclose(weights(page, 3), merged[1], atol=5.1e-4)

    page.get_by_test_id("sentence-merge").uncheck()
    page.get_by_test_id("word-2").focus()
    assert page.get_by_test_id("links-title").inner_text() == "“##joyed” attends to"
    assert np.allclose(weights(page, 4), alpha[2], atol=5.1e-4)
    page.get_by_test_id("step-5").click()
    page.get_by_test_id("word-2").focus()
    assert np.allclose(numbers(page, "step-row"), (alpha @ read["v"][0, 1])[2], atol=5.1e-4)
    assert page.locator("b").count() == 0

    # The heads written by hand run here, on any sentence.
    page.get_by_test_id("sentence-model").select_option("hand")
    page.get_by_test_id("sentence").fill("one two three")
    assert page.get_by_test_id("word-2").inner_text() == "three"


def test_what_minilm_reads_is_its_own_attention() -> None:
    pytest.importorskip("sentence_transformers")
    read = run_call("sentence", {"text": "The dog was overjoyed."}, {})
    assert read["words"] == ["[CLS]", "the", "dog", "was", "overjoyed", ".", "[SEP]"]
    assert [read["words"][i] for i in read["groups"]].count("overjoyed") == 3
    n = len(read["tokens"])
    assert read["x"].shape == (6, n, 384) and read["q"].shape == (6, 12, n, 32)
    q, k = (read[name].astype(np.float64) for name in "qk")
    assert np.allclose(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(32)), read["weights"], atol=1e-5)
    with pytest.raises(ArgumentError, match="at most 128"):
        run_call("sentence", {"text": "word " * 200}, {})
