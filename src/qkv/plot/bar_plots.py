"""The weights of one query as bars: one per row, and one for all other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkv.plot import data, style
from qkv.plot.style import INK, RED
from qkv.util.formatting import format_weight

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bars(
    names: Sequence[str], weights: Sequence[float], *, title: str = "", others: int = 0
) -> Figure:
    """Draw αᵢ of each named row from top to bottom, and 1 − Σ αᵢ of `others` more rows in grey.

    >>> figure = bars(["Li", "Hu"], [0.8, 0.1], title="Lee → Mu", others=4)
    >>> [f"{bar.get_width():.1f}" for bar in figure.axes[0].patches]
    ['0.8', '0.1', '0.1']
    """
    all_names, all_weights = data.bars(names, weights, others=others)
    named_count = len(names)
    figure = style.new_figure((6.4, 0.9 + 0.34 * len(all_names)), "constrained")
    axes: Any = figure.subplots()
    places = range(len(all_names))
    colours = [RED if at < named_count else style.MISSING_COLOUR for at in places]
    axes.barh(places, all_weights, color=colours, height=0.62)
    for at, weight in zip(places, all_weights, strict=True):
        axes.annotate(
            format_weight(weight),
            (max(weight, 0), at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    style.style_axes(axes, "weight")
    # A dollar sign in a key does not start a formula.
    axes.set_yticks(places, all_names, fontsize=9, color=INK, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(min(0, *all_weights), max(*all_weights, 1e-9) * 1.12)
    axes.set_title(title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
