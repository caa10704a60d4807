"""Data-dependent steps that appear as a single node in a compiled graph."""

from __future__ import annotations

from typing import Any

from qkv.frameworks import get_framework, is_array
from qkv.frameworks.base import GRAPH_NODES, GraphNode
from qkv.util.types import Array, Gradients, LiveMask
from qkv.weightings.base import pool_live_values
from qkv.weightings.entmax import Entmax
from qkv.weightings.power import entmax_gradient


def entmax_threshold(x: Array, live: LiveMask, alpha: Any) -> Array:
    """Return the threshold τ of `Entmax`, (…, 1), for rows (…, m) minus their largest score.

    >>> import numpy as np
    >>> entmax_threshold(np.array([[0.0, -0.5, -3.0]]), None, 2)  # Σ max(0, x − τ) = 1
    array([[-0.75]])
    """
    fw = get_framework(x)
    view = fw.as_numpy_view(x)
    if view is None:
        return Entmax(alpha).find_threshold(lambda lift, merge, init: lift(x, live, x))[1]
    live_view = None if live is None else fw.as_numpy_view(live)
    with get_framework(view).use_own_settings():
        tau = entmax_threshold(
            view, live_view, fw.as_numpy_view(alpha) if is_array(alpha) else alpha
        )
        return fw.from_numpy_view(tau)


def pool_node(weight: Array, live: LiveMask, value: Array) -> Array:
    """Return Σⱼ weightᵢⱼ vⱼ over the live pairs; None: over those with a nonzero weight.

    NaN and infinite values of other pairs do not reach the sum.

    >>> import numpy as np
    >>> pool_node(np.array([[0.5, 0.0]]), None, np.array([[2.0], [np.nan]]))
    array([[1.]])
    """
    fw = get_framework(weight)
    if fw.is_surely_finite(value):
        return fw.xp.matmul(weight, value)
    return pool_live_values(weight, value, weight != 0 if live is None else live)


def pool_node_backward(weight: Any, value: Any, out: Any, gradient: Any) -> Gradients:
    gradient, is_finite = gradient.where(out.isfinite(), 0.0), value.isfinite()
    return gradient @ value.where(is_finite, 0.0).mT, (weight.mT @ gradient).where(is_finite, 0.0)


GRAPH_NODES["threshold"] = GraphNode(entmax_threshold, lambda x, alpha: 1)
GRAPH_NODES["entmax"] = GraphNode(
    lambda x, live, alpha: Entmax(alpha).weights(x, live, x),
    lambda x, alpha: x.shape[-1],
    lambda x, alpha, weight, along: (entmax_gradient(weight, along, alpha), None),
)
GRAPH_NODES["pooled"] = GraphNode(
    pool_node, lambda weight, value: value.shape[-1], pool_node_backward
)
