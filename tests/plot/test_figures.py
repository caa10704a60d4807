"""Every picture: drawn without a screen from what its twin gives, and nothing covers its words."""

from __future__ import annotations

import inspect
import io
import itertools
import sys
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import plot, scores
from qkv.errors import ArgumentError, MissingExtraError, ShapeError
from qkv.plot import data

pytest.importorskip("matplotlib")

rng = np.random.default_rng(0)
WORDS = ["When", "he", "saw", "his", "owner,", "the", "dog", "was", "extraordinarily", "$happy"]
x = rng.normal(size=(3, 4, 10, 4))
ALPHA = qkv.weights(x, x)
KEY = np.sort(rng.uniform(0, 5, 30))

FIGURES: dict[str, Any] = {
    "alignment": lambda: plot.alignment(ALPHA[0, 0], WORDS, WORDS),
    "alignment, uneven": lambda: plot.alignment(ALPHA[0, 0, :4], WORDS[:4], WORDS),
    "bars": lambda: plot.bars(WORDS[:3], [0.5, 0.2, 0.1], others=9),
    "entropy": lambda: plot.entropy(ALPHA),
    "entropy, one head": lambda: plot.entropy(ALPHA[:1, :1]),
    "flow": lambda: plot.flow(ALPHA, WORDS, 3),
    "flow, one layer": lambda: plot.flow(ALPHA[0], WORDS),
    "heads": lambda: plot.heads(ALPHA, title="every head"),
    "heads, one": lambda: plot.heads(np.full((1, 1, 200, 200), 0.005), title="one"),
    "heatmaps": lambda: plot.heatmaps(ALPHA, xticks=WORDS, yticks=WORDS),
    "heatmaps, pooled": lambda: plot.heatmaps(np.eye(900), pool="mean"),
    "kernels": lambda: plot.kernels(),
    "regression": lambda: plot.regression(KEY, np.sin(KEY), ["gaussian", "boxcar"], truth=np.sin),
    "regression, one": lambda: plot.regression(KEY, np.sin(KEY)),
    "surfaces": lambda: plot.surfaces(["dot", "cosine", "gaussian", "laplace", "boxcar"]),
    "surfaces, one": lambda: plot.surfaces({"any": lambda q, k: q - k[:, 0]}),
}


