"""Functions as PyTorch operators: transforms see a node, eager code calls the function."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from qkv.errors import EngineError
from qkv.frameworks import load_framework

LIBRARY = torch.library.Library("qkv", "FRAGMENT")
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""Tensor classes without their own dispatch."""


class Operator:
    """A function and its node in `torch.ops.qkv`, for compile, export and fake tensors.

    Eager calls run the function directly, because PyTorch's dispatcher takes longer than a small
    kernel. `fake` returns empty outputs. `pull` computes the gradients. Without `pull` there are no
    gradients; with it, all arguments are positional. `schema` replaces the schema that PyTorch
    infers from the function.
    """

    def __init__(
        self, function: Callable[..., Any], fake: Callable[..., Any],
        pull: Callable[..., Any] | None, save: Callable[..., None], mutates: tuple[str, ...],
        schema: str | None,
    ) -> None:  # fmt: skip
        update_wrapper(self, function)
        name = function.__name__.strip("_")
        schema = schema or torch.library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(name + schema)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, device)
        torch.library.register_fake(f"qkv::{name}", fake, lib=LIBRARY)
        self.node = getattr(torch.ops.qkv, name).default
        self.function, self.autograd_function = function, None
        if not mutates:
            back = pull or _no_gradients
            torch.library.register_autograd(f"qkv::{name}", back, setup_context=save, lib=LIBRARY)
        if pull is not None:
            self.autograd_function = _build_autograd_function(function, pull, save)

    def __call__(self, *given: Any, **named: Any) -> Any:
        learns = False
        if is_transform_active():
            return self.node(*given, **named)
        for x in given:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN_TENSOR_TYPES:
                    return self.node(*given, **named)
                learns = learns or x.requires_grad
        if learns and self.autograd_function is not None and torch.is_grad_enabled():
            return self.autograd_function.apply(*given)
        return self.function(*given, **named)


def register_operator(
    fake: Callable[..., Any],
    pull: Callable[..., Any] | None = None,
    save: Callable[..., None] = lambda ctx, inputs, output: None,
    mutates: tuple[str, ...] = (),
    schema: str | None = None,
) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that turns a function into an `Operator`."""
    return lambda function: Operator(function, fake, pull, save, mutates, schema)


def is_transform_active() -> bool:
    """Return whether a transform (compile, export, vmap …) is active."""
    return load_framework("torch").is_traced(None)


def _build_autograd_function(function: Any, pull: Any, save: Any) -> Any:
    """Return an autograd function. One with `setup_context` would take twice as long to call."""

    class Graph(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            output = function(*given)
            save(ctx, given, output)
            return output

        backward = staticmethod(pull)

    return Graph


def _no_gradients(ctx: Any, *along: Tensor | None) -> tuple[None, ...]:
    return (None,) * len(ctx.needs_input_grad)


def refuse_second_derivative(ctx: Any, *along: Tensor | None) -> None:
    raise EngineError(
        "the Triton kernels have no second derivatives: pass engine='dense' for these"
    )
