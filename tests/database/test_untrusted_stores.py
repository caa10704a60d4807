"""An untrusted database: its settings never run code, and errors name what is wrong."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import warnings
import zlib

import numpy as np
import pytest

import qkv
from qkv.database import Database, check_store, encoders
from qkv.database.encoders import Characters, Custom, Exact, Heads, Sentences, Vectors
from qkv.database.errors import StoreDamagedError
from qkv.database.storage import Store, limits
from qkv.database.table import cells
from qkv.errors import ArgumentError, QkvError

KEYS = ["Zhang", "Lipton", "Li"]


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A folder that pretends to be a model, with Python that leaves a mark when it runs."""
    folder = tmp_path / "store" / "model"
    folder.mkdir(parents=True)
    mark = tmp_path / "it ran"
    code = f"open({str(mark)!r}, 'w')\n\nclass Evil:\n    load = open\n\ndef run(keys): 0 / 0\n"
    for place in (folder / "evil.py", folder / "__init__.py", tmp_path / "evil.py"):
        place.write_text(code)
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}])
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoModel": "evil.Evil"}})
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "store")
    monkeypatch.setitem(sys.modules, "evil", None)
    del sys.modules["evil"]
    yield folder
    assert not mark.exists() and "evil" not in sys.modules


def hostile(folder):
    model = str(folder)
    return [
        model,
        "model",
        "evil:run",
        "evil.Evil",
        "os:system",
        {"kind": "sentences", "model": model, "width": 4},
        {"kind": "custom", "name": "evil:run", "width": 4},
        {"kind": "vectors", "path": model, "limit": None, "width": 4, "checksum": ""},
        {"kind": "heads", "heads": ["evil:run"], "weights": [1], "names": ["x"]},
        {"kind": "evil"},
        {},
        [[model]],
        None,
    ]


def places(tree, path=()):
    """Every place in the settings."""
    yield path
    if isinstance(tree, dict | list):
        for name in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[name], (*path, name))


def replace_at(tree, path, value):
    if not path:
        return value
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[path[0]] = replace_at(tree[path[0]], path[1:], value)
    return changed


def build_learned_database():
    D = Database({key: key for key in KEYS}, encoder=Characters(32))
    D.learn([("Zang", "Zhang"), ("Liptn", "Lipton"), ("Ly", "Li")], epochs=1)
    return D


STORES = {
    "text": lambda: Database({key: key for key in KEYS}),
    "fitted": lambda: Database({key: key for key in KEYS}, encoder=Characters(32, idf=True)),
    "exact": lambda: Database(dict.fromkeys(KEYS, 1.0), encoder=Exact()),
    "heads": lambda: Database(dict.fromkeys(KEYS, 1.0), encoder=Heads([Characters(16), Exact()])),
    "numbers": lambda: Database({1.0: 2.0, 3.0: 4.0}),
    "arrays": lambda: Database(np.eye(3), np.arange(3.0)),
    "columns": lambda: Database([(("a", 1.0), "x"), (("b", 2.0), "y")], key=("k", "n")),
    "learned": build_learned_database,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STORES)
def test_nothing_in_a_store_is_executable(name, evil):
    with STORES[name]() as D:
        view = D._view
        settings, arrays = view.settings, view.snapshot.read_arrays()
        key = next(iter(D))
        rows = list(view.snapshot.iterate_rows())
        tensors = {n: view.snapshot.read_tensor(n, view.ids) for n in view.snapshot.tensor_names}
        digests = [
            row[0]
            for row in D._store._reader_catalog.fetch_all("SELECT digest FROM rows ORDER BY id")
        ]
    for path in places(settings):
        for value in hostile(evil):
            changed = replace_at(settings, path, value)
            if not isinstance(changed, dict):
                continue
            with Store() as store:
                store.commit(
                    records=[record for _, record in rows],
                    digests=digests,
                    tensors=tensors,
                    settings=changed,
                    arrays=arrays or None,
                )
                strange = Database._from_store(store)
                for look in (
                    lambda D: D[key],
                    lambda D: D.ask(key),
                    lambda D: D.info(),
                    lambda D: D.add(key, 1),
                ):
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            look(strange)
                    except QkvError:
                        pass
                    except (TypeError, ValueError, IndexError):
                        # A number of an encoder that is none.
                        assert path[0] == "encoder" and path[-1] not in ("kind", "heads", "base")


def test_a_store_names_a_model_by_a_safe_name_only(evil):
    settings = {"kind": "sentences", "model": str(evil), "width": 4}
    for encoder_settings in (
        settings,
        {"kind": "learned", "base": settings, "rows": 1, "cosines": [True]},
    ):
        with pytest.raises(ArgumentError, match=r"does not trust.*encoder=Sentences\(folder\)"):
            encoders.load(encoder_settings, {})


