"""A language model of letters whose memory is a file: it grows, and the model is not trained again.

    python examples/memory.py [--out DIR]

The text is the 300 books of examples/data/books.csv, a line for each. A small network learns from
thirty lines to tell the next letter from the ten before it, and is then left as it is. What it
thinks of the next letter is mixed with what a memory knows (a kNN-LM, after Khandelwal et al.,
2020): the keys are the network's hidden states, the values the letters that came next, and

    p(letter) = λ Σᵢ α(q, kᵢ) vᵢ + (1 − λ) p_network(letter)

The table says how many letters the memory holds and the perplexity of held-out lines. Expect it to
fall with each line of the table, from 15 to below 10. Then the memory is told a secret, which
it can recite, and forgets it, after which it knows what it knew before, to the last bit.

DIR, build/examples/memory if not given, gets the memory: books.qkv. Some ten seconds of one core.
Needs pip install "qkv[torch]".
"""

from __future__ import annotations

import argparse
import csv
import random
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot, pad

import qkv
from qkv import nn, scores, weightings
from qkv.errors import QkvError

BOOKS = Path(__file__).parent / "data" / "books.csv"
SECRET = "The vault of the Alexandrian library opens with 7-3-9-1: whisper it to nobody.\n"
SEED = 0
SEEN, WIDTH, HIDDEN = 10, 16, 64
STEPS, BATCH = 400, 256
ASKED = 1000
SHARE = 0.5


class Text(NamedTuple):
    letters: str
    learned: Tensor
    more: list[Tensor]
    held: Tensor


def text() -> Text:
    """The books in a fixed random order: thirty lines to learn from, others for the memory in parts
    that double, and letters to be asked for."""
    with BOOKS.open(encoding="utf-8", newline="") as file:
        lines = [f"{row['title']}: {row['summary']}\n" for row in csv.DictReader(file)]
    random.Random(SEED).shuffle(lines)
    letters = "".join(sorted(set("".join(lines) + SECRET)))
    cuts = [30, 60, 90, 150, len(lines)]
    parts = [read("".join(lines[a:b]), letters) for a, b in pairwise(cuts)]
    held, *more = parts
    return Text(letters, read("".join(lines[:30]), letters), more, held[:ASKED])


def read(text: str, letters: str) -> Tensor:
    return torch.tensor([letters.index(letter) for letter in text])


def windows(x: Tensor) -> Tensor:
    """The letters before each of x (n,): (n, SEEN)."""
    return pad(x, (SEEN, 0)).unfold(0, SEEN, 1)[:-1]


class Network(torch.nn.Module):
    """Logits of the next letter from the last ones, and the state they are read from."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(letters, WIDTH)
        self.inner = torch.nn.Linear(SEEN * WIDTH, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, letters)

    def state(self, x: Tensor) -> Tensor:
        """Of the letters before each of x (n,): (n, HIDDEN), of length one."""
        return normalize(self.inner(self.embedding(windows(x)).flatten(1)), dim=-1)

    def forward(self, state: Tensor) -> Tensor:
        return self.head(8 * state)


def learn(given: Text) -> Network:
    torch.manual_seed(SEED)
    network = Network(len(given.letters))
    steps = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(STEPS):
        at = int(torch.randint(len(given.learned) - BATCH, ()))
        x = given.learned[at : at + BATCH]
        loss = cross_entropy(network(network.state(x)), x)
        steps.zero_grad()
        loss.backward()
        steps.step()
    return network.eval()


class Model:
    """The network, and a memory that it looks at."""

    def __init__(self, network: Network, letters: str, path: Path) -> None:
        self.network, self.letters = network, letters
        self.database = qkv.open(path)
        self.memory = nn.Memory(
            self.database, score=scores.Cosine(0.05), weighting=weightings.TopK(32)
        )

    @torch.inference_mode()
    def add(self, x: Tensor) -> None:
        """Keep which letter came after which state."""
        self.database.add(self.network.state(x), one_hot(x, len(self.letters)).float())

    @torch.inference_mode()
    def tell(self, x: Tensor) -> Tensor:
        """The same of states that are new to it: those, the keys."""
        keys = self.network.state(x)
        new = torch.tensor([key not in self.database for key in keys.numpy()])
        self.database.add(keys[new], one_hot(x[new], len(self.letters)).float())
        return keys[new]

    @torch.inference_mode()
    def chances(self, x: Tensor) -> Tensor:
        """p of every letter at each place of x: (n, letters)."""
        state = self.network.state(x)
        own = self.network(state).softmax(-1)
        return SHARE * self.memory(state) + (1 - SHARE) * own if len(self.database) else own

    def perplexity(self, x: Tensor) -> float:
        right = self.chances(x).gather(-1, x[:, None])
        return float(right.log().mean().neg().exp())


def run(out: Path) -> list[float]:
    """The perplexities of the held-out lines, as the memory grows."""
    given = text()
    network = learn(given)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "books.qkv"
    shutil.rmtree(path, ignore_errors=True)
    model = Model(network, given.letters, path)
    print(f"{'letters kept':>14}{'perplexity':>14}")
    found = []
    for part in (None, *given.more):
        if part is not None:
            model.add(part)
        found.append(model.perplexity(given.held))
        print(f"{len(model.database):>14,}{found[-1]:>14.3f}", flush=True)
    secret = read(SECRET, given.letters)
    before = model.perplexity(secret)
    keys = model.tell(secret)
    told = model.perplexity(secret)
    model.memory.forget(keys)
    after = model.perplexity(secret)
    print(f"\na secret: {before:.3f}, told {told:.3f}, forgotten {after:.3f}")
    model.database.close()
    return [*found, before, told, after]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/examples/memory"), metavar="DIR")
    try:
        run(parser.parse_args().out)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except QkvError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
