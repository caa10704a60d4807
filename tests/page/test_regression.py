"""The view Regression: used as a person would, and its numbers against Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.page import to_html
from qkv.page.points import points as points_of

pytestmark = pytest.mark.sample_of_module(4)

RNG = np.random.default_rng(3)
X = np.sort(RNG.uniform(0, 4, 14)).round(2)
Y = (np.sin(X) + RNG.normal(0, 0.2, 14)).round(2)
LOW, HIGH = X[0] - 0.06 * (X[-1] - X[0]), X[-1] + 0.06 * (X[-1] - X[0])
SHOWN = {"atol": 6e-4}
"""What is written with three digits after the point."""


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Any:
    data = {"x": X.tolist(), "y": Y.tolist(), "score": "gaussian", "bandwidth": 0.4}
    to_html({"view": "regression", "title": "points", "data": data}, tmp_path / "r.html")
    page.goto((tmp_path / "r.html").as_uri())
    page.get_by_text("as numbers").click()
    move_query(page, 0.5)
    return page


def move_query(page: Any, share: float) -> float:
    """Moves the query to about a share of the range, and gives it."""
    at = round(float(LOW + (HIGH - LOW) * share), 2)
    type_number(page, "regression-query", at)
    return at


def type_number(page: Any, name: str, to: float) -> None:
    page.get_by_test_id(f"{name}-number").fill(str(to))
    page.get_by_test_id(f"{name}-number").press("Enter")


def read_number(page: Any, name: str) -> float:
    text = page.get_by_test_id(name).inner_text().split()[0].rstrip(",")
    return float(text.replace("−", "-"))


def wait_for_frame(page: Any) -> None:
    """After the next frame is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def test_what_is_said_of_the_query_touches_no_point(page: Any, tmp_path: Path) -> None:
    to_html({"view": "regression"}, tmp_path / "r.html")
    page.goto((tmp_path / "r.html").as_uri())
    for query in (1.2, 2, 3.4):
        type_number(page, "regression-query", query)
        wait_for_frame(page)
        label = page.get_by_test_id("regression-label").bounding_box()
        label |= {"y": label["y"] + 5, "height": label["height"] - 10}  # its letters, not its line
        for dot in page.locator("svg.points .dot").all():
            box = dot.bounding_box()
            apart = [
                label[axis] >= box[axis] + box[size] or box[axis] >= label[axis] + label[size]
                for axis, size in (("x", "width"), ("y", "height"))
            ]
            assert any(apart), (query, label, box)


def points(page: Any) -> tuple[np.ndarray, np.ndarray]:
    wait_for_frame(page)
    read = "(all) => all.map((input) => Number(input.value))"
    both = (page.locator(f"[data-testid$='-{axis}'][type=number]") for axis in "xy")
    return tuple(np.array(some.evaluate_all(read)) for some in both)  # type: ignore[return-value]


def read_weights(page: Any) -> np.ndarray:
    result = page.locator("[data-testid^='point-'][data-testid$='-weight']").all_inner_texts()
    return np.array([float(text.replace("none", "nan")) for text in result])


def kernel(name: str, width: float, on_empty: str = "nan") -> dict[str, Any]:
    if name in ("gaussian", "laplace"):
        return {"score": scores.NAMES[name](width), "weighting": "softmax"}
    score = scores.Constant() if name == "constant" else scores.NAMES[name](width)
    return {"score": score, "weighting": weightings.Normalized(on_empty)}


def check(page: Any, at: float, options: dict[str, Any]) -> None:
    """Everything that is shown of a query, from the points that are shown."""
    x, y = points(page)
    query, key = np.array([[at]]), x[:, None]
    out, alpha = qkv.attend(query, key, y[:, None], return_weights=True, engine="dense", **options)
    np.testing.assert_allclose(read_weights(page), alpha[0], **SHOWN)
    np.testing.assert_allclose(read_number(page, "regression-value"), out[0, 0], rtol=1e-3, **SHOWN)
    p = alpha[0][alpha[0] > 0]
    expected = np.exp(-(p * np.log(p)).sum())
    np.testing.assert_allclose(read_number(page, "regression-effective"), expected, atol=6e-3)
    np.testing.assert_allclose(
        read_number(page, "regression-loo"), held_out(x, y, options), rtol=1e-3
    )


def held_out(x: np.ndarray, y: np.ndarray, options: dict[str, Any]) -> float:
    key = x[:, None]
    result = qkv.attend(key, key, y[:, None], mask=~masks.window(0), engine="dense", **options)[
        :, 0
    ]
    off = (result - y)[~np.isnan(result)]
    return float(np.sqrt((off**2).mean()))


@pytest.mark.parametrize("share", [0.1, 0.62])
def test_every_kernel_gives_pythons_numbers(opened: Any, share: float) -> None:
    at = move_query(opened, share)
    kinds = ["gaussian", "laplace", "boxcar", "triangular", "epanechnikov", "constant"]
    for name, width in zip(kinds, (0.4, 0.3, 0.9, 1.2, 1.1, 1.0), strict=True):
        opened.get_by_test_id("regression-kernel").select_option(name)
        wait_for_frame(opened)
        if name != "constant":
            type_number(opened, "regression-bandwidth", width)
        check(opened, at, kernel(name, width))


