"""Softmax attention with s = Σ_h v_h tanh(a_h + b_h): by features within the table, else exactly.

Which of the two is only known on the device. Both are launched, each looks at the flag there, and
the exact kernels, which come second, do nothing or overwrite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import exact, features, forward, gradients, launch, rooms
from qkv.engines.triton.arguments import Numbers
from qkv.engines.triton.features import Known
from qkv.engines.triton.kept import by_launches
from qkv.engines.triton.operators import operator, refuse
from qkv.engines.triton.records import Arrays

ROOM = 128 * 2**20
"""Bytes of features and of their gradients that the way back holds at once."""


def additive(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor, grid: Tensor,
    lower: int | None = None, upper: int | None = None, lengths: Tensor | None = None,
    parts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n).

    The table and grid are those of `features`. Queries of float32 are answered exactly: features
    of that precision would cost more than they save. Masks are those of `exact.Exact`, the parts
    those of `features.reach_of`.
    """
    by = (None, None) if a.dtype == torch.float32 else (table, grid)
    out, lse, *_ = _additive(a, b, v, value, *by, lower, upper, lengths, parts)
    return out, lse


def _pieces(a: Tensor, b: Tensor, pairs: int) -> list[tuple[slice, slice, slice]]:
    """Batches, heads of a and heads of b whose features and gradients ROOM holds; one at least.

    A piece has all heads or one batch, so that it is contiguous in an array that is.
    """
    batch, heads, n, h = a.shape
    few, m = b.shape[1:3]
    group = heads // few
    each = 2 * (2 * pairs * h) * (group * n + m) * a.element_size()
    scores = max(group * n * m, 1) * a.element_size()
    # Products of many heads are made of as many at a time as SCRATCH holds whole.
    fit = max(min(ROOM // max(each, 1), gradients.SCRATCH // scores or few * batch), 1)
    if fit >= few:
        step = _even(batch, fit // few)
        return [(slice(i, i + step), slice(None), slice(None)) for i in range(0, batch, step)]
    step = _even(few, fit)
    return [
        (slice(i, i + 1), slice(j * group, (j + step) * group), slice(j, j + step))
        for i in range(batch)
        for j in range(0, few, step)
    ]


def _even(count: int, most: int) -> int:
    """The size of pieces that are as few as can be, and about the same."""
    return max(-(-count // max(-(-count // most), 1)), 1)


def _arrays(known: Known, value: Tensor, lengths: Tensor | None) -> tuple[Arrays, Tensor]:
    """A dot product's arrays for what `features.features_of` is given, and what each row adds."""
    phi, psi, of_query, of_key = features.features_of(known)
    width = features.width_for(known.a.shape[-1], known.pairs, known.width)
    bias = rooms.evenly(of_key[..., None])[..., 0]
    return Arrays(phi, psi, value, bias, lengths=lengths, width=width), of_query


def _backward_fake(grad: Tensor, grad_lse: Tensor | None, *arrays: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arrays[:4])


@operator(_backward_fake, refuse)
@by_launches
def _additive_backward(
    grad: Tensor, grad_lse: Tensor | None, a: Tensor, b: Tensor, v: Tensor, value: Tensor,
    pairs: int, lower: int | None, upper: int | None, lengths: Tensor | None,
    out: Tensor, kept: Tensor, fit: Tensor, beyond: Tensor, width: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """da, db, dv, dvalue. The features, if there are `pairs` of them, are made again: they are
    wide, and quick to make. They and their gradients are the most that is held, so they come in
    pieces.
    """
    grad, a, b, v = (x.contiguous() for x in (grad, a, b, v))
    da, db, dvalue = (x.new_empty(x.shape) for x in (a, b, value))
    pieces, numbers = _pieces(a, b, pairs) if pairs else [], Numbers(1.0, lower=lower, upper=upper)
    ends, cut, others = [0], rooms.cut, None
    for batches, heads, few in pieces:
        ends.append(ends[-1] + features.parts_for(a[batches, heads], b[batches, few], grad_lse))
    if pieces:
        others = rooms.new(a, (ends[-1], a.shape[-1]))
    with launch.on(a.device):
        centre = gradients.inner(grad, grad_lse, out)
        for i, (batches, heads, few) in rooms.in_turn(enumerate(pieces)):
            ours, theirs = (batches, heads), (batches, few)
            known = Known(cut(a, ours), cut(b, theirs), v, fit, beyond, width, pairs)
            arrays = _arrays(known, cut(value, theirs), cut(lengths, batches))[0]
            moved = cut(grad_lse, ours)
            dphi, dpsi, _, dbias, *_ = gradients.attend_backward(
                cut(grad, ours), moved, cut(out, ours), cut(kept, (slice(None), *ours)),
                *arrays, *numbers, True, True, False, known=cut(centre, ours),
                dvalue=cut(dvalue, theirs),
            )  # fmt: skip
            into = cut(da, ours), cut(db, theirs), cut(others, slice(*ends[i : i + 2]))
            features.fill_grad(dphi, dpsi, moved, dbias, known, into)
            del arrays, dphi, dpsi
        call = exact.Exact(a, b, v, value, lower, upper, lengths, beyond if pairs else None)
        dv = exact.backward(call, grad, centre, kept, (da, db, dvalue), others)
    return da, db, dv, dvalue


def _additive_fake(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    rows = a.shape[:3]
    found = [a.new_empty(0) for _ in range(3)] if table is None else features.room(a, table)
    return (
        value.new_empty((*rows, value.shape[3])),
        rooms.new(a, rows),
        rooms.new(a, (2, *rows)),
        *found,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, b, v, value, table, _, ctx.lower, ctx.upper, lengths, _ = inputs
    ctx.pairs = 0 if table is None else features.pairs_of(table)
    ctx.save_for_backward(a, b, v, value, lengths, output[0], *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: None
) -> tuple[Any, ...]:
    a, b, v, value, lengths, out, kept, *fit = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    if grad_lse is not None:  # a row without keys has no score to move
        grad_lse = torch.where(kept[1] == 0, 0.0, grad_lse)
    a, b, v, grad = (x.contiguous() for x in (a, b, v, grad))  # here, where launches are not noted
    how = (ctx.pairs, ctx.lower, ctx.upper, lengths)
    grads = _additive_backward(grad, grad_lse, a, b, v, value, *how, out, kept, *fit)
    return *grads, *(None,) * 6


@operator(_additive_fake, _differentiate, _save)
@by_launches
def _additive(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor | None, grid: Tensor | None,
    lower: int | None, upper: int | None, lengths: Tensor | None, parts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, the log-sum-exp, what `ops` keeps of the rows, and what `features.fit_of` gives;
    the last three are empty without a table, where all is exact."""
    a, b, v = a.contiguous(), b.contiguous(), v.contiguous()
    with launch.on(a.device):
        if table is None or grid is None:
            out, lse, kept, fit, beyond, width = _additive_fake(a, b, v, value, None)
            exact.attend(exact.Exact(a, b, v, value, lower, upper, lengths), out, lse, kept)
            return out, lse, kept, fit, beyond, width
        parts = features.reach_of(a, b) if parts is None else parts
        fit, beyond, width = features.fit_of(parts, v, table, grid)
        known = Known(a, b, v, fit, beyond, width, features.pairs_of(table))
        arrays, of_query = _arrays(known, value, lengths)
        out, lse, kept = forward.attend(*arrays, *Numbers(1.0, lower=lower, upper=upper))
        how = (lower, upper, lengths, beyond, (lse, of_query))
        exact.attend(exact.Exact(a, b, v, value, *how), out, lse, kept)
    return out, lse, kept, fit, beyond, width
