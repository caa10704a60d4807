"""Base classes for objects with `show` and `to_html`: answers, databases, captured attention."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload


class Displayable:
    """An object that the page can show.

    `qkv.page` is a higher layer, so the methods import it when they are called.
    """

    def show(self) -> Any:
        """Return an interactive view for a notebook, as `qkv.show` does."""
        return importlib.import_module("qkv.page").show(self)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return the view as one HTML page that needs no network. With `path`, write it there."""
        html: str | None = importlib.import_module("qkv.page").to_html(self, path)
        return html


class HeadWeights(NamedTuple):
    """The weights α (layers, heads, rows, columns) as a NumPy array, and the names of the layers.

    `lengths` are the numbers of queries and keys; None: rows and columns are not pooled. `labels`
    are the words of the sequence. `is_complete` is False if only some weights were stored.
    """

    weights: Any
    names: Sequence[str]
    lengths: tuple[int, int] | None = None
    labels: Sequence[str] | None = None
    is_complete: bool = True


class HeadsDisplayable(Displayable):
    """An object that the page shows as attention heads."""

    def head_weights(self, most: int) -> HeadWeights:
        """Return the weights of all heads, pooled to at most `most` rows and columns."""
        raise NotImplementedError
