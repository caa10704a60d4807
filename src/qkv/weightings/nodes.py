"""What is one node of a compiled graph: searches that look at numbers."""

from __future__ import annotations

from typing import Any

from qkv.arrays import is_array, of
from qkv.arrays.base import NODES, Node
from qkv.types import Array, Live
from qkv.weightings.power import slopes
from qkv.weightings.sparse import Entmax


def threshold(x: Array, live: Live, alpha: Any) -> Array:
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
        found = threshold(lent, allowed, fw.lend(alpha) if is_array(alpha) else alpha)
        return fw.take_back(found)


NODES["threshold"] = Node(threshold)
NODES["entmax"] = Node(lambda x, live, alpha: Entmax(alpha).weights(x, live, x), slopes)
