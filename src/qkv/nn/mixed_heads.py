"""Layers whose heads are combined: differential attention and talking heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn

from qkv import masks
from qkv.errors import ArgumentError, DtypeError, validate_sizes
from qkv.masks import MaskLike
from qkv.nn.attention import attend_with_weights
from qkv.nn.cache import Cache
from qkv.nn.rotary import Rotary, resolve_rotary
from qkv.nn.scores import LayerScore, empty_parameter, resolve_score, score_name
from qkv.nn.tensors import called_as, check_dtype, check_plain, check_width
from qkv.nn.weightings import resolve_weighting, weighting_name
from qkv.scores import ScaledDot
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import WeightingLike


@suggest_keywords
class DifferentialAttention(nn.Module):
    """S⁽ʰ⁾ = (α(Q₁, K₁) − λ α(Q₂, K₂)) V for each head, normalized: differential attention.

    x (batch, n, embed_dim) → the same shape. Two attentions share V, of width 2·head_dim; the
    difference removes what both attend to. λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init with
    λ_init = 0.8 − 0.6·exp(−0.3·depth), for the layer at this depth. `num_heads` counts pairs; so
    does `num_kv_heads`. The default head_dim is embed_dim / (2·num_heads). The names and shapes of
    the parameters are those of DiffLlama in transformers.

    >>> layer = DifferentialAttention(16, num_heads=2)
    >>> layer(torch.ones(1, 5, 16), is_causal=True).shape
    torch.Size([1, 5, 16])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        depth: int = 0,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        score: LayerScore = "scaled_dot",
        weighting: WeightingLike = "softmax",
        rotary: bool | Rotary = False,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        validate_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=kv_heads)
        if head_dim is None:
            if embed_dim % (2 * num_heads):
                raise ArgumentError(
                    f"embed_dim must be a multiple of 2 · num_heads, not {embed_dim} with "
                    f"{num_heads} heads: pass head_dim="
                )
            head_dim = embed_dim // (2 * num_heads)
        validate_sizes(head_dim=head_dim)
        if num_heads % kv_heads:
            raise ArgumentError(
                f"num_kv_heads must divide num_heads, but {kv_heads} does not divide {num_heads}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.depth, self.lambda_init = depth, 0.8 - 0.6 * math.exp(-0.3 * depth)
        made: Any = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, 2 * num_heads * head_dim, bias, **made)
        self.k_proj = nn.Linear(embed_dim, 2 * kv_heads * head_dim, bias, **made)
        self.v_proj = nn.Linear(embed_dim, 2 * kv_heads * head_dim, bias, **made)
        self.o_proj = nn.Linear(2 * num_heads * head_dim, embed_dim, bias, **made)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, empty_parameter((head_dim,), device, dtype))
            nn.init.normal_(getattr(self, name), std=0.1)
        self.norm = nn.RMSNorm(2 * head_dim, eps=eps, **made)
        self.score = resolve_score(score, (head_dim, head_dim), device=device, dtype=dtype)
        self.weighting = resolve_weighting(weighting)
        self.rotary = resolve_rotary(rotary, head_dim)

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
        **wrong: Never,
    ) -> Tensor:
        """Return the output. With a `cache`, keys and values are appended to it."""
        if wrong:
            reject_call_keywords(self, wrong)
        check_input(self.q_proj, x, cache)
        kv_heads, past = self.num_kv_heads, 0 if cache is None else len(cache)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary is not None:
            q, k = self.rotary(q, past), self.rotary(k, past)
        v = torch.cat((v[:, :kv_heads], v[:, kv_heads:]), -1)
        if cache is not None:
            k, v = cache.append(self, k, v)
        mask = add_causal(mask, is_causal, past)
        first, second = (
            attend_with_weights(one, two, v, self.score, self.weighting, mask)[0]
            for one, two in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True)
        )
        out = self.norm(first - self.compute_lambda().to(x.dtype) * second)
        out = (1 - self.lambda_init) * out.transpose(1, 2).flatten(-2)
        projected: Tensor = self.o_proj(out)
        return projected

    def compute_lambda(self) -> Tensor:
        """Return λ, the share of the second attention that is subtracted."""
        pairs: Any = (self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2)
        first, second = (torch.exp((one.float() * two.float()).sum()) for one, two in pairs)
        return first - second + self.lambda_init

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, depth={self.depth}, score={score_name(self.score)}, "
            f"weighting={weighting_name(self.weighting)}"
        )


