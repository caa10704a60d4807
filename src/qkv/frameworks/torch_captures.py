"""PyTorch: turn the tensors that a function captures into further arguments.

A `TorchFunctionMode` sees every operation of the function. It replaces each tensor that needs a
gradient and is older than the call. The gradients of blocks stop at the replacement. The captured
tensor itself, its hooks and its graph receive one gradient, the sum over all blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from qkv.util.types import Array, ArrayFunction, Arrays

_autograd_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_is_functorch_tensor: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def hoist_captured_tensors(
    function: ArrayFunction, *example: Array
) -> tuple[ArrayFunction, Arrays]:
    """Return a function of (*example, *captured), and the captured tensors."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in example]
        with _RecordCaptured(inputs) as noting, _force_eager():
            out = function(*inputs)
    held = [x for x, _ in noting.replacements.values()]
    # The mode does not see arguments of torch.autograd.Function. Such a function keeps reading its
    # own tensors, and `vjp` finds their gradients in the graph.
    hidden = graph_leaves(out, (*inputs, *(x for _, x in noting.replacements.values())))

    def call_with_captured(*args: Array) -> Array:
        own, others = args[: len(example)], args[len(example) :]
        places = {id(x): (x, y) for x, y in zip(held, others, strict=False) if x is not y}
        if not places:
            return function(*own)
        with _ReplaceTensors(places), _force_eager():
            return function(*own)

    return call_with_captured, (*held, *hidden)


def _force_eager() -> AbstractContextManager[object]:
    """Return a context in which compiled functions run eagerly.

    torch.compile would compile the mode too, again for each tensor.
    """
    compiles = "torch._dynamo" in sys.modules  # if not, nothing is compiled; importing takes 1 s
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def graph_leaves(out: Array, known: Sequence[Array]) -> Arrays:
    """Return the leaf tensors of out's graph that need a gradient, without the known ones."""
    found: dict[int, Array] = {}
    seen: set[Any] = set()
    stack = [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in known):
            found[id(leaf)] = leaf
        stack.extend(parent for parent, _ in node.next_functions)
    return tuple(found.values())


class _ReplaceTensors(TorchFunctionMode):  # type: ignore[misc]
    """Replaces tensors, found by identity, in the arguments of every operation."""

    def __init__(self, places: dict[int, tuple[Array, Array]]):
        super().__init__()
        self.replacements = places

    def replacement_of(self, x: Array) -> Array:
        return self.replacements[id(x)][1] if id(x) in self.replacements else x

    def _replace_nested(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.replacement_of(x)
        if type(x) in (tuple, list):
            return type(x)(map(self._replace_nested, x))
        return x

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: self._replace_nested(x) for name, x in (kwargs or {}).items()}
        return function(*map(self._replace_nested, args), **named)


class _RecordCaptured(_ReplaceTensors):
    """Replaces and records captured tensors: those older than the call that need a gradient."""

    def __init__(self, inputs: Sequence[Array]):
        super().__init__({})
        self.example_inputs, self.start_sequence_number = inputs, _autograd_sequence_number()

    def replacement_of(self, x: Array) -> Array:
        if id(x) not in self.replacements and self.is_captured(x):
            with temporarily_clear_interpreter_stack():  # the function may call vmap
                self.replacements[id(x)] = x, x.detach().requires_grad_()
        return super().replacement_of(x)

    def is_captured(self, x: Array) -> bool:
        if (
            not x.requires_grad
            or _is_functorch_tensor(x)
            or any(x is y for y in self.example_inputs)
        ):
            return False
        return x.grad_fn is None or x.grad_fn._sequence_nr() < self.start_sequence_number
