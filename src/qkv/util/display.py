"""What can be looked at: an answer, a database, captured heads."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload


class Displayable:
    """Opens itself on the page, which stands floors above and is found when it is asked for."""

    def show(self) -> Any:
        """A live view in a notebook, as `qkv.show` gives it."""
        return importlib.import_module("qkv.page").show(self)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """The same as the text of one HTML file that needs no network, or, where `path` is given,
        written there."""
        found: str | None = importlib.import_module("qkv.page").to_html(self, path)
        return found


class HeadWeights(NamedTuple):
    """α (layers, heads, rows, columns) as NumPy has it, and the layers' names.

    `lengths` are the queries and keys where rows and columns pool them, `labels` their words;
    `is_complete` is False where not every weight was kept.
    """

    weights: Any
    names: Sequence[str]
    lengths: tuple[int, int] | None = None
    labels: Sequence[str] | None = None
    is_complete: bool = True


class HeadsDisplayable(Displayable):
    """Shown as the heads that it has."""

    def head_weights(self, most: int) -> HeadWeights:
        """Of each head whose largest weights alone were kept, at most so many rows and columns."""
        raise NotImplementedError
