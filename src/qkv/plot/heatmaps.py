"""Attention weights as coloured cells: a row per query, a column per key."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from qkv.arrays import to_numpy
from qkv.errors import ArgumentError, DtypeError, MissingExtra, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

Matrix: TypeAlias = "np.ndarray[Any, Any]"

INK, FRAME, MISSING = "#333333", "#bbbbbb", "#d9d9d9"
# Text is sized before the layout that depends on it: about what labels leave of a panel, and what
# they may take of it.
PANEL_SHARE, WORD_SHARE = 0.65, 0.15
MOST_NUMBERS = 12
LONGEST_WORD = 24
MOST_LIVE_PANELS = 32


def heatmaps(
    matrices: Any,
    xlabel: str = "Keys",
    ylabel: str = "Queries",
    titles: str | Sequence[Any] | None = None,
    figsize: tuple[float, float] = (2.5, 2.5),
    cmap: str | Colormap = "Reds",
    *,
    xticks: Sequence[Any] | None = None,
    yticks: Sequence[Any] | None = None,
    annotate: bool = False,
) -> Figure:
    """Draw weights α(qᵢ, kⱼ) as a grid of heatmaps on one colour scale, with one colour bar.

    matrices: (rows, columns, queries, keys), (columns, queries, keys) or (queries, keys), of any
    framework, or lists of these. The figure is returned: a notebook shows it, ``savefig`` keeps it.

    The scale runs from 0 to the largest value. With negative values it is symmetric about 0, and
    "Reds" becomes "RdBu_r": red for positive, blue for negative. NaN and infinite cells are grey.
    A matrix with more cells than its panel has pixels is pooled; each cell then shows the
    strongest weight in it, the one of largest magnitude.

    titles: one per column, one per panel, or a list for each row.
    figsize: the inches of one panel.
    xticks, yticks: a word for each key and for each query, in place of their numbers.
    annotate: write the numbers into the cells of matrices up to 12 × 12.

    >>> import numpy as np
    >>> from qkv.plot import heatmaps
    >>> figure = heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries")
    >>> panel, colour_bar = figure.axes
    >>> int(panel.images[0].get_array().trace())
    10
    """
    grid = _grid(matrices)
    rows, columns, queries, keys = grid.shape
    headings = _headings(titles, rows, columns)
    key_words = _words(xticks, keys, "xticks", "key")
    query_words = _words(yticks, queries, "yticks", "query")
    width, height = _inches(figsize)

    # Words that are longer than what panels leave to them get room of their own.
    beside = max(0.0, _reach(query_words) - WORD_SHARE * width)
    below = max(0.0, _reach(key_words) - WORD_SHARE * height)
    figure = blank((columns * width + beside, rows * height + below), "compressed")
    # Not sharex: matplotlib's cost of sharing grows with the square of the panels.
    axes: Any = figure.subplots(rows, columns, squeeze=False)

    # Cells are square, until that would leave a long matrix as a thread.
    shape = min(max(queries / keys, 1 / 4), 4.0)
    panel_width = PANEL_SHARE * min(width, height / shape)
    panel_height = panel_width * shape
    stacked = rows > 1 and panel_height * 72 < 0.6 * 9 * len(ylabel)  # labels would meet

    norm, colours = _scale(grid, cmap)
    for i, j in np.ndindex(rows, columns):
        panel: Axes = axes[i, j]
        image = panel.imshow(
            grid[i, j],
            norm=norm,
            cmap=colours,
            aspect="auto",
            interpolation="nearest",
            # The axes count queries and keys, also where a cell will hold many of them.
            extent=(-0.5, keys - 0.5, queries - 0.5, -0.5),
        )
        panel.set_box_aspect(shape)
        panel.spines[:].set(linewidth=0.5, color=FRAME)
        panel.set_title(headings[i][j], fontsize=9, color=INK)
        panel.set_xlabel(xlabel if i == rows - 1 else "", fontsize=9, color=INK)
        named = j == 0 and (i == rows // 2 or not stacked)
        panel.set_ylabel(ylabel if named else "", fontsize=9, color=INK)
        _ticks(panel, "x", key_words, keys, panel_width, shown=i == rows - 1)
        _ticks(panel, "y", query_words, queries, panel_height, shown=j == 0)
        if annotate and max(queries, keys) <= MOST_NUMBERS:
            _numbers(panel, grid[i, j], norm, colours, panel_width / keys)

    # matplotlib sizes the bar by its panels; this keeps it as slim for all grids.
    slimness = rows * panel_height / 0.065
    bar = figure.colorbar(image, ax=axes[:, -1], aspect=slimness, fraction=0.5, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, color=FRAME, labelsize=8, labelcolor=INK)
    bar.ax.locator_params(nbins=max(1, min(5, int(rows * panel_height * 72 // 14))))
    _settle(figure, axes, grid)
    return figure


def blank(figsize: tuple[float, float], layout: Literal["compressed", "constrained"]) -> Figure:
    """A figure to draw on, where matplotlib is there."""
    try:
        from qkv.plot.figures import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingExtra('a picture needs matplotlib: pip install "qkv[plot]"') from None
    return Figure(figsize=figsize, layout=layout)


def _grid(matrices: Any) -> Matrix:
    """The matrices as floating numbers with four axes, and NaN for infinities."""
    try:
        array = np.asarray(_leaves(matrices))
    except ValueError:
        raise ShapeError(
            "matrices is ragged; expected as many keys in every row and as many queries in every "
            "matrix"
        ) from None
    if not 2 <= array.ndim <= 4:
        raise ShapeError(
            f"matrices has shape {array.shape}; expected (queries, keys), (columns, queries, keys) "
            "or (rows, columns, queries, keys)"
        )
    if array.size == 0:
        raise ShapeError(f"matrices has shape {array.shape}; expected at least one cell to draw")
    # NumPy files the narrow floats of machine learning under no kind of number.
    if array.dtype.kind not in "biuf" and "float" not in array.dtype.name:
        raise DtypeError(f"matrices has dtype {array.dtype}; expected real numbers")
    short = array.dtype.itemsize <= 2 or array.dtype == np.float32
    array = array.astype(np.float32 if short else np.float64, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        array = np.where(finite, array, np.nan)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _leaves(x: Any) -> Any:
    """Lists as they are, the arrays in them made NumPy's: NumPy cannot stack every tensor."""
    if isinstance(x, list | tuple):
        return [_leaves(item) for item in x]
    return to_numpy(x) if hasattr(x, "shape") else x


