"""Learn from examples which keys a query means: gradient descent on the attention weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.database.encoders.base import Encoder
from qkv.database.encoders.learned import Learned
from qkv.database.learn.checkpoint import CheckpointError
from qkv.database.learn.descent import GradientDescent, TrainingOptions
from qkv.database.learn.task import build_task
from qkv.util.types import ProgressCallback

__all__ = ["CheckpointError", "Report", "learn"]


TRAINING_PAIRS_NOTE = (
    "asked again on the very pairs that it learned from, which says little of others:"
)


@dataclass(frozen=True)
class Report:
    """Recall at 1, 10 and 100 among all keys, before and after, on pairs that were held out.

    Where none were (`held_out` is 0), it is asked again on the pairs that it learned from. `loss`
    has one entry an epoch, the mean −ln α over its candidates. `best` is the epoch that was kept, 0
    for none; `stopped` says why there were not more. `weights` and `sharpness` are the heads' and
    the temperature's inverse, calibrated on what was held out.
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
            found = getattr(self, name).values()
            lines.append(f"{name:<10}" + "".join(f"{x:>9.3f}" for x in found))
        asked = f"{self.held_out:,} held out" if self.held_out else "none held out"
        lines.append(f"{self.pairs:,} pairs to learn from, {asked}, among {self.keys:,} keys")
        lines.append(
            f"{self.epochs} epochs in {self.seconds:.1f} s, kept epoch {self.best}; {self.stopped}"
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
) -> tuple[Learned, Report]:
    """min over W_Q, W_K, pooling, w_h, τ of −Σ_pairs weight · ln α(query, right key).

    `pairs` are (query, right key), or with a weight as third, such as clicks; one query may have
    several right keys. `keys` are all keys of the database, every right one among them. The
    candidates that α weighs are all keys if they are few, else the right keys of the batch and for
    each query `hard` keys that it takes for right. `vectors` learns the tokens' vectors too, which
    wants many pairs; `dropout` is the share of tokens that a step does not see. A share of the
    queries is `held_out` (a tenth of 100 or more, none of fewer), or pairs of your own are: the
    epoch that does best on them is kept, and after `patience` epochs without a better one, or
    `budget_s` seconds, or Ctrl-C, it ends. A Ctrl-C before there is anything better is raised.

    `resume` names a file to keep the state in after each epoch; if it is there, learning goes on
    from it. The result depends on the seed and not on where it was interrupted.

    >>> from qkv.database.encoders import Characters
    >>> keys = ["dog", "cat", "cow"]
    >>> pairs = [("woof", "dog"), ("meow", "cat"), ("moo", "cow")]
    >>> encoder, report = learn(Characters(64), keys, pairs, held_out=0)
    >>> (encoder.encode_query(["meow"]) @ encoder.encode(keys).T).argmax(), report.after[1]
    (np.int64(1), 1.0)
    """
    how = TrainingOptions(epochs, vectors, batch, rate, hard, dropout, patience, budget_s, seed)
    began = time.perf_counter()
    task = build_task(encoder, keys, pairs, held_out, seed)
    run = GradientDescent(task, how, Learned.from_base(encoder, len(task.keys), vectors), began)
    before = task.compute_recall(task.ranks_before())
    stopped = run.run_epochs(Path(resume) if resume is not None else None, progress)
    learned = run.calibrate_best()
    report = Report(
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
