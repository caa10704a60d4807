"""Each row by itself: what is not finite in one does not move the others."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from tests.cases import WEIGHTINGS

torch = pytest.importorskip("torch")
MAKE = {
    "numpy": np.array,
    "torch": torch.tensor,
    "torch with gradients": lambda x: torch.tensor(x, requires_grad=True),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("m", [6, 200])
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_row_that_is_not_finite_leaves_the_others_alone(name, engine, m, make):
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(6, 4)), rng.normal(size=(m, 4)), rng.normal(size=(m, 2))
    weighting = WEIGHTINGS[name]
    score = "epanechnikov" if weighting.needs_nonnegative else "scaled_dot"

    def attend(q):
        out = qkv.attend(*map(make, (q, k, v)), score=score, weighting=weighting, engine=engine)
        return np.asarray(out.detach() if isinstance(out, torch.Tensor) else out)

    want = attend(q)
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = q.copy()
        spoiled[2, 1] = bad
        np.testing.assert_allclose(
            np.delete(attend(spoiled), 2, 0), np.delete(want, 2, 0), atol=1e-12, err_msg=str(bad)
        )


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_scores_of_16_bits_are_summed_in_32(name):
    s = np.abs(np.random.default_rng(0).normal(size=(3, 5))).astype("float16")
    got, want = WEIGHTINGS[name](s), WEIGHTINGS[name](s.astype("float64"))
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "weighting", ["softmax", "sparsemax", "hard", "raw", "sigmoid", qkv.weightings.TopK(3)]
)
def test_masked_rows_of_one_numpy_query_are_ignored(weighting, bad):
    """The scores of one query are filled, and its sum is checked, instead of keys and values."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 1, 16)), rng.normal(size=(2, 40, 16)), rng.normal(size=(2, 40, 3))
    live = rng.random((1, 40)) > 0.4
    want = qkv.attend(q, k[:, live[0]], v[:, live[0]], weighting=weighting)
    k[:, ~live[0]], v[:, ~live[0]] = bad, bad
    np.testing.assert_allclose(qkv.attend(q, k, v, weighting=weighting, mask=live), want)
    none = qkv.attend(q, k, v, weighting=weighting, mask=np.zeros((1, 40), bool))
    np.testing.assert_array_equal(none, 0)
    v[0, np.flatnonzero(live[0])[0], 1] = bad
    got = qkv.attend(q, k, v, weighting=weighting, mask=live)
    want = qkv.attend(q, k[:, live[0]], v[:, live[0]], weighting=weighting)
    np.testing.assert_allclose(got, want)
