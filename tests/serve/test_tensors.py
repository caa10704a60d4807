"""Tensors of the Open Inference Protocol: what goes in comes out; what is malformed is named."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError
from qkv.serve import tensors
from qkv.serve.inference import INFER_BODY
from qkv.serve.tensors import NUMPY_DTYPES, Tensor
from qkv.serve.validation import find_violation

ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([0, 255], np.uint8),
    "INT64": np.array([[-(2**63), 2**63 - 1]]),
    "FP16": np.array([0.5, -2.0], np.float16),
    "FP32": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "FP64": np.array([[1 / 3], [1e300]]),
    "BYTES": np.array([["the alchemist", "Ω"], ["", "x"]], dtype=object),
}


def bytes_of(array: np.ndarray) -> np.ndarray:
    made = np.empty(array.shape, object)
    made.reshape(-1)[:] = [text.encode() for text in array.reshape(-1)]
    return made


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("datatype", ARRAYS)
def test_a_tensor_comes_back_as_it_was(datatype: str, binary: bool) -> None:
    array = ARRAYS[datatype]
    array = bytes_of(array) if datatype == "BYTES" else array
    arrays = {"first": Tensor("INT32", np.arange(3, dtype=np.int32)), "x": Tensor(datatype, array)}
    header, behind = tensors.write_tensors(arrays, set(arrays) if binary else set())
    assert bool(behind) == binary
    result = tensors.read_tensors(json.loads(json.dumps(header)), behind)
    np.testing.assert_array_equal(result["x"], array)
    np.testing.assert_array_equal(result["first"], np.arange(3))
    assert datatype == "BYTES" or result["x"].dtype == np.dtype(NUMPY_DTYPES[datatype])


def test_data_may_be_nested_as_the_shape_is() -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [3, 4]]}]
    np.testing.assert_array_equal(tensors.read_tensors(inputs, b"")["x"], [[1, 2.5], [3, 4]])


def test_json_has_no_word_for_what_is_not_finite() -> None:
    header, _ = tensors.write_tensors({"x": Tensor("FP64", np.array([np.nan, np.inf, 1.0]))}, set())
    assert header[0]["data"] == [None, None, 1.0]


def tensor(**changed: Any) -> dict[str, Any]:
    fields = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]} | changed
    return {name: value for name, value in fields.items() if value is not ...}


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD: dict[str, tuple[Any, bytes]] = {
    "appears twice": ([tensor(), tensor()], b""),
    "needs 3 elements, not 2": ([tensor(shape=[3])], b""),
    "elements, not 0": ([tensor(data=DEEP)], b""),
    "data must be a list": ([tensor(data=...)], b""),
    "elements of type FP32": ([tensor(data=["1", 2])], b""),
    "elements of type INT8": ([tensor(datatype="INT8", data=[1.5, 2])], b""),
    "is too large for": ([tensor(datatype="INT8", data=[300, 2])], b""),
    "is too large for FP32": ([tensor(data=[10**400, 2])], b""),
    "must hold only text": ([tensor(datatype="BYTES")], b""),
    "binary_data_size must be from 0 to 8": (
        [tensor(parameters={"binary_data_size": 9})],
        b"12345678",
    ),
    "binary_data_size must": ([tensor(parameters={"binary_data_size": -1})], b""),
    "not a multiple of": ([tensor(parameters={"binary_data_size": 7})], b"1234567"),
    "belong to no input": ([tensor()], b"1"),
    "element of BYTES is incomplete": (
        [tensor(datatype="BYTES", parameters={"binary_data_size": 6})],
        b"\xff\xff\xff\xffab",
    ),
    "is incomplete": ([tensor(datatype="BYTES", parameters={"binary_data_size": 2})], b"\x01\x00"),
}


UNLIKE: dict[str, Any] = {
    "inputs must be an array": {"inputs": None},
    "inputs must have at least 1 item": {"inputs": []},
    r"inputs\[0\] must be an object": {"inputs": [3]},
    r"inputs\[0\] must have 'name'": {"inputs": [{"datatype": "FP32", "shape": [1]}]},
    r"inputs\[0\].name must be a string": {"inputs": [tensor(name=3)]},
    "datatype 'BOL'. Known: BOOL": {"inputs": [tensor(datatype="BOL")]},
    r"unknown inputs\[0\].datatype": {"inputs": [tensor(datatype=["FP32"])]},
    r"shape\[0\] must be at least 0": {"inputs": [tensor(shape=[-1])]},
    r"shape\[0\] must be an integer": {"inputs": [tensor(shape=[True, 2])]},
    "shape must be an array": {"inputs": [tensor(shape=2)]},
    "shape may have at most 8 items": {"inputs": [tensor(shape=[1] * 9)]},
    r"inputs\[0\].parameters must be an object": {"inputs": [tensor(parameters=["x"])]},
    r"outputs\[0\] must be an object": {"inputs": [tensor()], "outputs": [3]},
    "outputs must be an array": {"inputs": [tensor()], "outputs": "rows"},
    r"outputs\[0\].name must be a string": {"inputs": [tensor()], "outputs": [{"name": []}]},
}


@pytest.mark.parametrize("sentence", UNLIKE)
def test_what_does_not_fit_the_description_is_named(sentence: str) -> None:
    assert re.search(sentence, find_violation(UNLIKE[sentence], INFER_BODY) or "")


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_malformed_is_named(sentence: str) -> None:
    inputs, behind = BAD[sentence]
    with pytest.raises(ArgumentError, match=sentence):
        tensors.read_tensors(inputs, behind)


def test_outputs_are_those_asked_for() -> None:
    known = {"value": "FP32", "rows": "INT64"}
    assert tensors.select_outputs({}, known) == (["value", "rows"], set())
    every = {"parameters": {"binary_data_output": True}}
    assert tensors.select_outputs(every, known) == (["value", "rows"], {"value", "rows"})
    one = {"outputs": [{"name": "rows", "parameters": {"binary_data": True}}]}
    assert tensors.select_outputs(one, known) == (["rows"], {"rows"})
    none = every | {"outputs": [{"name": "rows", "parameters": {"binary_data": False}}]}
    assert tensors.select_outputs(none, known) == (["rows"], set())
    with pytest.raises(ArgumentError, match="output"):
        tensors.select_outputs({"outputs": [{"name": "x"}]}, known)
