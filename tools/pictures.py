"""Draw the pictures of the plots page, of Getting started and of the study into docs/pictures.

Each is small enough for a page.

python -m tools.pictures
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import qkv
from qkv import plot, scores
from qkv.plot import style

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
SENTENCE = "When he saw his owner, the dog was happy, so he wagged his tail"


def shrink(png: bytes, path: Path, most: int = 100_000) -> None:
    """Return the picture with as many palette colours as fit into `most` bytes."""
    with Image.open(io.BytesIO(png)) as picture:
        for colours in (256, 128, 64, 32):
            flat = picture.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
            flat.save(path, optimize=True)
            if path.stat().st_size <= most:
                return


def save(name: str, figure: Any, kind: str = "plot") -> None:
    file = io.BytesIO()
    figure.savefig(file, dpi=144, bbox_inches="tight", pad_inches=0.05)
    shrink(file.getvalue(), FOLDER / f"{kind}-{name}.png")


def draw_first_pictures() -> None:
    """Draw the pictures of docs/getting_started.md."""
    from qkv.cli.weights import MODEL_EXAMPLE, capture_model_weights

    names = qkv.Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu", "Smola": "Alex"})
    save("answer", names.ask("Liptn").plot(), "first")
    prices = qkv.Database({"bread": 1.5, "cheese": 2.5, "apples": 2.0})
    save("join", prices.plot(["chese", "bred"]), "first")
    rng = np.random.default_rng(0)
    hours = np.sort(rng.uniform(0, 24, 60))
    degrees = 15 - 8 * np.cos(2 * np.pi * hours / 24) + rng.normal(0, 1.5, 60)
    save("curve", plot.regression(hours, degrees, scores.Gaussian(1.5)), "first")
    captured, layer, head = capture_model_weights(MODEL_EXAMPLE, (5, 11))
    words = captured.labels
    picture = plot.heatmaps(
        captured.weights[layer, head], xticks=words, yticks=words, figsize=(4.5, 4.5)
    )
    save("sentence", picture, "first")


def model() -> None:
    from qkv.cli.weights import capture_model_weights

    seen, layer, at = capture_model_weights(SENTENCE, (2, 3))
    words, alpha = seen.labels, seen.weights
    save("heads", plot.heads(alpha, title="the 72 heads of MiniLM on one sentence"))
    save("entropy", plot.entropy(alpha))
    save("flow", plot.flow(alpha, words, words.index("wagged")))
    save("alignment", plot.alignment(alpha[layer, at], words, words, least=0.1))


def kernels() -> None:
    save("kernels", plot.kernels())
    rng = np.random.default_rng(1)
    w = rng.normal(size=(3, 2, 1))
    learned = {
        "multiplicative": scores.Multiplicative(np.array([[-0.5]])),
        "additive": scores.Additive(w[0], w[1], w[2, :, 0]),
        "gated": scores.Gated(np.array([2.0]), np.array([-1.0])),
    }
    plain = {name: name for name in ("dot", "gaussian", "laplace", "boxcar", "epanechnikov")}
    save("surfaces", plot.surfaces({**plain, **learned}))

    def truth(x: np.ndarray) -> np.ndarray:
        return 2 * np.sin(x) + x

    x = np.sort(rng.uniform(0, 5, 40))
    y = truth(x) + rng.normal(0, 0.5, 40)
    by = {"σ = 1": scores.Gaussian(1.0), "σ = 0.25": scores.Gaussian(0.25), "boxcar": "boxcar"}
    save("regression", plot.regression(x, y, by, truth=truth))


def large() -> None:
    t = np.linspace(0, 40, 2048)[:, None]
    curve = np.concatenate([np.cos(t), np.sin(t + t**2 / 90), t / 60], 1)
    alpha = qkv.weights(curve, curve, score=scores.Gaussian(0.1))
    save("pooled-max", plot.heatmaps(alpha, figsize=(3.4, 3.4)))
    save("pooled-mean", plot.heatmaps(alpha, figsize=(3.4, 3.4), pool="mean"))


MEASURED_ROWS = (10_000, 100_000, 1_000_000)
EXTRAPOLATED_ROWS = (10_000_000, 100_000_000)


def draw_answer_times() -> None:
    """Draw the time of an answer against the number of rows, from bench/results/index.json.

    Beyond the measured rows, the time of a scan grows with the rows, and that of a search with
    their square root: both the number of lists and the rows of a list do.
    """
    stored = json.loads((ROOT / "bench" / "results" / "index.json").read_text())
    works = {row["work"]: row["sides"] for row in stored["rows"]}
    soft, best = (
        [works[f"{name}, {rows:,} × 256, CPU"] for rows in MEASURED_ROWS]
        for name in ("soft answer", "ten best rows")
    )
    lines = {
        "exact": ("#333333", [sides["exact"]["ms"] for sides in soft], 1.0),
        "certified, error ≤ 0.05": (style.BLUE, [sides["certified"]["ms"] for sides in soft], 1.0),
        "approximate": (style.RED, [sides["qkv"]["ms"] for sides in soft], 0.5),
        "approximate, ten best rows": ("#f4a582", [sides["qkv"]["ms"] for sides in best], 0.5),
    }
    figure = style.new_figure((5.6, 3.4), "constrained")
    panel = figure.subplots()
    for label, (colour, times, power) in lines.items():
        shared: Any = {"color": colour, "linewidth": 1.5, "markersize": 4.5}
        panel.plot(MEASURED_ROWS, times, "o-", label=label, **shared)
        last = MEASURED_ROWS[-1]
        more = [times[-1] * (rows / last) ** power for rows in EXTRAPOLATED_ROWS]
        beyond = (last, *EXTRAPOLATED_ROWS), (times[-1], *more)
        panel.plot(*beyond, "o--", markerfacecolor="white", zorder=1, **shared)
    panel.axvspan(MEASURED_ROWS[-1] * 1.8, EXTRAPOLATED_ROWS[-1] * 1.8, color="#f5f5f5", zorder=0)
    panel.text(
        1.35e7,
        0.97,
        "extrapolated",
        transform=panel.get_xaxis_transform(),
        va="top",
        ha="center",
        fontsize=8,
        color=style.INK,
    )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(6e3, EXTRAPOLATED_ROWS[-1] * 1.8)
    style.style_axes(panel, "rows of 256 numbers", "ms of the CPU for one answer")
    panel.legend(frameon=False, fontsize=7.5, labelcolor=style.INK, handlelength=1.6)
    save("answer-times", figure)


def draw_linear_times() -> None:
    """Draw the time of causal linear attention beside softmax, from bench/results."""
    stored = json.loads((ROOT / "bench" / "results" / "published_cuda.json").read_text())
    works = {row["work"]: row["sides"] for row in stored["rows"]}
    lengths = [2**i for i in range(10, 18)]
    figure = style.new_figure((7.2, 3.2), "constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, direction in zip(panels, ("forward", "forward + backward"), strict=True):
        sides = [works[f"linear attention, causal, B1 H8 n{n} d64, {direction}"] for n in lengths]
        for name, label, colour in (
            ("SDPA", "softmax, PyTorch's SDPA", "#333333"),
            ("qkv", "linear attention, qkv", style.RED),
        ):
            times = [side[name]["ms"] for side in sides]
            panel.plot(lengths, times, "o-", color=colour, label=label, linewidth=1.5, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
        style.style_axes(
            panel, "rows", "ms on an H200" if direction == "forward" else "", direction
        )
    panels[0].legend(frameon=False, fontsize=8, labelcolor=style.INK)
    save("linear-times", figure)


def draw_recall() -> None:
    """Draw the figures of docs/recall.md."""
    from examples.recall import figures, train

    results = figures.Results(train.read_results(figures.RESULTS))
    for name, figure in figures.draw_all(results).items():
        save(name, figure, "recall")


if __name__ == "__main__":
    draw_answer_times()
    draw_linear_times()
    draw_recall()
    draw_first_pictures()
    model()
    kernels()
    large()
