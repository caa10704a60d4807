"""Functions that say whether Triton can be imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys

from qkv.util.caches import memoize


def has_triton() -> bool:
    """Return whether Triton can be used."""
    return triton_missing_reason() is None


def triton_missing_reason() -> str | None:
    """Return why Triton cannot be imported, or None."""
    if "triton" in sys.modules:
        return None
    if "tensorflow" in sys.modules:
        return (
            "TensorFlow was imported before Triton, and their LLVM libraries would crash the "
            "process: import triton first"
        )
    return None if _is_triton_installed() else "Triton is not installed: pip install triton"


@memoize("engines.is_triton_installed")
def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
