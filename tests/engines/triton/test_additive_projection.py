"""W₁q + b and W₂k in one pass, against the products themselves."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton.additive import additive_projection
from tests.engines.triton.test_additive_features import DEVICE


def normal(*shape):
    return torch.randn(shape).to(DEVICE, torch.float16)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "few", "m", "h", "biased"),
    [((2, 4, 37, 20), 2, 300, 5, True), ((1, 1, 3, 64), 1, 2, 64, False)],
)
def test_values_gradients_and_reach(shape, few, m, h, biased, monkeypatch):
    monkeypatch.setattr(additive_projection, "PROGRAMS_PER_SIDE", 2)  # several tiles per program
    b, heads, n, d = shape
    query = normal(b, n, heads, d).transpose(1, 2)  # as heads lie
    inputs = [
        query,
        normal(b, few, m, d),
        normal(h, d),
        normal(h, d),
        normal(h) if biased else None,
    ]
    inputs = [None if x is None else x.requires_grad_() for x in inputs]
    assert additive_projection.is_supported(*inputs)
    one, two, parts = additive_projection.project_hidden(*inputs)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    want = wide[0] @ wide[2].mT + (wide[4] if biased else 0.0), wide[1] @ wide[3].mT
    torch.manual_seed(0)
    along = [torch.randn_like(x) for x in (one, two)]
    learned = [x for x in inputs if x is not None]
    got = torch.autograd.grad((one, two), learned, along)
    exact = torch.autograd.grad(
        want, [x for x in wide if x is not None], [x.double() for x in along]
    )
    for x, y in zip((one, two, *got), (*want, *exact), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-3 * y.abs().max().item())
    rows = torch.cat([x.detach().reshape(-1, h) for x in (one, two)])
    assert torch.equal(parts.amax(0), rows.float().abs().amax(0))


def test_what_is_not_finite_reaches_beyond_all():
    inputs = [normal(1, 1, 4, 8), normal(1, 1, 4, 8), normal(3, 8), normal(3, 8), normal(3)]
    inputs[1][0, 0, 2, 1] = float("nan")
    assert additive_projection.project_hidden(*inputs)[2].amax(0).isinf().all()


def test_it_knows_rows_of_16_bits_and_of_one_width():
    inputs = [normal(1, 1, 4, 8), normal(1, 1, 4, 8), normal(3, 8), normal(3, 8), None]
    assert additive_projection.is_supported(*inputs)
    assert not additive_projection.is_supported(*[None if x is None else x.float() for x in inputs])
    assert not additive_projection.is_supported(inputs[0], inputs[1], inputs[2], None, None)
    assert not additive_projection.is_supported(inputs[0][0], *inputs[1:])
    assert not additive_projection.is_supported(
        inputs[0], normal(1, 1, 4, 6), inputs[2], normal(3, 6), None
    )
