"""Learn from examples which keys a query means: gradient descent on the attention weights."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv.database import cells
from qkv.database.encoders.base import Encoder
from qkv.database.encoders.learned import (
    Bag,
    Input,
    Learned,
    features,
    has_tokens,
    leaves,
    table_of,
)
from qkv.database.gradients import Batch, Gradients, gradients
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.types import Progress

ALL = 4096
"""Keys up to which every one is a candidate for every query: α is then the very weight."""

AT = (1, 10, 100)
ASKED = 2000
"""Held-out pairs that are asked after each epoch, at most."""

ENOUGH = 100
"""Queries from which a tenth is held out, unless the caller says what is."""

SHORTEST = 20
"""Steps of an epoch, at least: a few pairs are passed over several times."""

WARM = 100
MINED = 16384
"""Keys, drawn anew each time, among which hard negatives are sought."""

MINE_FROM, MINE_EVERY = 2, 3
HARDEST = 8
BLOCK = 1 << 24
"""Scores held at once."""


class CheckpointError(QkvError, ValueError):
    """The file to resume from is damaged, or belongs to other keys, pairs or settings."""


@dataclass(frozen=True)
class Report:
    """Recall at 1, 10 and 100 among all keys, before and after, on pairs that were held out.

    `loss` has one entry an epoch, the mean −ln α over its candidates. `best` is the epoch that was
    kept, 0 for none; `stopped` says why there were not more. `weights` and `sharpness` are the
    heads' and the temperature's inverse, calibrated on what was held out.
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
    framework: str

    def __str__(self) -> str:
        lines = ["recall    " + "".join(f"{f'at {k}':>9}" for k in self.before)]
        for name in ("before", "after"):
            found = getattr(self, name).values()
            lines.append(f"{name:<10}" + "".join(f"{x:>9.3f}" for x in found))
        asked = f"{self.held_out:,} held out" if self.held_out else "asked again, none held out"
        lines.append(f"{self.pairs:,} pairs to learn from, {asked}, among {self.keys:,} keys")
        lines.append(
            f"{self.epochs} epochs in {self.seconds:.1f} s ({self.framework}), kept epoch "
            f"{self.best}; {self.stopped}"
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
    progress: Progress | None = None,
    framework: str | None = None,
) -> tuple[Learned, Report]:
    """min over W_Q, W_K, pooling, w_h, τ of −Σ_pairs weight · ln α(query, right key).

    `pairs` are (query, right key), or with a weight as third, such as clicks; one query may have
    several right keys. `keys` are all keys of the database, every right one among them. The
    candidates that α weighs are all keys if they are few, else the right keys of the batch and for
    each query `hard` keys that it takes for right. `vectors` learns the tokens' vectors too, which
    wants many pairs; `dropout` is the share of tokens that a step does not see. A share of the
    queries is `held_out` (a tenth of 100 or more, none of fewer), or pairs of your own are: the
    epoch that does best on them is kept, and after `patience` epochs without a better one, or
    `budget_s` seconds, or Ctrl-C, it ends.

    `resume` names a file to keep the state in after each epoch; if it is there, learning goes on
    from it. The result depends on the seed and not on where it was interrupted. torch does the
    sums if it is installed, else NumPy: `framework`.

    >>> from qkv.database.encoders import Characters
    >>> keys = ["dog", "cat", "cow"]
    >>> pairs = [("woof", "dog"), ("meow", "cat"), ("moo", "cow")]
    >>> encoder, report = learn(Characters(64), keys, pairs, held_out=0, framework="numpy")
    >>> (encoder.query(["meow"]) @ encoder.encode(keys).T).argmax(), report.after[1]
    (np.int64(1), 1.0)
    """
    how = _How(epochs, vectors, batch, rate, hard, dropout, patience, budget_s, seed)
    name, descend = gradients(framework)
    began = time.perf_counter()
    task = _task(encoder, keys, pairs, held_out, seed)
    run = _Run(task, how, descend, Learned.begin(encoder, len(task.keys), vectors), began)
    before = task.recall(task.ranks_before())
    stopped = run.descend(Path(resume) if resume is not None else None, progress)
    learned = run.calibrated()
    report = Report(
        before=before,
        after=task.recall(task.ranks(learned, task.vectors(learned, "key"))),
        loss=tuple(run.losses),
        best=run.best_epoch,
        epochs=run.epoch,
        seconds=run.seconds(),
        pairs=len(task.train.query),
        held_out=len(task.held.query) if task.holds_out else 0,
        keys=len(task.keys),
        weights=learned.weights,
        sharpness=learned.sharpness,
        stopped=stopped,
        framework=name,
    )
    return learned, report


