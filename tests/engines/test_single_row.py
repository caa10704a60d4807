"""The single-row engine against `dense`, and the calls that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv import weightings

SHAPES = [
    ((2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 3)),
    ((6, 5), (8, 5), (8, 2)),
    ((1, 5), (8, 5), (3, 8, 2)),
]
CONSTANT_CALLS: list[dict[str, Any]] = [
    {"score": "constant", "weighting": weighting}
    for weighting in (
        "softmax",
        "hard",
        "normalized",
        "raw",
        "sigmoid",
        "sparsemax",
        "entmax15",
        weightings.TopK(3),
    )
] + [{"weighting": "average"}, {"score": "constant", "weighting": "average"}]


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", CONSTANT_CALLS, ids=str)
def test_values(options: dict[str, Any], shapes: Any, dtype: Any) -> None:
    arrays: Any = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if dtype is None:
        arrays = [x.numpy() for x in arrays]
    outputs: list[dict[str, Any]] = [{}, {"return_weights": True}]
    outputs += [{"return_lse": True}] if options.get("weighting") == "softmax" else []
    outputs += [{"return_weights": "mean"}] if len(shapes[0]) > 2 else []
    for extra in outputs:
        assert qkv.explain(*arrays, **options).engine == "single_row"
        got = qkv.attend(*arrays, **options, **extra)
        want = qkv.attend(*arrays, **options, **extra, engine="dense")
        pairs = [(got, want)] if not extra else list(zip(got, want, strict=True))
        for x, y in pairs:
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            np.testing.assert_allclose(to_numpy(x), to_numpy(y), atol=1e-2 if dtype else 1e-6)
            x[..., 0] = 0.0  # each row has memory of its own
    assert not isinstance(got, np.ndarray) or got.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{"weighting": "average"}, {"score": "constant", "weighting": weightings.Softmax(0.3)}],
)
def test_later_calls_average_the_values(options: dict[str, Any], shapes: Any, dtype: Any) -> None:
    for _ in range(3):
        arrays: Any = [torch.randn(shape, dtype=dtype) for shape in shapes]
        got = qkv.attend(*arrays, **options)
        want = qkv.attend(*arrays, **options, engine="dense")
        torch.testing.assert_close(got, want, atol=1e-2 if dtype != torch.float32 else 1e-6, rtol=0)


def test_gradient_of_the_values() -> None:
    q, k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(3))
    along = torch.randn(2, 6, 4)
    got, want = (
        torch.autograd.grad(qkv.attend(q, k, v, weighting="average", engine=engine), v, along)[0]
        for engine in ("single_row", "dense")
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "the weights depend on the query"),
        ({"score": "constant", "mask": "causal"}, "the mask may differ"),
        ({"score": "constant", "dropout_p": 0.5}, "its own dropout"),
        ({"score": "constant", "mask": np.zeros((5, 5))}, "the mask may differ"),
        (
            {"score": "constant", "weighting": weightings.Softmax(np.ones((5, 1)))},
            "the weighting has arrays",
        ),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    with pytest.raises(qkv.QkvError, match=reason):
        qkv.attend(x, x, x, **options, engine="single_row")
    with pytest.raises(qkv.QkvError, match="a length is 0"):
        qkv.attend(x, x[:0], x[:0], score="constant", engine="single_row")


@pytest.mark.parametrize("to_array", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_a_mean_is_computed_for_each_length(to_array: Any) -> None:
    """One plan serves lengths with as many binary digits."""
    rng = np.random.default_rng(0)
    for n, m in ((9, 17), (9, 17), (12, 30), (12, 30), (15, 16), (15, 16)):
        q, k, v = (rng.normal(size=shape) for shape in ((2, 4, n, 3), (2, 2, m, 3), (2, 2, m, 5)))
        got = qkv.attend(*map(to_array, (q, k, v)), weighting="average")
        want = np.broadcast_to(v.mean(-2).repeat(2, 1)[:, :, None], (2, 4, n, 5))
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-12)
    huge = np.full((1, 1, 4, 2), 3e38, "f4")
    got = qkv.attend(*map(to_array, (huge * 0, huge * 0, huge)), weighting="average")
    assert np.isfinite(to_numpy(got)).all()
