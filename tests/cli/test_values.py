"""Text as what it stands for."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest

from qkv.cli import values
from qkv.errors import ArgumentError


class TestValues:
    @pytest.mark.parametrize(
        ("text", "example", "expected"),
        [
            ("007", "agent", "007"),
            ("007", 1, 7),
            ("1e3", 1, 1000.0),
            ("2001-02-03", date(1999, 1, 1), date(2001, 2, 3)),
            ('{"a": 1}', {"b": 2}, {"a": 1}),
            ("text", {"b": 2}, "text"),
            ("raw", b"x", b"raw"),
            ('a, "b, c"', ("x", "y"), ("a", "b, c")),
        ],
    )
    def test_like(self, text: str, example: Any, expected: Any) -> None:
        assert values.like(text, example) == expected

    def test_a_vector(self) -> None:
        found = values.like("0.5, -1", np.zeros(2))
        np.testing.assert_array_equal(found, [0.5, -1])
        for text in ("0.5", "a,b", "[1, 2, 3]"):
            with pytest.raises(ArgumentError, match="must be 2 numbers"):
                values.like(text, np.zeros(2))

    def test_where_leaves_comparisons_alone(self) -> None:
        for text in ("a == 1", "a <= 1", "a >= 1", "a != 1", "'x=y' in a"):
            assert values.where([text]) == text
        assert values.where(["a=it's"]) == '`a` == "it\'s"'
        assert values.where(["first name=Li"]) == "`first name` == 'Li'"
        assert values.where(None) is None
