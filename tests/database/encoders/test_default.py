import datetime
from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import (
    Arrays,
    Characters,
    Columns,
    Encoder,
    Exact,
    Numbers,
    Text,
    default,
)
from qkv.database.encoders.base import has_text_extra
from qkv.errors import ArgumentError

TEXT = Text() if has_text_extra() else Characters()


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (["Li", "Mu"], TEXT),
        ([1, 2.5, np.float32(3)], Numbers()),
        ([datetime.date(2024, 1, 1)], Numbers()),
        ([(1, 2.0), (3, 4)], Numbers()),
        ([[1.0, 2.0]], Arrays()),
        ([np.ones(3)], Arrays()),
        (np.ones((4, 3)), Arrays()),
        (np.ones(4), Numbers()),
        ([("a", 1), ("b", 2)], Columns([TEXT, Numbers()])),
        ([("a", 1), ("b", None)], Columns([TEXT, Numbers()])),
        ([("a", 1), ("b",)], Exact()),
        ([b"x", b"y"], Exact()),
        ([{"a": 1}, {"b": [2]}], Characters()),
        ([[1, "a"]], Characters()),
        (["a", 1], Characters()),
    ],
)
def test_the_keys_types_decide(keys: Any, want: Encoder) -> None:
    assert default(keys) == want


def test_columns_have_names() -> None:
    result = default([("Dune", 1965)], ["title", "year"])
    assert isinstance(result, Columns)
    assert result.names == ("title", "year")


def test_no_keys_no_encoder() -> None:
    with pytest.raises(ArgumentError, match="no keys"):
        default([])


def test_json_is_found_by_its_letters() -> None:
    keys = [{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, [1, 2, "x"]]
    encoder = default(keys).fit(keys)
    result = encoder.encode_query([{"born": 1912, "name": "Allan"}]) @ encoder.encode(keys).T
    assert result.argmax() == 1
