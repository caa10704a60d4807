"""Captured heads: as the page is given them, and as it shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.errors import DtypeError
from qkv.page import to_html
from qkv.page.heads import heads_view
from qkv.page.views import build_views
from tests.browser import wait_until

RNG = np.random.default_rng(14)
TOKENS = ["the", "dog", "<img src=x onerror=alert(1)>", "was", "happy"]


def alpha(*shape: int) -> np.ndarray:
    scores = np.exp(3 * RNG.standard_normal(shape))
    result: np.ndarray = scores / scores.sum(-1, keepdims=True)
    return result


def entropy(weights: np.ndarray) -> Any:
    return -(weights * np.log(weights)).sum(-1).mean(-1)


def test_a_weight_is_its_byte_s_square_to_half_a_step() -> None:
    weights = alpha(2, 3, 5, 7)
    data = heads_view(weights, ["a", "b"])["data"]
    scale, cells = data["scale"][..., None, None], data["weights"].astype(np.float64)
    assert np.all(abs(scale * cells**2 - weights) <= scale * (cells + 0.25) * (1 + 1e-9))
    assert np.allclose(data["entropy"], entropy(weights))
    assert (data["queries"], data["keys"]) == (5, 7)
    assert np.array_equal(data["small"], data["weights"])


def test_among_others_a_large_head_is_pooled_by_its_largest() -> None:
    data = heads_view(alpha(1, 2, 128, 256), ["a"])["data"]
    assert data["small"].dtype == np.uint8
    blocks = data["weights"].reshape(1, 2, 64, 2, 64, 4)
    assert np.array_equal(data["small"], blocks.max((3, 5)))


def test_a_head_that_looks_at_nothing_is_zero() -> None:
    data = heads_view(np.zeros((1, 1, 2, 2)), ["a"])["data"]
    assert not data["weights"].any() and np.isnan(data["entropy"]).all()


def test_what_a_transformer_s_capture_kept() -> None:
    pytest.importorskip("transformers")
    from qkv.transformers import CapturedAttention, CapturedLayer

    weights = alpha(2, 1, 3, 5, 5).astype(np.float32)
    layers = [CapturedLayer(f"layer.{i}", 5, 5, cells=x) for i, x in enumerate(weights)]
    [view] = build_views(CapturedAttention(layers, TOKENS))
    assert view["data"]["names"] == ["layer.0", "layer.1"]
    assert view["data"]["tokens"] == TOKENS
    assert np.allclose(view["data"]["entropy"], entropy(weights[:, 0].astype(np.float64)))
    # Pooled: what is there cannot tell the entropy.
    pooled = [CapturedLayer(x.name, 9, 9, cells=x.cells) for x in layers]
    [view] = build_views(CapturedAttention(pooled))
    assert np.isnan(view["data"]["entropy"]).all() and "largest" in view["data"]["note"]
    assert (view["data"]["queries"], view["data"]["weights"].shape[-1]) == (9, 5)


def test_what_a_capture_of_nn_saw(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from qkv.nn.captured_attention import CapturedAttention

    weights = alpha(2, 2, 3, 4, 4)
    seen = CapturedAttention({f"layers.{i}": torch.tensor(x) for i, x in enumerate(weights)})
    [view] = build_views(seen.select_sequence(1))
    assert view["data"]["names"] == ["layers.0", "layers.1"]
    assert np.allclose(view["data"]["entropy"], entropy(weights[:, 1]))
    assert (
        seen.select_sequence(1).to_html(tmp_path / "seen.html") is None
    )  # a notebook would print it
    assert (
        seen.select_sequence(1).to_html() == (tmp_path / "seen.html").read_text() != seen.to_html()
    )
    with pytest.raises(qkv.QkvError, match="nothing was recorded"):
        CapturedAttention().to_html()


def test_what_cannot_be_shown_is_named() -> None:
    with pytest.raises(DtypeError, match="or a sentence, not object"):
        build_views(object())
    with pytest.raises(qkv.QkvError, match="no view is named 'nope': the views are database, data"):
        build_views({"view": "nope"})
    for nothing in ([], {}):
        with pytest.raises(qkv.QkvError, match="nothing to show"):
            to_html(nothing)


def test_the_view_in_a_browser(page: Any, tmp_path: Path) -> None:
    weights = alpha(2, 3, 5, 5)
    view = heads_view(weights, ["layer.0", "layer.1"], labels=TOKENS)
    to_html(view, tmp_path / "heads.html")
    page.goto((tmp_path / "heads.html").as_uri())
    result = entropy(weights)
    for i, j in np.ndindex(2, 3):
        shown = page.get_by_test_id(f"entropy-{i}-{j}").inner_text()
        assert abs(float(shown) - result[i, j]) <= 0.0051

    page.get_by_test_id("head-1-2").click()
    assert page.get_by_test_id("head-title").inner_text() == "Layer 1, head 2"
    page.keyboard.press("ArrowLeft")
    assert page.get_by_test_id("head-title").inner_text() == "Layer 1, head 1"
    assert f"Entropy {result[1, 1]:.3f}" in page.get_by_test_id("head-entropy").inner_text()

    # The cell under the cursor: by keyboard, said and shown to half a step of its byte.
    page.get_by_test_id("head").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    announcement = page.get_by_test_id("announce").text_content()
    assert announcement == page.get_by_test_id("head-readout").text_content()
    names, _, number = announcement.rpartition("  ")
    assert names == f"{TOKENS[2]} → {TOKENS[1]}"
    near, error = map(float, number.split(" ± "))
    assert abs(near - weights[1, 1, 2, 1]) <= 2 * error < 0.02
    assert page.get_by_test_id("head-row").inner_text() == f"“{TOKENS[2]}” attends to"
    best = float(page.get_by_test_id("head-bars-0").inner_text())
    assert abs(best - weights[1, 1, 2].max()) < 0.01
    assert page.locator("img").count() == 0


def test_the_heads_of_a_large_model_are_opened_one_by_one(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.page.packing.MIN_DEFERRED_BYTES", 50)
    weights = alpha(2, 2, 5, 5)
    to_html(heads_view(weights, ["a", "b"]), tmp_path / "late.html")
    assert (tmp_path / "late.html").read_text().count('id="qkv-part-') == 4
    page.goto((tmp_path / "late.html").as_uri())
    for i, j in np.ndindex(2, 2):
        page.get_by_test_id(f"head-{i}-{j}").click()
        expected = weights[i, j, 0].max()
        page.wait_for_function(
            "([list, due]) => Math.abs(list.querySelector('.number').textContent - due) < 0.006",
            arg=[page.get_by_test_id("head-bars").element_handle(), expected],
        )


def test_a_large_head_is_read_cell_by_cell(page: Any, tmp_path: Path) -> None:
    n = 2048
    weights = np.zeros((1, 1, n, n))
    weights[0, 0, 3, 2047] = 0.5
    to_html(heads_view(weights, ["long"]), tmp_path / "long.html")
    page.goto((tmp_path / "long.html").as_uri())
    note = page.get_by_test_id("head-note")
    assert "the largest of 4 × 4 numbers" in note.inner_text()
    page.get_by_test_id("head").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "End"):
        page.keyboard.press(key)
    assert page.get_by_test_id("head-readout").inner_text().startswith("3 → 2047  0.500")
    for _ in range(9):
        page.keyboard.press("+")
    page.wait_for_function(
        "element => !element.textContent.includes('largest of')", arg=note.element_handle()
    )
    page.keyboard.press("0")
    page.wait_for_function(
        "element => element.textContent.includes('4 × 4')", arg=note.element_handle()
    )


def test_a_head_is_zoomed_and_dragged_by_hand(page: Any, tmp_path: Path) -> None:
    view = heads_view(alpha(1, 1, 64, 64), ["a"])
    to_html([view], tmp_path / "heads.html")
    page.goto((tmp_path / "heads.html").as_uri())
    canvas, readout = page.get_by_test_id("head"), page.get_by_test_id("head-readout")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def cell(x: float, y: float) -> tuple[int, int]:
        page.mouse.move(x, y)
        row, _, rest = readout.inner_text().partition(" → ")
        return int(row), int(rest.split()[0])

    middle, aside = cell(x, y), cell(x + 120, y + 120)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)  # e² times as large, about the pointer
    page.keyboard.up("Control")
    wait_until(page, lambda: cell(x + 120, y + 120) != aside)  # a wheel is not waited for
    near = cell(x + 120, y + 120)
    assert cell(x, y) == middle
    for i in (0, 1):
        assert near[i] - middle[i] == pytest.approx((aside[i] - middle[i]) / np.exp(2), abs=1.2)
    # What was under the pointer stays under it.
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 45, steps=3)
    page.mouse.up()
    assert cell(x + 60, y + 45) == middle
    assert cell(x, y) != middle
