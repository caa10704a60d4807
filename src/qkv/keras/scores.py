"""Scores and weightings of Keras layers: their arrays, initializers and configs."""

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
from qkv.scores.user_score import UserScore
from qkv.util.registry import load_plugins
from qkv.util.types import Array

ScoreConfig = scores.ScoreLike | scores.LearnedName | type[scores.Score] | dict[str, Any]
WeightingConfig = weightings.WeightingLike | dict[str, Any]
"""What a layer accepts: a name, an object, or the config of one."""

LEARNED_SCORES: dict[str, Callable[[int, int], scores.Score]] = {
    "additive": lambda q, k: scores.Additive(
        np.zeros((q, q)), np.zeros((q, k)), np.zeros(q), np.zeros(q)
    ),
    "multiplicative": lambda q, k: scores.Multiplicative(np.zeros((q, k))),
    "gated": lambda q, k: scores.Gated(np.zeros(q), np.zeros(k), np.zeros(())),
}
"""Functions that create a learned score for two widths. The layer then replaces the zeros by
initial values."""


def learned_score_name(score: Any) -> Any:
    """Return the name of a learned score given as a class; anything else unchanged."""
    name = score.__name__.lower() if isinstance(score, type) else None
    return name if name in LEARNED_SCORES else score


def named_arrays(record: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """Yield every array of the record with its name, in the order of `tree.array_leaves`."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if is_array(value):
            yield path + field.name, value
        elif dataclasses.is_dataclass(value):
            yield from named_arrays(value, f"{path}{field.name}_")


def move_to_host(record: Any) -> Any:
    """Return the record with all arrays converted to NumPy."""
    for fw in {get_framework(x) for _, x in named_arrays(record)}:
        record = tree.map_arrays(fw, to_numpy, record)
    return record


def learned_initializer(name: str, x: Array) -> Any:
    """Return an initializer for an array of a learned score, for scores of variance about 1."""
    if name == "bias":
        return "zeros"
    matrix = name == "w"  # of a multiplicative score: qᵀWk sums x.size products
    return keras.initializers.RandomNormal(0.0, x.size**-0.5) if matrix else "glorot_uniform"


def constant_initializer(x: Array) -> Callable[..., Array]:
    """Return an initializer whose value is x."""
    return lambda shape, dtype=None: ops.convert_to_tensor(x, dtype=dtype)


def to_config(value: Any) -> Any:
    """Return a score or a weighting as a JSON-serializable config: its name and its fields."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Real):
        return float(value)
    if is_array(value):
        return {"dtype": str(to_numpy(value).dtype), "values": to_numpy(value).tolist()}
    if isinstance(value, UserScore):
        return to_config(value.function)
    kind = type(value)
    own_name = kind.__name__ if kind.__module__.startswith("qkv.") else None
    name = own_name or scores.NAMES.name_of(kind) or weightings.NAMES.name_of(kind)
    if dataclasses.is_dataclass(value) and name:
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"name": name, "fields": {x: to_config(getattr(value, x)) for x in fields}}
    return keras.saving.serialize_keras_object(value)


def from_config(module: Any, config: Any) -> Any:
    """Return the object of a config that `to_config` wrote; anything else unchanged.

    `module` is `qkv.scores` or `qkv.weightings`.
    """
    if not isinstance(config, dict):
        return config
    if "values" in config:
        return np.asarray(config["values"], config["dtype"])
    if "name" not in config:
        return keras.saving.deserialize_keras_object(config)
    known = {x: getattr(module, x) for x in module.__all__ if isinstance(getattr(module, x), type)}
    name = config["name"]
    if name not in known:
        failed, own_kinds = load_plugins(), set(known.values())
        known |= {x: kind for x, kind in module.NAMES.items() if kind not in own_kinds}
    if name not in known:
        raise unknown_name_error(module.NAMES.role, name, known, "".join(failed))
    return known[name](
        **{field: from_config(module, value) for field, value in config["fields"].items()}
    )
