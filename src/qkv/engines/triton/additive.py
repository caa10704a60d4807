"""Softmax attention with s = Σ_h v_h tanh(a_h + b_h): by features within the table, else exactly.

Which of the two is only known on the device. Both are launched, each looks at the flag there, and
the exact kernels, which come second, do nothing or overwrite.
"""

# Decorators of an untyped library.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import exact, features, ops
from qkv.errors import DtypeError, EngineError, ShapeError

WIDEST_VALUE = 256


def additive(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    table: Tensor,
    grid: Tensor,
    lower: int | None = None,
    upper: int | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n).

    The table and grid are those of `features`. Queries of float32 are answered exactly: features
    of that precision would cost more than they save. Masks are those of `exact.additive_exact`.
    """
    if torch.is_autocast_enabled(a.device.type):
        low = torch.get_autocast_dtype(a.device.type)
        a, b, value = (x.to(low) for x in (a, b, value))
    _check(a, b, v, value)
    if a.dtype == torch.float32:
        out, lse = exact.additive_exact(a, b, v, value, lower, upper, lengths)
    else:
        out, lse, *_ = _additive(a, b, v, value, table, grid, lower, upper, lengths)
    return out, lse


def _check(a: Tensor, b: Tensor, v: Tensor, value: Tensor) -> None:
    for name, x in (("a", a), ("b", b), ("value", value)):
        if x.ndim != 4:
            raise ShapeError(f"{name} must be (batch, heads, rows, width), not {tuple(x.shape)}")
        if x.dtype not in ops.DTYPES or x.dtype != a.dtype:
            raise DtypeError(
                f"{name} is {x.dtype}: a, b and value must all be one of bfloat16, float16, float32"
            )
    batch, heads, _, h = a.shape
    few = b.shape[1]
    fits = b.shape[0] == batch and few and heads % few == 0 and b.shape[3] == h
    if not fits or value.shape[:3] != b.shape[:3] or tuple(v.shape) != (h,):
        raise ShapeError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}, v {tuple(v.shape)} and value "
            f"{tuple(value.shape)} do not go together"
        )
    if value.shape[3] > WIDEST_VALUE:
        raise EngineError(f"values are {value.shape[3]} wide, and a tile holds {WIDEST_VALUE}")


def _settings(lengths: Tensor | None, lower: int | None, upper: int | None) -> dict[str, Any]:
    """What `ops` wants to know beyond φ, ψ and the values."""
    absent = ("key_bias", "gate_query", "gate_key", "row_a", "row_b", "layout")
    given = {"lengths": lengths, "lower": lower, "upper": upper, "scale": 1.0, "alpha": 0.0}
    return dict.fromkeys(absent) | given | {"weighting": "softmax", "layout_size": 0, "tf32": False}


@torch.library.custom_op("qkv::additive", mutates_args=())
def _additive(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    table: Tensor,
    grid: Tensor,
    lower: int | None,
    upper: int | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, what `ops` keeps of the rows, the fit and the flag."""
    fit, beyond = features.fit_of(a, b, table, grid)
    phi, psi = features.features_of(a, b, v, fit, beyond, table.shape[2])
    out, lse, kept = ops._attend_forward(phi, psi, value, **_settings(lengths, lower, upper))
    exact.forward(a, b, v, value, lower, upper, lengths, beyond, out, lse)
    return out, lse, kept, fit, beyond


@_additive.register_fake
def _(
    a: Tensor, b: Tensor, v: Tensor, value: Tensor, table: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = a.shape[:3]
    _, _, pairs, order = table.shape
    return (
        value.new_empty((*rows, value.shape[3])),
        a.new_empty(rows, dtype=torch.float32),
        a.new_empty((2, *rows), dtype=torch.float32),
        a.new_empty((1 + 2 * pairs * order, a.shape[3]), dtype=torch.float32),
        a.new_empty(1, dtype=torch.int32),
    )


@torch.library.custom_op("qkv::additive_backward", mutates_args=())
def _additive_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    pairs: int,
    lower: int | None,
    upper: int | None,
    lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    fit: Tensor,
    beyond: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """da, db, dv, dvalue. The features are made again: they are wide, and quick to make."""
    phi, psi = features.features_of(a, b, v, fit, beyond, pairs)
    dphi, dpsi, dvalue, *_ = ops._attend_backward(
        grad, grad_lse, out, kept, phi, psi, value,
        for_queries=True, for_keys=True, **_settings(lengths, lower, upper),
    )  # fmt: skip
    del phi, psi
    da, db, parts = features.features_grad(dphi, dpsi, a, b, v, fit, beyond, pairs)
    del dphi, dpsi
    dv = torch.empty_like(v)
    exact.backward(
        grad, grad_lse, a, b, v, value, lower, upper, lengths, beyond, out, lse,
        da, db, dv, dvalue, parts,
    )  # fmt: skip
    return da, db, dv, dvalue


@_additive_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (a, b, v, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, b, v, value, table, _, ctx.lower, ctx.upper, lengths = inputs
    ctx.pairs = table.shape[2]
    ctx.save_for_backward(a, b, v, value, lengths, *output)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: None
) -> tuple[Any, ...]:
    a, b, v, value, lengths, *output = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(output[0])
    grads = _additive_backward(
        grad, grad_lse, a, b, v, value, ctx.pairs, ctx.lower, ctx.upper, lengths, *output
    )
    return *grads, *(None,) * 5


_additive.register_autograd(_differentiate, setup_context=_save)
