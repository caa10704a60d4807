r"""
Six ways to compare
===================

You have to choose a similarity. Six of them are common. Each is a *score*: a number from
:math:`-\infty` to :math:`\infty` for a query and a key. Weights are computed from scores.

.. list-table::
   :header-rows: 1

   * - score
     - formula
     - choose it when
   * - dot product
     - :math:`q^\top k`
     - direction and length both carry meaning: a longer key should win more often
   * - scaled dot product
     - :math:`q^\top k / \sqrt{d}`
     - vectors are wide and initialized at random: every transformer
   * - multiplicative
     - :math:`q^\top W k`
     - query and key are in different spaces, or "similar" is not symmetric
   * - additive
     - :math:`v^\top \tanh(W_1 q + W_2 k + b)`
     - a product is too simple; a key should not win by its length
   * - gated
     - :math:`\sigma(w_1^\top q + w_2^\top k + b) \cdot q^\top k`
     - some queries or keys should be switched off
   * - sparse
     - any of these, for chosen pairs
     - you know in advance where to look, or there are too many pairs
"""

import numpy as np

import qkv
from qkv import masks, plot, scores

rng = np.random.default_rng(1)
q, k = rng.normal(size=(6, 8)), rng.normal(size=(10, 8))

# %%
# Dot and scaled dot
# ------------------
#
# The dot product is :math:`\lVert q \rVert \lVert k \rVert \cos` of the angle. A key twice as long
# scores twice as much, whatever its direction. The dot product also grows with the width: for two
# random vectors of width d it has variance d. Divided by :math:`\sqrt d`, it has variance 1 at
# every width.

dot = scores.Dot()
assert np.allclose(dot(q, 2 * k), 2 * dot(q, k))
for d in (4, 64, 1024):
    a, b = rng.normal(size=(2, 400, d))
    assert 0.9 < dot(a, b).var() / d < 1.1
    assert 0.9 < scores.ScaledDot()(a, b).var() < 1.1

# %%
# Multiplicative and additive
# ---------------------------
#
# Both have learned matrices, and accept a query and a key of different widths. With :math:`W = I`
# the first is the dot product again: *W* makes it multiplicative, not the product. The second
# passes the sum of both through a small network. Since tanh stays between −1 and 1, no key can
# score more than :math:`\sum |v|`, however long it is.

wide = rng.normal(size=(10, 12))
bilinear = scores.Multiplicative(rng.normal(size=(8, 12)) / 4)
additive = scores.Additive(
    rng.normal(size=(16, 8)) / 3, rng.normal(size=(16, 8)) / 3, rng.normal(size=16)
)
assert bilinear(q, wide).shape == (6, 10)
assert np.allclose(scores.Multiplicative(np.eye(8))(q, k), dot(q, k))
assert np.abs(additive(q, 1000 * k)).max() <= np.abs(additive.v).sum()

# %%
# Gated
# -----
#
# The gate is a number between 0 and 1 for each pair. Note what a closed gate means. It makes the
# *score* 0, and softmax gives a score of 0 an ordinary weight, :math:`e^0` over the sum. If all
# gates are closed, the query attends to all keys equally. It does not attend to nothing.

closed = scores.Gated(np.zeros(8), np.zeros(8), np.array(-50.0))
opened = scores.Gated(np.zeros(8), np.zeros(8), np.array(50.0))
assert np.allclose(qkv.weights(q, k, score=closed), 1 / 10)
assert np.allclose(opened(q, k), dot(q, k))

# %%
# Sparse
# ------
#
# Some texts write sparse attention as :math:`s = \sum_i q^\top k_i`. This adds the scores of all
# chosen keys into one number and leaves nothing to weight them by. The intended meaning is
# different: there is a set :math:`P(q)` of positions. Inside the set, scores are as before. Outside
# there are none:
#
# .. math:: \alpha(q, k_i) = \frac{e^{s(q, k_i)}}{\sum_{j \in P(q)} e^{s(q, k_j)}}
#           \quad\text{for } i \in P(q), \text{ else } 0
#
# So "sparse" is not a sixth formula but a mask. It combines with each of the other five.

near = masks.window(1)
alpha = qkv.weights(k, k, mask=near)
assert ((alpha > 0) == (np.abs(np.subtract.outer(range(10), range(10))) <= 1)).all()
assert np.allclose(alpha.sum(1), 1)

# %%
# Side by side
# ------------
#
# The same 10 vectors are queries and keys. Each panel is the softmax of one score.

gated = scores.Gated(rng.normal(size=8), rng.normal(size=8))
square = scores.Multiplicative(rng.normal(size=(8, 8)) / 3)
ways = {
    "dot": "dot",
    "scaled dot": "scaled_dot",
    "multiplicative": square,
    "additive": additive,
    "gated": gated,
}
panels = [qkv.weights(k, k, score=score) for score in ways.values()]
panels.append(alpha)
entropy = [-(a * np.log(a + 1e-30)).sum(1).mean() for a in panels]
assert entropy[0] < entropy[1]  # scaling spreads the weight
grid = np.reshape(panels, (2, 3, 10, 10))
titles = [[*ways][:3], [*[*ways][3:], "sparse: scaled dot, window"]]
plot.heatmaps(grid, "keys", "queries", titles, figsize=(2.7, 2.7))

# %%
# As functions of a single number q and a single number k, they look like this. Products are
# saddles, tanh has plateaus, and a gate flattens one side.

one = {
    "dot": "dot",
    "multiplicative": scores.Multiplicative(np.array([[-0.5]])),
    "additive": scores.Additive(np.array([[1.5]]), np.array([[-1.5]]), np.array([1.0])),
    "gated": scores.Gated(np.array([2.0]), np.array([-1.0])),
}
plot.surfaces(one)