def _headings(titles: str | Sequence[Any] | None, rows: int, columns: int) -> list[list[str]]:
    """A title for every panel; with one per column, the first row carries them."""
    blank = [""] * columns
    if titles is None:
        return [blank] * rows
    given = [titles] if isinstance(titles, str) else list(titles)
    nested = [list(row) for row in given if isinstance(row, list | tuple)]
    if nested:
        if len(given) == len(nested) == rows and all(len(row) == columns for row in nested):
            return [[str(title) for title in row] for row in nested]
        raise ShapeError(f"titles is nested; expected {rows} lists of {columns} titles each")
    flat = [str(title) for title in given]
    if len(flat) == columns:
        return [flat] + [blank] * (rows - 1)
    if len(flat) == rows * columns:
        return [flat[i * columns : (i + 1) * columns] for i in range(rows)]
    raise ShapeError(
        f"titles has {len(flat)} entries; expected {columns}, one per column"
        + (f", or {rows * columns}, one per panel" if rows > 1 else "")
    )


def _words(words: Sequence[Any] | None, count: int, argument: str, role: str) -> list[str]:
    if words is None:
        return []
    if isinstance(words, str):
        raise ShapeError(f"{argument} is one string; expected a list of {count}, one per {role}")
    texts = [str(word) for word in words]
    if len(texts) != count:
        raise ShapeError(f"{argument} has {len(texts)} entries; expected {count}, one per {role}")
    return [t if len(t) <= LONGEST_WORD else t[: LONGEST_WORD - 1] + "…" for t in texts]


def _reach(words: list[str]) -> float:
    """About how many inches the longest word takes."""
    return 0.6 * 8 / 72 * max(map(len, words), default=0)


def _inches(figsize: tuple[float, float]) -> tuple[float, float]:
    try:
        width, height = (float(side) for side in figsize)
    except (TypeError, ValueError):
        width = height = 0.0
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ArgumentError(f"figsize is {figsize!r}; expected a width and a height in inches")
    return width, height


