r"""
Self-attention
==============

What a word asks for, what it is found by, and what it passes on are three different things. So each
word gets three vectors, from three learned matrices:

.. math:: Q = X W_Q, \qquad K = X W_K, \qquad V = X W_V

.. math:: S = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_Q}}\right) V

With *n* words of width *d*, X is n × d. :math:`W_Q` and :math:`W_K` are d × :math:`d_Q`: the two
widths must agree, because rows of Q meet rows of K. :math:`W_V` is d × :math:`d_V`.
"""

import torch

import qkv
from qkv import plot
from qkv.plot import style

torch.manual_seed(0)
n, d, d_q, d_v = 7, 16, 8, 5
X = torch.randn(n, d)
layer = qkv.nn.SelfAttention(d, d_qk=d_q, d_v=d_v)
S, A = layer(X, need_weights=True)

# %%
# The shapes
# ----------
#
# Each row of A belongs to one query and sums to 1. The product with V has the width of V: S is n ×
# :math:`d_V`. (Some texts say n × :math:`d_Q`. That is true only if the two widths are equal.)

Q, K, V = X @ layer.w_query, X @ layer.w_key, X @ layer.w_value
assert Q.shape == K.shape == (n, d_q) and V.shape == (n, d_v)
assert A.shape == (n, n) and torch.allclose(A.sum(1), torch.ones(n))
assert S.shape == (n, d_v)
assert torch.allclose(S, torch.softmax(Q @ K.T / d_q**0.5, 1) @ V, atol=1e-6)

# %%
# What V is for
# -------------
#
# V is the least obvious of the three. Q and K decide *who listens to whom*. V decides *what is
# said*. They can be learned separately. If you change :math:`W_V`, the weights stay the same and
# every output changes. If you change :math:`W_K`, each word says the same as before, but to
# different words.

with torch.no_grad():
    said = X @ layer.w_value
    layer.w_value.mul_(-2.0)
    other, same = layer(X, need_weights=True)
    assert torch.equal(same, A) and torch.allclose(other, -2 * S, atol=1e-5)
    layer.w_value.div_(-2.0)
    layer.w_key.add_(torch.randn(d, d_q))
    assert not torch.allclose(layer(X, need_weights=True)[1], A, atol=0.1)
    assert torch.equal(X @ layer.w_value, said)

# %%
# With one matrix for all three, :math:`QK^\top` would be symmetric. Before softmax, "dog" would
# look at "wagged" just as much as "wagged" at "dog". Two matrices allow one direction only.

one = Q @ Q.T
two = Q @ K.T
assert torch.allclose(one, one.T) and not torch.allclose(two, two.T)

# %%
# What :math:`1/\sqrt d` does
# ---------------------------
#
# It changes little in the values and a lot in the gradients. Dot products of random vectors have a
# standard deviation of :math:`\sqrt d`. At d = 512 the scores are some 20 apart, and softmax puts
# nearly all weight on one key. There its slope :math:`\alpha_i(\delta_{ij} - \alpha_j)` is almost
# 0, so little can be learned. Divided by :math:`\sqrt d`, the scores have the same spread at any
# width, and so has the slope.

widths = [2, 8, 32, 128, 512, 2048]
slopes: dict[str, list[float]] = {"dot": [], "scaled_dot": []}
tops: dict[str, list[float]] = {"dot": [], "scaled_dot": []}
for width in widths:
    q, k = torch.randn(200, width).double(), torch.randn(32, width).double()
    for name in slopes:
        a = qkv.weights(q, k, score=name)
        # ‖∂α/∂s‖ of a row, squared: Σᵢⱼ αᵢ² (δᵢⱼ − αⱼ)²
        square = (a**2).sum(1) - 2 * (a**3).sum(1) + (a**2).sum(1) ** 2
        slopes[name].append(float(square.clamp(min=0).sqrt().median()))
        tops[name].append(float(a.max(1).values.mean()))

assert slopes["dot"][-1] < 0.001 and tops["dot"][-1] > 0.95
assert min(slopes["scaled_dot"]) > 0.2 and max(tops["scaled_dot"]) < 0.2

# %%
# This checks the formula for the slope against torch's own derivative:

s = torch.randn(1, 32)
jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, 1), s)[0, :, 0]
a = torch.softmax(s, 1)
norm = ((a**2).sum() - 2 * (a**3).sum() + (a**2).sum() ** 2).sqrt()
assert torch.isclose(jacobian.norm(), norm, atol=1e-6)

figure = style.new_figure((8.6, 2.9), "constrained")
left, right = figure.subplots(1, 2)
for name, colour in (("dot", style.RED), ("scaled_dot", style.BLUE)):
    label = "qᵀk" if name == "dot" else "qᵀk / √d"
    left.plot(widths, slopes[name], "o-", color=colour, lw=1.8, ms=5, label=label)
    right.plot(widths, tops[name], "o-", color=colour, lw=1.8, ms=5)
style.style_axes(left, "width d", "‖∂α/∂s‖, median", "the gradient that is left")
style.style_axes(right, "width d", "largest weight, mean", "how sure the row is, of 32 keys")
for panel in (left, right):
    panel.set_xscale("log", base=2, subs=[])
    panel.set_xticks(widths, [str(width) for width in widths])
left.set_yscale("log", subs=[])
right.set_ylim(0, 1.05)
left.legend(frameon=False, fontsize=9, labelcolor=style.INK, loc="lower left")
figure

# %%
# The rows themselves, at width 512. Without the root, each query has settled on one key before
# anything was learned.

q, k = torch.randn(10, 512), torch.randn(10, 512)
pair = [qkv.weights(q, k, score=name) for name in ("dot", "scaled_dot")]
plot.heatmaps(torch.stack(pair), titles=["qᵀk", "qᵀk / √d"], figsize=(3.0, 3.0))
