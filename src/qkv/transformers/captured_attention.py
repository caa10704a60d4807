"""What a capture has kept, and how it is looked at."""

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
"""Bytes of weights that a capture keeps, unless told otherwise: a quarter of a gigabyte."""

MAX_DRAWN_CELLS = 256
"""Rows and columns of a picture that is drawn of the largest weights alone."""


@dataclass(frozen=True)
class CapturedLayer:
    """What was kept of one layer's weights (batch, heads, n, m).

    `cells` (batch, heads, rows, columns) is all of them or pooled; `top` their k largest of each
    row and the keys these belong to, (batch, heads, n, k) each.
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
    def kept_arrays(self) -> tuple[Any, ...]:
        return self.top if self.top is not None else (self.cells,)

    def to_dense(self, rows: int, cols: int) -> Any:
        """The weights as (batch, heads, rows, cols), 0 where none was kept."""
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

    `layers` holds them as they were kept. `captured[i]` is one sequence of the batch, and
    `captured.select("encoder")` the layers with that in their names. `captured.show()` and
    `captured.to_html(path)` open all heads, then one of them large. `unseen` names the parts of the
    model that attend in a way of their own, so that they have no α here: deformable attention, say.
    """

    layers: list[CapturedLayer]
    labels: list[str] | None = None
    budget: int = DEFAULT_BUDGET_BYTES
    unseen: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.layers:
            return "CapturedAttention(nothing yet)"
        kept = Counter(f"{x.kept_arrays[0].shape} of {x.n} × {x.m}" for x in self.layers)
        told = ", ".join(f"{count} × {shape}" for shape, count in kept.items())
        return f"CapturedAttention({told}{'; not ' * bool(self.unseen)}{', '.join(self.unseen)})"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.kept_arrays)

    def __len__(self) -> int:
        """How many sequences the batch held."""
        return len(self._same_shape_layers()[0].kept_arrays[0])

    def __getitem__(self, item: int) -> CapturedAttention:
        if not -len(self) <= item < len(self):
            raise IndexError(f"the batch held {len(self)} sequences, so there is no {item}")
        item %= len(self)
        return self._with_layers(
            [_map_arrays(layer, lambda x: x[item : item + 1]) for layer in self.layers]
        )

    def select(self, part: str) -> CapturedAttention:
        """The layers whose names hold `part`."""
        found = [layer for layer in self.layers if part in layer.name]
        if not found:
            names = ", ".join(layer.name for layer in self.layers)
            raise ArgumentError(f"no layer's name holds {part!r}: {names or 'nothing recorded'}")
        return self._with_layers(found)

    @property
    def weights(self) -> Any:
        """α (layers, heads, n, m), or pooled down to fewer rows and columns. NumPy, float32."""
        layers = self._single_sequence_layers()
        first = layers[0]
        if first.top is not None:
            size = 4 * len(layers) * first.top[0].shape[1] * first.n * first.m
            if size > self.budget:
                raise ArgumentError(
                    f"budget: all weights would take {size:,} bytes, more than {self.budget:,}: "
                    "use .top, or pass a larger budget"
                )
        return np.concatenate([layer.to_dense(layer.n, layer.m) for layer in layers])

    @property
    def block(self) -> tuple[int, int]:
        """How many queries and keys a cell of `weights` stands for, by the largest weight in it."""
        first = self._single_sequence_layers()[0]
        return (1, 1) if first.top else _block_size(first, first.cells)

    @property
    def top(self) -> tuple[Any, Any]:
        """The largest weights of each row and the keys they belong to, (layers, heads, n, k)."""
        layers = self._single_sequence_layers()
        if layers[0].top is None:
            raise ArgumentError("these weights were kept whole or pooled: capture(model, top=…)")
        alpha, keys = zip(*(layer.top for layer in layers if layer.top), strict=True)
        return np.concatenate(alpha), np.concatenate(keys)

    def words(self, tokenizer: Any, text: Any) -> CapturedAttention:
        """The same from word to word: a query's rows are averaged, a key's columns summed.

        `text` is what the model read, or its token ids. Rows still sum to 1.
        """
        layers = self._single_sequence_layers()
        n, m = layers[0].n, layers[0].m
        if layers[0].top is None and not layers[0].is_complete:
            raise ArgumentError(
                "the weights are pooled, so words cannot be told apart: capture with a larger "
                "budget, or with top=…"
            )
        if n != m:
            raise ShapeError(f"words needs queries that are the keys, not {n} and {m} of them")
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
        found = means @ self.weights @ sums.T
        size = len(names)
        kept = [
            CapturedLayer(layer.name, size, size, cells=alpha[None])
            for layer, alpha in zip(layers, found, strict=True)
        ]
        return self._with_layers(kept, names)

    def grid(self, most: int = MAX_DRAWN_CELLS) -> Any:
        """What is drawn, (layers, heads, rows, columns): what was kept, or of the largest weights
        alone a picture of at most so many rows and columns."""
        return np.concatenate(
            [x.to_dense(min(x.n, most), min(x.m, most)) for x in self._single_sequence_layers()]
        )

    def head_weights(self, most: int) -> HeadWeights:
        grid, first = self.grid(most), self.layers[0]
        whole = all(layer.is_complete for layer in self.layers)
        names = [layer.name for layer in self.layers]
        return HeadWeights(grid, names, (first.n, first.m), self.labels, whole)

    def plot(self, layer: int | None = None, head: int | None = None, **options: Any) -> Figure:
        """A heatmap for each head: layers from the top down, heads from left to right.

        `options` go to `qkv.plot.heatmaps`.
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
        """The layers, which must be of one shape."""
        if not self.layers:
            raise ArgumentError("nothing was recorded: run the model inside `with capture(model)`")
        shapes = Counter((x.n, x.m, *x.kept_arrays[0].shape) for x in self.layers)
        if len(shapes) > 1:
            names = "; ".join(f"{x.name} {x.n} × {x.m}" for x in self.layers)
            raise ShapeError(f"the layers differ in shape: use .layers or .select(name) ({names})")
        return self.layers

    def _single_sequence_layers(self) -> list[CapturedLayer]:
        layers = self._same_shape_layers()
        if len(self) != 1:
            raise ShapeError(f"the batch held {len(self)} sequences: use captured[i] for one")
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


# Tokenizers mark where words begin, where they go on, or where they end.
WORD_MARKS = {"begins": ("▁", "Ġ"), "goes on": ("##",), "ends": ("</w>",)}


def token_ids(tokenizer: Any, text: Any) -> list[int]:
    if isinstance(text, str):
        text = tokenizer(text)["input_ids"]
    ids = np.asarray(text.tolist() if hasattr(text, "tolist") else text)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ShapeError(f"text must be a string or the ids of one, not of shape {ids.shape}")
    return ids.tolist()  # type: ignore[no-any-return]


def group_tokens(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    """The words, and for each token the number of its word."""
    counts = Counter[str]()
    for token in tokenizer.get_vocab():
        for mark, signs in WORD_MARKS.items():
            if token.startswith(signs) or (mark == "ends" and token.endswith(signs)):
                counts[mark] += 1
    mark = max(counts, key=counts.__getitem__, default="")
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    words: list[list[str]] = []
    groups: list[int] = []
    closed = True
    for at, token in zip(ids, tokens, strict=True):
        alone = at in special
        joins = not (alone or closed)
        if joins and mark == "begins":
            joins = not token.startswith(WORD_MARKS[mark])
            # Punctuation has no mark of its own.
            joins = joins and _is_punctuation(tokenizer, token) == _is_punctuation(
                tokenizer, words[-1][-1]
            )
        elif joins:
            joins = mark == "ends" or (mark == "goes on" and token.startswith(WORD_MARKS[mark]))
        if joins:
            words[-1].append(token)
        else:
            words.append([token])
        groups.append(len(words) - 1)
        closed = alone or (mark == "ends" and token.endswith(WORD_MARKS[mark]))
    return [tokenizer.convert_tokens_to_string(word).strip() or word[0] for word in words], groups


def _is_punctuation(tokenizer: Any, token: str) -> bool:
    if token in WORD_MARKS["begins"]:
        return False
    text = tokenizer.convert_tokens_to_string([token])
    # Half a letter, as bytes have it, is shown as �.
    return not any(letter.isalnum() or letter == "�" for letter in text)
