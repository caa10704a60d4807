"""The heads of the bundled MiniLM on one sentence: what its words look at."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from qkv.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    Weights: TypeAlias = "np.ndarray[Any, Any]"

LAYERS, HEADS = 6, 12


class Seen(NamedTuple):
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


def look(sentence: str, wish: tuple[int, int] | None) -> Seen:
    """What the model weighs while it reads; without a wish, the head that looks farthest."""
    from qkv.database.encoders import Sentences

    with _quiet():
        model = Sentences().loaded()
    from qkv.transformers import capture

    reader, tokenizer = model[0].auto_model, model.tokenizer
    with capture(reader) as seen:
        reader(**tokenizer(sentence, return_tensors="pt"))
    told = seen.words(tokenizer, sentence)
    alpha = told.weights
    return Seen(told.labels or [], alpha, *(wish or farthest(alpha)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars that others draw for a moment's work."""
    try:
        from transformers.utils import logging
    except ImportError:  # whoever needs it says so
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def farthest(alpha: Weights) -> tuple[int, int]:
    """The head whose words look most at one word that is no neighbour, and no mark at an end."""
    import numpy as np

    at = np.arange(alpha.shape[-1])
    far = abs(at[:, None] - at) > 1
    far[[0, -1]] = far[:, [0, -1]] = False
    layer, head = divmod(int((alpha * far).max(-1).sum(-1).argmax()), alpha.shape[1])
    return layer, head
