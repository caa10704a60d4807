"""`LatentAttention`: keys and values of low rank, with a rotary part of their own (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn

from qkv.errors import ArgumentError, validate_optional_sizes, validate_sizes
from qkv.masks import MaskLike
from qkv.nn.attention import attend_with_weights
from qkv.nn.cache import Cache
from qkv.nn.mixed_heads import add_causal, check_input
from qkv.nn.rotary import Rotary
from qkv.nn.tensors import called_as
from qkv.nn.weightings import resolve_weighting, weighting_name
from qkv.scores import ScaledDot
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import WeightingLike


@suggest_keywords
class LatentAttention(nn.Module):
    """Multi-head latent attention: all heads read one latent c and one rotated vector r per row.

    s(q, (c, r)) = (q_h·W_K⁽ʰ⁾c + q_r·r) / √(head_dim + rotary_dim)        v = W_V⁽ʰ⁾c

    x (batch, n, embed_dim) → the same shape. A cache holds kv_rank + rotary_dim numbers for each
    row, for all heads. The score is a `Multiplicative` one: W_K moves to the query, and all heads
    share the key (c, r) and the value c. `forward` computes it like this for few queries with a
    cache, and with the keys and values of each head for many queries. Both are equal.

    - `q_rank`: the rank of the queries, or None for one projection.
    - `value_dim`: the width of a head's values; head_dim by default.
    - `rotary`: a `Rotary` of width rotary_dim; interleaved pairs by default.
    - `scale` replaces 1/√(head_dim + rotary_dim).

    The names and shapes of the parameters are those of DeepSeek-V3 in transformers.

    >>> layer = LatentAttention(32, num_heads=4, kv_rank=8, head_dim=8, rotary_dim=4)
    >>> cache = Cache()
    >>> layer(torch.ones(1, 5, 32), is_causal=True, cache=cache).shape
    torch.Size([1, 5, 32])
    >>> cache.buffers[0].shape
    torch.Size([1, 1, 5, 12])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_rank: int = 512,
        q_rank: int | None = None,
        head_dim: int = 128,
        rotary_dim: int = 64,
        value_dim: int | None = None,
        bias: bool = False,
        weighting: WeightingLike = "softmax",
        rotary: Rotary | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        sizes = {"kv_rank": kv_rank, "head_dim": head_dim, "rotary_dim": rotary_dim}
        validate_sizes(embed_dim=embed_dim, num_heads=num_heads, **sizes)
        validate_optional_sizes(q_rank=q_rank, value_dim=value_dim)
        self.num_heads, self.kv_rank, self.q_rank = num_heads, kv_rank, q_rank
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.rotary = Rotary(rotary_dim, interleaved=True) if rotary is None else rotary
        if self.rotary.width != rotary_dim:
            raise ArgumentError(
                f"rotary has width {self.rotary.width}, but rotary_dim is {rotary_dim}"
            )
        made: Any = {"device": device, "dtype": dtype}
        query_width = num_heads * (head_dim + rotary_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(embed_dim, query_width, bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(embed_dim, q_rank, bias, **made)
            self.q_a_layernorm = nn.RMSNorm(q_rank, eps, **made)
            self.q_b_proj = nn.Linear(q_rank, query_width, bias=False, **made)
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, kv_rank + rotary_dim, bias, **made)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps, **made)
        kv_width = num_heads * (head_dim + self.value_dim)
        self.kv_b_proj = nn.Linear(kv_rank, kv_width, bias=False, **made)
        self.o_proj = nn.Linear(num_heads * self.value_dim, embed_dim, bias, **made)
        self.score = ScaledDot((head_dim + rotary_dim) ** -0.5 if scale is None else scale)
        self.weighting = resolve_weighting(weighting)

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
        absorb: bool | None = None,
        **wrong: Never,
    ) -> Tensor:
        """Return the output. With a `cache`, the latent rows are appended to it.

        `absorb` True moves W_K and W_V to the queries and the output; None chooses what takes fewer
        products.
        """
        if wrong:
            reject_call_keywords(self, wrong)
        check_input(self.kv_a_proj_with_mqa, x, cache)
        past = 0 if cache is None else len(cache)
        plain, rotated = self._project_query(x).split((self.head_dim, self.rotary_dim), -1)
        latent, key = self.kv_a_proj_with_mqa(x)[:, None].split((self.kv_rank, self.rotary_dim), -1)
        rows = torch.cat((self.kv_a_layernorm(latent), self.rotary(key, past)), -1)
        rotated = self.rotary(rotated, past)
        if cache is not None:
            rows = cache.append(self, rows, rows[..., :0])[0]
        if absorb is None:
            absorb = cache is not None and self._saves_products(x.shape[-2])
        attend_rows = self._attend_latent if absorb else self._attend_heads
        out = attend_rows(plain, rotated, rows, add_causal(mask, is_causal, past))
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return projected

    def _project_query(self, x: Tensor) -> Tensor:
        """Return the queries (batch, heads, n, head_dim + rotary_dim), not yet rotated."""
        if self.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def _saves_products(self, n: int) -> bool:
        """Return whether n queries over the latent rows take fewer products than heads of keys."""
        expanded = self.head_dim + self.value_dim
        return n * (2 * self.kv_rank - expanded) < self.kv_rank * expanded

    def _attend_heads(self, plain: Tensor, rotated: Tensor, rows: Tensor, mask: Any) -> Tensor:
        latent, shared = rows.split((self.kv_rank, self.rotary_dim), -1)
        both = self.kv_b_proj(latent[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = both.split((self.head_dim, self.value_dim), -1)
        key = torch.cat((key, shared.expand(*key.shape[:-1], -1)), -1)
        query = torch.cat((plain, rotated), -1)
        return attend_with_weights(query, key, value, self.score, self.weighting, mask)[0]

    def _attend_latent(self, plain: Tensor, rotated: Tensor, rows: Tensor, mask: Any) -> Tensor:
        matrices = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        to_key, to_value = matrices.split((self.head_dim, self.value_dim), 1)
        query = torch.cat((plain @ to_key, rotated), -1)
        value = rows[..., : self.kv_rank]
        out = attend_with_weights(query, rows, value, self.score, self.weighting, mask)[0]
        return out @ to_value.mT

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, kv_rank={self.kv_rank}, head_dim={self.head_dim}, "
            f"weighting={weighting_name(self.weighting)}"
        )
