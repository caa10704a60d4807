"""Scores and weightings as the page names them: `{"name": "gaussian", "bandwidth": 0.5}`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.database.parsing import parse_score, parse_weighting
from qkv.errors import ArgumentError
from qkv.util.registry import ClassRegistry


def named_settings(names: ClassRegistry[Any], thing: Any) -> dict[str, Any] | None:
    """Return the name and settings of a score or weighting; None if JSON cannot hold them.

    >>> named_settings(scores.NAMES, scores.Gaussian(0.5))
    {'name': 'gaussian', 'bandwidth': 0.5}
    """
    name = names.name_of(type(thing))
    if name is None:
        return None
    settings = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    plain = {key: _plain_setting(x) for key, x in settings.items() if x is not None}
    return None if NotImplemented in plain.values() else {"name": name, **plain}


def _plain_setting(x: Any) -> Any:
    if isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return x.tolist()
    return NotImplemented


def build_component(names: ClassRegistry[Any], spec: Any, dtype: Any = np.float64) -> Any:
    """Return the score or weighting that `named_settings` or a text describes.

    `dtype` is the type of settings that are arrays.

    >>> build_component(scores.NAMES, {"name": "gaussian", "bandwidth": 0.5})
    Gaussian(bandwidth=0.5)
    >>> build_component(weightings.NAMES, "topk:3")
    TopK(k=3)
    """
    if isinstance(spec, str):
        return parse_score(spec) if names is scores.NAMES else parse_weighting(spec)
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ArgumentError(f"{names.role}: expected a name, or an object with a name")
    settings = {
        key: np.asarray(x, dtype) if isinstance(x, list) else x
        for key, x in spec.items()
        if key != "name" and x is not None
    }
    return names.find_class(spec["name"])(**settings)


def list_registered() -> dict[str, dict[str, str]]:
    """Return the titles of all scores and weightings that can be built from their name alone.

    The page computes those that it knows itself and asks Python for the others.

    >>> list_registered()["scores"]["gaussian"]
    'Gaussian'
    """
    registries: dict[str, ClassRegistry[Any]] = {
        "scores": scores.NAMES,
        "weightings": weightings.NAMES,
    }
    return {
        role: {
            name: kind.__name__
            for name, kind in names.items()
            if not names.required_parameters(name)
        }
        for role, names in registries.items()
    }


def score_by_equality(keys: list[Any], query: Any) -> np.ndarray:
    """Return 1 for each key that equals the query and 0 for the others, (m,)."""
    return np.array([bool(np.all(key == query)) for key in keys], np.float64)
