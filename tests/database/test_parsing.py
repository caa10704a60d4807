"""Text as what it stands for."""

from __future__ import annotations

import contextlib
import datetime
from datetime import date
from typing import Any

import numpy as np
import pytest

from qkv import scores, weightings
from qkv.database import parsing
from qkv.errors import ArgumentError


class TestSpelled:
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
        assert parsing.parse_cell_like(text, example) == expected

    def test_a_vector(self) -> None:
        result = parsing.parse_cell_like("0.5, -1", np.zeros(2))
        np.testing.assert_array_equal(result, [0.5, -1])
        for text in ("0.5", "a,b", "[1, 2, 3]"):
            with pytest.raises(ArgumentError, match="must be 2 numbers"):
                parsing.parse_cell_like(text, np.zeros(2))

    @pytest.mark.parametrize(
        ("text", "example", "expected"),
        [
            ("3.5", "text", "3.5"),
            ("3.5", {"a": 1}, "3.5"),
            ("3.5", None, "3.5"),
            (3.5, "text", 3.5),
            (["2001-02-03", 1], (date(1999, 1, 1), 2), (date(2001, 2, 3), 1)),
            ([1, 2, 3], ("a", "b"), [1, 2, 3]),
        ],
    )
    def test_json_as_a_cell(self, text: Any, example: Any, expected: Any) -> None:
        assert parsing.cell_from_json(text, example) == expected

    def test_json_as_a_vector(self) -> None:
        np.testing.assert_array_equal(parsing.cell_from_json([0.5, -1], np.zeros(2)), [0.5, -1])
        with pytest.raises(ArgumentError, match="must be 2 numbers"):
            parsing.cell_from_json([1, 2, 3], np.zeros(2))


ROUND = [
    (scores.NAMES, scores.ScaledDot(2.0, softcap=30.0), "scaled_dot:2.0,softcap=30.0"),
    (scores.NAMES, scores.ScaledDot(softcap=3.0), "scaled_dot:softcap=3.0"),
    (scores.NAMES, scores.Cosine(0.1), "cosine:0.1"),
    (weightings.NAMES, weightings.Normalized("uniform"), "normalized:uniform"),
    (weightings.NAMES, weightings.Normalized(), "normalized"),
    (weightings.NAMES, weightings.Hard(straight_through=True), "hard:True"),
    (weightings.NAMES, weightings.Entmax(1.3), "entmax15:1.3"),
]


@pytest.mark.parametrize(("names", "thing", "text"), ROUND)
def test_every_parameter_goes_through_text(names: Any, thing: Any, text: str) -> None:
    read = parsing.parse_score if names is scores.NAMES else parsing.parse_weighting
    assert parsing.format_component(thing, names) == text and read(text) == thing


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (parsing.parse_weighting, "normalized:nowhere", "on_empty"),
        (parsing.parse_weighting, "normalized:", "takes a word, not ''"),
        (parsing.parse_weighting, "hard:3", "takes true or false, not '3'"),
        (parsing.parse_weighting, "sparsemax:3", "takes no number"),
        (parsing.parse_weighting, "topk:2,3", "takes a number, not '2,3'"),
        (
            parsing.parse_score,
            "scaled_dot:cap=3",
            "takes a number, or scale=…, softcap=…, not 'cap=3'",
        ),
        (parsing.parse_score, "scaled_dot:1,softcap=x", "takes a number"),
        (parsing.parse_score, "gaussian:bandwidth=", "takes a number"),
    ],
)
def test_a_parameter_that_is_none_is_refused(read: Any, text: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        read(text)


DAY = datetime.date(2024, 1, 1)


@pytest.mark.parametrize(
    ("text", "example", "right"),
    [
        ("2024-01-01", DAY, DAY),
        ("2024-01-01 00:00", DAY, DAY),
        ("2024-01-01 12:00", DAY, datetime.datetime(2024, 1, 1, 12)),
        ("2024-01-01", datetime.datetime(2023, 1, 1), datetime.datetime(2024, 1, 1)),
        ("12:30", datetime.time(1), datetime.time(12, 30)),
    ],
)
def test_a_date_is_read_as_the_database_reads_it(text, example, right):
    result = parsing.parse_cell_like(text, example)
    assert result == right and type(result) is type(right)
    for wrong in ("soon", "2024", "1.1.2024"):
        with pytest.raises(ArgumentError, match="must be a date such as"):
            parsing.parse_cell_like(wrong, example)


def test_a_key_of_two_columns_is_one_line_of_csv() -> None:
    for text in ("a\nb", "a\rb, 1", '"a" \n, 1', f"{'x' * 200_000}, 1"):
        with pytest.raises(ArgumentError, match="must be a line of CSV"):
            parsing.parse_cell_like(text, ("a", 1), "the key")
    assert parsing.parse_cell_like('"a\nb", 1', ("a", 1)) == ("a\nb", 1)


@pytest.mark.parametrize("example", [("a", 1), b"a", {"a": 1}])
def test_deep_nesting_is_refused_or_text(example: Any) -> None:
    for text in ("[" * 50_000, '{"a":' * 50_000):
        with contextlib.suppress(ArgumentError):
            assert parsing.parse_cell_like(text, example) in (text, text.encode())


def test_bytes_have_no_lone_surrogate() -> None:
    with pytest.raises(ArgumentError, match="surrogate"):
        parsing.parse_cell_like("\ud800", b"a")
