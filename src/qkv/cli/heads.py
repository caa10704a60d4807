"""The heads of the bundled MiniLM on one sentence: what its words look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from qkv.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    Weights: TypeAlias = "np.ndarray[Any, Any]"

LAYERS, HEADS = 6, 12


class Picked(NamedTuple):
    """α of every head (layers, heads, n, n) from word to word, and one head of them."""

    words: list[str]
    alpha: Weights
    layer: int
    head: int

    @property
    def chosen(self) -> Weights:
        found: Weights = self.alpha[self.layer, self.head]
        return found

    def plot(self) -> Figure:
        """All heads: a row for each layer."""
        from qkv.plot import heatmaps

        titles = [[f"layer {i}, head {j}" for j in range(HEADS)] for i in range(LAYERS)]
        ticks: dict[str, Any] = {"xticks": self.words, "yticks": self.words}
        return heatmaps(self.alpha, "", "", titles, (2.6, 2.6), **ticks)


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


def look(sentence: str, wish: tuple[int, int] | None) -> Picked:
    """What the model weighs while it reads; without a wish, the head that looks farthest."""
    from qkv.database.encoders import Sentences
    from qkv.page.sentence import farthest, quiet

    with quiet():
        model = Sentences().loaded()
    from qkv.transformers import capture

    reader, tokenizer = model[0].auto_model, model.tokenizer
    with capture(reader) as seen:
        reader(**tokenizer(sentence, return_tensors="pt"))
    told = seen.words(tokenizer, sentence)
    alpha = told.weights
    return Picked(told.labels or [], alpha, *(wish or divmod(farthest(alpha), HEADS)))
