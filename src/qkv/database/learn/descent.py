"""Gradient descent: batches and their candidates, Adam, the best epoch, and checkpoints."""

from __future__ import annotations

import json
import math
import os
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
from qkv.database.learn.gradients import (
    SharedWords,
    TrainingBatch,
    compute_gradients,
    find_shared_words,
)
from qkv.database.learn.task import (
    SCORES_PER_BLOCK,
    IndexedPairs,
    TrainingTask,
    split_blocks,
    take_inputs,
)
from qkv.errors import ArgumentError, QkvError
from qkv.frameworks.ragged import Ragged
from qkv.util.progress import progress_bar
from qkv.util.types import ProgressCallback

MAX_FULL_CANDIDATES = 4096
"""Up to this number of keys, all keys are candidates, so that α is exact."""

MIN_STEPS_PER_EPOCH = 20
"""An epoch has at least this number of steps.

If there are few pairs, it uses them several times.
"""

MIN_LOSS = 1e-6
"""If the loss −ln α is lower, the right keys count as separated from the others."""

WARMUP_STEPS = 100
MINING_SAMPLE_KEYS = 16384
"""The number of keys in the sample in which hard negatives are searched."""

FIRST_MINING_EPOCH, EPOCHS_PER_MINING = 2, 3
HARD_NEGATIVES_PER_PAIR = 8


class CheckpointError(QkvError, ValueError):
    """The checkpoint to resume from is damaged, or belongs to other keys, pairs or settings."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of `learn`, after a check."""

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
                    f"learn: {name} must be a whole number of at least {low}, not {value!r}"
                )
        if not 0 < self.rate < math.inf:
            raise ArgumentError(f"learn: rate must be above 0, not {self.rate!r}")
        if not 0 <= self.dropout < 1:
            raise ArgumentError(
                f"learn: dropout must be at least 0 and below 1, not {self.dropout!r}"
            )
        if self.budget_s is not None and not self.budget_s > 0:
            raise ArgumentError(f"learn: budget_s must be above 0 seconds, not {self.budget_s!r}")


