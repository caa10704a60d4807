"""Blocks and cores: few queries among many keys, and many queries, shared out among threads."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.arrays import threads, to_numpy
from qkv.attention import request
from qkv.engines import streaming
from tests.cases import WEIGHTINGS
from tests.frameworks import FRAMEWORKS

EAGER = [fw for fw in FRAMEWORKS if fw.name in ("numpy", "torch", "strict")]


def arrays(n: int, m: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n * m)
    return [rng.normal(size=(rows, 4)) for rows in (n, m, m)]


@pytest.mark.parametrize("fw", EAGER, ids=lambda fw: fw.name)
@pytest.mark.parametrize("weighting", [w for w, k in WEIGHTINGS.items() if not k.needs_nonnegative])
def test_few_queries_among_many_keys(fw, weighting, monkeypatch):
    """The keys are shared out, whatever the weighting; the states are merged in their order."""
    monkeypatch.setattr(streaming, "READ", 1)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    given = arrays(3, 2600)
    given[1][2000] = given[1][100]  # a tie, far apart
    plan = streaming.plan_of(request(*given, "dot", "softmax", None, 0.0, None, None), 3, 512)
    assert len(plan) == 1 and len(plan[0][1]) > 3
    how = WEIGHTINGS[weighting]
    want = qkv.attend(*given, weighting=how, engine="dense")
    got = qkv.attend(*(fw.make(x) for x in given), weighting=how, engine="streaming")
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-10)


@pytest.mark.parametrize("fw", EAGER, ids=lambda fw: fw.name)
def test_many_queries_in_threads(fw, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (16, 64))
    given = arrays(200, 130)
    want = qkv.attend(*given, mask=qkv.masks.causal, engine="dense")
    for _ in range(3):
        got = qkv.attend(*(fw.make(x) for x in given), mask=qkv.masks.causal, engine="streaming")
        np.testing.assert_allclose(to_numpy(got), want, atol=1e-12)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (16, 64))

    def late(query, key):
        if float(query[0, 0]) == 7.0:
            raise RuntimeError("from a thread")
        return query @ key.T

    q, k, v = arrays(64, 64)
    q[48] = 7.0
    with pytest.raises(RuntimeError, match="from a thread"):
        qkv.attend(q, k, v, score=late, engine="streaming")
