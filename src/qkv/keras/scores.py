"""The arrays of scores and weightings, and how both are written into a layer's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import ops

from qkv import scores, weightings
from qkv.errors import unknown_name_error
from qkv.frameworks import get_framework, is_array, to_numpy, tree
from qkv.scores.functions import UserScore
from qkv.util.registry import load_plugins
from qkv.util.types import Array

ScoreConfig = scores.ScoreLike | scores.LearnedName | type[scores.Score] | dict[str, Any]
WeightingConfig = weightings.WeightingLike | dict[str, Any]
"""What a layer takes, and what a config has in its place."""

LEARNED_SCORES: dict[str, Callable[[int, int], scores.Score]] = {
    "additive": lambda q, k: scores.Additive(
        np.zeros((q, q)), np.zeros((q, k)), np.zeros(q), np.zeros(q)
    ),
    "multiplicative": lambda q, k: scores.Multiplicative(np.zeros((q, k))),
    "gated": lambda q, k: scores.Gated(np.zeros(q), np.zeros(k), np.zeros(())),
}
"""Scores that a layer makes itself, from the widths of query and key; it fills in the numbers."""


def learned_score_name(score: Any) -> Any:
    """The name of a learned score that is given as a class; anything else as it is."""
    name = score.__name__.lower() if isinstance(score, type) else None
    return name if name in LEARNED_SCORES else score


def named_arrays(record: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """Every array of the record with its name, in the order of `tree.array_leaves`."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if is_array(value):
            yield path + field.name, value
        elif dataclasses.is_dataclass(value):
            yield from named_arrays(value, f"{path}{field.name}_")


def move_to_host(record: Any) -> Any:
    """The same record with NumPy's arrays, whichever framework's they were."""
    for fw in {get_framework(x) for _, x in named_arrays(record)}:
        record = tree.map_arrays(fw, to_numpy, record)
    return record


def learned_initializer(name: str, x: Array) -> Any:
    """An initializer for an array of a learned score: scores that spread by about one."""
    if name == "bias":
        return "zeros"
    matrix = name == "w"  # of both sides: qᵀWk sums as many products as it has numbers
    return keras.initializers.RandomNormal(0.0, x.size**-0.5) if matrix else "glorot_uniform"


def constant_initializer(x: Array) -> Callable[..., Array]:
    """An initializer that gives x."""
    return lambda shape, dtype=None: ops.convert_to_tensor(x, dtype=dtype)


def to_config(thing: Any) -> Any:
    """A score or a weighting as JSON can hold it: its name and its numbers."""
    if thing is None or isinstance(thing, str | bool | int | float):
        return thing
    if isinstance(thing, Real):
        return float(thing)
    if is_array(thing):
        return {"dtype": str(to_numpy(thing).dtype), "values": to_numpy(thing).tolist()}
    if isinstance(thing, UserScore):
        return to_config(thing.function)
    kind = type(thing)
    ours = kind.__name__ if kind.__module__.startswith("qkv.") else None
    name = ours or scores.NAMES.name_of(kind) or weightings.NAMES.name_of(kind)
    if dataclasses.is_dataclass(thing) and name:
        fields = [field.name for field in dataclasses.fields(thing) if field.init]
        return {"name": name, "fields": {x: to_config(getattr(thing, x)) for x in fields}}
    return keras.saving.serialize_keras_object(thing)


def from_config(room: Any, thing: Any) -> Any:
    """What `to_config` wrote, as it was; anything else as it is. `room`: scores or weightings."""
    if not isinstance(thing, dict):
        return thing
    if "values" in thing:
        return np.asarray(thing["values"], thing["dtype"])
    if "name" not in thing:
        return keras.saving.deserialize_keras_object(thing)
    known = {x: getattr(room, x) for x in room.__all__ if isinstance(getattr(room, x), type)}
    name = thing["name"]
    if name not in known:
        failed, ours = load_plugins(), set(known.values())
        known |= {x: kind for x, kind in room.NAMES.items() if kind not in ours}
    if name not in known:
        raise unknown_name_error(room.NAMES.role, name, known, "".join(failed))
    return known[name](
        **{field: from_config(room, value) for field, value in thing["fields"].items()}
    )
