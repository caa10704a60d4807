"""Correct the confidence of answers on (query, right key) pairs: Platt scaling.

The default formula of `Answer.confidence` fits many tables, but tables differ: queries that say
the same in other words are right less often than queries with typos of the same weight. From pairs
of a table, a bias a and a slope b are fitted: confidence = σ(a + b logit), with the default logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qkv.answer import Answer
from qkv.database.query.arguments import split_pairs
from qkv.database.query.executor import QueryExecutor

MAX_PAIRS = 1000
"""More pairs hardly change two numbers."""

PRIOR_WEIGHT = 3.0
"""How strongly a = 0 and b = 1 are preferred; it matters for fewer than about 30 pairs."""

MAX_STEPS = 50


def fit_confidence(executor: QueryExecutor, pairs: Sequence[Any]) -> tuple[float, float]:
    """Return the bias and the slope of the confidence; (0, 1) if answers have no confidence."""
    if executor.value_is_mean:
        return 0.0, 1.0
    pairs = pairs[:: -(-len(pairs) // MAX_PAIRS)]
    queries, right_keys = split_pairs(executor.view, pairs, "calibrate", "right key")
    logits, is_right = [], []
    answers = executor.answer_queries(queries)
    for answer, key in zip(answers, right_keys, strict=True):
        if answer.confidence is not None:
            logits.append(answer._confidence_logit)
            is_right.append(has_right_value(executor, answer, key))
    return fit_logit(np.array(logits), np.array(is_right, float))


def has_right_value(executor: QueryExecutor, answer: Answer, right_key: Any) -> bool:
    """Return whether the value is that of a row with the right key."""
    view = executor.view
    ids = view.find_ids(right_key)
    if int(view.ids[answer.rows[0].index]) in {int(x) for x in ids}:
        return True
    if view.schema.can_pool_values:
        return False  # the value is that of the best key, which is another
    values: Iterable[Any] = view.schema.values_from_rows(view.read_rows(ids))
    return any(answer.value == value for value in values)


def fit_logit(logit: np.ndarray, is_right: np.ndarray) -> tuple[float, float]:
    """Return a and b so that σ(a + b logit) is the probability of `is_right`, both (n,).

    The log loss has the penalty `PRIOR_WEIGHT` (a² + (b − 1)²) / 2. The slope is at least 0.

    >>> fit_logit(np.zeros(0), np.zeros(0))
    (0.0, 1.0)
    >>> bias, slope = fit_logit(np.full(100, 3.0), np.arange(100) < 50)
    >>> bool(abs(bias + 3 * slope) < 0.2)
    True
    """
    x = np.stack([np.ones_like(logit), logit], axis=1)
    prior = np.array([0.0, 1.0])

    def loss(c: np.ndarray) -> float:
        z = x @ c
        penalty = PRIOR_WEIGHT / 2 * float(np.sum((c - prior) ** 2))
        return float(np.sum(np.logaddexp(0, z) - is_right * z)) + penalty

    coefficients, last = prior, loss(prior)
    for _ in range(MAX_STEPS):  # Newton's method, with shorter steps where it overshoots
        p = 0.5 * (1 + np.tanh(x @ coefficients / 2))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + PRIOR_WEIGHT * np.eye(2)
        gradient = x.T @ (p - is_right) + PRIOR_WEIGHT * (coefficients - prior)
        step = np.linalg.solve(hessian, gradient)
        while (now := loss(coefficients - step)) > last and np.abs(step).max() > 1e-9:
            step = step / 2
        coefficients, last = coefficients - step, min(now, last)
        if np.abs(step).max() < 1e-6:
            break
    return float(coefficients[0]), max(float(coefficients[1]), 0.0)
