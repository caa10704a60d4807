"""Train a language model of letters with three kinds of heads: dot, additive and entmax.

    python examples/letters.py [--steps 800] [--out DIR]

The text is the 300 books of examples/data/books.csv, one line each: "The Iliad: In the tenth year
of the siege of Troy, …". A tenth of the lines is for validation and another tenth for the test.

The three models are decoders of two blocks with two heads. They differ only in the score (dot
product or additive) and the weighting (softmax or 1.5-entmax), and train on the same letters. The
table shows the bits per letter of the test lines, and the effective number of letters that a head
attends to (the mean of e^entropy of its weights). Then each model writes a book. Expect 2.9 bits
for all three, and about 3 letters for dot, 9 for additive and 1 for entmax heads, after about four
minutes on one core.

The script writes the learning curves (curves.png) and the weights of every head on a test line
(heads.png) to DIR, by default build/examples/letters. Needs pip install "qkv[torch,plot]".
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from qkv import nn
from qkv.errors import QkvError

Tensor = torch.Tensor

BOOKS = Path(__file__).parent / "data" / "books.csv"
SEED = 0
STEPS = 800
BATCH, LENGTH = 12, 96
WIDTH, HEADS, LAYERS, HIDDEN = 64, 2, 2, 8
SHOWN = 24
COLOURS = ("#2171b5", "#cb181d", "#238b45")

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "dot": lambda: {"score": "scaled_dot"},
    "additive": lambda: {"score": nn.AdditiveScore(WIDTH // HEADS, WIDTH // HEADS, HIDDEN)},
    "entmax15": lambda: {"weighting": "entmax15"},
}


class Text(NamedTuple):
    letters: str
    learned: Tensor
    watched: Tensor
    held: Tensor
    line: str


def text() -> Text:
    """Return the books in a fixed random order: training, validation (a tenth) and test text."""
    with BOOKS.open(encoding="utf-8", newline="") as file:
        lines = [f"{row['title']}: {row['summary']}\n" for row in csv.DictReader(file)]
    random.Random(SEED).shuffle(lines)
    letters = "".join(sorted(set("".join(lines))))
    tenth = len(lines) // 10
    parts = lines[2 * tenth :], lines[:tenth], lines[tenth : 2 * tenth]
    return Text(letters, *(read("".join(part), letters) for part in parts), lines[tenth])


def read(text: str, letters: str) -> Tensor:
    return torch.tensor([letters.index(letter) for letter in text])


class Model(torch.nn.Module):
    """Logits of the next letter, (B, n) → (B, n, letters)."""

    def __init__(self, letters: int, kind: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(letters, WIDTH)
        # One block at a time, so that each has its own additive score.
        self.blocks = torch.nn.ModuleList(
            nn.TransformerBlock(
                WIDTH,
                HEADS,
                dim_feedforward=4 * WIDTH,
                dropout=0.0,
                activation="gelu",
                norm_first=True,
                rotary=True,
                **KINDS[kind](),
            )
            for _ in range(LAYERS)
        )
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor, caches: Any = None) -> Tensor:
        x = self.embedding(x)
        for block, cache in zip(self.blocks, caches or [None] * LAYERS, strict=True):
            x = block(x, is_causal=True, cache=cache)
        return self.head(self.norm(x))

    def weights(self, x: Tensor) -> Tensor:
        """Return α (B, layers, heads, n, n)."""
        with nn.capture(self) as seen:
            self(x)
        return torch.stack(list(seen.values()), 1)

    def write(self, start: Tensor, count: int, temperature: float = 0.7) -> Tensor:
        """Return the letters `start` (n,) and `count` sampled ones, decoded with a cache."""
        caches = [(nn.Cache(), nn.Cache()) for _ in self.blocks]
        draw = torch.Generator().manual_seed(SEED)
        out, new = start, start
        for _ in range(count):
            chances = self(new[None], caches)[0, -1].div(temperature).softmax(-1)
            new = torch.multinomial(chances, 1, generator=draw)
            out = torch.cat((out, new))
        return out


class Point(NamedTuple):
    step: int
    bits: float


class Learned(NamedTuple):
    model: Model
    curve: list[Point]
    seconds: float


def learn(
    kind: str,
    text: Text,
    steps: int,
    rate: float = 1e-2,
    progress: Callable[[int], None] = lambda step: None,
) -> Learned:
    """Train with Adam on random stretches of the text, the same ones for every model."""
    torch.manual_seed(SEED)
    model = Model(len(text.letters), kind)
    draw = torch.Generator().manual_seed(SEED)
    adam = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(adam, rate, steps, pct_start=0.15)
    stretches = text.learned.unfold(0, LENGTH + 1, 1)
    began, curve = time.process_time(), []
    every = max(steps // 20, 1)
    for step in range(1, steps + 1):
        some = stretches[torch.randint(len(stretches), (BATCH,), generator=draw)]
        loss = cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        plan.step()
        progress(step)
        if step % every == 0 or step == steps:
            curve.append(Point(step, bits(model, text.watched)))
    return Learned(model, curve, time.process_time() - began)


def bits(model: Model, letters: Tensor) -> float:
    """Return the bits per letter; each letter is predicted from those before it in its stretch."""
    some = letters.unfold(0, LENGTH + 1, LENGTH)
    with torch.no_grad():
        loss = cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
    return loss.item() / math.log(2)


def attended(model: Model, held: Tensor) -> float:
    """Return the effective number of attended letters: the mean of e^entropy."""
    with torch.no_grad():
        alpha = model.weights(held.unfold(0, LENGTH, LENGTH))
    return torch.special.entr(alpha).sum(-1).exp().mean().item()


def draw_curves(learned: dict[str, Learned]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for (kind, found), colour in zip(learned.items(), COLOURS, strict=True):
        steps, values = zip(*found.curve, strict=True)
        seconds = [found.seconds * step / steps[-1] for step in steps]
        for panel, along in ((by_step, steps), (by_time, seconds)):
            panel.plot(along, values, label=kind, color=colour, linewidth=1.5)
    by_step.set_xlabel("step", fontsize=9)
    by_time.set_xlabel("CPU seconds", fontsize=9)
    by_step.set_title("bits per letter of the watched lines", fontsize=10, loc="left")
    by_time.legend(frameon=False, fontsize=9)
    for panel in (by_step, by_time):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure


def draw_heads(learned: dict[str, Learned], text: Text) -> Any:
    from qkv.plot import heatmaps

    line = text.line[:SHOWN].rpartition(" ")[0]
    with torch.no_grad():
        x = read(line, text.letters)[None]
        weights = [found.model.weights(x)[0] for found in learned.values()]
    words = ["␣" if letter == " " else letter for letter in line]
    return heatmaps(
        torch.stack(weights).flatten(1, 2),
        xlabel="looked at",
        ylabel="letter",
        titles=[
            [f"{kind}: layer {i}, head {j}" for i in range(LAYERS) for j in range(HEADS)]
            for kind in learned
        ],
        figsize=(3.1, 3.1),
        xticks=words,
        yticks=words,
    )


def save(figure: Any, path: Path) -> None:
    """Write the figure to a file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(part, dpi=160, bbox_inches="tight", format="png")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {path}")


