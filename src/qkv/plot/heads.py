"""All heads of a model at once: what each looks at, and how widely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.plot import data, style
from qkv.plot.data import Pool
from qkv.plot.style import FRAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL, GAP, LABELS = 0.62, 1.08, (1.1, 0.72)
"""Inches of one head, heads from one to the next, and what words and the bar take beside them."""


def heads(weights: Any, *, pool: Pool = "max", title: str = "") -> Figure:
    """α of every head as a small picture: layers from the top down, heads from left to right.

    weights: (layers, heads, n, m) of any framework, or what `qkv.transformers.capture` gave. The
    colours go by the root of a weight, so that small ones are told apart. Heads of more than
    48 × 48 weights are pooled, and the title says so; `qkv.plot.data.heads` gives the numbers.

    >>> figure = heads(np.full((2, 3, 4, 4), 0.25))
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['0', '1']
    """
    cells, block = data.heads(weights, pool=pool)
    layers, count = cells.shape[:2]
    said = list(filter(None, [title, style.pooling(block, pool) if block != (1, 1) else ""]))
    figure, panel = _panel(layers, count, CELL * GAP, len(said))

    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    norm, colours = style.scale(cells, "Reds")
    if norm.vmin == 0:
        norm = PowerNorm(0.5, 0.0, norm.vmax)
    for i, j in np.ndindex(layers, count):
        left, top = GAP * j, GAP * i
        panel.imshow(
            cells[i, j],
            norm=norm,
            cmap=colours,
            interpolation="nearest",
            extent=(left - 0.5, left + 0.5, top + 0.5, top - 0.5),
        )
    panel.set(xlim=(-0.5, GAP * (count - 1) + 0.5), ylim=(GAP * (layers - 1) + 0.5, -0.5))
    style.frame(panel, "head", "layer", "\n".join(said))
    panel.set_xticks(GAP * np.arange(count), map(str, range(count)))
    panel.set_yticks(GAP * np.arange(layers), map(str, range(layers)))
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    style.colour_bar(figure, ScalarMappable(norm, colours), panel, layers * CELL, "weight")
    return figure


def entropy(weights: Any) -> Figure:
    """H = −Σⱼ αⱼ log αⱼ of every head, the mean over its queries: a row for each layer.

    weights: (layers, heads, n, m) of any framework, or what `qkv.transformers.capture` gave.
    Pale heads look at one key, dark ones at all alike: the colours end at log m, and exp(H) keys
    count in effect. `qkv.plot.data.entropy` gives the numbers.

    >>> figure = entropy(np.full((1, 2, 4, 4), 0.25))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.4', '1.4']
    """
    found, most = data.entropy(weights)
    layers, count = found.shape
    cell = 0.42
    figure, panel = _panel(layers, count, cell, 1)
    norm, colours = style.scale(np.array([most]), "Reds")
    image = panel.imshow(found, norm=norm, cmap=colours)
    style.frame(panel, "head", "layer", f"entropy of each head, at most {most:.2f} nats")
    panel.set_xticks(range(count), map(str, range(count)))
    panel.set_yticks(range(layers), map(str, range(layers)))
    panel.tick_params(length=0)
    panel.spines[:].set(linewidth=0.5, color=FRAME, visible=True)
    texts = {at: f"{x:.1f}" for at, x in np.ndenumerate(found) if x == x}
    style.written(panel, texts, found, norm, colours, 8)
    style.colour_bar(figure, image, panel, layers * cell)
    return figure


def _panel(layers: int, count: int, cell: float, lines: int) -> tuple[Figure, Axes]:
    """A figure that so many cells fill, with so many lines above."""
    width, height = LABELS
    size = max(3.0, count * cell + width), layers * cell + height + 0.15 * lines
    figure = style.blank(size, "compressed")
    return figure, figure.subplots()
