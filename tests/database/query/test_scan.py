"""The rows of an answer are the heaviest, in the order of a stable sort."""

from __future__ import annotations

import os

import numpy as np
import pytest

import qkv
from qkv.database.errors import StoreDamagedError
from qkv.database.query.scan import ROWS_PER_RUN, find_top_candidates
from qkv.database.storage import limits
from qkv.frameworks.stored_rows import RowChunk, StoredRows


@pytest.mark.parametrize("top", [1, 2, 7, 40])
def test_rows_are_ranked_by_the_size_of_their_weight_and_then_by_their_place(top: int) -> None:
    """Over several runs of rows whose maxima are equal, and with weights of both signs."""
    rng = np.random.default_rng(3)
    keys = rng.integers(-2, 3, size=(3 * ROWS_PER_RUN - 50, 2)).astype(np.float32)
    query = np.array([3.0, 1.0], np.float32)
    weights = keys @ query
    database = qkv.Database(keys, np.arange(float(len(keys))))
    actual = database.ask(query, score="dot", weighting="raw", top=top)
    want = np.argsort(-np.abs(weights), kind="stable")[:top]
    assert [row.index for row in actual.rows] == want.tolist()
    np.testing.assert_allclose([row.weight for row in actual.rows], weights[want])


def test_a_filter_reuses_the_squares_of_the_keys():
    """Each filter took another mean key, for which the squares of all keys were computed again."""
    rng = np.random.default_rng(0)
    key, value, part = rng.normal(size=(3000, 8)), rng.normal(size=3000), np.arange(3000) % 10
    columns = {"key": list(key), "value": value, "part": part}
    D = qkv.Database.from_columns(columns, key="key", value="value")
    options = {"score": qkv.scores.Gaussian(2.0), "weighting": "softmax"}
    whole = D.ask(key[5], **options).weights
    before = dict(D._view._key_terms_cache[False])
    for most in (2, 5, 9):
        kept = part < most
        got = D.ask(key[5], where=f"part < {most}", **options).weights
        np.testing.assert_allclose(got, np.where(kept, whole, 0) / whole[kept].sum(), atol=1e-6)
    after = D._view._key_terms_cache[False]
    assert {x: id(y) for x, y in after.items()} == {x: id(y) for x, y in before.items()}
    np.testing.assert_array_equal(D.ask(key[5], **options).weights, whole)


@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "sparse", "nan"])
def test_top_candidates(kind: str) -> None:
    """Runs with equal maxima need not all be searched."""
    rng = np.random.default_rng(len(kind))
    for m in (1, 600, 3 * ROWS_PER_RUN, 5 * ROWS_PER_RUN - 50, 12 * ROWS_PER_RUN + 7):
        x = rng.random(m).astype(np.float32)
        if kind in ("ties", "nan"):
            x = np.round(x * 4) / 4
        elif kind == "equal":
            x[:] = 1 / m
        elif kind == "sparse":
            x[rng.random(m) < 0.99] = 0
        if kind == "nan":
            x[rng.integers(0, m, 3)] = np.nan
        want = [i for i in np.argsort(-x, kind="stable").tolist() if x[i] > 0]
        for top in (1, 5, 11, m // 2 + 1, m):
            found = find_top_candidates(x, top)
            assert (np.diff(found) > 0).all() and (x[found] > 0).all()
            assert set(want[:top]) <= set(found.tolist())


@pytest.mark.parametrize("weighting", ["softmax", "entmax15", "raw", qkv.weightings.TopK(3)])
def test_a_constant_score_does_not_read_the_keys(weighting) -> None:
    D = qkv.Database(np.eye(4, 3), np.arange(4.0))
    want = D.ask(np.ones(3), score=Slow(), weighting=weighting)
    got = D.ask(np.ones(3), score="constant", weighting=weighting)
    np.testing.assert_allclose(got.weights, want.weights)
    assert got.value == pytest.approx(want.value)
    keys, value = np.full((4000, 3), np.nan), np.arange(4000.0)
    rows = StoredRows(lambda: [RowChunk(keys, value[:, None])], keys.shape, 1)
    weighed = qkv.attention.weigh_rows(rows, np.ones((2, 3)), score="constant", weighting="softmax")
    np.testing.assert_allclose(weighed.output, 1999.5)


class Slow(qkv.scores.Constant):
    """The constant, computed from the keys."""


def test_a_file_that_is_truncated_and_restored(tmp_path, monkeypatch) -> None:
    """The spans of a table are cached, but each use checks its files."""
    monkeypatch.setattr(limits, "MAX_UNMAPPED_BYTES", 0)
    key = np.random.default_rng(0).normal(size=(9000, 4)).astype(np.float32)
    columns = {"key": list(key), "value": np.arange(9000.0)}
    path = tmp_path / "s.qkv"
    qkv.Database.from_columns(columns, key="key", value="value", path=path).close()
    with qkv.open(path) as D:
        want = D.ask(key[5]).weights
        np.testing.assert_array_equal(D.ask(key[5]).weights, want)
        file = max(path.glob("segment-*"), key=lambda x: x.stat().st_size)
        content = file.read_bytes()
        os.truncate(file, 4096)
        for _ in range(2):
            with pytest.raises(StoreDamagedError):
                D.ask(key[5])
        other = file.with_suffix(".restored")
        other.write_bytes(content)
        other.rename(file)
        np.testing.assert_array_equal(D.ask(key[5]).weights, want)


def test_a_score_is_adapted_to_the_keys_once(monkeypatch) -> None:
    key = np.random.default_rng(0).normal(size=(2000, 16))
    D, calls = qkv.Database(key, np.arange(2000.0)), []
    adapt = qkv.scores.Gaussian.adapt_to_keys

    def count(score, sample):
        calls.append(score)
        return adapt(score, sample)

    monkeypatch.setattr(qkv.scores.Gaussian, "adapt_to_keys", count)
    one, two = qkv.scores.Gaussian(2.0), qkv.scores.Gaussian(3.0)
    answers = [D.ask(key[0], score=score).lse for score in (one, one, two, one)]
    assert len(calls) == 3
    assert answers[0] == answers[1] == answers[3] != answers[2]
