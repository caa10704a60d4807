"""Functions on arrays as torch operators: compile, export and fake tensors see one node each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.errors import EngineError

LIBRARY = torch.library.Library("qkv", "FRAGMENT")


def operator(name: str, function: Any, fake: Any, mutates: tuple[str, ...] = ()) -> Any:
    """`torch.ops.qkv.name`; torch.library.custom_op would add as much again to each call."""
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    LIBRARY.define(name + schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"qkv::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.qkv, name).default


def nothing(*rest: Any, **named: Any) -> None:
    pass


def refuse(ctx: Any, *along: Tensor | None) -> None:
    raise EngineError("the Triton kernels have first derivatives only: name engine='dense'")
