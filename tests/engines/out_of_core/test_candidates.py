"""Attention over rows chosen for each query equals attention over stored rows."""

from __future__ import annotations

import numpy as np
import pytest

from qkv import attention, scores
from qkv.frameworks.stored_rows import Candidates, KeyTermsCache, RowChunk, StoredRows
from qkv.weightings import Hard, Softmax, TopK

TOTAL, WIDTH = 60, 5


def make_candidates(key, value, own, shared=()):
    return Candidates(
        own=np.array(own),
        shared=np.array(shared, int),
        total=len(key),
        read_keys=lambda at: key[at],
        read_values=None if value is None else lambda at: value[at],
        cache=KeyTermsCache({}, len(key)),
    )


@pytest.mark.parametrize("score", [scores.Cosine(0.2), scores.Dot(), scores.Gaussian(0.7)])
@pytest.mark.parametrize("weighting", [Softmax(0.5), TopK(3), TopK(50), Hard()])
@pytest.mark.parametrize("shared", [(), (3, 20, 59)])
def test_equals_stored_rows(score, weighting, shared):
    rng = np.random.default_rng(0)
    key = rng.normal(size=(TOTAL, WIDTH)).astype(np.float32)
    key[11] = key[10]  # of equal scores, the first wins
    value = rng.normal(size=(TOTAL, 2))
    value[:, 1] = 7.3  # the mean of equal values is this value
    queries = rng.normal(size=(4, WIDTH)).astype(np.float32)
    queries[0] = 5 * key[10]
    own = np.sort(rng.permuted(np.tile(np.arange(21, 59), (4, 1)), axis=1)[:, :8], axis=1)
    own[0, :4] = 7, 10, 11, 19
    own[0], own[1, 5:] = np.sort(own[0]), TOTAL  # none
    rows = make_candidates(key, value, own, shared)
    found = attention.weigh_candidates(rows, queries, score, weighting)
    for i, (positions, weighed) in enumerate(found):
        expected = np.sort([*own[i][own[i] < TOTAL], *shared]).astype(int)
        np.testing.assert_array_equal(positions, expected)
        chunk = RowChunk(key[expected], value[expected])
        stored = StoredRows(lambda chunk=chunk: [chunk], (len(expected), WIDTH), 2)
        exact = attention.weigh_rows(stored, queries[i : i + 1], score=score, weighting=weighting)
        np.testing.assert_allclose(weighed.weights, exact.weights, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(weighed.output, exact.output, rtol=1e-5)
        np.testing.assert_allclose(weighed.best_score, exact.best_score, rtol=1e-5)
        assert weighed.output[0, 1] == 7.3 and weighed.rows_read == len(expected)
        assert (weighed.lse is None) == (exact.lse is None)
        if exact.lse is not None:
            np.testing.assert_allclose(weighed.lse, exact.lse, rtol=1e-5)


def test_scores_that_overflow_are_left_out():
    key = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    queries = np.array([[1.0, 2.0], [3e38, 3e38]], np.float32)
    rows = make_candidates(key * 4, None, [[0, 1], [0, 1]])
    (_, fine), (positions, none) = attention.weigh_candidates(
        rows, queries, scores.Dot(), Softmax()
    )
    assert none is None and positions.tolist() == [0, 1]
    assert fine.output.shape == (1, 0)
    np.testing.assert_allclose(fine.weights, [[0.018, 0.982]], atol=1e-3)
    tiny = attention.weigh_candidates(rows, queries, scores.Gaussian(1e-12), Softmax())
    assert [weighed for _, weighed in tiny] == [None, None]


def test_values_that_are_not_finite():
    key = np.eye(2, dtype=np.float32)
    value = np.array([[np.inf, 1.0], [2.0, 1.0]])
    rows = make_candidates(key, value, [[0, 1]])
    ((_, weighed),) = attention.weigh_candidates(rows, key[1:], scores.Dot(), Hard())
    np.testing.assert_array_equal(weighed.output, [[2.0, 1.0]])
    ((_, weighed),) = attention.weigh_candidates(rows, key[1:], scores.Dot(), Softmax())
    np.testing.assert_array_equal(weighed.output, [[np.inf, 1.0]])