@dataclass(frozen=True)
class _How:
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
        for name, least in (("epochs", 0), ("batch", 1), ("hard", 0), ("patience", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ArgumentError(
                    f"learn: {name} must be a whole number from {least}, not {value!r}"
                )
        if not 0 < self.rate < math.inf:
            raise ArgumentError(f"learn: rate must be above 0, not {self.rate!r}")
        if not 0 <= self.dropout < 1:
            raise ArgumentError(f"learn: dropout must be from 0 to below 1, not {self.dropout!r}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ArgumentError(f"learn: budget_s must be above 0 seconds, not {self.budget_s!r}")


class _Pairs(NamedTuple):
    """Pairs as numbers of a query and a key, each (p,), and what each counts (p,)."""

    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray

    def take(self, some: np.ndarray) -> _Pairs:
        return _Pairs(self.query[some], self.key[some], self.weight[some])

    def others(self) -> dict[int, np.ndarray]:
        """For each query with several right keys: which."""
        order = np.argsort(self.query, kind="stable")
        query, key = self.query[order], self.key[order]
        starts = np.flatnonzero(np.diff(query, prepend=-1))
        stops = np.append(starts[1:], len(query))
        many = np.flatnonzero(stops - starts > 1)
        return {int(query[starts[i]]): np.unique(key[starts[i] : stops[i]]) for i in many}


@dataclass(frozen=True)
class _Task:
    """What is to be learned: distinct keys and queries, and the pairs of them."""

    encoder: Encoder
    keys: Sequence[Any]
    queries: Sequence[Any]
    train: _Pairs
    held: _Pairs
    holds_out: bool
    key_features: list[Input]
    query_features: list[Input]
    others: dict[int, np.ndarray]
    fingerprint: str

    def ranks_before(self) -> np.ndarray:
        """How many keys each held-out query prefers to its right one, asked of the encoder."""
        score = self.encoder.score(len(self.keys))
        key = self.encoder.encode(self.keys)
        numbers, at = np.unique(self.held.query, return_inverse=True)
        query = self.encoder.query(_some(self.queries, numbers))[at]
        return self._ranks(query, lambda some: np.asarray(score(some, key)))

    def ranks(self, learned: Learned, key: np.ndarray) -> np.ndarray:
        """The same, asked of what was learned, whose vectors of all keys are `key`."""
        query = learned.project(taken(self.query_features, self.held.query), "query")
        return self._ranks(query, lambda some: some @ key.T)

    def vectors(self, learned: Learned, side: str) -> np.ndarray:
        """Of all keys, or of all queries."""
        found = self.key_features if side == "key" else self.query_features
        count = len(self.keys) if side == "key" else len(self.queries)
        out = np.empty((count, learned.width), np.float32)
        for some in _blocks(count, 1 << 14):
            out[some] = learned.project(taken(found, np.arange(some.start, some.stop)), side)
        return out

    def _ranks(self, query: np.ndarray, scores: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        found = np.empty(len(query), np.int64)
        for some in _blocks(len(query), max(1, BLOCK // len(self.keys))):
            s, right = scores(query[some]), self.held.key[some]
            own = s[np.arange(len(s)), right][:, None]
            for row, number in enumerate(self.held.query[some].tolist()):
                for other in self.others.get(number, ()):
                    if other != right[row]:
                        s[row, other] = -np.inf
            # A wrong key that scores as much as the right one counts as preferred.
            found[some] = (s >= own).sum(axis=1) - 1
        return found

    def recall(self, ranks: np.ndarray) -> dict[int, float]:
        return {k: float(np.average(ranks < k, weights=self.held.weight)) for k in AT}


def _task(
    encoder: Encoder, keys: Sequence[Any], pairs: Sequence[Any], held_out: Any, seed: int
) -> _Task:
    found: dict[bytes, int] = {}
    first = [i for i, code in enumerate(cells.digests(keys)) if found.setdefault(code, i) == i]
    if len(first) < 2:
        raise ArgumentError("learn: there must be two different keys at least, to tell apart")
    number = {code: at for at, code in enumerate(found)}
    distinct = _some(keys, np.array(first))
    queries: list[Any] = []
    seen: dict[bytes, int] = {}
    every = _numbered(pairs, "pairs", number, queries, seen)
    rng = np.random.default_rng([seed, 1])
    if held_out is None:  # a few clicks are all to be learned from
        held_out = 0.1 if len(queries) >= ENOUGH else 0
    if isinstance(held_out, int | float):
        if not 0 <= held_out < 1:
            raise ArgumentError(f"learn: held_out must be from 0 to below 1, not {held_out!r}")
        count = round(held_out * len(queries))
        if held_out and len(queries) > 1:
            count = min(max(count, 1), len(queries) - 1)
        held = np.isin(every.query, rng.permutation(len(queries))[:count])
        train, rest = every.take(~held), every.take(held)
    else:
        train, rest = every, _numbered(held_out, "held_out", number, queries, seen)
    holds_out = bool(len(rest.query))
    asked = rest if holds_out else train
    if len(asked.query) > ASKED:
        asked = asked.take(np.sort(rng.choice(len(asked.query), ASKED, replace=False)))
    code = blake2b(digest_size=16)
    for part in (*found, *seen):
        code.update(part)
    for numbers in (*train, *asked):
        code.update(numbers.tobytes())
    code.update(json.dumps(encoder.settings(), sort_keys=True, default=str).encode())
    return _Task(
        encoder=encoder,
        keys=distinct,
        queries=queries,
        train=train,
        held=asked,
        holds_out=holds_out,
        key_features=_features(encoder, distinct, "key"),
        query_features=_features(encoder, queries, "query"),
        others=_Pairs(*map(np.concatenate, zip(train, rest, strict=True))).others(),
        fingerprint=code.hexdigest(),
    )


def _numbered(
    pairs: Sequence[Any],
    name: str,
    number: Mapping[bytes, int],
    queries: list[Any],
    seen: dict[bytes, int],
) -> _Pairs:
    """Pairs with their queries and keys as numbers; queries that are new are appended."""
    if not len(pairs):
        raise ArgumentError(f"learn: {name} is empty; it takes (query, right key) pairs")
    rows: list[tuple[int, int, float]] = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DtypeError(
                f"learn: {name}[{i}] must be (query, right key) or (query, right key, weight), "
                f"not {pair!r}"
            )
        query, key = pair[:2]
        weight = pair[2] if len(pair) == 3 else 1.0
        if isinstance(weight, bool | str) or not 0 < float(weight) < math.inf:
            raise ArgumentError(f"learn: {name}[{i}] has the weight {weight!r}; it must be above 0")
        at = number.get(cells.digest(key))
        if at is None:
            raise ArgumentError(
                f"learn: {name}[{i}] names the right key {key!r}, which no row has: add it first"
            )
        if query is None:
            raise ArgumentError(f"learn: {name}[{i}] has no query")
        code = cells.digest(query)
        if code not in seen:
            seen[code] = len(queries)
            queries.append(query)
        rows.append((seen[code], at, float(weight)))
    query, key, weight = zip(*rows, strict=True)
    return _Pairs(np.array(query), np.array(key), np.array(weight, np.float32))


def _features(encoder: Encoder, keys: Sequence[Any], side: str) -> list[Input]:
    base = encoder.base if isinstance(encoder, Learned) else encoder
    return features(base, keys, side)


def taken(found: Sequence[Input], some: np.ndarray) -> list[Input]:
    return [input.take(some) for input in found]


def _some(keys: Sequence[Any], at: np.ndarray) -> Sequence[Any]:
    if hasattr(keys, "shape"):
        return keys[at]  # type: ignore[call-overload, no-any-return]
    return [keys[i] for i in at.tolist()]


def _blocks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


@dataclass
class _Run:
    """One descent: the parameters now and at their best, and Adam's two means of each."""

    task: _Task
    how: _How
    gradients: Gradients
    start: Learned
    began: float
    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_epoch: int = 0
    best_mark: tuple[float, float] = (-math.inf, -math.inf)

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
        count = len(task.train.query)
        self.size = min(how.batch, count)
        self.passes = -(-SHORTEST // max(1, count // self.size))
        self.steps_an_epoch = self.passes * max(1, count // self.size)

    def _rate(self, name: str) -> float:
        last = name.rpartition(".")[2]
        if last == "vectors":
            return self.how.rate * float(np.linalg.norm(self.now[name], axis=1).mean())
        return self.how.rate * {"logits": 10.0, "places": 10.0, "scales": 3.0}.get(last, 1.0)

    def learned(self, parameters: Mapping[str, np.ndarray]) -> Learned:
        return replace(self.start, parameters=parameters)

    def seconds(self) -> float:
        """Since it began, those before it was resumed among them."""
        return time.perf_counter() - self.began

    def descend(self, path: Path | None, progress: Progress | None) -> str:
        """Step down until it is time to stop; says why it stopped."""
        how, total = self.how, self.how.epochs * self.steps_an_epoch
        self._fit_sharpness()
        self.best = {name: array.copy() for name, array in self.now.items()}
        if self.task.holds_out:
            self.best_mark = self.mark()
        if path is not None and path.exists():
            self.load(path)
        with _bar(progress, total) as report:
            try:
                while self.epoch < how.epochs:
                    if self.epoch - self.best_epoch >= how.patience:
                        return f"no better for {how.patience} epochs"
                    in_time = self.one_epoch(report)
                    if path is not None:
                        self.save(path)
                    if not in_time:
                        return f"the {how.budget_s:g} s were over"
            except KeyboardInterrupt:
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
            self.best_mark, self.best_epoch = mark, self.epoch
            self.best = {name: array.copy() for name, array in self.now.items()}
        return in_time

    def one_step(self, some: np.ndarray, rng: np.random.Generator) -> float:
        batch, local, rows = self.batch(some, rng)
        loss, found = self.gradients(local, batch)
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
        barred = self.barred(pairs, candidates)
        query, key = found
        return Batch(query, key, right, share, barred, self.start.cosines), local, rows

    def barred(self, pairs: _Pairs, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where a candidate is right for the query of another row's pair too."""
        rows, columns = [], []
        if self.right_too:
            for row, (query, key) in enumerate(zip(pairs.query.tolist(), pairs.key, strict=True)):
                for other in self.right_too.get(query, ()):
                    at = int(np.searchsorted(candidates, other))
                    if other != key and at < len(candidates) and candidates[at] == other:
                        rows.append(row)
                        columns.append(at)
        return np.array(rows, np.int64), np.array(columns, np.int64)

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
        for some in _blocks(len(self.hard), max(1, BLOCK // count)):
            pairs = _Pairs(*(part[some] for part in task.train))
            s = query[pairs.query] @ key.T
            at = np.minimum(np.searchsorted(sample, pairs.key), count - 1)
            own = np.flatnonzero(sample[at] == pairs.key)
            s[own, at[own]] = -np.inf
            s[self.barred(pairs, sample)] = -np.inf
            best = s.reshape(len(s), parts, -1).argmax(axis=2)
            self.hard[some] = sample[begins + best]

    def mark(self) -> tuple[float, float]:
        """How well the held-out part does: the mean of 1/rank, then of ln α at its best τ."""
        learned, task = self.learned(self.now), self.task
        key = task.vectors(learned, "key")
        reciprocal = np.average(1 / (1.0 + task.ranks(learned, key)), weights=task.held.weight)
        return float(reciprocal), -self._sharpness(learned, key, task.held)[1]

    def _sharpness(self, learned: Learned, key: np.ndarray, pairs: _Pairs) -> tuple[float, float]:
        """The factor on τ that makes −ln α least over all keys, and that −ln α."""
        task = self.task
        count = min(len(pairs.query), max(16, BLOCK // 4 // len(task.keys)))
        some = np.random.default_rng([self.how.seed, 3]).permutation(len(pairs.query))[:count]
        pairs = pairs.take(some)
        query = learned.project(taken(task.query_features, pairs.query), "query")
        s = (query @ key.T) * np.float32(learned.sharpness)
        s -= s[np.arange(len(s)), pairs.key][:, None]
        for row, number in enumerate(pairs.query.tolist()):
            for other in task.others.get(number, ()):
                if other != pairs.key[row]:
                    s[row, other] = -np.inf
        share = pairs.weight / pairs.weight.sum()

        def loss(log_factor: float) -> float:
            z = s * np.float32(math.exp(log_factor))
            top = z.max(axis=1, keepdims=True)
            return float(share @ (top[:, 0] + np.log(np.exp(z - top).sum(axis=1))))

        # The loss is convex in the factor, so the smallest of three narrows it down.
        low, high, golden = -3.0, 3.0, (math.sqrt(5) - 1) / 2
        a, b = high - golden * (high - low), low + golden * (high - low)
        at_a, at_b = loss(a), loss(b)
        for _ in range(10):
            if at_a < at_b:
                high, b, at_b = b, a, at_a
                a = high - golden * (high - low)
                at_a = loss(a)
            else:
                low, a, at_a = a, b, at_b
                b = low + golden * (high - low)
                at_b = loss(b)
        return (math.exp(a), at_a) if at_a < at_b else (math.exp(b), at_b)

    def _fit_sharpness(self) -> None:
        """Begin with the τ that suits the pairs: a wrong one would cost the first epochs."""
        learned = self.learned(self.now)
        key = self.task.vectors(learned, "key")
        factor, _ = self._sharpness(learned, key, self.task.train)
        self.now["scales"] += np.float32(math.log(factor))

    def calibrated(self) -> Learned:
        """The best parameters, with the τ that suits what was held out."""
        learned = self.learned(self.best)
        if not self.task.holds_out:
            return learned
        key = self.task.vectors(learned, "key")
        factor, _ = self._sharpness(learned, key, self.task.held)
        scales = learned.parameters["scales"] + np.float32(math.log(factor))
        return self.learned({**learned.parameters, "scales": scales})

    def fingerprint(self) -> str:
        how = replace(self.how, budget_s=None)
        return f"{self.task.fingerprint} {how}"

    def save(self, path: Path) -> None:
        """The state after an epoch, as one safetensors file that is there whole or not at all."""
        from safetensors.numpy import save

        state = {
            "fingerprint": self.fingerprint(),
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds(),
            "losses": self.losses,
            "best_epoch": self.best_epoch,
            "best_mark": list(self.best_mark),
        }
        groups = {"now": self.now, "first": self.first, "second": self.second}
        if self.best_epoch != self.epoch:
            groups["best"] = dict(self.best)
        tensors = {f"{g}/{n}": array for g, group in groups.items() for n, array in group.items()}
        if self.hard is not None:
            tensors["hard"] = self.hard
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            file.write(save(tensors, {"state": json.dumps(state)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def load(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                state = json.loads((file.metadata() or {}).get("state", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be resumed from ({error}): remove it") from error
        if not isinstance(state, dict) or state.get("fingerprint") != self.fingerprint():
            raise CheckpointError(
                f"{path} is of other keys, pairs or settings: remove it, or name another file"
            )
        for name, group in (("now", self.now), ("first", self.first), ("second", self.second)):
            for own in group:
                group[own] = tensors[f"{name}/{own}"]
        for name in ("epoch", "step", "losses", "best_epoch"):
            setattr(self, name, state[name])
        self.best_mark = (state["best_mark"][0], state["best_mark"][1])
        self.began = time.perf_counter() - state["seconds"]
        kept = "now" if self.best_epoch == self.epoch else "best"
        self.best = {name: tensors[f"{kept}/{name}"].copy() for name in self.now}
        self.hard = tensors.get("hard")


@contextmanager
def _bar(progress: Progress | None, total: int) -> Iterator[Progress]:
    """The caller's progress, or a bar on stderr where that is a terminal and rich is there."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield lambda done, total: None
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("learning", total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
