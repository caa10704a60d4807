"""PyTorch: the tensors that a caller's function holds, made into further arguments of it.

A mode sees each operation of the function. Where one is given a tensor that wants a gradient and is
older than the call, a tensor of ours stands in for it: so a block's gradient stops there, the
caller's hooks and the graph behind it see one gradient, that of all blocks.
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
    """function(*example, *held), and the tensors that it held."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in example]
        with _RecordCaptured(given) as noting, _force_eager():
            out = function(*given)
    held = [x for x, _ in noting.replacements.values()]
    # What a function of torch.autograd is given no mode sees: it goes on reading its own tensors,
    # and `vjp` asks for their gradients in place.
    hidden = graph_leaves(out, (*given, *(x for _, x in noting.replacements.values())))

    def call_with_captured(*args: Array) -> Array:
        own, others = args[: len(example)], args[len(example) :]
        places = {id(x): (x, y) for x, y in zip(held, others, strict=False) if x is not y}
        if not places:
            return function(*own)
        with _ReplaceTensors(places), _force_eager():
            return function(*own)

    return call_with_captured, (*held, *hidden)


def _force_eager() -> AbstractContextManager[object]:
    """Where a function that was compiled runs as it was written: a mode would be compiled too, anew
    for each tensor."""
    compiles = "torch._dynamo" in sys.modules  # else nothing was, and it takes a second to load
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def graph_leaves(out: Array, known: Sequence[Array]) -> Arrays:
    """The tensors that want a gradient and that `out` was made of, less the known ones."""
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
    """Gives operations other tensors in place of some, which are known by what they are."""

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
    """The same for whatever wants a gradient and is older than the call, but what was given."""

    def __init__(self, given: Sequence[Array]):
        super().__init__({})
        self.example_inputs, self.start_sequence_number = given, _autograd_sequence_number()

    def replacement_of(self, x: Array) -> Array:
        if id(x) not in self.replacements and self.is_captured(x):
            with temporarily_clear_interpreter_stack():  # a function may map another
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
