"""What people see."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qkv.cli import terminal


class TestScreen:
    def test_json_is_strict(self) -> None:
        text = terminal.format_json(
            {"a": float("nan"), "b": np.float32(0.5), "c": (1, [np.int64(2)])}
        )
        assert json.loads(text) == {"a": None, "b": 0.5, "c": [1, [2]]}

    @pytest.mark.parametrize(
        ("weight", "text"),
        [
            (1, "100 %"),
            (0.996, "100 %"),
            (0.0995, "10 %"),
            (0.0952, "9.5 %"),
            (0.05, "5.0 %"),
            (0.0004, "0.04 %"),
            (1e-9, "<0.01 %"),
            (0.0, "0 %"),
            (float("nan"), "NaN"),
            (-0.25, "-25 %"),
        ],
    )
    def test_percent(self, weight: float, text: str) -> None:
        assert terminal.format_percent(weight) == text

    def test_a_bar_stays_in_its_box(self) -> None:
        for share in (-1.0, 0.0, 0.01, 0.5, 1.0, 7.0, float("nan")):
            for plain in (False, True):
                assert len(terminal.render_bar(share, 10, ascii_only=plain)) <= 10
        assert terminal.render_bar(1.0, 10) == "█" * 10
        assert terminal.render_bar(float("nan"), 10) == ""
