r"""
Four special cases
==================

.. math:: \mathrm{Attention}(q, D) = \sum_i \alpha(q, k_i)\, v_i

The sum is a linear combination of the values. The weights decide where it can lie:

1. all :math:`\alpha_i \ge 0`: somewhere in the *cone* that the values span;
2. also :math:`\sum_i \alpha_i = 1`: in their *convex hull*, a weighted mean;
3. one :math:`\alpha_i = 1`, the others 0: *on a value*, the classical query;
4. all :math:`\alpha_i = 1/m`: always at *one point*, the mean, which is average pooling.
"""

import numpy as np

import qkv
from qkv import weightings
from qkv.plot import style

rng = np.random.default_rng(3)
around = np.arange(5) * 2 * np.pi / 5 + 0.3
key = 1.5 * np.c_[np.cos(around), np.sin(around)]  # a pentagon
value = 2.2 + 0.9 * key  # and another
query = rng.normal(size=(400, 2)) * 1.5

# %%
# The same 400 queries attend to the same five rows, with four weightings. "sigmoid" is an example
# of the first case: each weight is between 0 and 1, independently of the others.

ways = {
    "α ≥ 0: a cone": "sigmoid",
    "Σα = 1 too: the hull": "softmax",
    "one α = 1: a value": "hard",
    "α = 1/m: the mean": "average",
}
out = {name: qkv.attend(query, key, value, weighting=how) for name, how in ways.items()}
alpha = {name: qkv.weights(query, key, weighting=how) for name, how in ways.items()}
cone, hull, classical, mean = alpha.values()

# %%
# This checks each claim of the list above.

assert all((a >= 0).all() for a in alpha.values())
assert not np.allclose(cone.sum(1), 1)
assert all(np.allclose(a.sum(1), 1) for a in (hull, classical, mean))
assert (np.sort(classical, 1) == [0, 0, 0, 0, 1]).all()
assert (mean == 1 / 5).all()
assert np.allclose(out["α = 1/m: the mean"], value.mean(0))
spots = {tuple(row) for row in out["one α = 1: a value"]}
assert spots <= {tuple(row) for row in value}

# %%
# In the plane a cone is the region between two rays. So the angle of an answer stays within the
# angles of the values. Its length is free.

angle = np.arctan2(value[:, 1], value[:, 0])
free = out["α ≥ 0: a cone"]
turned = np.arctan2(free[:, 1], free[:, 0])
assert angle.min() <= turned.min() and turned.max() <= angle.max()
assert np.linalg.norm(free, axis=1).max() > np.linalg.norm(value, axis=1).max()

figure = style.new_figure((10.4, 2.9), "constrained")
rays = 20 * np.c_[np.cos(angle), np.sin(angle)][[angle.argmin(), angle.argmax()]]
for panel, (name, points) in zip(figure.subplots(1, 4, sharey=True), out.items(), strict=True):
    panel.fill([0, *rays[:, 0]], [0, *rays[:, 1]], color="#f3f3f3", lw=0)
    panel.fill(*value.T, color="#fddbc7", lw=0)
    panel.plot(*value.T, "o", ms=8, color="white", mec=style.INK, mew=1)
    panel.plot(*points.T, "o", ms=3.2, mew=0, color=style.RED, alpha=0.4)
    style.style_axes(panel, "", "", name)
    panel.set(xlim=(0, 8), ylim=(0, 8), aspect="equal")
figure

# %%
# Grey is the cone, pink the hull, white circles the five values, red dots the answers.
#
# The other cases are limits of the second. At a temperature near 0, softmax *is* the classical
# query. At a very high temperature, it is the mean.

cold, hot = weightings.Softmax(1e-3), weightings.Softmax(1e6)
clear = np.ptp(np.sort(query @ key.T / np.sqrt(2), 1)[:, -2:], axis=1) > 0.05
assert clear.mean() > 0.9
assert np.allclose(qkv.weights(query, key, weighting=cold)[clear], classical[clear])
assert np.allclose(qkv.weights(query, key, weighting=hot), mean, atol=1e-5)

# %%
# Negative weights are possible too. "raw" uses the scores as they are, and the answer may lie
# anywhere in the plane that the values span. It is no longer a mean, and hard to read as attention.

raw = qkv.attend(query, key, value, score="dot", weighting="raw")
assert (raw < 0).any()