def test_a_query_without_neighbours(opened: Any) -> None:
    opened.get_by_test_id("regression-kernel").select_option("boxcar")
    type_number(opened, "regression-bandwidth", 0.01)
    at = move_query(opened, 0.02)
    wait_for_frame(opened)
    assert opened.get_by_test_id("regression-value").inner_text() == "no value"
    opened.get_by_test_id("regression-empty").select_option("nearest")
    check(opened, at, kernel("boxcar", 0.01, "nearest"))


def test_points_are_dragged(opened: Any) -> None:
    at = move_query(opened, 0.5)
    before = points(opened)
    dot = opened.get_by_test_id("point-6").bounding_box()
    middle = dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2
    opened.mouse.move(*middle)
    opened.mouse.down()
    opened.mouse.move(middle[0] + 40, middle[1] - 60, steps=4)
    opened.mouse.up()
    x, y = points(opened)
    assert x[6] > before[0][6]
    assert y[6] > before[1][6]
    np.testing.assert_array_equal(np.delete(x, 6), np.delete(before[0], 6))
    check(opened, at, kernel("gaussian", 0.4))


def test_points_are_dragged_by_a_finger(opened: Any) -> None:
    before = points(opened)
    dot = opened.get_by_test_id("point-2").bounding_box()
    x, y = dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2
    session = opened.context.new_cdp_session(opened)
    session.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    for kind, by in (("touchStart", 0), ("touchMove", 25), ("touchMove", 50), ("touchEnd", None)):
        where = [] if by is None else [{"x": x, "y": y + by}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": where})
    after = points(opened)
    assert after[1][2] < before[1][2]
    assert abs(after[0][2] - before[0][2]) < 0.02


def test_points_are_moved_by_keys(opened: Any) -> None:
    at = move_query(opened, 0.5)
    before = points(opened)
    opened.get_by_test_id("point-0").focus()
    for key in ("PageDown", "ArrowRight", "ArrowRight", "Shift+ArrowUp"):
        opened.keyboard.press(key)
        wait_for_frame(opened)
    x, y = points(opened)
    assert x[1] > before[0][1]
    assert y[1] > before[1][1]
    assert "Point 2: x" in opened.get_by_test_id("announce").inner_text()
    check(opened, at, kernel("gaussian", 0.4))
    opened.keyboard.press("Delete")
    assert len(points(opened)[0]) == len(X) - 1
    opened.keyboard.press("+")
    assert len(points(opened)[0]) == len(X)
    check(opened, at, kernel("gaussian", 0.4))


def test_a_point_is_typed_and_removed(opened: Any) -> None:
    opened.get_by_test_id("point-3-y").fill("5.5")
    opened.get_by_test_id("point-3-y").press("Enter")
    assert points(opened)[1][3] == 5.5
    check(opened, move_query(opened, 0.3), kernel("gaussian", 0.4))
    opened.get_by_role("button", name="Remove point 4").click()
    assert 5.5 not in points(opened)[1]


def test_the_best_bandwidth_has_the_least_error(opened: Any) -> None:
    wait_for_frame(opened)
    opened.get_by_test_id("regression-best").click()
    wait_for_frame(opened)
    actual = read_number(opened, "regression-loo")
    widths = (HIGH - LOW) * 0.01 ** np.linspace(1, 0, 41)
    expected = min(held_out(X, Y, kernel("gaussian", width)) for width in widths)
    np.testing.assert_allclose(actual, expected, rtol=2e-3)


def test_a_row_of_the_heatmap_moves_the_query(opened: Any) -> None:
    opened.get_by_test_id("regression-weights").focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowDown")
    at = LOW + (HIGH - LOW) * 1.5 / 16
    check(opened, at, kernel("gaussian", 0.4))
    readout = opened.get_by_test_id("regression-weights-readout").inner_text()
    alpha = qkv.weights(np.array([[at]]), X[:, None], score=scores.Gaussian(0.4))[0]
    np.testing.assert_allclose(float(readout.split()[-1]), alpha[0], rtol=2e-3)


def test_a_table_of_numbers_answers_as_the_database_does(page: Any, tmp_path: Path) -> None:
    rows = [(2.9, 58.0), (3.1, 60.0), (3.4, 70.0), (3.6, None), (3.9, 88.0), (4.0, 95.0)]
    table = {"gpa": [x for x, _ in rows], "salary": [y for _, y in rows]}
    D: Any = qkv.Database.from_columns(table, key="gpa", value="salary")
    to_html([D, points_of(D)], tmp_path / "d.html")
    page.goto((tmp_path / "d.html").as_uri())
    page.get_by_test_id("tab-regression").click()
    for at in (3.0, 3.55):
        type_number(page, "regression-query", at)
        wait_for_frame(page)
        value = read_number(page, "regression-value")
        np.testing.assert_allclose(value, D.ask(at).value, rtol=1e-3)
    assert "gpa" in page.get_by_test_id("regression-plot").text_content()
    with pytest.raises(qkv.QkvError, match="numbers"):
        points_of(qkv.Database({"Li": "Mu"}))


def test_a_page_asks_before_points_that_were_moved_are_lost(opened: Any) -> None:
    leaves = "() => dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert opened.evaluate(leaves)
    opened.get_by_test_id("point-0-y").fill("0.25")
    opened.get_by_test_id("point-0-y").press("Enter")
    assert not opened.evaluate(leaves)
