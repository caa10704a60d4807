"""The weights engine: output and weights together, in blocks of queries.

It stores the scores of one block only. If only the mean over the heads is requested, it does not
store the weights of each head. The backward pass computes each block again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call, ensure_seed
from qkv.engines.native.softmax_dot import not_softmax_dot_reason
from qkv.frameworks import tree
from qkv.frameworks.base import Tiling
from qkv.scores.functions import EvaluatedScore
from qkv.util.types import Array, Arrays, Gradients, Span

NAME = "weights"
UPCASTS = True

MAX_SCORES_PER_BLOCK = 2**20
"""The most numbers in a block: the scores of all heads and the score's intermediate arrays."""

MAX_SCORES_PER_EAGER_BLOCK = 2**22
"""The same in PyTorch on a CPU, whose operations take long to start and to differentiate."""

MAX_SCORES_PER_DEVICE_BLOCK = 2**23
"""The most numbers in a block on a GPU. Smaller blocks would leave the GPU idle."""


def unsupported_reason(call: Call) -> str | None:
    if not call.wants_weights:
        return "the call does not return weights"
    return None


def slower_reason(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    spans = _query_spans(call)
    if len(spans) < 2:
        return "the whole matrix at once"
    return f"{spans[0].size} queries at a time"


def run(call: Call) -> tuple[Array | None, Array | None, Array]:
    fused = None
    if call.fw.name == "torch" and call.value is not None:
        fused = _run_from_lse(call)
    if fused is not None:
        return fused[0], None, fused[1]
    call = call.upcast()
    spans = _query_spans(call)
    if len(spans) < 2:
        return _compute_rows(call, None)
    return _run_in_pieces(call, spans)


def build_runner(call: Call) -> Callable[[Call], Any]:
    """Return `run` for later calls with the same signature.

    On a GPU, values do not influence which fused kernel is chosen. So the returned function calls
    the chosen kernel directly. On a CPU, it computes weights that fit one block directly.
    """
    if not _is_plain_softmax(call):
        return run
    from qkv.engines.native import weights

    fused_run = weights.run
    if call.query.is_cpu:
        if not _fits_one_block(call):
            return run
        fused_run = weights.run_dense
    elif call.rule is not None or native.unsupported_reason(replace(call, wants_weights=None)):
        return run
    elif weights.fits_flash_kernel(call):
        fused_run = weights.run_on_device

    def run_fused(call: Call) -> Any:
        fused = fused_run(call)
        return run(call) if fused is None else (fused[0], None, fused[1])

    return run_fused


def build_direct_runner(call: Call) -> Callable[..., tuple[Array, Array] | None] | None:
    """Return a function of `attend`'s arguments for one block of weights on a CPU.

    None if the weights do not fit one block, or if there is a mask without an array.
    """
    if call.rule is not None and not call.rule.list_arrays():
        return None
    if not (_is_plain_softmax(call) and _fits_one_block(call)):
        return None
    from qkv.engines.native import weights

    return weights.build_direct_runner(call)


def _is_plain_softmax(call: Call) -> bool:
    """Return whether the call is torch's softmax of dot products, without bias, dropout and lse."""
    is_softmax_dot = (
        call.fw.name == "torch" and call.value is not None and not not_softmax_dot_reason(call)
    )
    return is_softmax_dot and not (call.bias is not None or call.dropout or call.wants_lse)


def _fits_one_block(call: Call) -> bool:
    """Return whether the weights of a call on a CPU fit one block."""
    from qkv.engines.native import weights

    is_one_block = call.query.is_cpu and len(_query_spans(call)) < 2
    return is_one_block and weights.has_matching_leads(call)


def fits_one_block(call: Call) -> bool:
    """Return whether the weights of all queries are computed at once."""
    return len(_query_spans(call)) < 2


def _run_from_lse(call: Call) -> tuple[Array, Array] | None:
    """Return output and weights from a fused kernel's log-sum-exp; None if there is no kernel."""
    if call.rule is None and native.unsupported_reason(replace(call, wants_weights=None)) is None:
        from qkv.engines.native import weights

        fused = weights.run(call)
        if fused is not None:
            return fused
    if call.query.device.type != "cuda" or call.wants_lse:
        return None
    return triton.run_with_weights(replace(call, wants_weights=None), call.wants_weights == "mean")


def _query_spans(call: Call) -> list[Span]:
    fw = call.fw
    if isinstance(call.score, EvaluatedScore):
        return [Span(0, call.n)]
    if streaming.unsupported_reason(call) or fw.is_in_fixed_graph(call.query):
        return [Span(0, call.n)]
    numbers_per_query = max(math.prod(call.lead) * call.m * streaming.numbers_per_pair(call), 1)
    on_device = fw.name == "torch" and call.query.device.type != "cpu"
    eager = MAX_SCORES_PER_EAGER_BLOCK if fw.name == "torch" else fw.eager_block_numbers
    on_cpu = max(MAX_SCORES_PER_BLOCK, eager)
    block = MAX_SCORES_PER_DEVICE_BLOCK if on_device else on_cpu
    return streaming.split_spans(fw, call.n, max(block // numbers_per_query, 1))


def _compute_rows(call: Call, rows: Span | None) -> tuple[Array | None, Array | None, Array]:
    """Return output, log-sum-exp and weights of the queries `rows`; None means all queries."""
    out, lse, alpha = dense.run(call, rows)
    if call.wants_weights == "mean":
        alpha = call.fw.xp.mean(alpha, axis=-3)
    return out, lse, alpha


def _run_in_pieces(call: Call, spans: list[Span]) -> tuple[Array | None, Array | None, Array]:
    """Return output, log-sum-exp and weights, computed for one span of queries at a time."""
    fw = call.fw
    tiling: Tiling = [(span, []) for span in spans]
    call = streaming.hoist_captured_arrays(ensure_seed(call), [(spans[0], [Span(0, call.m)])])
    leaves = tree.array_leaves(fw, call)
    is_returned = (call.value is not None, call.wants_lse, True)

    def compute_piece(arrays: Sequence[Array], rows: Span) -> Arrays:
        results = _compute_rows(tree.replace_arrays(fw, call, arrays), rows)
        return tuple(x for x in results if x is not None)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        return fw.map_tiles(lambda rows, _: compute_piece(arrays, rows), tiling), ()

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        floats = [i for i, x in enumerate(arrays) if "float" in fw.dtype_name(x)]

        def add_piece(total: Any, rows: Span, _: Any) -> Any:
            slopes = [_zero_overlap(call, fw.slice_span(x, rows, -2), rows) for x in gradients]

            def weighted_loss(*float_arrays: Array) -> Array:
                full = list(arrays)
                for i, x in zip(floats, float_arrays, strict=True):
                    full[i] = x
                pairs = zip(compute_piece(full, rows), slopes, strict=True)
                return sum((fw.xp.sum(x * slope) for x, slope in pairs), 0.0)

            loss, pull = fw.vjp(weighted_loss, *(arrays[i] for i in floats))
            return [
                old if new is None else old + new
                for old, new in zip(total, pull(fw.full((), 1.0, loss)), strict=True)
            ]

        zeros = [fw.full(fw.static_shape(arrays[i]), 0.0, arrays[i]) for i in floats]
        totals: list[Array | None] = [None] * len(arrays)
        for i, total in zip(floats, fw.fold_tiles(add_piece, zeros, tiling), strict=True):
            totals[i] = total
        return tuple(totals)

    def reference(*arrays: Array) -> Arrays:
        return tuple(
            x for x in _compute_rows(tree.replace_arrays(fw, call, arrays), None) if x is not None
        )

    results = iter(fw.run_differentiable(forward, backward, reference, leaves))
    return tuple(next(results) if returned else None for returned in is_returned)  # type: ignore[return-value]


def _zero_overlap(call: Call, gradient: Array, rows: Span) -> Array:
    """Return the gradient with 0 for queries that the previous, overlapping span counted."""
    if rows.first_new is None:
        return gradient
    at = call.fw.position_range(rows.start, rows.size, gradient)[:, None]
    return call.fw.fill_unless(gradient, at >= rows.first_new)