def labels(axes: Any) -> list[Any]:
    """The words around one panel that are to be seen."""
    result = [axes.title, axes.xaxis.label, axes.yaxis.label] if axes.axison else [axes.title]
    for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
        low, high = sorted(axis.get_view_interval())
        at = {label: label.get_position()[axis is axes.yaxis] for label in axis.get_ticklabels()}
        result += [label for label in at if low <= at[label] <= high]
    return [label for label in result if label.get_visible() and label.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_draws_and_nothing_covers_a_word(name: str) -> None:
    import matplotlib.pyplot as plt

    figure = FIGURES[name]()
    assert not plt.get_fignums()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")

    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    panels = [axes for axes in figure.axes if axes not in bars and axes.axison]
    shown = [label for axes in figure.axes for label in labels(axes)]
    boxes = {label: label.get_window_extent().padded(-1.0) for label in shown}
    page = figure.bbox.padded(2)
    for label, box in boxes.items():
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert inside, f"{label.get_text()!r} is cut off"
        for other in bars + panels:
            over = other.get_window_extent().padded(-2)
            assert not box.overlaps(over), f"{label.get_text()!r} is covered"
    for a, b in itertools.combinations(boxes, 2):
        if a.get_rotation() % 90 == 0 and b.get_rotation() % 90 == 0:
            assert not boxes[a].overlaps(boxes[b]), f"{a.get_text()!r} and {b.get_text()!r} meet"


def test_every_picture_is_here_and_has_a_twin() -> None:
    names = {name for name in plot.__all__ if name != "data"}
    assert names == {name.partition(",")[0] for name in FIGURES}
    for name in names:
        twin = inspect.signature(getattr(data, name)).parameters
        assert set(twin) - {"most", "points"} <= set(
            inspect.signature(getattr(plot, name)).parameters
        )


def test_heads_and_entropy_are_their_twins() -> None:
    panel, bar = plot.heads(ALPHA).axes
    cells = data.heads(ALPHA).cells.reshape(-1, 10, 10)
    for image, expected in zip(panel.images, cells, strict=True):
        np.testing.assert_array_equal(image.get_array(), expected)
    assert bar.get_ylim() == (0, ALPHA.max())
    panel, _ = plot.entropy(ALPHA).axes
    actual, most = data.entropy(ALPHA)
    np.testing.assert_array_equal(panel.images[0].get_array(), actual)
    assert [t.get_text() for t in panel.texts] == [f"{h:.1f}" for h in actual.flat]
    assert f"{most:.2f} nats" in panel.get_title()


def test_pooling_is_said_in_the_title() -> None:
    large = np.zeros((1, 2, 96, 96))
    large[0, 0, 5, 7] = 0.5
    for pool, value in (("max", 0.5), ("mean", 0.125)):
        panel = plot.heads(large, title="heads", pool=pool).axes[0]
        assert panel.get_title() == f"heads\npooled: {pool} of up to 2 × 2"
        assert panel.images[0].get_array()[2, 3] == value
    figure = plot.heatmaps(np.eye(900), pool="mean")
    cells = figure.axes[0].images[0].get_array()
    size = -(-900 // cells.shape[0])
    assert figure.get_suptitle() == f"pooled: mean of up to {size} × {size}"
    np.testing.assert_allclose(cells, data.heatmaps(np.eye(900), cells.shape, "mean").cells[0, 0])
    assert figure.axes[0].images[0].norm.vmax == cells.max() < 1
    signed = plot.heatmaps(rng.normal(size=(900, 900)))
    assert signed.get_suptitle().startswith("pooled: strongest of")
    assert not plot.heatmaps(np.eye(5)).get_suptitle()


def test_kernels_surfaces_and_regression_are_their_twins() -> None:
    for panel, value in zip(plot.kernels().axes, data.kernels().values.values(), strict=True):
        np.testing.assert_array_equal(panel.lines[0].get_ydata(), value)
    by = {"σ = 1": scores.Gaussian(), "mine": lambda q, k: q * k[:, 0]}
    panels = plot.surfaces(by).axes[:2]
    for panel, (name, value) in zip(panels, data.surfaces(by).values.items(), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), value)
        assert panel.get_title().startswith(name)
    below = panels[0].images[0]
    assert (below.norm.vmin, below.norm.vmax, below.cmap.name) == (-8, 0, "Blues_r")
    figure = plot.regression(KEY, np.sin(KEY), truth=np.cos)
    fit = data.regression(KEY, np.sin(KEY)).fits["gaussian"]
    above, below, _ = figure.axes
    points, truth, curve = above.lines
    np.testing.assert_array_equal(points.get_ydata(), np.sin(KEY))
    np.testing.assert_array_equal(truth.get_ydata(), np.cos(truth.get_xdata()))
    np.testing.assert_array_equal(curve.get_ydata(), fit.fitted)
    np.testing.assert_array_equal(below.collections[0].get_array(), fit.weights.T)


def test_lines_are_their_twins() -> None:
    words = np.array(WORDS)
    assert len(plot.alignment(ALPHA[0, 0], words, words, least=2).axes[0].collections) == 0
    panel = plot.alignment(ALPHA[0, 0], least=0.1).axes[0]
    links = data.alignment(ALPHA[0, 0], least=0.1)
    (lines,) = panel.collections
    widths = lines.get_linewidths()
    assert len(lines.get_segments()) == len(links)
    assert [links[i].weight for i in np.argsort(widths)[::-1]] == [x.weight for x in links]
    assert len({t.get_text() for t in panel.texts} & {f"{w:.2f}" for w in ALPHA[0, 0].max(1)})

    one, every = plot.flow(ALPHA, WORDS, 3).axes
    assert [t.get_text() for t in one.get_yticklabels()] == WORDS
    shares = data.flow(ALPHA).rollout[-1, 3]
    assert [t.get_text() for t in every.get_yticklabels()] == [f"{100 * s:.0f} %" for s in shares]
    starts = {tuple(segment[0]) for segment in one.collections[0].get_segments()}
    assert starts == {(1.0, 3.0), (2.0, 3.0), (3.0, 3.0)}


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="query must be from -10 to 9, not 10"):
        plot.flow(ALPHA, WORDS, 10)
    with pytest.raises(ShapeError, match="words has 2 entries; expected 10, one per token"):
        plot.flow(ALPHA, ["a", "b"])
    with pytest.raises(ShapeError, match="keys has 1 entries; expected 10, one per key"):
        plot.alignment(ALPHA[0, 0], WORDS, ["a"])
    with pytest.raises(ArgumentError, match="reach"):
        plot.kernels(reach=0)


@pytest.mark.parametrize("name", [name for name in FIGURES if "," not in name])
def test_without_matplotlib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "qkv.plot.figures", raising=False)
    with pytest.raises(MissingExtraError, match="plots need matplotlib"):
        FIGURES[name]()