def test_code_of_a_model_is_not_run_even_if_its_reader_names_the_folder(evil):
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ArgumentError, match=r"'evil.Evil', which may be code"):
        Sentences(str(evil)).encode(["a"])
    (evil / "modules.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"modules.json cannot be read"):
        Sentences(str(evil)).encode(["a"])


def test_what_its_reader_passes_takes_the_place_of_what_a_store_names(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("cat 1 0\ntax 0 1\n")
    function = Custom(lambda keys: [[len(key)] for key in keys])
    for encoder in (Vectors(words), Heads([Characters(8), Vectors(words)]), function):
        path = tmp_path / f"{encoder.kind}.qkv"
        with Database.from_columns({"k": ["cat", "tax"], "v": [1, 2]}, encoder=encoder, path=path):
            pass
    words.rename(tmp_path / "moved.txt")
    moved = Vectors(tmp_path / "moved.txt")
    for encoder in (moved, Heads([Characters(8), moved]), function):
        path = tmp_path / f"{encoder.kind}.qkv"
        with Database._from_store(Store(path), encoder=encoder) as D:
            assert D.ask("cat", weighting="hard").value == 1
    model = Sentences("models/my-model", size=4)
    settings = {"kind": "sentences", "model": "/elsewhere/my-model", "width": 4}
    assert encoders.load(settings, {}, model) == model
    both = {"kind": "heads", "heads": [settings], "weights": [1.0], "names": ["0"]}
    assert encoders.load(both, {}, Heads([model])).heads == (model,)
    with pytest.raises(ArgumentError, match="encoder="):
        encoders.load(settings, {}, Sentences("models/another"))


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 3}', "none", "[" * 10**5])
def test_settings_that_are_lost_are_not_made_anew(tmp_path, text):
    path = tmp_path / "d.qkv"
    table = {"name": ["a", "b"], "age": [1, 2], "city": ["x", "y"]}
    Database.from_columns(table, key="name", value="age", path=path).close()
    with contextlib.closing(sqlite3.connect(path / "catalogue.sqlite")) as catalogue:
        change = "UPDATE settings SET text = ?, crc = ?"
        catalogue.execute(change, (text, zlib.crc32(text.encode())))
        catalogue.commit()
    with qkv.open(path) as D:
        rows = {"add": lambda: D.add("c", 3), "update": lambda: D.update("a", 4)}
        rows |= {"extend": lambda: D.extend([{"key": 1.0}]), "ask": lambda: D.ask("a")}
        for change in rows.values():
            with pytest.raises(StoreDamagedError, match="settings"):
                change()
    for encoder in (None, Characters(64)):
        with (
            pytest.raises(StoreDamagedError, match="settings"),
            qkv.open(path, encoder=encoder) as D,
        ):
            D.add("c", 3)
    full = text[0] == "{" or text == "[]"  # as a store's settings may be
    assert bool(check_store(path)) is not full


@pytest.mark.parametrize("cell", ["[]", 1.5, b"x"])
@pytest.mark.parametrize("table", ["generations", "segments"])
def test_a_file_whose_size_no_store_wrote_is_damage(tmp_path, monkeypatch, table, cell):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 12)
    place, message = tmp_path / "names.qkv", "an entry for a file has wrong types"
    with qkv.open(place) as D:
        D.add([f"name {i}" for i in range(300)], range(300))
    with contextlib.closing(sqlite3.connect(place / "catalogue.sqlite")) as catalogue, catalogue:
        condition = f"rowid = (SELECT max(rowid) FROM {table} WHERE checksum IS NOT NULL)"
        assert catalogue.execute(
            f"UPDATE {table} SET bytes = ? WHERE {condition}", (cell,)
        ).rowcount
    with pytest.raises(StoreDamagedError, match=message), qkv.open(place, create=False) as D:
        D.ask("name 3")
    assert [problem.what for problem in check_store(place)] == [message]
    assert check_store(place, repair=True)[0].repaired


@pytest.mark.parametrize(
    ("column", "number"),
    [
        *((column, -2) for column in ("rows", "last", "generation", "settings")),
        *((column, "x") for column in ("rows", "last", "generation", "settings", "added")),
        ("rows", 4),
        ("rows", 2**62),
        ("last", -1),
    ],
)
def test_a_version_that_no_store_wrote_is_damage(tmp_path, column, number):
    """Whoever made it knew to make its checksum, too."""
    place = tmp_path / "names.qkv"
    with qkv.open(place, encoder="characters") as D:
        D.add(KEYS, KEYS)
    with contextlib.closing(sqlite3.connect(place / "catalogue.sqlite")) as catalogue, catalogue:
        cursor = catalogue.execute("SELECT * FROM versions WHERE number = 1")
        names = [name for name, *_ in cursor.description]
        line = dict(zip(names, cursor.fetchone(), strict=True)) | {column: number}
        del line["crc"]
        crc = zlib.crc32("|".join(map(str, line.values())).encode())
        change = f"UPDATE versions SET {column} = ?, crc = ? WHERE number = 1"
        catalogue.execute(change, (number, crc))
    with pytest.raises(StoreDamagedError, match="version 1 is not what was written"):
        len(qkv.open(place, create=False))


@pytest.mark.parametrize(
    "record", ["[" * 100_000, '{"value": {"$bytes": "x"}}', '{"value": {"$array": ["O", [1], ""]}}']
)
def test_a_record_that_no_store_wrote_is_damage(record):
    with pytest.raises(StoreDamagedError, match="a record is damaged"):
        cells.load_row(record)


@pytest.mark.parametrize("name", ["kinds/key", "kinds/value", "code"])
def test_a_layout_without_what_the_schema_names_is_damage(tmp_path, name):
    place = tmp_path / "pairs.qkv"
    with qkv.open(place) as D:
        D.add([[1.0, 2.0], [3.0, 4.0]] if name == "code" else [1.0, 2.0], [3.0, 4.0])
    with contextlib.closing(sqlite3.connect(place / "catalogue.sqlite")) as catalogue, catalogue:
        change = "UPDATE generations SET layout = replace(layout, ?, 'other')"
        catalogue.execute(change, (name,))
    with (
        pytest.raises(StoreDamagedError, match="are lost or invalid"),
        qkv.open(place, create=False) as D,
    ):
        D.ask([1.0, 2.0] if name == "code" else 1.0, where="value > 1")
