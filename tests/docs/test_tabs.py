"""The code in the framework tabs of the gallery runs, where the framework is installed."""

import importlib.util

import pytest

from tools import gallery

PACKAGES = {
    "NumPy": "numpy",
    "PyTorch": "torch",
    "JAX": "jax",
    "TensorFlow": "tensorflow",
    "MXNet": "mxnet",
}
TABS = [
    pytest.param(name, code, id=f"{page.stem}-{at}-{name}")
    for page in gallery.PAGES
    for at, (name, code) in enumerate(gallery.tabs(page))
]


@pytest.mark.parametrize(("name", "code"), TABS)
def test_tab_runs(name: str, code: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    assert "assert" in code
    exec(compile(code, f"tab {name}", "exec"), {})


def test_every_tab_is_found() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in gallery.PAGES)
    assert text.count(".. tab-item::") == len(TABS)
