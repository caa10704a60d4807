r"""
What a score costs
==================

The first attention for translation compared each of the *d* words being written with each of the
*e* words read. It used a small network: the additive score. The transformer uses a product:

.. math:: s = v^\top \tanh(W_1 q + W_2 k + b) \qquad\text{against}\qquad s = (W_1 q)^\top (W_2 k)

It is often said that the first needs e × d computations and the second does not. Both do: there are
e × d pairs, and each has a score. The cost of one pair is different.
"""

import numpy as np

import qkv
from qkv import scores
from qkv.plot import style

rng = np.random.default_rng(0)
e, d, width, h = 40, 30, 64, 48
read, written = rng.normal(size=(e, width)), rng.normal(size=(d, width))
w1, w2, v = rng.normal(size=(h, width)) / 8, rng.normal(size=(h, width)) / 8, rng.normal(size=h)

# %%
# Counting
# --------
#
# In both, the projection to the common width h runs once per word, not once per pair. After that,
# the additive score computes h hyperbolic tangents *per pair*. Computed all at once, they need an
# array of e · d · h numbers. The product needs h multiplications per pair. That is one matrix
# product: it needs no such array, and it is the operation that computers do best.

a, b = written @ w1.T, read @ w2.T  # (d, h), (e, h): once for each word
inside = np.tanh(a[:, None] + b[None])  # once for each pair
additive, product = inside @ v, a @ b.T
assert inside.shape == (d, e, h) and product.shape == additive.shape == (d, e)
assert inside.nbytes == h * product.nbytes
assert np.allclose(scores.Additive(w1, w2, v)(written, read), additive)
assert np.allclose(scores.Multiplicative(w1.T @ w2)(written, read), product)

# %%
# If query and key already have the same width, the projection can be dropped too. This is the plain
# dot product. Transformers keep the projection, per head; the largest GPT-3 has heads of width 128.
#
# Numbers in memory and operations, for texts of n words on both sides and h = 64:

lengths = 2 ** np.arange(4, 15)
tanhs = lengths.astype(float) ** 2 * 64
held = {
    "additive, all at once": 4 * tanhs,
    "product": 4.0 * lengths**2,
    "either, block by block": 4.0 * lengths * 64 * 4,
}
assert held["additive, all at once"][-1] / 2**30 == 64  # GiB, for 16,384 words
assert held["product"][-1] / 2**30 == 1
figure = style.new_figure((6.4, 3.0), "constrained")
panel = figure.subplots()
for (name, bytes_), colour in zip(held.items(), (style.RED, style.BLUE, style.INK), strict=True):
    panel.plot(lengths, bytes_ / 2**20, "o-", color=colour, lw=1.8, ms=4)
    panel.annotate(
        name,
        (lengths[-1], bytes_[-1] / 2**20),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=colour,
    )
panel.set_xscale("log", base=2, subs=[])
panel.set_yscale("log", base=10, subs=[])
panel.set_xticks(lengths[::2], [f"{x:,}" for x in lengths[::2]])
panel.set_yticks([1, 2**10, 64 * 2**10], ["1 MiB", "1 GiB", "64 GiB"])
panel.minorticks_off()
style.style_axes(panel, "words on each side", "", "memory for the scores, in 32 bits")
figure

# %%
# Block by block
# --------------
#
# Neither array has to exist as a whole. Softmax can run over one block of keys at a time. It
# rescales the running sum when a larger score appears. Then memory grows with n + m. This happens
# here: the tanh array for 4,000 × 4,000 words would take 4 GB, and it is never allocated.

n = 4000
q, k, value = (rng.normal(size=(n, 16)).astype("float32") for _ in range(3))
u1, u2, u = (rng.normal(size=s).astype("float32") / 4 for s in ((64, 16), (64, 16), (64,)))
assert n * n * 64 * 4 > 4e9
out = qkv.attend(q, k, value, score=scores.Additive(u1, u2, u))

s = np.tanh(q[:5, None] @ u1.T + k @ u2.T) @ u  # five rows by the formula
alpha = np.exp(s) / np.exp(s).sum(1, keepdims=True)
assert np.allclose(out[:5], alpha @ value, atol=1e-4)

# %%
# Additive scores as products
# ---------------------------
#
# tanh(a + b) can be written as a sum of products of a function of a and a function of b, to any
# accuracy. It is a smooth function of two numbers, and its singular values fall fast. Then the
# additive score is a product of longer vectors and runs at the speed of a product. The library does
# this and reports the number of terms.

grid = np.linspace(-3, 3, 400)
singular = np.linalg.svd(np.tanh(grid[:, None] + grid), compute_uv=False)
terms = int(np.argmax(singular < 1e-6 * singular[0]))
assert terms < 40
print(f"{terms} products give tanh(a + b) to 1e-6, for a and b from −3 to 3")
figure = style.new_figure((6.0, 2.5), "constrained")
panel = figure.subplots()
panel.semilogy(np.arange(1, 41), singular[:40] / singular[0], "o-", color=style.RED, ms=4, lw=1.4)
style.style_axes(panel, "term", "singular value", "tanh(a + b) as a sum of products")
panel.axhline(1e-6, color=style.FRAME, lw=0.8, ls=":")
figure

# %%
# The benchmarks page shows how long both take on real machines, next to other libraries.
