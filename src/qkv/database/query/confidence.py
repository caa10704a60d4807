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
from qkv.database.query.logistic_fit import fit_logit

MAX_PAIRS = 1000
"""More pairs hardly change two numbers."""


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
