"""Train an encoder on (query, right key) pairs, by gradient descent on −ln α."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.database.encoders.base import Encoder
from qkv.database.encoders.learned import Learned
from qkv.database.learn.descent import CheckpointError, GradientDescent, TrainingOptions
from qkv.database.learn.task import build_task
from qkv.util.types import ProgressCallback

__all__ = ["CheckpointError", "LearnReport", "learn"]


TRAINING_PAIRS_NOTE = "measured on the training pairs, which says little about other queries:"


@dataclass(frozen=True)
class LearnReport:
    """The result of `learn`: the recall before and after training, and how training went.

    `before` and `after` are the recall at 1, 10 and 100 among all keys. It is measured on the
    held-out pairs, or on the training pairs if `held_out` is 0. `loss` is the mean −ln α of each
    epoch, over its candidates. `best` is the number of the selected epoch. If it is 0, no epoch was
    better than the start. `stopped` says why training ended.

    `weights` are those of the heads. `sharpness` is the inverse temperature, calibrated on the
    held-out pairs.
    """

    before: Mapping[int, float]
    after: Mapping[int, float]
    loss: tuple[float, ...]
    best: int
    epochs: int
    seconds: float
    pairs: int
    held_out: int
    keys: int
    weights: tuple[float, ...]
    sharpness: float
    stopped: str
    interrupted: bool = False

    def __repr__(self) -> str:
        lines = [] if self.held_out else [TRAINING_PAIRS_NOTE]
        lines.append("recall    " + "".join(f"{f'at {k}':>9}" for k in self.before))
        for name in ("before", "after"):
            recalls = getattr(self, name).values()
            lines.append(f"{name:<10}" + "".join(f"{x:>9.3f}" for x in recalls))
        held_out = f"{self.held_out:,} held out" if self.held_out else "none held out"
        lines.append(f"{self.pairs:,} training pairs, {held_out}, among {self.keys:,} keys")
        lines.append(
            f"{self.epochs} epochs in {self.seconds:.1f} s, best epoch {self.best}; {self.stopped}"
        )
        return "\n".join(lines)


def learn(
    encoder: Encoder,
    keys: Sequence[Any],
    pairs: Sequence[Any],
    *,
    epochs: int = 10,
    vectors: bool = False,
    batch: int = 2048,
    rate: float = 1e-3,
    hard: int = 1,
    dropout: float = 0.2,
    held_out: float | Sequence[Any] | None = None,
    patience: int = 3,
    budget_s: float | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Learned, LearnReport]:
    """Minimize −Σ_pairs weight · ln α(query, right key) over W_Q, W_K, pooling, w_h and τ.

    `pairs` are (query, right key) or (query, right key, weight), for example with clicks as weight.
    A query may have several right keys. `keys` are all keys of the database.

    - Up to 4,096 keys, α is computed over all keys. Otherwise the candidates are the right keys of
      the batch, and `hard` wrong keys with high scores for each query.
    - With `vectors`, the token vectors are trained too, which needs many pairs. `dropout` is the
      share of tokens that a step ignores.
    - `held_out` is a share of the queries (by default a tenth if there are at least 100), or a list
      of pairs. The parameters of the epoch that is best on the held-out pairs are returned.
    - Training ends after `epochs`, after `patience` epochs without improvement, after `budget_s`
      seconds, or on Ctrl-C. Ctrl-C before the first improvement raises `KeyboardInterrupt`.
    - `resume` is the path of a file that gets the state after each epoch. If the file exists,
      training continues from this state. Interruptions do not change the result.

    >>> from qkv.database.encoders import Characters
    >>> keys = ["dog", "cat", "cow"]
    >>> pairs = [("woof", "dog"), ("meow", "cat"), ("moo", "cow")]
    >>> encoder, report = learn(Characters(64), keys, pairs, held_out=0)
    >>> (encoder.encode_query(["meow"]) @ encoder.encode(keys).T).argmax(), report.after[1]
    (np.int64(1), 1.0)
    """
    options = TrainingOptions(epochs, vectors, batch, rate, hard, dropout, patience, budget_s, seed)
    start_time = time.perf_counter()
    task = build_task(encoder, keys, pairs, held_out, seed)
    initial = Learned.from_base(encoder, len(task.keys), vectors)
    run = GradientDescent(task, options, initial, start_time)
    before = task.compute_recall(task.ranks_before())
    stopped = run.run_epochs(Path(resume) if resume is not None else None, progress)
    learned = run.calibrate_best()
    report = LearnReport(
        before=before,
        after=task.compute_recall(task.ranks_after(learned, task.project_all(learned, "key"))),
        loss=tuple(run.losses),
        best=run.best_epoch,
        epochs=run.epoch,
        seconds=run.elapsed_seconds(),
        pairs=len(task.train_pairs.query),
        held_out=len(task.held_pairs.query) if task.holds_out else 0,
        keys=len(task.keys),
        weights=learned.weights,
        sharpness=learned.sharpness,
        stopped=stopped,
        interrupted=run.interrupted,
    )
    return learned, report
