"""Masks as the kernels read them: the bounds of several rules are those of their intersection."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from qkv import masks
from qkv.engines.triton.call_arrays import split_mask
from qkv.engines.validation import build_call


def bounds_of(mask):
    query, key = torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 9, 4)
    return split_mask(build_call(query, key, key, mask=mask))


@pytest.mark.parametrize(
    ("mask", "lower", "upper"),
    [
        (masks.causal, None, 0),
        (masks.causal("bottom_right"), None, 3),
        (masks.window(2), -2, 2),
        (masks.window(1) & masks.window(4), -1, 1),
        (masks.window(4) & masks.window(1), -1, 1),
        (masks.window(4) & masks.causal, -4, 0),
    ],
)
def test_a_band_is_the_intersection_of_its_parts(mask, lower, upper):
    result = bounds_of(mask)
    assert (result.lower, result.upper, result.rules) == (lower, upper, ())


def test_lengths_are_the_smaller_of_two():
    one, two = torch.tensor([3, 8]), torch.tensor([5, 4])
    for mask in (masks.lengths(one) & masks.lengths(two), masks.lengths(two) & masks.lengths(one)):
        assert bounds_of(mask).lengths.tolist() == [3, 4]
