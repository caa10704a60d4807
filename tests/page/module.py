"""The built page, as a module in a browser."""

from __future__ import annotations

from pathlib import Path

import qkv

SOURCE = Path(qkv.__file__).parent / "page" / "static" / "qkv.js"

LOAD = """
async (source) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  globalThis.qkv = await import(url);
}
"""
"""Imports the module's source as `globalThis.qkv`."""
