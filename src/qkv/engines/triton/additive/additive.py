"""Softmax attention with s = Σ_h v_h tanh(a_h + b_h): approximated by features or exact.

Features are valid for arguments in a range, which only the device can check. So both kinds of
kernels are launched. The exact kernels run second: they read a flag on the device, and either
return at once or overwrite the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton.additive import additive_exact, additive_features
from qkv.engines.triton.additive.additive_features import FeatureInputs
from qkv.engines.triton.backward import backward
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import launch, workspace
from qkv.engines.triton.launching.kernel_call import Numbers
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.torch_operator import refuse_second_derivative, register_operator
from qkv.engines.triton.tile_functions.records import Arrays

MAX_FEATURE_BYTES = 128 * 2**20
"""The most bytes of features and their gradients that the backward pass holds at a time."""


def attend_additive(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor, grid: Tensor,
    lower: int | None = None, upper: int | None = None, lengths: Tensor | None = None,
    parts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (B, H, n, d) and the log-sum-exp (B, H, n).

    a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d). `table` and `grid` are those of
    `additive_features`, masks those of `additive_exact.ExactKernelCall`, `parts` those of
    `additive_features.unit_ranges`. float32 is computed exactly: features of that precision would
    cost more than they save.
    """
    by = (None, None) if a.dtype == torch.float32 else (table, grid)
    out, lse, *_ = _additive(a, b, v, value, *by, lower, upper, lengths, parts)
    return out, lse


