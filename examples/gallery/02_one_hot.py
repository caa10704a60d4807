r"""
Exact match is a one-hot row
============================

A lookup can be written as a sum over *all* rows. Each value is multiplied by a number that says
whether its key matches the query:

.. math:: \mathrm{Attention}(q, D) = \sum_i \alpha(q, k_i)\, v_i

In a classical database :math:`\alpha(q, k_i)` is 1 if the key equals the query, otherwise 0. Such a
row of numbers is *one-hot*: it has a single 1, at the row that answers.
"""

import numpy as np

import qkv

majors = qkv.Database(
    {
        "Jane Roe": "law",
        "Ada Park": "physics",
        "John Doe": "psychology",
        "Sam Ortiz": "law",
        "Kim Lund": "history",
    }
)
answer = majors.ask("John Doe", score="exact", weighting="raw")
assert answer.value == "psychology"
assert answer.weights.tolist() == [0, 0, 1, 0, 0]
qkv.plot.heatmaps(
    answer.weights[None],
    "keys",
    "query",
    figsize=(6.4, 1.6),
    xticks=list(majors),
    yticks=["John Doe"],
    annotate=True,
)

# %%
# The sum itself
# --------------
#
# Words cannot be added, but numbers can. So number the students 0 to 4, let student 2 be John Doe,
# and let the values be credits. The score "exact" is 1 or 0, and "raw" uses the scores as weights.
# Then ``attend`` is exactly the sum above.

students = np.arange(5.0)[:, None]  # k, one number each
credits = np.array([[96.0], [118.0], [104.0], [88.0], [121.0]])  # v
john = np.array([[2.0]])  # q
total = qkv.attend(john, students, credits, score="exact", weighting="raw")
assert total.item() == 104.0

# %%
# Several queries are several rows, and the sum for all of them is one matrix product. If each
# student is asked for once, in any order, the weights are a permutation: each row and each column
# has one 1. (A single row is a one-hot *vector*. Only the stack of rows is a matrix.)

order = np.array([3.0, 0.0, 2.0, 4.0, 1.0])[:, None]
alpha = qkv.weights(order, students, score="exact", weighting="raw")
assert (alpha.sum(0) == 1).all() and (alpha.sum(1) == 1).all()
assert np.array_equal(alpha @ credits, credits[[3, 0, 2, 4, 1]])
qkv.plot.heatmaps(
    alpha, "keys: students 0 to 4", "queries", figsize=(2.9, 2.9), yticks=["3", "0", "2", "4", "1"]
)

# %%
# Where equality falls short
# --------------------------
#
# No student has the number 7, so all weights are 0 and the sum is 0. This is not an answer but the
# lack of one. A database says so and leaves the value empty. The same happens to "Jon Doe", which
# is one letter away.

assert qkv.attend(np.array([[7.0]]), students, credits, score="exact", weighting="raw") == 0.0
assert majors.ask("Jon Doe", score="exact", weighting="raw").value is None

# %%
# Two students with the same name are the other problem. Both weights are 1, and the raw sum adds
# their credits. If the weights are divided by their sum, each is a half, and the answer is the
# mean.

twice = np.array([[2.0], [2.0], [5.0]])
both = np.array([[104.0], [90.0], [77.0]])
assert qkv.attend(john, twice, both, score="exact", weighting="raw").item() == 194.0
assert qkv.attend(john, twice, both, score="exact", weighting="normalized").item() == 97.0

# %%
# True or false is the coarsest similarity. The next page has degrees of similarity.