def _settle(figure: Figure, axes: Any, grid: Matrix) -> None:
    """Lay the figure out and give each image no more cells than it has pixels.

    With more, drawing would skip cells, and the strongest may be among them.
    """
    panel: Axes
    crowded = axes.size > MOST_LIVE_PANELS
    inches = figure.get_size_inches() / axes.shape[::-1]
    fits = max(grid.shape[2:]) <= 0.3 * inches.min() * figure.dpi
    layout = figure.get_layout_engine()
    if layout is None or (fits and not crowded):
        return
    layout.execute(figure)
    for (i, j), panel in np.ndenumerate(axes):
        panel.apply_aspect()
        box = panel.get_window_extent()
        # One fewer, because the layout shifts by a fraction when it runs again to draw.
        most = max(1, math.floor(box.height) - 1), max(1, math.floor(box.width) - 1)
        panel.images[0].set_data(_pool(grid[i, j], most))
    if crowded:
        # It would run twice for each drawing, and takes seconds for a hundred panels.
        figure.set_layout_engine("none")


def _pool(matrix: Matrix, most: tuple[int, int]) -> Matrix:
    """At most so many cells, each the entry of largest magnitude in its block; NaN if all are."""
    low = high = matrix
    for axis, count in enumerate(most):
        size = matrix.shape[axis]
        if size > count:
            starts = np.arange(count) * size // count
            low = np.fmin.reduceat(low, starts, axis=axis)
            high = np.fmax.reduceat(high, starts, axis=axis)
    return np.where(-low > high, low, high)


def _scale(grid: Matrix, cmap: str | Colormap) -> tuple[Normalize, Colormap]:
    import matplotlib
    from matplotlib.colors import Normalize

    low = float(np.fmin.reduce(grid, axis=None, initial=0.0))
    high = float(np.fmax.reduce(grid, axis=None, initial=0.0))
    # Rounding leaves weights a hair below zero; they are no reason for a second colour.
    signed = low < -1e-6 * high
    reach = max(-low, high) or 1.0
    try:
        colours = matplotlib.colormaps.get_cmap("RdBu_r" if signed and cmap == "Reds" else cmap)
    except ValueError as error:
        raise ArgumentError(f"cmap: {error}") from None
    return Normalize(-reach if signed else 0.0, reach), colours.with_extremes(bad=MISSING)


def _ticks(
    panel: Axes, side: Literal["x", "y"], words: list[str], count: int, inches: float, shown: bool
) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = panel.xaxis if side == "x" else panel.yaxis
    if not shown:
        axis.set_ticks([])
        return
    if not words:
        panel.tick_params(side, length=2, width=0.5, color=FRAME, labelsize=8, labelcolor=INK)
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        return

    pitch = inches * 72 / count
    step = max(1, math.ceil(5 / pitch))  # below five points nobody reads: leave words out instead
    pitch *= step
    size = min(8.0, 0.9 * pitch)
    axis.set_ticks(range(0, count, step), words[::step])
    panel.tick_params(side, length=0, labelsize=size, labelcolor=INK)
    fits = 0.6 * size * max(map(len, words)) < pitch
    for label in axis.get_ticklabels():
        # A word may hold a dollar or two and mean money.
        label.set_parse_math(bool(re.fullmatch(r"\$[^$]+\$", label.get_text())))
        if side == "x" and not fits:
            steep = pitch < 1.5 * size
            label.set(
                rotation=90 if steep else 45,
                horizontalalignment="center" if steep else "right",
                rotation_mode="default" if steep else "anchor",
            )


def _numbers(panel: Axes, cells: Matrix, norm: Normalize, colours: Colormap, inches: float) -> None:
    """Write each value into its cell, dark on light and light on dark."""
    texts = _formatted(cells, float(norm.vmax or 1.0))
    size = min(9.0, inches * 72 / (0.7 * max(map(len, texts.values()), default=1)))
    for (i, j), text in texts.items():
        red, green, blue, _ = colours(norm(cells[i, j]))
        dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.25
        panel.text(
            j, i, text, color="white" if dark else INK, fontsize=size, ha="center", va="center"
        )


def _formatted(cells: Matrix, largest: float) -> dict[tuple[int, int], str]:
    """The values as text, with the digits the largest needs. A plain 0 is an exact one."""
    power = math.floor(math.log10(largest))
    whole = bool(np.all(np.isnan(cells) | (cells == np.round(cells))))
    if not -4 <= power <= 4:
        form = ".0e"
    else:
        form = f".{0 if whole else max(0, 2 - power if power >= 0 else 1 - power)}f"
    return {
        (i, j): format(x, "z" + form).replace("-", "−") if x else "0"
        for (i, j), x in np.ndenumerate(cells.tolist())
        if not math.isnan(x)
    }
