"""The plotted numbers, against attend and weights, and against the formulas."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.plot import data

rng = np.random.default_rng(0)


def dense(query: Any, key: Any, **options: Any) -> Any:
    """α as what the plain equation makes of the rows of the identity."""
    return qkv.attend(query, key, np.eye(key.shape[-2]), engine="dense", **options)


def alpha(*shape: int) -> Any:
    x = rng.normal(size=(*shape, 4))
    return dense(x, x)


class TestHeatmaps:
    def test_whole_where_it_fits(self) -> None:
        matrix = alpha(6)
        result = data.heatmaps(matrix, most=(6, 9))
        np.testing.assert_array_equal(result.cells[0, 0], matrix)
        assert result.block == (1, 1)

    @pytest.mark.parametrize(("pool", "pooling"), [("max", np.max), ("mean", np.mean)])
    def test_pooled(self, pool: Any, pooling: Any) -> None:
        matrix = alpha(50)
        cells, block = data.heatmaps(matrix, most=(7, 12), pool=pool)
        assert cells.shape == (1, 1, 7, 12)
        assert block == (8, 5)
        rows, columns = (np.append(np.arange(c) * 50 // c, 50) for c in (7, 12))
        for i, j in np.ndindex(7, 12):
            part = matrix[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
            assert max(part.shape) <= 8
            np.testing.assert_allclose(cells[0, 0, i, j], pooling(part), rtol=1e-12)

    def test_a_mean_leaves_nan_out(self) -> None:
        matrix = [[np.nan, 1.0, np.nan, np.inf], [0.0, 2.0, np.nan, np.nan]]
        result = data.heatmaps(matrix, most=(1, 2), pool="mean").cells
        np.testing.assert_array_equal(result, [[[[1.0, np.nan]]]])

    def test_unknown_pool(self) -> None:
        with pytest.raises(ArgumentError, match='pool must be "max" or "mean", not \'sum\''):
            data.heatmaps(np.eye(3), pool="sum")  # type: ignore[arg-type]


class TestKernels:
    def test_are_the_weights_of_one_key_against_another(self) -> None:
        r, values = data.kernels(reach=2, points=41)
        for name, value in values.items():
            weighting = "normalized" if name not in ("gaussian", "laplace") else "softmax"
            # A key at distance r against one that lies on the query: K(r) / (K(r) + K(0)).
            for at, k in zip(r, value, strict=True):
                pair = np.array([[at], [0.0]])
                result = dense(np.zeros((1, 1)), pair, score=name, weighting=weighting)
                np.testing.assert_allclose(k / (k + 1), result[0, 0], atol=1e-12)

    def test_reach_must_be_positive(self) -> None:
        with pytest.raises(ArgumentError, match="reach must be a number above 0, not -1"):
            data.kernels(reach=-1)


class TestRegression:
    key = rng.uniform(0, 3, 25)
    value = np.sin(key)

    @pytest.mark.parametrize(
        ("score", "weighting"),
        [
            ("gaussian", None),
            ("boxcar", None),
            ("gaussian", "hard"),
            ("constant", "average"),
            ("laplace", weightings.TopK(3)),
            ("boxcar", weightings.Normalized("nearest")),
            (scores.Boxcar(1e-3), weightings.Normalized("nearest")),
            (scores.Epanechnikov(0.2), "sparsemax"),
            (lambda q, k: -abs(q - k[:, 0]), None),
        ],
    )
    def test_is_attend(self, score: Any, weighting: Any) -> None:
        result = data.regression(self.key, self.value, {"it": score}, weighting)
        weighting_name = weighting or ("normalized" if score == "boxcar" else "softmax")
        q, k, v = (x[:, None] for x in (result.query, result.key, result.value))
        (fit,) = result.fits.values()
        options: Any = {"score": score, "weighting": weighting_name}
        np.testing.assert_allclose(fit.weights, dense(q, k, **options), atol=1e-12)
        np.testing.assert_allclose(fit.weights, qkv.weights(q, k, **options), atol=1e-12)
        np.testing.assert_allclose(fit.fitted, qkv.attend(q, k, v, **options)[:, 0], atol=1e-12)

    @pytest.mark.parametrize("weighting", [None, "raw"])
    def test_there_is_no_value_where_no_key_is_in_reach(self, weighting: Any) -> None:
        by = {"it": scores.Boxcar(0.25)}
        fit = data.regression([0.0, 1.0], [0.0, 3.0], by, weighting, query=[0.0, 0.5, 1]).fits["it"]
        np.testing.assert_array_equal(fit.fitted, [0.0, np.nan, 3.0])
        np.testing.assert_array_equal(fit.weights, [[1, 0], [0, 0], [0, 1]])

    def test_keys_are_sorted_with_their_values(self) -> None:
        result = data.regression(self.key, self.value)
        assert np.all(np.diff(result.key) >= 0)
        np.testing.assert_allclose(np.sin(result.key), result.value)
        assert (result.query[0], result.query[-1]) == (self.key.min(), self.key.max())

    def test_queries_of_ones_own(self) -> None:
        torch = pytest.importorskip("torch")
        query = torch.tensor([[0.5], [1.5]], requires_grad=True)
        result = data.regression(self.key, self.value, ["gaussian", "boxcar"], query=query)
        assert list(result.fits) == ["gaussian", "boxcar"]
        np.testing.assert_array_equal(result.query, [0.5, 1.5])

    def test_refusals(self) -> None:
        with pytest.raises(ShapeError, match="value has 2 entries; expected 25, one per key"):
            data.regression(self.key, [1.0, 2.0])
        with pytest.raises(ShapeError, match="key has shape"):
            data.regression(np.ones((3, 2)), np.ones(3))
        with pytest.raises(CombinationError):
            data.regression(self.key, self.value, "gaussian", "normalized")
        with pytest.raises(ArgumentError, match="two of the same name"):
            data.regression(self.key, self.value, [scores.Gaussian(1.0), scores.Gaussian(2.0)])


def test_surfaces_are_scores_of_numbers() -> None:
    w = rng.normal(size=(3, 2, 1))
    inputs = {"a": scores.Additive(w[0], w[1], w[2, :, 0]), "dot": "dot", "exact": "exact"}
    query, key, values = data.surfaces(inputs, reach=1.5, points=9)
    for i, j in np.ndindex(9, 9):
        tanh = np.tanh(w[0, :, 0] * query[i] + w[1, :, 0] * key[j])
        np.testing.assert_allclose(values["a"][i, j], tanh @ w[2, :, 0])
        np.testing.assert_allclose(values["dot"][i, j], query[i] * key[j])
        assert values["exact"][i, j] == (i == j)


def test_alignment_is_the_weights_that_count() -> None:
    matrix = alpha(5)
    result = data.alignment(matrix, least=0.1)
    assert len(result) == np.count_nonzero(matrix >= 0.1)
    assert all(link.weight == matrix[link.query, link.key] for link in result)
    assert [link.weight for link in result] == sorted((x.weight for x in result), reverse=True)
    with pytest.raises(ShapeError, match=r"weights has shape \(1, 5, 5\); expected \(n, m\)"):
        data.alignment(matrix[None])


class TestFlow:
    def test_is_a_product_over_the_layers(self) -> None:
        inputs = alpha(3, 2, 5)
        raw, rollout = data.flow(inputs)
        np.testing.assert_allclose(raw, inputs.mean(1))
        first, second, third = ((a + np.eye(5)) / 2 for a in raw)
        np.testing.assert_allclose(rollout[0], first)
        np.testing.assert_allclose(rollout[2], third @ second @ first)
        np.testing.assert_allclose(rollout.sum(-1), 1)

    def test_needs_squares(self) -> None:
        with pytest.raises(ShapeError, match="3 queries and 4 keys"):
            data.flow(np.ones((1, 1, 3, 4)))


class TestEntropy:
    def test_is_the_mean_over_queries(self) -> None:
        inputs = alpha(2, 3, 7)
        result, most = data.entropy(inputs)
        np.testing.assert_allclose(result, -(inputs * np.log(inputs)).sum(-1).mean(-1))
        assert most == np.log(7)

    def test_zeros_count_nothing(self) -> None:
        inputs = np.stack([np.eye(4), np.diag([1.0, 0, 0, 0]), np.zeros((4, 4))])
        inputs[1, 0] = 0.25
        np.testing.assert_allclose(data.entropy(inputs).entropy, [[0, np.log(4), np.nan]])


def test_heads_are_captured_weights() -> None:
    inputs = alpha(2, 3, 100)
    cells, block = data.heads(inputs)
    assert (cells.shape, block) == ((2, 3, 48, 48), (3, 3))
    np.testing.assert_array_equal(cells.max((-1, -2)), inputs.max((-1, -2)))

    class Captured:
        weights = inputs

    np.testing.assert_array_equal(data.heads(Captured()).cells, cells)
    with pytest.raises(ShapeError, match=r"expected \(heads, n, m\) or \(layers, heads, n, m\)"):
        data.heads(np.eye(3))
    with pytest.raises(DtypeError, match="weights has dtype"):
        data.heads(np.full((1, 2, 2), "a"))


def test_no_twin_needs_matplotlib() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import numpy as np
from qkv.plot import data
a = np.full((2, 2, 3, 3), 1 / 3)
for twin in (data.heatmaps, data.heads, data.flow, data.entropy):
    twin(a)
data.alignment(a[0, 0]); data.kernels(); data.surfaces("dot"); data.bars(["a"], [1.0])
data.regression([1.0, 2.0], [1.0, 2.0])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
