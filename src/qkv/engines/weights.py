"""The output and the weights together, some queries at a time.

The scores of all heads are never held, nor their weights where only the mean over the heads is
wanted; on the way back each piece is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qkv.arrays import tree
from qkv.arrays.base import Tiling
from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call, seeded
from qkv.types import Array, Arrays, Slopes, Span

NAME = "weights"
WIDENS = True

BLOCK = 2**20
"""Scores of all heads that are held at once, with what the score makes on the way to them."""

BLOCK_DEVICE = 2**23
"""The same on a device that a smaller block would leave idle."""


def cannot(call: Call) -> str | None:
    if not call.wants_weights:
        return "no weights are asked for"
    return None


def declines(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    spans = _spans(call)
    if len(spans) < 2:
        return "the whole matrix at once"
    return f"{spans[0].size} queries at a time"


def run(call: Call) -> tuple[Array | None, Array | None, Array]:
    found = None
    if call.fw.name == "torch" and call.value is not None:
        found = _by_log_sum_exp(call)
    if found is not None:
        return found[0], None, found[1]
    call = call.precise()
    spans = _spans(call)
    if len(spans) < 2:
        return _some(call, None)
    return _in_pieces(call, spans)


def bind(call: Call) -> Callable[[Call], Any]:
    """`run` for later calls of this kind. On a device no number is looked at, so that what the
    fused kernel takes once it takes again; a few weights on a CPU are made at once."""
    if not _is_plain(call):
        return run
    from qkv.engines.native import weights

    quick = weights.run
    if call.query.is_cpu:
        if not _is_few(call):
            return run
        quick = weights.at_once
    elif call.rule is not None or native.cannot(replace(call, wants_weights=None)):
        return run
    elif weights.flashes(call):
        quick = weights.on_device

    def bound(call: Call) -> Any:
        found = quick(call)
        return run(call) if found is None else (found[0], None, found[1])

    return bound


def direct(call: Call) -> Callable[..., tuple[Array, Array] | None] | None:
    """Those few, under a mask that is an array."""
    if call.rule is None or not call.rule.arrays() or not (_is_plain(call) and _is_few(call)):
        return None
    from qkv.engines.native import weights

    return weights.direct(call)


def _is_plain(call: Call) -> bool:
    """Whether they are torch's, of a softmax of dot products, and beside the output alone."""
    plain = call.fw.name == "torch" and call.value is not None and not native.unlike(call)
    return plain and not (call.bias is not None or call.dropout or call.wants_lse)


def _is_few(call: Call) -> bool:
    """Whether a CPU holds the weights at once, under a mask."""
    from qkv.engines.native import weights

    few = call.query.is_cpu and call.rule is not None and len(_spans(call)) < 2
    return few and weights.is_alike(call)


def _by_log_sum_exp(call: Call) -> tuple[Array, Array] | None:
    """Both from a fused kernel and the log-sum-exp that it finds, where there is one."""
    if call.rule is None and native.cannot(replace(call, wants_weights=None)) is None:
        from qkv.engines.native import weights

        found = weights.run(call)
        if found is not None:
            return found
    if call.query.device.type != "cuda" or call.wants_lse:
        return None
    return triton.with_weights(replace(call, wants_weights=None), call.wants_weights == "mean")


def _spans(call: Call) -> list[Span]:
    fw = call.fw
    if streaming.cannot(call) or (fw.tracing(call.query) and not fw.equal_spans):
        return [Span(0, call.n)]
    wide = max(math.prod(call.lead) * call.m * streaming.footprint(call), 1)
    on_device = fw.name == "torch" and call.query.device.type != "cpu"
    block = BLOCK_DEVICE if on_device else BLOCK
    return streaming.spans(fw, call.n, max(block // wide, 1))


def _some(call: Call, rows: Span | None) -> tuple[Array | None, Array | None, Array]:
    """The output, the log-sum-exp and the weights of some queries."""
    out, lse, alpha = dense.run(call, rows)
    if call.wants_weights == "mean":
        alpha = call.fw.xp.mean(alpha, axis=-3)
    return out, lse, alpha


def _in_pieces(call: Call, spans: list[Span]) -> tuple[Array | None, Array | None, Array]:
    fw = call.fw
    tiling: Tiling = [(span, []) for span in spans]
    call = streaming.hoist(seeded(call), [(spans[0], [Span(0, call.m)])])
    leaves = tree.leaves(fw, call)
    has = (call.value is not None, call.wants_lse, True)

    def some(arrays: Sequence[Array], rows: Span) -> Arrays:
        found = _some(tree.rebuild(fw, call, arrays), rows)
        return tuple(x for x in found if x is not None)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        return fw.tiled(lambda rows, _: some(arrays, rows), tiling), ()

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Slopes:
        floats = [i for i, x in enumerate(arrays) if fw.dtype(x).startswith("float")]

        def step(total: Any, rows: Span, _: Any) -> Any:
            along = [_fresh(call, fw.cut(x, rows, -2), rows) for x in gradients]

            def part(*chosen: Array) -> Array:
                full = list(arrays)
                for i, x in zip(floats, chosen, strict=True):
                    full[i] = x
                made = zip(some(full, rows), along, strict=True)
                return sum((fw.xp.sum(x * slope) for x, slope in made), 0.0)

            made, pull = fw.vjp(part, *(arrays[i] for i in floats))
            return [
                old if new is None else old + new
                for old, new in zip(total, pull(fw.full((), 1.0, made)), strict=True)
            ]

        zeros = [fw.full(fw.shape(arrays[i]), 0.0, arrays[i]) for i in floats]
        found: list[Array | None] = [None] * len(arrays)
        for i, total in zip(floats, fw.sweep(step, zeros, tiling), strict=True):
            found[i] = total
        return tuple(found)

    def reference(*arrays: Array) -> Arrays:
        return tuple(x for x in _some(tree.rebuild(fw, call, arrays), None) if x is not None)

    made = iter(fw.differentiable(forward, backward, reference, leaves))
    return tuple(next(made) if is_there else None for is_there in has)  # type: ignore[return-value]


def _fresh(call: Call, gradient: Array, rows: Span) -> Array:
    """0 for queries that an overlapping span has counted already."""
    if rows.first is None:
        return gradient
    at = call.fw.positions(rows.start, rows.size, gradient)[:, None]
    return call.fw.keep(gradient, at >= rows.first)
