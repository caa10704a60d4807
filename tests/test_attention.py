"""The public functions: a call goes in, down to an engine, and out again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import attention, masks, scores, weightings

SOURCE = Path(attention.__file__)
X = np.random.default_rng(0).normal(size=(2, 5, 3))
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"mask": masks.causal & masks.window(2)},
    "gaussian": {"score": "gaussian"},
    "function": {"score": lambda q, k: scores.Dot()(q, k)},
    **{name: {"weighting": name} for name in ("hard", "entmax15", "sigmoid")},
    "straight through": {"weighting": weightings.Hard(straight_through=True)},
    **{
        f"or {wish}": {"score": scores.Boxcar(0.5), "weighting": weightings.Normalized(wish)}
        for wish in ("zero", "nan", "uniform", "nearest")
    },
}


def climbs(function: Any, *given: Any, **how: Any) -> list[str]:
    """Functions of attention.py that something below it has called."""
    below = SOURCE.parent / "engines"
    stack, found = [], []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path == SOURCE and any(below in x.parents for x in stack):
                found.append(frame.f_code.co_qualname)
            stack.append(path)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(watch)
    try:
        function(*given, **how)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_call_goes_down_and_does_not_come_back_up(how, engine):
    assert not climbs(qkv.attend, X, X, X, **how, engine=engine, return_weights=True)
    if engine is None:
        assert not climbs(qkv.weights, X, X, **how)
