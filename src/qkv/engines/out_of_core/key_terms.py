"""Terms of stored keys, such as 1 / ‖k‖, which are computed once and cached between queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.frameworks.stored_rows import RowSpan, StoredRows
from qkv.scores import Score

UNUSABLE = np.inf
"""Marks rows whose block has no usable terms; NaN marks rows without computed terms."""


def load_key_terms(
    rows: StoredRows, score: Score, span: RowSpan, key: np.ndarray, dtype: Any
) -> np.ndarray | None:
    """Return the terms (c,) of the keys (c, d) of a span in a dtype, or None if there are none.

    They are computed when they are first needed, by whichever engine reads the span first. Threads
    may compute the same terms twice, with equal results.
    """
    if type(score).key_terms is Score.key_terms:
        return None
    cache, signature = rows.key_terms_cache, (type(score), np.dtype(dtype))
    terms = cache.arrays.get(signature)
    if terms is None:
        terms = cache.arrays.setdefault(signature, np.full(cache.total, np.nan, dtype))
    at = cache.rows_of(span)
    part: np.ndarray = terms[at]
    total = np.add.reduce(part)
    if np.isnan(total):
        new = score.key_terms(key.astype(dtype, copy=False))
        terms[at] = UNUSABLE if new is None else new
        return new
    return part if np.isfinite(total) else None
