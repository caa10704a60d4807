"""Steps down the gradient: batches and their candidates, Adam, and the epoch that did best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qkv.arrays.ragged import Ragged
from qkv.bar import bar
from qkv.database.encoders.learned import (
    Bag,
    Input,
    Learned,
    Projected,
    has_tokens,
    is_sparse,
    leaves,
    table_of,
    words_of,
)
from qkv.database.encoders.text import least, surprise
from qkv.database.learn import checkpoint
from qkv.database.learn.gradients import Batch, Shared, gradients, shared
from qkv.database.learn.task import BLOCK, Pairs, Task, blocks, taken
from qkv.errors import ArgumentError
from qkv.types import Progress

ALL = 4096
"""Keys up to which every one is a candidate for every query: α is then the very weight."""

SHORTEST = 20
"""Steps of an epoch, at least: a few pairs are passed over several times."""

ENOUGH = 1e-6
"""−ln α of the right keys below which they are told apart."""

WARM = 100
MINED = 16384
"""Keys, drawn anew each time, among which hard negatives are sought."""

MINE_FROM, MINE_EVERY = 2, 3
HARDEST = 8


@dataclass(frozen=True)
class Training:
    """What was asked of learning, checked."""

    epochs: int
    vectors: bool
    batch: int
    rate: float
    hard: int
    dropout: float
    patience: int
    budget_s: float | None
    seed: int

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch", 1), ("hard", 0), ("patience", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ArgumentError(
                    f"learn: {name} must be a whole number from {low}, not {value!r}"
                )
        if not 0 < self.rate < math.inf:
            raise ArgumentError(f"learn: rate must be above 0, not {self.rate!r}")
        if not 0 <= self.dropout < 1:
            raise ArgumentError(f"learn: dropout must be from 0 to below 1, not {self.dropout!r}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ArgumentError(f"learn: budget_s must be above 0 seconds, not {self.budget_s!r}")


@dataclass
class Descent:
    """One descent on a task: the parameters now and at their best, and Adam's two means of each."""

    task: Task
    how: Training
    start: Learned
    began: float
    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_epoch: int = 0
    best_mark: tuple[float, float] = (-math.inf, -math.inf)
    interrupted: bool = False

    def __post_init__(self) -> None:
        task, how = self.task, self.how
        self.now = {name: array.copy() for name, array in self.start.parameters.items()}
        self.best: Mapping[str, np.ndarray] = self.start.parameters
        self.first = {name: np.zeros_like(array) for name, array in self.now.items()}
        self.second = {name: np.zeros_like(array) for name, array in self.now.items()}
        self.rates = {name: self._rate(name) for name in self.now}
        self.hard: np.ndarray | None = None
        self.whole = np.arange(len(task.keys)) if len(task.keys) <= ALL else None
        self.right_too = task.train.others()
        heads = [head for head, _ in leaves(self.start.base)]
        self.tables = {i: table_of(head) for i, head in enumerate(heads) if has_tokens(head)}
        self.words = {i: words_of(head) for i, head in enumerate(heads) if is_sparse(head)}
        count = len(task.train.query)
        self.size = min(how.batch, count)
        self.passes = -(-SHORTEST // max(1, count // self.size))
        self.steps_an_epoch = self.passes * max(1, count // self.size)

    def _rate(self, name: str) -> float:
        last = name.rpartition(".")[2]
        if last == "vectors":
            return self.how.rate * float(np.linalg.norm(self.now[name], axis=1).mean())
        faster = {"logits": 10.0, "places": 10.0, "words": 10.0, "scales": 3.0}
        return self.how.rate * faster.get(last, 1.0)

    def learned(self, parameters: Mapping[str, np.ndarray]) -> Learned:
        return replace(self.start, parameters=parameters)

    def seconds(self) -> float:
        """Since it began, those before it was resumed among them."""
        return time.perf_counter() - self.began

    def descend(self, path: Path | None, progress: Progress | None) -> str:
        """Step down until it is time to stop; says why it stopped."""
        how, total = self.how, self.how.epochs * self.steps_an_epoch
        # A wrong τ would cost the first epochs.
        learned = self.learned(self.now)
        key = self.task.vectors(learned, "key")
        factor, _ = sharpness(self.task, learned, key, self.task.train, how.seed)
        self.now["scales"] += np.float32(math.log(factor))
        self.best = {name: array.copy() for name, array in self.now.items()}
        if self.task.holds_out:
            self.best_mark = self.mark()
        if path is not None and path.exists():
            checkpoint.load(self, path)
        with nullcontext(progress) if progress else bar("learning", total) as report:
            try:
                while self.epoch < how.epochs:
                    if self.epoch - self.best_epoch >= how.patience:
                        return f"no better for {how.patience} epochs"
                    in_time = self.one_epoch(report)
                    if path is not None:
                        checkpoint.save(self, path)
                    if not in_time:
                        return f"the {how.budget_s:g} s were over"
            except KeyboardInterrupt:
                if not self.best_epoch:  # nothing was learned that could be kept
                    raise
                self.interrupted = True
                return f"interrupted in epoch {self.epoch + 1}: the best so far was kept"
        return "all epochs done"

    def one_epoch(self, report: Progress) -> bool:
        how, task = self.how, self.task
        rng = np.random.default_rng([how.seed, 2, self.epoch])
        since = self.epoch - MINE_FROM
        if how.hard and self.whole is None and since >= 0 and since % MINE_EVERY == 0:
            self.mine(rng)
        losses: list[float] = []
        in_time = True
        count = len(task.train.query)
        for _ in range(self.passes):
            order = rng.permutation(count)
            for begin in range(0, count - self.size + 1, self.size):
                in_time = how.budget_s is None or self.seconds() < how.budget_s
                if in_time:
                    losses.append(self.one_step(order[begin : begin + self.size], rng))
                    report(self.step, how.epochs * self.steps_an_epoch)
        self.epoch += 1
        self.losses.append(float(np.mean(losses)) if losses else math.nan)
        mark = self.mark() if task.holds_out else (-self.losses[-1], 0.0)
        if mark > self.best_mark:
            best = {name: array.copy() for name, array in self.now.items()}
            # Together: after Ctrl-C in between, the mark would be of other weights.
            self.best, self.best_mark, self.best_epoch = best, mark, self.epoch
        return in_time

    def one_step(self, some: np.ndarray, rng: np.random.Generator) -> float:
        batch, local, rows = self.batch(some, rng)
        loss, found = gradients(local, batch)
        total = self.how.epochs * self.steps_an_epoch
        factor = min(1.0, (self.step + 1) / min(WARM, max(1, total // 10)))
        factor *= max(0.02, 1 - self.step / total)
        self.step += 1
        for name in self.now:
            self.adam(name, found[name], rows.get(name, slice(None)), factor * self.rates[name])
        return loss

    def adam(self, name: str, slope: np.ndarray, rows: Any, rate: float) -> None:
        """x ← x − rate · m̂/√v̂, for the rows that the batch saw; the others rest."""
        keep, keep2 = 0.9, 0.99
        m, v = self.first[name][rows], self.second[name][rows]
        m += (1 - keep) * (slope - m)
        v += (1 - keep2) * (slope * slope - v)
        self.first[name][rows], self.second[name][rows] = m, v
        unbias = math.sqrt(1 - keep2**self.step) / (1 - keep**self.step)
        self.now[name][rows] -= (rate * unbias) * m / (np.sqrt(v) + 1e-12)

    def batch(
        self, some: np.ndarray, rng: np.random.Generator
    ) -> tuple[Batch, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The batch of these pairs, the parameters it needs, and which rows of theirs these are."""
        pairs = self.task.train.take(some)
        candidates = self.whole
        if candidates is None:
            parts = [pairs.key]
            if self.hard is not None:
                drawn = rng.integers(0, self.hard.shape[1], (len(some), self.how.hard))
                parts.append(np.take_along_axis(self.hard[some], drawn, axis=1).ravel())
            candidates = np.unique(np.concatenate(parts))
        right = np.searchsorted(candidates, pairs.key)
        found: list[list[Input]] = []
        local = {"scales": self.now["scales"]}
        rows: dict[str, np.ndarray] = {}
        for side, store, numbers in (
            ("query", self.task.query_features, pairs.query),
            ("key", self.task.key_features, candidates),
        ):
            inputs = taken(store, numbers)
            for i, (x, length) in enumerate(inputs):
                if isinstance(x, Ragged):
                    continue
                own = f"{i}.{side}."
                local[own + "w"] = self.now[own + "w"]
                if isinstance(x, Bag):
                    if self.how.dropout:
                        x = x.thin(rng.random(len(x.ids), np.float32) >= self.how.dropout)
                    seen, ids = np.unique(x.ids, return_inverse=True)
                    inputs[i] = Input(Bag(ids, x.offsets, x.places), length)
                    local[own + "places"] = self.now[own + "places"]
                    for name in ("logits", "vectors"):
                        whole = self.now.get(own + name)
                        rows[own + name] = seen
                        local[own + name] = (self.tables[i] if whole is None else whole)[seen]
            found.append(inputs)
        share = (pairs.weight / pairs.weight.sum()).astype(np.float32)
        barred = pairs.barred(self.right_too, candidates)
        query, key = found
        words: dict[int, Shared] = {}
        for i, codes in self.words.items():
            words[i], asked = shared(query[i], key[i], codes)
            rows[f"{i}.words"] = at = np.searchsorted(codes, asked)
            local[f"{i}.words"] = self.now[f"{i}.words"][at]
        return Batch(query, key, right, share, barred, self.start.cosines, words), local, rows

    def mine(self, rng: np.random.Generator) -> None:
        """For each pair the wrong keys of a sample that its query likes best."""
        task, learned = self.task, self.learned(self.now)
        # The best of each of so many parts of the sample is found faster than the best of all.
        parts = min(HARDEST, len(task.keys))
        count = min(MINED, len(task.keys)) // parts * parts
        sample = np.sort(rng.choice(len(task.keys), count, replace=False))
        begins = np.arange(0, count, count // parts)
        key = learned.project(taken(task.key_features, sample), "key")
        query = task.vectors(learned, "query")
        self.hard = np.empty((len(task.train.query), parts), np.int64)
        for some in blocks(len(self.hard), max(1, BLOCK // count)):
            pairs = task.train.take(some)
            s = query.take(pairs.query).scores(key)
            at = np.minimum(np.searchsorted(sample, pairs.key), count - 1)
            own = np.flatnonzero(sample[at] == pairs.key)
            s[own, at[own]] = -np.inf
            s[pairs.barred(self.right_too, sample)] = -np.inf
            best = s.reshape(len(s), parts, -1).argmax(axis=2)
            self.hard[some] = sample[begins + best]

    def mark(self) -> tuple[float, float]:
        """How well the held-out part does: the mean of 1/rank, then of ln α at its best τ."""
        learned, task = self.learned(self.now), self.task
        key = task.vectors(learned, "key")
        reciprocal = np.average(1 / (1.0 + task.ranks(learned, key)), weights=task.held.weight)
        return float(reciprocal), -sharpness(task, learned, key, task.held, self.how.seed)[1]

    def calibrated(self) -> Learned:
        """The best parameters, with the τ that suits what was held out."""
        learned = self.learned(self.best)
        if not self.task.holds_out:
            return learned
        key = self.task.vectors(learned, "key")
        factor, _ = sharpness(self.task, learned, key, self.task.held, self.how.seed)
        scales = learned.parameters["scales"] + np.float32(math.log(factor))
        return self.learned({**learned.parameters, "scales": scales})

    def fingerprint(self) -> str:
        how = replace(self.how, budget_s=None)
        return f"{self.task.fingerprint} {how}"


def sharpness(
    task: Task, learned: Learned, key: Projected, pairs: Pairs, seed: int
) -> tuple[float, float]:
    """The factor on τ that makes −ln α(query, right key) least over all keys, and that −ln α.

    `key` are the vectors of all keys. Where there are many pairs, some of them tell enough.
    """
    count = min(len(pairs.query), max(16, BLOCK // 4 // len(task.keys)))
    some = np.random.default_rng([seed, 3]).permutation(len(pairs.query))[:count]
    pairs = pairs.take(some)
    query = learned.project(taken(task.query_features, pairs.query), "query")
    s = query.scores(key) * np.float32(learned.sharpness)
    s -= s[np.arange(len(s)), pairs.key][:, None]
    s[pairs.barred(task.others, task.numbers)] = -np.inf
    loss = partial(surprise, s, pairs.weight / pairs.weight.sum())
    # Keys that are told apart gain nothing, and would be sharper without end.
    factor = least(loss, -3.0, 3.0) if loss(1.0) > ENOUGH else 1.0
    return factor, loss(factor)
