"""The page as a widget in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv.errors import require_extra

with require_extra("widget", "show needs anywidget"):
    import anywidget
    import traitlets

from qkv.page.calls import run_call
from qkv.page.html_file import read_module
from qkv.page.packing import find_deferred_buffers, pack_arrays


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    """A widget with views, the buffers of their arrays, and the databases that they may query."""

    _esm = read_module()
    views: Any = traitlets.List().tag(sync=True)
    buffers: Any = traitlets.List().tag(sync=True)

    def __init__(
        self, views: list[dict[str, Any]], databases: Mapping[str, Any] | None = None
    ) -> None:
        packed, self.all_buffers = pack_arrays(views)
        # Large buffers stay in Python until the page asks for a part of them.
        parts = find_deferred_buffers(packed, self.all_buffers)
        buffers = [b"" if i in parts else x for i, x in enumerate(self.all_buffers)]
        super().__init__(views=packed, buffers=buffers)
        self.databases = dict(databases or {})
        self.on_msg(self._handle_message)

    def _handle_message(self, _: Any, message: Any, __: Any) -> None:
        if isinstance(message, Mapping) and "id" in message:  # others expect no reply
            self.send(*self.answer_message(message))

    def answer_message(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Run the call `{id, call, args}`; return `{id, result}` or `{id, error}`, and buffers."""
        try:
            name, args = message["call"], message["args"]
            if name == "part":
                value = self.read_part(**args)
            else:
                value = run_call(name, args, self.databases)
            result, buffers = pack_arrays(value)
        except Exception as error:  # the page needs a reply in any case
            return {"id": message["id"], "error": str(error) or type(error).__name__}, []
        return {"id": message["id"], "result": result}, buffers

    def read_part(self, buffer: int, start: int, stop: int) -> np.ndarray:
        """Return a part of a buffer that was not sent with the views."""
        return np.frombuffer(self.all_buffers[buffer], np.uint8)[start:stop]
