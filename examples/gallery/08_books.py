r"""
Searching for a book
====================

In a shop of 300 books, what is typed into the search field is the query, the titles are the keys,
and the books behind them are the values. The search gives each title a weight, and all weights sum
to 1: a probability for each book that it is the one that was meant.
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
# *Hard* attention gives the likeliest book the weight 1 and forgets the others, as a shop does
# that shows one result. *Soft* attention keeps them all. A query typed right leaves nothing to
# choose, and the two agree; with a slip in it the soft answer also tells that there was some
# doubt.

for query in ("The Alchemist", "the alchmist", "crime and punishmnt"):
    hard = shop.ask(query, weighting="hard")
    soft = shop.ask(query)
    assert hard.value == soft.value
    assert hard.rows[0].weight == 1 and np.isclose(soft.weights.sum(), 1)
    print(f"{query:<22} {soft.value:<20} {soft.rows[0].weight:.2f} of the weight")

assert shop.ask("The Alchemist").rows[0].weight > shop.ask("the alchmist").rows[0].weight

# %%
# A vague query is where they part. "war" is in many titles; the hard answer picks one of them as if
# it were sure, the soft one shares the weight, and its entropy says over how many books: as if
# :math:`e^{\text{entropy}}` of them had the same weight.

answer = shop.ask("war", top=8)
assert shop.ask("war", weighting="hard").effective_rows == 1
assert answer.effective_rows > 3
print(f"{answer.effective_rows:.1f} books in effect")
answer.plot()

# %%
# By what a book is about
# -----------------------
#
# Nobody has to know the title. The same table, asked by another column, has summaries for keys.

about = shop.by(key="summary", value="title")
found = about.ask("a boy seeks treasure near the pyramids")
assert found.value == "The Alchemist" and found.rows[0].weight > 0.9
vague = about.ask("a child grows up during a war", top=6)
assert vague.effective_rows > 3 * found.effective_rows
plot.bars(
    [row.value for row in vague.rows],
    [row.weight for row in vague.rows],
    title="a child grows up during a war",
    others=294,
)

# %%
# In between
# ----------
#
# "The five best, weighed" is what most shops mean. It is softmax over the five largest scores, and
# the weights of all others are exactly 0. Sparsemax drops rows too, but lets the scores decide how
# many.

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
# Of hard and soft, only soft can learn: where one row has all of the weight, a small change of the
# query changes nothing, and there is no gradient to follow. A later page trains such a search.
