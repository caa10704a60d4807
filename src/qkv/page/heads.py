"""The page's view of the captured heads of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qkv.plot import data as plot_data

THUMBNAIL_CELLS = 64
"""Rows and columns of the small picture of a head."""

MAX_HEAD_CELLS = 512
"""Rows and columns of a head of which only the largest weights were captured."""


POOLED_NOTE = "Only the largest weights were captured: a cell shows the largest of several."


def heads_view(
    weights: np.ndarray,
    names: Sequence[str],
    *,
    lengths: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    has_all_weights: bool = True,
) -> dict[str, Any]:
    """Return the view of α (layers, heads, rows, columns), one byte per weight.

    A weight is the square of its byte times the scale of its head: the square root keeps digits of
    small weights. If rows and columns pool weights, `lengths` are the queries and keys.

    >>> data = heads_view(np.array([[[[0.25, 0.75], [1.0, 0.0]]]]), ["encoder"])["data"]
    >>> (data["scale"][0, 0] * data["weights"][0, 0].astype(float) ** 2).round(2)
    array([[0.25, 0.75],
           [1.  , 0.  ]])
    >>> data["entropy"].round(2)
    array([[0.28]])
    """
    weights = np.asarray(weights)
    layers, count, rows, columns = weights.shape
    queries, keys = lengths or (rows, columns)
    scale = np.zeros((layers, count))
    cells = np.empty(weights.shape, np.uint8)
    for at in np.ndindex(layers, count):
        alpha = weights[at].astype(np.float64)
        scale[at] = alpha.max(initial=0) / 255**2
        roots = np.sqrt(alpha.clip(0) / (scale[at] or 1.0))
        cells[at] = np.rint(roots)
    entropy = plot_data.entropy(weights).entropy if has_all_weights else np.full_like(scale, np.nan)
    data = {
        "names": list(names),
        "weights": cells,
        "small": plot_data.heatmaps(cells, (THUMBNAIL_CELLS, THUMBNAIL_CELLS)).cells.astype(
            np.uint8
        ),
        "scale": scale,
        "entropy": entropy,
        "queries": queries,
        "keys": keys,
        "tokens": None if labels is None else list(labels),
        "note": "" if has_all_weights else POOLED_NOTE,
    }
    return {"view": "model", "title": "Heads", "data": data}
