r"""
Softmax
=======

Scores can be any numbers. Weights should be shares of attention. Dividing the scores by their sum
gives shares only if no score is negative. (If a text writes α = α / Σ α for this, the α on the
right is the score.) Softmax makes the scores positive first:

.. math:: \alpha(q, k_i) = \mathrm{softmax}(s)_i = \frac{\exp(s_i)}{\sum_j \exp(s_j)},
          \qquad s_i = a(q, k_i)

Softmax is a function of the whole row :math:`s`, not of one number. Its *result* sums to 1, not the
scores. For a matrix, it is applied row by row.
"""

import numpy as np

import qkv
from qkv import weightings
from qkv.plot import style

s = np.array([[2.0, 1.0, 0.2, -1.0]])
alpha = weightings.Softmax()(s)[0]
print(alpha.round(3))

# %%
# It normalises
# -------------
#
# Every weight is positive, and the weights sum to 1. Only differences of scores count: adding a
# constant to all of them changes nothing. So scores of 1,000 are safe if the largest is subtracted
# before the exponential, as it is here.

assert (alpha > 0).all() and np.isclose(alpha.sum(), 1)
assert np.allclose(weightings.Softmax()(s + 1000.0), alpha)
assert np.allclose(alpha, np.exp(s[0]) / np.exp(s[0]).sum())

# %%
# It sharpens
# -----------
#
# If two scores differ by 1, their weights differ by a factor of *e*. Dividing the scores by a
# temperature T below 1 widens the gap, until one weight takes everything. That is the maximum, made
# soft; hence the name. (*Soft argmax* would be a better name: it gives the position of the maximum,
# not its size.)

assert np.isclose(alpha[0] / alpha[1], np.e)
assert alpha[0] / alpha[1] > s[0, 0] / s[0, 1]
temperature = np.geomspace(0.05, 20, 200)
paths = np.stack([weightings.Softmax(t)(s)[0] for t in temperature])
assert paths[0, 0] > 0.999 and np.ptp(paths[-1]) < 0.05
figure = style.new_figure((6.2, 2.8), "constrained")
panel = figure.subplots()
shades = ["#67000d", "#cb181d", "#fb6a4a", "#bbbbbb"]
for path, score, shade in zip(paths.T, s[0], shades, strict=True):
    panel.plot(temperature, path, color=shade, lw=2, label=f"s = {score:g}")
panel.axhline(0.25, color=style.FRAME, lw=0.8, ls=":")
panel.set_xscale("log", subs=[])
panel.xaxis.set_major_formatter("{x:g}")
style.style_axes(panel, "temperature T", "weight", "softmax(s / T): from the maximum to the mean")
panel.legend(frameon=False, fontsize=8, labelcolor=style.INK, loc="upper right")
figure

# %%
# It is differentiable
# --------------------
#
# .. math:: \frac{\partial \alpha_i}{\partial s_j} = \alpha_i (\delta_{ij} - \alpha_j)
#
# So a change in one score moves every weight: its own up, and the others down by the same total.
# The hard maximum has no such slope: it is flat, with jumps.

slope = np.diag(alpha) - np.outer(alpha, alpha)
step = 1e-6 * np.eye(4)
measured = (weightings.Softmax()(s + step) - alpha) / 1e-6
assert np.allclose(measured, slope, atol=1e-5)
assert np.allclose(slope.sum(0), 0)
hard = weightings.Hard()
assert np.array_equal(hard(s + step), hard(s).repeat(4, 0))

qkv.plot.heatmaps(slope, "score j", "weight i", "∂αᵢ / ∂sⱼ", figsize=(3.2, 3.0), annotate=True)

# %%
# The frameworks agree. This code asks for their own derivative of :math:`\alpha`:
#
# .. tab-set::
#
#    .. tab-item:: PyTorch
#
#       .. code-block:: python
#
#          import torch
#          import qkv
#
#          key = torch.tensor([[2.0], [1.0], [0.2], [-1.0]])
#          of = lambda key: qkv.weights(torch.ones(1, 1), key, score="dot")[0]
#          slope = torch.autograd.functional.jacobian(of, key)[..., 0]
#          alpha = of(key)
#          assert torch.allclose(slope, alpha.diag() - alpha.outer(alpha), atol=1e-6)
#
#    .. tab-item:: JAX
#
#       .. code-block:: python
#
#          import jax
#          import jax.numpy as jnp
#          import qkv
#
#          key = jnp.array([[2.0], [1.0], [0.2], [-1.0]])
#          of = lambda key: qkv.weights(jnp.ones((1, 1)), key, score="dot")[0]
#          slope = jax.jacobian(of)(key)[..., 0]
#          alpha = of(key)
#          assert jnp.allclose(slope, jnp.diag(alpha) - jnp.outer(alpha, alpha), atol=1e-6)
#
#    .. tab-item:: TensorFlow
#
#       .. code-block:: python
#
#          import tensorflow as tf
#          import qkv
#
#          key = tf.constant([[2.0], [1.0], [0.2], [-1.0]])
#          with tf.GradientTape() as tape:
#              tape.watch(key)
#              alpha = qkv.weights(tf.ones((1, 1)), key, score="dot")[0]
#          slope = tape.jacobian(alpha, key)[..., 0]
#          expected = tf.linalg.diag(alpha) - alpha[:, None] * alpha[None, :]
#          tf.debugging.assert_near(slope, expected, atol=1e-6)
#
#    .. tab-item:: MXNet
#
#       .. code-block:: python
#
#          import mxnet as mx
#          import numpy
#          import qkv
#
#          key = mx.np.array([[2.0], [1.0], [0.2], [-1.0]])
#          key.attach_grad()
#          with mx.autograd.record():
#              alpha = qkv.weights(mx.np.ones((1, 1)), key, score="dot")[0]
#              first = alpha[0]  # one row of the slope at a time
#          first.backward()
#          a = alpha.asnumpy()
#          expected = a[0] * (numpy.eye(4)[0] - a)
#          assert numpy.allclose(key.grad.asnumpy()[:, 0], expected, atol=1e-6)
