"""The pictures of `demo.py`: functions from answers to matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import qkv
from qkv import masks, scores, weightings

INK, GREY, PALE, RED = "#333333", "#777777", "#bbbbbb", "#cb181d"


def books(rows: Mapping[str, Sequence[tuple[str, qkv.Answer]]]) -> Any:
    """Plot one row per kind of key and one panel per answer, with its heaviest books as bars."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(map(len, rows.values()))
    airy = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(3.1 * columns, 2.15 * len(rows)), layout=airy)
    panels = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    for line, (key, answers) in zip(panels, rows.items(), strict=True):
        for panel, (how, answer) in zip(line, answers, strict=True):
            bars = [(row.record["title"], row.weight, RED) for row in answer.rows[:4]]
            rest = 1 - sum(weight for _, weight, _ in bars)
            others = answer.total - len(bars)
            bars += [(f"{others} others", rest, PALE)] if rest > 0.0005 else [("", 0.0, PALE)]
            for at, (name, weight, colour) in enumerate(bars):
                _bar(panel, at, name, weight, colour)
            panel.set_title(f'"{answer.query}"', fontsize=9.5, color=INK, loc="left", pad=17)
            below = f"{how}: {answer.effective_rows:.1f} books in effect"
            panel.text(0, 1.04, below, transform=panel.transAxes, fontsize=8, color=GREY)
            panel.set(xlim=(0, 1), ylim=(4.6, -0.6), xticks=[], yticks=[])
            panel.spines[["top", "right", "bottom"]].set_visible(False)
            panel.spines["left"].set(linewidth=0.8, color=INK)
        line[0].set_ylabel(key, fontsize=9, color=GREY, labelpad=8)
    return figure


def _bar(panel: Any, at: int, name: str, weight: float, colour: str) -> None:
    """Draw a weight as a bar; its name is inside if it fits, else after it."""
    if not name:
        return
    panel.barh(at, weight, color=colour, height=0.74)
    short = name if len(name) <= 36 else name[:35] + "…"
    inside = weight > 0.6
    panel.annotate(
        f"{short}  {weight:.3f}",
        (0 if inside else weight, at),
        xytext=(4, -0.5),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="white" if inside and colour == RED else INK,
    )


def names(exact: Sequence[qkv.Answer], soft: Sequence[qkv.Answer], keys: Sequence[str]) -> Any:
    """Plot the weights of two kinds of match: one row per query, one column per key."""
    figure = qkv.plot.heatmaps(
        [[answer.weights for answer in answers] for answers in (exact, soft)],
        xlabel="keys",
        ylabel="queries",
        titles=["exact match", "approximate match, softmax"],
        figsize=(3.4, 4.4),
        xticks=keys,
        yticks=[answer.query for answer in soft],
        cmap=reds(),
        annotate=True,
    )
    for panel in figure.axes[:2]:
        panel.axhline(len(keys) - 0.5, color=INK, linewidth=0.8)  # below it, names not in D
    return figure


