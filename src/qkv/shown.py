"""What can be looked at: an answer, a database, captured heads."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


class Shown:
    """Opens itself on the page, which stands floors above and is found when it is asked for."""

    def show(self) -> Any:
        """A live view in a notebook, as `qkv.show` gives it."""
        return importlib.import_module("qkv.page").show(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The same as one HTML file that needs no network; written where `path` is given."""
        found: str = importlib.import_module("qkv.page").to_html(self, path)
        return found
