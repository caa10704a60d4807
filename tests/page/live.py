"""A fixture: views in a browser that call Python."""

from __future__ import annotations

import base64
from typing import Any

import pytest

import qkv
from qkv.page.calls import run_call
from qkv.page.html_file import read_module
from qkv.page.packing import pack_arrays
from qkv.page.views import build_views

LIVE = """
async ([source, views]) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { boot, unpack } = await import(url);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const opened = ({ result, buffers }) => unpack(result, buffers.map(bytes));
  const backend = {
    async call(name, args) {
      const reply = await python(name, args);
      await window.held;
      if (reply.error) throw new Error(reply.error);
      return opened(reply);
    },
  };
  document.body.append(document.createElement("main"));
  boot(document.querySelector("main"), { views: opened(views), backend, host: "server" });
}
"""


@pytest.fixture
def live(page: Any) -> Any:
    """Views that call Python; `databases` are those that a call may name."""

    def wire(x: Any) -> dict[str, Any]:
        result, buffers = pack_arrays(x)
        return {"result": result, "buffers": [base64.b64encode(b).decode() for b in buffers]}

    def start(shown: Any, databases: dict[str, Any]) -> list[str]:
        calls: list[str] = []

        def python(name: str, args: Any) -> Any:
            calls.append(name)
            try:
                return wire(run_call(name, args, databases))
            except qkv.QkvError as error:
                return {"error": str(error)}

        page.expose_function("python", python)
        page.evaluate(LIVE, [read_module(), wire(build_views(shown))])
        return calls

    return start
