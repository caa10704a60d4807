"""The additive score as a dot product: features against their polynomials and against tanh."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import COARSE, PAIRS, features
from qkv.engines.triton.features import features_grad, features_of, fit_of, tables
from qkv.scores.separable import table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE, GRID = tables(PAIRS, COARSE, DEVICE)
ORDER = TABLE.shape[3]
SERIES = torch.tensor(table(PAIRS, COARSE)[1][..., :ORDER], device=DEVICE)
LAST = len(GRID) - 1
WIDEST = float(GRID[LAST])


def polynomials(x, v, rows):
    """The features in float64 by the powers of T's definition, differentiable."""
    z = x / GRID[rows].double()
    terms = [torch.ones_like(z), z]
    while len(terms) < 2 * ORDER:
        terms.append(2 * z * terms[-1] - terms[-2])
    c = SERIES[rows]
    even, odd = (
        [sum(c[:, half, j, k] * terms[2 * k + half] for k in range(ORDER)) for j in range(PAIRS)]
        for half in range(2)
    )
    if v is None:
        return torch.cat(even + odd, -1)
    return torch.cat([v * part for part in odd + even], -1)


def some(*shape, scale=1.0, dtype=torch.float32):
    x = (torch.rand(shape, device=DEVICE) * 2 - 1) * scale
    return x.to(dtype)


def first_rows(*arrays):
    """The row of the table for each unit, by its definition."""
    reach = torch.cat([x.reshape(-1, x.shape[-1]) for x in arrays]).float().abs().amax(0)
    return torch.searchsorted(GRID, reach)


@pytest.mark.parametrize(
    ("reach_a", "reach_b", "row"),
    [
        (0.5, 0.1, 0),
        (float(GRID[7]), 0.2, 7),
        (0.1, float(GRID[7]) + 1e-3, 8),
        (0.1, WIDEST, LAST),
        (WIDEST + 0.01, 1.0, None),
        (1.0, float("inf"), None),
        (float("nan"), 1.0, None),
    ],
)
@pytest.mark.parametrize("h", [5, 131])
def test_each_unit_has_the_first_row_of_the_table_that_reaches(h, reach_a, reach_b, row):
    a, b = some(2, 7, h, scale=0.05), some(3, h, scale=0.05)
    a[1, 3, -2], b[2, -2] = -reach_a, reach_b
    fit, beyond = fit_of(a, b, TABLE, GRID)
    assert beyond.tolist() == [int(row is None)]
    rows = torch.zeros(h, dtype=torch.long, device=DEVICE)
    rows[-2] = LAST if row is None else row
    torch.testing.assert_close(fit[0], 1 / GRID[rows], rtol=1e-6, atol=0)
    assert torch.equal(fit[1:], TABLE[rows].reshape(h, -1).mT)


def test_arrays_larger_than_one_look_are_seen_to_the_end(monkeypatch):
    monkeypatch.setattr(features, "LOOKS", 2)
    a = torch.zeros(5 * features.LOOK + 3, 1, device=DEVICE)
    a[-1] = GRID[3]
    for one, two in ((a, a[:0]), (a[:1], a)):
        fit, beyond = fit_of(one, two, TABLE, GRID)
        torch.testing.assert_close(fit[0], 1 / GRID[3:4], rtol=1e-6, atol=0)
        assert not beyond.any()


def mixed(*shape, scale):
    """Units of unlike reach, from a tenth of the scale to all of it."""
    return some(*shape, scale=scale) * torch.linspace(0.1, 1.0, shape[-1], device=DEVICE)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "scale"),
    [
        ((3, 17, 5), (2, 5), 0.8),
        ((2, 1, 3, 64), (1, 41, 64), WIDEST),
        ((2, 130), (19, 130), 3),
    ],
)
def test_values_and_gradients_are_those_of_the_polynomials(shape_a, shape_b, scale):
    a, b, v = mixed(*shape_a, scale=scale), mixed(*shape_b, scale=scale), some(shape_a[-1])
    rows = first_rows(a, b)
    assert len(rows.unique()) > 1
    fit, beyond = fit_of(a, b, TABLE, GRID)
    exact = [x.double().requires_grad_() for x in (a, b, v)]
    want = polynomials(exact[0], None, rows), polynomials(exact[1], exact[2], rows)
    got = features_of(a, b, v, fit, beyond, PAIRS)
    for one, two in zip(got, want, strict=True):
        assert one.shape == two.shape
        torch.testing.assert_close(one.double(), two, rtol=0, atol=3e-6 * two.abs().max().item())
    along = [torch.randn_like(x) for x in got]
    da, db, parts = features_grad(*along, a, b, v, fit, beyond, PAIRS)
    expected = torch.autograd.grad(want, exact, [x.double() for x in along])
    for one, two in zip((da, db, parts.sum(0)), expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-5 * two.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, COARSE), (torch.bfloat16, 3 * COARSE)]
)
def test_their_product_is_the_score(dtype, error):
    a, b = (mixed(rows, 8, scale=WIDEST).to(dtype) for rows in (40, 30))
    v = some(8)
    phi, psi = features_of(a, b, v, *fit_of(a, b, TABLE, GRID), PAIRS)
    assert phi.dtype == psi.dtype == dtype
    want = (torch.tanh(a.double()[:, None] + b.double()[None]) * v.double()).sum(-1)
    off = (phi.double() @ psi.double().mT - want).abs().max()
    assert off < error * v.abs().sum()


def test_one_unit_beyond_the_table_and_all_features_and_gradients_are_zero():
    a, b, v = some(4, 6), some(3, 6), some(6)
    b[1, 2] = 2 * WIDEST
    fit, beyond = fit_of(a, b, TABLE, GRID)
    found = features_of(a, b, v, fit, beyond, PAIRS)
    along = [torch.ones_like(x) for x in found]
    for x in (*found, *features_grad(*along, a, b, v, fit, beyond, PAIRS)):
        assert not x.any()


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows(n, m):
    a, b, v = some(n, 6), some(m, 6), some(6)
    fit, beyond = fit_of(a, b, TABLE, GRID)
    found = features_of(a, b, v, fit, beyond, PAIRS)
    assert [tuple(x.shape) for x in found] == [(n, 12 * PAIRS), (m, 12 * PAIRS)]
    da, db, parts = features_grad(*found, a, b, v, fit, beyond, PAIRS)
    assert da.shape == a.shape
    assert db.shape == b.shape
    assert parts.sum(0).shape == v.shape


def test_arrays_need_not_be_contiguous():
    a, b, v = some(6, 10), some(6, 7), some(6)
    plain = a.mT.contiguous(), b.mT.contiguous(), v
    fits = fit_of(a.mT, b.mT, TABLE, GRID)
    for one, two in zip(
        (*fits, *features_of(a.mT, b.mT, v, *fits, PAIRS)),
        (*fit_of(*plain[:2], TABLE, GRID), *features_of(*plain, *fits, PAIRS)),
        strict=True,
    ):
        assert torch.equal(one, two)
