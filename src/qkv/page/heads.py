"""The captured heads of a model, as the page's view of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qkv.plot import data as plotted

THUMBNAIL_CELLS = 64
"""Rows and columns of a head among all others."""

MAX_HEAD_CELLS = 512
"""Rows and columns of a head whose largest weights alone were kept."""


def heads_view(
    weights: np.ndarray,
    names: Sequence[str],
    *,
    lengths: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    whole: bool = True,
) -> dict[str, Any]:
    """The view of α (layers, heads, rows, columns): one byte for each weight.

    A weight is its byte's square times its head's scale: the root leaves the small weights of a
    long row their digits. `lengths` are the queries and keys where rows and columns pool them.

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
    entropy = plotted.entropy(weights).entropy if whole else np.full_like(scale, np.nan)
    data = {
        "names": list(names),
        "weights": cells,
        "small": plotted.heatmaps(cells, (THUMBNAIL_CELLS, THUMBNAIL_CELLS)).cells.astype(np.uint8),
        "scale": scale,
        "entropy": entropy,
        "queries": queries,
        "keys": keys,
        "tokens": None if labels is None else list(labels),
        "note": "" if whole else "Not all weights were kept: a cell shows the largest that was.",
    }
    return {"view": "model", "title": "Heads", "data": data}
