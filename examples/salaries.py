"""Nadaraya–Watson regression: the answer is the mean of the values whose keys are near the query.

    pip install "qkv[torch,plot]" scikit-learn
    python examples/salaries.py             # under a minute on one core
    python examples/salaries.py --small     # fewer rows and steps: seconds

f(q) = Σᵢ α(q, kᵢ) vᵢ, where α is the softmax of −‖(q − k)/σ‖²/2. `qkv.attend(…, score="gaussian")`
computes it with σ = 1, for columns in units of their standard deviations.
`qkv.nn.KernelRegression` starts there and learns σ, one for all columns or one for each, by
predicting each training row from the others.

There are three tables. A quarter of the rows of each is held out for the test:

- salaries: invented engineers, GPA → starting salary in thousands; firms pay more above 3.3.
- diabetes: 442 real patients, ten measurements → progress after a year (`load_diabetes`).
- homes: invented, similar to the California housing data: latitude, longitude and income → price
  in thousands, higher by the sea and around the Bay, and capped at 500.

Expect the learned kernel to be better than k nearest neighbours (k by cross-validation) on salaries
and homes. On diabetes it is better than they are on most splits, and worse than linear regression
on most: with so few patients, the split decides between methods that are this close. The script
writes a picture of each table and training.png to build/examples/salaries.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while loading there is nothing to clean up
    if not all(map(find_spec, ("torch", "matplotlib", "sklearn"))):
        sys.exit('salaries needs PyTorch and more: pip install "qkv[torch,plot]" scikit-learn')

import numpy as np
import torch

import qkv
from qkv import scores
from qkv.nn import KernelRegression

SEED = 0
RATE = 0.1
QUERY = 3.5  # the GPA that the seeds' student asks with
INK, GREY, PALE, RED, BLUE = "#333333", "#777777", "#bbbbbb", "#cb181d", "#4a6fa5"


@dataclass
class Table:
    """Training and test rows; keys and values are in standard deviations of the training rows."""

    name: str
    unit: str
    columns: Sequence[str]
    x: np.ndarray
    y: np.ndarray
    known: np.ndarray = field(init=False)
    held_out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        order = np.random.default_rng(SEED).permutation(len(self.x))
        self.held_out, self.known = np.split(order, [len(order) // 4])
        self.middle, self.spread = self.x[self.known].mean(0), self.x[self.known].std(0)
        self.mean, self.scale = self.y[self.known].mean(), self.y[self.known].std()

    def keys(self, x: np.ndarray) -> torch.Tensor:
        return torch.tensor((x - self.middle) / self.spread, dtype=torch.float32)

    def values(self, y: np.ndarray) -> torch.Tensor:
        return torch.tensor((y - self.mean) / self.scale, dtype=torch.float32)

    def back(self, value: torch.Tensor) -> np.ndarray:
        """Return predicted values in their original unit."""
        return self.scale * value.detach().double().numpy() + self.mean

    def learner(self, features: bool) -> KernelRegression:
        key, value = self.keys(self.x[self.known]), self.values(self.y[self.known])
        return KernelRegression(key, value, features=features)

    def attended(self, query: np.ndarray, score: Any) -> np.ndarray:
        """Return the predictions of `qkv.attend`, without training."""
        key, value = self.keys(self.x[self.known]), self.values(self.y[self.known])
        return self.back(qkv.attend(self.keys(query), key, value[:, None], score=score)[:, 0])


def pay(gpa: np.ndarray) -> np.ndarray:
    """Return the expected salary in thousands."""
    return 60 + 5 * (gpa - 2.4) + 16 / (1 + np.exp((3.3 - gpa) / 0.06))


def salaries(rows: int = 240) -> Table:
    rng = np.random.default_rng(SEED)
    gpa = rng.uniform(2.4, 4.0, rows).round(2)
    salary = (pay(gpa) + rng.normal(0, 4, rows)).round(1)
    return Table("salaries", "salary, thousands", ["GPA"], gpa[:, None], salary)


def diabetes(rows: int = 442) -> Table:
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)
    names = ["age", "sex", "body mass", "pressure", "cholesterol", "LDL", "HDL", "ratio"]
    names += ["triglycerides", "sugar"]
    return Table("diabetes", "progress", names, found.data[:rows], found.target[:rows])


CITIES = np.array(  # latitude, longitude, share of the homes
    [
        (34.05, -118.20, 0.34),
        (32.80, -117.10, 0.14),
        (37.75, -122.35, 0.20),
        (37.35, -121.90, 0.10),
        (38.58, -121.45, 0.12),
        (36.75, -119.80, 0.10),
    ]
)
SHORE = np.array(  # latitude, longitude
    [
        (32.5, -117.1),
        (33.7, -118.2),
        (34.0, -118.6),
        (34.5, -120.5),
        (36.6, -121.9),
        (37.8, -122.5),
        (40.0, -124.0),
        (42.0, -124.2),
    ]
)


def homes(rows: int = 1200) -> Table:
    rng = np.random.default_rng(SEED)
    city = CITIES[rng.choice(len(CITIES), rows, p=CITIES[:, 2])]
    latitude = city[:, 0] + rng.normal(0, 0.35, rows)
    shore = np.interp(latitude, SHORE[:, 0], SHORE[:, 1])
    longitude = np.maximum(
        city[:, 1] + rng.normal(0, 0.4, rows), shore + rng.exponential(0.05, rows)
    )
    income = rng.lognormal(1.25, 0.45, rows)
    sea = np.exp((shore - longitude) / 0.28)
    bay = np.exp(-2 * ((latitude - 37.6) ** 2 + (longitude + 122.2) ** 2))
    price = (40 + 38 * income) * (1 + 0.6 * sea + 0.7 * bay) * rng.lognormal(0, 0.15, rows)
    x = np.stack([latitude, longitude, income], 1)
    columns = ["latitude", "longitude", "income"]
    return Table("homes", "price, thousands", columns, x, price.clip(max=500))


LossCallback = Callable[[float], None]


@dataclass
class Study:
    """What each method predicts for the test rows, and the trained models."""

    table: Table
    predicted: dict[str, np.ndarray]
    models: dict[str, KernelRegression]
    losses: dict[str, list[float]]

    def rmse(self, method: str) -> float:
        wrong = self.predicted[method] - self.table.y[self.table.held_out]
        return float(np.sqrt((wrong**2).mean()))

    def r2(self, method: str) -> float:
        return 1 - self.rmse(method) ** 2 / float(self.table.y[self.table.held_out].var())

    @property
    def last(self) -> KernelRegression:
        """The model that learned the most bandwidths."""
        return list(self.models.values())[-1]

    @property
    def best(self) -> np.ndarray:
        """The predictions of the model that learned the most bandwidths."""
        return list(self.predicted.values())[-1]

    def bandwidths(self) -> np.ndarray:
        """Return σ of each column, in standard deviations."""
        sigma = self.last.score.bandwidth.detach().numpy()
        return np.broadcast_to(sigma, len(self.table.columns))


def study(table: Table, steps: int, report: LossCallback = lambda loss: None) -> Study:
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KNeighborsRegressor

    x, y = table.keys(table.x[table.known]).numpy(), table.y[table.known]
    query = table.keys(table.x[table.held_out])
    sizes = {"n_neighbors": [k for k in (1, 2, 3, 5, 8, 12, 20, 30, 50) if k <= len(x) // 2]}
    nearest = GridSearchCV(KNeighborsRegressor(), sizes, scoring="neg_mean_squared_error").fit(x, y)
    predicted = {
        "mean of all": np.full(len(query), table.mean),
        "straight line": LinearRegression().fit(x, y).predict(query.numpy()),
        f"{nearest.best_params_['n_neighbors']} nearest": nearest.predict(query.numpy()),
        "attend, σ = 1": table.attended(table.x[table.held_out], "gaussian"),
    }
    models, losses = {}, {}
    kinds = {"learned σ": False, "learned σ, each column": True}
    for name, features in list(kinds.items())[: len(table.columns)]:
        models[name] = table.learner(features)
        losses[name] = models[name].fit(steps, RATE, report)
        predicted[name] = table.back(models[name](query))
    return Study(table, predicted, models, losses)


def tell(found: Study) -> None:
    table = found.table
    print(f"{table.name}: {len(table.known)} rows known, {len(table.held_out)} held out")
    print(f"  {'':<26}{'RMSE':>8}{'R²':>8}")
    for method in found.predicted:
        print(f"  {method:<26}{found.rmse(method):>8.2f}{found.r2(method):>8.3f}")
    print("  σ, in standard deviations:")
    for name, sigma in zip(table.columns, found.bandwidths(), strict=True):
        print(f"    {name:<14}{sigma:>7.2f}" + ("   not looked at" if sigma > 5 else ""))
    print(flush=True)


def asked(found: Study) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the known GPAs, the weight of each for the example query, and the answer."""
    table = found.table
    query = np.array([[QUERY]])
    sigma = found.last.score.bandwidth.detach()
    alpha = qkv.weights(
        table.keys(query), table.keys(table.x[table.known]), score=scores.Gaussian(sigma)
    )
    answer = table.back(found.last(table.keys(query)))
    return table.x[table.known][:, 0], alpha[0].numpy(), float(answer[0])


