"""The steps of `NODES` as one operator of PyTorch's, which a graph does not look into."""

from __future__ import annotations

from typing import Any

import torch

from qkv.arrays.base import NODES
from qkv.types import Array, Live, Slopes


@torch.library.custom_op("qkv::rows", mutates_args=())
def _rows(
    x: torch.Tensor,
    live: torch.Tensor | None,
    array: torch.Tensor | None,
    name: str,
    number: float,
) -> torch.Tensor:
    found: torch.Tensor = NODES[name].run(x, live, number if array is None else array)
    return found.contiguous()


@_rows.register_fake
def _(x: Array, live: Live, array: Array | None, name: str, number: float) -> Array:
    return x.new_empty((*x.shape[:-1], NODES[name].width(x, array)))


@_rows.register_vmap
def _(info: Any, axes: Any, *given: Any) -> tuple[Array, int]:
    first = [
        a if a is None else a.expand(info.batch_size, *a.shape) if at is None else a.movedim(at, 0)
        for a, at in zip(given[:3], axes, strict=False)
    ]
    return torch.ops.qkv.rows(*first, *given[3:]), 0


def _keep(ctx: Any, inputs: Any, output: Array) -> None:
    x, _, array, ctx.name, ctx.number = inputs
    ctx.save_for_backward(x, output, array)


def _back(ctx: Any, gradient: Array) -> Slopes:
    back, (x, output, array) = NODES[ctx.name].back, ctx.saved_tensors
    assert back is not None
    with torch.autocast(x.device.type, enabled=False):  # a graph is made under the caller's
        first, second = back(x, ctx.number if array is None else array, output, gradient)
    return first, None, second, None, None


_rows.register_autograd(_back, setup_context=_keep)
