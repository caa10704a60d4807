r"""
Exercise 2: the gradient is a covariance
========================================

*Let the score be* :math:`a(q, k_i) = q^\top k_i` *and let the values be the keys. Show that the
gradient of attention with respect to the query is the covariance of the keys under the weights:*
:math:`\nabla_q\, \mathrm{Attention}(q, D) = \mathrm{Cov}_{p(k_i; q)}[k_i]`.

**Proof.** Write :math:`p_i = \exp(q^\top k_i) / \sum_j \exp(q^\top k_j)` and
:math:`\bar k = \sum_i p_i k_i`, which is the attention. The logarithm of a weight is
:math:`\log p_i = q^\top k_i - \log \sum_j \exp(q^\top k_j)`, and its gradient

.. math:: \nabla_q \log p_i = k_i - \frac{\sum_j \exp(q^\top k_j)\, k_j}{\sum_j \exp(q^\top k_j)}
          = k_i - \bar k, \qquad\text{so}\qquad \nabla_q\, p_i = p_i\, (k_i - \bar k).

Therefore

.. math:: \nabla_q\, \bar k = \sum_i k_i\, (\nabla_q\, p_i)^\top
          = \sum_i p_i\, k_i (k_i - \bar k)^\top
          = \sum_i p_i\, k_i k_i^\top - \bar k \bar k^\top = \mathrm{Cov}_p[k]. \quad\square

The values need to be the keys only in the last line. For other values it reads
:math:`\mathrm{Cov}_p[v, k]`. With the scale :math:`1/\sqrt d` it is smaller by that factor.
"""

import numpy as np
import torch

import qkv
from qkv.plot import style

torch.manual_seed(2)
key = torch.randn(12, 3, dtype=torch.float64)
query = torch.randn(3, dtype=torch.float64)


def attention(q: torch.Tensor, value: torch.Tensor, score: str = "dot") -> torch.Tensor:
    return qkv.attend(q[None], key, value, score=score)[0]


def covariance(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (p[:, None] * (a - p @ a)).T @ (b - p @ b)


# %%
# Check
# -----
#
# Three ways lead to the same 3 × 3 matrix: torch's derivative, finite differences, and the
# covariance.

p = qkv.weights(query[None], key, score="dot")[0]
gradient = torch.autograd.functional.jacobian(lambda q: attention(q, key), query)
step = 1e-6 * torch.eye(3, dtype=torch.float64)
steps = [(attention(query + h, key) - attention(query - h, key)) / 2e-6 for h in step]
assert torch.allclose(gradient, covariance(key, key, p), atol=1e-12)
assert torch.allclose(gradient, torch.stack(steps, 1), atol=1e-8)

# %%
# So the gradient is symmetric and has no negative eigenvalue. A step of the query in any direction
# never moves the answer backward.

assert torch.allclose(gradient, gradient.T)
assert torch.linalg.eigvalsh(gradient).min() > 0

# %%
# Other values, and the scale:

value = torch.randn(12, 2, dtype=torch.float64)
other = torch.autograd.functional.jacobian(lambda q: attention(q, value), query)
assert torch.allclose(other, covariance(value, key, p), atol=1e-12)
p = qkv.weights(query[None], key)[0]
scaled = torch.autograd.functional.jacobian(lambda q: attention(q, key, "scaled_dot"), query)
assert torch.allclose(scaled, covariance(key, key, p) / 3**0.5, atol=1e-12)

# %%
# Picture
# -------
#
# Keys in the plane. A longer query moves the answer closer to one key, and the ellipse of the
# covariance around it becomes smaller. A query that is certain of its answer has little gradient
# left. This is what saturated softmax means.

rng = np.random.default_rng(8)
points = rng.normal(size=(30, 2))
way = np.array([0.8, 0.6])
turn = np.linspace(0, 2 * np.pi, 100)
figure = style.new_figure((10.0, 2.9), "constrained")
sizes = []
for panel, length in zip(figure.subplots(1, 4, sharey=True), (0.0, 1.0, 3.0, 12.0), strict=True):
    q = length * way[None]
    weight = qkv.weights(q, points, score="dot")[0]
    mean = qkv.attend(q, points, points, score="dot")[0]
    cov = (weight[:, None] * (points - mean)).T @ (points - mean)
    sizes.append(np.trace(cov))
    root = np.linalg.cholesky(cov + 1e-12 * np.eye(2))
    panel.scatter(*points.T, s=8 + 260 * weight, color="#fb6a4a", alpha=0.65, lw=0)
    panel.fill(*(mean[:, None] + root @ [np.cos(turn), np.sin(turn)]), color=style.BLUE, alpha=0.15)
    panel.plot(*(mean[:, None] + root @ [np.cos(turn), np.sin(turn)]), color=style.BLUE, lw=1.4)
    panel.plot(*mean, "o", color=style.BLUE, ms=5)
    style.style_axes(panel, "", "", f"‖q‖ = {length:g}")
    panel.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.1 * sizes[0]
figure

# %%
# Red: the keys, sized by weight. Blue: the answer, and one standard deviation around it.
#
# One use: if the keys are on disk, the gradient needs no second pass over them. The means of k and
# of kkᵀ can be summed in the same pass as the answer.
