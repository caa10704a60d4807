"""Three stories of attention, Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, told with NumPy and `qkv.attend`.

    python examples/demo.py                 the stories, and their pictures in demo/
    python examples/demo.py --out DIR       the pictures in DIR instead

The picture of the README is made by

    python examples/demo.py --only scores --out docs/pictures
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from qkv import masks, scores, weightings

Save = Callable[[str, Any], None]

INK, PALE = "#333333", "#bbbbbb"

# 1. Six names: the database that everybody knows, then one that forgives.

FIRST_NAMES = {
    "Zhang": "Aston",
    "Lipton": "Zachary",
    "Li": "Mu",
    "Smola": "Alex",
    "Hu": "Rachel",
    "Werness": "Brent",
}


def pairs_of_letters(word: str) -> set[str]:
    """The neighbouring letters of a word, with its two ends: li → ^l, li, i$."""
    marked = f"^{word.lower()}$"
    return {marked[i : i + 2] for i in range(len(marked) - 1)}


def letter_vectors(words: Sequence[str], alphabet: Sequence[str]) -> np.ndarray:
    """A row per word: 1 where it has that pair of letters."""
    return np.array([[float(pair in pairs_of_letters(w)) for pair in alphabet] for w in words])


def names(save: Save) -> None:
    last, first = list(FIRST_NAMES), list(FIRST_NAMES.values())
    asked = [*last, "Lee", "Hung", "Smith"]
    alphabet = sorted(set().union(*map(pairs_of_letters, asked)))
    keys, queries = letter_vectors(last, alphabet), letter_vectors(asked, alphabet)
    values = np.eye(len(first))  # one axis per first name, so an answer says how much of each

    def ask(name: str, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        query = queries[[asked.index(name)]]
        answer, alpha = qkv.attend(query, keys, values, return_weights=True, **how)
        return answer[0], alpha[0]

    heading("1. Six names")
    say("D = " + ", ".join(f"{k} → {v}" for k, v in FIRST_NAMES.items()))
    say("A name is the set of its neighbouring letters; a value is a one-hot vector.")

    exact: dict[str, Any] = {"score": "exact", "weighting": "normalized"}
    for name in ("Li", "Lee"):
        answer, alpha = ask(name, **exact)
        say(f"\nq = {name}, exact match: α = {'  '.join(f'{x:.0f}' for x in alpha)}")
        if alpha.any():
            say(f"  answer: {first[int(answer.argmax())]}")
        else:
            say("  answer: nothing. Every weight is 0: no such key.")

    near: dict[str, Any] = {"score": scores.Cosine(temperature=0.1)}
    answer, alpha = ask("Lee", **near)
    say("\nq = Lee, approximate match: cosine of the letters, softmax")
    for name, value, weight in zip(last, first, alpha, strict=True):
        say(f"  {name:8} {value:8} {bar(weight)}")
    say(f"  answer: mostly {first[int(answer.argmax())]}")

    panels = [qkv.weights(queries, keys, **kind) for kind in (exact, near)]
    figure = qkv.plot.heatmaps(
        panels,
        xlabel="keys",
        ylabel="queries",
        titles=["exact match", "cosine of letter pairs, softmax"],
        figsize=(3.4, 4.4),
        xticks=last,
        yticks=asked,
        cmap=reds(),
        annotate=True,
    )
    for panel in figure.axes[:2]:
        panel.axhline(len(last) - 0.5, color=INK, linewidth=0.8)  # below it, names not in D
    save("names", figure)


# 2. GPA → salary: every row speaks, the near ones louder.

QUERY = 3.5
BANDWIDTH = 0.15


def salary_table() -> tuple[np.ndarray, np.ndarray]:
    """Fourteen invented engineers: grade point averages, starting salaries in thousands."""
    rng = np.random.default_rng(420)
    gpa = np.sort(rng.uniform(2.4, 4.0, 14)).round(2)
    salary = 62 + 14 * (gpa - 2.4) ** 1.5 + rng.normal(0, 4, gpa.size)
    return gpa, salary.round(1)


def salary(save: Save) -> None:
    gpa, pay = salary_table()
    query, keys, values = np.array([[QUERY]]), gpa[:, None], pay[:, None]

    def answer(**how: Any) -> tuple[float, np.ndarray]:
        out, alpha = qkv.attend(query, keys, values, return_weights=True, **how)
        return float(out[0, 0]), alpha[0]

    heading("2. GPA → starting salary")
    say(f"D = {gpa.size} invented engineers. q = {QUERY}: what will a student with this GPA earn?")
    expected, alpha = answer(score=scores.Gaussian(BANDWIDTH))
    say(f"\nGaussian score of bandwidth {BANDWIDTH}, softmax (Nadaraya–Watson)")
    say("   GPA   salary  weight")
    for k, v, weight in zip(gpa, pay, alpha, strict=True):
        say(f"  {k:.2f}  {v:5.1f} k   {bar(weight)}")
    say(f"  answer: {expected:.1f} k")

    say("\nA wider bandwidth listens to more rows")
    for width in (0.02, 0.05, 0.15, 0.5, 5.0):
        out, alpha = answer(score=scores.Gaussian(width))
        say(f"  σ = {width:<4}  {out:5.1f} k   from {1 / (alpha**2).sum():4.1f} rows in effect")

    say("\nFour special cases of the weights")
    window = scores.Epanechnikov(0.4)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("cone", "nonnegative", {"score": window, "weighting": "raw"}),
        ("convex", "and sum to 1", {"score": window, "weighting": "normalized"}),
        ("one-hot", "one is 1", {"score": scores.Gaussian(), "weighting": "hard"}),
        ("average", "all equal", {"weighting": "average"}),
    ]
    for name, what, how in cases:
        out, alpha = answer(**how)
        say(
            f"  {name:8} {what:13} rows used: {np.count_nonzero(alpha):2}   "
            f"Σα = {alpha.sum():.2f}   {out:6.1f} k"
        )
    say("  Only weights that sum to 1 give a salary: the cone gives a sum of them.")
    save("salary", salary_figure(gpa, pay))


def salary_figure(gpa: np.ndarray, pay: np.ndarray) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    grid = np.linspace(2.35, 4.05, 400)[:, None]
    keys, values = gpa[:, None], pay[:, None]

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)

    score = scores.Gaussian(BANDWIDTH)
    out, alpha = qkv.attend(np.array([[QUERY]]), keys, values, score=score, return_weights=True)
    curve = qkv.attend(grid, keys, values, score=score)
    left.axvline(QUERY, color=PALE, lw=0.8, zorder=0)
    left.plot(grid, curve, color=INK, lw=1.2, zorder=1)
    dots = left.scatter(
        gpa, pay, c=alpha[0], s=30 + 500 * alpha[0], cmap="Reds", vmin=0, ec=INK, lw=0.6, zorder=2
    )
    left.plot(QUERY, out[0, 0], "D", color="white", mec=INK, ms=6, zorder=3)
    left.annotate(
        f"answer: {out[0, 0]:.1f} k",
        (QUERY, out[0, 0]),
        xytext=(-90, 52),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "lw": 0.6, "color": INK, "shrinkB": 4},
        fontsize=9,
        color=INK,
    )
    left.set_title(f"q = {QUERY}: who is listened to", fontsize=10, color=INK)
    left.set_ylabel("starting salary, thousands", fontsize=9, color=INK)
    colours = figure.colorbar(dots, ax=left, aspect=40, pad=0.02)
    colours.set_label("weight", fontsize=9, color=INK)
    colours.outline.set_visible(False)
    colours.locator = MaxNLocator(5, steps=[1, 2, 5, 10])

    lines: list[tuple[str, str, dict[str, Any]]] = [
        ("hard: the nearest row", "#fcae91", {"score": score, "weighting": "hard"}),
        ("σ = 0.05", "#fb6a4a", {"score": scores.Gaussian(0.05)}),
        ("σ = 0.15", "#cb181d", {"score": scores.Gaussian(0.15)}),
        ("σ = 0.5", "#67000d", {"score": scores.Gaussian(0.5)}),
        ("average of all rows", PALE, {"weighting": "average"}),
    ]
    right.scatter(gpa, pay, s=18, color="white", ec=INK, lw=0.6, zorder=3)
    for label, colour, how in lines:
        right.plot(grid, qkv.attend(grid, keys, values, **how), color=colour, lw=1.4, label=label)
    right.set_title("one table, five answers", fontsize=10, color=INK)
    right.legend(frameon=False, fontsize=8, labelcolor=INK)
    for panel in (left, right):
        panel.set_xlabel("GPA", fontsize=9, color=INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[:].set(linewidth=0.6, color=PALE)
    for panel in (left, right, colours.ax):
        panel.tick_params(labelsize=8, labelcolor=INK, color=PALE, length=2)
    return figure


# 3. A sentence that asks itself.

SENTENCE = "When he saw his owner , the dog was happy , so he wagged his tail"

FEATURES = ("animal", "person", "feeling", "motion", "sight", "body", "link")
IS = {  # what each word is, written by hand; a word that is not listed is a link
    "he": {"animal": 0.6, "link": 0.4},
    "saw": {"sight": 1.0},
    "his": {"animal": 0.2, "link": 0.8},
    "owner": {"person": 1.0},
    "dog": {"animal": 1.0},
    "happy": {"feeling": 1.0},
    "wagged": {"motion": 1.0, "feeling": 0.2},
    "tail": {"body": 1.0, "animal": 0.3},
}
LOOKS_FOR = {  # what a word that is one thing looks for in others, written by hand
    "animal": {"feeling": 9.0, "motion": 8.0, "sight": 6.0, "body": 4.0},
    "person": {"animal": 8.0, "sight": 9.0, "feeling": 4.0},
    "feeling": {"animal": 9.0, "person": 8.5, "motion": 7.0, "feeling": 6.0, "body": 5.0},
    "motion": {"body": 9.0, "animal": 8.0, "feeling": 4.0},
    "sight": {"person": 9.0, "animal": 8.0},
    "body": {"motion": 9.0, "animal": 6.0},
    "link": {"link": 3.0},
}


def table(rows: list[dict[str, float]]) -> np.ndarray:
    return np.array([[row.get(feature, 0.0) for feature in FEATURES] for row in rows])


def sentence(save: Save) -> None:
    words = [word for word in SENTENCE.split() if word != ","]
    x = table([IS.get(word, {"link": 1.0}) for word in words])
    w_query = table([LOOKS_FOR[feature] for feature in FEATURES])
    query, key, value = x @ w_query, x, x  # W_K and W_V are the identity

    heading("3. A sentence attends to itself")
    say(SENTENCE.replace(" ,", ","))
    say(f"Each word is a vector of {len(FEATURES)} features: {', '.join(FEATURES)}.")
    say("The features, and W_Q that says what each looks for, are written by hand; a model")
    say("would learn them. Q = X W_Q, K = V = X, and the answer is softmax(QKᵀ/√d) V.")
    out, alpha = qkv.attend(query, key, value, return_weights=True)

    happy = words.index("happy")
    say("\nq = happy")
    for word, weight in zip(words, alpha[happy], strict=True):
        say(f"  {word:8} {bar(weight)}")
    say("\n  happy    " + "".join(f"{feature:>9}" for feature in FEATURES))
    say("  before   " + "".join(f"{number:9.2f}" for number in x[happy]))
    say("  after    " + "".join(f"{number:9.2f}" for number in out[happy]))
    say("  The word now says whose feeling it is, and how it shows.")

    panels = [
        qkv.weights(query, key, weighting=weighting)
        for weighting in ("softmax", weightings.Entmax(1.5))
    ]
    figure = qkv.plot.heatmaps(
        panels,
        xlabel="keys",
        ylabel="queries",
        titles=["softmax: every word counts", "entmax 1.5: poor matches count exactly 0"],
        figsize=(4.4, 4.4),
        xticks=words,
        yticks=words,
        cmap=reds(),
    )
    save("sentence", figure)


# The picture of the README: the same queries and keys under four scores and four weightings.


def closed_curve(rng: np.random.Generator, width: int) -> Callable[[np.ndarray], np.ndarray]:
    """A smooth random curve in `width` dimensions that returns to its start at t = 1."""
    waves = np.arange(1, 5)
    parts = rng.normal(size=(2, waves.size, width)) / waves[:, None] ** 0.4
    size = np.sqrt((parts**2).sum() / 2 / width)

    def at(t: np.ndarray) -> np.ndarray:
        turn = 2 * np.pi * t[:, None] * waves
        return (np.cos(turn) @ parts[0] + np.sin(turn) @ parts[1]) / size

    return at


def grid(save: Save) -> None:
    """Queries go along a random curve at an even pace; keys go along it too, now fast, now slow."""
    rng = np.random.default_rng(2)
    width, hidden = 4, 8
    at = closed_curve(rng, width)
    t = np.linspace(0, 1, 64)
    query, key = at(t), at(t + 0.1 * np.sin(2 * np.pi * t))

    # tanh(x + 1) − tanh(x − 1) is a hill at x = 0, so this network likes pairs that lie close.
    w = np.tile(rng.normal(size=(hidden, width)), (2, 1))
    side = np.repeat([1.0, -1.0], hidden)
    rows: list[tuple[str, str, qkv.scores.Score]] = [
        ("dot", r"$q \cdot k$", scores.Dot()),
        ("Gaussian", r"$-\Vert q-k\Vert^2 \,/\, 2\sigma^2$", scores.Gaussian(0.5)),
        ("additive", r"$v \cdot \tanh(W_1q + W_2k + b)$", scores.Additive(w, -w, 1.3 * side, side)),
        ("gated", r"$\sigma(W_g[q;k]) \; q \cdot k$", scores.Gated(*rng.normal(size=(2, width)))),
    ]
    columns: list[tuple[str, dict[str, Any]]] = [
        ("softmax", {"weighting": "softmax"}),
        ("entmax 1.5", {"weighting": weightings.Entmax(1.5)}),
        ("sparsemax", {"weighting": "sparsemax"}),
        ("hard", {"weighting": "hard"}),
        ("softmax, causal", {"mask": masks.causal}),
    ]
    panels = [
        [qkv.weights(query, key, score=score, **how) for _, how in columns] for _, _, score in rows
    ]
    figure = qkv.plot.heatmaps(
        panels,
        xlabel="",
        ylabel="",
        titles=[name for name, _ in columns],
        figsize=(1.7, 1.7),
        cmap=reds(),
    )
    *cells, _ = figure.axes
    for panel in cells:
        panel.set(xticks=[], yticks=[])
    for panel, (name, formula, _) in zip(cells[:: len(columns)], rows, strict=True):
        panel.set_ylabel(f"{name}\n{formula}", fontsize=8, linespacing=1.6)
    save("scores", figure)


# Telling and saving


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def say(text: str) -> None:
    print(text)


def bar(weight: float, width: int = 32) -> str:
    """A weight as a bar and a number; a plain 0 is an exact one."""
    eighths = round(weight * width * 8)
    drawn = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]
    return f"{weight:.3f} {drawn}".rstrip() if weight else "0"


def reds() -> Any:
    """The map "Reds", but 0 is white and small weights are told apart."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    shades = matplotlib.colormaps["Reds"](np.linspace(0, 1, 255) ** 0.5)
    return ListedColormap(np.vstack([np.ones(4), shades]))


def write(figure: Any, path: Path) -> None:
    """Save the picture whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        draft = Path(folder) / path.name
        figure.savefig(
            draft, dpi=160, bbox_inches="tight", pad_inches=0.08, metadata={"Software": None}
        )
        os.replace(draft, path)


STORIES: dict[str, Callable[[Save], None]] = {
    "names": names,
    "salary": salary,
    "sentence": sentence,
    "scores": grid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Three stories of attention, and their pictures.")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), metavar="DIR", help="where pictures go (demo/)"
    )
    parser.add_argument("--only", choices=STORIES, help="tell one story and draw its picture")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # not every terminal can print a bar
    written: list[Path] = []

    def save(name: str, figure: Any) -> None:
        path = options.out / f"{name}.png"
        write(figure, path)
        written.append(path)

    for name in [options.only] if options.only else STORIES:
        STORIES[name](save)
    print("\nPictures: " + "  ".join(map(str, written)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(f'demo: {error}. The pictures need matplotlib: pip install "qkv[plot]"')
    except OSError as error:
        sys.exit(f"demo: {error}")
