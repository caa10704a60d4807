"""Plots of scores: shapes of kernels, surfaces over query and key, and regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qkv.errors import DtypeError
from qkv.plot import data, style
from qkv.plot.data import KERNELS, Matrix, Scores
from qkv.plot.style import BLUE, FRAME, INK, RED
from qkv.weightings import WeightingLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMULAS = {
    "Dot": "q·k",
    "ScaledDot": "q·k / √d",
    "Cosine": "q·k / ‖q‖‖k‖τ",
    "Multiplicative": "q·Wk",
    "Additive": "v·tanh(W₁q + W₂k + b)",
    "Gated": "σ(w₁·q + w₂·k + b) q·k",
    "Gaussian": "−‖q − k‖² / 2σ²",
    "Laplace": "−‖q − k‖₁ / b",
    "Boxcar": "1 where r ≤ 1",
    "Triangular": "max(0, 1 − r)",
    "Epanechnikov": "max(0, 1 − r²)",
    "Constant": "1",
    "Exact": "1 where k = q",
}
"""The formula of each score, with r = ‖q − k‖ / width."""


def kernels(scores: Scores = KERNELS, *, reach: float = 2.5) -> Figure:
    """Draw K(r) over the distance r = q − k, one panel per kernel.

    K is the weight before normalization: s for a score that is never negative, and exp(s) for the
    others. scores: one or several names or objects, or a dict with your own names.
    `qkv.plot.data.kernels` returns the numbers.

    >>> figure = kernels(["gaussian", "boxcar"])
    >>> figure.axes[0].lines[0].get_ydata().max()
    np.float64(1.0)
    """
    distance, values = data.kernels(scores, reach)
    known = data.scores_by_name(scores)
    figure, panels = _panel_grid(len(values), (2.0, 1.75), "constrained")
    for panel, (name, value) in zip(panels, values.items(), strict=False):
        panel.fill_between(distance, value, color=RED, alpha=0.12, linewidth=0)
        panel.plot(distance, value, color=RED, linewidth=1.5)
        style.style_axes(panel, "q − k", "", _panel_title(name, known[name], kernel=True))
        panel.set(xlim=(-reach, reach), ylim=(0, 1.08 * max(1.0, float(np.nanmax(value)))))
    panels[0].set_ylabel("K", fontsize=9, color=INK)
    return figure


def surfaces(scores: Scores, *, reach: float = 2.0) -> Figure:
    """Draw s(q, k) over numbers q (vertical) and k (horizontal), with contour lines.

    Each score has its own panel and scale: red above 0, blue below. q and k go from −reach to
    reach. scores: one or several names or objects, or a dict with your own names.
    `qkv.plot.data.surfaces` returns the numbers.

    >>> figure = surfaces(["dot", "gaussian"])
    >>> [panel.get_title().split("\\n")[0] for panel in figure.axes[:2]]
    ['dot', 'gaussian']
    """
    query, key, values = data.surfaces(scores, reach)
    known = data.scores_by_name(scores)
    figure, panels = _panel_grid(len(values), (2.35, 2.2), "compressed")
    for panel, (name, value) in zip(panels, values.items(), strict=False):
        below = float(np.nanmin(value)) < 0 and float(np.nanmax(value)) <= 0
        norm, colours = style.colour_scale(value, "Blues_r" if below else "Reds")
        norm.vmax = 0.0 if below else norm.vmax
        image = panel.imshow(
            value,
            norm=norm,
            cmap=colours,
            interpolation="bilinear",
            extent=(key[0], key[-1], query[0], query[-1]),
            origin="lower",
        )
        levels = np.linspace(np.nanmin(value), np.nanmax(value), 9)[1:-1]
        if levels[0] < levels[-1]:
            panel.contour(key, query, value, levels, colors=INK, linewidths=0.4, alpha=0.5)
        style.style_axes(panel, "k", "", _panel_title(name, known[name]))
        panel.spines[:].set(visible=True, color=FRAME)
        style.add_colour_bar(figure, image, panel, 1.5)
    panels[0].set_ylabel("q", fontsize=9, color=INK)
    return figure


def _panel_grid(
    count: int, size: tuple[float, float], layout: Literal["compressed", "constrained"]
) -> tuple[Figure, list[Any]]:
    """Return a figure with `count` panels, in rows of up to five or as few gaps as possible."""
    columns = min(count, min((5, 4, 3), key=lambda c: (-count % c, -c)))
    rows = math.ceil(count / columns)
    figure = style.new_figure((columns * size[0], rows * size[1]), layout)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for spare in grid.flat[count:]:
        spare.set_axis_off()
    return figure, list(grid.flat[:count])


def _panel_title(name: str, score: Any, kernel: bool = False) -> str:
    formula = FORMULAS.get(type(score).__name__, "")
    if formula and kernel and not score.is_nonnegative:
        formula = f"exp({formula})"
    return f"{name}\n{formula}"


def regression(
    key: Any,
    value: Any,
    scores: Scores = "gaussian",
    weighting: WeightingLike | None = None,
    query: Any = None,
    *,
    truth: Callable[[Matrix], Any] | None = None,
) -> Figure:
    """Draw f(q) = Σᵢ α(q, kᵢ) vᵢ with the points (kᵢ, vᵢ), and α(q, kᵢ) below; a column per score.

    key, value: (m,). The weights have one row per key; a column of them belongs to the query above
    it. The default weighting is softmax, or `normalized` for a score that is never negative. truth:
    the function behind the points, drawn dashed. `qkv.plot.data.regression` returns the numbers.

    >>> x = np.linspace(0, 3, 20)
    >>> figure = regression(x, np.sin(x), ["gaussian", "boxcar"], truth=np.sin)
    >>> figure.axes[2].collections[0].get_array().shape
    (20, 128)
    """
    if not (truth is None or callable(truth)):
        raise DtypeError(f"truth must be a function of the queries, not a {type(truth).__name__}")
    q, k, v, fits = data.regression(key, value, scores, weighting, query)
    count = len(fits)
    figure = style.new_figure((2.3 * count + 0.9, 4.0), "constrained")
    grid: Any = figure.subplots(2, count, squeeze=False, sharex=True, sharey="row")
    top = max(float(np.nanmax(fit.weights)) for fit in fits.values())
    norm, colours = style.colour_scale(np.array([top]), "Reds")
    for column, (name, fit) in enumerate(fits.items()):
        above, below = grid[:, column]
        dots = {"color": "white", "mec": INK, "mew": 0.6, "markersize": 3.2}
        above.plot(k, v, "o", label="points", clip_on=False, **dots)
        if truth is not None:
            above.plot(q, truth(q), "--", color=BLUE, linewidth=1.1, label="truth")
        above.plot(q, fit.fitted, color=RED, linewidth=1.7, label="f(q)")
        style.style_axes(above, "", "value" if column == 0 else "", name)
        image = below.pcolormesh(q, np.arange(len(k)), fit.weights.T, norm=norm, cmap=colours)
        image.set_rasterized(True)
        below.invert_yaxis() if column == 0 else None
        style.style_axes(below, "query", "key, by rising k" if column == 0 else "")
        below.spines[:].set(visible=True, color=FRAME)
    grid[0, 0].legend(frameon=False, fontsize=7.5, labelcolor=INK, handlelength=1.4)
    style.add_colour_bar(figure, image, grid[1, -1], 1.5, "weight")
    return figure
