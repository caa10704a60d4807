"""Softmax with an attention sink, by kernels that compute softmax without one.

With lse = log Σ exp(s), the output is that of softmax times the share of the weight that the sink
leaves, σ(lse − sink). The log-sum-exp becomes log(exp(lse) + exp(sink)). Gradients follow from the
framework's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qkv.engines.call import Call
from qkv.util.types import Array
from qkv.weightings import Softmax
from qkv.weightings.softmax import SinkSoftmax


def without_sink(call: Call) -> Call:
    """Return the call of the kernels."""
    weighting: Any = call.weighting
    return replace(call, weighting=Softmax(weighting.temperature), wants_lse=True)


def build_sink_runner(
    call: Call, build_runner: Callable[[Call], Callable[[Call], Any]]
) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """Return a function that runs calls like this one by the runner of the call without a sink."""
    run = build_runner(without_sink(call))

    def run_with_sink(call: Call) -> tuple[Array, Array | None, None]:
        weighting, fw = call.weighting, call.fw
        assert isinstance(weighting, SinkSoftmax)
        out, lse, _ = run(without_sink(call))
        sink = weighting.sink_scores(lse)
        out = out * fw.astype(fw.sigmoid(lse - sink), fw.dtype_name(out))
        if not call.wants_lse:
            return out, None, None
        top = fw.detach(fw.xp.maximum(lse, sink))
        return out, top + fw.xp.log(fw.xp.exp(lse - top) + fw.xp.exp(sink - top)), None

    return run_with_sink
