"""The examples of CONTRIBUTING.md work as they stand, and the pages it names list every name."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from qkv import cli, masks, scores, weightings
from qkv.attention import attend
from qkv.cli.command import as_command
from qkv.database import encoders
from qkv.database.sources import SourceError, SourceFormat, formats, read
from qkv.testing import check_encoder, check_score, check_weighting

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = [
    textwrap.dedent(x) for x in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.DOTALL | re.M)
]
FAST = {"frameworks": ["numpy"], "engines": ["dense", "streaming"]}


@pytest.fixture
def load(tmp_path: Path) -> Iterator[object]:
    """Return a function that imports the only block that contains a text, as a file."""
    names = []

    def load_block(text: str) -> ModuleType:
        (code,) = [block for block in BLOCKS if text in block]
        path = tmp_path / "example.py"
        path.write_text(code, encoding="utf-8")
        name = f"contributing_{len(names)}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        assert not doctest.testmod(module).failed
        return module

    registered = dict(scores.NAMES)
    yield load_block
    scores.NAMES.clear()
    scores.NAMES.update(registered)
    for name in names:
        del sys.modules[name]


def test_score(load):
    check_score(load("class StudentT").StudentT(0.8), **FAST)


def test_weighting(load):
    check_weighting(load("class Softplus").Softplus(), **FAST)


def test_mask(load):
    parity = load("class Parity").parity
    i, j = np.arange(5)[:, None], np.arange(7)
    for engine in ("dense", "streaming"):
        out = attend(np.zeros((5, 2)), np.zeros((7, 2)), np.eye(7), mask=parity(3), engine=engine)
        np.testing.assert_array_equal(out > 0, (i - j) % 3 == 0)


def test_encoder(load):
    check_encoder(load("class Sizes").Sizes(), ["a", "text", "a longer text"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[a]\nx = 1\n[b]\ny = 2", None),
        ("x = 1", r"line 1: no \[section\]"),
        ("[a]\nx", "line 2: not a name=value"),
        ("[a]\nx = 1\n[a]", "line 3: the section or name repeats"),
        ("[a]\nx = 1\nx = 2", "line 3: the section or name repeats"),
        ("[a]\nsection = 1", "are all named 'section'"),
        ("[DEFAULT]\nx = 1", "no rows"),
    ],
)
def test_source(load, tmp_path, monkeypatch, text, error):
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    reader = load("def read_ini").read_ini
    formats.register_source(SourceFormat("INI", reader, suffixes=(".ini",)))
    path = tmp_path / "settings.ini"
    path.write_text(text)
    if error is None:
        columns = {"section": ["a", "b"], "x": ["1", None], "y": [None, "2"]}
        assert read(path).columns == columns
    else:
        with pytest.raises(SourceError, match=error):
            read(path)


def test_command(load, tmp_path, monkeypatch):
    module = load("def count")
    monkeypatch.setitem(sys.modules, "qkv.cli.count", module)
    monkeypatch.setitem(cli.COMMAND_MODULES, "count", "count")
    path = tmp_path / "t.csv"
    path.write_text("k,v\na,1\nb,2\n")
    assert CliRunner().invoke(cli.app, ["count", str(path)]).stdout == "2\n"
    assert CliRunner().invoke(cli.app, ["count", str(path), "--json"]).stdout == '{"rows": 2}\n'
    assert as_command(module.count).__name__ == "count"


def test_score_of_another_package(load):
    check_score(load("class Mine").Mine(2.0), **FAST)


@pytest.mark.parametrize("names", [scores.NAMES, weightings.NAMES], ids=["scores", "weightings"])
def test_the_equation_page_names_every_score_and_weighting(names):
    page = (ROOT / "docs" / "equation.md").read_text(encoding="utf-8")
    missing = [
        name
        for name, kind in names.items()
        if f'`"{name}"`' not in page and f"`{kind.__name__}(" not in page
    ]
    assert not missing


def test_the_equation_page_names_every_mask():
    page = (ROOT / "docs" / "equation.md").read_text(encoding="utf-8")
    assert not [name for name in masks.NAMES if f"`{name}`" not in page]


def test_every_encoder_has_the_kind_of_its_name():
    assert all(name == kind.kind for name, kind in encoders.ENCODERS.items())
