"""Transformer blocks, stacks of them, and the encoder-decoder model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Never, TypedDict, Unpack

from torch import Tensor, nn

from qkv.errors import ArgumentError, validate_sizes
from qkv.masks import MaskLike
from qkv.nn.cache import Cache
from qkv.nn.feedforward import FeedForward, run_feedforward
from qkv.nn.heads import MultiHeadAttention
from qkv.nn.rotary import Rotary
from qkv.nn.scores import LayerScore, copy_options
from qkv.nn.tensors import called_as, check_dtype, check_tensors
from qkv.util.keyword_hints import (
    reject_call_keywords,
    reject_init_keywords,
    reject_torchscript,
)
from qkv.weightings import WeightingLike

Caches = list[tuple[Cache, Cache]]
"""For each block, the caches of its self-attention and of its cross-attention."""


class HeadOptions(TypedDict, total=False):
    """Options that a block passes to its attention layers."""

    score: LayerScore
    weighting: WeightingLike
    num_kv_heads: int | None
    rotary: bool | Rotary


class BlockOptions(HeadOptions, total=False):
    """Options that a stack passes to its blocks."""

    dim_feedforward: int
    dropout: float
    activation: Any
    layer_norm_eps: float
    norm_first: bool
    bias: bool
    device: Any
    dtype: Any


class TransformerBlock(nn.Module):
    """x ← N(x + f(x)) for each sublayer f in turn; x ← x + f(N(x)) if `norm_first`.

    The sublayers are self-attention, attention to a memory if `cross`, and the feed-forward
    network. x and memory are (B, n, d_model) or (n, d_model). `heads` are options of
    `MultiHeadAttention`: score, weighting, num_kv_heads and rotary (self-attention only). The two
    attention layers do not share the parameters of a learned score.

    State dicts are interchangeable with those of `torch.nn.TransformerEncoderLayer`, or with
    `cross` of `torch.nn.TransformerDecoderLayer`.

    >>> import torch
    >>> block = TransformerBlock(8, 2, dim_feedforward=16, weighting="entmax15")
    >>> block(torch.zeros(1, 5, 8), is_causal=True).shape
    torch.Size([1, 5, 8])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        cross: bool = False,
        **heads: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        reject_init_keywords(self, heads, HeadOptions.__optional_keys__)
        placement = {"device": device, "dtype": dtype}
        common = {"dropout": dropout, "bias": bias, "batch_first": True, **placement}
        self.norm_first, self.cross = norm_first, cross
        self.self_attn = MultiHeadAttention(d_model, nhead, **common, **heads)
        if cross:
            options = copy_options({name: x for name, x in heads.items() if name != "rotary"})
            self.multihead_attn = MultiHeadAttention(d_model, nhead, **common, **options)
        network = FeedForward(d_model, dim_feedforward, activation, dropout, bias, **placement)
        self.activation = network.activation
        self.linear1, self.dropout, self.linear2 = network.linear1, network.dropout, network.linear2
        for i in range(1, 4 if cross else 3):
            norm = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **placement)
            setattr(self, f"norm{i}", norm)
            setattr(self, f"dropout{i}", nn.Dropout(dropout))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: MaskLike | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        memory_mask: MaskLike | None = None,
        memory_key_padding_mask: Tensor | None = None,
        cache: tuple[Cache, Cache] | None = None,
        **wrong: Never,
    ) -> Tensor:
        """Return x after all sublayers, with the shape of x.

        `mask` and `memory_mask` are those of `qkv.attend`; the two padding masks are True at
        padding. `cache` holds the keys of earlier calls and, after the first call, of the memory.
        """
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(x=x, memory=x if memory is None else memory)
        check_dtype(getattr(self.self_attn.out_proj, "weight", None), x=x, memory=memory)
        self_cache, memory_cache = cache or (None, None)
        if (memory is not None) != self.cross and not (self.cross and memory_cache):
            raise ArgumentError(
                "memory is missing: pass it, or build the block with cross=False"
                if self.cross
                else "memory: this block has no cross-attention: build it with cross=True"
            )

        def attend_to_self(x: Tensor) -> Tensor:
            return self.self_attn(
                x, x, x, key_padding_mask, False, is_causal=is_causal, mask=mask, cache=self_cache
            )[0]

        def attend_to_memory(x: Tensor) -> Tensor:
            new_rows = None if memory_cache else memory
            return self.multihead_attn(
                x,
                new_rows,
                new_rows,
                memory_key_padding_mask,
                False,
                mask=memory_mask,
                cache=memory_cache,
            )[0]

        steps: list[Callable[[Tensor], Tensor]] = (
            [attend_to_self, attend_to_memory] if self.cross else [attend_to_self]
        )
        steps.append(partial(run_feedforward, self))
        for i, step in enumerate(steps, 1):
            norm, dropout = getattr(self, f"norm{i}"), getattr(self, f"dropout{i}")
            x = x + dropout(step(norm(x))) if self.norm_first else norm(x + dropout(step(x)))
        return x

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class _BlockStack(nn.Module):
    """A sequence of `num_layers` blocks, with a final norm if `norm`."""

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self, num_layers: int, d_model: int, nhead: int, norm: bool, cross: bool, block: Any
    ) -> None:
        super().__init__()
        reject_init_keywords(self, block, BlockOptions.__optional_keys__)
        validate_sizes(num_layers=num_layers)
        self.layers = nn.ModuleList()
        for i in range(num_layers):
            options = block if i == 0 else copy_options(block)
            self.layers.append(TransformerBlock(d_model, nhead, cross=cross, **options))
        norm_options = {name: block[name] for name in ("bias", "device", "dtype") if name in block}
        eps = block.get("layer_norm_eps", 1e-5)
        self.norm = nn.LayerNorm(d_model, eps=eps, **norm_options) if norm else None

    def _run_layers(
        self, x: Tensor, *memory: Tensor | None, cache: Any = None, **options: Any
    ) -> Tensor:
        if cache is not None and len(cache) != len(self.layers):
            raise ArgumentError(
                f"cache is for {len(cache)} layers and the model has {len(self.layers)}: create "
                "it with model.cache()"
            )
        for i, layer in enumerate(self.layers):
            x = layer(x, *memory, cache=None if cache is None else cache[i], **options)
        return x if self.norm is None else self.norm(x)

    def cache(self) -> Caches:
        """Return empty caches, one pair for each block, to decode one batch token by token."""
        return [(Cache(), Cache()) for _ in self.layers]


