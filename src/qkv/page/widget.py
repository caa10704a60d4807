"""The page in a notebook, as a widget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.errors import MissingExtra

try:
    import anywidget
    import traitlets
except ImportError:
    raise MissingExtra('show needs anywidget: pip install "qkv[widget]"') from None

from qkv.page.calls import call
from qkv.page.file import module
from qkv.page.pack import pack


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    """Views, and the bytes that their data refer to; the databases that they may ask, by name."""

    _esm = module()
    views: Any = traitlets.List().tag(sync=True)
    buffers: Any = traitlets.List().tag(sync=True)

    def __init__(
        self, views: list[dict[str, Any]], databases: Mapping[str, Any] | None = None
    ) -> None:
        packed, buffers = pack(views)
        super().__init__(views=packed, buffers=buffers)
        self.databases = dict(databases or {})
        self.on_msg(lambda _, message, __: self.send(*self.answer(message)))

    def answer(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """`{id, call, args}` → `{id, result}`, or `{id, error}` in a sentence, and its arrays."""
        try:
            result, buffers = pack(call(message["call"], message["args"], self.databases))
        except Exception as error:  # the page waits for a word, whatever went wrong
            return {"id": message.get("id"), "error": str(error) or type(error).__name__}, []
        return {"id": message["id"], "result": result}, buffers