def run(steps: int, out: Path) -> dict[str, float]:
    """Train, test, print and plot; return the bits per test letter of each model."""
    from rich.console import Console
    from rich.progress import Progress

    given = text()
    print(f"{len(given.learned):,} letters to learn from, {len(given.held):,} held out\n")
    print(f"{'heads':<12}{'parameters':>12}{'bits':>8}{'attended':>10}{'CPU seconds':>14}")
    learned, needed = {}, {}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        for kind in KINDS:
            bar = bars.add_task(kind, total=steps)
            found = learn(kind, given, steps, progress=lambda i, b=bar: bars.update(b, completed=i))
            bars.remove_task(bar)
            learned[kind] = found
            size = sum(weight.numel() for weight in found.model.parameters())
            needed[kind] = bits(found.model, given.held)
            measures = f"{needed[kind]:>8.3f}{attended(found.model, given.held):>10.1f}"
            print(f"{kind:<12}{size:>12,}{measures}{found.seconds:>14.0f}", flush=True)
    for kind, found in learned.items():
        with torch.inference_mode():
            written = found.model.write(read("\nThe ", given.letters), LENGTH - 5)
        print(f"\n{kind} writes:")
        for line in "".join(given.letters[i] for i in written.tolist()).strip().splitlines():
            print(f"    {line}")
    print()
    save(draw_curves(learned), out / "curves.png")
    save(draw_heads(learned, given), out / "heads.png")
    return needed


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="for each kind of heads")
    parser.add_argument("--out", type=Path, default=Path("build/examples/letters"), metavar="DIR")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be above 0, not {options.steps}")
    if find_spec("matplotlib") is None:
        sys.exit('letters draws with matplotlib: pip install "qkv[plot]"')
    try:
        run(options.steps, options.out)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except QkvError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
