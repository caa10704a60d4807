r"""
Nine words, step by step
========================

"I like Natural Language Processing, a lot!" has seven words and two punctuation marks: nine tokens.
(With the abbreviation NLP the sentence looks shorter. Count the tokens, not the spaces.) Each token
is a vector of *d* numbers. Attention gives each token a new vector that depends on its neighbours.

Vectors are rows here. In texts that write them as columns, every shape below is transposed.
"""

import numpy as np
from matplotlib.patches import Rectangle

import qkv
from qkv import plot
from qkv.database.encoders import Words
from qkv.plot import style

tokens = ["I", "like", "Natural", "Language", "Processing", ",", "a", "lot", "!"]
X = 6 * Words().encode(tokens)  # unit vectors, scaled to about the length of GloVe's
n, d = X.shape
assert (n, d) == (9, 256)

# %%
# The first word
# --------------
#
# 1. The query is the vector of "I". The keys are the vectors of all nine tokens, including its own.

q, K = X[:1], X
assert q.shape == (1, d) and K.shape == (9, d)

# %%
# 2. A dot product with each key gives nine numbers. (These are *scores*; some texts already call
#    them weights.) They are divided by :math:`\sqrt d`. The next page shows why.

s = q @ K.T / np.sqrt(d)
assert s.shape == (1, 9)

# %%
# 3. Softmax turns them into nine weights between 0 and 1 that sum to 1.

alpha = np.exp(s) / np.exp(s).sum()
assert alpha.shape == (1, 9) and np.isclose(alpha.sum(), 1)

# %%
# 4. The nine vectors, now as values, are added with these weights. The result is one vector, as
#    wide as the input.

V = X
new = alpha @ V
assert new.shape == (1, d)

# %%
# Steps 1 to 4 are one call.

assert np.allclose(qkv.attend(q, K, V), new, atol=1e-5)

# %%
# All nine
# --------
#
# Do the same for each token: stack the queries, and the nine rows of weights form a matrix.

A = qkv.weights(X, X)
Z = qkv.attend(X, X, X)
assert A.shape == (9, 9) and Z.shape == (9, d)
assert np.allclose(A @ X, Z, atol=1e-5)
plot.heatmaps(A, "keys", "queries", figsize=(4.6, 4.6), xticks=tokens, yticks=tokens, annotate=True)

# %%
# What it did
# -----------
#
# Every new vector is a mean, so it moved toward the others. Tokens that had almost nothing in
# common now have something. This is the meaning of "aware of the context".


def cosines(x: np.ndarray) -> np.ndarray:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


before, after = cosines(X), cosines(Z)
apart = ~np.eye(9, dtype=bool)
assert abs(before[apart].mean()) < 0.01 and after[apart].mean() > 0.25
plot.heatmaps(
    [before, after],
    "",
    "",
    ["cosines of the words", "after attention"],
    figsize=(3.9, 3.9),
    xticks=tokens,
    yticks=tokens,
)

# %%
# What it did not do
# ------------------
#
# The diagonal is heavy: a vector is most similar to itself, so each word mostly attends to itself.
# No word asks for anything specific, because query, key and value are the same vector. The order is
# not known either. If you shuffle the words, the same vectors come out, shuffled.

assert (A.argmax(1) == np.arange(9)).all()
order = np.random.default_rng(0).permutation(9)
assert np.allclose(qkv.attend(X[order], X[order], X[order]), Z[order], atol=1e-5)

figure = style.new_figure((6.6, 1.9), "constrained")
panel = figure.subplots()
shapes = {"q": (1, 5), "Kᵀ": (5, 9), "s": (1, 9), "α": (1, 9), "V": (9, 5), "new": (1, 5)}
x = 0.0
for (name, (rows, columns)), sign in zip(shapes.items(), " ·→→·→", strict=True):
    x += 2.4
    panel.text(x - 1.2, 0, sign, ha="center", va="center", fontsize=12, color=style.INK)
    box = {"fc": "#fddbc7" if name in "sα" else "#f3f3f3", "ec": style.INK, "lw": 0.8}
    panel.add_patch(Rectangle((x, -rows / 2), columns, rows, **box))
    size = f"{rows} × {columns}".replace("5", "d")
    panel.text(x + columns / 2, -6.1, f"{name}\n{size}", ha="center", va="center", fontsize=8.5)
    x += columns
panel.set(xlim=(2, x + 0.4), ylim=(-7.4, 4.8), aspect="equal")
panel.axis("off")
figure
