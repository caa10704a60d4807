"""Results as JSON: what orjson writes is what a database says of its cells."""

from __future__ import annotations

import datetime
import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from qkv.serve.responses import json_response
from qkv.util.formatting import to_jsonable


class Pair(NamedTuple):
    key: Any
    value: Any


@pytest.mark.parametrize(
    "result",
    [
        {"value": "null", "rows": [None, True, 1, 1.5, -0.0], "lse": -np.inf},
        {"value": float("nan"), "rows": [Pair(("Li", 2), np.inf)]},
        {1: "a number as a name", "huge": 2**70, "half": "\ud800"},
        [np.float32(0.1), np.float64("nan"), np.int8(3), np.bool_(True), np.uint64(2**63)],
        {
            "float32": np.float32([0.1, 2.0]),
            "strided": np.arange(6)[::2],
            "empty": np.zeros((0, 2)),
        },
        {"nan": np.array([1.0, np.nan]), "inf": np.array([-np.inf]), "half": np.float16([0.1])},
        {
            "words": np.array(["a"]),
            "any": np.array([1, "a", b"c"], dtype=object),
            "one": np.array(2.5),
        },
        [datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4), datetime.time(5), b"ab"],
    ],
)
def test_as_python_writes_it(result: Any) -> None:
    assert json.loads(bytes(json_response(result).body)) == json.loads(
        json.dumps(to_jsonable(result))
    )
