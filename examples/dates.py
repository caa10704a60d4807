"""Translate dates as people write them to ISO: "March 3, 2021" → "2021-03-03".

    python examples/dates.py [--steps 600] [--out DIR]

Two models learn the task letter by letter, from generated dates in some twenty forms. One is the
model of Bahdanau et al.: a bidirectional GRU encoder, and a decoder with additive attention. The
other is the Transformer, which decodes with a cache of keys and values. Both are tested on 2,000
days that were not in the training set in any form. Expect more than 99 % exact matches, after a
minute or two on one core for each model.

The script writes the learning curves (curves.png) and the attention weights for every output letter
(alignment.png) to DIR, by default build/examples/dates. Needs pip install "qkv[torch,plot]".
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv import nn
from qkv.errors import QkvError

Tensor = torch.Tensor

SEED = 0
TESTED, WATCHED = 2000, 500
BATCH = 128
STEPS = 600
SHOWN = date(2021, 3, 3), "{weekday}, {d}{th} of {month} {y}"

# A hundred years, so that two digits mean one year: '21 is 2021 and '87 is 1987.
FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)
MONTHS = [
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FORMS = [
    "{month} {d}, {y}",
    "{month} {d}{th}, {y}",
    "{mon} {d}, {y}",
    "{mon}. {d}, '{yy}",
    "{d} {month} {y}",
    "{d} {mon} {y}",
    "{d} {mon} '{yy}",
    "{d}. {month} {y}",
    "{dd}-{mon}-{yy}",
    "{d}{th} of {month} {y}",
    "the {d}{th} of {month}, {y}",
    "{weekday}, {month} {d}, {y}",
    "{weekday}, {d}{th} of {month} {y}",
    "{day}, {dd} {mon} {y}",
    "{day} {mon} {d} {y}",
    "{y} {month} {d}",
    "{y}, {mon} {d}",
    "{y}/{mm}/{dd}",
    "{y}.{m}.{d}",
]
# Only if the day cannot be mistaken for the month.
NUMBERS = ["{mm}/{dd}/{yy}", "{dd}/{mm}/{yy}", "{m}/{d}/{y}", "{d}.{m}.{y}"]


def write(day: date, form: str) -> str:
    """
    >>> write(date(2021, 3, 3), "{weekday}, {d}{th} of {month} {y}")
    'Wednesday, 3rd of March 2021'
    """
    month, weekday = MONTHS[day.month - 1], WEEKDAYS[day.weekday()]
    teen = 10 < day.day < 20
    return form.format(
        y=day.year,
        yy=f"{day.year % 100:02d}",
        m=day.month,
        mm=f"{day.month:02d}",
        month=month,
        mon=month[:3],
        d=day.day,
        dd=f"{day.day:02d}",
        th="th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th"),
        weekday=weekday,
        day=weekday[:3],
    )


def forms(day: date) -> list[str]:
    """Return the forms in which this day can be read in only one way."""
    return FORMS + NUMBERS if day.day > 12 or day.day == day.month else FORMS


def pair(day: date, chance: random.Random) -> tuple[str, str]:
    """Return a date as text in a random form, and its ISO form."""
    return write(day, chance.choice(forms(day))), day.isoformat()


class Split(NamedTuple):
    learned: list[date]
    watched: list[date]
    tested: list[date]


def split() -> Split:
    """Split all days into training, validation and test days."""
    days = [FIRST + timedelta(i) for i in range((LAST - FIRST).days + 1)]
    random.Random(SEED).shuffle(days)
    held = WATCHED + TESTED
    return Split(days[held:], days[:WATCHED], days[WATCHED:held])


# Letters are numbers from 1; 0 is padding, and the start symbol of an answer.
LETTERS = sorted(
    {letter for form in FORMS + NUMBERS for letter in form}
    | set("".join([*MONTHS, *WEEKDAYS, "0123456789", "stndrdth"]))
)
SIGNS = "0123456789-"
LENGTH = len("2021-03-03")


def read(texts: Sequence[str], letters: Sequence[str] = LETTERS) -> Tensor:
    """Return texts as numbers (B, m), padded to the longest."""
    place = {letter: i for i, letter in enumerate(letters, 1)}
    out = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = torch.tensor([place[letter] for letter in text])
    return out


def spell(numbers: Tensor) -> list[str]:
    return ["".join(" " if i == 0 else SIGNS[i - 1] for i in row) for row in numbers.tolist()]


def shifted(target: Tensor) -> Tensor:
    """Return the decoder's input: the target shifted right by one letter."""
    return torch.cat((torch.zeros_like(target[:, :1]), target[:, :-1]), 1)


