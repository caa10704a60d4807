"""Every page of the gallery runs, with its asserts, and draws."""

from pathlib import Path

import pytest

from tools import gallery

pytest.importorskip("matplotlib")
pytest.importorskip("docutils")


@pytest.mark.parametrize("page", gallery.PAGES, ids=lambda page: page.stem)
def test_page_runs_and_draws(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a page finds its data from anywhere
    assert gallery.run(page)
