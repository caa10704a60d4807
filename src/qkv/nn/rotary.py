"""Positions as rotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv.errors import ArgumentError, ShapeError
from qkv.nn.tensors import called_as, check_plain
from qkv.util.keyword_hints import reject_torchscript, suggest_keywords


@suggest_keywords
class Rotary(nn.Module):
    """Each pair (x₂ᵢ, x₂ᵢ₊₁) of a vector at position p is turned by the angle p · base^(−2i/d).

    The product of a turned query and a turned key then depends on their distance alone. x is
    (…, n, d) with d even, and the n rows stand at positions offset, offset + 1, …. The pairs are
    neighbours where `interleaved`, and otherwise x of one half with x of the other.

    >>> Rotary(2)(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).round(decimals=3)
    tensor([[1.0000, 0.0000],
            [0.5400, 0.8410]])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(self, width: int, base: float = 10_000.0, interleaved: bool = False) -> None:
        super().__init__()
        if isinstance(width, bool) or not isinstance(width, int) or width < 2 or width % 2:
            raise ArgumentError(f"rotary: the width must be an even number, not {width!r}")
        if isinstance(base, bool) or not isinstance(base, int | float) or not base > 0:
            raise ArgumentError(f"rotary: base must be a number above 0, not {base!r}")
        self.width, self.base, self.interleaved = width, base, interleaved

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        check_plain(x=x)
        if x.shape[-1] != self.width:
            raise ShapeError(
                f"rotary: made for vectors of {self.width} numbers, not of {x.shape[-1]}"
            )
        # In float32 at least: in 16 bits the position 257 is 256.
        dtype = torch.promote_types(x.dtype, torch.float32)
        at = torch.arange(offset, offset + x.shape[-2], device=x.device, dtype=dtype)
        pair = torch.arange(0, self.width, 2, device=x.device, dtype=dtype)
        angle = at[:, None] * self.base ** (-pair / self.width)
        cos, sin = angle.cos(), angle.sin()
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = x.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return turned.to(x.dtype)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}, interleaved={self.interleaved}"


def resolve_rotary(rotary: Any, width: int) -> Rotary | None:
    """What a layer's argument `rotary` asks for: False, True, or one made for this width."""
    if rotary is None or rotary is False:
        return None
    if rotary is True:
        return Rotary(width)
    if not isinstance(rotary, Rotary):
        raise ArgumentError(f"rotary must be True, False or a qkv.nn.Rotary, not {rotary!r}")
    if rotary.width != width:
        raise ArgumentError(
            f"rotary is made for vectors of {rotary.width} numbers, but a head has {width}: "
            f"pass Rotary({width})"
        )
    return rotary
