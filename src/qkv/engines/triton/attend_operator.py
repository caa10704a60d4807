"""out = Σⱼ α(s)ᵢⱼ vⱼ  with  s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)): the door.

`attend` takes `Arrays` and `Numbers` by position. It calls the operators `qkv::attend_forward` and
`qkv::attend_backward`; its results are the output, the log-sum-exp of each row of s, and what is
kept of it.

query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n), (2, B, H, n).
Query head h looks at key head h // (H // Hₖ). key_bias (B, Hₖ, m), gate_query (B, H, n) and
gate_key (B, Hₖ, m) are float32 and may be expanded.

The pair i, j counts if lower ≤ j − i ≤ upper, j < lengths[batch], and
layout[i // layout_size, j // layout_size]; None sets no bound. A `cap` bends dot products to
cap · tanh(scale · q·k / cap), before `pairs` are added; one of −1 to c · tanh(scale · q·k),
with c (B, H, n) each query's of `caps`, float32. `pairs` (B or 1, H or 1, n or 1, m or 1) is
either uint8, 0 where a pair does not count, or floats that are added to the scores,
multiplied by `times`; −∞ rules a pair out. Weights are dropped by a hash of `seed`, an int32.
`whole` has what each row's score gradients add up to at 0 to the last digit, as one that
multiplies whole rows needs.

`entmax` takes its threshold t from row_a (B, H, n), as in α = max(0, (alpha − 1)s − t)^e with
e = 1/(alpha − 1). `topk` takes the smallest chosen score from row_a and its position from
row_b (int32): ties count up to there. Neither gets a gradient: it is in that of the scores.

A row with nothing to look at gives 0, its log-sum-exp −∞, and gradients 0. The second result
is the total of the scores for `normalized`, the count for `average`, and else 0; gradients
flow through it for `softmax` and `topk` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import backward, forward
from qkv.engines.triton.kernel_call import SCHEMA_ARGUMENTS
from qkv.engines.triton.launch_replay import replay_launches
from qkv.engines.triton.records import ARRAY_COUNT, Arrays
from qkv.engines.triton.torch_operator import refuse_second_derivative, register_operator

PAIRS_INDEX, CAPS_INDEX = map(Arrays._fields.index, ("pairs", "caps"))


_attend_backward = register_operator(
    backward.fake_gradients,
    refuse_second_derivative,
    schema=f"(Tensor along, Tensor? along_lse, Tensor out, Tensor kept, {SCHEMA_ARGUMENTS}, "
    "bool for_queries, bool for_keys, bool for_pairs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)(replay_launches(backward.attend_backward))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, kept = output
    ctx.save_for_backward(out, kept, *inputs[:ARRAY_COUNT])
    ctx.numbers = inputs[ARRAY_COUNT:]
    ctx.set_materialize_grads(False)


def _compute_gradients(
    ctx: Any, along: Tensor | None, along_lse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    out, kept, *inputs = ctx.saved_tensors
    needs, weighting = ctx.needs_input_grad, ctx.numbers[1]
    if weighting not in ("softmax", "topk"):
        along_lse = None
    if along is None and along_lse is None:
        return (None,) * len(needs)
    if along is None:
        along = torch.zeros_like(out)
    for_queries, for_keys = (
        any(needs[i] for i in (0, 4, CAPS_INDEX)),
        any(needs[i] for i in (1, 2, 3, 5)),
    )
    wishes = (for_queries, for_keys, needs[PAIRS_INDEX])
    found = _attend_backward(along, along_lse, out, kept, *inputs, *ctx.numbers, *wishes)
    grads: list[Tensor | None] = [None] * len(needs)
    for at, x in zip((*range(6), PAIRS_INDEX, CAPS_INDEX), found, strict=True):
        grads[at] = x if needs[at] else None
    return tuple(grads)


attend = register_operator(
    forward.allocate_outputs,
    _compute_gradients,
    _save_for_backward,
    schema=f"({SCHEMA_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)(forward.attend_forward)