def tell_query(found: Study) -> None:
    gpa, alpha, answer = asked(found)
    print(f"A student with a GPA of {QUERY} may expect {answer:.1f} thousand.")
    for low, high in ((3.4, 3.6), (2.9, 3.1), (3.9, 4.0)):
        share = alpha[(gpa >= low) & (gpa <= high)].sum()
        print(f"  weight of those between {low} and {high}: {share:6.1%}")


def salaries_picture(found: Study) -> Any:
    from matplotlib.figure import Figure

    table = found.table
    gpa, alpha, answer = asked(found)
    grid = np.linspace(2.4, 4.0, 300)
    straight = np.polynomial.Polynomial.fit(gpa, table.y[table.known], 1)
    lines = [
        ("what the salaries were made by", pay(grid), {"color": PALE, "lw": 3}),
        ("straight line", straight(grid), {"color": BLUE, "lw": 1.2}),
        ("attend, σ = 1", table.attended(grid[:, None], "gaussian"), {"color": GREY, "ls": "--"}),
        ("learned σ", table.back(found.last(table.keys(grid[:, None]))), {"color": RED, "lw": 1.6}),
    ]
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    left.scatter(gpa, table.y[table.known], s=9, color="white", ec=GREY, lw=0.5, zorder=0)
    for name, line, style in lines:
        left.plot(grid, line, label=name, **style)
    left.plot(QUERY, answer, "D", color="white", mec=INK, ms=6, zorder=5)
    left.set_title("GPA → starting salary, invented", fontsize=10, color=INK)
    left.set_ylabel(table.unit, fontsize=9, color=INK)
    left.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left")

    near = (gpa >= 3.4) & (gpa <= 3.6)
    right.axvspan(3.4, 3.6, color="#fee5d9", lw=0)
    right.vlines(gpa, 0, alpha, color=np.where(near, RED, PALE), lw=1.2)
    right.scatter(gpa, alpha, s=10, color=np.where(near, RED, PALE), zorder=3)
    right.set_title(f"q = {QUERY}: the weight of each row", fontsize=10, color=INK)
    right.set_ylim(0)
    note = f"{alpha[near].sum():.0%} of the weight\nbetween 3.4 and 3.6"
    right.text(3.38, alpha.max(), note, ha="right", va="top", fontsize=8.5, color=INK)
    for panel in (left, right):
        panel.set_xlabel("GPA", fontsize=9, color=INK)
        frame(panel)
    return figure


