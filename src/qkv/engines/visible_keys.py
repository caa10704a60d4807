"""The pairs that a mask allows in a whole call on a CPU, and the keys that some query sees.

The pairs of a mask without arrays follow from its signature and the lengths. They are computed once
and cached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.frameworks.base import Framework
from qkv.frameworks.tree import PAIRS_SIGNATURE_ATTRIBUTE
from qkv.masks import Mask
from qkv.masks.base import CompoundMask
from qkv.masks.sequences import Blocks
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, LiveMask, ShardPosition

MAX_CACHED_PAIRS = 2**20
"""The most booleans of a mask that is cached."""

MAX_CACHED_MASKS = 32

MAX_VISIBLE_SHARE = 0.9
"""If queries see more than this share of the keys, no key is left out."""

MIN_KEY_NUMBERS_PER_PAIR = 4
"""Numbers of the keys for each boolean of a mask from which it is worth reading the mask."""


class VisiblePairs(NamedTuple):
    """The pairs that count, for a range of the keys.

    - `live` (…, n, stop − start): booleans; None: all pairs of the range count.
    - `start`, `stop`: no query sees a key outside of this range.
    - `is_total`: each key of the range is seen, and each query sees a key.
    """

    live: LiveMask
    start: int
    stop: int
    is_total: bool


_FIXED_PAIRS: dict[Any, tuple[VisiblePairs, Mask]] = create_table("engines.visible_pairs")
"""The pairs of rules without arrays, with one such rule: a signature may hold the id of a part."""


def find_visible_pairs(call: Call) -> VisiblePairs:
    """Return the pairs that count in a call on a CPU that is not traced and is not a shard."""
    fw, rule, n, m = call.fw, call.rule, call.n, call.m
    if rule is None:
        return VisiblePairs(None, 0, m, True)
    signature = rule_signature(fw, rule) if n * m <= MAX_CACHED_PAIRS else None
    if signature is None:
        live = calls.compute_live_pairs(call, calls.make_block(call))
        if live is None or _count(live.shape) * MIN_KEY_NUMBERS_PER_PAIR > _count(call.key.shape):
            return VisiblePairs(live, 0, m, live is None)
        return _summarize(fw, live, m)
    # A function may read the batch and the head.
    lead = call.lead if tree.has_functions(signature) else ()
    key = fw.name, signature, lead, n, m
    known = _FIXED_PAIRS.get(key)
    if known is not None:
        return known[0]
    live, is_repeatable = fw.run_repeatable(
        lambda: calls.compute_live_pairs(call, calls.make_block(call))
    )
    pairs = VisiblePairs(None, 0, m, True) if live is None else _summarize(fw, live, m)
    if is_repeatable and (live is None or _count(live.shape) <= MAX_CACHED_PAIRS):
        insert_bounded(_FIXED_PAIRS, key, (pairs, rule), MAX_CACHED_MASKS)
    return pairs


def narrow_call(call: Call, pairs: VisiblePairs) -> Call:
    """Return the call for the keys that some query sees, without its rule."""
    start, stop = pairs.start, pairs.stop
    if stop - start == call.m:
        return replace(call, rule=None)
    keys, bias = slice(start, stop), call.bias
    if bias is not None and bias.shape[-1] != 1:
        bias = bias[..., keys]
    return replace(
        call,
        key=call.key[..., keys, :],
        value=None if call.value is None else call.value[..., keys, :],
        rule=None,
        bias=bias,
        at=ShardPosition(0, start, call.n, call.m),
    )


def _summarize(fw: Framework, live: Array, m: int) -> VisiblePairs:
    """Return the pairs for the range of keys that some query sees."""
    host = fw.to_numpy(live)
    if 0 in host.shape or host.shape[-1] != m:
        return VisiblePairs(live, 0, m, False)
    seen = np.asarray(host.any(axis=-2))  # (…, m)
    at = np.flatnonzero(seen.reshape(-1, m).any(axis=0))
    start, stop = (int(at[0]), int(at[-1]) + 1) if at.size else (0, m)
    if stop - start > MAX_VISIBLE_SHARE * m:
        start, stop = 0, m
    part = host[..., start:stop]
    if part.all():
        return VisiblePairs(None, start, stop, True)
    is_total = bool(seen[..., start:stop].all() and part.any(axis=-1).all())
    return VisiblePairs(live[..., start:stop], start, stop, is_total)


def _count(shape: Any) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def rule_signature(fw: Framework, rule: Mask) -> Any:
    """Return a key that is equal for rules with the same pairs, or None if arrays decide."""
    attributes = vars(rule)
    if PAIRS_SIGNATURE_ATTRIBUTE in attributes:
        return attributes[PAIRS_SIGNATURE_ATTRIBUTE]
    signature, is_final = _build_rule_signature(fw, rule)
    if is_final:
        attributes[PAIRS_SIGNATURE_ATTRIBUTE] = signature
    return signature


def _build_rule_signature(fw: Framework, rule: Mask) -> tuple[Any, bool]:
    """Return the signature of a rule, and whether it will never change."""
    if rule.list_arrays() or not type(rule).__module__.startswith("qkv."):
        return None, True
    if isinstance(rule, CompoundMask):
        parts = [_build_rule_signature(fw, part) for part in rule.operand_masks]
        signatures = [signature for signature, _ in parts]
        known = None if None in signatures else (type(rule), *signatures)
        return known, all(is_final for _, is_final in parts)
    if isinstance(rule, Blocks):  # the layout is its own copy, which nobody changes
        return (Blocks, id(rule.layout), rule.size), True
    try:
        signature = tree.record_signature(fw, rule)
    except tree.UncacheableError:
        return None, False
    if tree.has_functions(signature):  # a closure may change
        is_known = fw.signs_captures and not _reads_tensors(signature)
        return (signature if is_known else None), False
    return (None if tree.holds_values(signature) else rule), True


def _reads_tensors(signature: Any) -> bool:
    """Return whether a function with this signature reads a tensor, whose numbers may change."""
    return isinstance(signature, tuple) and (
        signature[:1] == ("tensor",) or any(map(_reads_tensors, signature))
    )
