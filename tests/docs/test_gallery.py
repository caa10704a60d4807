"""Every page of the gallery runs, with its asserts, and so does the code in its framework tabs."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("docutils")

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


@pytest.mark.parametrize("page", gallery.PAGES, ids=lambda page: page.stem)
def test_page_runs_and_draws(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a page finds its data from anywhere
    assert gallery.run(page)


@pytest.mark.parametrize(("name", "code"), TABS)
def test_tab_runs(name: str, code: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    exec(compile(code, f"tab {name}", "exec"), {})


def test_every_tab_is_found() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in gallery.PAGES)
    assert text.count(".. tab-item::") == len(TABS)
