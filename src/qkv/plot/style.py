"""The common style of all plots: colours, labels, ticks and number formats."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qkv.errors import (
    ArgumentError,
    ShapeError,
    missing_extra_error,
    require_parent_folder,
    validate_file_path,
)
from qkv.plot.data import Matrix, Pool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

INK, FRAME, MISSING_COLOUR, RED, BLUE = "#333333", "#bbbbbb", "#d9d9d9", "#cb181d", "#2166ac"
MAX_LABEL_LENGTH = 24


def new_figure(
    figsize: tuple[float, float], layout: Literal["compressed", "constrained"]
) -> Figure:
    """Return a new figure; raise MissingExtraError if matplotlib is not installed."""
    try:
        from qkv.plot.figures import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise missing_extra_error("plots need matplotlib", "plot") from None
    return Figure(figsize=figsize, layout=layout)


def validate_figsize(figsize: tuple[float, float]) -> tuple[float, float]:
    try:
        width, height = (float(side) for side in figsize)
    except (TypeError, ValueError):
        width = height = 0.0
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ArgumentError(f"figsize is {figsize!r}; expected a width and a height in inches")
    return width, height


def colour_scale(grid: Matrix, cmap: str | Colormap) -> tuple[Normalize, Colormap]:
    import matplotlib
    from matplotlib.colors import Normalize

    low = float(np.fmin.reduce(grid, axis=None, initial=0.0))
    high = float(np.fmax.reduce(grid, axis=None, initial=0.0))
    # Rounding may leave weights slightly below zero; they need no second colour.
    signed = low < -1e-6 * high
    reach = max(-low, high) or 1.0
    try:
        colours = matplotlib.colormaps.get_cmap("RdBu_r" if signed and cmap == "Reds" else cmap)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"cmap: {error}") from None
    return Normalize(-reach if signed else 0.0, reach), colours.with_extremes(bad=MISSING_COLOUR)


def save_figure(figure: Figure, path: Any) -> Figure:
    """Save the figure if a path is given, in the format of its suffix, and return the figure."""
    if path is None:
        return figure
    target, known = validate_file_path(path), figure.canvas.get_supported_filetypes()
    if target.suffix.lower().removeprefix(".") not in known:
        raise ArgumentError(f"{target}: the name must end in .{', .'.join(sorted(known))}")
    figure.savefig(require_parent_folder(target), dpi=160, bbox_inches="tight")
    return figure


def add_colour_bar(figure: Figure, image: Any, panels: Any, inches: float, label: str = "") -> None:
    """Add a colour bar to the right of panels with this total height in inches."""
    # matplotlib scales the bar with its panels; this keeps its width constant.
    aspect = inches / 0.065
    bar = figure.colorbar(image, ax=panels, aspect=aspect, fraction=0.5, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, color=FRAME, labelsize=8, labelcolor=INK)
    bar.ax.locator_params(nbins=max(1, min(5, int(inches * 72 // 14))))
    bar.set_label(label, fontsize=8, color=INK)


def pooling_text(block: tuple[int, int], pool: Pool, signed: bool = False) -> str:
    """Return the title that explains the cells of a pooled matrix."""
    what = "strongest" if signed and pool == "max" else pool
    return f"pooled: {what} of up to {block[0]} × {block[1]}"


def style_axes(panel: Axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Set thin axes, labels and a title."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set(linewidth=0.5, color=FRAME)
    panel.tick_params(length=2, width=0.5, color=FRAME, labelsize=8, labelcolor=INK)
    panel.set_xlabel(xlabel, fontsize=9, color=INK)
    panel.set_ylabel(ylabel, fontsize=9, color=INK)
    panel.set_title(title, fontsize=9, color=INK, parse_math=False)


def validate_labels(words: Sequence[Any] | None, count: int, argument: str, role: str) -> list[str]:
    if words is None:
        return []
    if isinstance(words, str) or not np.iterable(words):
        kind = "one string" if isinstance(words, str) else f"a {type(words).__name__}"
        raise ShapeError(f"{argument} is {kind}; expected a list of {count}, one per {role}")
    texts = [str(word) for word in words]
    if len(texts) != count:
        raise ShapeError(f"{argument} has {len(texts)} entries; expected {count}, one per {role}")
    return [t if len(t) <= MAX_LABEL_LENGTH else t[: MAX_LABEL_LENGTH - 1] + "…" for t in texts]


def label_inches(words: list[str]) -> float:
    """Return the approximate width of the longest label in inches."""
    return 0.6 * 8 / 72 * max(map(len, words), default=0)


def set_ticks(
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
    step = max(1, math.ceil(5 / pitch))  # skip labels instead of a font below five points
    pitch *= step
    size = min(8.0, 0.9 * pitch)
    axis.set_ticks(range(0, count, step), words[::step])
    panel.tick_params(side, length=0, labelsize=size, labelcolor=INK)
    fits = 0.6 * size * (max(map(len, words)) + 1) < pitch  # with a space between labels
    for label in axis.get_ticklabels():
        # Dollar signs inside of a label may mean money.
        is_formula = re.fullmatch(r"\$[^$]+\$", label.get_text()) is not None
        label.set_parse_math(is_formula and can_typeset(label.get_text()))
        if side == "x" and not fits:
            steep = pitch < 1.5 * size
            label.set(
                rotation=90 if steep else 45,
                horizontalalignment="center" if steep else "right",
                rotation_mode="default" if steep else "anchor",
            )


def can_typeset(text: str) -> bool:
    """Return whether matplotlib can typeset the formulas in a text."""
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return False
    return True


def annotate_values(
    panel: Axes, cells: Matrix, norm: Normalize, colours: Colormap, inches: float
) -> None:
    """Write each value into its cell."""
    texts = _format_values(cells, float(norm.vmax or 1.0))
    size = min(9.0, inches * 72 / (0.7 * max(map(len, texts.values()), default=1)))
    annotate_texts(panel, texts, cells, norm, colours, size)


def annotate_texts(
    panel: Axes,
    texts: dict[tuple[int, ...], str],
    cells: Matrix,
    norm: Normalize,
    colours: Colormap,
    size: float,
) -> None:
    """Write texts into their cells, dark on light and light on dark."""
    for (i, j), text in texts.items():
        red, green, blue, _ = colours(norm(cells[i, j]))
        is_dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.25
        panel.text(
            j, i, text, color="white" if is_dark else INK, fontsize=size, ha="center", va="center"
        )


def _format_values(cells: Matrix, largest: float) -> dict[tuple[int, ...], str]:
    """Return the values as text, with the digits that the largest needs; "0" means exactly 0."""
    power = math.floor(math.log10(largest))
    are_integers = bool(np.all(np.isnan(cells) | (cells == np.round(cells))))
    if not -4 <= power <= 4:
        form = ".0e"
    else:
        form = f".{0 if are_integers else max(0, 2 - power if power >= 0 else 1 - power)}f"
    return {
        (i, j): format(x, "z" + form).replace("-", "−") if x else "0"
        for (i, j), x in np.ndenumerate(cells.tolist())
        if not math.isnan(x)
    }
