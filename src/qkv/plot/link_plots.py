"""Weights as lines: from queries to keys, and through the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import ArgumentError
from qkv.plot import data, style
from qkv.plot.data import Matrix
from qkv.plot.style import FRAME, INK, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORD_PITCH_INCHES, LINE_POINTS_PER_WEIGHT = 0.25, 5.0
"""The distance of words in inches, and the width in points of a line with weight 1."""


def alignment(
    weights: Any,
    queries: Sequence[Any] | None = None,
    keys: Sequence[Any] | None = None,
    *,
    least: float = 0.02,
    title: str = "",
) -> Figure:
    """Draw α(qᵢ, kⱼ) as lines from queries (left) to keys (right); their width is the weight.

    weights: (n, m) of any framework; queries, keys: one label each. Weights below `least` are not
    drawn. The number next to a query is its largest weight. `qkv.plot.data.alignment` returns the
    lines.

    >>> figure = alignment([[0.9, 0.1], [0.0, 1.0]], ["le", "chat"], ["the", "cat"])
    >>> len(figure.axes[0].collections[0].get_segments())
    3
    """
    matrix = data.as_grid(weights, "weights", {2: "(n, m)"})[0, 0]
    n, m = matrix.shape
    left = style.validate_labels(range(n) if queries is None else queries, n, "queries", "query")
    right = style.validate_labels(range(m) if keys is None else keys, m, "keys", "key")
    links = data.alignment(matrix, least)
    label_width = style.label_inches(left) + style.label_inches(right)
    size = 3.2 + label_width, WORD_PITCH_INCHES * max(n, m) + 0.55
    figure = style.new_figure(size, "constrained")
    panel: Axes = figure.subplots()
    tall = max(n, m)
    at_left, at_right = ((np.arange(c) + 0.5) * tall / c for c in (n, m))
    ends = [((0.0, at_left[i]), (1.0, at_right[j])) for i, j, _ in links]
    _draw_lines(panel, ends, np.array([link.weight for link in links]))
    strongest = [f"{weight:.2f}" for weight in np.fmax.reduce(matrix, axis=1)]
    _draw_words(panel, 0.0, at_left, strongest, -6, 7)
    _draw_words(panel, 0.0, at_left, left, -30, 9)
    _draw_words(panel, 1.0, at_right, right, 6, 9)
    panel.set(xlim=(-0.02, 1.02), ylim=(tall, 0))
    panel.set_title(title or f"weights from {least:g} up", fontsize=9, color=INK, parse_math=False)
    panel.set_axis_off()
    return figure


def flow(weights: Any, words: Sequence[Any] | None = None, query: int = -1) -> Figure:
    """Draw how information reaches one token through the layers, as raw weights and as rollout.

    weights: (layers, heads, n, n) of any framework, or the result of `qkv.transformers.capture`.
    Left, raw: Āₗ, the mean of a layer's heads, as lines from the token to the layer below. Right,
    rollout: the lines of Rₗ = ½(Āₗ + 1) Rₗ₋₁ that lead to the token, and the share of each input
    token. `qkv.plot.data.flow` returns the numbers.

    >>> figure = flow(np.full((2, 1, 3, 3), 1 / 3), ["so", "it", "goes"])
    >>> [label.get_text() for label in figure.axes[1].get_yticklabels()]
    ['25 %', '25 %', '50 %']
    """
    raw, rollout = data.flow(weights)
    layers, n, _ = raw.shape
    if not -n <= query < n:
        raise ArgumentError(f"query must be from {-n} to {n - 1}, not {query!r}")
    query %= n
    names = style.validate_labels(range(n) if words is None else words, n, "words", "token")
    width = 2 * max(1.9, 0.42 * layers) + style.label_inches(names) + 0.9
    figure = style.new_figure((width, WORD_PITCH_INCHES * n + 1.2), "constrained")
    figure.suptitle(f"“{names[query]}”", fontsize=10, color=INK, parse_math=False)
    raw_panel, rollout_panel = figure.subplots(1, 2)

    own_weights = np.zeros_like(raw)
    own_weights[:, query] = raw[:, query]
    shares = np.zeros(n)
    shares[query] = 1.0
    through = np.zeros_like(raw)
    for layer in reversed(range(layers)):
        through[layer] = shares[:, None] * (raw[layer] + np.eye(n)) / 2
        shares = through[layer].sum(0)
    for panel, lines, title in (
        (raw_panel, own_weights, "raw: what each layer weighs"),
        (rollout_panel, through, "rollout: what it is made of"),
    ):
        ends, alpha = _layer_lines(lines)
        _draw_lines(panel, ends, alpha)
        style.style_axes(panel, "after layer", "", title)
        panel.plot(*np.mgrid[0 : layers + 1, 0:n].reshape(2, -1), "o", ms=1.6, color=FRAME)
        panel.plot([layers], [query], "o", ms=5, color=RED)
        panel.set_xticks(range(layers + 1), ["read", *map(str, range(layers))])
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        panel.set_ylim(n - 0.5, -0.5)
    raw_panel.set_yticks(range(n), names, parse_math=False)
    rollout_panel.set_yticks(range(n), [f"{100 * share:.0f} %" for share in rollout[-1, query]])
    return figure


def _layer_lines(alpha: Matrix) -> tuple[list[Any], Matrix]:
    """Return lines from token i after layer l to token j before it, and their weights."""
    positions = np.argwhere(alpha >= 0.005)
    ends = [((layer + 1, i), (layer, j)) for layer, i, j in positions.tolist()]
    return ends, alpha[tuple(positions.T)]


def _draw_lines(panel: Axes, ends: Sequence[Any], weights: Matrix) -> None:
    from matplotlib.collections import LineCollection

    if not len(ends):
        return
    opacity = 0.15 + 0.7 * np.sqrt(np.clip(weights, 0, 1))
    widths = 0.3 + LINE_POINTS_PER_WEIGHT * np.clip(weights, 0, None)
    panel.add_collection(
        LineCollection(ends, linewidths=widths, colors=RED, alpha=opacity, capstyle="round")
    )


def _draw_words(
    panel: Axes, x: float, at: Matrix, words: Sequence[str], shift: float, size: float
) -> None:
    """Write words `shift` points to the right of x, or to the left if it is negative."""
    for y, word in zip(at, words, strict=True):
        panel.annotate(
            word,
            (x, y),
            xytext=(shift, 0),
            textcoords="offset points",
            ha="right" if shift < 0 else "left",
            va="center",
            fontsize=size,
            color=INK,
            parse_math=False,
            annotation_clip=False,
        )
