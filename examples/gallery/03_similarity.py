r"""
Similarity between 0 and 1
==========================

Between "equal" and "different" lies "alike". Let the similarity of a query and a key be any number
from 0 to 1, and leave the sum as it is:

.. math:: \mathrm{Attention}(q, D) = \sum_i \mathrm{similarity}(q, k_i)\, v_i

The nearer :math:`\mathrm{similarity}(q, k_i)` is to 1, the more :math:`v_i` counts; near 0, it
hardly counts at all. What "alike" means is left open, and is ours to decide.
"""

import numpy as np

from qkv import plot, scores

names = ["Zhang", "Lipton", "Li", "Smola", "Hu", "Werness"]


def pairs(word: str) -> set[str]:
    """The pairs of neighbouring letters, the ends of the word included."""
    framed = f"‹{word.lower()}›"
    return {framed[i : i + 2] for i in range(len(framed) - 1)}


def similarity(a: str, b: str) -> float:
    """The share of letter pairs that two words have in common: 1 if all, 0 if none."""
    return len(pairs(a) & pairs(b)) / len(pairs(a) | pairs(b))


assert similarity("Li", "Li") == 1.0 and similarity("Li", "Hu") == 0.0
assert similarity("Lipton", "Liptn") == 5 / 8

# %%
# Each name and three slips, compared with every key. Where equality had a row of zeros for "Liptn",
# this has a row that points at Lipton, and a little at Li.

queries = ["Li", "Liptn", "Zang", "Smolla"]
table = np.array([[similarity(q, k) for k in names] for q in queries])
assert table.min() >= 0 and table.max() <= 1
assert [names[row.argmax()] for row in table] == ["Li", "Lipton", "Zhang", "Smola"]
plot.heatmaps(
    table, "keys", "queries", figsize=(5.2, 3.6), xticks=names, yticks=queries, annotate=True
)

# %%
# The weights need not sum to 1
# -----------------------------
#
# The sum over "Liptn" mixes two names with weights 0.62 and 0.29: together 0.91 of a name. If the
# values are numbers, such an answer is too small merely because little was alike. Dividing each row
# by its sum mends that, and makes of similarities a *weighted mean*.

ages = np.array([[31.0], [40.0], [35.0], [44.0], [29.0], [38.0]])
raw = table @ ages
mean = (table / table.sum(1, keepdims=True)) @ ages
assert np.isclose(table[1].sum(), 5 / 8 + 2 / 7)
assert raw[1, 0] < 36 and 38 < mean[1, 0] < 39
for query, one, other in zip(queries, raw[:, 0], mean[:, 0], strict=True):
    print(f"{query:<8} sum {one:5.1f}   mean {other:5.1f}")

# %%
# Similarity of numbers
# ---------------------
#
# For numbers, likeness falls with distance. Five shapes that it may have, each 1 at distance 0:
# bells without an end, and windows that are 0 from some distance on.

plot.kernels()

# %%
# All five turn a distance into a number from 0 to 1, and each keeps the promise of this page: the
# nearer key counts no less than the farther one.

distance = np.linspace(0, 3, 301)[:, None]
for name in ("gaussian", "laplace", "boxcar", "triangular", "epanechnikov"):
    score = scores.resolve(name)(np.zeros((1, 1)), distance)[0]
    alike = np.exp(score) if name in ("gaussian", "laplace") else score
    assert alike[0] == 1 and alike.min() >= 0 and (np.diff(alike) <= 0).all()

# %%
# In practice a similarity may live in any range: a dot product of vectors goes from −∞ to ∞. What
# is needed is a rule that makes weights of it, and softmax will be one. First an example in which
# the numbers mean money.
