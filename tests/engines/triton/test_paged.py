"""A paged cache whose pages the kernels read, beside attention over each sequence's own rows."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import nn, scores
from tests.nn.test_paged_cache import HEADS, SHARED, Both, D

pytestmark = pytest.mark.sample_of_module(8)

KERNEL_CASES = {
    "softmax": {},
    "dot": {"score": "dot"},
    "entmax15": {"weighting": "entmax15"},
    "top-k": {"weighting": qkv.weightings.TopK(7)},
    "sigmoid": {"weighting": "sigmoid"},
    "sink": {"weighting": qkv.weightings.Softmax(sink=0.5)},
    "alibi": {"score": scores.Relative(scores.Alibi(torch.linspace(0.01, 0.1, HEADS)))},
}


class KernelCache(Both):
    """Sequences of several lengths in pages that the kernels read, one of which is shared."""

    def __init__(self, block=16, dtype=torch.float32, **options):
        self.dtype = dtype
        super().__init__(**options)
        self.paged = nn.PagedCache(block=block, pages=2, **options)
        a, b = self.add(), self.add()
        self.append([a], 37)
        self.append([b], 5)
        c = self.fork(a)
        self.append([c, a], 600)
        self.sequences = [c, b, a]

    def normal(self, *shape):
        return super().normal(*shape).to(self.dtype)


@pytest.mark.parametrize(
    ("name", "n"), [*((name, 1) for name in KERNEL_CASES), ("softmax", 3), ("entmax15", 3)]
)
def test_kernels_read_pages(name, n):
    both, options = KernelCache(), KERNEL_CASES[name]
    query = both.normal(3, HEADS, n, D)
    assert "read the pages" in both.paged.explain(query, both.sequences, **options)
    both.check(both.sequences, n, atol=1e-4, **options)


@pytest.mark.parametrize("codes", ["int8", "float8"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
def test_kernels_read_codes_of_8_bits(name, codes):
    both, options = KernelCache(**{codes: True}), KERNEL_CASES[name]
    query = both.normal(3, HEADS, 1, D)
    assert "read the pages" in both.paged.explain(query, both.sequences, **options)
    out = both.paged.attend(query, both.sequences, **options)
    key, value, lengths = both.paged.gather_rows(both.sequences)
    want = qkv.attend(query, key, value, mask=qkv.masks.lengths(lengths), engine="dense", **options)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_kernels_read_the_pages_of_16_bit_gaussians():
    both = KernelCache(dtype=torch.float16)
    options = {"score": scores.Gaussian(2.0)}
    query = both.normal(3, HEADS, 1, D)
    assert "read the pages" in both.paged.explain(query, both.sequences, **options)
    both.check(both.sequences, atol=0.03, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weighting": "hard"}, "value of the best key"),
        ({"score": "laplace"}, "only dot products and Gaussians"),
        ({"score": scores.Gaussian(1.0)}, "only 16-bit Gaussians"),
        ({"dropout_p": 0.5}, "no option dropout_p"),
        ({"mask": qkv.masks.window(4)}, "a mask has its keys"),
    ],
)
def test_why_pages_are_gathered(options, reason):
    both = KernelCache()
    query = both.normal(3, HEADS, 1, D)
    explained = both.paged.explain(query, both.sequences, **options)
    assert explained.startswith("the pages are gathered: ") and reason in explained


def test_rows_of_removed_sequences_do_not_matter():
    both = KernelCache()
    old = both.paged.add_sequence()
    rows = torch.full((1, SHARED, 40, D), torch.nan)
    both.paged.append_rows([old], rows, rows)
    both.paged.remove_sequence(old)
    new = both.add()
    both.append([new], 3)  # on a page that held NaN
    both.check([new, *both.sequences])
    both.append(both.sequences, 1)
    both.check([new, *both.sequences])
