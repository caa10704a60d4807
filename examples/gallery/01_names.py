r"""
A database of names
===================

A database **D** is a set of pairs: a key :math:`k_i` and the value :math:`v_i` that belongs to it.
A *query* :math:`q` goes over the keys, and where a key satisfies it, the value comes back:

.. math:: D = \{(k_1, v_1), \ldots, (k_m, v_m)\}

Keys and values may be of any type: a name and a major, a number and a date, a firm and its worth.
"""

import qkv

D = qkv.Database(
    {
        "Zhang": "Aston",
        "Lipton": "Zachary",
        "Li": "Mu",
        "Smola": "Alex",
        "Hu": "Rachel",
        "Werness": "Brent",
    }
)
assert D["Li"] == "Mu"

# %%
# Four things are true of this look-up, and attention will keep all four.
#
# 1. The query knows nothing of the size of D: three rows or three million, it is the same query.
# 2. The answer lies in D, not in the query. Another D answers the same query otherwise.
# 3. The rule is small ("are the two equal?") however large the set of possible keys.
# 4. D is not compressed into anything first. It is read as it stands.

assert qkv.Database({"Li": "Ming", "Wu": "Lei"})["Li"] == "Ming"

# %%
# A registrar keeps the students' majors by their names. John Doe's is psychology.

majors = qkv.Database.from_columns(
    {
        "name": ["John Doe", "Jane Roe", "Ada Park", "Sam Ortiz", "Kim Lund"],
        "major": ["psychology", "law", "physics", "law", "history"],
    },
    key="name",
    value="major",
)
assert majors["John Doe"] == "psychology"

# %%
# Only keys can be asked for. "psychology" is a value, so nothing is found; the error names the keys
# that come nearest.

try:
    majors["psychology"]
except KeyError as error:
    print(error)

# %%
# To find people by their major, the two change places. Then a key may stand in several rows, and
# the classical look-up gives the newest of them; ``all`` gives every one.

people = majors.swap()
assert people["psychology"] == "John Doe"
assert people.all("law") == ["Jane Roe", "Sam Ortiz"]

# %%
# A picture of the six names
# --------------------------
#
# Ask for each name in turn and write down how much each key counts: 1 where it is equal, 0
# elsewhere. This square of numbers is the first attention matrix of the chapter. "Lee", which is
# nobody's key, has an empty row: the classical database has nothing to say.

names = [*D, "Lee"]
answers = [D.ask(name, score="exact", weighting="raw") for name in names]
rows = [answer.weights for answer in answers]
assert [float(sum(row)) for row in rows] == [1, 1, 1, 1, 1, 1, 0]
qkv.plot.heatmaps(rows, "keys", "queries", figsize=(3.6, 3.8), xticks=list(D), yticks=names)

# %%
# Equality is one way to compare a query with a key. The next page writes the look-up as a sum, in
# which any other comparison can take its place.
