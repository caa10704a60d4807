"""Packed sequences: the same as each sequence alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

import qkv
from qkv import masks
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import to_numpy
from tests.installed_frameworks import FRAMEWORKS

CU_Q, CU_K = [0, 3, 3, 10, 40], [0, 5, 9, 9, 36]
rng = np.random.default_rng(0)
QUERY = rng.normal(size=(4, 40, 3))
KEY, VALUE = rng.normal(size=(2, 36, 3)), rng.normal(size=(2, 36, 5))


def attend_to_part(query, key, value, causal):
    """Softmax attention of one sequence; the last query sees all keys."""
    n, m = query.shape[-2], key.shape[-2]
    if not m:
        return np.zeros((*query.shape[:-1], value.shape[-1]))
    key, value = (np.repeat(x, 2, axis=0) for x in (key, value))
    s = np.exp(query @ key.swapaxes(-2, -1) / math.sqrt(query.shape[-1]))
    if causal:
        s = s * np.tril(np.ones((n, m)), m - n)
    total = s.sum(-1, keepdims=True)
    return s @ value / np.where(total == 0, 1, total)


@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_each_sequence_is_alone(fw, causal, engine):
    arrays = map(fw.make_array, (QUERY, KEY, VALUE))
    out = qkv.attend(*arrays, mask=masks.packed(CU_Q, CU_K, causal=causal), engine=engine)
    parts = [
        attend_to_part(QUERY[:, a:b], KEY[:, c:d], VALUE[:, c:d], causal)
        for a, b, c, d in zip(CU_Q[:-1], CU_Q[1:], CU_K[:-1], CU_K[1:], strict=True)
    ]
    np.testing.assert_allclose(to_numpy(out), np.concatenate(parts, axis=1), atol=1e-12)


def test_offsets_of_a_framework_stay_there():
    torch = pytest.importorskip("torch")
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    mask = masks.packed(offsets)
    assert mask.bounds.tolist() == [[0] * 4 + [4] * 2, [4] * 4 + [6] * 2]
    assert isinstance(mask.query_bounds, torch.Tensor) and mask.query_bounds.dtype == torch.int32
    query = torch.randn(2, 6, 3, requires_grad=True)
    out = qkv.attend(query, query, query, mask=masks.packed(offsets, causal=True))
    want = qkv.attend(query, query, query, mask=masks.documents([0] * 4 + [1] * 2) & masks.causal)
    torch.testing.assert_close(out, want)


def test_blocks_of_other_sequences_are_skipped():
    mask = masks.packed([0, 64, 128], [0, 128, 256], causal=True)
    span = qkv.util.types.Span
    assert mask.block_verdict(span(0, 64), span(128, 64), 128, 256) is False
    assert mask.block_verdict(span(0, 64), span(0, 64), 128, 256) is True
    assert mask.block_verdict(span(0, 64), span(64, 64), 128, 256) is None
    assert mask.block_verdict(span(64, 64), span(0, 128), 128, 256) is False
    assert mask.key_extent(span(0, 1), 128, 256) == (0, 65)


@pytest.mark.parametrize(
    ("offsets", "error", "match"),
    [
        (([1, 2],), ArgumentError, "begin with 0"),
        (([0, 3, 2],), ArgumentError, "not decrease"),
        (([[0, 3]],), ShapeError, r"\(sequences \+ 1,\)"),
        (([0.0, 3.0],), DtypeError, "integers"),
        (([0, 3], [0, 1, 3]), ShapeError, "cu_q has 2 offsets and cu_k 3"),
    ],
)
def test_what_is_refused(offsets, error, match):
    with pytest.raises(error, match=match):
        masks.packed(*offsets)


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_number_of_rows(causal):
    with pytest.raises(ShapeError, match="cu_q ends with 3, but there are 40 rows"):
        qkv.attend(QUERY, KEY, VALUE, mask=masks.packed([0, 3], [0, 36], causal=causal))
