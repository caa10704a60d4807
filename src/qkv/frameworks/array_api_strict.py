"""array-api-strict: only the standard's functions, to test that qkv uses no others."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np

from qkv.frameworks.base import Framework
from qkv.util.types import Array


class ArrayApiStrict(Framework):
    name = "array_api_strict"
    xp = array_api_strict

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(np.from_dlpack(x))


FRAMEWORK = ArrayApiStrict()
