r"""
Grades and salaries
===================

An engineering student with a grade average (GPA) of 3.5 wonders what she will earn. She looks at
earlier graduates. Those with a GPA between 3.4 and 3.6 count most; a 3.0 or a 4.0 counts little.
Her GPA is the query, theirs are the keys, and their salaries are the values.

The data are invented: pay rises with the GPA, faster above 3.3, plus random noise.
"""

import numpy as np

import qkv
from qkv import plot, scores
from qkv.plot import style

rng = np.random.default_rng(7)
gpa = np.sort(rng.uniform(2.6, 4.0, 120))


def pay(x: np.ndarray) -> np.ndarray:
    """Thousands a year, before luck."""
    return 62 + 9 * (x - 2.6) + 16 * np.maximum(0, x - 3.3)


salary = pay(gpa) + rng.normal(0, 3.0, gpa.shape)

# %%
# She uses a bell of width 0.1 as her idea of "a GPA like mine". The answer is a weighted mean of
# all salaries. It also says which rows it came from and how much they disagree.

D = qkv.Database(gpa, salary)
answer = D.ask(3.5, score=scores.Gaussian(0.1))
assert abs(answer.value - pay(np.array(3.5))) < 1.5
print(f"{answer.value:.1f} ± {answer.spread:.1f} thousand, from {answer.effective_rows:.0f} rows")

# %%
# Where the weight is
# -------------------
#
# "Near" has no sharp limit: a 3.0 still counts, but very little.

alpha = answer.weights
near = alpha[(gpa >= 3.4) & (gpa <= 3.6)].sum()
far = alpha[(gpa < 3.1) | (gpa > 3.9)].sum()
assert np.isclose(alpha.sum(), 1)
assert near > 0.6 and 0 < far < 0.001
print(f"between 3.4 and 3.6: {near:.0%}   below 3.1 or above 3.9: {far:.3%}")

# %%
# Every student can ask. Three widths give three curves; each is the answer to all queries from 2.6
# to 4.0. Below each curve are its weights, one column per query. A narrow bell follows the noise. A
# wide bell gives everybody the mean.

widths = {"σ = 0.02": 0.02, "σ = 0.1": 0.1, "σ = 0.6": 0.6}
by = {name: scores.Gaussian(width) for name, width in widths.items()}
plot.regression(gpa, salary, by, truth=pay)

# %%
# Which width is right?
# ---------------------
#
# The data can tell. Answer each student from all the *others* (a mask leaves her own row out), and
# compare with her salary. The error is large for very small and very large widths, and smallest in
# between.

others = ~np.eye(len(gpa), dtype=bool)
k, v = gpa[:, None], salary[:, None]


def error(width: float) -> float:
    guess = qkv.attend(k, k, v, score=scores.Gaussian(width), mask=others)
    return float(np.sqrt(np.mean((guess - v) ** 2)))


tried = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
errors = [error(width) for width in tried]
best = tried[int(np.argmin(errors))]
assert 0.05 <= best <= 0.2
assert errors[0] > 1.15 * min(errors) and errors[-1] > 1.5 * min(errors)
figure = style.new_figure((5.6, 2.5), "constrained")
panel = figure.subplots()
panel.plot(tried, errors, "o-", color=style.RED, lw=1.6, ms=5)
panel.set_xscale("log", subs=[])
panel.xaxis.set_major_formatter("{x:g}")
panel.plot(best, min(errors), "o", color="white", mec=style.RED, ms=10, mew=1.5, zorder=3)
style.style_axes(
    panel, "σ, the width of the bell", "error, thousands", "each student from all others"
)
panel.set_ylim(0)
figure

# %%
# We chose the similarity, and the data chose the width. Next: other similarities.
