"""Bars: the weights that were given, their names, and the rest."""

from __future__ import annotations

import pytest

from qkv.errors import ShapeError
from qkv.plot import bars


def test_bars_are_the_weights_and_the_rest():
    figure = bars(["a", "b"], [0.6, 0.3], title="q → v", others=1)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.6, 0.3, 0.1])
    assert [x.get_text() for x in axes.get_yticklabels()] == ["a", "b", "1 other row"]
    assert [x.get_text() for x in axes.texts] == ["0.600", "0.300", "0.100"]
    assert axes.get_title(loc="left") == "q → v"
    assert axes.yaxis_inverted()


def test_no_rest_where_nothing_is_left():
    assert len(bars(["a"], [1.0], others=5).axes[0].patches) == 1
    assert len(bars(["a"], [0.5], others=0).axes[0].patches) == 1


def test_a_dollar_sign_is_no_formula():
    axes = bars(["$x", "a$b$"], [0.5, 0.5], title="$b$").axes[0]
    assert not any(word.get_parse_math() for word in (axes.title, *axes.get_yticklabels()))


def test_negative_weights_are_seen():
    axes = bars(["a", "b"], [1.5, -0.5]).axes[0]
    assert axes.get_xlim()[0] == -0.5


def test_names_and_weights_must_match():
    with pytest.raises(ShapeError, match="one weight per name, not 1 weights for 2"):
        bars(["a", "b"], [1.0])
    with pytest.raises(ShapeError):
        bars([], [])
