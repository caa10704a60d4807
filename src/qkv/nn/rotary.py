"""Rotary position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv.errors import ArgumentError, ShapeError
from qkv.nn.tensors import called_as, check_plain
from qkv.util.keyword_hints import reject_torchscript, suggest_keywords


@suggest_keywords
class Rotary(nn.Module):
    """Rotate pair i of a vector at position p by the angle p · base^(−2i/d).

    The dot product of a rotated query and a rotated key then depends only on their distance. x is
    (…, n, d) with d even; its n rows have the positions offset, offset + 1, …. Pair i is
    (x₂ᵢ, x₂ᵢ₊₁) if `interleaved`, else (xᵢ, xᵢ₊d/₂).

    >>> Rotary(2)(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).round(decimals=3)
    tensor([[1.0000, 0.0000],
            [0.5400, 0.8410]])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(self, width: int, base: float = 10_000.0, interleaved: bool = False) -> None:
        super().__init__()
        if isinstance(width, bool) or not isinstance(width, int) or width < 2 or width % 2:
            raise ArgumentError(
                f"rotary: width must be an even number of at least 2, not {width!r}"
            )
        if isinstance(base, bool) or not isinstance(base, int | float) or not base > 0:
            raise ArgumentError(f"rotary: base must be a number above 0, not {base!r}")
        self.width, self.base, self.interleaved = width, base, interleaved

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        check_plain(x=x)
        if x.shape[-1] != self.width:
            raise ShapeError(f"rotary: x must have width {self.width}, not {x.shape[-1]}")
        # At least float32: in bfloat16, position 257 rounds to 256.
        dtype = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(offset, offset + x.shape[-2], device=x.device, dtype=dtype)
        pair = torch.arange(0, self.width, 2, device=x.device, dtype=dtype)
        angle = position[:, None] * self.base ** (-pair / self.width)
        cos, sin = angle.cos(), angle.sin()
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = x.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return rotated.to(x.dtype)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}, interleaved={self.interleaved}"


def resolve_rotary(rotary: Any, width: int) -> Rotary | None:
    """Return the `Rotary` for a layer's argument `rotary`, or None for False."""
    if rotary is None or rotary is False:
        return None
    if rotary is True:
        return Rotary(width)
    if not isinstance(rotary, Rotary):
        raise ArgumentError(f"rotary must be True, False or a qkv.nn.Rotary, not {rotary!r}")
    if rotary.width != width:
        raise ArgumentError(
            f"rotary has width {rotary.width}, but a head has width {width}: pass Rotary({width})"
        )
    return rotary
