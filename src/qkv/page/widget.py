"""The page in a notebook, as a widget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv.errors import extra

with extra("widget", "show needs anywidget"):
    import anywidget
    import traitlets

from qkv.page.calls import call
from qkv.page.file import module
from qkv.page.pack import late, pack


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    """Views, and the bytes that their data refer to; the databases that they may ask, by name."""

    _esm = module()
    views: Any = traitlets.List().tag(sync=True)
    buffers: Any = traitlets.List().tag(sync=True)

    def __init__(
        self, views: list[dict[str, Any]], databases: Mapping[str, Any] | None = None
    ) -> None:
        packed, self.whole = pack(views)
        # What is large stays here until the page looks at a part of it.
        parts = late(packed, self.whole)
        buffers = [b"" if i in parts else x for i, x in enumerate(self.whole)]
        super().__init__(views=packed, buffers=buffers)
        self.databases = dict(databases or {})
        self.on_msg(self._told)

    def _told(self, _: Any, message: Any, __: Any) -> None:
        if isinstance(message, Mapping) and "id" in message:  # else nobody waits for a word
            self.send(*self.answer(message))

    def answer(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """`{id, call, args}` → `{id, result}`, or `{id, error}` in a sentence, and its arrays."""
        try:
            name, args = message["call"], message["args"]
            found = self.part(**args) if name == "part" else call(name, args, self.databases)
            result, buffers = pack(found)
        except Exception as error:  # the page waits for a word, whatever went wrong
            return {"id": message["id"], "error": str(error) or type(error).__name__}, []
        return {"id": message["id"], "result": result}, buffers

    def part(self, buffer: int, start: int, stop: int) -> np.ndarray:
        """Some bytes of what was kept back."""
        return np.frombuffer(self.whole[buffer], np.uint8)[start:stop]
