"""The temperature that suits the pairs: a search over one number."""

from __future__ import annotations

import math

import numpy as np

from qkv.database.encoders.learned import Learned
from qkv.database.learn.task import BLOCK, Pairs, Task, taken


def sharpness(
    task: Task, learned: Learned, key: np.ndarray, pairs: Pairs, seed: int
) -> tuple[float, float]:
    """The factor on τ that makes −ln α(query, right key) least over all keys, and that −ln α.

    `key` are the vectors of all keys. Where there are many pairs, some of them tell enough.
    """
    count = min(len(pairs.query), max(16, BLOCK // 4 // len(task.keys)))
    some = np.random.default_rng([seed, 3]).permutation(len(pairs.query))[:count]
    pairs = pairs.take(some)
    query = learned.project(taken(task.query_features, pairs.query), "query")
    s = (query @ key.T) * np.float32(learned.sharpness)
    s -= s[np.arange(len(s)), pairs.key][:, None]
    s[pairs.barred(task.others, task.numbers)] = -np.inf
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
