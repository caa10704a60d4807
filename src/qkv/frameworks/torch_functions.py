"""PyTorch: operations whose way back is our own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from qkv.util.types import Array


class InnerProductFunction(torch.autograd.Function):
    """x yᵀ by a copy of yᵀ, of whose gradients none has a second matrix that is transposed."""

    @staticmethod
    def forward(ctx: Any, x: Array, y: Array) -> Array:
        ctx.save_for_backward(x, y)
        return x @ y.mT.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        (x, y), (slope,) = ctx.saved_tensors, gradients
        wants_x, wants_y = ctx.needs_input_grad
        return slope @ y if wants_x else None, slope.mT @ x if wants_y else None


class CustomGradientFunction(torch.autograd.Function):
    """`forward(*leaves)` with the way back `backward`, or that of `reference` where somebody
    differentiates it again."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, reference: Any, *leaves: Array) -> Any:
        outputs, kept = forward(*leaves)
        ctx.pull, ctx.reference, ctx.count = backward, reference, len(leaves)
        ctx.save_for_backward(*leaves, *kept)
        ctx.set_materialize_grads(False)
        ctx.likes = [(y.shape, y.dtype, y.device) for y in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        saved = ctx.saved_tensors  # an activation checkpoint lets them be asked for once
        leaves, kept = saved[: ctx.count], saved[ctx.count :]
        wanted = ctx.needs_input_grad[3:]
        gradients = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.likes, strict=True)
        )
        if torch.is_grad_enabled():  # somebody will differentiate this gradient
            found = iter(_reference_gradients(ctx.reference, leaves, wanted, gradients))
            return (None,) * 3 + tuple(next(found) if want else None for want in wanted)
        return (None,) * 3 + tuple(ctx.pull(leaves, kept, gradients))


def without_saved_tensor_hooks() -> AbstractContextManager[object]:
    """A context in which no caller's saved-tensor hook sees what autograd saves.

    Trial runs (what to compile, which kernel is fastest) happen in the first call of a kind only.
    Activation checkpointing counts saved tensors by such hooks, and must count the same ones in
    the first call and in its recomputation.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def distinct_views(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, none of which is another or was made of another: so each has a gradient of its
    own, also where a caller passes one array as query and key."""
    return [x.view_as(x) for x in arrays]


def _reference_gradients(reference: Any, leaves: Any, wanted: Any, gradients: Any) -> Any:
    leaves = distinct_views(leaves)
    outputs = reference(*leaves)
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in pairs],
        [x for x, want in zip(leaves, wanted, strict=True) if want],
        [g for _, g in pairs],
        create_graph=True,
        allow_unused=True,
    )
