"""Masks: which keys a query may attend to. Combine them with `&`, `|` and `~`.

`causal`, `window`, `dilated`, `strided`, `global_tokens`, `blocks`, `lengths`, `documents`,
`packed` and `custom` are rules on positions. `array` holds a boolean array (True: may attend) or a
float array (added to the scores; −∞ excludes a pair). Calls accept the name of a mask without
parameters: `mask="causal"`. Engines skip blocks that a mask excludes completely.
"""

from typing import Literal

from qkv.masks.band import causal, dilated, global_tokens, is_plain_causal, strided, window
from qkv.masks.base import NAMES, Mask, array, localize_mask, resolve
from qkv.masks.functions import custom, has_user_functions, hoist_mask
from qkv.masks.packed_sequences import packed
from qkv.masks.sequences import blocks, documents, lengths
from qkv.util.types import NestedLists, Shaped

NAMES.update(
    blocks=blocks,
    causal=causal,
    custom=custom,
    dilated=dilated,
    documents=documents,
    global_tokens=global_tokens,
    lengths=lengths,
    packed=packed,
    strided=strided,
    window=window,
)

Name = Literal["causal"]
MaskLike = Mask | Name | Shaped | NestedLists

__all__ = [
    "NAMES",
    "Mask",
    "MaskLike",
    "Name",
    "array",
    "blocks",
    "causal",
    "custom",
    "dilated",
    "documents",
    "global_tokens",
    "has_user_functions",
    "hoist_mask",
    "is_plain_causal",
    "lengths",
    "packed",
    "resolve",
    "localize_mask",
    "strided",
    "window",
]

# TensorFlow's AutoGraph does not rewrite functions with this attribute.
for _function in (
    blocks,
    custom,
    dilated,
    documents,
    global_tokens,
    lengths,
    packed,
    strided,
    window,
):
    setattr(_function, "autograph_info__", None)  # noqa: B010
