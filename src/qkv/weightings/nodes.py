"""What is one node of a compiled graph: a search that looks at numbers."""

from __future__ import annotations

from qkv.arrays import of
from qkv.arrays.base import NODES
from qkv.types import Array, Live
from qkv.weightings.sparse import Entmax


def threshold(x: Array, live: Live, alpha: float) -> Array:
    """What `Entmax` searches, (…, 1), for rows (…, m) that are measured from their largest score.

    >>> import numpy as np
    >>> threshold(np.array([[0.0, -0.5, -3.0]]), None, 2)  # Σ max(0, x − τ) = 1
    array([[-0.75]])
    """
    fw = of(x)
    lent = fw.lend(x)
    if lent is None:
        return Entmax(alpha).search(lambda lift, merge, init: lift(x, live, x))[1]
    allowed = None if live is None else fw.lend(live)
    with of(lent).quiet():
        return fw.take_back(threshold(lent, allowed, alpha))


NODES["threshold"] = threshold
