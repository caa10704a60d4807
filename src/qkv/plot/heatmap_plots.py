"""Heatmaps of attention weights: one row per query, one column per key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import ShapeError
from qkv.plot import data, style
from qkv.plot.data import Matrix, Pool
from qkv.plot.style import FRAME, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

# Text must be sized before the layout is known. These are approximate shares of a panel: for the
# matrix, and for the labels.
PANEL_SHARE, WORD_SHARE = 0.65, 0.15
PANEL_INCHES, MAX_PAGE_INCHES, WORD_PITCH_INCHES = 2.5, 16.0, 8 / 72
"""The size of a panel, the largest size of all panels with labels, and the distance of labels."""
MAX_ANNOTATED_SIDE = 12
MAX_LIVE_PANELS = 32


def heatmaps(
    matrices: Any,
    xlabel: str = "Keys",
    ylabel: str = "Queries",
    titles: str | Sequence[Any] | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | Colormap = "Reds",
    *,
    xticks: Sequence[Any] | None = None,
    yticks: Sequence[Any] | None = None,
    annotate: bool = False,
    pool: Pool = "max",
    block: tuple[int, int] = (1, 1),
) -> Figure:
    """Draw weights α(qᵢ, kⱼ) as a grid of heatmaps on one colour scale, with one colour bar.

    matrices: (rows, columns, queries, keys), (columns, queries, keys) or (queries, keys), of any
    framework, or lists of these. A notebook shows the returned figure; ``savefig`` saves it.

    The scale runs from 0 to the largest value. With negative values it is symmetric about 0, and
    "Reds" becomes "RdBu_r": red for positive, blue for negative. NaN and infinite cells are grey.
    A matrix with more cells than its panel has pixels is pooled, and a title says so. Each cell
    then shows the largest of its weights in magnitude, or with ``pool="mean"`` their mean.
    `qkv.plot.data.heatmaps` returns the numbers.

    titles: one per column, one per panel, or a list for each row.
    figsize: the size of one panel in inches; by default 2.5 × 2.5, and more for many labels.
    xticks, yticks: one label per key and per query, instead of their numbers.
    annotate: write the numbers into the cells of matrices up to 12 × 12.
    block: how many weights each cell already pools, for the title.

    >>> import numpy as np
    >>> from qkv.plot import heatmaps
    >>> figure = heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries")
    >>> panel, colour_bar = figure.axes
    >>> int(panel.images[0].get_array().trace())
    10
    """
    grid = data.heatmaps(matrices, pool=pool).cells
    rows, columns, queries, keys = grid.shape
    headings = _panel_titles(titles, rows, columns)
    key_words = style.validate_labels(xticks, keys, "xticks", "key")
    query_words = style.validate_labels(yticks, queries, "yticks", "query")
    # Cells are square unless the matrix is very long.
    shape = min(max(queries / keys, 1 / 4), 4.0)
    if figsize is None:
        most = min(MAX_PAGE_INCHES / max(rows, columns), MAX_PAGE_INCHES / 2)
        figsize = _panel_size(len(key_words), len(query_words), shape, most)
    width, height = style.validate_figsize(figsize)

    # Labels that are longer than their share of the panels make the figure larger.
    extra_width = max(0.0, style.label_inches(query_words) - WORD_SHARE * width)
    extra_height = max(0.0, style.label_inches(key_words) - WORD_SHARE * height)
    size = columns * width + extra_width, rows * height + extra_height
    figure = style.new_figure(size, "compressed")
    # Without sharex, because its cost is quadratic in the number of panels.
    axes: Any = figure.subplots(rows, columns, squeeze=False)

    panel_width = PANEL_SHARE * min(width, height / shape)
    panel_height = panel_width * shape
    stacked = rows > 1 and panel_height * 72 < 0.6 * 9 * len(ylabel)  # labels would overlap

    norm, colours = style.colour_scale(grid, cmap)
    for i, j in np.ndindex(rows, columns):
        panel: Axes = axes[i, j]
        image = panel.imshow(
            grid[i, j],
            norm=norm,
            cmap=colours,
            aspect="auto",
            interpolation="nearest",
            # The axes count queries and keys, also if a cell pools several of them.
            extent=(-0.5, keys - 0.5, queries - 0.5, -0.5),
        )
        panel.set_box_aspect(shape)
        panel.spines[:].set(linewidth=0.5, color=FRAME)
        panel.set_title(headings[i][j], fontsize=9, color=INK)
        panel.set_xlabel(xlabel if i == rows - 1 else "", fontsize=9, color=INK)
        named = j == 0 and (i == rows // 2 or not stacked)
        panel.set_ylabel(ylabel if named else "", fontsize=9, color=INK)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_parse_math(style.can_typeset(text.get_text()))
        style.set_ticks(panel, "x", key_words, keys, panel_width, shown=i == rows - 1)
        style.set_ticks(panel, "y", query_words, queries, panel_height, shown=j == 0)
        if annotate and max(queries, keys) <= MAX_ANNOTATED_SIDE:
            style.annotate_values(panel, grid[i, j], norm, colours, panel_width / keys)

    style.add_colour_bar(figure, image, axes[:, -1], rows * panel_height)
    if block != (1, 1):
        _add_pooling_title(figure, block, pool, norm)
    _pool_to_pixels(figure, axes, grid, pool, block)
    return figure


def _panel_size(across: int, down: int, shape: float, most: float) -> tuple[float, float]:
    """Return the size of a panel in which this many labels are legible, at most `most`."""
    width, height = (min(WORD_PITCH_INCHES * words / PANEL_SHARE, most) for words in (across, down))
    return max(width, height / shape, PANEL_INCHES), max(height, width * shape, PANEL_INCHES)


def _panel_titles(titles: str | Sequence[Any] | None, rows: int, columns: int) -> list[list[str]]:
    """Return a title for every panel; titles per column go to the first row."""
    blank = [""] * columns
    if titles is None:
        return [blank] * rows
    entries = [titles] if isinstance(titles, str) else list(titles)
    nested = [list(row) for row in entries if isinstance(row, list | tuple)]
    if nested:
        if len(entries) == len(nested) == rows and all(len(row) == columns for row in nested):
            return [[str(title) for title in row] for row in nested]
        raise ShapeError(f"titles is nested; expected {rows} lists of {columns} titles each")
    flat = [str(title) for title in entries]
    if len(flat) == columns:
        return [flat] + [blank] * (rows - 1)
    if len(flat) == rows * columns:
        return [flat[i * columns : (i + 1) * columns] for i in range(rows)]
    raise ShapeError(
        f"titles has {len(flat)} entries; expected {columns}, one per column"
        + (f", or {rows * columns}, one per panel" if rows > 1 else "")
    )


def _add_pooling_title(figure: Figure, block: tuple[int, int], pool: Pool, norm: Normalize) -> None:
    figure.suptitle(style.pooling_text(block, pool, bool(norm.vmin)), fontsize=8, color=INK)


def _pool_to_pixels(
    figure: Figure, axes: Any, grid: Matrix, pool: Pool, block: tuple[int, int]
) -> None:
    """Compute the layout, and pool each image to at most as many cells as it has pixels.

    Otherwise matplotlib would skip cells, possibly the one with the largest weight.
    """
    crowded = axes.size > MAX_LIVE_PANELS
    inches = figure.get_size_inches() / axes.shape[::-1]
    fits = max(grid.shape[2:]) <= 0.3 * inches.min() * figure.dpi
    layout = figure.get_layout_engine()
    if layout is None or (fits and not crowded):
        return
    layout.execute(figure)
    if data.pool_cells(grid[:1, :1], _panel_pixels(axes), pool).block != (1, 1):
        images = [panel.images[0] for panel in axes.flat]
        _add_pooling_title(figure, block, pool, images[0].norm)  # the title needs space
        layout.execute(figure)
        pooled = data.pool_cells(grid, _panel_pixels(axes), pool)
        each = pooled.cells.reshape(-1, *pooled.cells.shape[2:])
        for image, cells in zip(images, each, strict=True):
            image.set_data(cells)
        norm = images[0].norm
        if pool == "mean":  # means are smaller than the largest entry
            norm.vmax = float(np.nanmax(abs(pooled.cells))) or 1.0
            norm.vmin = -norm.vmax if norm.vmin else 0.0
        rows, columns = pooled.block
        _add_pooling_title(figure, (rows * block[0], columns * block[1]), pool, norm)
    if crowded:
        # The layout would run twice per drawing, which takes seconds for a hundred panels.
        figure.set_layout_engine("none")


def _panel_pixels(axes: Any) -> tuple[int, int]:
    """Return the pixels of the smallest panel, minus one because the layout may shift slightly."""
    panel: Axes
    boxes = []
    for panel in axes.flat:
        panel.apply_aspect()
        boxes.append(panel.get_window_extent())
    height, width = (min(getattr(box, side) for box in boxes) for side in ("height", "width"))
    return max(1, math.floor(height) - 1), max(1, math.floor(width) - 1)


HEAD_INCHES, HEAD_SPACING, LABEL_INCHES = 0.62, 1.08, (1.1, 0.72)
"""The size of a head in inches, the distance of heads in heads, and the space for labels."""


def heads(weights: Any, *, pool: Pool = "max", title: str = "") -> Figure:
    """Draw α of every head as a small heatmap: one row per layer, one column per head.

    weights: (layers, heads, n, m) of any framework, or the result of `qkv.transformers.capture`.
    The colour scale is a square root, which separates small weights. Heads of more than 48 × 48
    weights are pooled, and the title says so. `qkv.plot.data.heads` returns the numbers.

    >>> figure = heads(np.full((2, 3, 4, 4), 0.25))
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['0', '1']
    """
    cells, block = data.heads(weights, pool=pool)
    layers, count = cells.shape[:2]
    lines = list(filter(None, [title, style.pooling_text(block, pool) if block != (1, 1) else ""]))
    figure, panel = _head_figure(layers, count, HEAD_INCHES * HEAD_SPACING, len(lines))

    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    norm, colours = style.colour_scale(cells, "Reds")
    if norm.vmin == 0:
        norm = PowerNorm(0.5, 0.0, norm.vmax)
    for i, j in np.ndindex(layers, count):
        left, top = HEAD_SPACING * j, HEAD_SPACING * i
        panel.imshow(
            cells[i, j],
            norm=norm,
            cmap=colours,
            interpolation="nearest",
            extent=(left - 0.5, left + 0.5, top + 0.5, top - 0.5),
        )
    panel.set(
        xlim=(-0.5, HEAD_SPACING * (count - 1) + 0.5),
        ylim=(HEAD_SPACING * (layers - 1) + 0.5, -0.5),
    )
    _label_heads(panel, layers, count, HEAD_SPACING, "\n".join(lines))
    panel.spines[:].set_visible(False)
    style.add_colour_bar(
        figure, ScalarMappable(norm, colours), panel, layers * HEAD_INCHES, "weight"
    )
    return figure


def entropy(weights: Any) -> Figure:
    """Draw H = −Σⱼ αⱼ log αⱼ of every head, the mean over its queries: one row per layer.

    weights: (layers, heads, n, m) of any framework, or the result of `qkv.transformers.capture`.
    Light heads attend to one key, dark ones to all keys equally. The colour scale ends at log m.
    exp(H) is the effective number of keys. `qkv.plot.data.entropy` returns the numbers.

    >>> figure = entropy(np.full((1, 2, 4, 4), 0.25))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.4', '1.4']
    """
    values, most = data.entropy(weights)
    layers, count = values.shape
    cell = 0.42
    figure, panel = _head_figure(layers, count, cell, 1)
    norm, colours = style.colour_scale(np.array([most]), "Reds")
    image = panel.imshow(values, norm=norm, cmap=colours)
    _label_heads(panel, layers, count, 1.0, f"entropy of each head, at most {most:.2f} nats")
    panel.spines[:].set(linewidth=0.5, color=FRAME, visible=True)
    texts = {at: f"{x:.1f}" for at, x in np.ndenumerate(values) if x == x}
    style.annotate_texts(panel, texts, values, norm, colours, 8)
    style.add_colour_bar(figure, image, panel, layers * cell)
    return figure


def _head_figure(layers: int, count: int, cell: float, lines: int) -> tuple[Figure, Axes]:
    """Return a figure for a grid of cells, with space for the lines of a title."""
    width, height = LABEL_INCHES
    size = max(3.0, count * cell + width), layers * cell + height + 0.15 * lines
    figure = style.new_figure(size, "compressed")
    return figure, figure.subplots()


def _label_heads(panel: Axes, layers: int, count: int, step: float, title: str) -> None:
    """Label layers and heads with their numbers, `step` apart."""
    style.style_axes(panel, "head", "layer", title)
    panel.set_xticks(step * np.arange(count), map(str, range(count)))
    panel.set_yticks(step * np.arange(layers), map(str, range(layers)))
    panel.tick_params(length=0)
