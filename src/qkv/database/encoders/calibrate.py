"""A temperature for texts before anyone has asked: the one that fits queries made of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from qkv.database.encoders.base import Encoder

KEYS, QUERIES = 2048, 512
"""Keys that are asked, and queries that are made of some of them, at most."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def calibrated(encoder: Encoder, keys: list[str]) -> float:
    """The factor on the score that makes −ln α(query, its key) least, over queries made of keys.

    Each is a key of which words were dropped, to which words of others came, in which slips were
    made. The same keys give the same factor. It is not far below 1: of a short title a word or two
    tell nothing, but who asks for one types it whole.
    """
    keys = list(dict.fromkeys(keys))
    rng = np.random.default_rng(0)
    keys = [keys[i] for i in np.sort(rng.permutation(len(keys))[:KEYS])]
    right = rng.permutation(len(keys))[:QUERIES]
    query, key = encoder.pair([asked(keys, i, rng) for i in right.tolist()], keys)
    s = np.asarray(encoder.score(len(keys))(query, key), np.float32)
    s -= s[np.arange(len(s)), right][:, None]
    return least(partial(surprise, s, np.full(len(s), 1 / len(s))), -0.1, 1.0)


def surprise(s: np.ndarray, share: np.ndarray, factor: float) -> float:
    """−Σ share ln α(right key) of scores (n, m) that are measured from the right key's, times a
    factor."""
    z = s * np.float32(factor)
    top = z.max(axis=1, keepdims=True)
    return float(share @ (top[:, 0] + np.log(np.exp(z - top).sum(axis=1))))


def asked(keys: list[str], at: int, rng: np.random.Generator) -> str:
    """A query that means one of the keys.

    >>> asked(["the old man and the sea", "war and peace"], 0, np.random.default_rng(1))
    'swea man lod'
    """
    words = keys[at].split()
    kept = max(1, round(len(words) * rng.uniform(0.05, 0.35)))
    words = [words[i] for i in np.sort(rng.permutation(len(words))[:kept])]
    for _ in range(int(rng.integers(2 * len(words) + 1))):
        other = keys[int(rng.integers(len(keys)))].split()
        if other:
            strange = other[int(rng.integers(len(other)))]
            words.insert(int(rng.integers(len(words) + 1)), strange)
    text = list(" ".join(words))
    for _ in range(int(rng.integers(5))):
        slip(text, rng)
    return "".join(text)


def slip(text: list[str], rng: np.random.Generator) -> None:
    """One letter changed, added, left out, or exchanged with the next."""
    at, kind = int(rng.integers(len(text) + 1)), int(rng.integers(4))
    if kind == 0:
        text.insert(at, LETTERS[int(rng.integers(26))])
    elif kind == 1:
        text[at : at + 1] = LETTERS[int(rng.integers(26))]
    elif kind == 2:
        text[at : at + 1] = []
    else:
        text[at : at + 2] = text[at : at + 2][::-1]


def least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The factor between e^low and e^high of the least loss, which is convex in it.

    >>> f"{least(lambda x: (x - 2) ** 2, -3, 3):.2f}"
    '2.00'
    """
    # The smallest of three narrows it down.
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = loss(math.exp(a)), loss(math.exp(b))
    for _ in range(14):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = loss(math.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = loss(math.exp(b))
    return math.exp(a if at_a < at_b else b)
