r"""
Exercise 1: approximate match
=============================

*Which attention function returns the approximate matches of a classical database?*

Databases mean three things by this. Each is a pair of a score and a weighting:

.. list-table::
   :header-rows: 1

   * - you want
     - score
     - weighting
   * - every row within a distance
     - boxcar: 1 where :math:`\lVert q - k \rVert \le` width, else 0
     - normalized: the same weight for each
   * - the nearest row
     - any score that falls with the distance
     - hard
   * - the nearest few, nearer ones more
     - Gaussian
     - top-k, or softmax

Equality is the first case with a width of 0.
"""

import numpy as np

import qkv
from qkv import plot, scores, weightings

years = np.array([1813, 1847, 1851, 1851, 1866, 1869, 1877, 1884.0])
titles = np.array(["Pride", "Jane Eyre", "Moby", "Gables", "Crime", "War", "Anna", "Huck"])
q, k = np.array([[1853.0]]), years[:, None]

# %%
# All three, for the year 1853.

within = qkv.weights(q, k, score=scores.Boxcar(6), weighting="normalized")[0]
nearest = qkv.weights(q, k, score="gaussian", weighting="hard")[0]
few = qkv.weights(q, k, score=scores.Gaussian(6.0), weighting=weightings.TopK(4))[0]
assert set(titles[within > 0]) == {"Jane Eyre", "Moby", "Gables"}
assert titles[nearest == 1].tolist() == ["Moby"]  # on a tie, the first row
assert np.count_nonzero(few) == 4 and few[2] == few[3] > few[1]
equal = qkv.weights(q - 2, k, score="exact", weighting="normalized")[0]
assert set(titles[equal > 0]) == {"Moby", "Gables"}

plot.heatmaps(
    np.stack([equal, within, nearest, few]),
    "keys: years",
    "",
    figsize=(7.2, 3.2),
    xticks=[f"{year:.0f} {title}" for year, title in zip(years, titles, strict=True)],
    yticks=["= 1851", "within 6 of 1853", "nearest to 1853", "nearest four"],
    annotate=True,
)

# %%
# If nothing is near
# ------------------
#
# Only the window can return no row. Softmax always distributes a total weight of 1. For the year
# 3000 it points, with full weight, at the last row.

future = np.array([[3000.0]])
assert qkv.weights(future, k, score=scores.Boxcar(6), weighting="normalized").sum() == 0
soft = qkv.weights(future, k, score=scores.Gaussian(6.0))[0]
assert soft[-1] > 0.99

# %%
# Text
# ----
#
# Words first become vectors, here by counting their pieces of a few letters. Then a typo is a short
# distance. Names are still found after two hundred different typos.

names = ["Zhang", "Lipton", "Li", "Smola", "Hu", "Werness", "Bengio", "Hochreiter", "Vaswani"]
D = qkv.Database({name: i for i, name in enumerate(names)}, encoder="characters")
rng = np.random.default_rng(5)


def slip(word: str) -> str:
    """One letter left out, doubled, or swapped with the next."""
    i = int(rng.integers(len(word) - 1))
    a, b, c, d = word[:i], word[i], word[i + 1], word[i + 2 :]
    return (a + c + d, a + b + b + c + d, a + c + b + d)[int(rng.integers(3))]


tried = [(name, slip(name)) for name in names if len(name) > 3 for _ in range(28)]
found = [D.ask(typed, weighting="hard").rows[0].key == name for name, typed in tried]
assert np.mean(found) > 0.9
print(f"{np.mean(found):.0%} of {len(tried)} slips lead to the name that was meant")

# %%
# So the answer to the exercise is: use the *distance* of the classical database as the score, with
# a boxcar for "within" and hard for "nearest". With softmax instead, the query can also be learned.
