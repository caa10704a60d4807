"""The steps of `GRAPH_NODES` as one operator of PyTorch's, which a graph does not look into."""

from __future__ import annotations

from typing import Any

import torch

from qkv.frameworks.base import GRAPH_NODES
from qkv.util.types import Array, Gradients, LiveMask


@torch.library.custom_op("qkv::rows", mutates_args=())
def _graph_node_op(
    x: torch.Tensor,
    live: torch.Tensor | None,
    array: torch.Tensor | None,
    name: str,
    number: float,
) -> torch.Tensor:
    found: torch.Tensor = GRAPH_NODES[name].run(x, live, number if array is None else array)
    return found.contiguous()


@_graph_node_op.register_fake
def _(x: Array, live: LiveMask, array: Array | None, name: str, number: float) -> Array:
    return x.new_empty((*x.shape[:-1], GRAPH_NODES[name].output_width(x, array)))


@_graph_node_op.register_vmap
def _(info: Any, axes: Any, *given: Any) -> tuple[Array, int]:
    first = [
        a if a is None else a.expand(info.batch_size, *a.shape) if at is None else a.movedim(at, 0)
        for a, at in zip(given[:3], axes, strict=False)
    ]
    return torch.ops.qkv.rows(*first, *given[3:]), 0


def _save_for_backward(ctx: Any, inputs: Any, output: Array) -> None:
    x, _, array, ctx.name, ctx.number = inputs
    ctx.save_for_backward(x, output, array)


def _backward_op(ctx: Any, gradient: Array) -> Gradients:
    back, (x, output, array) = GRAPH_NODES[ctx.name].backward, ctx.saved_tensors
    assert back is not None
    with torch.autocast(x.device.type, enabled=False):  # a graph is made under the caller's
        first, second = back(x, ctx.number if array is None else array, output, gradient)
    return first, None, second, None, None


_graph_node_op.register_autograd(_backward_op, setup_context=_save_for_backward)
