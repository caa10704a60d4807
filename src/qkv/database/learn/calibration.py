"""The temperature that suits the pairs: a search over one number."""

from __future__ import annotations

from functools import partial

import numpy as np

from qkv.database.encoders.calibrate import least, surprise
from qkv.database.encoders.learned import Learned, Projected
from qkv.database.learn.task import BLOCK, Pairs, Task, taken


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
    factor = least(loss, -3.0, 3.0)
    return factor, loss(factor)