class Bahdanau(torch.nn.Module):
    """hⱼ = [GRU→; GRU←](x); for each letter, the decoder's state attends to the h."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(LETTERS) + 1, width // 2)
        self.encoder = torch.nn.GRU(width // 2, width, batch_first=True, bidirectional=True)
        self.decoder = nn.BahdanauDecoder(len(SIGNS) + 1, 16, width, 2 * width)

    def encode(self, source: Tensor) -> Tensor:
        # Packed: the backward GRU starts at the end of each text, not at the padding.
        lengths = (source > 0).sum(1)
        packed = pack_padded_sequence(
            self.embedding(source), lengths, batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.encoder(packed)[0], batch_first=True)[0]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(shifted(target), self.encode(source), source == 0)[0]

    def translate(self, source: Tensor) -> Tensor:
        memory, state = self.encode(source), None
        found = [source.new_zeros(len(source), 1)]
        for _ in range(LENGTH):
            logits, state, _ = self.decoder(found[-1], memory, source == 0, state)
            found.append(logits.argmax(-1))
        return torch.cat(found[1:], 1)

    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return α (B, n, m)."""
        return self.decoder(shifted(target), self.encode(source), source == 0)[2]


class Transformer(torch.nn.Module):
    """The encoder-decoder with learned position embeddings."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(len(LETTERS) + 1, width)
        self.signs = torch.nn.Embedding(len(SIGNS) + 1, width)
        self.places = torch.nn.Embedding(64, width)
        block = {"dim_feedforward": 2 * width, "dropout": 0.0, "norm_first": True}
        self.model = nn.Transformer(width, heads, layers, layers, **block)
        self.head = torch.nn.Linear(width, len(SIGNS) + 1)

    def placed(self, x: Tensor, start: int = 0) -> Tensor:
        return x + self.places.weight[start : start + x.shape[1]]

    def encode(self, source: Tensor) -> Tensor:
        return self.model.encoder(self.placed(self.letters(source)), key_padding_mask=source == 0)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.model.decoder(
            self.placed(self.signs(shifted(target))),
            self.encode(source),
            memory_key_padding_mask=source == 0,
        )
        return self.head(x)

    def translate(self, source: Tensor) -> Tensor:
        memory, cache = self.encode(source), self.model.cache()
        found = [source.new_zeros(len(source), 1)]
        for i in range(LENGTH):
            x = self.placed(self.signs(found[-1]), i)
            x = self.model.decoder(x, memory, memory_key_padding_mask=source == 0, cache=cache)
            found.append(self.head(x).argmax(-1))
        return torch.cat(found[1:], 1)

    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return α (B, n, m) of the last block's cross-attention, averaged over heads."""
        with nn.capture(self.model.decoder.layers[-1]) as seen:
            self(source, target)
        return seen["multihead_attn"].mean(1)


Model = Bahdanau | Transformer
MODELS: dict[str, Callable[[], Model]] = {"Bahdanau": Bahdanau, "Transformer": Transformer}


class Point(NamedTuple):
    step: int
    loss: float
    right: float


class Learned(NamedTuple):
    model: Model
    curve: list[Point]
    seconds: float


