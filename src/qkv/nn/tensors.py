"""What a layer is given must be tensors; what it gives, to a type checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from qkv.errors import DtypeError, ShapeError
from qkv.frameworks import load_framework
from qkv.util.types import T

TORCH = load_framework("torch")


def check_tensors(**given: Any) -> None:
    """Refuse what is no tensor, by its name: a layer's parameters would not meet it."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.fx.Proxy):
                raise DtypeError(
                    f"{name} stands for a tensor, and torch.fx cannot follow what the layer does "
                    "with it: make the layer a leaf of the tracer (Tracer.is_leaf_module), or use "
                    "torch.export"
                )
            raise DtypeError(
                f"{name} must be a torch tensor, not {type(x).__name__}: pass "
                f"torch.as_tensor({name})"
            )


def check_plain(**given: Any) -> None:
    """Refuse what is no tensor, or is nested."""
    check_tensors(**given)
    for name, x in given.items():
        TORCH.as_plain_array(x, name)


def check_width(width: int, x: torch.Tensor) -> None:
    """Refuse x unless its rows are as wide as the layer was made for."""
    if not x.dim() or x.size(-1) != width:  # a nested one may have a width and no shape
        came = f"(…, {x.size(-1)})" if x.is_nested else tuple(x.shape)
        raise ShapeError(f"x must be (…, {width}), as the layer was made, not {came}")


def check_dtype(weight: Any, **given: torch.Tensor | None) -> None:
    """Refuse what a layer's parameters cannot be multiplied with; autocast casts both. What stands
    in a layer's place, as an adapter, may have no weight of its own."""
    for name, x in given.items() if isinstance(weight, torch.Tensor) else ():
        if x is None or x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
            continue
        told = f"{name} is {x.dtype} but the layer's parameters are {weight.dtype}"
        other = f", or convert the layer by .to({x.dtype})" if x.is_floating_point() else ""
        raise DtypeError(f"{told}: pass {name}.to({weight.dtype}){other}")


def called_as(forward: T) -> Callable[[Any], T]:
    """A layer's `__call__`, which torch leaves untyped, with the type of its `forward`.

    For type checkers alone: where it runs, `__call__` stays torch's, which tracers replace.
    """
    return lambda _: forward
