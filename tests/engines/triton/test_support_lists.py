"""Lists of what a sparse weighting weighs: the same values and gradients, over fewer pairs."""

from __future__ import annotations

import pytest
import torch
from triton.language import constexpr

import qkv
from qkv import masks, weightings
from qkv.engines.triton.launching import launch, precompile
from qkv.engines.triton.sparse import support_lists, threshold_search

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy, which the interpreter runs on, speaks of infinities that are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def counts(monkeypatch):
    """Lists are made of short rows too; the lengths of those made, of keys and of queries."""
    if not launch.is_interpreted():
        pytest.skip("kernels that are compiled keep the number that makes rows short")
    made = []
    plain = support_lists.fill_lists

    def listed(*args):
        at = plain(*args)
        if precompile.DRY_RUN_JOBS.get() is None:  # not a dry run, which makes none
            made.append(at[..., 0].flatten().tolist())
        return at

    monkeypatch.setattr(support_lists, "fill_lists", listed)
    monkeypatch.setattr(support_lists, "MIN_LENGTH_FOR_LISTS", 64)
    for module in (support_lists, threshold_search):
        monkeypatch.setattr(module, "LIST_SHARE_DIVISOR", constexpr(1))
    monkeypatch.setattr(launch, "count_processors", lambda device: 1)
    return made


def results(arrays, along, **options):
    arrays = [x.detach().requires_grad_() for x in arrays]
    out = qkv.attend(*arrays, **options)
    return out.detach(), *torch.autograd.grad(out, arrays, along.to(out.dtype))


def random_arrays(n, m, heads, few, steep):
    torch.manual_seed(0)
    shapes = ((heads, n), (few, m), (few, m), (heads, n))
    query, *rest, along = (torch.randn(1, *x, 16).half().to(DEVICE) for x in shapes)
    return [query * steep, *rest], along


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("weighting", "mask", "shape"),
    [
        ("entmax15", masks.causal, (150, 140, 2, 2, 8.0)),
        ("sparsemax", masks.window(100), (70, 130, 4, 2, 2.0)),
        (weightings.TopK(2), masks.window(80), (130, 140, 2, 2, 1.0)),
    ],
)
def test_values_and_gradients_are_those_of_all_pairs(counts, weighting, mask, shape):
    arrays, along = random_arrays(*shape)
    options = {"weighting": weighting, "mask": mask}
    got = results(arrays, along, engine="triton", **options)
    keys, queries = counts
    assert max(keys) > 0
    assert max(queries) > 0
    assert sum(x for x in keys if x > 0) < 0.7 * shape[1] * len(keys)
    want = results([x.double() for x in arrays], along, engine="dense", **options)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 1e-3 * y.norm()


def test_rows_that_weigh_most_keys_have_no_list(counts):
    arrays, along = random_arrays(130, 140, 1, 1, 0.1)
    got = results(arrays, along, engine="triton", weighting="entmax15", mask=masks.window(139))
    assert set(counts[0]) == {-1}
    want = results(
        [x.double() for x in arrays],
        along,
        engine="dense",
        weighting="entmax15",
        mask=masks.window(139),
    )
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 1e-3 * y.norm()


def test_a_row_that_is_not_finite_spoils_itself_alone(counts):
    arrays, _ = random_arrays(70, 140, 1, 1, 8.0)
    arrays[0][0, 0, 3, 0] = float("nan")
    out = qkv.attend(*arrays, weighting="entmax15", mask=masks.window(139), engine="triton")
    assert counts[0][0] == -1
    assert counts[0][1] > 0
    assert out.isfinite().all(-1)[0, 0].tolist() == [i != 3 for i in range(70)]
