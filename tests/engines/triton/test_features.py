"""The additive score as a dot product: features against their polynomials and against tanh."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import COARSE, PAIRS, features
from qkv.engines.triton.features import additive_features, additive_index
from qkv.scores.separable import table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID, TABLE = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in table(PAIRS, COARSE))
ORDER = TABLE.shape[3]
LAST = len(GRID) - 1
WIDEST = float(GRID[LAST])


def polynomials(x, v, row):
    """The features in float64 by the powers of T's definition, differentiable."""
    z = x.double() / float(GRID[row])
    parts = []
    for half in range(2):
        for j in range(PAIRS):
            terms = [torch.ones_like(z), z]
            while len(terms) < 2 * ORDER:
                terms.append(2 * z * terms[-1] - terms[-2])
            c = TABLE[row, half, j].double()
            parts.append(sum(c[k] * terms[2 * k + half] for k in range(ORDER)))
    even, odd = parts[:PAIRS], parts[PAIRS:]
    if v is None:
        return torch.cat(even + odd, -1)
    return torch.cat([v.double() * part for part in odd + even], -1)


def some(*shape, scale=1.0, dtype=torch.float32):
    x = (torch.rand(shape, device=DEVICE) * 2 - 1) * scale
    return x.to(dtype)


def index_for(*arrays):
    one, two = arrays if len(arrays) == 2 else (*arrays, *arrays)
    return additive_index(one, two, GRID)


@pytest.mark.parametrize(
    ("reach_a", "reach_b", "want"),
    [
        (0.5, 0.1, (0, 0)),
        (float(GRID[7]), 0.2, (7, 0)),
        (0.1, float(GRID[7]) + 1e-3, (8, 0)),
        (0.1, WIDEST, (LAST, 0)),
        (WIDEST + 0.01, 1.0, (LAST + 1, 1)),
        (1.0, float("inf"), (LAST + 1, 1)),
        (float("nan"), 1.0, (LAST + 1, 1)),
    ],
)
def test_the_row_of_the_table_is_the_first_that_reaches(reach_a, reach_b, want):
    a, b = some(2, 7, 5, scale=0.05), some(3, 5, scale=0.05)
    a[1, 3, 2], b[2, 4] = -reach_a, reach_b
    assert tuple(additive_index(a, b, GRID).tolist()) == want


def test_arrays_larger_than_one_look_are_seen_to_the_end(monkeypatch):
    monkeypatch.setattr(features, "LOOKS", 2)
    a = torch.zeros(5 * features.TILE + 3, device=DEVICE)
    a[-1] = GRID[3]
    assert additive_index(a, a[:0], GRID).tolist() == [3, 0]


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize(
    ("shape", "scale"), [((3, 17, 5), 0.5), ((2, 1, 3, 64), WIDEST), ((2, 130), 2)]
)
def test_values_and_gradients_are_those_of_the_polynomials(shape, scale, key):
    x = some(*shape, scale=scale)
    v = some(shape[-1], scale=2.0) if key else None
    index = index_for(x)
    row = int(index[0])
    given = [t.clone().requires_grad_() for t in (x, v) if t is not None]
    exact = [t.double().requires_grad_() for t in (x, v) if t is not None]
    out = additive_features(given[0], given[1] if key else None, TABLE, GRID, index)
    want = polynomials(exact[0], exact[1] if key else None, row)
    assert out.shape == (*shape[:-1], 2 * PAIRS * shape[-1])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())
    along = torch.randn_like(out)
    got = torch.autograd.grad((out * along).sum(), given)
    expected = torch.autograd.grad((want * along).sum(), exact)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-5 * two.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, COARSE), (torch.bfloat16, 3 * COARSE)]
)
def test_their_product_is_the_score(dtype, error):
    a, b = (some(rows, 8, scale=WIDEST, dtype=dtype) for rows in (40, 30))
    v = some(8)
    index = index_for(a, b)
    phi = additive_features(a, None, TABLE, GRID, index)
    psi = additive_features(b, v, TABLE, GRID, index)
    assert phi.dtype == psi.dtype == dtype
    want = (torch.tanh(a.double()[:, None] + b.double()[None]) * v.double()).sum(-1)
    off = (phi.double() @ psi.double().mT - want).abs().max()
    assert off < error * v.abs().sum()


@pytest.mark.parametrize("key", [False, True])
def test_beyond_the_table_they_and_their_gradients_are_zero(key):
    x = some(4, 6, scale=9.0).requires_grad_()
    v = some(6).requires_grad_() if key else None
    out = additive_features(x, v, TABLE, GRID, index_for(x.detach() + 9))
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), [x, v] if key else [x]):
        assert not grad.any()


@pytest.mark.parametrize("key", [False, True])
def test_no_rows(key):
    x = some(0, 6).requires_grad_()
    v = some(6).requires_grad_() if key else None
    out = additive_features(x, v, TABLE, GRID, index_for(some(2, 2)))
    assert out.shape == (0, 2 * PAIRS * 6)
    grads = torch.autograd.grad(out.sum(), [x, v] if key else [x])
    assert [tuple(g.shape) for g in grads] == [(0, 6), (6,)][: len(grads)]
    assert not any(g.any() for g in grads)


def test_arrays_need_not_be_contiguous():
    x = some(6, 10)
    index = index_for(x)
    turned = additive_features(x.mT, None, TABLE, GRID, index)
    assert torch.equal(turned, additive_features(x.mT.contiguous(), None, TABLE, GRID, index))


def test_the_operators_keep_their_promises():
    x, v = some(3, 4, scale=1.5).requires_grad_(), some(4).requires_grad_()
    index = index_for(x.detach())
    torch.library.opcheck(additive_index, (x.detach(), x.detach(), GRID))
    torch.library.opcheck(additive_features, (x, v, TABLE, GRID, index))