def table_picture(found: Study) -> Any:
    """Plot predicted against true values, the bandwidths, and for homes a map of weights."""
    from matplotlib.figure import Figure

    table = found.table
    panels = 3 if table.name == "homes" else 2
    figure = Figure(figsize=(4.2 * panels, 3.8), layout="constrained")
    left, middle, *rest = figure.subplots(1, panels)
    true = table.y[table.held_out]
    ends = [min(true.min(), found.best.min()), max(true.max(), found.best.max())]
    left.plot(ends, ends, color=PALE, lw=1, zorder=0)
    left.scatter(true, found.best, s=12, color=RED, alpha=0.55, lw=0)
    left.set_xlabel(f"true {table.unit}", fontsize=9, color=INK)
    left.set_ylabel("predicted", fontsize=9, color=INK)
    left.set_title(
        f"{table.name}, rows held out: R² = {found.r2(list(found.predicted)[-1]):.2f}",
        fontsize=10,
        color=INK,
    )
    places = np.arange(len(table.columns))
    sigma = found.bandwidths()
    middle.hlines(places, sigma.min() / 2, sigma, color=PALE, lw=1)
    middle.scatter(sigma, places, s=28, color=np.where(sigma > 5, PALE, RED), zorder=3)
    middle.set_xscale("log")
    middle.xaxis.set_major_formatter("{x:g}")
    middle.set_xlim(sigma.min() / 2, max(sigma.max() * 2, 2))
    middle.axvline(1, color=GREY, lw=0.8, ls=":")
    middle.set_yticks(places, table.columns)
    middle.set_ylim(len(places) - 0.4, -0.6)
    middle.set_xlabel("σ, in standard deviations", fontsize=9, color=INK)
    middle.set_title("learned bandwidths: the small ones count", fontsize=10, color=INK)
    for panel in rest:
        map_panel(figure, panel, found)
    for panel in (left, middle, *rest):
        frame(panel)
    return figure


