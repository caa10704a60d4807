"""Draw the figures of the study and print its tables, from a file of results.

python -m examples.recall.figures --results examples/recall/results/h200.jsonl --out FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.recall.train import read_results
from qkv.plot import style

RESULTS = Path(__file__).parent / "results" / "h200.jsonl"
TITLES = {
    "mqar": "recall",
    "mqmtar": "multi-token recall",
    "copy": "copy",
    "reverse": "reverse",
    "noisy": "noisy keys",
    "similar": "similar keys",
    "hops": "two hops",
    "sort": "sort",
}
LOOK_UPS = ("mqar", "mqmtar", "copy", "reverse", "noisy", "similar")
"""The tasks of the page's table and figures of lengths."""
LINES = {
    "softmax": ("#333333", "o"),
    "softmax-logn": ("#888888", "s"),
    "softmax-sink": ("#bbbbbb", "D"),
    "entmax15": ("#cb181d", "o"),
    "entmax15-logn": ("#fb8d6d", "s"),
    "asentmax": ("#fdbb84", "P"),
    "alpha": ("#c51b8a", "X"),
    "sparsemax": ("#7a0177", "^"),
    "top8": ("#2166ac", "o"),
    "hard": ("#74add1", "v"),
    "sigmoid": ("#1b9e77", "P"),
    "linear": ("#b8860b", "X"),
}
"""The colour and marker of each weighting."""
POSITIONS = {
    "softmax": ("softmax, half ALiBi", "#333333", "o", "-"),
    "softmax/none": ("softmax, none", "#333333", "x", "-."),
    "softmax/alibi": ("softmax, ALiBi", "#333333", "^", "--"),
    "softmax/half-rotary": ("softmax, half rotary", "#333333", "D", (0, (4, 1, 1, 1))),
    "softmax/rotary": ("softmax, rotary", "#333333", "s", ":"),
    "entmax15": ("entmax15, half ALiBi", "#cb181d", "o", "-"),
    "entmax15/none": ("entmax15, none", "#cb181d", "x", "-."),
    "entmax15/alibi": ("entmax15, ALiBi", "#cb181d", "^", "--"),
    "entmax15/half-rotary": ("entmax15, half rotary", "#cb181d", "D", (0, (4, 1, 1, 1))),
    "entmax15/rotary": ("entmax15, rotary", "#cb181d", "s", ":"),
}
"""The label, colour, marker and dashes of each position."""
SCORES = {
    "softmax": ("dot product", "#333333", "o", "-"),
    "cosine": ("cosine", "#2166ac", "D", "-"),
    "gaussian": ("Gaussian", "#cb181d", "s", "-"),
    "additive": ("additive", "#1b9e77", "^", "-"),
}
"""The label, colour, marker and dashes of each score."""
CURVES = {
    "softmax": ("half ALiBi", "#333333", "-"),
    "softmax/rotary": ("rotary", "#2166ac", "-"),
    "softmax/none": ("no position", "#cb181d", "-"),
    "softmax/no-convolution": ("half ALiBi, no convolution", "#333333", ":"),
    "softmax/rotary/no-convolution": ("rotary, no convolution", "#2166ac", ":"),
    "softmax/none/no-convolution": ("no position, no convolution", "#cb181d", ":"),
}
"""The label, colour and dashes of the losses with and without the convolution."""
SEEDS = 3
LEARNED_SHARE = 0.7
"""A run learned a task if it is so near to the best run, at the training length."""
LEARNED_BY_NONE = 0.5
"""A task whose best run stays below this accuracy counts as learned by none."""


class Summary(NamedTuple):
    """The runs of one task and attention at one length."""

    mean: float
    """Of the runs that learned the task, or of all runs if none did; NaN without runs."""
    low: float
    high: float
    learned: int
    runs: int


