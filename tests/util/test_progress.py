"""Progress bars appear only in a terminal or a notebook."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

import qkv
from qkv.util import progress


@pytest.fixture
def notebook(monkeypatch):
    """What the cell of a notebook shows, one text after another."""
    shown: list[str] = []

    class Place:
        def update(self, thing):
            shown.append(thing)

    python, display = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = lambda: SimpleNamespace(kernel=1)
    python.display, display.Pretty = display, str
    display.display = lambda thing, display_id: shown.append(thing) or Place()
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress, "DELAY_SECONDS", -1.0)
    monkeypatch.setattr(progress, "NOTEBOOK_INTERVAL_SECONDS", 0.0)
    return shown


def test_a_notebook_shows_how_far_it_is_and_then_nothing(notebook):
    with progress.progress_bar("learning", 4) as moved:
        moved(1, 4)
        moved(4, 4)
    first, quarter, full, nothing = notebook
    assert first == "learning" and nothing == ""
    assert quarter.endswith(" 25%") and full.endswith(" 100%")
    assert quarter.count("█") * 4 == full.count("█") and len(quarter) == len(full)
    with pytest.raises(KeyboardInterrupt), progress.progress_bar("reading") as moved:
        moved(1200, None)
        raise KeyboardInterrupt
    assert notebook[-2:] == ["reading 1,200", ""]


def test_a_database_that_learns_in_a_notebook_shows_it(notebook):
    names = qkv.Database({"Zhang": 1.0, "Lipton": 2.0, "Li": 3.0, "Smola": 4.0})
    names.learn([("Zang", "Zhang"), ("Liptn", "Lipton"), ("Lee", "Li"), ("Smla", "Smola")] * 3)
    assert notebook[0] == "learning" and notebook[-1] == "" and len(notebook) > 2


def test_other_outputs_show_none(notebook, monkeypatch, capfd):
    thread = threading.Thread(target=lambda: progress.progress_bar("learning").__enter__()(1, 2))
    thread.start()
    thread.join()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)  # no shell, or no cell
    with progress.progress_bar("learning", 2) as moved:
        moved(1, 2)
    assert notebook == [] and capfd.readouterr().err == ""
