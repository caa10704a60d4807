"""Nadaraya–Watson regression beside the weights that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import DtypeError
from qkv.plot import data, style
from qkv.plot.data import Matrix, Scores
from qkv.plot.style import BLUE, FRAME, INK, RED
from qkv.weightings import WeightingLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def regression(
    key: Any,
    value: Any,
    scores: Scores = "gaussian",
    weighting: WeightingLike | None = None,
    query: Any = None,
    *,
    truth: Callable[[Matrix], Any] | None = None,
) -> Figure:
    """f(q) = Σᵢ α(q, kᵢ) vᵢ over the points (kᵢ, vᵢ), and below it α(q, kᵢ): a column per score.

    key, value: (m,). The weights have a row for each key and lie under the curve that they make,
    so that a column of them is one query's. α is the softmax of a score, or the score over its sum
    where it cannot be negative; or what `weighting` makes of it. truth: a function that the points
    came from, drawn dashed. `qkv.plot.data.regression` gives the numbers.

    >>> x = np.linspace(0, 3, 20)
    >>> figure = regression(x, np.sin(x), ["gaussian", "boxcar"], truth=np.sin)
    >>> figure.axes[2].collections[0].get_array().shape
    (20, 128)
    """
    if not (truth is None or callable(truth)):
        raise DtypeError(f"truth must be a function of the queries, not a {type(truth).__name__}")
    q, k, v, fits = data.regression(key, value, scores, weighting, query)
    count = len(fits)
    figure = style.blank((2.3 * count + 0.9, 4.0), "constrained")
    grid: Any = figure.subplots(2, count, squeeze=False, sharex=True, sharey="row")
    top = max(float(np.nanmax(fit.weights)) for fit in fits.values())
    norm, colours = style.scale(np.array([top]), "Reds")
    for column, (name, fit) in enumerate(fits.items()):
        above, below = grid[:, column]
        above.plot(
            k,
            v,
            "o",
            markersize=3.2,
            color="white",
            mec=INK,
            mew=0.6,
            label="points",
            clip_on=False,
        )
        if truth is not None:
            above.plot(q, truth(q), "--", color=BLUE, linewidth=1.1, label="truth")
        above.plot(q, fit.fitted, color=RED, linewidth=1.7, label="f(q)")
        style.frame(above, "", "value" if column == 0 else "", name)
        image = below.pcolormesh(q, np.arange(len(k)), fit.weights.T, norm=norm, cmap=colours)
        image.set_rasterized(True)
        below.invert_yaxis() if column == 0 else None
        style.frame(below, "query", "key, by rising k" if column == 0 else "")
        below.spines[:].set(visible=True, color=FRAME)
    grid[0, 0].legend(frameon=False, fontsize=7.5, labelcolor=INK, handlelength=1.4)
    style.colour_bar(figure, image, grid[1, -1], 1.5, "weight")
    return figure
