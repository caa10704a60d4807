"""The Open Inference Protocol as tritonclient speaks it, against one real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from tests.serve.process import serving

triton = pytest.importorskip("tritonclient.http")

RNG = np.random.default_rng(0)
KEYS = RNG.standard_normal((40, 6)).astype(np.float32)
VECTORS = RNG.standard_normal((40, 3)).astype(np.float32)
NAMES = {"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu", "Smola": "Alex"}
GPA = {3.1: 70.0, 3.5: 82.0, 3.6: 86.0, 4.0: 95.0}
PLACES = {("Li", 1): "Mu", ("Hu", 2): "Rachel"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    made: dict[str, Any] = {"vectors": (KEYS, VECTORS), "names": (NAMES,), "gpa": (GPA,)}
    for name, data in made.items():
        with qkv.open(folder / f"{name}.qkv") as database:
            database.add(*data)
    with qkv.open(folder / "places.qkv", key=("name", "number")) as database:
        database.add(PLACES)
    return folder


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with serving(*sorted(store.glob("*.qkv"))) as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        yield client


def encode_input(array: np.ndarray, datatype: str, binary: bool) -> Any:
    query = triton.InferInput("query", list(array.shape), datatype)
    query.set_data_from_numpy(array, binary_data=binary)
    return query


def test_the_server_and_its_models_tell_what_they_are(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata()["name"] == "qkv"
    assert client.is_model_ready("vectors")
    assert not client.is_model_ready("absent")
    about = client.get_model_metadata("vectors")
    assert about["inputs"] == [{"name": "query", "datatype": "FP32", "shape": [-1, 6]}]
    outputs = {output["name"]: output for output in about["outputs"]}
    assert outputs["value"] == {"name": "value", "datatype": "FP32", "shape": [-1, 3]}
    assert list(outputs) == ["value", "weights", "rows", "keys", "entropy", "confidence"]
    for name, datatype in {"names": "BYTES", "gpa": "FP64", "places": "BYTES"}.items():
        assert client.get_model_metadata(name)["inputs"][0]["datatype"] == datatype


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("out", [False, True])
def test_vectors_are_answered_as_in_process(
    client: Any, store: Path, into: bool, out: bool
) -> None:
    query = RNG.standard_normal((3, 6)).astype(np.float32)
    names = ["value", "weights", "rows", "entropy", "confidence"]
    outputs = [triton.InferRequestedOutput(name, binary_data=out) for name in names]
    result = client.infer(
        "vectors", [encode_input(query, "FP32", into)], outputs=outputs, request_id="7"
    )
    assert result.get_response()["id"] == "7"
    with qkv.open(store / "vectors.qkv") as database:
        answers = database.ask(query)
    np.testing.assert_allclose(result.as_numpy("value"), [a.value for a in answers], rtol=1e-5)
    weights = [[row.weight for row in answer.rows] for answer in answers]
    np.testing.assert_allclose(result.as_numpy("weights"), weights, rtol=1e-5)
    places = [[row.index for row in answer.rows] for answer in answers]
    np.testing.assert_array_equal(result.as_numpy("rows"), places)
    np.testing.assert_allclose(result.as_numpy("entropy"), [a.entropy for a in answers], rtol=1e-5)
    assert np.isnan(result.as_numpy("confidence")).all()  # keys are vectors


@pytest.mark.parametrize("binary", [False, True])
def test_texts_are_answered_with_the_heaviest_value(client: Any, store: Path, binary: bool) -> None:
    query = np.array(["Lee", "Smolla"], dtype=object)
    result = client.infer("names", [encode_input(query, "BYTES", binary)], parameters={"top": 2})
    assert result.as_numpy("value").tolist() == [b"Mu", b"Alex"]
    assert result.as_numpy("keys")[:, 0].tolist() == [b"Li", b"Smola"]
    assert result.as_numpy("weights").shape == (2, 2)
    with qkv.open(store / "names.qkv") as database:
        expected = [answer.confidence for answer in database.ask(["Lee", "Smolla"])]
    np.testing.assert_allclose(result.as_numpy("confidence"), expected, rtol=1e-5)


def test_numbers_are_pooled_as_parameters_say(client: Any) -> None:
    options = {"score": "gaussian:0.1", "weighting": "softmax", "where": "value > 75", "top": 4}
    query = np.array([3.55, 3.9])
    result = client.infer("gpa", [encode_input(query, "FP64", True)], parameters=options)
    answers = qkv.Database(GPA).ask(
        query.tolist(), score=qkv.scores.Gaussian(0.1), where="value > 75"
    )
    np.testing.assert_allclose(result.as_numpy("value"), [a.value for a in answers], rtol=1e-6)
    assert result.as_numpy("rows")[:, 3].tolist() == [-1, -1]  # three rows passed
    assert result.as_numpy("weights")[:, 3].tolist() == [0, 0]


def test_a_key_of_several_columns_is_json(client: Any) -> None:
    query = np.array(['["Hu", 2]'], dtype=object)
    result = client.infer("places", [encode_input(query, "BYTES", True)])
    assert result.as_numpy("value").tolist() == [b"Rachel"]
    assert json.loads(result.as_numpy("keys")[0, 0]) == ["Hu", 2]


def test_encoded_vectors_ask_a_table_of_texts(client: Any, store: Path) -> None:
    with qkv.open(store / "names.qkv") as database:
        assert database.encoder is not None
        query = np.asarray(database.encoder.encode(["Li"]), np.float32)
    result = client.infer("names", [encode_input(query, "FP32", True)])
    assert result.as_numpy("value").tolist() == [b"Mu"]


BAD: dict[str, tuple[np.ndarray, str, dict[str, Any]]] = {
    "query 0 has 5 numbers, but the keys are vectors of 6": (
        np.zeros((1, 5), np.float32),
        "FP32",
        {},
    ),
    "NaN": (np.full((1, 6), np.nan, np.float32), "FP32", {}),
    "top must be at least": (np.zeros((1, 6), np.float32), "FP32", {"top": 0}),
    "gausian": (np.zeros((1, 6), np.float32), "FP32", {"score": "gausian"}),
    "tops": (np.zeros((1, 6), np.float32), "FP32", {"tops": 3}),
    "at most 1,024": (np.zeros((1025, 6), np.float32), "FP32", {}),
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_wrong_is_said(client: Any, sentence: str) -> None:
    query, datatype, parameters = BAD[sentence]
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=sentence):
        client.infer("vectors", [encode_input(query, datatype, True)], parameters=parameters)


@pytest.mark.parametrize(
    ("body", "length"),
    [(b"", None), (b"[]", None), (b'{"inputs": []}', "99"), (b"\xff", None), (b"{}", "-1")],
)
def test_a_body_that_is_none_is_refused(url: str, body: bytes, length: str | None) -> None:
    headers = {"content-type": "application/octet-stream"}
    headers |= {"inference-header-content-length": length} if length else {}
    request = urllib.request.Request(f"{url}/v2/models/names/infer", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert 400 <= refused.value.code < 500
    with refused.value as answer:
        assert json.load(answer)["error"]
