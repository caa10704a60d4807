"""Every route of /v1 against the same database in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import qkv
from qkv.answer import Answer
from qkv.scores import Gaussian
from qkv.serve import encoding, limits
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry, open_sources
from qkv.serve.security import Access
from qkv.util.formatting import to_jsonable
from qkv.weightings import TopK
from tests.serve.conftest import BOOKS, KEYS, LOCAL


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_same_answer(actual: Any, answer: Answer) -> None:
    """The same answer, but for the last digits that a batch of another size may change."""
    near = partial(pytest.approx, rel=1e-4, abs=1e-6)
    expected = answer.to_dict()
    rows, correct = actual.pop("rows"), expected.pop("rows")
    assert [row.pop("weight") for row in rows] == near([row.pop("weight") for row in correct])
    assert rows == correct
    for name in ("value", "entropy", "effective_rows"):
        want = expected.pop(name)
        assert actual[name] == (near(want) if isinstance(want, float | list) else want), name
    assert actual["lse"] == (None if answer.lse is None else near(answer.lse, nan_ok=True))
    assert (actual["score"], actual["weighting"]) == (answer.score, answer.weighting)
    assert [share["value"] for share in actual["values"]] == [s.value for s in answer.values]
    assert {name: actual[name] for name in expected} == expected


ASKS: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("books", "Ema", {}, {}),
    ("books", ["Ema", "Ulises"], {"top": 2}, {"top": 2}),
    ("books", [], {}, {}),
    ("books", "Emma", {"where": "year > 1900"}, {"where": "year > 1900"}),
    ("books", "Emma", {"where": {"genre": "poetry"}}, {"where": {"genre": "poetry"}}),
    (
        "books",
        "Emma",
        {"score": "exact", "weighting": "raw"},
        {"score": "exact", "weighting": "raw"},
    ),
    ("books", "Emma", {"at": 1, "weighting": "topk:2"}, {"weighting": TopK(2)}),
    ("grades", 3.55, {"score": "gaussian:0.1"}, {"score": Gaussian(0.1)}),
    ("grades", [3.2, 3.9], {"weighting": "hard"}, {"weighting": "hard"}),
    ("vectors", KEYS[3].tolist(), {}, {}),
    ("vectors", KEYS[:4].tolist(), {"score": "cosine:0.2"}, {"score": qkv.scores.Cosine(0.2)}),
]


@pytest.mark.parametrize(("name", "query", "sent", "meant"), ASKS)
def test_ask(
    client: TestClient, served: DatabaseRegistry, name: str, query: Any, sent: Any, meant: Any
) -> None:
    actual = post(client, f"/v1/databases/{name}/ask", query=query, **sent)
    database = served.databases[name].database
    cells = np.asarray(query) if name == "vectors" else query
    expected = database.ask(cells, **meant)
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            check_same_answer(one, other)
    else:
        check_same_answer(actual, expected)


def test_a_key_of_several_columns_is_a_list(client: TestClient, served: DatabaseRegistry) -> None:
    database = served.databases["places"].database
    result = post(client, "/v1/databases/places/ask", query=["Li", 1])
    check_same_answer(result, database.ask(("Li", 1)))
    many = post(client, "/v1/databases/places/ask", query=[["Li", 1], ["Hu", 2]])
    assert [one["value"] for one in many] == ["Mu", "Rachel"]
    assert client.get('/v1/databases/places/rows/["Hu", 2]').json()["value"] == "Rachel"


def test_text_is_read_as_the_keys_are(client: TestClient, served: DatabaseRegistry) -> None:
    assert post(client, "/v1/databases/grades/ask", query="3.5")["query"] == 3.5
    for reported in ("many", ["3.5", "many"]):
        with pytest.raises(qkv.errors.DtypeError) as here:
            served.databases["grades"].database.ask(reported)
        answer = client.post("/v1/databases/grades/ask", json={"query": reported})
        assert answer.status_code == 422 and str(here.value) in answer.text


def test_attend(client: TestClient, served: DatabaseRegistry) -> None:
    vectors, grades = (served.databases[name].database for name in ("vectors", "grades"))
    actual = post(
        client, "/v1/databases/vectors/attend", query=KEYS[:3].tolist(), score="gaussian:2"
    )
    expected = vectors.attend(KEYS[:3].astype(float), score=Gaussian(2.0))
    np.testing.assert_allclose(actual["value"], expected, rtol=1e-6)
    one = post(client, "/v1/databases/vectors/attend", query=KEYS[1].tolist())
    np.testing.assert_allclose(one["value"], vectors.attend(KEYS[1].astype(float)), rtol=1e-6)
    number = post(client, "/v1/databases/grades/attend", query=3.3, where="gpa < 4")
    np.testing.assert_allclose(number["value"], grades.attend(3.3, where="gpa < 4"), rtol=1e-6)


def test_weights(client: TestClient) -> None:
    query, key = KEYS[:2].astype(float), KEYS[2:6].astype(float)
    body = {"query": query.tolist(), "key": key.tolist()}
    actual = post(client, "/v1/weights", **body, score="gaussian:0.5", weighting="sparsemax")
    expected = qkv.weights(query, key, score=Gaussian(0.5), weighting="sparsemax")
    np.testing.assert_allclose(actual["weights"], expected, rtol=1e-12)
    mask = [[True, False, False, True]] * 2
    actual = post(client, "/v1/weights", **body, mask=mask)
    np.testing.assert_allclose(actual["weights"], qkv.weights(query, key, mask=np.array(mask)))
    actual = post(client, "/v1/weights", **body, mask="causal")
    np.testing.assert_allclose(actual["weights"], qkv.weights(query, key, mask="causal"))


def test_rows(client: TestClient, served: DatabaseRegistry) -> None:
    database = served.databases["books"].database
    assert client.get("/v1/databases/books/rows?at=1").json() == {
        "from": 0,
        "total": 5,
        "rows": [dict(zip(BOOKS, row, strict=True)) for row in zip(*BOOKS.values(), strict=True)],
    }
    where = "year > 1816"
    actual = client.get(
        "/v1/databases/books/rows", params={"from": 1, "count": 2, "where": where, "at": 1}
    ).json()
    expected = list(database.at(1).rows(where=where, start=1, count=2))
    assert actual == {"from": 1, "total": 4, "rows": expected}


def test_write_update_remove_and_look_back(client: TestClient, served: DatabaseRegistry) -> None:
    database, path = served.databases["books"].database, "/v1/databases/books/rows"
    before = database.version
    row = {"title": "Middlemarch/1", "genre": "novel", "year": 1871}
    reply = post(client, path, rows=[row])
    assert reply == {"name": "books", "rows": 6, "version": before + 1}
    assert client.get(f"{path}/Middlemarch/1").json() == {"key": "Middlemarch/1", "value": "novel"}
    reply = post(client, path, rows=[{"title": "Middlemarch/1", "genre": "classic"}], update=True)
    assert reply == {"name": "books", "rows": 6, "version": before + 2, "inserted": 0}
    assert database["Middlemarch/1"] == "classic"
    post(client, path, rows=[row])
    both = client.get(f"{path}/Middlemarch%2F1?all=true").json()
    assert both == {"key": "Middlemarch/1", "values": ["classic", "novel"]}
    past = client.get(f"{path}/Middlemarch/1?at={before + 1}").json()
    assert past["value"] == "novel"
    reply = client.delete(f"{path}/Middlemarch/1").json()
    assert reply == {"removed": 2, "name": "books", "rows": 5, "version": before + 4}
    result = client.get("/v1/databases/books/versions").json()
    assert result["versions"] == to_jsonable(
        [
            {n: getattr(v, n) for n in ("number", "time", "what", "added", "removed", "rows")}
            for v in database.versions()
        ]
    )


def test_an_absent_key_names_the_nearest(client: TestClient) -> None:
    for answer in (
        client.get("/v1/databases/books/rows/Ema"),
        client.delete("/v1/databases/books/rows/Ema"),
    ):
        assert answer.status_code == 404
        assert answer.json()["nearest"][0] == "Emma" and answer.json()["key"] == "Ema"


def test_cells_are_read_as_the_columns_are(client: TestClient, served: DatabaseRegistry) -> None:
    path = "/v1/databases/grades/rows"
    post(client, path, rows=[{"gpa": "3.8", "salary": "90"}])
    assert served.databases["grades"].database[3.8] == 90
    assert client.get(f"{path}/3.8").json() == {"key": 3.8, "value": 90}
    assert client.delete(f"{path}/3.8").status_code == 200


def test_text_stays_text_in_a_column_of_several_kinds(tmp_path: Path) -> None:
    with qkv.open(tmp_path / "mixed.qkv") as database:
        database.add(["a", "b"], [b"raw", "text"])
    served = open_sources([tmp_path / "mixed.qkv"])
    with TestClient(create_app(served, Access(write=True)), base_url=LOCAL) as client:
        post(client, "/v1/databases/mixed/rows", rows=[{"key": "c", "value": "more"}])
        assert served["mixed"]["c"] == "more"


@pytest.mark.parametrize(
    "row", ['{"$float": "inf"}', '{"$tuple": [1]}', '{"$bytes": ""}', '{"gpa": {"$dict": 5}}']
)
def test_a_row_that_is_tagged_as_a_cell_is_refused(client: TestClient, row: str) -> None:
    options = {"content-type": encoding.CELLS_MEDIA_TYPE}
    path = "/v1/databases/grades/rows"
    answer = client.post(path, content=f'{{"rows": [{row}]}}', headers=options)
    assert answer.status_code == 422 and answer.json()["kind"] in ("ArgumentError", "DtypeError")


def test_numbers_that_no_float_holds_are_refused(
    client: TestClient, served: DatabaseRegistry
) -> None:
    rows = len(served["grades"])
    for body in ('{"rows": [{"gpa": 1.5, "salary": 1e400}]}', '{"rows": [{"gpa": -1e999}]}'):
        answer = client.post(
            "/v1/databases/grades/rows", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and "too large for a float" in answer.json()["error"]
    assert len(served["grades"]) == rows


def test_rows_come_in_whole_or_not_at_all(client: TestClient, served: DatabaseRegistry) -> None:
    database = served.databases["grades"].database
    rows = [{"gpa": 2.0, "salary": 50.0}, {"gpa": "much", "salary": 51.0}]
    answer = client.post("/v1/databases/grades/rows", json={"rows": rows})
    assert answer.status_code == 422 and "gpa" in answer.json()["error"]
    assert 2.0 not in database


def test_info_and_databases(client: TestClient, served: DatabaseRegistry) -> None:
    database = served.databases["books"].database
    result = client.get("/v1/databases/books/info").json()
    about = dict(database.info())
    del about["path"]
    assert {name: result[name] for name in about} == to_jsonable(about)
    assert result["types"] == {"title": "text", "genre": "text", "year": "number"}
    assert result["name"] == "books" and result["missing"] == {"title": 0, "genre": 0, "year": 0}
    listed = client.get("/v1/databases").json()["databases"]
    assert [one["name"] for one in listed] == ["books", "grades", "vectors", "places"]
    assert listed[1]["key"] == ["gpa"] and listed[1]["rows"] == 4


def test_health_and_metrics(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    post(client, "/v1/databases/grades/ask", query=[3.1, 3.2, 3.3])
    text = client.get("/metrics").text
    assert 'qkv_requests_total{method="POST",route="/v1/databases/{name}/ask",status="200"}' in text
    assert 'qkv_batch_queries_count{database="grades"}' in text


def test_a_table_in_memory_is_not_written(client: TestClient) -> None:
    answer = client.post("/v1/databases/places/rows", json={"rows": [{"name": "a", "number": 1}]})
    assert answer.status_code == 409 and "in memory" in answer.json()["error"]


def test_an_upload_is_asked_by_other_columns_and_forgotten(client: TestClient) -> None:
    csv = b"name,major,year\nAnn,art,1\nBo,law,2\n"
    reply = client.post(
        "/v1/databases?name=students&format=csv&key=name&value=major",
        content=csv,
        headers={"content-type": "text/csv"},
    ).json()
    assert (reply["rows"], reply["value"], reply["uploaded"]) == (2, ["major"], True)
    assert reply["skipped"] == []
    assert post(client, "/v1/databases/students/ask", query="Bo")["value"] == "law"
    reply = post(client, "/page/call/columns", database="students", key=["major"], value=["name"])
    assert reply["result"]["key"] == ["major"]
    assert post(client, "/v1/databases/students/ask", query="art")["value"] == "Ann"
    assert client.delete("/v1/databases/students").json() == {"name": "students"}
    assert client.get("/v1/databases/students/info").status_code == 404


def test_an_upload_takes_no_served_name_and_their_number_is_finite(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload(name: str, content: bytes = b"a,b\n1,2\n") -> Any:
        head = {"content-type": "text/csv"}
        path = f"/v1/databases?name={name}&format=csv"
        return client.post(path, content=content, headers=head)

    assert upload("books").status_code == 409
    assert client.delete("/v1/databases/books").status_code == 409
    answer = upload("broken", b"")
    assert answer.status_code == 422 and "/" not in answer.json()["error"]
    monkeypatch.setattr(limits, "MAX_UPLOADS", 1)
    assert upload("one").status_code == 200 and upload("one").status_code == 200
    answer = upload("two")
    assert answer.status_code == 409 and "the limit" in answer.json()["error"]
    assert client.delete("/v1/databases/one").status_code == 200


@pytest.mark.parametrize("mask", [[[True, False], [True]], [[True], []], [], [[]]])
def test_a_ragged_mask_is_refused(client: TestClient, mask: Any) -> None:
    body = {"query": [[1.0, 2.0], [0.0, 1.0]], "key": [[1.0, 2.0], [0.5, 0.5]], "mask": mask}
    answer = client.post("/v1/weights", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(
        "mask must be a list of lists of equal length with booleans"
    )


@pytest.mark.parametrize("key", ["a%0Ab", "Li%0D,1", "%5B" * 5000, "a" * 50_000, "%22a%0Ab"])
def test_a_key_that_cannot_be_read_is_absent(client: TestClient, key: str) -> None:
    answer = client.get(f"/v1/databases/places/rows/{key}")
    assert answer.status_code == 404 and answer.json()["kind"] == "KeyNotFoundError"
