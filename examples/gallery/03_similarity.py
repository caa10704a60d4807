r"""
Similarity between 0 and 1
==========================

Between "equal" and "different" there is "similar". Let the similarity of a query and a key be any
number from 0 to 1, and leave the sum as it is:

.. math:: \mathrm{Attention}(q, D) = \sum_i \mathrm{similarity}(q, k_i)\, v_i

The closer :math:`\mathrm{similarity}(q, k_i)` is to 1, the more :math:`v_i` counts. Near 0, it
hardly counts. We choose what "similar" means.
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
# Compare one name and three typos with every key. Equality gave "Liptn" a row of zeros. Similarity
# points at Lipton, and a little at Li.

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
# The sum for "Liptn" mixes two names with weights 0.62 and 0.29: together 0.91 of a name. If the
# values are numbers, this answer is too small, only because little was similar. Dividing each row
# by its sum fixes that, and turns similarities into a *weighted mean*.

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
# For numbers, similarity falls with distance. Here are five shapes, each 1 at distance 0. Some are
# bells that never reach 0. Others are windows that are 0 beyond some distance.

plot.kernels()

# %%
# All five turn a distance into a number from 0 to 1. For each of them, a nearer key never counts
# less than a farther one.

distance = np.linspace(0, 3, 301)[:, None]
for name in ("gaussian", "laplace", "boxcar", "triangular", "epanechnikov"):
    score = scores.resolve(name)(np.zeros((1, 1)), distance)[0]
    alike = np.exp(score) if name in ("gaussian", "laplace") else score
    assert alike[0] == 1 and alike.min() >= 0 and (np.diff(alike) <= 0).all()

# %%
# In practice a similarity can have any range. A dot product of vectors goes from −∞ to ∞. So we
# need a rule that turns similarities into weights. Softmax is one. First comes an example in which
# the numbers are money.
