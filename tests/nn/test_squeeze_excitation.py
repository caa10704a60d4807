"""Squeeze-and-excitation is its formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qkv.errors import QkvError  # noqa: E402
from qkv.nn import SqueezeExcitation  # noqa: E402

F64 = {"dtype": torch.float64}


def test_squeeze_excitation_is_its_formula():
    layer = SqueezeExcitation(8, reduction=2).double()
    x = torch.randn(3, 8, 4, 5, **F64, requires_grad=True)
    gate = torch.sigmoid(layer.fc2(layer.fc1(x.mean((2, 3))).relu()))
    want = x * gate[..., None, None]
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.gate(x), gate)
    expected = [x, *layer.parameters()]
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), expected) for y in (layer(x), want)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_its_layers_are_called():
    """So hooks run, and a layer of another kind may stand in the place of one."""
    layer, x = SqueezeExcitation(8, reduction=2).double(), torch.randn(3, 8, 4, **F64)
    want = layer.gate(x)
    layer.fc2 = torch.nn.Sequential(layer.fc2)
    layer.fc2.register_forward_hook(lambda module, inputs, out: 0 * out)
    torch.testing.assert_close(layer.gate(x), torch.full_like(want, 0.5))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: SqueezeExcitation(8)(torch.zeros(1, 4, 2)), "x must be"),
        (lambda: SqueezeExcitation(0), "channels"),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call()
