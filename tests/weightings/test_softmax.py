"""Softmax: what is dead has no part, in its weights or in the gradient of its temperature."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import weightings
from qkv.errors import CombinationError, DtypeError


def test_the_temperature_s_gradient_does_not_meet_dead_scores():
    torch = pytest.importorskip("torch")
    s = torch.tensor([[1.0, 2.0, float("nan")], [0.5, -1.0, -float("inf")]])
    live, along = torch.tensor([[True, True, False]]), torch.tensor([1.0, -2.0, 3.0])
    result = []
    for scores, alive in ((s, live), (s[:, :2], live[:, :2])):
        t = torch.tensor(0.7, requires_grad=True)
        alpha = weightings.Softmax(t)(scores, alive)
        (alpha * along[: alpha.shape[1]]).sum().backward()
        result.append(float(t.grad))
    assert np.isfinite(result[0]) and abs(result[0] - result[1]) < 1e-6


@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        ("numpy", None),
        ("numpy", "dense"),
        ("numpy", "streaming"),
        ("torch", None),
        ("torch", "streaming"),
    ],
)
def test_more_keys_than_there_are_take_no_memory(framework, engine):
    xp = pytest.importorskip(framework)
    make = getattr(xp, "tensor", None) or xp.asarray
    every = weightings.TopK(10**12)
    for m in (9, 15):  # lengths of one plan
        x = np.random.default_rng(m).normal(size=(m, 4)).astype("float32")
        live = np.tri(m, dtype=bool)
        for mask in (None, live):
            options = {"engine": engine, "mask": None if mask is None else make(mask)}
            result = qkv.attend(*3 * (make(x),), weighting=every, **options)
            np.testing.assert_allclose(result, qkv.attend(x, x, x, mask=mask), 1e-5, 1e-6)
    np.testing.assert_allclose(every(make(x)), weightings.Softmax()(x), 1e-5)


@pytest.mark.parametrize("known", [weightings.Softmax, weightings.Entmax, weightings.Hard])
def test_other_weights_with_the_blocks_of_another_are_refused(known):
    with pytest.raises(
        DtypeError, match=r"Sharper overrides `weights` but inherits methods.*`scale_scores`"
    ):

        class Sharper(known):
            def weights(self, scores, live, k):
                return super().weights(scores * 3, live, k)


def test_weights_of_whole_rows_alone_are_not_taken_for_those_of_blocks():
    class Whole(weightings.Weighting):
        def weights(self, scores, live, k):
            return weightings.Softmax().weights(scores, live, k)

    x = np.random.default_rng(0).normal(size=(1, 40))
    np.testing.assert_allclose(Whole()(x), weightings.Softmax()(x))
    with pytest.raises(
        NotImplementedError, match="Whole can process whole rows only: define `block_weights`"
    ):
        Whole().block_weights(x[:, :20], None, np.arange(20)[None], ())
    x = np.random.default_rng(0).normal(size=(600, 4))  # a call in blocks, if it could
    np.testing.assert_allclose(qkv.attend(x, x, x, weighting=Whole()), qkv.attend(x, x, x))
    with pytest.raises(
        CombinationError, match="Whole can process whole rows only: define `block_weights`"
    ):
        qkv.Database(x, x).attend(x, weighting=Whole())


@pytest.mark.parametrize("base", [weightings.Weighting, weightings.Sigmoid])
def test_weights_without_a_slope_of_their_own_have_their_gradient_whole(base):
    torch = pytest.importorskip("torch")

    class Squared(base):
        score_gradient = weightings.Weighting.score_gradient

        def weights(self, scores, live, k):
            return scores * scores

        def block_weights(self, scores, live, k, result):
            return self.weights(scores, live, k)

    x = torch.randn(600, 4, dtype=torch.float64, requires_grad=True)
    actual = torch.autograd.grad(qkv.attend(x, x, x, weighting=Squared()).sum(), x)[0]
    want = torch.autograd.grad(((x @ x.T / 2) ** 2 @ x).sum(), x)[0]
    torch.testing.assert_close(actual, want)
    out = qkv.Database(np.eye(3), np.eye(3)).attend(torch.eye(3, requires_grad=True), score="dot",
                                                  weighting=Squared())  # fmt: skip
    with pytest.raises(CombinationError, match=r"Squared has no `score_gradient`.*define it"):
        out.sum().backward()


def test_a_weight_of_its_own_score_alone_may_be_written_anew():
    class Doubled(weightings.Raw):
        score_gradient = weightings.Weighting.score_gradient

        def weights(self, scores, live, k):
            return 2 * super().weights(scores, live, k)

    x = np.random.default_rng(0).normal(size=(300, 4))
    result = qkv.attend(x, x, x, weighting=Doubled(), engine="streaming")
    np.testing.assert_allclose(result, 2 * qkv.attend(x, x, x, weighting="raw"))


def test_other_weights_with_the_gradient_of_another_are_refused():
    with pytest.raises(DtypeError, match="Doubled overrides `weights` but inherits `score_grad"):

        class Doubled(weightings.Raw):
            def weights(self, scores, live, k):
                return 2 * super().weights(scores, live, k)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_topk_with_and_without_ties(name):
    """The fast choice of the k largest and the stable one agree; NaN stays NaN."""
    fw = pytest.importorskip(name)
    rows = np.array([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 5.0, 5.0, 1.0]])
    live = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    for i in ([0], [1], [2], [0, 1, 2]):
        scores = fw.asarray(rows[i])
        actual = np.asarray(weightings.TopK(2)(scores, fw.asarray(live[i])))
        want = np.zeros_like(actual)
        for row, x, seen in zip(want, rows[i], live[i], strict=True):
            at = np.argsort(np.where(seen, -x, np.inf), kind="stable")[: min(2, seen.sum())]
            row[at] = np.exp(x[at]) / np.exp(x[at]).sum()
        np.testing.assert_allclose(actual, want)
    rows[0, 3] = np.nan
    assert np.isnan(np.asarray(weightings.TopK(2)(fw.asarray(rows)))[0]).any()


def test_average_does_not_compute_scores():
    def fail(query, key):
        raise AssertionError("the weights do not depend on the scores")

    x, live = np.arange(6.0).reshape(3, 2), np.tri(3, dtype=bool)
    out = qkv.attend(x, x, x, score=fail, weighting="average", mask=live)
    np.testing.assert_allclose(out, [x[0], x[:2].mean(0), x.mean(0)])


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("k", [8, 9])
def test_a_top_k_of_all_keys_is_a_softmax(engine: str, k: int) -> None:
    """Also with a mask, and with keys that are not finite."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, length, 4)) for length in (5, 8, 8))
    live = rng.random((5, 8)) < 0.5
    live[0] = False
    key[1, 3, 0] = np.nan
    for mask in (None, live, qkv.masks.causal):
        options = {"mask": mask, "engine": engine, "return_lse": True}
        got = qkv.attend(query, key, value, weighting=qkv.weightings.TopK(k), **options)
        want = qkv.attend(query, key, value, weighting="softmax", **options)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y)
    weights = qkv.weights(query, key, weighting=qkv.weightings.TopK(7), mask=live)
    assert (np.count_nonzero(weights[0], axis=-1) <= 7).all()
