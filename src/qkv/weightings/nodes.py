"""What is one node of a compiled graph: what looks at numbers."""

from __future__ import annotations

from typing import Any

from qkv.arrays import is_array, of
from qkv.arrays.base import NODES, Node
from qkv.types import Array, Live, Slopes
from qkv.weightings.base import spared
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


def pooled(weight: Array, live: Live, value: Array) -> Array:
    """Σⱼ weightᵢⱼ vⱼ over the live pairs, or those with a weight, whatever the other values are.

    >>> import numpy as np
    >>> pooled(np.array([[0.5, 0.0]]), None, np.array([[2.0], [np.nan]]))
    array([[1.]])
    """
    fw = of(weight)
    if fw.surely_finite(value):
        return fw.xp.matmul(weight, value)
    return spared(weight, value, weight != 0 if live is None else live)


def pooled_back(weight: Any, value: Any, out: Any, along: Any) -> Slopes:
    along, some = along.where(out.isfinite(), 0.0), value.isfinite()
    return along @ value.where(some, 0.0).mT, (weight.mT @ along).where(some, 0.0)


NODES["threshold"] = Node(threshold, lambda x, alpha: 1)
NODES["entmax"] = Node(
    lambda x, live, alpha: Entmax(alpha).weights(x, live, x),
    lambda x, alpha: x.shape[-1],
    lambda x, alpha, weight, along: (slopes(weight, along, alpha), None),
)
NODES["pooled"] = Node(pooled, lambda weight, value: value.shape[-1], pooled_back)
