r"""
Heatmaps
========

Weights that are nonnegative and sum to 1 can be drawn. Each query is a row of cells, each key a
column, and the colour shows the weight. ``qkv.plot.heatmaps`` draws one matrix or a grid of them.

The simplest one is the identity: ten queries, each of which attends only to the key that equals it.
On this scale a 1 is dark and a 0 is nearly white.
"""

import numpy as np

import qkv
from qkv import masks, plot, scores, weightings

attention = np.eye(10).reshape(1, 1, 10, 10)  # rows and columns of panels, queries, keys
plot.heatmaps(attention, xlabel="Keys", ylabel="Queries")

# %%
# Exact match gives an identity if every key is asked for once:

numbers = np.arange(10.0)[:, None]
exact = qkv.weights(numbers, numbers, score="exact", weighting="normalized")
assert np.array_equal(exact, np.eye(10))

# %%
# The same in each framework. The function accepts the array as it is:
#
# .. tab-set::
#
#    .. tab-item:: PyTorch
#
#       .. code-block:: python
#
#          import torch
#          from qkv import plot
#
#          attention = torch.eye(10).reshape(1, 1, 10, 10)
#          cells = plot.data.heatmaps(attention).cells  # plot.heatmaps draws them
#          assert cells.shape == (1, 1, 10, 10) and cells.trace(0, 2, 3).item() == 10
#
#    .. tab-item:: TensorFlow
#
#       .. code-block:: python
#
#          import tensorflow as tf
#          from qkv import plot
#
#          attention = tf.reshape(tf.eye(10), (1, 1, 10, 10))
#          cells = plot.data.heatmaps(attention).cells  # plot.heatmaps draws them
#          assert cells.shape == (1, 1, 10, 10) and cells.trace(0, 2, 3).item() == 10
#
#    .. tab-item:: JAX
#
#       .. code-block:: python
#
#          import jax.numpy as jnp
#          from qkv import plot
#
#          attention = jnp.eye(10).reshape(1, 1, 10, 10)
#          cells = plot.data.heatmaps(attention).cells  # plot.heatmaps draws them
#          assert cells.shape == (1, 1, 10, 10) and cells.trace(0, 2, 3).item() == 10
#
#    .. tab-item:: MXNet
#
#       .. code-block:: python
#
#          import mxnet as mx
#          from qkv import plot
#
#          attention = mx.np.eye(10).reshape(1, 1, 10, 10)
#          cells = plot.data.heatmaps(attention).cells  # plot.heatmaps draws them
#          assert cells.shape == (1, 1, 10, 10) and cells.trace(0, 2, 3).item() == 10
#
# What patterns mean
# ------------------
#
# Six patterns are worth recognizing. A row shows the attention of one query. A column shows how
# much all queries use one key.

rng = np.random.default_rng(4)
x = rng.normal(size=(10, 8))
patterns = {
    "all alike": qkv.weights(x, x, weighting="average"),
    "no looking ahead": qkv.weights(x, x, weighting="average", mask=masks.causal),
    "neighbours": qkv.weights(numbers, numbers, score=scores.Gaussian(1.0)),
    "one sink": qkv.weights(x, x, mask=np.where(np.arange(10) == 0, 3.0, 0.0)[None]),
    "the best alone": qkv.weights(x, x + 1.5 * x[::-1], weighting="hard"),
    "the three best": qkv.weights(x, x, weighting=weightings.TopK(3)),
}
assert all(np.allclose(a.sum(1), 1) for a in patterns.values())
assert np.allclose(np.triu(patterns["no looking ahead"], 1), 0)
assert (patterns["one sink"].sum(0).argmax()) == 0
assert (np.count_nonzero(patterns["the three best"], axis=1) == 3).all()
names = [*patterns]
grid = np.reshape([*patterns.values()], (2, 3, 10, 10))
plot.heatmaps(grid, titles=[names[:3], names[3:]], figsize=(2.5, 2.5))

# %%
# Too many to draw
# ----------------
#
# A matrix with more cells than the picture has pixels is pooled, and its title says how. Each block
# keeps its strongest weight, so a single large weight is not averaged away.

n = 1500
t = np.linspace(0, 40, n)[:, None]
curve = np.concatenate([np.cos(t), np.sin(t + t**2 / 90), t / 60], 1)
alpha = qkv.weights(curve, curve, score=scores.Gaussian(0.1))
cells, block = plot.data.heatmaps(alpha, most=(300, 300))
assert cells.shape[-2:] == (300, 300) and block == (5, 5)
assert np.isclose(cells.max(), alpha.max())
plot.heatmaps(alpha, figsize=(4.4, 4.4))