def learn(
    build: Callable[[], Model],
    days: Split,
    steps: int,
    batch: int = BATCH,
    rate: float = 4e-3,
    progress: Callable[[int], None] = lambda step: None,
) -> Learned:
    """Train with Adam on fresh forms of the training days; validation days give the curve."""
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    model = build()
    adam = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(adam, rate, steps, pct_start=0.15)
    watched = [pair(day, chance) for day in days.watched]
    began, curve, losses = time.process_time(), [], []
    every = max(steps // 20, 1)
    for step in range(1, steps + 1):
        texts, answers = zip(
            *(pair(day, chance) for day in chance.choices(days.learned, k=batch)), strict=True
        )
        source, target = read(texts), read(answers, SIGNS)
        loss = cross_entropy(model(source, target).flatten(0, 1), target.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        plan.step()
        losses.append(loss.item())
        progress(step)
        if step % every == 0 or step == steps:
            curve.append(Point(step, sum(losses) / len(losses), right(model, watched)))
            losses = []
    return Learned(model, curve, time.process_time() - began)


def answers(model: Model, texts: Sequence[str]) -> list[str]:
    model.eval()
    found = []
    with torch.inference_mode():
        for some in chunks(texts, 250):
            found += spell(model.translate(read(some)))
    model.train()
    return found


def chunks(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def right(model: Model, pairs: Sequence[tuple[str, str]]) -> float:
    """Return the share of texts with an exactly right answer."""
    found = answers(model, [text for text, _ in pairs])
    hits = [given == wanted for given, (_, wanted) in zip(found, pairs, strict=True)]
    return sum(hits) / len(hits)


def draw_curves(learned: dict[str, Learned]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    for panel, what, name in zip(
        figure.subplots(1, 2),
        ("loss", "right"),
        ("loss per letter", f"wrong among {WATCHED} dates not learned from"),
        strict=True,
    ):
        for (model, found), colour in zip(learned.items(), ("#cb181d", "#2171b5"), strict=False):
            values = [getattr(point, what) for point in found.curve]
            if what == "right":
                # The axis is logarithmic: 0 errors are drawn as half a date.
                values = [max(1 - value, 0.5 / WATCHED) for value in values]
            steps = [point.step for point in found.curve]
            panel.plot(steps, values, label=model, color=colour, linewidth=1.5)
        panel.set_yscale("log")
        panel.set_xlabel("step", fontsize=9)
        panel.set_title(name, fontsize=10, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        if what == "right":
            panel.axhline(0.01, color="#999999", linewidth=0.8, linestyle=":")
            panel.yaxis.set_major_formatter(
                lambda value, _: f"{100 * value:g} %" if value > 0.6 / WATCHED else "none"
            )
        else:
            panel.legend(frameon=False, fontsize=9)
    return figure


def draw_alignment(learned: dict[str, Learned]) -> Any:
    from qkv.plot import heatmaps

    day, form = SHOWN
    text, answer = write(day, form), day.isoformat()
    with torch.no_grad():
        weights = [
            found.model.eval().alignment(read([text]), read([answer], SIGNS))[0]
            for found in learned.values()
        ]
    return heatmaps(
        weights,
        xlabel="read",
        ylabel="written",
        titles=list(learned),
        figsize=(5.4, 3.0),
        xticks=["␣" if letter == " " else letter for letter in text],
        yticks=list(answer),
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
    """Train, test, print and plot; return the exact match of each model on the test days."""
    from rich.console import Console
    from rich.progress import Progress

    days = split()
    chance = random.Random(SEED + 1)
    tested = [pair(day, chance) for day in days.tested]
    print(f"{len(days.learned):,} dates to learn from, {len(tested):,} others asked\n")
    print(f"{'model':<14}{'parameters':>12}{'exact match':>14}{'CPU seconds':>14}")
    learned, match = {}, {}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        for name, build in MODELS.items():
            bar = bars.add_task(name, total=steps)
            found = learn(build, days, steps, progress=lambda i, b=bar: bars.update(b, completed=i))
            bars.remove_task(bar)
            learned[name], match[name] = found, right(found.model, tested)
            size = sum(weight.numel() for weight in found.model.parameters())
            print(f"{name:<14}{size:>12,}{match[name]:>14.2%}{found.seconds:>14.0f}", flush=True)
    by_length = sorted((text for text, _ in tested), key=len)
    texts = [by_length[i] for i in (-1, len(by_length) // 2, 0)]
    said = {name: answers(found.model, texts) for name, found in learned.items()}
    for i, text in enumerate(texts):
        print(f"\n{text}")
        for name in said:
            print(f"    {said[name][i]}  {name}")
    print()
    save(draw_curves(learned), out / "curves.png")
    save(draw_alignment(learned), out / "alignment.png")
    return match


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="for each model")
    parser.add_argument("--out", type=Path, default=Path("build/examples/dates"), metavar="DIR")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be above 0, not {options.steps}")
    if find_spec("matplotlib") is None:
        sys.exit('dates draws with matplotlib: pip install "qkv[plot]"')
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