def _split_pieces(a: Tensor, b: Tensor, pairs: int) -> list[tuple[slice, slice, slice]]:
    """Return slices of batches, heads of a and heads of b whose features fit MAX_FEATURE_BYTES.

    A piece has all heads or one batch, so that it is contiguous in a contiguous array.
    """
    batch, heads, n, h = a.shape
    few, m = b.shape[1:3]
    group = heads // few
    each = 2 * (2 * pairs * h) * (group * n + m) * a.element_size()
    scores = max(group * n * m, 1) * a.element_size()
    # At most as many heads at a time as fit into MAX_SCRATCH_BYTES.
    fit = max(
        min(MAX_FEATURE_BYTES // max(each, 1), backward.MAX_SCRATCH_BYTES // scores or few * batch),
        1,
    )
    if fit >= few:
        step = _even_piece_size(batch, fit // few)
        return [(slice(i, i + step), slice(None), slice(None)) for i in range(0, batch, step)]
    step = _even_piece_size(few, fit)
    return [
        (slice(i, i + 1), slice(j * group, (j + step) * group), slice(j, j + step))
        for i in range(batch)
        for j in range(0, few, step)
    ]


def _even_piece_size(count: int, most: int) -> int:
    """Return a size up to `most` that splits `count` into the fewest pieces, of similar size."""
    return max(-(-count // max(-(-count // most), 1)), 1)


def _feature_arrays(
    known: FeatureInputs, value: Tensor, lengths: Tensor | None
) -> tuple[Arrays, Tensor]:
    """Return the arrays of the dot product of the features, and the offset of each row."""
    phi, psi, of_query, of_key = additive_features.compute_features(known)
    width = additive_features.kernel_width(known.a.shape[-1], known.pairs, known.width)
    bias = workspace.align_rows(of_key[..., None])[..., 0]
    return Arrays(phi, psi, value, bias, lengths=lengths, width=width), of_query


def _fake_backward(grad: Tensor, grad_lse: Tensor | None, *arrays: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arrays[:4])


@register_operator(_fake_backward, refuse_second_derivative)
@replay_launches
def _additive_backward(
    grad: Tensor, grad_lse: Tensor | None, a: Tensor, b: Tensor, v: Tensor, value: Tensor,
    pairs: int, lower: int | None, upper: int | None, lengths: Tensor | None,
    out: Tensor, kept: Tensor, fit: Tensor, beyond: Tensor, width: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return da, db, dv, dvalue.

    If `pairs` is not 0, the features are computed again: they are wide and fast to compute. They
    and their gradients need most of the memory, so they are computed in pieces.
    """
    grad, a, b, v = (x.contiguous() for x in (grad, a, b, v))
    da, db, dvalue = (x.new_empty(x.shape) for x in (a, b, value))
    pieces, numbers = (
        _split_pieces(a, b, pairs) if pairs else [],
        Numbers(1.0, lower=lower, upper=upper),
    )
    ends, cut, others = [0], workspace.slice_recorded, None
    for batches, heads, few in pieces:
        ends.append(
            ends[-1]
            + additive_features.count_gradient_parts(a[batches, heads], b[batches, few], grad_lse)
        )
    if pieces:
        others = workspace.allocate_buffer(a, (ends[-1], a.shape[-1]))
    with launch.use_device(a.device):
        centre = backward.compute_centre(grad, grad_lse, out)
        for i, (batches, heads, few) in workspace.reuse_buffers(enumerate(pieces)):
            ours, theirs = (batches, heads), (batches, few)
            known = FeatureInputs(cut(a, ours), cut(b, theirs), v, fit, beyond, width, pairs)
            arrays = _feature_arrays(known, cut(value, theirs), cut(lengths, batches))[0]
            moved = cut(grad_lse, ours)
            dphi, dpsi, _, dbias, *_ = backward.attend_backward(
                cut(grad, ours), moved, cut(out, ours), cut(kept, (slice(None), *ours)),
                *arrays, *numbers, True, True, False, False, known=cut(centre, ours),
                dvalue=cut(dvalue, theirs),
            )  # fmt: skip
            into = cut(da, ours), cut(db, theirs), cut(others, slice(*ends[i : i + 2]))
            additive_features.fill_gradients(dphi, dpsi, moved, dbias, known, into)
            del arrays, dphi, dpsi
        call = additive_exact.ExactKernelCall(
            a, b, v, value, lower, upper, lengths, beyond if pairs else None
        )
        dv = additive_exact.launch_backward(call, grad, centre, kept, (da, db, dvalue), others)
    return da, db, dv, dvalue


def _fake_additive(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    rows = a.shape[:3]
    found = (
        [a.new_empty(0) for _ in range(3)]
        if table is None
        else additive_features.allocate_fit(a, table)
    )
    return (
        value.new_empty((*rows, value.shape[3])),
        workspace.allocate_buffer(a, rows),
        workspace.allocate_buffer(a, (2, *rows)),
        *found,
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, b, v, value, table, _, ctx.lower, ctx.upper, lengths, _ = inputs
    ctx.pairs = 0 if table is None else additive_features.count_pairs(table)
    ctx.save_for_backward(a, b, v, value, lengths, output[0], *output[2:])
    ctx.set_materialize_grads(False)


def _compute_gradients(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: None
) -> tuple[Any, ...]:
    a, b, v, value, lengths, out, kept, *fit = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    if grad_lse is not None:  # an empty row has no scores
        grad_lse = torch.where(kept[1] == 0, 0.0, grad_lse)
    a, b, v, grad = (x.contiguous() for x in (a, b, v, grad))  # not recorded here
    how = (ctx.pairs, ctx.lower, ctx.upper, lengths)
    grads = _additive_backward(grad, grad_lse, a, b, v, value, *how, out, kept, *fit)
    return *grads, *(None,) * 6


@register_operator(_fake_additive, _compute_gradients, _save_for_backward)
@replay_launches
def _additive(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor | None, grid: Tensor | None,
    lower: int | None, upper: int | None, lengths: Tensor | None, parts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output, the log-sum-exp, `kept`, and the results of `additive_features.fit_units`.

    Without a table the computation is exact and the last three results are empty.
    """
    a, b, v = a.contiguous(), b.contiguous(), v.contiguous()
    with launch.use_device(a.device):
        if table is None or grid is None:
            out, lse, kept, fit, beyond, width = _fake_additive(a, b, v, value, None)
            additive_exact.launch_forward(
                additive_exact.ExactKernelCall(a, b, v, value, lower, upper, lengths),
                out,
                lse,
                kept,
            )
            return out, lse, kept, fit, beyond, width
        parts = additive_features.unit_ranges(a, b) if parts is None else parts
        fit, beyond, width = additive_features.fit_units(parts, v, table, grid)
        known = FeatureInputs(a, b, v, fit, beyond, width, additive_features.count_pairs(table))
        arrays, of_query = _feature_arrays(known, value, lengths)
        out, lse, kept = forward.attend_forward(*arrays, *Numbers(1.0, lower=lower, upper=upper))
        how = (lower, upper, lengths, beyond, (lse, of_query))
        additive_exact.launch_forward(
            additive_exact.ExactKernelCall(a, b, v, value, *how), out, lse, kept
        )
    return out, lse, kept, fit, beyond, width
