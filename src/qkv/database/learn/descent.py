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

from qkv.database.encoders.learned import (
    HeadInput,
    Learned,
    ProjectedVectors,
    TokenBag,
    has_tokens,
    is_sparse,
    leaf_heads,
    token_table,
    word_places,
)
from qkv.database.encoders.text import mean_log_loss, minimize_log_scale
from qkv.database.learn import checkpoint
from qkv.database.learn.gradients import (
    SharedWords,
    TrainingBatch,
    compute_gradients,
    find_shared_words,
)
from qkv.database.learn.task import SCORES_PER_BLOCK, IndexedPairs, Task, split_blocks, take_inputs
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import Ragged
from qkv.util.progress import progress_bar
from qkv.util.types import ProgressCallback

MAX_FULL_CANDIDATES = 4096
"""Keys up to which every one is a candidate for every query: α is then the very weight."""

MIN_STEPS_PER_EPOCH = 20
"""Steps of an epoch, at least: a few pairs are passed over several times."""

MIN_LOSS = 1e-6
"""−ln α of the right keys below which they are told apart."""

WARMUP_STEPS = 100
MINING_SAMPLE_KEYS = 16384
"""Keys, drawn anew each time, among which hard negatives are sought."""

FIRST_MINING_EPOCH, EPOCHS_PER_MINING = 2, 3
HARD_NEGATIVES_PER_PAIR = 8


