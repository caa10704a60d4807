"""Sub-tokens as words, however a tokenizer marks them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")


class Vocabulary:
    """A tokenizer as far as words need one."""

    all_special_ids = (0,)
    padding_side = "right"

    def __init__(self, *tokens: str, joint: str = "", space: str = "") -> None:
        self.tokens, self.joint, self.space = tokens, joint, space

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[i] for i in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text = "".join(tokens)
        return text.replace(self.space, " ") if self.space else text.replace(self.joint, "")


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (
            Vocabulary("<s>", "Ġun", "happy", ",", "Ġ5", "%", "Ġdog", "'s", space="Ġ"),
            ["<s>", "unhappy", ",", "5", "%", "dog's"],
        ),
        (Vocabulary("<s>", "▁", "When", "▁he", "...", "▁ran", space="▁"),
         ["<s>", "When", "he", "...", "ran"]),
        (Vocabulary("[CLS]", "wag", "##ged", ",", "tail", joint="##"),
         ["[CLS]", "wagged", ",", "tail"]),
        (Vocabulary("<s>", "wag", "ged</w>", ",</w>", "tail</w>", joint="</w>"),
         ["<s>", "wagged", ",", "tail"]),
        (Vocabulary("<s>", "a", "b", joint="-"), ["<s>", "a", "b"]),
    ],
)  # fmt: skip
def test_every_way_to_mark_words(vocabulary: Vocabulary, words: list[str]) -> None:
    n = len(vocabulary.tokens)
    layer = ours.CapturedLayer("one", n, n, cells=np.full((1, 1, n, n), 1 / n, np.float32))
    result = ours.CapturedAttention([layer]).words(vocabulary, list(range(n)))
    assert result.labels == words
    np.testing.assert_allclose(result.weights.sum(-1), 1, atol=1e-6)
