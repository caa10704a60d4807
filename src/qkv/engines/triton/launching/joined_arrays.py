"""Several tensors as one flat array, so that a kernel gets one pointer for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, workspace
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.tiles import jit_kernel

COPIED_PER_PROGRAM = 1024


@jit_kernel
def copy_kernel(x, out, first_row, length, F: tl.constexpr):
    """Copy `length` numbers to `out`, from place `first_row` on."""
    at = tl.program_id(0).to(tl.int64) * F.BLOCK + tl.arange(0, F.BLOCK)
    some = tl.load(x + at, mask=at < length, other=0)
    tl.store(out + first_row + at, some.to(out.dtype.element_ty), mask=at < length)


def join_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one flat tensor of one dtype; None if there are none.

    While launches are recorded, kernels copy them, so that a replay joins the tensors of its call.
    """
    if not tensors:
        return None
    flat = [x.reshape(-1) for x in tensors]
    flat = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in flat]
    if len(flat) == 1:
        return flat[0].contiguous()
    dtype = flat[0].dtype
    if any(x.dtype != dtype for x in flat):
        dtype = torch.float32 if flat[0].is_floating_point() else torch.int64
    if workspace.CURRENT_RECORDING.get() is None or not all(x.is_contiguous() for x in tensors):
        return torch.cat([x.to(dtype) for x in flat])
    joined = workspace.allocate_buffer(flat[0], (sum(x.numel() for x in flat),), dtype)
    first = 0
    for x in filter(Tensor.numel, flat):  # a launch needs at least one program
        programs = triton.cdiv(x.numel(), COPIED_PER_PROGRAM)
        facts = {"BLOCK": COPIED_PER_PROGRAM}
        sizes = (first, x.numel())
        launch.launch_kernel(
            copy_kernel, programs, (x, joined), (), sizes, facts, Tile(1, 1, 1, 4, 1)
        )
        first += x.numel()
    return joined
