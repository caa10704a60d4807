"""Keras's layer as an entry point of tests/test_entry_points.py; test_keras.py runs this file."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.errors import CombinationError
from qkv.keras import Attention
from tests.test_entry_points import (
    FAR,
    LIVE,
    REFUSED,
    WINDOWS,
    assert_close,
    build_options,
    descends,
    each,
    leaves,
    pairs,
    poison_keys,
    query_numbers,
    tensors,
    truth,
)

# Keras's variables were written for an older NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")


CAUGHT = ("own_function", "own_modified")
"""Scores whose function has caught its array, which so is no weight of the layer."""


def build_layer(score: str, weighting: str, arrays: dict[str, Any]) -> Any:
    """A layer, whose arrays begin as these; a function keeps what it has caught."""
    inputs = arrays if score in CAUGHT else leaves(score, weighting)
    compare = build_options(inputs, score, weighting)["score"]
    weigh = build_options(leaves(score, weighting), score, weighting)["weighting"]
    return Attention(compare, weigh, dtype="float64")


def inputs(arrays: dict[str, Any], rows: list[int]) -> list[Any]:
    """A batch of one, as Keras orders it."""
    return [arrays["query"][rows][None], arrays["value"][None], arrays["key"][None]]


@pairs
def test_the_layer_and_its_gradients(score, weighting):
    rows = query_numbers(score, weighting)
    arrays = tensors(poison_keys(leaves(score, weighting)))
    layer = build_layer(score, weighting, arrays)
    arguments = {"attention_mask": LIVE[rows][None], "return_attention_scores": True}
    actual, alpha = layer(inputs(arrays, rows), **arguments)
    out, want = truth(score, weighting)
    assert_close(actual[0], out[rows])
    assert_close(alpha[0], want[rows])
    caught = "score" if score in CAUGHT else "nothing"
    learned = [name for name in arrays if "." in name and not name.startswith(caught)]
    arrays |= dict(zip(learned, (x.value for x in layer.trainable_weights), strict=True))
    descends(actual[0], arrays, score, weighting)


@each(REFUSED)
def test_what_means_nothing_is_refused(score, weighting):
    with pytest.raises(CombinationError):
        arrays = leaves(score, weighting)
        build_layer(score, weighting, arrays)(inputs(arrays, [0]))


@pytest.mark.parametrize("score", WINDOWS)
def test_no_key_in_reach_is_an_error_where_it_should_be(score):
    with pytest.raises(ValueError, match="no key"):
        arrays = leaves(score, "or_raise")
        build_layer(score, "or_raise", arrays)(inputs(arrays, [FAR]))
