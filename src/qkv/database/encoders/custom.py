"""Encode keys with a user's function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    check_batch,
    sharpness_for_rows,
)
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import is_array, to_numpy
from qkv.scores import Cosine, Score
from qkv.util.formatting import quote_cell
from qkv.util.keyword_hints import suggest_keywords

_FUNCTION_BY_NAME: dict[str, Callable[..., Any]] = {}
"""The functions of all `Custom` encoders of this process, by name."""


@suggest_keywords
@dataclass(frozen=True, init=False)
class Custom(Encoder):
    """x = function(keys): a list of m keys → m vectors of one width, as an array or as lists.

    The score is the cosine, with a scale that depends on the number of rows. So every key is
    nearest to itself. A vector of one number has no direction: use `Numbers` for such keys.

    A database stores the name of the function (`module:function`, or `name`), but not the function.
    To open the database again, create the same `Custom` first, or pass `encoder=`. qkv does not
    import the function by its name, because that would run code that a file chooses.

    >>> counts = Custom(lambda keys: [[k.count("a"), k.count("b")] for k in keys], width=2)
    >>> counts.encode(["abba", "baa"]).tolist()
    [[2.0, 2.0], [2.0, 1.0]]
    """

    function: Callable[[list[Any]], Any]
    size: int | None = None
    name: str | None = None
    kind: ClassVar[str] = "custom"
    uses_cosine: ClassVar[bool] = True
    accepts_any_query: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        width: int | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(function) or isinstance(function, type):
            raise DtypeError(f"Custom: function must be a function of a list, not {function!r}")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "size", None if width is None else int(width))
        object.__setattr__(self, "name", name or import_path(function))
        if self.name:
            _FUNCTION_BY_NAME[self.name] = function

    @property
    def width(self) -> int:
        if self.size is None:
            raise ArgumentError(
                "Custom has no width yet: pass width=, or fit the encoder to keys first"
            )
        return self.size

    def fit(self, keys: Sequence[Any]) -> Custom:
        if self.size is not None:
            return self
        return Custom(self.function, self._call_function(keys[:1]).shape[1], self.name)

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        check_batch(keys)
        if not len(keys):
            return np.empty((0, self.width), np.float32)
        out = self._call_function(keys)
        if out.shape[1] != self.width:
            raise ShapeError(
                f"{self._function_text} returned {out.shape[1]} numbers per key, not {self.width}"
            )
        return out

    def _call_function(self, keys: Sequence[Any]) -> np.ndarray:
        """Return the vectors that the function returns, (m, width) float32, after a check."""
        result = self.function(list(keys))
        out = np.asarray(to_numpy(result) if is_array(result) else result)
        if out.ndim != 2 or len(out) != len(keys):
            raise ShapeError(
                f"{self._function_text} must return ({len(keys)}, width), not {out.shape}"
            )
        if out.dtype.kind not in "iufb":
            raise DtypeError(f"{self._function_text} must return real numbers, not {out.dtype}")
        with np.errstate(over="ignore"):
            out = np.ascontiguousarray(out, np.float32)
        bad = ~np.isfinite(out).all(axis=1)
        if bad.any():
            key = keys[int(bad.argmax())]
            raise ArgumentError(
                f"{self._function_text} returned NaN or infinity for the key {quote_cell(key)}"
            )
        return out

    @property
    def _function_text(self) -> str:
        return f"the function {self.name or self.function!r}"

    def default_score(self, rows: int) -> Score:
        return Cosine(1 / sharpness_for_rows(rows))

    def head_scale(self, rows: int) -> float:
        return sharpness_for_rows(rows)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "width": self.size}

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Custom:
        name = settings["name"]
        if name not in _FUNCTION_BY_NAME:
            function = f"the function {name!r}" if name else "a function without a name"
            raise ArgumentError(
                f"the keys were encoded by {function}: open the database with "
                "encoder=Custom(function)"
            )
        return cls(_FUNCTION_BY_NAME[name], settings["width"], name)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Custom:
        name = settings["name"]
        if isinstance(user_encoder, cls) and (
            user_encoder.name == name or name not in _FUNCTION_BY_NAME
        ):
            return cls(user_encoder.function, settings["width"], name)
        return cls.build(settings, arrays)


def import_path(function: Any) -> str | None:
    """Return "module:name" if the function can be imported with this text, else None.

    >>> from math import sqrt
    >>> import_path(sqrt), import_path(lambda keys: keys)
    ('math:sqrt', None)
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    value = sys.modules.get(module or "")
    for part in (name or "").split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is function and value is not None else None