def salary(D: qkv.Database, query: float, width: float) -> Any:
    """Plot the rows that answer one query (left), and the answers to all queries (right)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    gpa, pay = (np.array(column) for column in zip(*D.items(), strict=True))
    grid = np.linspace(gpa.min() - 0.05, gpa.max() + 0.05, 400)

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)

    answer = D.ask(query, score=scores.Gaussian(width))
    left.axvline(query, color=PALE, lw=0.8, zorder=0)
    left.plot(grid, D.attend(grid, score=scores.Gaussian(width)), color=INK, lw=1.2, zorder=1)
    dots = left.scatter(
        gpa,
        pay,
        c=answer.weights,
        s=30 + 500 * answer.weights,
        cmap="Reds",
        vmin=0,
        ec=INK,
        lw=0.6,
        zorder=2,
    )
    left.plot(query, answer.value, "D", color="white", mec=INK, ms=6, zorder=3)
    left.annotate(
        f"answer: {answer.value:.1f} k",
        (query, answer.value),
        xytext=(-90, 52),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "lw": 0.6, "color": INK, "shrinkB": 4},
        fontsize=9,
        color=INK,
    )
    left.set_title(f"q = {query}: the weight of each row", fontsize=10, color=INK)
    left.set_ylabel("starting salary, thousands", fontsize=9, color=INK)
    # Inside the panel: outside it would overlap the axis of the next one.
    inside = left.inset_axes((0.74, 0.1, 0.22, 0.035))
    colours = figure.colorbar(dots, cax=inside, orientation="horizontal")
    inside.set_title("weight", fontsize=8, color=INK, pad=3)
    colours.outline.set_visible(False)
    colours.locator = MaxNLocator(2, steps=[1, 2, 5, 10])

    lines: list[tuple[str, str, dict[str, Any]]] = [
        ("hard: the nearest row", "#fcae91", {"score": "gaussian", "weighting": "hard"}),
        ("σ = 0.05", "#fb6a4a", {"score": scores.Gaussian(0.05)}),
        ("σ = 0.15", "#cb181d", {"score": scores.Gaussian(0.15)}),
        ("σ = 0.5", "#67000d", {"score": scores.Gaussian(0.5)}),
        ("average of all rows", PALE, {"weighting": "average"}),
    ]
    right.scatter(gpa, pay, s=18, color="white", ec=INK, lw=0.6, zorder=3)
    for label, colour, how in lines:
        right.plot(grid, D.attend(grid, **how), color=colour, lw=1.4, label=label)
    right.set_title("one table, five answers", fontsize=10, color=INK)
    right.legend(frameon=False, fontsize=8, labelcolor=INK)
    for panel in (left, right):
        panel.set_xlabel("GPA", fontsize=9, color=INK)
        _frame(panel)
    colours.ax.tick_params(labelsize=8, labelcolor=INK, color=PALE, length=2)
    return figure


def sentence(words: Sequence[str], query: np.ndarray, key: np.ndarray) -> Any:
    """Plot the weights of every word, by softmax and by entmax."""
    return qkv.plot.heatmaps(
        [qkv.weights(query, key), qkv.weights(query, key, weighting=weightings.Entmax(1.5))],
        xlabel="keys",
        ylabel="queries",
        titles=["softmax: every word counts", "entmax 1.5: poor matches count exactly 0"],
        figsize=(4.4, 4.4),
        xticks=words,
        yticks=words,
        cmap=reds(),
    )


def grid() -> Any:
    """Plot the picture of the README: four scores and five weightings on the same vectors.

    Queries move along a random curve at constant speed; keys move along it at varying speed.
    """
    rng = np.random.default_rng(2)
    width, hidden = 4, 8
    at = closed_curve(rng, width)
    t = np.linspace(0, 1, 64)
    query, key = at(t), at(t + 0.1 * np.sin(2 * np.pi * t))

    # tanh(x + 1) − tanh(x − 1) is a bump at x = 0, so this network prefers close pairs.
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
    return figure


def closed_curve(rng: np.random.Generator, width: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a smooth random curve in `width` dimensions that is closed at t = 1."""
    waves = np.arange(1, 5)
    parts = rng.normal(size=(2, waves.size, width)) / waves[:, None] ** 0.4
    size = np.sqrt((parts**2).sum() / 2 / width)

    def at(t: np.ndarray) -> np.ndarray:
        turn = 2 * np.pi * t[:, None] * waves
        curve: np.ndarray = (np.cos(turn) @ parts[0] + np.sin(turn) @ parts[1]) / size
        return curve

    return at


def reds() -> Any:
    """The colour map "Reds" with white for 0 and more contrast for small weights."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    shades = matplotlib.colormaps["Reds"](np.linspace(0, 1, 255) ** 0.5)
    return ListedColormap(np.vstack([np.ones(4), shades]))


def _frame(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set(linewidth=0.6, color=PALE)
    panel.tick_params(labelsize=8, labelcolor=INK, color=PALE, length=2)
