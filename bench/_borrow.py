"""Provide array_api_compat on a machine that does not have it and cannot download it.

SciPy and scikit-learn each vendor a copy. This module loads one under the plain name, so that `qkv`
finds it. The copy's imports are relative, so SciPy's own use of it does not change.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HOMES = {"scipy": "_lib", "sklearn": "externals"}


def array_api_compat() -> None:
    if importlib.util.find_spec("array_api_compat"):
        return
    for owner, folder in HOMES.items():
        found = importlib.util.find_spec(owner)
        if found is None or found.origin is None:
            continue
        home = Path(found.origin).parent / folder / "array_api_compat"
        spec = importlib.util.spec_from_file_location(
            "array_api_compat", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        if spec and spec.loader and home.is_dir():
            module = importlib.util.module_from_spec(spec)
            sys.modules["array_api_compat"] = module
            spec.loader.exec_module(module)
            return
    sys.exit("qkv needs array-api-compat: pip install array-api-compat, or SciPy, which carries it")
