"""JSON with orjson or without it: the same cells, and the same words for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.database.sources import SourceError, json, read

pytest.importorskip("orjson")


def outcome(path: Path) -> str:
    try:
        return repr(read(path).columns)
    except SourceError as error:
        return str(error)


# Each: what is messy, the rows, and whether orjson is sure of them.

ROWS = {
    "plain": ('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n', True),
    "names come and go": ('{"b": 1}\n{}\n{"a": null, "b": 2}\n{"c": true}\n', True),
    "ints and floats": ('{"a": 1}\n{"a": 2.0}\n{"a": 1e5}\n{"a": -0.0}\n', True),
    "the largest int": ('{"a": 18446744073709551615}\n{"a": -9223372036854775808}\n', True),
    "long ints": ('{"a": 12345678901234567890123}\n{"a": 1}\n', False),
    "long ints within": ('{"a": [{"b": [-9223372036854775809]}]}\n', False),
    "long digits": ('{"a": 0.12345678901234567890123}\n{"a": 1.7976931348623157e308}\n', False),
    "text that others type": ('{"a": "2020-01-02"}\n{"a": "1"}\n{"a": "null"}\n', True),
    "kinds side by side": ('{"a": "x"}\n{"a": 1}\n{"a": [1]}\n{"a": {"b": null}}\n', True),
    "vectors": ('{"v": [0.5, 1.0]}\n{"v": null}\n{"v": [2.0, 3.5]}\n', True),
    "lists of any length": ('{"v": [0.5, 1.0]}\n{"v": []}\n{"v": [2, "x", [0.5]]}\n', True),
    "escapes": ('{"a": "\\u00e9\\n\\"\\ud83d\\ude00"}\n{"a": "\\u0000"}\n', True),
    "names to quote": ('{"it\'s \\"a\\" name": 1, "b;c": 2}\n', True),
    "text like names": ('{"a": "x \\"y\\": z", "b\\\\" : "c :d"}\n{"a": "\\\\"}\n', True),
    "blank lines": ('\n{"a": 1}\r\n\r\n  {"a": 2}  \n', True),
    "lines of blanks": ('{"a": 1}\n  \n{"a": 2}\n', False),
    "old returns": ('{"a": 1}\r{"a": 2}', False),
    "a return within": ('{"a":\r1}\n', False),
    "not a number": ('{"a": NaN}\n{"a": -Infinity}\n', False),
    "names that differ in case": ('{"a": 1, "A": 2}\n', True),
    "a list": ('[{"a": 1},\n {"a"\n: 2}]', True),
    "a list of none": ("[]", False),
    "a list of others": ('[{"a": 1}, 5]', False),
    "more after a list": ('[{"a": 1}] 5', False),
    "byte order mark": ('\ufeff{"a": 1}\n', True),
    "doubled names": ('{"a": 1, "a": 2}\n', False),
    "doubled names within": ('{"a": {"b": 1, "b": 2}}\n', False),
    "doubled names in a list": ('{"a": [1, {"b": 1, "b": 2}]}\n', False),
    "doubled names beside blanks": ('{"b": 1, "b": 2, "c" : 3}\n', False),
    "doubled names beside strokes": ('{"a\\\\": 1, "b": 1, "b": 2}\n', False),
    "a comma too many": ('{"a": 1}\n{"a": [1, ], "b": 2}\n', False),
    "too large": ('{"a": 1e999}\n', False),
    "half a character": ('{"a": "\\ud800"}\n', False),
    "no object": ('{"a": 1}\n5\n', False),
    "text for an object": ('"ab"\n', False),
    "two on a line": ('{"a": 1} {"a": 2}\n', False),
    "one on two lines": ('{"a": [1\n2]}\n', False),
    "broken": ('{"a": 1}\n{"a": \n', False),
    "nameless": ('{"": 1}\n', True),
    "deep": ('{"a": ' + "[" * 1010 + "]" * 1010 + "}\n", False),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_are_read_alike(tmp_path, monkeypatch, what):
    text, sure = ROWS[what]
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode())
    listed = text.startswith("[")
    assert (json._read_with_orjson(path.read_bytes(), listed, None) is not None) == sure
    result = outcome(path)
    monkeypatch.setattr(json, "_read_with_orjson", lambda *_: None)
    assert result == outcome(path)


def test_too_many_names_are_left_to_the_reader_that_tells(monkeypatch):
    monkeypatch.setattr(json, "_MAX_COLUMNS", 2)
    rows = b'{"a": 1, "b": 2}\n{"c": 3}\n'
    assert json._read_with_orjson(rows, False, None) is None
    assert json._read_with_orjson(rows[:17], False, None) == {"a": [1], "b": [2]}


def test_batches_are_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(json, "_ROWS_PER_BATCH", 3)
    path, seen = tmp_path / "t.jsonl", []
    path.write_text("".join(f'{{"a": {i}, "b{i // 5}": "x"}}\n' for i in range(10)))
    result = read(path, progress=lambda done, total: seen.append(done / total)).columns
    assert result["a"] == [*range(10)]
    assert result["b1"] == [None] * 5 + ["x"] * 5
    assert seen == sorted(seen) and seen[-1] == 1


@pytest.mark.parametrize("around", ['{"data": %s}', '{"count": 2, "next": null, "data": %s}'])
def test_rows_inside_of_an_object_are_reported(tmp_path, around):
    """As many an API sends them: read as it stands, this is one row."""
    path = tmp_path / "page.json"
    path.write_text(around % '[{"name": "Li", "age": 34}, {"name": "Hu", "age": 35}]')
    with pytest.warns(UserWarning, match="only one row, and its 'data' is a list of 2 objects"):
        table = read(path)
    assert len(table.columns["data"]) == 1
    path.write_text(
        '{"name": "Li", "tags": ["a", "b"], "at": [1.5, 2.5], "of": {"a": 1}, "no": []}'
    )
    read(path)  # a row of its own, without a warning
