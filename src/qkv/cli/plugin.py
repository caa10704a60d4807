"""Modules of the caller's own, given by --plugin, that register scores, weightings and encoders."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from qkv.errors import ArgumentError


def load(names: Iterable[str]) -> None:
    """Import each: a file that ends in .py, or a module by its dotted name."""
    for name in names:
        try:
            _run(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            told = error if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
            raise ArgumentError(f"--plugin {name} cannot be imported: {told}") from error


def _run(path: Path) -> None:
    if not path.is_file():
        raise ArgumentError("there is no such file")
    name = f"plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
