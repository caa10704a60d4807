"""Scores that are known to within an error: the bound on their weights holds for all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from qkv.engines.out_of_core.score_intervals import softmax_error_from_largest


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max())
    return e / e.sum()


@pytest.mark.parametrize("seed", range(10))
def test_the_error_from_the_largest_score_covers_every_corner_of_the_intervals(seed: int) -> None:
    """The largest score may be off too, and moves all others against it."""
    rng = np.random.default_rng(seed)
    s, slack = rng.normal(size=5), rng.exponential(0.1, size=5)
    slack[s.argmax()] = 0.5
    bound = softmax_error_from_largest(s.copy(), slack.copy())
    worst = max(
        np.abs(softmax(s) - softmax(s + slack * signs)).sum() / 2
        for signs in itertools.product((-1, 1), repeat=5)
    )
    assert worst <= bound <= 1
