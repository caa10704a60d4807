r"""
A database of names
===================

A database **D** is a set of pairs: a key :math:`k_i` and its value :math:`v_i`. A *query* :math:`q`
is compared with the keys. If a key matches, the database returns its value:

.. math:: D = \{(k_1, v_1), \ldots, (k_m, v_m)\}

Keys and values can have any type: a name and a major, a number and a date, a company and its value.
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
# This lookup has four properties. Attention keeps all of them.
#
# 1. The query does not depend on the size of D. Three rows or three million: it is the same query.
# 2. The answer is in D, not in the query. A different D gives a different answer.
# 3. The rule is small ("are the two equal?"), however many keys are possible.
# 4. D is not compressed first. It is read as it is.

assert qkv.Database({"Li": "Ming", "Wu": "Lei"})["Li"] == "Ming"

# %%
# A registrar stores the majors of students by name. John Doe studies psychology.

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
# You can look up only keys. "psychology" is a value, so nothing is found. The error names the
# nearest keys.

try:
    majors["psychology"]
except KeyError as error:
    print(error)

# %%
# To find people by major, swap keys and values. Then a key may be in several rows. The classical
# lookup returns the newest row; ``get_all`` returns all of them.

people = majors.swap()
assert people["psychology"] == "John Doe"
assert people.get_all("law") == ["Jane Roe", "Sam Ortiz"]

# %%
# A picture of the six names
# --------------------------
#
# Ask for each name in turn, and write down the weight of each key: 1 if it is equal, otherwise 0.
# These numbers form the first attention matrix of this chapter. "Lee" is not a key, so its row is
# empty: the classical database has no answer.

names = [*D, "Lee"]
answers = [D.ask(name, score="exact", weighting="raw") for name in names]
rows = [answer.weights for answer in answers]
assert [float(sum(row)) for row in rows] == [1, 1, 1, 1, 1, 1, 0]
qkv.plot.heatmaps(rows, "keys", "queries", figsize=(3.6, 3.8), xticks=list(D), yticks=names)

# %%
# Equality is one way to compare a query with a key. The next page writes the lookup as a sum. Then
# any other comparison can replace equality.
