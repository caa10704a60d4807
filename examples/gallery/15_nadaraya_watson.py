r"""
Nadaraya–Watson: attention in 1964
==================================

Long before it had this name, attention was a way to fit a curve to points. To estimate the value at
:math:`q`, Nadaraya and Watson took the mean of all known values. Each is weighted by how near its
key is:

.. math:: f(q) = \sum_i \frac{K(q - k_i)}{\sum_j K(q - k_j)}\, v_i

With the bell :math:`K(r) = \exp(-r^2/2\sigma^2)` the fraction is the softmax of
:math:`-r^2/2\sigma^2`. It is the sum from the start of this chapter, and nothing has to be learned.
"""

import numpy as np
import torch

import qkv
from qkv import plot, scores
from qkv.plot import style


def truth(x: np.ndarray) -> np.ndarray:
    return 2 * np.sin(x) + x


rng = np.random.default_rng(1)
x = np.sort(rng.uniform(0, 5, 40))
y = truth(x) + rng.normal(0, 0.5, 40)
k, v, q = x[:, None], y[:, None], np.linspace(0, 5, 200)[:, None]
by_hand = np.exp(-((q - x) ** 2) / 2)
by_hand = by_hand @ y / by_hand.sum(1)
assert np.allclose(qkv.attend(q, k, v, score="gaussian")[:, 0], by_hand)

# %%
# The shape of the kernel
# -----------------------
#
# A window (boxcar) gives a curve with steps, a bell gives a smooth curve, and the mean of
# everything gives a straight line. Each column of the lower row holds the weights of one query.
#
# (A well-known textbook plots max(0, 1 − r) under Epanechnikov's name. That is the triangular
# kernel. Epanechnikov's is max(0, 1 − r²).)

by = {"constant": "constant", "boxcar": "boxcar", "epanechnikov": "epanechnikov"}
plot.regression(x, y, {**by, "gaussian": "gaussian"}, truth=truth)

# %%
# The width of the kernel
# -----------------------
#
# The width matters more than the shape. Estimate each point from all others, and measure the error.
# The error is differentiable, so the width can be *learned*: here by torch, from a start that is
# far too wide.

key, value = torch.tensor(k), torch.tensor(v)
log_width = torch.tensor(np.log(2.0), requires_grad=True)
others = ~torch.eye(40, dtype=torch.bool)
descent = torch.optim.Adam([log_width], lr=0.1)
path = []
for _ in range(60):
    guess = qkv.attend(key, key, value, score=scores.Gaussian(log_width.exp()), mask=others)
    loss = (guess - value).square().mean()
    path.append((log_width.exp().item(), loss.item()))
    descent.zero_grad()
    loss.backward()
    descent.step()
width, error = path[-1]
assert 0.1 < width < 0.5 and error < 0.25 * path[0][1]
print(f"σ from 2 to {width:.2f}; error of a point from the others {path[0][1]:.2f} → {error:.2f}")

tried = np.geomspace(0.05, 3, 60)
errors = [
    float(((qkv.attend(k, k, v, score=scores.Gaussian(w), mask=others.numpy()) - v) ** 2).mean())
    for w in tried
]
assert error < 1.02 * min(errors)
figure = style.new_figure((6.2, 2.8), "constrained")
panel = figure.subplots()
panel.plot(tried, errors, color=style.FRAME, lw=2.5)
panel.plot(*zip(*path, strict=True), "o-", color=style.RED, ms=3.5, lw=1)
panel.set_xscale("log", subs=[])
panel.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
panel.set_ylim(0)
style.style_axes(panel, "σ", "squared error", "down the gradient, from σ = 2")
figure

# %%
# The learned width, between one that is too small and one that is too large.

three = {f"σ = {w:.2f}": scores.Gaussian(w) for w in (0.05, width, 2.0)}
plot.regression(x, y, three, truth=truth)

# %%
# In each framework
# -----------------
#
# The same regression, and the derivative of the answer with respect to the width:
#
# .. tab-set::
#
#    .. tab-item:: PyTorch
#
#       .. code-block:: python
#
#          import torch
#          import qkv
#          from qkv.scores import Gaussian
#
#          k, v = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [4.0]])
#          width = torch.tensor(1.0, requires_grad=True)
#          out = qkv.attend(torch.tensor([[0.5]]), k, v, score=Gaussian(width))
#          out.sum().backward()
#          assert abs(out.item() - 1.5607) < 1e-3 and width.grad > 0
#
#    .. tab-item:: JAX
#
#       .. code-block:: python
#
#          import jax
#          import jax.numpy as jnp
#          import qkv
#          from qkv.scores import Gaussian
#
#          k, v = jnp.array([[0.0], [1.0], [3.0]]), jnp.array([[1.0], [2.0], [4.0]])
#          q = jnp.array([[0.5]])
#          f = lambda width: qkv.attend(q, k, v, score=Gaussian(width))[0, 0]
#          out, slope = jax.value_and_grad(f)(1.0)
#          assert abs(out - 1.5607) < 1e-3 and slope > 0
#
#    .. tab-item:: TensorFlow
#
#       .. code-block:: python
#
#          import tensorflow as tf
#          import qkv
#          from qkv.scores import Gaussian
#
#          k, v = tf.constant([[0.0], [1.0], [3.0]]), tf.constant([[1.0], [2.0], [4.0]])
#          width = tf.Variable(1.0)
#          with tf.GradientTape() as tape:
#              out = qkv.attend(tf.constant([[0.5]]), k, v, score=Gaussian(width))
#          assert abs(float(out[0, 0]) - 1.5607) < 1e-3
#          assert tape.gradient(out, width) > 0
#
#    .. tab-item:: MXNet
#
#       .. code-block:: python
#
#          import mxnet as mx
#          import qkv
#          from qkv.scores import Gaussian
#
#          k, v = mx.np.array([[0.0], [1.0], [3.0]]), mx.np.array([[1.0], [2.0], [4.0]])
#          width = mx.np.array(1.0)
#          width.attach_grad()
#          with mx.autograd.record():
#              out = qkv.attend(mx.np.array([[0.5]]), k, v, score=Gaussian(width))
#          out.backward()
#          assert abs(out.item() - 1.5607) < 1e-3 and width.grad.item() > 0
