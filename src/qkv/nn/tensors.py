"""Checks of the tensors that a layer is called with, and the type of its `__call__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from qkv.errors import DtypeError, ShapeError
from qkv.frameworks import load_framework
from qkv.util.types import T

TORCH = load_framework("torch")


def check_tensors(**tensors: Any) -> None:
    """Raise unless every argument is a torch tensor."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.fx.Proxy):
                raise DtypeError(
                    f"{name} is a torch.fx proxy, and torch.fx cannot trace this layer: make the "
                    "layer a leaf of the tracer (Tracer.is_leaf_module), or use torch.export"
                )
            raise DtypeError(
                f"{name} must be a torch tensor, not {type(x).__name__}: pass "
                f"torch.as_tensor({name})"
            )


def check_plain(**tensors: Any) -> None:
    """Raise unless every argument is a torch tensor that is not nested."""
    check_tensors(**tensors)
    for name, x in tensors.items():
        TORCH.as_plain_array(x, name)


def check_width(width: int, x: torch.Tensor) -> None:
    """Raise unless the last axis of x has the layer's width."""
    if not x.dim() or x.size(-1) != width:  # a nested tensor has size(-1) but no shape
        came = f"(…, {x.size(-1)})" if x.is_nested else tuple(x.shape)
        raise ShapeError(f"x must be (…, {width}), the width of this layer, not {came}")


def check_dtype(weight: Any, **tensors: torch.Tensor | None) -> None:
    """Raise unless the tensors have the dtype of `weight`, or autocast casts both.

    An adapter that replaces a layer may have no weight: then nothing is checked.
    """
    for name, x in tensors.items() if isinstance(weight, torch.Tensor) else ():
        if x is None or x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
            continue
        convert = f", or convert the layer with .to({x.dtype})" if x.is_floating_point() else ""
        raise DtypeError(
            f"{name} is {x.dtype} but the layer's parameters are {weight.dtype}: pass "
            f"{name}.to({weight.dtype}){convert}"
        )


def called_as(forward: T) -> Callable[[Any], T]:
    """Give a layer's `__call__`, which torch leaves untyped, the type of its `forward`.

    Only type checkers see this. At run time `__call__` stays torch's, because tracers replace it.
    """
    return lambda _: forward
