"""Plot the weights of answers as a heatmap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from qkv.util.formatting import format_one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.answer import Answer

MAX_LABELLED_KEYS = 100
"""The columns of a heatmap are labelled up to this number of keys."""


def plot_weights(
    answers: Sequence[Answer], keys: Collection[Any], path: str | PathLike[str] | None
) -> Figure:
    """Plot the weights of answers: one row per answer, one column per key.

    If `path` is set, save the figure there.
    """
    from qkv.plot import heatmaps, style

    labels: dict[str, Any] = {"yticks": [format_one_line(answer.query, 24) for answer in answers]}
    if len(keys) <= MAX_LABELLED_KEYS:
        labels["xticks"] = [format_one_line(key, 24) for key in keys]
    width, height = (min(max(0.62 * n, 1.6), 12.0) for n in (len(keys), len(answers)))
    height = max(height, width / 4)  # keep a single row of cells readable
    weights = [answer.weights for answer in answers]
    figure = heatmaps(weights, figsize=(width, height), annotate=True, **labels)
    return style.save_figure(figure, path)
