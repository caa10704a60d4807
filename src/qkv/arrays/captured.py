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

from qkv.types import Arithmetic, Array, Arrays

_now: Callable[[], int] = torch._C._autograd._get_sequence_nr
_mapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def hoisted(function: Arithmetic, *example: Array) -> tuple[Arithmetic, Arrays]:
    """function(*example, *held), and the tensors that it held."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in example]
        with _Noting(given) as noting, _eagerly():
            out = function(*given)
    held = [x for x, _ in noting.places.values()]
    # What a function of torch.autograd is given no mode sees: it goes on reading its own tensors,
    # and `vjp` asks for their gradients in place.
    hidden = graph_leaves(out, (*given, *(x for _, x in noting.places.values())))

    def converted(*args: Array) -> Array:
        own, others = args[: len(example)], args[len(example) :]
        places = {id(x): (x, y) for x, y in zip(held, others, strict=False) if x is not y}
        if not places:
            return function(*own)
        with _Instead(places), _eagerly():
            return function(*own)

    return converted, (*held, *hidden)


def _eagerly() -> AbstractContextManager[object]:
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


class _Instead(TorchFunctionMode):  # type: ignore[misc]
    """Gives operations other tensors in place of some, which are known by what they are."""

    def __init__(self, places: dict[int, tuple[Array, Array]]):
        super().__init__()
        self.places = places

    def instead(self, x: Array) -> Array:
        return self.places[id(x)][1] if id(x) in self.places else x

    def _all(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.instead(x)
        if type(x) in (tuple, list):
            return type(x)(map(self._all, x))
        return x

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: self._all(x) for name, x in (kwargs or {}).items()}
        return function(*map(self._all, args), **named)


class _Noting(_Instead):
    """The same for whatever wants a gradient and is older than the call, but what was given."""

    def __init__(self, given: Sequence[Array]):
        super().__init__({})
        self.given, self.start = given, _now()

    def instead(self, x: Array) -> Array:
        if id(x) not in self.places and self.is_held(x):
            with temporarily_clear_interpreter_stack():  # a function may map another
                self.places[id(x)] = x, x.detach().requires_grad_()
        return super().instead(x)

    def is_held(self, x: Array) -> bool:
        if not x.requires_grad or _mapped(x) or any(x is y for y in self.given):
            return False
        return x.grad_fn is None or x.grad_fn._sequence_nr() < self.start
