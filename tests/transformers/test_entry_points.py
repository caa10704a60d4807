"""Hugging Face's models as an entry point of tests/test_entry_points.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.test_entry_points import (
    LIVE,
    asked,
    close,
    descends,
    how,
    leaves,
    pairs,
    poisoned,
    tensors,
    truth,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AttentionInterface  # noqa: E402

from qkv.transformers import register  # noqa: E402

MODEL = SimpleNamespace(config=SimpleNamespace(output_attentions=True), is_causal=False)


@pytest.mark.sample(160)
@pairs
def test_a_model_and_its_gradients(score, weighting):
    rows = asked(score, weighting)
    arrays = tensors(poisoned(leaves(score, weighting)))
    attend = AttentionInterface()[register("entry_points", **how(arrays, score, weighting))]
    given = (arrays["query"][rows], arrays["key"], arrays["value"], torch.tensor(LIVE[rows]))
    found, alpha = attend(MODEL, *(x[None, None] for x in given), training=True)
    out, want = truth(score, weighting)
    close(found[0, :, 0], out[rows])
    close(alpha[0, 0], want[rows])
    descends(found[0, :, 0], arrays, score, weighting)
