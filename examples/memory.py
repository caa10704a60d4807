"""A language model of letters whose memory is a database on disk: it grows without training.

    python examples/memory.py [--out DIR]

The text is the 300 books of examples/data/books.csv, one line each. A small network learns from
thirty lines to predict the next letter from the ten before it, and then stays fixed. Its prediction
is mixed with that of a memory (a kNN-LM, Khandelwal et al., 2020). The keys of the memory are the
network's hidden states, and its values are the letters that followed:

    p(letter) = λ Σᵢ α(q, kᵢ) vᵢ + (1 − λ) p_network(letter)

The table shows the number of letters in the memory and the perplexity of test lines. Expect it to
fall from 15 to below 10. Then a secret is added to the memory, recited and removed; afterwards the
predictions are exactly those from before.

The script writes the memory, books.qkv, to DIR, by default build/examples/memory. It takes about
ten seconds on one core. Needs pip install "qkv[torch]".
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
    """Return the text in a fixed random order: thirty lines for training, lines for the memory in
    parts that double, and test letters.
    """
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
    """Return the letters before each of x (n,), as (n, SEEN)."""
    return pad(x, (SEEN, 0)).unfold(0, SEEN, 1)[:-1]


class Network(torch.nn.Module):
    """Logits of the next letter, and the hidden state that they are computed from."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(letters, WIDTH)
        self.inner = torch.nn.Linear(SEEN * WIDTH, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, letters)

    def state(self, x: Tensor) -> Tensor:
        """Return the hidden states before each of x (n,), as unit vectors (n, HIDDEN)."""
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
    """The network and its memory."""

    def __init__(self, network: Network, letters: str, path: Path) -> None:
        self.network, self.letters = network, letters
        self.database = qkv.open(path)
        self.memory = nn.Memory(
            self.database, score=scores.Cosine(0.05), weighting=weightings.TopK(32)
        )

    @torch.inference_mode()
    def add(self, x: Tensor) -> None:
        """Store which letter followed which state."""
        self.database.add(self.network.state(x), one_hot(x, len(self.letters)).float())

    @torch.inference_mode()
    def tell(self, x: Tensor) -> Tensor:
        """Store the letters after states that are not in the memory yet; return these states."""
        keys = self.network.state(x)
        new = torch.tensor([key not in self.database for key in keys.numpy()])
        self.database.add(keys[new], one_hot(x[new], len(self.letters)).float())
        return keys[new]

    @torch.inference_mode()
    def chances(self, x: Tensor) -> Tensor:
        """Return p of every letter at each position of x, (n, letters)."""
        state = self.network.state(x)
        own = self.network(state).softmax(-1)
        return SHARE * self.memory(state) + (1 - SHARE) * own if len(self.database) else own

    def perplexity(self, x: Tensor) -> float:
        right = self.chances(x).gather(-1, x[:, None])
        return float(right.log().mean().neg().exp())


def run(out: Path) -> list[float]:
    """Return the perplexities of the test lines as the memory grows."""
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
    learned = model.perplexity(secret)
    model.memory.forget(keys)
    after = model.perplexity(secret)
    print(f"\na secret: {before:.3f}, learned {learned:.3f}, forgotten {after:.3f}")
    model.database.close()
    return [*found, before, learned, after]


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
