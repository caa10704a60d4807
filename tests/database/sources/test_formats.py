"""Formats that are registered from outside."""

from __future__ import annotations

import gzip
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qkv.database import Database
from qkv.database.sources import SourceError, SourceFormat, SourceRequest, Table, formats, read
from qkv.database.sources.formats import register_source
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.util import registry


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))


def read_pairs(request: SourceRequest) -> Table:
    lines = [line.split("=") for line in request.data.decode().split()]
    if any(len(line) != 2 for line in lines):
        raise SourceError("not name=value", file=request.location, line=1)
    names, values = map(list, zip(*lines, strict=True))
    return Table(request.name, {"name": names, "value": values})


def read_url(request: SourceRequest) -> Table:
    return Table(request.name, {"url": [request.url], "table": [request.selector.table]})


PAIRS = SourceFormat("pairs", read_pairs, suffixes=(".pairs",))


def test_a_registered_suffix(tmp_path: Path) -> None:
    path = tmp_path / "a.pairs"
    path.write_text("x=1 y=2")
    with pytest.raises(SourceError, match=r"The suffix '\.pairs' is unknown.*\.ndjson"):
        read(path)
    assert register_source(PAIRS) is PAIRS
    expected = {"name": ["x", "y"], "value": ["1", "2"]}
    assert read(path) == Table("a", expected)
    packed = tmp_path / "b.PAIRS.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == Table("b", expected)
    assert len(read(f"{tmp_path}/*")) == 4
    assert Database.from_source(path, key="name", value="value")["y"] == "2"
    with pytest.raises(CombinationError, match="is a single table"):
        read(path, table="t")
    with pytest.raises(CombinationError, match="has column names"):
        read(path, names=["t"])
    path.write_text("x")
    with pytest.raises(SourceError, match=r"a\.pairs, line 1: not name=value"):
        read(path)
    assert ".pairs" in formats.describe_formats()


def test_a_registered_scheme() -> None:
    register_source(SourceFormat("shop", read_url, schemes=("shop",), has_tables=True))
    table = read("SHOP://li:secret@host/books", table="t")
    assert table == Table("books", {"url": ["SHOP://li:secret@host/books"], "table": ["t"]})
    with pytest.raises(SourceError, match="other:// URLs are not supported: qkv reads files"):
        read("other://host")


def test_registered_first_bytes(tmp_path: Path) -> None:
    def read_magic(request: SourceRequest) -> Table:
        return Table(request.name, {"bytes": [request.file.read_bytes()]})

    register_source(SourceFormat("QQ", read_magic, suffixes=(".qq",), magic=(b"QQ1",)))
    path = tmp_path / "t.csv"
    path.write_bytes(b"QQ1 data")
    assert read(path).columns == {"bytes": [b"QQ1 data"]}
    wrong = tmp_path / "t.qq"
    wrong.write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match="not QQ: the first bytes"):
        read(wrong)


def test_what_is_taken_or_invalid_is_refused() -> None:
    register_source(PAIRS)
    register_source(PAIRS)  # again, as in a notebook cell
    with pytest.raises(ArgumentError, match=r"_read_csv has registered '\.csv': choose another"):
        register_source(SourceFormat("mine", read_pairs, suffixes=(".csv",)))
    with pytest.raises(ArgumentError, match="has registered the name 'CSV'"):
        register_source(SourceFormat("CSV", read_pairs, suffixes=(".mine",)))
    with pytest.raises(ArgumentError, match=r"like '\.ini' in lower case, not 'ini'"):
        register_source(SourceFormat("mine", read_pairs, suffixes=("ini",)))
    with pytest.raises(ArgumentError, match="like 'mysql' in lower case, not 'my://'"):
        register_source(SourceFormat("mine", read_pairs, schemes=("my://",)))
    with pytest.raises(ArgumentError, match="has no suffixes, schemes or magic"):
        register_source(SourceFormat("mine", read_pairs))
    with pytest.raises(DtypeError, match="takes a SourceFormat"):
        register_source(read_pairs)  # type: ignore[arg-type]


def test_an_installed_plugin_is_loaded_for_an_unknown_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_failed_plugins", None)
    monkeypatch.setattr(EntryPoint, "load", lambda point: register_source(PAIRS))
    points = [EntryPoint("mine", "mine.pairs", registry.PLUGIN_GROUP)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    path = tmp_path / "a.pairs"
    path.write_text("x=1")
    assert len(read(path)) == 1
