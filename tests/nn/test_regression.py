"""Kernel regression is Nadaraya–Watson, and learns its bandwidths."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qkv.errors import QkvError  # noqa: E402
from qkv.nn import KernelRegression  # noqa: E402

F64 = {"dtype": torch.float64}


def test_kernel_regression_is_nadaraya_watson():
    key, value, query = torch.randn(20, 3, **F64), torch.randn(20, **F64), torch.randn(5, 3, **F64)
    model = KernelRegression(key, value, bandwidth=0.8)
    near = torch.exp(-(torch.cdist(query, key) ** 2) / (2 * 0.8**2))
    torch.testing.assert_close(model(query), near @ value / near.sum(1))
    near = torch.exp(-(torch.cdist(key, key) ** 2) / (2 * 0.8**2)).fill_diagonal_(0)
    torch.testing.assert_close(model.held_out(), near @ value / near.sum(1))


def test_kernel_regression_learns_which_features_count():
    torch.manual_seed(0)
    key = torch.rand(200, 2)
    value = torch.stack(((6 * key[:, 0]).sin(), key[:, 0]), 1)
    model = KernelRegression(key, value, bandwidth=0.5, features=True)
    seen_losses = []
    losses = model.fit(60, callback=seen_losses.append)
    assert losses[-1] < 0.2 * losses[0]
    assert seen_losses == losses
    useful, useless = model.score.bandwidth.tolist()
    assert useful < 0.2 < 0.5 < useless
    again = KernelRegression(key, value, features=True)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(key), model(key))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: KernelRegression(torch.zeros(3), torch.zeros(3)), "key"),
        (lambda: KernelRegression(torch.zeros(3, 1), torch.zeros(4)), "value"),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call()
