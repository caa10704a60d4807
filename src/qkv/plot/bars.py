"""Weights of one query as bars: a row of the database each, and what is left to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkv.errors import ShapeError
from qkv.plot.heatmaps import FRAME, INK, blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RED, REST = "#cb181d", "#d9d9d9"


def bars(
    names: Sequence[str], weights: Sequence[float], *, title: str = "", others: int = 0
) -> Figure:
    """αᵢ of each named row, from the top down, and 1 − Σ αᵢ of `others` more rows in grey.

    >>> figure = bars(["Li", "Hu"], [0.8, 0.1], title="Lee → Mu", others=4)
    >>> [f"{bar.get_width():.1f}" for bar in figure.axes[0].patches]
    ['0.8', '0.1', '0.1']
    """
    if len(names) != len(weights) or not len(names):
        raise ShapeError(
            f"bars needs one weight for each name, not {len(weights)} for {len(names)}"
        )
    names, weights = list(names), [float(weight) for weight in weights]
    colours = [RED] * len(names)
    rest = 1 - sum(weights)
    if others > 0 and rest > 0.0005:
        names.append(f"{others:,} other row{'s' if others > 1 else ''}")
        weights.append(rest)
        colours.append(REST)
    figure = blank((6.4, 0.9 + 0.34 * len(names)), "constrained")
    axes: Any = figure.subplots()
    places = range(len(names))
    axes.barh(places, weights, color=colours, height=0.62)
    for at, weight in zip(places, weights, strict=True):
        axes.annotate(
            f"{weight:.3f}",
            (max(weight, 0), at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    # A dollar sign in a key is no formula.
    axes.set_yticks(places, names, fontsize=9, color=INK, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(min(0, *weights), max(*weights, 1e-9) * 1.12)
    axes.set_xlabel("weight", fontsize=9, color=INK)
    axes.set_title(title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(linewidth=0.5, color=FRAME)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=2, width=0.5, color=FRAME, labelsize=8, labelcolor=INK)
    return figure
