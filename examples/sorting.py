"""Sort ten numbers by pointing at them: soft attention in training, hard attention in use.

    pip install "qkv[torch,plot]"
    python examples/sorting.py              # under two minutes on one core
    python examples/sorting.py --small      # five numbers and a short training: seconds

In one Transformer block the numbers attend to each other. Then each position of the answer, first
to tenth, is a query for the number that belongs there, with the additive score of pointer networks;
its weights are the pointer. Training minimizes the cross-entropy of the soft weights. In use, the
same score runs with weighting="hard", so the result consists of the input numbers, bit for bit.

The weighting inside the block matters. Sigmoid weights need not sum to 1, so a number can count how
many others are smaller; softmax weights only average. Both are trained here with the same budget.

The table is for 10,000 test sequences. Expect 99 % of them fully sorted with a sigmoid block. A
softmax block reaches 85 %, and with other seeds 46 to 87 %. The script writes training.png,
pointers.png (the pointers) and counting.png to build/examples/sorting. In counting.png one sigmoid
head counts the numbers that are greater, and the other those that are smaller.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while loading there is nothing to clean up
    if not all(map(find_spec, ("torch", "matplotlib"))):
        sys.exit('sorting needs PyTorch and matplotlib: pip install "qkv[torch,plot]"')

import torch
from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.nn import AdditiveScore, Attention, TransformerBlock
from qkv.plot import heatmaps

WIDTH, HEADS, BATCH, RATE = 32, 2, 128, 3e-3
LEARN, WATCH, TEST = 1, 2, 3  # seeds: what is learned, what the curve shows, what is reported
SHOWN = (0.62, 0.171, 0.93, 0.05, 0.48, 0.172, 0.77, 0.33, 0.845, 0.56)  # two are near twins
INK, PALE, COLOURS = "#333333", "#bbbbbb", {"sigmoid": "#cb181d", "softmax": "#4a6fa5"}


class Sorter(nn.Module):
    """x (B, n) → the sorted numbers (B, n), and the pointer α (B, positions, numbers)."""

    def __init__(self, numbers: int, weighting: str) -> None:
        super().__init__()
        self.lift = nn.Linear(1, WIDTH)
        self.block = TransformerBlock(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, norm_first=True, weighting=weighting
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.places = nn.Parameter(torch.randn(numbers, WIDTH) / 2)
        self.soft = Attention(AdditiveScore(WIDTH, WIDTH, WIDTH), "softmax")
        self.hard = Attention(self.soft.score, "hard")

    def forward(self, x: Tensor, hard: bool = False) -> tuple[Tensor, Tensor]:
        point = self.hard if hard else self.soft
        key = self.norm(self.block(self.lifted(x)))
        query = self.places.expand(len(x), -1, -1)
        found, alpha = point(query, key, x[..., None], need_weights=True)
        return found[..., 0], alpha

    def lifted(self, x: Tensor) -> Tensor:
        return self.lift(2 * x[..., None] - 1)

    def looks(self, x: Tensor) -> Tensor:
        """Return α of the block (B, heads, n, n): which numbers each number attends to."""
        z = self.block.norm1(self.lifted(x))
        return self.block.self_attn(z, z, z, average_attn_weights=False)[1]


def sequences(count: int, numbers: int, seed: int) -> Tensor:
    """Return numbers in [0, 1), (count, numbers); a seed gives the same ones each time."""
    return torch.rand(count, numbers, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Result:
    """How well sequences were sorted; a position is right if its nearest number is right."""

    places: float
    whole: float
    error: float


@torch.no_grad()
def judge(model: Sorter, x: Tensor, hard: bool) -> Result:
    found = torch.cat([model(part, hard)[0] for part in x.split(1000)])
    nearest = (found[..., None] - x[:, None, :]).abs().argmin(-1)
    wanted = x.sort(-1).values
    right = x.gather(-1, nearest) == wanted
    error = (found - wanted).abs().mean()
    return Result(float(right.float().mean()), float(right.all(-1).float().mean()), float(error))


@dataclass(frozen=True)
class Training:
    losses: list[float]
    watched: list[tuple[int, float]]
    """After so many steps, how much of other sequences hard pointers sort without a fault."""
    seconds: float


def train(
    model: Sorter, numbers: int, steps: int, report: Callable[[float], None] = lambda loss: None
) -> Training:
    began = time.process_time()
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    chance = torch.Generator().manual_seed(LEARN)
    other = sequences(1000, numbers, WATCH)
    losses, watched = [], []
    for step in range(1, steps + 1):
        x = torch.rand(BATCH, numbers, generator=chance)
        _, alpha = model(x)
        right = alpha.gather(-1, x.argsort(-1)[..., None])
        loss = -right.clamp_min(1e-30).log().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % max(steps // 30, 1) == 0:
            watched.append((step, judge(model, other, hard=True).whole))
        report(losses[-1])
    return Training(losses, watched, time.process_time() - began)


@contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Return a progress bar on stderr, if that is a terminal; stdout is for results."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda loss: bar.update(task, advance=1, description=f"{name}, loss {loss:.3f}")


def run(numbers: int, steps: int, asked: int) -> tuple[dict[str, Sorter], dict[str, Training]]:
    """Train one sorter for each weighting of the block, and print how well each sorts."""
    models, trainings = {}, {}
    test = sequences(asked, numbers, TEST)
    print(f"{asked:,} unseen sequences of {numbers} numbers, {steps:,} steps of learning\n")
    print(f"{'block':<9}{'pointer':<9}{'places right':>13}{'all right':>11}{'mean error':>12}")
    for weighting in COLOURS:
        torch.manual_seed(0)
        model = models[weighting] = Sorter(numbers, weighting)
        with progress(weighting, steps) as report:
            trainings[weighting] = train(model, numbers, steps, report)
        for pointer in ("soft", "hard"):
            found = judge(model, test, pointer == "hard")
            print(
                f"{weighting:<9}{pointer:<9}{found.places:>13.2%}{found.whole:>11.2%}"
                f"{found.error:>12.5f}",
                flush=True,
            )
    return models, trainings


@torch.no_grad()
def show(model: Sorter, x: Tensor) -> None:
    """Print one sequence, sorted with soft and with hard weights."""
    lines = [("numbers", x), ("soft", model(x[None])[0][0]), ("hard", model(x[None], True)[0][0])]
    print()
    for name, line in lines:
        print(f"{name:<9}" + " ".join(f"{number:.4f}" for number in line.tolist()))


def training_picture(trainings: dict[str, Training]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, training in trainings.items():
        smooth, last = [], training.losses[0]
        for loss in training.losses:
            last += 0.05 * (loss - last)
            smooth.append(last)
        at = range(1, len(smooth) + 1)
        left.plot(at, training.losses, color=COLOURS[name], lw=0.4, alpha=0.25)
        left.plot(at, smooth, color=COLOURS[name], lw=1.4, label=f"{name} block")
        right.plot(*zip(*training.watched, strict=True), color=COLOURS[name], lw=1.4)
        right.annotate(
            name,
            training.watched[-1],
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=COLOURS[name],
        )
    left.set_yscale("log")
    left.set_title("cross-entropy of the soft pointers", fontsize=10, color=INK)
    left.legend(frameon=False, fontsize=9, labelcolor=INK)
    right.set_title("unseen sequences that hard pointers sort", fontsize=10, color=INK)
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    right.set_ylim(0, 1.03)
    for panel in (left, right):
        panel.set_xlabel("steps", fontsize=9, color=INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[:].set(linewidth=0.6, color=PALE)
        panel.tick_params(which="both", labelsize=8, labelcolor=INK, color=PALE, length=2)
    return figure


@torch.no_grad()
def pointers_picture(model: Sorter, x: Tensor) -> Any:
    return heatmaps(
        [model(x[None], hard)[1][0] for hard in (False, True)],
        xlabel="numbers, as they came",
        ylabel="places of the answer",
        titles=["soft: near twins share", "hard: one number each"],
        figsize=(4.0, 4.0),
        xticks=[f"{number:.3f}" for number in x.tolist()],
        yticks=range(1, len(x) + 1),
    )


@torch.no_grad()
def counting_picture(models: dict[str, Sorter], numbers: int) -> Any:
    even = (torch.arange(numbers) + 0.5) / numbers
    words = [f"{number:.2f}" for number in even.tolist()]
    return heatmaps(
        [list(model.looks(even[None])[0]) for model in models.values()],
        xlabel="… looks at",
        ylabel="each number …",
        titles=[[f"{name}, head {i + 1}" for i in range(HEADS)] for name in models],
        figsize=(3.0, 3.0),
        xticks=words,
        yticks=words,
    )


def draw(pictures: dict[str, Any], out: Path) -> None:
    """Write each picture, completely or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        draft = out / f".{name}"
        try:
            figure.savefig(draft, dpi=160, bbox_inches="tight", pad_inches=0.08)
            os.replace(draft, out / name)
        finally:
            draft.unlink(missing_ok=True)
        print(f"wrote {out / name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="five numbers, a short training")
    parser.add_argument("--out", type=Path, default=Path("build/examples/sorting"), metavar="DIR")
    options = parser.parse_args()
    numbers, steps, asked = (5, 200, 1000) if options.small else (10, 3000, 10_000)
    models, trainings = run(numbers, steps, asked)
    shown = torch.tensor(SHOWN[:numbers])
    show(models["sigmoid"], shown)
    seconds = sum(training.seconds for training in trainings.values())
    print(f"\nlearned in {seconds:.0f} s of processor time")
    draw(
        {
            "training.png": training_picture(trainings),
            "pointers.png": pointers_picture(models["sigmoid"], shown),
            "counting.png": counting_picture(models, numbers),
        },
        options.out,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (QkvError, OSError) as error:
        sys.exit(f"sorting: {error}")