@dataclass
class GradientDescent:
    """A training run: the current and the best parameters, and the moments of Adam."""

    task: TrainingTask
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
        task, options = self.task, self.options
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
        self.batch_size = min(options.batch, count)
        self.passes_per_epoch = -(-MIN_STEPS_PER_EPOCH // max(1, count // self.batch_size))
        self.steps_per_epoch = self.passes_per_epoch * max(1, count // self.batch_size)

    def _learning_rate(self, name: str) -> float:
        """Return the learning rate of a parameter."""
        last = name.rpartition(".")[2]
        if last == "vectors":
            return self.options.rate * float(np.linalg.norm(self.parameters[name], axis=1).mean())
        faster = {"logits": 10.0, "places": 10.0, "words": 10.0, "scales": 3.0}
        return self.options.rate * faster.get(last, 1.0)

    def build_encoder(self, parameters: Mapping[str, np.ndarray]) -> Learned:
        """Return the encoder with these parameters."""
        return replace(self.initial, parameters=parameters)

    def elapsed_seconds(self) -> float:
        """Return the training time so far in seconds, including the time before a resume."""
        return time.perf_counter() - self.start_time

    def run_epochs(self, path: Path | None, progress: ProgressCallback | None) -> str:
        """Train until a condition for the end is met; return that condition as text.

        If `path` is set, the state is read from and written to this file.
        """
        options, total = self.options, self.options.epochs * self.steps_per_epoch
        # Fit τ first: with a wrong τ, the first epochs would learn nothing useful.
        learned = self.build_encoder(self.parameters)
        key = self.task.project_all(learned, "key")
        factor, _ = fit_sharpness(self.task, learned, key, self.task.train_pairs, options.seed)
        self.parameters["scales"] += np.float32(math.log(factor))
        self.best_parameters = {name: array.copy() for name, array in self.parameters.items()}
        if self.task.holds_out:
            self.best_metrics = self.evaluate_held_out()
        if path is not None and path.exists():
            self.load_checkpoint(path)
        with nullcontext(progress) if progress else progress_bar("learning", total) as report:
            try:
                while self.epoch < options.epochs:
                    if self.epoch - self.best_epoch >= options.patience:
                        return f"no improvement for {options.patience} epochs"
                    in_time = self.run_epoch(report)
                    if path is not None:
                        self.save_checkpoint(path)
                    if not in_time:
                        return f"stopped after {options.budget_s:g} s"
            except KeyboardInterrupt:
                if not self.best_epoch:  # no epoch was better than the start
                    raise
                self.interrupted = True
                return f"interrupted in epoch {self.epoch + 1}: returned the best so far"
        return "all epochs done"

    def run_epoch(self, report: ProgressCallback) -> bool:
        """Train for one epoch. Return False if the time is over."""
        options, task = self.options, self.task
        rng = np.random.default_rng([options.seed, 2, self.epoch])
        since = self.epoch - FIRST_MINING_EPOCH
        if (
            options.hard
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
                in_time = options.budget_s is None or self.elapsed_seconds() < options.budget_s
                if in_time:
                    losses.append(self.run_step(order[begin : begin + self.batch_size], rng))
                    report(self.step, options.epochs * self.steps_per_epoch)
        self.epoch += 1
        self.losses.append(float(np.mean(losses)) if losses else math.nan)
        mark = self.evaluate_held_out() if task.holds_out else (-self.losses[-1], 0.0)
        if mark > self.best_metrics:
            best = {name: array.copy() for name, array in self.parameters.items()}
            # Assign all three in one statement, so that Ctrl-C cannot separate them.
            self.best_parameters, self.best_metrics, self.best_epoch = best, mark, self.epoch
        return in_time

    def run_step(self, pair_indices: np.ndarray, rng: np.random.Generator) -> float:
        """Make one step with the pairs at these indices; return the loss."""
        batch, local, rows = self.build_batch(pair_indices, rng)
        loss, gradients = compute_gradients(local, batch)
        total = self.options.epochs * self.steps_per_epoch
        factor = min(1.0, (self.step + 1) / min(WARMUP_STEPS, max(1, total // 10)))
        factor *= max(0.02, 1 - self.step / total)
        self.step += 1
        for name in self.parameters:
            self.update_adam(
                name,
                gradients[name],
                rows.get(name, slice(None)),
                factor * self.learning_rates[name],
            )
        return loss

    def update_adam(self, name: str, gradient: np.ndarray, rows: Any, rate: float) -> None:
        """Apply Adam's step x ← x − rate · m̂/√v̂ to the rows of a parameter in the batch."""
        beta1, beta2 = 0.9, 0.99
        m, v = self.first_moments[name][rows], self.second_moments[name][rows]
        m += (1 - beta1) * (gradient - m)
        v += (1 - beta2) * (gradient * gradient - v)
        self.first_moments[name][rows], self.second_moments[name][rows] = m, v
        unbias = math.sqrt(1 - beta2**self.step) / (1 - beta1**self.step)
        self.parameters[name][rows] -= (rate * unbias) * m / (np.sqrt(v) + 1e-12)

    def build_batch(
        self, pair_indices: np.ndarray, rng: np.random.Generator
    ) -> tuple[TrainingBatch, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the batch of the pairs at these indices, its parameters, and their rows.

        A batch uses only some rows of a large parameter. The last mapping has the indices of these
        rows.
        """
        pairs = self.task.train_pairs.take_pairs(pair_indices)
        candidates = self.all_candidates
        if candidates is None:
            parts = [pairs.key]
            if self.hard_negatives is not None:
                drawn = rng.integers(
                    0, self.hard_negatives.shape[1], (len(pair_indices), self.options.hard)
                )
                parts.append(
                    np.take_along_axis(self.hard_negatives[pair_indices], drawn, axis=1).ravel()
                )
            candidates = np.unique(np.concatenate(parts))
        right = np.searchsorted(candidates, pairs.key)
        head_inputs: list[list[HeadInput]] = []
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
                prefix = f"{i}.{side}."
                local[prefix + "w"] = self.parameters[prefix + "w"]
                if isinstance(x, TokenBag):
                    if self.options.dropout:
                        x = x.drop_tokens(
                            rng.random(len(x.ids), np.float32) >= self.options.dropout
                        )
                    used_ids, ids = np.unique(x.ids, return_inverse=True)
                    inputs[i] = HeadInput(TokenBag(ids, x.offsets, x.positions), length)
                    local[prefix + "places"] = self.parameters[prefix + "places"]
                    for name in ("logits", "vectors"):
                        table = self.parameters.get(prefix + name)
                        rows[prefix + name] = used_ids
                        local[prefix + name] = (self.tables[i] if table is None else table)[
                            used_ids
                        ]
            head_inputs.append(inputs)
        share = (pairs.weight / pairs.weight.sum()).astype(np.float32)
        excluded_cells = pairs.find_excluded_cells(self.other_right_keys, candidates)
        query, key = head_inputs
        words: dict[int, SharedWords] = {}
        for i, codes in self.words.items():
            words[i], shared_codes = find_shared_words(query[i], key[i], codes)
            rows[f"{i}.words"] = positions = np.searchsorted(codes, shared_codes)
            local[f"{i}.words"] = self.parameters[f"{i}.words"][positions]
        return (
            TrainingBatch(query, key, right, share, excluded_cells, self.initial.cosines, words),
            local,
            rows,
        )

    def mine_hard_negatives(self, rng: np.random.Generator) -> None:
        """Find, for each pair, wrong keys with high scores in a sample of the keys."""
        task, learned = self.task, self.build_encoder(self.parameters)
        # Take the best key of each part of the sample, which is faster than the best of all.
        group_count = min(HARD_NEGATIVES_PER_PAIR, len(task.keys))
        count = min(MINING_SAMPLE_KEYS, len(task.keys)) // group_count * group_count
        sample = np.sort(rng.choice(len(task.keys), count, replace=False))
        begins = np.arange(0, count, count // group_count)
        key = learned.project_inputs(take_inputs(task.key_features, sample), "key")
        query = task.project_all(learned, "query")
        self.hard_negatives = np.empty((len(task.train_pairs.query), group_count), np.int64)
        for block in split_blocks(len(self.hard_negatives), max(1, SCORES_PER_BLOCK // count)):
            pairs = task.train_pairs.take_pairs(block)
            s = query.take_rows(pairs.query).compute_scores(key)
            positions = np.minimum(np.searchsorted(sample, pairs.key), count - 1)
            with_right_key = np.flatnonzero(sample[positions] == pairs.key)
            s[with_right_key, positions[with_right_key]] = -np.inf
            s[pairs.find_excluded_cells(self.other_right_keys, sample)] = -np.inf
            best = s.reshape(len(s), group_count, -1).argmax(axis=2)
            self.hard_negatives[block] = sample[begins + best]

    def evaluate_held_out(self) -> tuple[float, float]:
        """Return the mean of 1/rank on the held-out pairs, and the mean of ln α at the best τ."""
        learned, task = self.build_encoder(self.parameters), self.task
        key = task.project_all(learned, "key")
        reciprocal = np.average(
            1 / (1.0 + task.ranks_after(learned, key)), weights=task.held_pairs.weight
        )
        return float(reciprocal), -fit_sharpness(
            task, learned, key, task.held_pairs, self.options.seed
        )[1]

    def calibrate_best(self) -> Learned:
        """Return the encoder with the best parameters, with τ calibrated on the held-out pairs."""
        learned = self.build_encoder(self.best_parameters)
        if not self.task.holds_out:
            return learned
        key = self.task.project_all(learned, "key")
        factor, _ = fit_sharpness(self.task, learned, key, self.task.held_pairs, self.options.seed)
        scales = learned.parameters["scales"] + np.float32(math.log(factor))
        return self.build_encoder({**learned.parameters, "scales": scales})

    def compute_fingerprint(self) -> str:
        """Return a text that is the same for the same task and options."""
        return f"{self.task.fingerprint} {replace(self.options, budget_s=None)}"

    def save_checkpoint(self, path: Path) -> None:
        """Write the state to a safetensors file, atomically."""
        from safetensors.numpy import save

        state = {
            "fingerprint": self.compute_fingerprint(),
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.elapsed_seconds(),
            "losses": self.losses,
            "best_epoch": self.best_epoch,
            "best_mark": list(self.best_metrics),
        }
        groups = {
            "now": self.parameters,
            "first": self.first_moments,
            "second": self.second_moments,
        }
        if self.best_epoch != self.epoch:
            groups["best"] = dict(self.best_parameters)
        tensors = {f"{g}/{n}": array for g, group in groups.items() for n, array in group.items()}
        if self.hard_negatives is not None:
            tensors["hard"] = self.hard_negatives
        temporary = path.with_name(path.name + ".part")
        with open(temporary, "wb") as file:
            file.write(save(tensors, {"state": json.dumps(state)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def load_checkpoint(self, path: Path) -> None:
        """Restore the state that `save_checkpoint` has written for the same task and options."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                state = json.loads((file.metadata() or {}).get("state", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a checkpoint that can be read ({error}): remove it"
            ) from error
        if not isinstance(state, dict) or state.get("fingerprint") != self.compute_fingerprint():
            raise CheckpointError(
                f"{path} belongs to other keys, pairs or settings: remove it, or name another file"
            )
        for prefix, group in (
            ("now", self.parameters),
            ("first", self.first_moments),
            ("second", self.second_moments),
        ):
            for name in group:
                group[name] = tensors[f"{prefix}/{name}"]
        for name in ("epoch", "step", "losses", "best_epoch"):
            setattr(self, name, state[name])
        self.best_metrics = (state["best_mark"][0], state["best_mark"][1])
        self.start_time = time.perf_counter() - state["seconds"]
        best = "now" if self.best_epoch == self.epoch else "best"
        self.best_parameters = {name: tensors[f"{best}/{name}"].copy() for name in self.parameters}
        self.hard_negatives = tensors.get("hard")


def fit_sharpness(
    task: TrainingTask, learned: Learned, key: ProjectedVectors, pairs: IndexedPairs, seed: int
) -> tuple[float, float]:
    """Return the factor on the sharpness that minimizes −ln α(query, right key), and the minimum.

    `key` are the vectors of all keys. If there are many pairs, only a sample is used.
    """
    count = min(len(pairs.query), max(16, SCORES_PER_BLOCK // 4 // len(task.keys)))
    sample = np.random.default_rng([seed, 3]).permutation(len(pairs.query))[:count]
    pairs = pairs.take_pairs(sample)
    query = learned.project_inputs(take_inputs(task.query_features, pairs.query), "query")
    s = query.compute_scores(key) * np.float32(learned.sharpness)
    s -= s[np.arange(len(s)), pairs.key][:, None]
    s[pairs.find_excluded_cells(task.other_right_keys, task.key_numbers)] = -np.inf
    loss = partial(mean_log_loss, s, pairs.weight / pairs.weight.sum())
    # If the right keys are separated from the others already, the best factor is infinite.
    factor = minimize_log_scale(loss, -3.0, 3.0) if loss(1.0) > MIN_LOSS else 1.0
    return factor, loss(factor)