def map_panel(figure: Any, panel: Any, found: Study) -> None:
    """Plot the homes that contribute to the prediction for one home by the Bay."""
    table = found.table
    known, others = table.x[table.known], table.x[table.held_out]
    query = others[[np.square(others - (37.7, -122.3, 4)).sum(1).argmin()]]
    score = scores.Gaussian(found.last.score.bandwidth.detach())
    alpha = qkv.weights(table.keys(query), table.keys(known), score=score)[0].numpy()
    order = alpha.argsort()
    latitude, longitude, _ = known[order].T
    panel.plot(SHORE[:, 1], SHORE[:, 0], color=PALE, lw=1.5, zorder=0)
    dots = panel.scatter(
        longitude,
        latitude,
        c=alpha[order],
        cmap="Reds",
        vmin=0,
        s=14 + 1500 * alpha[order],
        ec=GREY,
        lw=0.4,
    )
    for colour, width in (("white", 4), (INK, 1.6)):
        panel.plot(query[0, 1], query[0, 0], "+", color=colour, ms=12, mew=width)
    panel.set_xlim(query[0, 1] - 1.3, query[0, 1] + 1.3)
    panel.set_ylim(query[0, 0] - 1.1, query[0, 0] + 1.1)
    panel.set_title("who answers for the home at +", fontsize=10, color=INK)
    panel.set_xlabel("longitude", fontsize=9, color=INK)
    panel.set_ylabel("latitude", fontsize=9, color=INK)
    bar = figure.colorbar(dots, ax=panel, aspect=40, pad=0.02)
    bar.set_label("weight", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, labelcolor=INK, color=PALE, length=2)


def training_picture(found: Sequence[Study]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3.0), layout="constrained")
    for panel, one in zip(figure.subplots(1, len(found), sharey=True), found, strict=True):
        for (name, losses), colour in zip(one.losses.items(), (BLUE, RED), strict=False):
            panel.plot(range(1, len(losses) + 1), losses, color=colour, lw=1.4, label=name)
        panel.set_title(one.table.name, fontsize=10, color=INK)
        panel.set_xlabel("steps", fontsize=9, color=INK)
        frame(panel)
    error = "error of each row from the others,\nshare of the variance"
    figure.axes[0].set_ylabel(error, fontsize=9, color=INK)
    figure.axes[0].set_ylim(0)  # now that all have their lines: the panels share it
    figure.axes[-1].legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def frame(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set(linewidth=0.6, color=PALE)
    panel.tick_params(which="both", labelsize=8, labelcolor=INK, color=PALE, length=2)


def draw(pictures: dict[str, Any], out: Path) -> None:
    """Write each picture, completely or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    print()
    for name, figure in pictures.items():
        draft = out / f".{name}"
        try:
            figure.savefig(draft, dpi=160, bbox_inches="tight", pad_inches=0.08)
            os.replace(draft, out / name)
        finally:
            draft.unlink(missing_ok=True)
        print(f"wrote {out / name}")


@contextmanager
def progress(name: str, steps: int) -> Iterator[LossCallback]:
    """Return a progress bar on stderr, if that is a terminal; stdout is for results."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda loss: bar.update(task, advance=1, description=f"{name}, loss {loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="fewer rows and steps: seconds")
    parser.add_argument("--out", type=Path, default=Path("build/examples/salaries"), metavar="DIR")
    options = parser.parse_args()
    began = time.process_time()
    steps = 40 if options.small else 100
    rows = {"rows": 200} if options.small else {}
    found = []
    for table in (salaries(**rows), diabetes(**rows), homes(**rows)):
        with progress(table.name, steps * min(len(table.columns), 2)) as report:
            found.append(study(table, steps, report))
        tell(found[-1])
    tell_query(found[0])
    print(f"\nlearned in {time.process_time() - began:.0f} s of processor time")
    pictures = {"salaries.png": salaries_picture(found[0])}
    pictures |= {f"{one.table.name}.png": table_picture(one) for one in found[1:]}
    pictures["training.png"] = training_picture(found)
    draw(pictures, options.out)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (qkv.QkvError, OSError) as error:
        sys.exit(f"salaries: {error}")
