r"""
Searching for a book
====================

In a shop of 300 books, the text in the search field is the query, the titles are the keys, and the
books are the values. The search gives each title a weight, and the weights sum to 1. Each weight is
the probability that this book was meant.
"""

from pathlib import Path

import numpy as np

import qkv
from qkv import plot, weightings

here = Path(globals().get("__file__", "08_books.py"))  # a notebook has no __file__
data = here.resolve().parents[1] / "data" / "books.csv"
shop = qkv.Database.from_source(data, key="title", value="author")
assert len(shop) == 300

# %%
# Hard and soft
# -------------
#
# *Hard* attention gives the most likely book the weight 1 and ignores the others, like a shop that
# shows one result. *Soft* attention keeps them all. For a correct query the two agree. For a query
# with a typo, the soft answer also shows its uncertainty.

for query in ("The Alchemist", "the alchmist", "crime and punishmnt"):
    hard = shop.ask(query, weighting="hard")
    soft = shop.ask(query)
    assert hard.value == soft.value
    assert hard.rows[0].weight == 1 and np.isclose(soft.weights.sum(), 1)
    print(f"{query:<22} {soft.value:<20} {soft.rows[0].weight:.2f} of the weight")

assert shop.ask("The Alchemist").rows[0].weight > shop.ask("the alchmist").rows[0].weight

# %%
# They differ for a vague query. "war" is in many titles. The hard answer picks one of them as if it
# were certain. The soft answer shares the weight. Its entropy says over how many books: as if
# :math:`e^{\text{entropy}}` of them had the same weight.

answer = shop.ask("war", top=8)
assert shop.ask("war", weighting="hard").effective_rows == 1
assert answer.effective_rows > 3
print(f"{answer.effective_rows:.1f} books in effect")
answer.plot()

# %%
# Search by content
# -----------------
#
# You need not know the title. Use another column of the same table as the key: the summaries.

about = shop.reindex(key="summary", value="title")
found = about.ask("a boy seeks treasure near the pyramids")
assert found.value == "The Alchemist" and found.rows[0].weight > 0.7
vague = about.ask("a child grows up during a war", top=6)
assert vague.effective_rows > 3 * found.effective_rows
plot.bars(
    [row.value for row in vague.rows],
    [row.weight for row in vague.rows],
    title="a child grows up during a war",
    others=294,
)

# %%
# Between hard and soft
# ---------------------
#
# Most shops show the five best, with weights. That is softmax over the five largest scores, and all
# other weights are exactly 0. Sparsemax drops rows too, but the scores decide how many.

five = shop.ask("war", weighting=weightings.TopK(5))
sparse = shop.ask("war", weighting="sparsemax")
assert np.count_nonzero(five.weights) == 5
assert 1 <= np.count_nonzero(sparse.weights) < 300
ways = {"hard": "hard", "top 5": weightings.TopK(5), "sparsemax": "sparsemax", "softmax": "softmax"}
rows = [shop.ask("war", weighting=how).weights for how in ways.values()]
seen = np.argsort(-rows[-1], kind="stable")[:10]
plot.heatmaps(
    np.array(rows)[:, seen],
    "the ten heaviest books",
    "",
    figsize=(7.4, 3.0),
    xticks=[[*shop][i] for i in seen],
    yticks=list(ways),
    annotate=True,
)

# %%
# Only soft attention can learn. If one row has all the weight, a small change of the query changes
# nothing, and there is no gradient to follow. A later page trains such a search.
