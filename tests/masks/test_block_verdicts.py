"""`block_verdicts` of many spans is `block_verdict` of each, and agrees with the pairs."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks
from qkv.engines.call import Call, make_block
from qkv.scores import Dot
from qkv.util.types import Span
from qkv.weightings import Softmax

N, M = 24, 32
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 4, (2, M)))
MASKS = {
    "boolean": masks.array(RNG.random((N, M)) < np.repeat([0.0, 1.0, 0.5, 1.0], 8)),
    "boolean with a batch": masks.array(RNG.random((2, 1, N, M)) < 0.02),
    "one row": masks.array(RNG.random((2, 1, 1, M)) < np.repeat([0.0, 1.0], 16)),
    "one column": masks.array(RNG.random((2, 1, N, 1)) < np.repeat([0.0, 1.0], 12)[:, None]),
    "float": masks.array(np.where(RNG.random((N, M)) < 0.05, 0.5, -np.inf)),
    "documents": masks.documents(IDS[:, :N], IDS),
    "one document": masks.documents(np.zeros(N, int), np.repeat([0, 1], 16)),
    "lengths": masks.lengths([20, 9]),
}
MASKS["and"] = MASKS["documents"] & MASKS["boolean"] & masks.causal
MASKS["or"] = MASKS["documents"] | MASKS["one row"]
MASKS["not"] = ~MASKS["documents"] | ~masks.causal


@pytest.mark.parametrize("name", MASKS)
def test_the_verdicts_of_a_row_of_blocks(name):
    mask, x = MASKS[name], np.zeros((2, 1, 1, 1))
    query, key = np.broadcast_to(x, (2, 1, N, 1)), np.broadcast_to(x, (2, 1, M, 1))
    allowed = mask.allowed_pairs(make_block(Call(query, key, None, Dot(), Softmax())))
    allowed = np.broadcast_to(allowed, (2, 1, N, M))
    spans = [Span(start, 8) for start in range(0, M, 8)]
    for rows in (Span(0, 8), Span(8, 8), Span(16, 8), Span(3, 1)):
        verdicts = mask.block_verdicts(rows, spans, N, M)
        assert verdicts == [mask.block_verdict(rows, cols, N, M) for cols in spans]
        for cols, verdict in zip(spans, verdicts, strict=True):
            part = allowed[..., rows.start : rows.start + rows.size, :]
            part = part[..., cols.start : cols.start + cols.size]
            assert verdict is None or (part == verdict).all()
            if "boolean" in name or name in ("one row", "one column", "float"):
                assert verdict is (True if part.all() else (None if part.any() else False))


@pytest.mark.parametrize("name", MASKS)
def test_attention_in_blocks(name):
    arrays = [RNG.normal(size=(2, 1, n, 4)) for n in (N, M, M)]
    want = qkv.attend(*arrays, mask=MASKS[name], engine="dense")
    got = qkv.attend(*arrays, mask=MASKS[name], engine="streaming")
    np.testing.assert_allclose(got, want, atol=1e-12)
