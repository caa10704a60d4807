"""Rules on distances and places."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks
from qkv.util.types import Span


def test_rules_of_the_same_numbers_are_one_kind():
    for make in (lambda: masks.dilated(2, 3), lambda: masks.strided(4), lambda: masks.window(3)):
        assert make() == make() and hash(make()) == hash(make())
    assert masks.dilated(2, 3) != masks.dilated(3, 2)
    assert masks.strided(1) != masks.global_tokens(1)


@pytest.mark.parametrize(
    "rule", [masks.dilated(2, 3), masks.dilated(0, 1), masks.strided(4), masks.global_tokens(3)]
)
def test_what_is_said_of_a_block_holds_for_its_pairs(rule):
    n, m = 23, 17
    q, k = np.zeros((n, 1)), np.zeros((m, 1))
    seen = qkv.weights(q, k, weighting="average", mask=rule) > 0
    i, j = np.indices((n, m))
    expected = {
        "dilated(2, 3)": (abs(i - j) <= 6) & ((i - j) % 3 == 0),
        "dilated(0, 1)": i == j,
        "strided(4)": (i - j) % 4 == 0,
        "global_tokens(3)": (i < 3) | (j < 3),
    }[repr(rule)]
    np.testing.assert_array_equal(seen, expected)
    for top in range(0, n, 5):
        rows = Span(top, min(5, n - top))
        part = expected[top : top + 5]
        start, end = rule.key_extent(rows, n, m)
        assert not part[:, :start].any() and not part[:, end:].any()
        for left in range(0, m, 4):
            verdict = rule.block_verdict(rows, Span(left, min(4, m - left)), n, m)
            block = part[:, left : left + 4]
            assert verdict is None or block.all() == block.any() == verdict
