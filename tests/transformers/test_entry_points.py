"""Hugging Face's models as an entry point of tests/test_entry_points.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.test_entry_points import (
    LIVE,
    assert_close,
    build_options,
    descends,
    leaves,
    pairs,
    poison_keys,
    query_numbers,
    tensors,
    truth,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AttentionInterface  # noqa: E402

from qkv.transformers import register  # noqa: E402

MODEL = SimpleNamespace(config=SimpleNamespace(output_attentions=True), is_causal=False)


@pytest.mark.sample(100)
@pairs
def test_a_model_and_its_gradients(score, weighting):
    rows = query_numbers(score, weighting)
    arrays = tensors(poison_keys(leaves(score, weighting)))
    attend = AttentionInterface()[
        register("entry_points", **build_options(arrays, score, weighting))
    ]
    inputs = (arrays["query"][rows], arrays["key"], arrays["value"], torch.tensor(LIVE[rows]))
    actual, alpha = attend(MODEL, *(x[None, None] for x in inputs), training=True)
    out, want = truth(score, weighting)
    assert_close(actual[0, :, 0], out[rows])
    assert_close(alpha[0, 0], want[rows])
    descends(actual[0, :, 0], arrays, score, weighting)
