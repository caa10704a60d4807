"""Arrays of a call on four axes: batch, heads, rows, width."""

from __future__ import annotations

import math
from typing import Any

from qkv.engines import call as calls
from qkv.engines.call import Call


def batch_and_heads(call: Call) -> tuple[int, int]:
    """The leading axes as two; one alone is the batch, so that lengths are those of its rows."""
    lead = call.lead
    if len(lead) == 2:
        return lead
    return (lead[0], 1) if len(lead) == 1 else (math.prod(lead[:-1]), lead[-1] if lead else 1)


def count_key_heads(call: Call) -> int:
    """The heads that keys and values keep, or all of the query's where they differ."""
    both: tuple[Any, ...] = (call.key, call.value)
    one, two = (x.shape[-3] if x.ndim > 2 else 1 for x in both)
    return one if one == two and len(call.lead) > 1 else batch_and_heads(call)[1]


def as_four_axes(call: Call, x: Any, heads: int) -> Any:
    """(…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    lead, shape = call.lead, x.shape
    if len(lead) == 2 and len(shape) == 4 and shape[0] == lead[0] and shape[1] == heads:
        pass
    elif len(lead) < 2:
        x = calls.repeat_shared_heads(call, x).expand(*lead, *shape[-2:])
        x = x.reshape(lead[0] if lead else 1, 1, *shape[-2:])
    else:
        if len(shape) > 2 and shape[-3] not in (1, heads):
            x = calls.repeat_shared_heads(call, x)
        x = x.expand(*lead[:-1], heads, *shape[-2:])
        x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def as_aligned_rows(call: Call, x: Any, heads: int) -> Any:
    """(…, rows, 1) as float32 (batch, heads, rows, 1), each head's at a multiple of 16."""
    if x is None:
        return None
    from qkv.engines.triton.workspace import align_rows

    return align_rows(as_four_axes(call, x.float(), heads))
