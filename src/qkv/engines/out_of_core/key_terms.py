"""Terms of stored keys, such as 1 / ‖k‖, which are computed once and cached between queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkv.frameworks.ragged import DenseAndSparse
from qkv.frameworks.stored_rows import SAMPLED_ROWS, KeyTermsCache, RowSpan, StoredRows
from qkv.scores import Score

UNUSABLE = np.inf
"""Marks rows whose block has no usable terms; NaN marks rows without computed terms."""


def adapt_score(rows: StoredRows, score: Score, dtype: Any) -> Score:
    """Return a score with the same numbers that is faster for these rows, if there is one.

    A small table does not need it.
    """
    if type(score).adapt_to_keys is Score.adapt_to_keys or rows.shape[0] <= SAMPLED_ROWS:
        return score
    # The same sample for each filter: terms of keys around another mean could not be reused.
    cache, name = rows.key_terms_cache, np.dtype(dtype).name
    if cache.read_sample is None:
        first = rows.first_chunk()
        if first is None or isinstance(first.key, DenseAndSparse):
            return score
        return _adapt_to_sample(score, first.sample_keys(), dtype)
    last, adapted = (None, None) if cache.adapted is None else cache.adapted.get(name, (None, None))
    if adapted is None or last is not score:
        adapted = _adapt_to_sample(score, cache.read_sample(), dtype)
        if cache.adapted is not None:
            cache.adapted[name] = score, adapted
    return adapted


def _adapt_to_sample(score: Score, sample: np.ndarray, dtype: Any) -> Score:
    return score.adapt_to_keys(sample.astype(dtype, copy=False)) if len(sample) else score


def load_key_terms(
    rows: StoredRows, score: Score, span: RowSpan, key: np.ndarray, dtype: Any
) -> np.ndarray | None:
    """Return the terms (c,) of the keys (c, d) of a span in a dtype, or None if there are none."""
    if type(score).key_terms is Score.key_terms:
        return None
    cache = rows.key_terms_cache
    return load_key_terms_at(cache, cache.rows_of(span), score, key, dtype)


def load_key_terms_at(
    cache: KeyTermsCache, at: slice | np.ndarray, score: Score, key: np.ndarray, dtype: Any
) -> np.ndarray | None:
    """Return the terms of the keys (…, d) at the positions `at` (…), or None if there are none.

    They are computed when they are first needed, by whichever engine reads the rows first. Threads
    may compute the same terms twice, with equal results.
    """
    if type(score).key_terms is Score.key_terms:
        return None
    kind = type(score), np.dtype(dtype)
    signature = *kind, score.key_terms_signature
    terms = cache.arrays.get(signature)
    if terms is None:
        # Only one score of each class has its terms in the cache.
        for other in [x for x in list(cache.arrays) if x[:2] == kind]:
            cache.arrays.pop(other, None)
        terms = cache.arrays.setdefault(signature, np.full(cache.total, np.nan, dtype))
    part: np.ndarray = terms[at]
    total = float(np.add.reduce(part, axis=None))
    if math.isfinite(total):
        return part
    if math.isnan(total):
        new = score.key_terms(key.astype(dtype, copy=False))
        terms[at] = UNUSABLE if new is None else new
        return new
    return None
