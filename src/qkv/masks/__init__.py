"""Which keys a query may look at. Masks combine by `&`, `|` and `~`.

`causal`, `window`, `dilated`, `strided`, `global_tokens`, `blocks`, `lengths`, `documents` and
`custom` are rules on positions; `array` holds a boolean array (True: may attend) or a float array
(added to the scores, −∞ rules out). What a rule excludes for a whole block is not computed.
"""

from collections.abc import Callable
from typing import Literal

from qkv.masks.band import causal, dilated, global_tokens, is_plain_causal, strided, window
from qkv.masks.base import Mask, array, localize_mask, resolve
from qkv.masks.functions import custom, has_user_functions, hoist_mask
from qkv.masks.sequences import blocks, documents, lengths
from qkv.util.types import NestedLists, Shaped

NAMES: dict[str, Mask | Callable[..., Mask]] = {
    "blocks": blocks,
    "causal": causal,
    "custom": custom,
    "dilated": dilated,
    "documents": documents,
    "global_tokens": global_tokens,
    "lengths": lengths,
    "strided": strided,
    "window": window,
}
"""The masks by name. A call takes the name of one that needs no argument: `mask="causal"`."""

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
    "resolve",
    "localize_mask",
    "strided",
    "window",
]

# TensorFlow's AutoGraph leaves alone what bears this mark.
for _function in (blocks, custom, dilated, documents, global_tokens, lengths, strided, window):
    setattr(_function, "autograph_info__", None)  # noqa: B010
