"""One question at every entry point that gives an answer: the same value, mean and confidence."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.cluster import split
from qkv.page.calls import run_call
from qkv.page.html_file import read_module
from qkv.page.views import build_views
from qkv.retrievers.documents import retrieve_documents
from tests.cli.run import data
from tests.cli.run import qkv as run_command
from tests.serve.process import serving

ROWS = {
    "title": ["The Alchemist", "The Iliad", "Emma", "Dune", "Emma"],
    "year": [1988, -750, 1815, 1965, 1816],
    "price": [9.0, 4.0, 5.0, 8.0, 6.0],
}
TABLES: dict[str, tuple[dict[str, Any], Any, float | None, bool]] = {
    # options of the table, a query, the value of the best-matching key, whether the mean is it
    "books": ({"key": "title", "value": "year"}, "the alchmist", 1988.0, False),
    "repeated": ({"key": "title", "value": "year"}, "emma", 1815.5, False),
    "prices": ({"key": "price", "value": "year"}, 8.7, None, True),
    "pairs": ({"key": ["year", "price"], "value": "price"}, (1900.0, 5.0), None, True),
    "mixed": ({"key": ["title", "price"], "value": "year"}, ("Dune", 8.0), 1965.0, False),
}
ROOMS: dict[str, list[Any]] = {
    "room": [f"Room {number}, floor {number % 5}" for number in range(101, 171)],
    "seats": [float(number % 7) for number in range(70)],
    "plan": [f"plan {number}" for number in range(70)],
}
STATIONS: dict[str, list[Any]] = {
    "x": [float(i % 9) + i / 100 for i in range(60)],
    "y": [float(i % 7) for i in range(60)],
    "height": [float((i * i) % 13) for i in range(60)],
    "class": ["low" if (i * i) % 13 < 6 else "high" for i in range(60)],
}
ROOM_PAIRS = [
    (f"Rom {number}", ROOMS["room"][number - number % 2 - 101]) for number in range(102, 131)
]
ROOM_QUERIES = ("Room 350", "Rom 111", "floor 3 room 123")
FIELDS = (
    *("value", "mean", "value_is_mean", "spread", "expected_error"),
    *("confidence", "confidence_text", "hint"),
)
WEIGHTINGS = ("softmax", "average", "topk:2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    for name, (options, *_) in TABLES.items():
        qkv.Database.from_columns(ROWS, **options, path=folder / f"{name}.qkv").close()
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    with serving(*sorted(folder.glob("*.qkv"))) as (url, _), qkv.Client(url) as client:
        yield client


def collect_fields(answer: Any) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in FIELDS}


def approximately(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: pytest.approx(x, rel=1e-5) if type(x) is float else x for name, x in fields.items()
    }


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", TABLES)
def test_every_entry_point_gives_the_same_answer(
    name: str, weighting: str, folder: Path, client: Any, tmp_path: Path
) -> None:
    options, query, best_value, is_mean = TABLES[name]
    memory = qkv.Database.from_columns(ROWS, **options)
    parsed = qkv.database.parsing.parse_weighting(weighting)
    answer = memory.ask(query, weighting=parsed)
    expected = approximately(collect_fields(answer))
    assert answer.value_is_mean is is_mean
    assert answer.value == (answer.mean if is_mean else best_value)
    attended = memory.attend([query] if isinstance(query, tuple) else query, weighting=parsed)
    assert attended.reshape(-1)[0] == pytest.approx(answer.mean, rel=1e-5)

    with qkv.open(folder / f"{name}.qkv") as disk:
        assert collect_fields(disk.ask(query, weighting=parsed)) == expected
        documents = retrieve_documents(disk, query, 2, "title", weighting=parsed)
        assert [x.metadata["key"] for x in documents] == [
            list(row.key) if isinstance(row.key, tuple) else row.key for row in answer.rows[:2]
        ]
    assert collect_fields(pickle.loads(pickle.dumps(answer))) == expected
    assert collect_fields(client[name].ask(query, weighting=parsed)) == expected

    text = ", ".join(map(str, query)) if isinstance(query, tuple) else str(query)
    shell = data("ask", folder / f"{name}.qkv", text, "--weighting", weighting)
    assert {x: shell[x] for x in FIELDS if x in shell} == {
        x: expected[x] for x in FIELDS if x in shell
    }
    assert {"value", "mean", "value_is_mean", "spread"} <= shell.keys()
    printed = run_command("ask", folder / f"{name}.qkv", text, "--weighting", weighting)
    first_line = printed.stdout.splitlines()[0]
    assert ("mean of all rows" in first_line) is not is_mean
    if not is_mean:
        assert float(first_line.split()[0]) == pytest.approx(best_value)

    called = (
        run_call("ask", {"database": name, "query": query, "weighting": weighting}, {name: memory})
        if ":" not in weighting
        else answer.to_dict()
    )
    assert called["value"] == expected["value"] and called["mean"] == expected["mean"]
    [view] = build_views(answer)
    shown = view["data"]["answer"]
    assert {x: shown[x] for x in ("value", "mean", "value_is_mean", "spread")} == {
        x: expected[x] for x in ("value", "mean", "value_is_mean", "spread")
    }


@pytest.mark.parametrize("value", ["height", "class"])
def test_the_error_for_left_out_rows_is_the_same_everywhere(value: str, tmp_path: Path) -> None:
    path = tmp_path / "stations.qkv"
    options: dict[str, Any] = {"key": ["x", "y"], "value": value}
    memory = qkv.Database.from_columns(STATIONS, **options)
    qkv.Database.from_columns(STATIONS, **options, path=path).close()
    answer = memory.ask((3.2, 4.4))
    expected = approximately(collect_fields(answer))
    if value == "height":
        assert "nearby keys say little about the value" in answer.hint
        assert answer.expected_error > 2 and ", error about " in answer.confidence_text
    with qkv.open(path) as disk:
        assert collect_fields(disk.ask((3.2, 4.4))) == expected
    assert collect_fields(pickle.loads(pickle.dumps(answer))) == expected
    with serving(path) as (url, _), qkv.Client(url) as client:
        assert collect_fields(client["stations"].ask((3.2, 4.4))) == expected
    shell = data("ask", path, "3.2, 4.4")
    fields = [x for x in FIELDS if x in shell]
    assert {x: shell[x] for x in fields} == {x: expected[x] for x in fields}
    assert {"expected_error", "hint", "confidence"} <= shell.keys()
    pytest.importorskip("ray")
    from tests.cluster.local_shards import cluster

    parts = [str(tmp_path / f"{i}.qkv") for i in range(2)]
    split(path, parts)
    with cluster(parts, 2) as shards:
        assert collect_fields(shards.ask((3.2, 4.4))) == expected


@pytest.mark.parametrize("name", TABLES)
def test_a_cluster_gives_the_same_answer(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tests.cluster.local_shards import cluster

    options, query, *_ = TABLES[name]
    memory = qkv.Database.from_columns(ROWS, **options)
    parts = [str(tmp_path / f"{i}.qkv") for i in range(2)]
    split(folder / f"{name}.qkv", parts)
    with cluster(parts, 2) as shards:
        for weighting in ("softmax", "average", "sigmoid", qkv.weightings.TopK(1)):
            for where in (None, "year > 1000"):
                for top in (1, 5):
                    how = {"weighting": weighting, "where": where, "top": top}
                    expected = approximately(collect_fields(memory.ask(query, **how)))
                    assert collect_fields(shards.ask(query, **how)) == expected, how


@pytest.mark.parametrize("value", ["seats", "plan"])
def test_every_confidence_is_calibrated_and_lowered_alike(value: str, tmp_path: Path) -> None:
    """A query whose number the best row contradicts, before and after `calibrate`."""
    pytest.importorskip("ray")
    from tests.cluster.local_shards import cluster

    said = []
    for name in ("default", "calibrated"):
        path, parts = tmp_path / f"{name}.qkv", [str(tmp_path / f"{name}{i}.qkv") for i in (0, 1)]
        options: dict[str, Any] = {"key": "room", "value": value}
        memory = qkv.Database.from_columns(ROOMS, **options)
        stored = qkv.Database.from_columns(ROOMS, **options, path=path)
        if name == "calibrated":
            for database in (memory, stored):
                database.calibrate(ROOM_PAIRS, coverage=0.5)
        answers = [memory.ask(query) for query in ROOM_QUERIES]
        expected = [approximately(collect_fields(answer)) for answer in answers]
        said.append([answer.confidence for answer in answers])
        others: list[Any] = [
            stored,
            pickle.loads(pickle.dumps(memory)),
            pickle.loads(pickle.dumps(stored)),
        ]
        for other in others:
            assert [collect_fields(other.ask(answer.query)) for answer in answers] == expected
            other.close()
        assert list(map(collect_fields, pickle.loads(pickle.dumps(answers)))) == expected
        with serving(path) as (url, _), qkv.Client(url) as client:
            served = [client[name].ask(answer.query) for answer in answers]
            assert list(map(collect_fields, served)) == expected
        split(path, parts)
        with cluster(parts, 2) as shards:
            assert [collect_fields(shards.ask(answer.query)) for answer in answers] == expected
    assert said[0][0] <= 0.5 and said[0] != said[1]


def test_sql_ranks_the_best_key_first(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as con:
        qkv.duckdb.register(con)
        for name, (_, query, best, is_mean) in TABLES.items():
            if not is_mean and isinstance(query, str):
                ask = f"qkv_ask('{folder}/{name}.qkv', ?)"
                sql = f"SELECT avg(year) FROM {ask} GROUP BY title ORDER BY min(rank)"
                assert con.execute(sql, [query]).fetchone() == (best,)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_page_gives_the_same_answer(tmp_path: Path) -> None:
    """The page's own computation, for the encoders that it has."""
    module = tmp_path / "qkv.mjs"
    module.write_text(read_module(), encoding="utf-8")
    cases = []
    for rows, query in (
        ([["The Alchemist", 1988], ["Emma", 1815], ["Dune", 1965], ["Emma", 1816]], "emma"),
        ([["The Alchemist", 1988], ["Emma", 1815], ["Dune", 1965]], "the alchmist"),
        ([[1.0, 10.0], [2.0, 40.0], [4.0, 20.0]], 1.7),
        ([["Li", "Mu"], ["Hu", "Rachel"]], "Lii"),
    ):
        for weighting in ("softmax", "average", "raw", "sigmoid"):
            for score in (None, "exact") if weighting != "raw" else (None,):
                cases.append([rows, query, weighting, score])
    script = (
        'globalThis.document = {baseURI: ""};'
        f"const {{equation}} = await import({json.dumps(module.as_uri())});"
        f"const cases = {json.dumps(cases)};"
        "const answers = cases.map(([rows, query, weighting, score]) => {"
        " const pairs = rows.map(([key, value]) => ({key, value}));"
        " const answer = equation.ask(pairs, query, {weighting, score});"
        " const {shown, mean, valueIsMean, spread} = answer;"
        " return {value: shown, mean, value_is_mean: valueIsMean, spread}; });"
        "console.log(JSON.stringify(answers));"
    )
    command = ["node", "--input-type=module", "-e", script]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    for (rows, query, weighting, score), fields in zip(
        cases, json.loads(finished.stdout), strict=True
    ):
        encoder = "numbers" if isinstance(query, float) else "characters"
        database = qkv.Database([tuple(row) for row in rows], encoder=encoder)
        answer = database.ask(query, weighting=weighting, score=score)
        expected = approximately({name: getattr(answer, name) for name in fields})
        assert fields == expected, (rows, query, weighting, score)