class TransformerEncoder(_BlockStack):
    """Blocks of self-attention and feed-forward: x (B, n, d_model) → (B, n, d_model).

    `block` are further arguments of `TransformerBlock`.

    >>> import torch
    >>> TransformerEncoder(2, 8, 2, dim_feedforward=16)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        nhead: int,
        *,
        norm: bool = False,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__(num_layers, d_model, nhead, norm, False, block)

    def forward(
        self,
        x: Tensor,
        *,
        mask: MaskLike | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        **wrong: Never,
    ) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        return self._run_layers(
            x, mask=mask, key_padding_mask=key_padding_mask, is_causal=is_causal
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class TransformerDecoder(_BlockStack):
    """Blocks of causal self-attention, attention to a memory if `cross`, and feed-forward.

    x (B, n, d_model), memory (B, m, d_model) → (B, n, d_model). With `cross=False` it is the
    decoder of a language model. With a `cache`, x holds only the positions that follow the cached
    ones. `block` are further arguments of `TransformerBlock`.

    >>> import torch
    >>> decoder = TransformerDecoder(2, 8, 2, dim_feedforward=16, cross=False, rotary=True)
    >>> decoder(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        nhead: int,
        *,
        norm: bool = False,
        cross: bool = True,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__(num_layers, d_model, nhead, norm, cross, block)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: MaskLike | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = True,
        memory_mask: MaskLike | None = None,
        memory_key_padding_mask: Tensor | None = None,
        cache: Caches | None = None,
        **wrong: Never,
    ) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        return self._run_layers(
            x,
            memory,
            mask=mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            memory_mask=memory_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            cache=cache,
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class Transformer(nn.Module):
    """The encoder-decoder: decoder(target, encoder(source)), on vectors.

    source (B, m, d_model), target (B, n, d_model) → (B, n, d_model). State dicts are
    interchangeable with those of `torch.nn.Transformer`.

    >>> import torch
    >>> model = Transformer(8, 2, 1, 1, dim_feedforward=16)
    >>> model(torch.zeros(1, 5, 8), torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        reject_init_keywords(self, block, BlockOptions.__optional_keys__)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, nhead, norm=True, **block)
        block = copy_options(block)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, nhead, norm=True, **block)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_key_padding_mask: Tensor | None = None,
        target_key_padding_mask: Tensor | None = None,
        is_causal: bool = True,
        **wrong: Never,
    ) -> Tensor:
        """Return (B, n, d_model). Both padding masks are True at padding."""
        if wrong:
            reject_call_keywords(self, wrong)
        memory = self.encoder(source, key_padding_mask=source_key_padding_mask)
        return self.decoder(
            target,
            memory,
            key_padding_mask=target_key_padding_mask,
            is_causal=is_causal,
            memory_key_padding_mask=source_key_padding_mask,
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def cache(self) -> Caches:
        """Return empty caches for the decoder, to decode one batch token by token."""
        return self.decoder.cache()
