"""The operator for out = Σⱼ α(s)ᵢⱼ vⱼ with s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)).

`attend` takes the fields of `Arrays` and `Numbers` by position. It calls the operators
`qkv::attend_forward` and `qkv::attend_backward`. It returns the output, the log-sum-exp of each row
of s, and `kept`: two numbers per row for the backward pass.

query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n), (2, B, H, n).
Query head h uses key head h // (H // Hₖ). key_bias (B, Hₖ, m), gate_query (B, H, n) and gate_key
(B, Hₖ, m) are float32 and may be expanded.

*Masks.* The pair i, j counts if all of these hold; None sets no bound:

- lower ≤ j − i ≤ upper, and j < lengths[batch].
- layout[i // layout_size, j // layout_size] is not 0.
- key_spans[0, i] ≤ j < key_spans[1, i]; `query_spans` (2, m) holds the queries of each key. Neither
  starts nor ends decrease. Both are int32.
- `pairs` (B or 1, H or 1, n or 1, m or 1) allows it. As uint8, 0 excludes a pair. As floats, it is
  multiplied by `times` and added to the scores; −∞ excludes a pair.

*Softcap.* `cap` > 0 replaces scale · q·k by cap · tanh(scale · q·k / cap), before `pairs` is added.
`cap` = −1 replaces it by c · tanh(scale · q·k), with c from `caps` (B, H, n), float32.

*Distances.* `form` names a score that is no dot product (`tile_functions.distance`): s = scale ·
profile. The profile of a window is a function of `square_scale` · ‖q − k‖². `query_terms` and
`key_terms` are those of `row_terms.collect_row_terms`: squares for a window, columns for Laplace
and exact match. With `cap` = −1, `caps` is a factor of each row. These scores have no bias and no
gate.

*Dropout.* A hash of `seed` (int32) and the position decides which weights are dropped.

*Thresholds.* `entmax` reads t from row_a (B, H, n): α = max(0, (alpha − 1)s − t)^e with
e = 1/(alpha − 1). `topk` reads the smallest chosen score from row_a and its position from row_b
(int32): equal scores count up to that position. Their gradients are part of those of the scores.
With `sink`, the sums of entmax have one more score: that of each row in `caps`, if there are any.

*Functions.* `functions` (`pair_functions.functions.PairFunctions`) excludes pairs by their
positions, and changes the scores before `pairs` is added. They read `captured_floats` and
`captured_integers`, whose lengths are `captured_numbers`. A score_mod gets the scores in base e,
before `times`.

*Pages.* With `pages` (B, P), int32, key and value are pools (pages, Hₖ, rows, width), and key j of
batch b is row j mod rows of page pages[b, j // rows]. A pool of int8 or float8 holds codes: row r
is `key_scales` (pages, Hₖ, rows, 1) times its codes. There is no gradient.

*Row sums.* With `whole`, the score gradients of each row add up to 0 exactly. A gradient that
multiplies whole rows (a learned temperature) needs that.

An empty row has output 0, log-sum-exp −∞ and gradients 0. The second result is the sum of scores
for `normalized`, the count for `average`, and 0 for the other weightings without a log-sum-exp. It
has a gradient only for `softmax` and `topk`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton.backward import backward
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching.kernel_call import SCHEMA_ARGUMENTS
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.torch_operator import refuse_second_derivative, register_operator
from qkv.engines.triton.tile_functions.records import ARRAY_COUNT, Arrays

PAIRS_INDEX, CAPS_INDEX, CAPTURED_INDEX = map(
    Arrays._fields.index, ("pairs", "caps", "captured_floats")
)


attend_backward = register_operator(
    backward.fake_gradients,
    refuse_second_derivative,
    schema=f"(Tensor along, Tensor? along_lse, Tensor out, Tensor kept, {SCHEMA_ARGUMENTS}, "
    "bool for_queries, bool for_keys, bool for_pairs, bool for_captured) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    wishes = (for_queries, for_keys, needs[PAIRS_INDEX], needs[CAPTURED_INDEX])
    found = attend_backward(along, along_lse, out, kept, *inputs, *ctx.numbers, *wishes)
    grads: list[Tensor | None] = [None] * len(needs)
    for at, x in zip((*range(6), PAIRS_INDEX, CAPS_INDEX, CAPTURED_INDEX), found, strict=True):
        grads[at] = x if needs[at] else None
    return tuple(grads)


attend = register_operator(
    forward.allocate_outputs,
    _compute_gradients,
    _save_for_backward,
    schema=f"({SCHEMA_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)(forward.attend_forward)
