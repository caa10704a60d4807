"""Gradients of φ and ψ of a width that the device alone knows, against the products themselves."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton.backward import wide_gradients
from qkv.engines.triton.launching import tile_choice
from tests.engines.triton.test_additive_features import DEVICE


@pytest.mark.parametrize("band", [(None, None), (None, 5), (-30, None), (-20, 10), (90, None)])
def test_columns_up_to_the_width_are_the_products(band, monkeypatch):
    monkeypatch.setattr(
        wide_gradients, "TILE", tile_choice.Tile(64, 64, 64, 4, 2, uses_descriptors=True)
    )
    pairs, n, m, w, line = 2, 70, 100, 192, 80
    torch.manual_seed(0)
    ds, phi, psi = (
        torch.randn(shape).to(DEVICE, torch.float16)
        for shape in ((pairs, m, line), (pairs, n, w), (pairs, m, w))
    )
    at = torch.arange(m, device=DEVICE)[:, None] - torch.arange(line, device=DEVICE)
    lower, upper = (-line if band[0] is None else band[0]), (m if band[1] is None else band[1])
    ds = torch.where((at >= lower) & (at <= upper), ds, 0.0)
    ds[..., n:] = float("nan")  # memory that was never written
    dphi, dpsi = torch.full_like(phi, 7), torch.full_like(psi, 7)
    width = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    wide_gradients.fill_gradients(ds, phi, psi, dphi, dpsi, width, band)
    real = ds[..., :n].double()
    want = real.mT @ psi.double(), real @ phi.double()
    for one, two in zip((dphi, dpsi), want, strict=True):
        torch.testing.assert_close(one[..., :64].double(), two[..., :64], rtol=2e-3, atol=2e-2)
        assert (one[..., 64:] == 7).all()


def test_cleared():
    x = torch.full((3, 5000), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide_gradients.fill_zeros(x[:2])
    assert (x[:2] == 0).all() and x[2].isnan().all()