class Results:
    """The lines of a file of results, by task and attention."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in lines:
            self.cells.setdefault((line["task"], line["attention"]), []).append(line)
        lines = [line for cell in self.cells.values() for line in cell]
        self.lengths = sorted({int(length) for line in lines for length in line["accuracy"]})
        self.attentions = list(dict.fromkeys(attention for _, attention in self.cells))
        self.tasks = [task for task in TITLES if any(task == name for name, _ in self.cells)]
        self.limits = {task: self._find_limit(task) for task in self.tasks}

    def _find_limit(self, task: str) -> float:
        runs = [line for (name, _), lines in self.cells.items() if name == task for line in lines]
        best = max(map(accuracy_when_trained, runs))
        return LEARNED_SHARE * best if best >= LEARNED_BY_NONE else 1.0

    def summarize(
        self, task: str, attention: str, length: int, measure: str = "accuracy"
    ) -> Summary:
        """Return the mean and the range of a measure over the runs that learned the task."""
        lines = self.cells.get((task, attention), [])
        learned = [x for x in lines if accuracy_when_trained(x) >= self.limits[task]]
        numbers = [line.get(measure, {}).get(str(length)) for line in learned or lines]
        numbers = [x for x in numbers if x is not None]
        if not numbers:
            return Summary(np.nan, np.nan, np.nan, len(learned), len(lines))
        mean = float(np.mean(numbers))
        return Summary(mean, min(numbers), max(numbers), len(learned), len(lines))


def accuracy_when_trained(line: dict[str, Any]) -> float:
    """Return the accuracy at the shortest length that was measured."""
    return line["accuracy"][min(line["accuracy"], key=int)]


def draw_lengths(
    results: Results,
    tasks: Sequence[str],
    lines: dict[str, tuple[str, str, str, Any]],
    measure: str,
    label: str,
) -> Any:
    """Draw one panel per task and one line per attention against the length of the test.

    A line is the mean of the runs that learned the task, its bars the lowest and the highest run.
    An attention that did not learn a task has no line in its panel.
    """
    columns = 2 if len(tasks) == 4 else 3
    rows = -(-len(tasks) // columns)
    figure = style.new_figure((3.0 * columns, 2.5 * rows + 0.7), "constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    factors = [length // results.lengths[0] for length in results.lengths]
    handles: dict[str, Any] = {}
    for panel, task in zip(panels, tasks, strict=False):
        for attention, (name, colour, marker, dashes) in lines.items():
            points = [results.summarize(task, attention, x, measure) for x in results.lengths]
            if not points[0].learned:
                continue
            means = np.array([x.mean for x in points])
            bars = np.array([(x.mean - x.low, x.high - x.mean) for x in points]).T
            handles[name] = panel.errorbar(
                factors,
                100 * means,
                100 * bars,
                color=colour,
                marker=marker,
                linestyle=dashes,
                linewidth=1.2,
                markersize=4,
                elinewidth=0.6,
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(factors, [f"{x} L" for x in factors])
        panel.set_ylim(-3, 103)
        style.style_axes(panel, "", "", TITLES[task])
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    figure.supylabel(label, fontsize=9, color=style.INK)
    figure.supxlabel(
        f"length of the test (L = {results.lengths[0]} tokens)", fontsize=9, color=style.INK
    )
    order = [name for name, *_ in lines.values() if name in handles]
    figure.legend(
        [handles[name] for name in order],
        order,
        loc="outside upper center",
        ncols=columns + 2 if columns > 2 else 3,
        frameon=False,
        fontsize=8,
        labelcolor=style.INK,
    )
    return figure


def draw_weightings(results: Results, tasks: Sequence[str], measure: str, label: str) -> Any:
    lines = {name: (name, *colour, "-") for name, colour in LINES.items()}
    return draw_lengths(results, tasks, lines, measure, label)


def draw_losses(results: Results, tasks: Sequence[str]) -> Any:
    """Draw the loss of each seed along the training, with and without the convolution."""
    figure = style.new_figure((3.6 * len(tasks), 3.2), "constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True).ravel()
    handles: dict[str, Any] = {}
    for panel, task in zip(panels, tasks, strict=True):
        for attention, (name, colour, dashes) in CURVES.items():
            for line in results.cells.get((task, attention), []):
                curve = line["curve"]
                steps = line["steps"] / len(curve) * (0.5 + np.arange(len(curve)))
                (handles[name],) = panel.plot(
                    steps, curve, color=colour, linestyle=dashes, linewidth=1.2
                )
        style.style_axes(panel, "", "", TITLES[task])
    panels[0].set_ylim(bottom=0)
    figure.supylabel("loss in the training", fontsize=9, color=style.INK)
    figure.supxlabel("step", fontsize=9, color=style.INK)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=8,
        labelcolor=style.INK,
    )
    return figure


def draw_heat_map(results: Results, length: int) -> Any:
    """Draw the accuracy of each task and attention at a length, with the seeds that learned."""
    attentions, tasks = results.attentions, results.tasks
    figure = style.new_figure((0.95 * len(tasks) + 1.6, 0.3 * len(attentions) + 1.0), "constrained")
    panel = figure.subplots()
    cells = [[results.summarize(task, name, length) for task in tasks] for name in attentions]
    shares = np.array([[x.mean if x.learned else np.nan for x in row] for row in cells])
    scale, colours = style.colour_scale(np.array([[0.0, 1.0]]), "Blues")
    panel.imshow(np.ma.masked_invalid(shares), norm=scale, cmap=colours, aspect="auto")
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            text = f"{100 * cell.mean:.0f}" if cell.learned else "not learned"
            text = text if cell.runs else "not run"
            if cell.learned and (cell.learned < cell.runs or cell.runs < SEEDS):
                text += f"  ({cell.learned} of {cell.runs})"
            is_dark = bool(cell.learned) and cell.mean > 0.6
            colour = "white" if is_dark else style.INK if cell.learned else "#888888"
            panel.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)
    panel.set_xticks(range(len(tasks)), [TITLES[task] for task in tasks], fontsize=8)
    panel.set_yticks(range(len(attentions)), attentions, fontsize=8)
    panel.tick_params(length=0, labelcolor=style.INK)
    panel.xaxis.tick_top()
    panel.spines[:].set_visible(False)
    factor = length // results.lengths[0]
    panel.set_title(f"accuracy in percent at {factor} L", fontsize=9, color=style.INK, pad=8)
    return figure


def format_table(results: Results, length: int, tasks: Sequence[str] = ()) -> str:
    """Return a Markdown table of accuracies: the mean, the range and the seeds that learned.

    Attentions without a number have no line.
    """
    tasks = tasks or results.tasks
    lines = ["| attention | " + " | ".join(TITLES[task] for task in tasks) + " |"]
    lines.append("|---" * (1 + len(tasks)) + "|")
    for name in results.attentions:
        row = [format_cell(results.summarize(task, name, length)) for task in tasks]
        if any(text not in ("", "–") for text in row):
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def format_cell(cell: Summary) -> str:
    """Return "93 (92–95)", "81, 1 of 3" if two runs did not learn it, or "–" if none did.

    An empty text stands for an accuracy that was not measured.
    """
    if not cell.learned:
        return "–" if cell.runs else ""
    if np.isnan(cell.mean):
        return ""
    text, low, high = (f"{100 * x:.0f}" for x in cell[:3])
    if low != high:
        text += f" ({low}–{high})"
    if cell.learned < cell.runs or cell.runs < SEEDS:
        text += f", {cell.learned} of {cell.runs}"
    return text


def draw_all(results: Results) -> dict[str, Any]:
    """Return the figures by name."""
    recalls = [task for task in LOOK_UPS if task in results.tasks]
    answer_weight = "percent of the weight on the right row"
    one_row = [task for task in recalls if task != "reverse"]  # there, other rows know it too
    drawn = {
        "lengths": draw_weightings(results, recalls, "accuracy", "accuracy in percent"),
        "heat-map": draw_heat_map(results, results.lengths[-2]),
        "answer-weight": draw_weightings(results, one_row, "answer_weight", answer_weight),
    }
    for name, lines in (("positions", POSITIONS), ("scores", SCORES)):
        drawn[name] = draw_lengths(results, recalls[:4], lines, "accuracy", "accuracy in percent")
    return drawn | {"losses": draw_losses(results, recalls[:3:2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("build/examples/recall"), metavar="DIR")
    options = parser.parse_args()
    results = Results(read_results(options.results))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in draw_all(results).items():
        style.save_figure(figure, options.out / f"recall-{name}.png")
    for length in results.lengths:
        print(f"\nAccuracy in percent at {length // results.lengths[0]} L\n")
        print(format_table(results, length))


if __name__ == "__main__":
    main()
