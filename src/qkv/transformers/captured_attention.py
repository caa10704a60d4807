"""The recorded attention weights of a Hugging Face model, and how to view them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import ArgumentError, ShapeError
from qkv.plot import heatmaps
from qkv.util.display import HeadsDisplayable, HeadWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_BUDGET_BYTES = 2**28
"""The default limit for the weights of one capture: 256 MiB."""

MAX_DRAWN_CELLS = 256
"""The most rows and columns of a plot of weights that were captured with `top`."""


@dataclass(frozen=True)
class CapturedLayer:
    """The recorded weights (batch, heads, n, m) of one layer, complete or reduced.

    `cells` (batch, heads, rows, columns) holds all weights, or the maximum of each cell. `top`
    holds the k largest weights of each row and their keys, each (batch, heads, n, k).
    """

    name: str
    n: int
    m: int
    cells: Any = None
    top: tuple[Any, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return self.cells is not None and self.cells.shape[-2:] == (self.n, self.m)

    @property
    def stored_arrays(self) -> tuple[Any, ...]:
        return self.top if self.top is not None else (self.cells,)

    def to_dense(self, rows: int, cols: int) -> Any:
        """Return the weights as (batch, heads, rows, cols), 0 where none is stored."""
        if self.top is None:
            return self.cells
        alpha, keys = self.top
        out = np.zeros((*alpha.shape[:2], rows, cols), np.float32)
        batch, head, row, _ = np.ogrid[tuple(map(slice, alpha.shape))]
        np.maximum.at(out, (batch, head, row * rows // self.n, keys * cols // self.m), alpha)
        return out


@dataclass
class CapturedAttention(HeadsDisplayable):
    """The weights α of a forward pass, layer by layer.

    - `captured.layers` holds the recorded layers.
    - `captured[i]` selects one sequence of the batch.
    - `captured.select("encoder")` selects the layers with that text in their names.
    - `captured.show()` and `captured.to_html(path)` display all heads; click one to enlarge it.
    - `captured.unseen` names the attention modules that could not be recorded, because they do not
      use transformers' AttentionInterface (deformable attention, for example).
    """

    layers: list[CapturedLayer]
    labels: list[str] | None = None
    budget: int = DEFAULT_BUDGET_BYTES
    unseen: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.layers:
            return "CapturedAttention(nothing recorded yet)"
        counts = Counter(f"{x.stored_arrays[0].shape} of {x.n} × {x.m}" for x in self.layers)
        shapes = ", ".join(f"{count} × {shape}" for shape, count in counts.items())
        unseen = f"; not recorded: {', '.join(self.unseen)}" if self.unseen else ""
        return f"CapturedAttention({shapes}{unseen})"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.stored_arrays)

    def __len__(self) -> int:
        """The number of sequences in the batch."""
        return len(self._same_shape_layers()[0].stored_arrays[0])

    def __getitem__(self, item: int) -> CapturedAttention:
        if not -len(self) <= item < len(self):
            raise IndexError(f"sequence {item} does not exist: the batch has {len(self)} sequences")
        item %= len(self)
        return self._with_layers(
            [_map_arrays(layer, lambda x: x[item : item + 1]) for layer in self.layers]
        )

    def select(self, part: str) -> CapturedAttention:
        """Select the layers whose names contain `part`."""
        layers = [layer for layer in self.layers if part in layer.name]
        if not layers:
            names = ", ".join(layer.name for layer in self.layers)
            raise ArgumentError(
                f"no layer has {part!r} in its name. Recorded: {names or 'no layers'}"
            )
        return self._with_layers(layers)

    @property
    def weights(self) -> Any:
        """α (layers, heads, n, m), or pooled to fewer rows and columns; a NumPy float32 array."""
        layers = self._single_sequence_layers()
        first = layers[0]
        if first.top is not None:
            size = 4 * len(layers) * first.top[0].shape[1] * first.n * first.m
            if size > self.budget:
                raise ArgumentError(
                    f"budget: the weights need {size:,} bytes, more than {self.budget:,}: use "
                    ".top, or pass a larger budget to capture"
                )
        return np.concatenate([layer.to_dense(layer.n, layer.m) for layer in layers])

    @property
    def block(self) -> tuple[int, int]:
        """The queries and keys that one cell of `weights` covers; it holds their largest weight."""
        first = self._single_sequence_layers()[0]
        return (1, 1) if first.top else _block_size(first, first.cells)

    @property
    def top(self) -> tuple[Any, Any]:
        """The k largest weights of each row, and their keys; each (layers, heads, n, k)."""
        layers = self._single_sequence_layers()
        if layers[0].top is None:
            raise ArgumentError("top was not recorded: use capture(model, top=k)")
        alpha, keys = zip(*(layer.top for layer in layers if layer.top), strict=True)
        return np.concatenate(alpha), np.concatenate(keys)

    def words(self, tokenizer: Any, text: Any) -> CapturedAttention:
        """Merge tokens into words: average the rows and sum the columns of each word's tokens.

        `text` is the model's input, a string or its token ids. Rows still sum to 1.
        """
        layers = self._single_sequence_layers()
        n, m = layers[0].n, layers[0].m
        if layers[0].top is None and not layers[0].is_complete:
            raise ArgumentError(
                "the weights are pooled, so words cannot be separated: capture with a larger "
                "budget, or with top=k"
            )
        if n != m:
            raise ShapeError(f"words needs self-attention, but there are {n} queries and {m} keys")
        ids = token_ids(tokenizer, text)
        start = 0
        if isinstance(text, str) and len(ids) < n and tokenizer.padding_side == "left":
            start = n - len(ids)
        if len(ids) > n or (len(ids) < n and not isinstance(text, str)):
            raise ShapeError(f"text has {len(ids)} tokens, but the model saw {n}")
        names, groups = group_tokens(tokenizer, ids)
        sums = np.zeros((len(names), n), np.float32)
        sums[groups, start + np.arange(len(ids))] = 1
        means = sums / sums.sum(-1, keepdims=True)
        word_weights = means @ self.weights @ sums.T
        size = len(names)
        word_layers = [
            CapturedLayer(layer.name, size, size, cells=alpha[None])
            for layer, alpha in zip(layers, word_weights, strict=True)
        ]
        return self._with_layers(word_layers, names)

    def grid(self, most: int = MAX_DRAWN_CELLS) -> Any:
        """Return the weights to plot, (layers, heads, rows, columns).

        Weights captured with `top` are drawn into at most `most` rows and columns.
        """
        return np.concatenate(
            [x.to_dense(min(x.n, most), min(x.m, most)) for x in self._single_sequence_layers()]
        )

    def head_weights(self, most: int) -> HeadWeights:
        grid, first = self.grid(most), self.layers[0]
        is_complete = all(layer.is_complete for layer in self.layers)
        names = [layer.name for layer in self.layers]
        return HeadWeights(grid, names, (first.n, first.m), self.labels, is_complete)

    def plot(self, layer: int | None = None, head: int | None = None, **options: Any) -> Figure:
        """Plot a heatmap for each head: one row per layer, one column per head.

        `layer` and `head` select one of them. `options` are passed to `qkv.plot.heatmaps`.
        """
        grid, first = self.grid(), self.layers[0]
        options.setdefault("block", _block_size(first, grid))
        rows = _select_indices("layer", layer, grid.shape[0])
        columns = _select_indices("head", head, grid.shape[1])
        grid = grid[np.ix_(rows, columns)]
        options.setdefault("titles", [[f"layer {i}, head {j}" for j in columns] for i in rows])
        for ticks, count, size in (("yticks", first.n, -2), ("xticks", first.m, -1)):
            shown = grid.shape[size]
            if self.labels is not None and len(self.labels) == shown:
                options.setdefault(ticks, self.labels)
            elif shown < count:
                options.setdefault(ticks, [math.ceil(i * count / shown) for i in range(shown)])
        return heatmaps(grid, **options)

    def _with_layers(
        self, layers: list[CapturedLayer], labels: list[str] | None = None
    ) -> CapturedAttention:
        return replace(self, layers=layers, labels=labels or self.labels)

    def _same_shape_layers(self) -> list[CapturedLayer]:
        """Return the layers; raise unless all have the same shape."""
        if not self.layers:
            raise ArgumentError("nothing was recorded: run the model inside `with capture(model)`")
        shapes = Counter((x.n, x.m, *x.stored_arrays[0].shape) for x in self.layers)
        if len(shapes) > 1:
            names = "; ".join(f"{x.name} {x.n} × {x.m}" for x in self.layers)
            raise ShapeError(f"the layers differ in shape ({names}): use .layers or .select(name)")
        return self.layers

    def _single_sequence_layers(self) -> list[CapturedLayer]:
        """Return the layers; raise unless the batch has one sequence."""
        layers = self._same_shape_layers()
        if len(self) != 1:
            raise ShapeError(f"the batch has {len(self)} sequences: select one with captured[i]")
        return layers


def _map_arrays(layer: CapturedLayer, change: Callable[[Any], Any]) -> CapturedLayer:
    if layer.top is None:
        return replace(layer, cells=change(layer.cells))
    return replace(layer, top=(change(layer.top[0]), change(layer.top[1])))


def _block_size(layer: CapturedLayer, cells: Any) -> tuple[int, int]:
    return math.ceil(layer.n / cells.shape[-2]), math.ceil(layer.m / cells.shape[-1])


def _select_indices(name: str, at: int | None, count: int) -> list[int]:
    if at is None:
        return list(range(count))
    if isinstance(at, bool) or not isinstance(at, int) or not -count <= at < count:
        raise ArgumentError(f"{name} must be None or from 0 to {count - 1}, not {at!r}")
    return [at % count]


# A tokenizer marks either the beginning, the continuation or the end of a word.
WORD_MARKS = {"begin": ("▁", "Ġ"), "continue": ("##",), "end": ("</w>",)}


def token_ids(tokenizer: Any, text: Any) -> list[int]:
    """Return the token ids of a string; ids are returned as a list."""
    if isinstance(text, str):
        text = tokenizer(text)["input_ids"]
    ids = np.asarray(text.tolist() if hasattr(text, "tolist") else text)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ShapeError(
            f"text must be a string or its token ids, not an array of shape {ids.shape}"
        )
    return ids.tolist()  # type: ignore[no-any-return]


def group_tokens(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    """Return the words, and for each token the index of its word."""
    counts = Counter[str]()
    for token in tokenizer.get_vocab():
        for mark, signs in WORD_MARKS.items():
            if token.startswith(signs) or (mark == "end" and token.endswith(signs)):
                counts[mark] += 1
    mark = max(counts, key=counts.__getitem__, default="")
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    words: list[list[str]] = []
    groups: list[int] = []
    word_ended = True
    for token_id, token in zip(ids, tokens, strict=True):
        is_special = token_id in special
        joins = not (is_special or word_ended)
        if joins and mark == "begin":
            joins = not token.startswith(WORD_MARKS[mark])
            # Punctuation starts a new word even if its token has no mark.
            joins = joins and _is_punctuation(tokenizer, token) == _is_punctuation(
                tokenizer, words[-1][-1]
            )
        elif joins:
            joins = mark == "end" or (mark == "continue" and token.startswith(WORD_MARKS[mark]))
        if joins:
            words[-1].append(token)
        else:
            words.append([token])
        groups.append(len(words) - 1)
        word_ended = is_special or (mark == "end" and token.endswith(WORD_MARKS[mark]))
    return [tokenizer.convert_tokens_to_string(word).strip() or word[0] for word in words], groups


def _is_punctuation(tokenizer: Any, token: str) -> bool:
    if token in WORD_MARKS["begin"]:
        return False
    text = tokenizer.convert_tokens_to_string([token])
    # An incomplete UTF-8 character is decoded as �; count it as a letter.
    return not any(letter.isalnum() or letter == "�" for letter in text)