@dataclass(frozen=True)
class TrainingOptions:
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
class GradientDescent:
    """One descent on a task: the parameters now and at their best, and Adam's two means of each."""

    task: Task
    options: TrainingOptions
    initial: Learned
    start_time: float
    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_epoch: int = 0
    best_metrics: tuple[float, float] = (-math.inf, -math.inf)
    interrupted: bool = False

    def __post_init__(self) -> None:
        task, how = self.task, self.options
        self.parameters = {name: array.copy() for name, array in self.initial.parameters.items()}
        self.best_parameters: Mapping[str, np.ndarray] = self.initial.parameters
        self.first_moments = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        self.second_moments = {
            name: np.zeros_like(array) for name, array in self.parameters.items()
        }
        self.learning_rates = {name: self._learning_rate(name) for name in self.parameters}
        self.hard_negatives: np.ndarray | None = None
        self.all_candidates = (
            np.arange(len(task.keys)) if len(task.keys) <= MAX_FULL_CANDIDATES else None
        )
        self.other_right_keys = task.train_pairs.find_other_right_keys()
        heads = [head for head, _ in leaf_heads(self.initial.base)]
        self.tables = {i: token_table(head) for i, head in enumerate(heads) if has_tokens(head)}
        self.words = {i: word_places(head) for i, head in enumerate(heads) if is_sparse(head)}
        count = len(task.train_pairs.query)
        self.batch_size = min(how.batch, count)
        self.passes_per_epoch = -(-MIN_STEPS_PER_EPOCH // max(1, count // self.batch_size))
        self.steps_per_epoch = self.passes_per_epoch * max(1, count // self.batch_size)

    def _learning_rate(self, name: str) -> float:
        last = name.rpartition(".")[2]
        if last == "vectors":
            return self.options.rate * float(np.linalg.norm(self.parameters[name], axis=1).mean())
        faster = {"logits": 10.0, "places": 10.0, "words": 10.0, "scales": 3.0}
        return self.options.rate * faster.get(last, 1.0)

    def build_encoder(self, parameters: Mapping[str, np.ndarray]) -> Learned:
        return replace(self.initial, parameters=parameters)

    def elapsed_seconds(self) -> float:
        """Since it began, those before it was resumed among them."""
        return time.perf_counter() - self.start_time

    def run_epochs(self, path: Path | None, progress: ProgressCallback | None) -> str:
        """Step down until it is time to stop; says why it stopped."""
        how, total = self.options, self.options.epochs * self.steps_per_epoch
        # A wrong τ would cost the first epochs.
        learned = self.build_encoder(self.parameters)
        key = self.task.project_all(learned, "key")
        factor, _ = fit_sharpness(self.task, learned, key, self.task.train_pairs, how.seed)
        self.parameters["scales"] += np.float32(math.log(factor))
        self.best_parameters = {name: array.copy() for name, array in self.parameters.items()}
        if self.task.holds_out:
            self.best_metrics = self.evaluate_held_out()
        if path is not None and path.exists():
            checkpoint.load_checkpoint(self, path)
        with nullcontext(progress) if progress else progress_bar("learning", total) as report:
            try:
                while self.epoch < how.epochs:
                    if self.epoch - self.best_epoch >= how.patience:
                        return f"no better for {how.patience} epochs"
                    in_time = self.run_epoch(report)
                    if path is not None:
                        checkpoint.save_checkpoint(self, path)
                    if not in_time:
                        return f"the {how.budget_s:g} s were over"
            except KeyboardInterrupt:
                if not self.best_epoch:  # nothing was learned that could be kept
                    raise
                self.interrupted = True
                return f"interrupted in epoch {self.epoch + 1}: the best so far was kept"
        return "all epochs done"

    def run_epoch(self, report: ProgressCallback) -> bool:
        how, task = self.options, self.task
        rng = np.random.default_rng([how.seed, 2, self.epoch])
        since = self.epoch - FIRST_MINING_EPOCH
        if (
            how.hard
            and self.all_candidates is None
            and since >= 0
            and since % EPOCHS_PER_MINING == 0
        ):
            self.mine_hard_negatives(rng)
        losses: list[float] = []
        in_time = True
        count = len(task.train_pairs.query)
        for _ in range(self.passes_per_epoch):
            order = rng.permutation(count)
            for begin in range(0, count - self.batch_size + 1, self.batch_size):
                in_time = how.budget_s is None or self.elapsed_seconds() < how.budget_s
                if in_time:
                    losses.append(self.run_step(order[begin : begin + self.batch_size], rng))
                    report(self.step, how.epochs * self.steps_per_epoch)
        self.epoch += 1
        self.losses.append(float(np.mean(losses)) if losses else math.nan)
        mark = self.evaluate_held_out() if task.holds_out else (-self.losses[-1], 0.0)
        if mark > self.best_metrics:
            best = {name: array.copy() for name, array in self.parameters.items()}
            # Together: after Ctrl-C in between, the mark would be of other weights.
            self.best_parameters, self.best_metrics, self.best_epoch = best, mark, self.epoch
        return in_time

    def run_step(self, some: np.ndarray, rng: np.random.Generator) -> float:
        batch, local, rows = self.build_batch(some, rng)
        loss, found = compute_gradients(local, batch)
        total = self.options.epochs * self.steps_per_epoch
        factor = min(1.0, (self.step + 1) / min(WARMUP_STEPS, max(1, total // 10)))
        factor *= max(0.02, 1 - self.step / total)
        self.step += 1
        for name in self.parameters:
            self.update_adam(
                name, found[name], rows.get(name, slice(None)), factor * self.learning_rates[name]
            )
        return loss

    def update_adam(self, name: str, slope: np.ndarray, rows: Any, rate: float) -> None:
        """x ← x − rate · m̂/√v̂, for the rows that the batch saw; the others rest."""
        keep, keep2 = 0.9, 0.99
        m, v = self.first_moments[name][rows], self.second_moments[name][rows]
        m += (1 - keep) * (slope - m)
        v += (1 - keep2) * (slope * slope - v)
        self.first_moments[name][rows], self.second_moments[name][rows] = m, v
        unbias = math.sqrt(1 - keep2**self.step) / (1 - keep**self.step)
        self.parameters[name][rows] -= (rate * unbias) * m / (np.sqrt(v) + 1e-12)

    def build_batch(
        self, some: np.ndarray, rng: np.random.Generator
    ) -> tuple[TrainingBatch, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The batch of these pairs, the parameters it needs, and which rows of theirs these are."""
        pairs = self.task.train_pairs.take_pairs(some)
        candidates = self.all_candidates
        if candidates is None:
            parts = [pairs.key]
            if self.hard_negatives is not None:
                drawn = rng.integers(
                    0, self.hard_negatives.shape[1], (len(some), self.options.hard)
                )
                parts.append(np.take_along_axis(self.hard_negatives[some], drawn, axis=1).ravel())
            candidates = np.unique(np.concatenate(parts))
        right = np.searchsorted(candidates, pairs.key)
        found: list[list[HeadInput]] = []
        local = {"scales": self.parameters["scales"]}
        rows: dict[str, np.ndarray] = {}
        for side, store, numbers in (
            ("query", self.task.query_features, pairs.query),
            ("key", self.task.key_features, candidates),
        ):
            inputs = take_inputs(store, numbers)
            for i, (x, length) in enumerate(inputs):
                if isinstance(x, Ragged):
                    continue
                own = f"{i}.{side}."
                local[own + "w"] = self.parameters[own + "w"]
                if isinstance(x, TokenBag):
                    if self.options.dropout:
                        x = x.drop_tokens(
                            rng.random(len(x.ids), np.float32) >= self.options.dropout
                        )
                    seen, ids = np.unique(x.ids, return_inverse=True)
                    inputs[i] = HeadInput(TokenBag(ids, x.offsets, x.positions), length)
                    local[own + "places"] = self.parameters[own + "places"]
                    for name in ("logits", "vectors"):
                        whole = self.parameters.get(own + name)
                        rows[own + name] = seen
                        local[own + name] = (self.tables[i] if whole is None else whole)[seen]
            found.append(inputs)
        share = (pairs.weight / pairs.weight.sum()).astype(np.float32)
        barred = pairs.find_excluded_cells(self.other_right_keys, candidates)
        query, key = found
        words: dict[int, SharedWords] = {}
        for i, codes in self.words.items():
            words[i], asked = find_shared_words(query[i], key[i], codes)
            rows[f"{i}.words"] = at = np.searchsorted(codes, asked)
            local[f"{i}.words"] = self.parameters[f"{i}.words"][at]
        return (
            TrainingBatch(query, key, right, share, barred, self.initial.cosines, words),
            local,
            rows,
        )

    def mine_hard_negatives(self, rng: np.random.Generator) -> None:
        """For each pair the wrong keys of a sample that its query likes best."""
        task, learned = self.task, self.build_encoder(self.parameters)
        # The best of each of so many parts of the sample is found faster than the best of all.
        parts = min(HARD_NEGATIVES_PER_PAIR, len(task.keys))
        count = min(MINING_SAMPLE_KEYS, len(task.keys)) // parts * parts
        sample = np.sort(rng.choice(len(task.keys), count, replace=False))
        begins = np.arange(0, count, count // parts)
        key = learned.project_inputs(take_inputs(task.key_features, sample), "key")
        query = task.project_all(learned, "query")
        self.hard_negatives = np.empty((len(task.train_pairs.query), parts), np.int64)
        for some in split_blocks(len(self.hard_negatives), max(1, SCORES_PER_BLOCK // count)):
            pairs = task.train_pairs.take_pairs(some)
            s = query.take_rows(pairs.query).compute_scores(key)
            at = np.minimum(np.searchsorted(sample, pairs.key), count - 1)
            own = np.flatnonzero(sample[at] == pairs.key)
            s[own, at[own]] = -np.inf
            s[pairs.find_excluded_cells(self.other_right_keys, sample)] = -np.inf
            best = s.reshape(len(s), parts, -1).argmax(axis=2)
            self.hard_negatives[some] = sample[begins + best]

    def evaluate_held_out(self) -> tuple[float, float]:
        """How well the held-out part does: the mean of 1/rank, then of ln α at its best τ."""
        learned, task = self.build_encoder(self.parameters), self.task
        key = task.project_all(learned, "key")
        reciprocal = np.average(
            1 / (1.0 + task.ranks_after(learned, key)), weights=task.held_pairs.weight
        )
        return float(reciprocal), -fit_sharpness(
            task, learned, key, task.held_pairs, self.options.seed
        )[1]

    def calibrate_best(self) -> Learned:
        """The best parameters, with the τ that suits what was held out."""
        learned = self.build_encoder(self.best_parameters)
        if not self.task.holds_out:
            return learned
        key = self.task.project_all(learned, "key")
        factor, _ = fit_sharpness(self.task, learned, key, self.task.held_pairs, self.options.seed)
        scales = learned.parameters["scales"] + np.float32(math.log(factor))
        return self.build_encoder({**learned.parameters, "scales": scales})

    def compute_fingerprint(self) -> str:
        how = replace(self.options, budget_s=None)
        return f"{self.task.fingerprint} {how}"


def fit_sharpness(
    task: Task, learned: Learned, key: ProjectedVectors, pairs: IndexedPairs, seed: int
) -> tuple[float, float]:
    """The factor on τ that makes −ln α(query, right key) least over all keys, and that −ln α.

    `key` are the vectors of all keys. Where there are many pairs, some of them tell enough.
    """
    count = min(len(pairs.query), max(16, SCORES_PER_BLOCK // 4 // len(task.keys)))
    some = np.random.default_rng([seed, 3]).permutation(len(pairs.query))[:count]
    pairs = pairs.take_pairs(some)
    query = learned.project_inputs(take_inputs(task.query_features, pairs.query), "query")
    s = query.compute_scores(key) * np.float32(learned.sharpness)
    s -= s[np.arange(len(s)), pairs.key][:, None]
    s[pairs.find_excluded_cells(task.other_right_keys, task.key_numbers)] = -np.inf
    loss = partial(mean_log_loss, s, pairs.weight / pairs.weight.sum())
    # Keys that are told apart gain nothing, and would be sharper without end.
    factor = minimize_log_scale(loss, -3.0, 3.0) if loss(1.0) > MIN_LOSS else 1.0
    return factor, loss(factor)
