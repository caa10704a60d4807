"""What a capture has kept, from word to word and as a picture."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError, ShapeError
from tests.transformers.models import SENTENCE

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")


@torch.no_grad()
def test_words_of_the_sentence(tokenizer: Any, eager: Any) -> None:
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    with ours.capture(eager) as seen:
        eager(**inputs)
    words = seen.words(tokenizer, SENTENCE)
    spoken = "[CLS] when he saw his owner , the dog was happy , so he wagged his tail [SEP]"
    assert " ".join(words.labels) == spoken
    np.testing.assert_allclose(words.weights.sum(-1), 1, atol=1e-6)
    # "wagged" is two tokens: its rows averaged, its columns summed.
    raw, at = seen.weights, words.labels.index("wagged")
    np.testing.assert_allclose(
        words.weights[..., 0, at], raw[..., 0, at : at + 2].sum(-1), atol=1e-7
    )
    np.testing.assert_allclose(
        words.weights[..., at, 0], raw[..., at : at + 2, 0].mean(-1), atol=1e-7
    )
    for ids in (inputs["input_ids"], inputs["input_ids"][0].tolist()):
        np.testing.assert_array_equal(seen.words(tokenizer, ids).weights, words.weights)

    figure = words.plot(layer=2, head=-1)
    assert figure.axes[0].get_title() == "layer 2, head 11"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == words.labels
    assert len(seen.plot(layer=1).axes) == 12 + 1
    for wrong in ({"layer": 6}, {"head": 12}, {"layer": True}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            words.plot(**wrong)
    with pytest.raises(ShapeError, match=r"4 tokens, but the model saw 19"):
        seen.words(tokenizer, [101, 102, 103, 104])
    with pytest.raises(ShapeError, match="text"):
        seen.words(tokenizer, [[1, 2], [3, 4]])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_words_of_one_sequence_of_a_padded_batch(tokenizer: Any, eager: Any, side: str) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    inputs = tokenizer(["A dog.", SENTENCE], padding=True, return_tensors="pt")
    with ours.capture(eager) as seen:
        eager(**inputs)
    assert len(seen) == 2
    words = seen[0].words(tokenizer, "A dog.")
    assert words.labels == ["[CLS]", "a", "dog", ".", "[SEP]"]
    np.testing.assert_allclose(words.weights.sum(-1), 1, atol=1e-6)
    with pytest.raises(ShapeError, match="2 sequences"):
        _ = seen.weights
    with pytest.raises(IndexError):
        seen[2]
