"""The heads of the bundled MiniLM on one sentence: what its words look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.transformers.captured import Captured

LAYERS, HEADS = 6, 12


def named(text: str) -> tuple[int, int]:
    """The layer and the head of "5.11".

    >>> named("5.11")
    (5, 11)
    """
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    if found is None or int(found[1]) >= LAYERS or int(found[2]) >= HEADS:
        raise ArgumentError(
            f"--head: expected LAYER.HEAD, layers 0 to {LAYERS - 1} and heads 0 to {HEADS - 1}, "
            f"not {text!r}"
        )
    return int(found[1]), int(found[2])


def look(sentence: str, wish: tuple[int, int] | None) -> tuple[Captured, int, int]:
    """What the model weighs while it reads, from word to word, and a layer and a head of it:
    without a wish, those that look farthest."""
    from qkv.database.encoders import Sentences
    from qkv.page.sentence import farthest, quiet

    with quiet():
        model = Sentences().loaded()
    from qkv.transformers import capture

    reader, tokenizer = model[0].auto_model, model.tokenizer
    with capture(reader) as seen:
        reader(**tokenizer(sentence, return_tensors="pt"))
    told = seen.words(tokenizer, sentence)
    return told, *(wish or divmod(farthest(told.weights), HEADS))
