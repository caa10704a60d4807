"""Signatures of masks and score_mods: equal if their translations are equal.

What has no signature is traced in each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from torch import Tensor

from qkv.frameworks.torch_signatures import NoSignatureError, SignatureBuilder
from qkv.masks import Mask
from qkv.masks.sequences import Blocks


class MaskSignatureBuilder(SignatureBuilder):
    """Builds signatures of functions, and of masks with their arrays."""

    def __init__(self, layout_tensor: Callable[[np.ndarray], Tensor]) -> None:
        super().__init__()
        self._layout_tensor = layout_tensor

    def describe(self, x: Any) -> Hashable:
        if isinstance(x, Blocks):
            # The layout is on the device once for each mask.
            return "blocks", x.size, self.describe_tensor(self._layout_tensor(x.layout))
        if isinstance(x, Mask):
            fields = dataclasses.fields(x)  # type: ignore[arg-type]
            return type(x), *(self.describe(getattr(x, field.name)) for field in fields)
        return super().describe(x)


__all__ = ["MaskSignatureBuilder", "NoSignatureError"]
