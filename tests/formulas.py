"""The textbook's formulas in plain Python, one pair or one row at a time. They share no code
with the library."""

from __future__ import annotations

import math

import numpy as np


def dot(q, k):
    return sum(a * b for a, b in zip(q, k, strict=True))


def norm(x):
    return math.sqrt(dot(x, x))


def apart(q, k):
    return norm([a - b for a, b in zip(q, k, strict=True)])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def additive(q, k, w_query, w_key, v, bias):
    hidden = [
        math.tanh(dot(a, q) + dot(b, k) + c) for a, b, c in zip(w_query, w_key, bias, strict=True)
    ]
    return dot(v, hidden)


SCORES = {
    "Dot": dot,
    "ScaledDot": lambda q, k, scale, softcap: softcap * math.tanh(dot(q, k) * scale / softcap),
    "Cosine": lambda q, k, temperature: dot(q, k) / norm(q) / norm(k) / temperature,
    "Multiplicative": lambda q, k, w: sum(a * dot(row, k) for a, row in zip(q, w, strict=True)),
    "Gaussian": lambda q, k, bandwidth: -(apart(q, k) ** 2) / (2 * bandwidth**2),
    "Laplace": lambda q, k, bandwidth: (
        -sum(abs(a - b) for a, b in zip(q, k, strict=True)) / bandwidth
    ),
    "Boxcar": lambda q, k, width: float(apart(q, k) <= width),
    "Triangular": lambda q, k, width: max(0.0, 1 - apart(q, k) / width),
    "Epanechnikov": lambda q, k, width: max(0.0, 1 - (apart(q, k) / width) ** 2),
    "RankingWindow": lambda q, k, window: (
        SCORES[type(window).__name__](q, k, window.width) or -((apart(q, k) / window.width) ** 2)
    ),
    "Constant": lambda q, k: 1.0,
    "Exact": lambda q, k: float(list(q) == list(k)),
    "Additive": additive,
    "Gated": lambda q, k, w_query, w_key, bias: (
        sigmoid(dot(w_query, q) + dot(w_key, k) + bias) * dot(q, k)
    ),
}


def softmax(s):
    e = [math.exp(x - max(s)) for x in s] if s else []
    return [x / sum(e) for x in e]


def one_hot(s, straight_through=False):
    return [float(i == s.index(max(s))) for i in range(len(s))]


def top(s, k):
    best = sorted(range(len(s)), key=lambda i: (-s[i], i))[:k]
    chosen = dict(zip(best, softmax([s[i] for i in best]), strict=True))
    return [chosen.get(i, 0.0) for i in range(len(s))]


def normalized(s, on_empty="zero"):
    inside = [max(x, 0.0) for x in s] if on_empty == "nearest" else s
    if sum(inside):
        return [x / sum(inside) for x in inside]
    other = {"zero": 0.0, "nan": math.nan, "uniform": 1 / len(s)}
    return one_hot(s) if on_empty == "nearest" else [other[on_empty]] * len(s)


def entmax(s, alpha):
    """λ by bisection, the logarithm of 1 over the largest weight: the weights sum to one."""
    c = np.max(alpha) - 1
    if not s or c == 0:
        return softmax(s)

    def weights(at):
        r = [math.exp(-c * at) + c * (x - max(s)) for x in s]
        return [x ** (1 / c) if x > 0 else 0.0 for x in r]

    low, high = 0.0, math.log(len(s)) + 1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(weights(middle)) > 1 else (low, middle)
    return weights(low)


WEIGHTINGS = {
    "Softmax": lambda s, temperature: softmax([x / temperature for x in s]),
    "TopK": top,
    "Hard": one_hot,
    "Average": lambda s: [1 / len(s)] * len(s),
    "Normalized": normalized,
    "Raw": lambda s: s,
    "Sigmoid": lambda s: [sigmoid(x) for x in s],
    "Entmax": entmax,
    "Sparsemax": lambda s: entmax(s, 2),
}


def weights(name, scores, live, **settings):
    """α (n, m) of a matrix of scores, where `live` marks what counts."""
    out = np.zeros(scores.shape)
    for i, row in enumerate(scores):
        at = np.flatnonzero(live[i])
        if len(at):
            out[i, at] = WEIGHTINGS[name](row[at].tolist(), **settings)
    return out
