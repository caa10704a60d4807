"""The weights of answers as a heatmap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from qkv.util.formatting import format_one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.answer import Answer

MAX_LABELLED_KEYS = 100
"""The largest number of keys whose columns are labelled."""


def plot_weights(
    answers: Sequence[Answer], keys: Collection[Any], path: str | PathLike[str] | None
) -> Figure:
    """Draw one row for each answer and one column for each key; save it if `path` is set."""
    from qkv.plot import heatmaps, style

    labels: dict[str, Any] = {"yticks": [format_one_line(answer.query, 24) for answer in answers]}
    if len(keys) <= MAX_LABELLED_KEYS:
        labels["xticks"] = [format_one_line(key, 24) for key in keys]
    width, height = (min(max(0.62 * n, 1.6), 12.0) for n in (len(keys), len(answers)))
    height = max(height, width / 4)  # so that a single row of cells stays readable
    weights = [answer.weights for answer in answers]
    figure = heatmaps(weights, figsize=(width, height), annotate=True, **labels)
    return style.save_figure(figure, path)
