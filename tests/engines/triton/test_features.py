"""The additive score as a dot product: features against their polynomials and against tanh."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import COARSE, PAIRS, features
from qkv.engines.triton import fit as fits
from qkv.engines.triton.features import features_grad, features_of
from qkv.engines.triton.fit import fit_of, tables
from qkv.scores.separable import table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE, GRID = tables(PAIRS, COARSE, COARSE, DEVICE)
REACHES, COUNTS, SERIES = (torch.tensor(x, device=DEVICE) for x in table(PAIRS, COARSE, COARSE))
REACH = GRID[0]
LAST = len(REACH) - 1
WIDEST = float(REACH[LAST])


def polynomials(x, v, rows, key):
    """The features in float64 by the powers of T's definition, differentiable: what is added for
    each row alone, and the columns after the first four."""
    z = x / REACH[rows].double()
    terms = [torch.ones_like(z), z]
    while len(terms) < 2 * SERIES.shape[-1]:
        terms.append(2 * z * terms[-1] - terms[-2])
    c = SERIES[rows]

    def series(row, half):
        return sum(c[:, row, k] * terms[2 * k + half] for k in range(c.shape[-1]))

    factor = v if key else torch.ones_like(v)
    order = COUNTS[rows].argsort(descending=True, stable=True)
    columns = []
    for j in range(PAIRS):
        halves = [factor * series(j, 0), factor * series(PAIRS + j, 1)]
        units = order[COUNTS[rows][order] > j]
        room = torch.zeros_like(z[..., : len(units) % 2])  # so that they are even
        for half in halves[::-1] if key else halves:
            columns += [half[..., units], room]
    return (v * series(-1, 1)).sum(-1), torch.cat(columns, -1)


def some(*shape, scale=1.0, dtype=torch.float32):
    x = (torch.rand(shape, device=DEVICE) * 2 - 1) * scale
    return x.to(dtype)


def first_rows(*arrays):
    """The row of the table for each unit, by its definition."""
    reach = torch.cat([x.reshape(-1, x.shape[-1]) for x in arrays]).float().abs().amax(0)
    return torch.searchsorted(REACH, reach)


@pytest.mark.parametrize(
    ("reach_a", "reach_b", "row"),
    [
        (0.5, 0.1, 0),
        (float(REACH[7]), 0.2, 7),
        (0.1, float(REACH[7]) + 1e-3, 8),
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
    fit, beyond, spans = fit_of(a, b, TABLE, GRID)
    assert beyond.tolist() == [int(row is None)]
    rows = torch.zeros(h, dtype=torch.long, device=DEVICE)
    rows[-2] = LAST if row is None else row
    counts = COUNTS[rows]
    order = counts.argsort(descending=True, stable=True)
    assert fit[0].tolist() == order.argsort().tolist()
    assert fit[1].tolist() == order.tolist()
    torch.testing.assert_close(fit[2], 1 / REACH[rows[order]], rtol=1e-6, atol=0)
    assert torch.equal(fit[3:], TABLE[rows[order]].reshape(h, -1).mT)
    each = [int((counts > j).sum()) for j in range(PAIRS)]
    used = 4 + 2 * sum(x + x % 2 for x in each)
    assert spans[:3].tolist() == [-(-used // 64) * 64 * (row is not None), used, counts.max()]


def test_arrays_larger_than_one_look_are_seen_to_the_end(monkeypatch):
    monkeypatch.setattr(fits, "LOOKS", 2)
    a = torch.zeros(5 * fits.LOOK + 3, 1, device=DEVICE)
    a[-1] = REACH[3]
    for one, two in ((a, a[:0]), (a[:1], a)):
        fit, beyond, _ = fit_of(one, two, TABLE, GRID)
        torch.testing.assert_close(fit[2], 1 / REACH[3:4], rtol=1e-6, atol=0)
        assert not beyond.any()


def mixed(*shape, scale):
    """Units of unlike reach, from a tenth of the scale to all of it."""
    return some(*shape, scale=scale) * torch.linspace(0.1, 1.0, shape[-1], device=DEVICE)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "scale"),
    [
        ((3, 17, 5), (2, 5), 1.8),
        ((2, 1, 3, 64), (1, 41, 64), WIDEST),
        ((2, 130), (19, 130), 3),
    ],
)
def test_values_and_gradients_are_those_of_the_polynomials(shape_a, shape_b, scale):
    a, b, v = mixed(*shape_a, scale=scale), mixed(*shape_b, scale=scale), some(shape_a[-1])
    rows = first_rows(a, b)
    assert len(COUNTS[rows].unique()) > 1
    fit, _, spans = fit_of(a, b, TABLE, GRID)
    exact = [x.double().requires_grad_() for x in (a, b, v)]
    sides = [polynomials(x, exact[2], rows, x is exact[1]) for x in exact[:2]]
    phi, psi = features_of(a, b, v, fit, spans, PAIRS)
    loss, along = 0.0, []
    for x, (alone, want), at in zip((phi, psi), sides, (2, 0), strict=True):
        used = 4 + want.shape[-1]
        found = x[..., : int(spans[0])].double()
        atol = 2e-5 * want.abs().max().item()  # float32 sums up to 24 powers, which cancel
        torch.testing.assert_close(found[..., 4:used], want, rtol=0, atol=atol)
        assert not found[..., used:].any()
        torch.testing.assert_close(64 * found[..., at : at + 2].sum(-1), alone, rtol=0, atol=1e-5)
        assert (found[..., 2 - at : 4 - at] == 64).all()
        along.append(torch.randn_like(x))
        loss = loss + (want * along[-1][..., 4:used].double()).sum()
    lse = torch.randn(a.shape[:-1], device=DEVICE)
    loss = loss + (sides[0][0] * lse).sum() + (sides[1][0] * along[1][..., 0] / 64).sum()
    da, db, parts = features_grad(*along, lse, a, b, v, fit, spans, PAIRS)
    expected = torch.autograd.grad(loss, exact)
    for one, two in zip((da, db, parts.sum(0)), expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-4 * two.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, COARSE), (torch.bfloat16, 3 * COARSE)]
)
def test_their_product_is_the_score(dtype, error):
    a, b = (mixed(rows, 8, scale=WIDEST).to(dtype) for rows in (40, 30))
    v = some(8)
    fit, _, spans = fit_of(a, b, TABLE, GRID)
    found = features_of(a, b, v, fit, spans, PAIRS)
    phi, psi = (x[:, : int(spans[0])] for x in found)
    assert phi.dtype == psi.dtype == dtype
    want = (torch.tanh(a.double()[:, None] + b.double()[None]) * v.double()).sum(-1)
    off = (phi.double() @ psi.double().mT - want).abs().max()
    assert off < error * v.abs().sum()


def test_one_unit_beyond_the_table_and_there_is_no_column_and_no_gradient():
    a, b, v = some(4, 6), some(3, 6), some(6)
    b[1, 2] = 2 * WIDEST
    fit, _, spans = fit_of(a, b, TABLE, GRID)
    assert not spans[0]
    along = [torch.ones_like(x) for x in features_of(a, b, v, fit, spans, PAIRS)]
    for x in features_grad(*along, None, a, b, v, fit, spans, PAIRS):
        assert not x.any()


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows(n, m):
    a, b, v = some(n, 6), some(m, 6), some(6)
    fit, _, spans = fit_of(a, b, TABLE, GRID)
    found = features_of(a, b, v, fit, spans, PAIRS)
    wide = features.width_of(6, PAIRS)
    assert [tuple(x.shape) for x in found] == [(n, wide), (m, wide)]
    da, db, parts = features_grad(*found, None, a, b, v, fit, spans, PAIRS)
    assert da.shape == a.shape
    assert db.shape == b.shape
    assert parts.sum(0).shape == v.shape


def test_arrays_need_not_be_contiguous():
    a, b, v = some(6, 10), some(6, 7), some(6)
    plain = a.mT.contiguous(), b.mT.contiguous(), v
    fit, _, spans = fits = fit_of(a.mT, b.mT, TABLE, GRID)
    wide = int(spans[0])
    for one, two in zip(
        (*fits, *[x[:, :wide] for x in features_of(a.mT, b.mT, v, fit, spans, PAIRS)]),
        (*fit_of(*plain[:2], TABLE, GRID), *features_of(*plain, fit, spans, PAIRS)),
        strict=True,
    ):
        assert torch.equal(one, two[..., : one.shape[-1]])