@suggest_keywords
class TalkingHeadsAttention(nn.Module):
    """Attention whose heads mix their scores before the weighting, and their weights after it.

    x (batch, n, embed_dim) → the same shape. With scores sᵍ of head g,

        S⁽ʰ⁾ = Σ_g A_hg α(Σ_f B_gf sᶠ) Vʰ        A = mix_weights, B = mix_scores

    A and B are (num_heads, num_heads) and start as the identity. A sum of dot products is the dot
    product of longer vectors, and the mix of weights is that of their outputs. So no engine stores
    scores or weights, but scores and outputs take num_heads times the products of other layers.

    >>> layer = TalkingHeadsAttention(16, num_heads=2)
    >>> layer(torch.ones(1, 5, 16), is_causal=True).shape
    torch.Size([1, 5, 16])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = False,
        weighting: WeightingLike = "softmax",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        validate_sizes(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim must be a multiple of num_heads, not {embed_dim} with {num_heads} heads"
            )
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype))
        for name in ("mix_scores", "mix_weights"):
            setattr(self, name, empty_parameter((num_heads, num_heads), device, dtype))
            nn.init.eye_(getattr(self, name))
        self.weighting = resolve_weighting(weighting)

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
        **wrong: Never,
    ) -> Tensor:
        """Return the output. With a `cache`, keys and values are appended to it."""
        if wrong:
            reject_call_keywords(self, wrong)
        check_input(self.q_proj, x, cache)
        past = 0 if cache is None else len(cache)
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        # Σ_f B_gf q_f·k_f is (B_g1 q₁, B_g2 q₂, …)·(k₁, k₂, …): all heads share one key.
        q = torch.einsum("gf,bnfd->bgnfd", self.mix_scores, q).flatten(-2)
        k, v = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        if cache is not None:
            k, v = cache.append(self, k, v)
        score, mask = ScaledDot(self.head_dim**-0.5), add_causal(mask, is_causal, past)
        out = attend_with_weights(q, k, v, score, self.weighting, mask)[0]
        out = out.unflatten(-1, (self.num_heads, self.head_dim))  # weights of g, values of h
        out = torch.einsum("hg,bgnhd->bnhd", self.mix_weights, out).flatten(-2)
        projected: Tensor = self.o_proj(out)
        return projected

    if TYPE_CHECKING:
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        o_proj: nn.Linear
        mix_scores: nn.Parameter
        mix_weights: nn.Parameter

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, weighting={weighting_name(self.weighting)}"


def check_input(projection: nn.Linear, x: Any, cache: Any) -> None:
    """Raise unless x is (batch, n, width of the projection), and cache is a `Cache` or None."""
    check_plain(x=x)
    check_dtype(projection.weight, x=x)
    check_width(projection.in_features, x)
    if x.dim() != 3:
        raise ArgumentError(f"x must be (batch, n, {projection.in_features}), not {tuple(x.shape)}")
    if cache is not None and not isinstance(cache, Cache):
        raise DtypeError(f"cache must be a qkv.nn.Cache, not {type(cache).__name__}")


def add_causal(mask: Any, is_causal: bool, past: int) -> Any:
    """Return the mask, combined with a causal one for queries after `past` cached rows."""
    if not is_causal:
        return mask
    causal = masks.causal(offset=past) if past else masks.causal
    return causal if mask is None else causal & mask
