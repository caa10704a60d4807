"""`MultiHeadAttention`: torch's layer with any score, weighting and mask."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as OutputLinear

from qkv import masks, scores, weightings
from qkv.attention import projected_attention
from qkv.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    validate_fraction,
    validate_optional_sizes,
    validate_sizes,
)
from qkv.frameworks import load_framework, tree
from qkv.masks import MaskLike
from qkv.nn.attention import attend_with_weights, describe_scoring
from qkv.nn.cache import Cache
from qkv.nn.rotary import Rotary, resolve_rotary
from qkv.nn.scores import LayerScore, empty_parameter, has_hooks, resolve_score
from qkv.nn.tensors import called_as, check_dtype, check_tensors
from qkv.nn.weightings import resolve_weighting
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import WeightingLike

TORCH, FUSED_LAYER = load_framework("torch"), projected_attention("torch")


def _build_signatures(*records: Any) -> list[Any]:
    return [tree.record_signature(TORCH, x) for x in records]


TORCH_SIGNATURES = _build_signatures(scores.resolve("scaled_dot"), weightings.resolve("softmax"))
"""Signatures of the score and the weighting of torch's own layer."""


@suggest_keywords
class MultiHeadAttention(nn.MultiheadAttention):
    """MultiHead(Q, K, V) = [S⁽¹⁾ … S⁽ʰ⁾] W_O, S⁽ⁱ⁾ = Attention(Q W_Q⁽ⁱ⁾, K W_K⁽ⁱ⁾, V W_V⁽ⁱ⁾).

    A drop-in for `torch.nn.MultiheadAttention`: the arguments, outputs, parameters and initial
    values are the same, and state dicts load in both directions. It adds these options:

    - `score` and `weighting`, by name or as objects, shared by all heads. A learned score can be
      given by its name ("additive") or class. The layer owns an `nn.Parameter` that a weighting
      holds, such as `Entmax(alpha)` with one alpha for each head.
    - `num_kv_heads`: fewer heads for keys and values, each shared by a group of query heads.
    - `rotary`: True or a `Rotary`, for rotary position embeddings.
    - In `forward`, `mask` is a mask of `qkv.masks` (True: may attend), combined with torch's two
      masks (True: may not attend). `cache` is a `Cache` of earlier keys and values.

    Two things differ from torch. A query whose keys are all masked out gives 0, not NaN. And
    `is_causal` does not need an `attn_mask`; if both are given it is a hint, as in torch.

    >>> layer = MultiHeadAttention(8, num_heads=2, batch_first=True)
    >>> x = torch.zeros(1, 5, 8)
    >>> out, weights = layer(x, x, x, is_causal=True)
    >>> out.shape, weights.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 5, 5]))
    """

    _qkv_same_embed_dim: bool
    in_proj_weight: Any
    in_proj_bias: Any
    bias_k: Any
    bias_v: Any

    def __prepare_scriptable__(self) -> nn.MultiheadAttention:
        """Return what torch.jit.script compiles: torch's own layer, if it computes the same."""
        same = type(self) is MultiHeadAttention and self._has_torch_score()
        return self._as_torch_layer() if same else reject_torchscript(self)  # type: ignore[no-any-return]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        score: LayerScore = "scaled_dot",
        weighting: WeightingLike = "softmax",
        num_kv_heads: int | None = None,
        rotary: bool | Rotary = False,
    ) -> None:
        validate_sizes(embed_dim=embed_dim, num_heads=num_heads)
        validate_optional_sizes(kdim=kdim, vdim=vdim)
        if embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim must be a multiple of num_heads, not {embed_dim} with {num_heads} heads"
            )
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        validate_sizes(num_kv_heads=kv_heads)
        if num_heads % kv_heads:
            raise ArgumentError(
                f"num_kv_heads must divide num_heads, but {kv_heads} does not divide {num_heads}"
            )
        dropout = validate_fraction("dropout", dropout)
        # First: its random initial values must equal those of torch's own layer.
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.num_kv_heads = kv_heads
        self._extra_keys = int(add_bias_kv) + int(add_zero_attn)
        widths = (self.head_dim, self.head_dim)
        self.score = resolve_score(score, widths, device=device, dtype=dtype)
        self.weighting = resolve_weighting(weighting)
        self.rotary = resolve_rotary(rotary, self.head_dim)
        self.is_packed = self._qkv_same_embed_dim
        # torch.nn.TransformerEncoderLayer runs a fused kernel on layers with this attribute.
        self._qkv_same_embed_dim = self._is_torch_equivalent()
        if kv_heads != num_heads:
            self._shrink_kv_parameters(device, dtype)

    def _is_torch_equivalent(self) -> bool:
        """Return whether torch's fused kernel for a whole layer computes the same."""
        return self.is_packed and not self._extra_keys and self._has_torch_score()

    def _has_torch_score(self) -> bool:
        """Return whether score, weighting and heads are those of torch's own layer."""
        if self.num_kv_heads != self.num_heads or self.rotary is not None:
            return False
        try:
            return _build_signatures(self.score, self.weighting) == TORCH_SIGNATURES
        except tree.UncacheableError:  # a learned score, or a function
            return False

    def _as_torch_layer(self) -> nn.MultiheadAttention:
        """Return torch's own layer with the parameters, hooks and mode of this one."""
        kind = MultiHeadAttention.__base__  # torch's class, even if its name was rebound since
        assert kind is not None
        layer: nn.MultiheadAttention = kind.__new__(kind)
        own = ("score", "weighting", "rotary", "num_kv_heads", "is_packed", "_extra_keys")
        vars(layer).update({name: x for name, x in vars(self).items() if name not in own})
        modules = {name: x for name, x in self._modules.items() if name not in own}
        vars(layer).update(_modules=modules, _qkv_same_embed_dim=self.is_packed)
        return layer

    def _shrink_kv_parameters(self, device: Any, dtype: Any) -> None:
        """Replace the key and value parameters by smaller ones, for `num_kv_heads` heads."""
        names = {"k_proj_weight": self.kdim, "v_proj_weight": self.vdim}
        if self.is_packed:
            names = {"in_proj_weight": self.embed_dim}
        for name, width in names.items():
            rows = self.kv_dim + (self.embed_dim + self.kv_dim if self.is_packed else 0)
            setattr(self, name, empty_parameter((rows, width), device, dtype))
        if self.in_proj_bias is not None:
            self.in_proj_bias = empty_parameter((self.embed_dim + 2 * self.kv_dim,), device, dtype)
        if self.bias_k is not None:
            self.bias_k = empty_parameter((1, 1, self.kv_dim), device, dtype)
            self.bias_v = empty_parameter((1, 1, self.kv_dim), device, dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        # torch reads this attribute to choose packed weights; here it means torch-equivalent.
        is_equivalent = self._qkv_same_embed_dim
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = is_equivalent

    @property
    def kv_dim(self) -> int:
        """The width of a projected key, over all its heads."""
        return int(self.num_kv_heads * self.head_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: MaskLike | None = None,
        cache: Cache | None = None,
        **wrong: Never,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the weights α.

        query is (L, N, embed_dim), (N, L, embed_dim) if `batch_first`, or (L, embed_dim). α is
        (N, L, S), the mean over the heads; (N, heads, L, S) without `average_attn_weights`; None
        without `need_weights`.

        With a `cache`, keys and values are appended to it, and the query attends to all rows of
        the cache. Pass None for both to append nothing. Masks then cover all keys.
        """
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(query=query)
        weights = None if not need_weights else ("mean" if average_attn_weights else "heads")
        if query is key is value and not is_causal and mask is None is cache:
            fused = self._run_fused(query, key_padding_mask, attn_mask, weights)
            if fused is not None:
                return fused
        if query.is_nested:
            dense = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "cache": cache}
            flags = (need_weights, average_attn_weights, is_causal)
            return self._forward_nested(query, key, value, flags, mask, dense)
        self._check_inputs(query, key, value, cache)
        batched = query.dim() == 3
        q, k, v = self._project_inputs(query, key, value)
        past = 0 if cache is None else len(cache)
        if self.rotary is not None:
            q, k = (x if x is None else self.rotary(x, past) for x in (q, k))
        shape = (q.shape[0], q.shape[-2], past + (0 if k is None else k.shape[-2]))
        # With is_causal, torch reads attn_mask only in these two cases.
        reads_mask = need_weights or key_padding_mask is not None
        mask = self._combine_masks(
            key_padding_mask,
            attn_mask,
            is_causal,
            mask,
            shape,
            0 if k is None else past,
            batched,
            reads_mask,
            q.device,
        )
        if cache is not None:
            k, v = cache.get_rows(self) if k is None else cache.append(self, k, v)
        k, v = self._append_extra_keys(k, v)
        dropout = self.dropout if self.training else 0.0
        out, alpha = attend_with_weights(
            q, k, v, self.score, self.weighting, mask, dropout, weights
        )
        out = self.out_proj(self._merge_heads(out, batched))
        return out, alpha if alpha is None or batched else alpha[0]

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def _run_fused(
        self, x: Tensor, padding: Tensor | None, attn_mask: Tensor | None, weights: str | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run torch's fused kernel for the whole layer; None if it does not apply."""
        if torch.is_grad_enabled() or TORCH.is_traced(x):
            return None
        if not self.batch_first or (self.training and self.dropout):
            return None
        last = self._modules["out_proj"]  # a hook on it, or a replacement of it, must be called
        if type(last) is not OutputLinear or has_hooks(last):
            return None
        if not (padding is None or attn_mask is None) or not self._is_torch_equivalent():
            return None
        if not torch.backends.mha.get_fastpath_enabled():
            return None
        # Ten times faster than attributes. A parametrized one is not there: then None is returned.
        own, output = self._parameters.get, last._parameters.get
        parameters = own("in_proj_weight"), own("in_proj_bias"), output("weight"), output("bias")
        mask = padding if attn_mask is None else attn_mask
        return FUSED_LAYER(x, self.num_heads, parameters, mask, attn_mask is None, weights)

    def _project_inputs(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return Q, K and V (N, heads, L, head_dim), with one matrix product per distinct input."""
        heads, widths = self.num_kv_heads, [self.embed_dim, self.kv_dim, self.kv_dim]
        bias = self.in_proj_bias
        if self.is_packed and query is key and key is value:
            all_heads = self.num_heads + 2 * heads
            packed = self._split_heads(linear(query, self.in_proj_weight, bias), all_heads)
            return tuple(packed.split_with_sizes((self.num_heads, heads, heads), 1))
        biases = (None, None, None) if bias is None else bias.split(widths)
        if self.is_packed:
            parts = self.in_proj_weight.split(widths)
        else:
            parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        q = self._split_heads(linear(query, parts[0], biases[0]), self.num_heads)
        if key is None:
            return q, None, None
        if self.is_packed and key is value:
            kv_bias = None if bias is None else bias[self.embed_dim :]
            both = self._split_heads(
                linear(key, self.in_proj_weight[self.embed_dim :], kv_bias), 2 * heads
            )
            return q, *both.split_with_sizes((heads, heads), 1)
        k, v = linear(key, parts[1], biases[1]), linear(value, parts[2], biases[2])
        return q, self._split_heads(k, heads), self._split_heads(v, heads)

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return a view of (L, N, ·), (N, L, ·) or (L, ·) as (N, heads, L, head_dim)."""
        x = x.view(*x.shape[:-1], heads, self.head_dim)
        if x.dim() == 3:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        if not batched:
            return out[0].transpose(0, 1).flatten(-2)
        out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return out.flatten(-2)

    def _append_extra_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned key and value of `add_bias_kv`, then the zeros of `add_zero_attn`."""
        if not self._extra_keys:
            return key, value
        if self.bias_k is not None:
            shape = (1, self.num_kv_heads, 1, self.head_dim)
            more = (x.reshape(shape).expand(key.shape[0], *shape[1:]).to(key.dtype)
                    for x in (self.bias_k, self.bias_v))  # fmt: skip
            key, value = (torch.cat(x, -2) for x in zip((key, value), more, strict=True))
        if self.add_zero_attn:
            key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
        return key, value

    def _combine_masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        mask: Any,
        shape: tuple[int, int, int],
        past: int,
        batched: bool,
        reads_mask: bool,
        device: torch.device,
    ) -> Any:
        """Combine torch's masks and `mask`; every query may attend to the layer's extra keys."""
        batch, n, m = shape
        if mask is not None and self._extra_keys:
            if isinstance(mask, torch.Tensor):  # a float mask adds 0 to the extra keys
                seen = float(mask.dtype == torch.bool)
                mask = pad(mask.expand(*mask.shape[:-1], m), (0, self._extra_keys), value=seen)
            else:
                mask = masks.array(mask) | self._extra_keys_mask(m)
        parts = [] if mask is None else [mask]
        if key_padding_mask is not None:
            wanted = (batch, m) if batched else (m,)
            _check_mask("key_padding_mask", key_padding_mask, [wanted], device)
            parts.append(self._convert_torch_mask(key_padding_mask.reshape(batch, 1, 1, m)))
        if attn_mask is not None:
            shapes = [(n, m), (batch * self.num_heads, n, m)]
            _check_mask("attn_mask", attn_mask, shapes, device)
        if is_causal and (attn_mask is None or not reads_mask):
            if n != 1 or past + n < m:  # a single last query sees every key anyway
                part = masks.causal(offset=past) if past else masks.causal
                parts.append(part | self._extra_keys_mask(m) if self._extra_keys else part)
        elif attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.reshape(batch, self.num_heads, n, m)
            parts.append(self._convert_torch_mask(attn_mask))
        return _intersect_masks(parts)

    def _convert_torch_mask(self, mask: Tensor) -> Tensor:
        """Convert a mask from torch's meaning (True: masked out) to qkv's (True: may attend)."""
        mask = pad(mask, (0, self._extra_keys)) if self._extra_keys else mask
        return mask.logical_not() if mask.dtype == torch.bool else mask

    def _extra_keys_mask(self, m: int) -> Any:
        device = next(self.parameters()).device
        return torch.arange(m + self._extra_keys, device=device)[None] >= m

    def _check_inputs(self, query: Any, key: Any, value: Any, cache: Any) -> None:
        inputs = {"query": query, "key": key, "value": value}  # query is checked already
        if cache is not None and not isinstance(cache, Cache):
            raise DtypeError(f"cache must be a qkv.nn.Cache, not {type(cache).__name__}")
        is_self = self.is_packed and query is key is value
        if is_self or (key is None and value is None and cache is not None and len(cache)):
            inputs = {"query": query}
        elif key is None or value is None:
            raise ArgumentError(
                "key and value may be None only with a cache that already holds rows"
            )
        else:
            check_tensors(key=key, value=value)
            if key.is_nested or value.is_nested:
                raise ArgumentError("key and value are nested and query is not: nest the query too")
        check_dtype(getattr(self.out_proj, "weight", None), **inputs)
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for name, x in inputs.items():
            if x.dim() != query.dim() or x.dim() not in (2, 3) or x.shape[-1] != widths[name]:
                same = "" if name == "query" else ", like the query"
                raise ShapeError(
                    f"{name} must be (length, {widths[name]}), or with a batch "
                    f"{'(N, length, ' if self.batch_first else '(length, N, '}{widths[name]})"
                    f"{same}, not {tuple(x.shape)}"
                )
        if len(inputs) > 1 and key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"key and value must have the same number of rows, not {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )
        axis = 0 if self.batch_first else 1
        if len(inputs) > 1 and query.dim() == 3 and query.shape[axis] != key.shape[axis]:
            raise ShapeError(
                f"query and key must have the same batch size, not {tuple(query.shape)} and "
                f"{tuple(key.shape)}: axis {axis} is the batch, because batch_first is "
                f"{self.batch_first}"
            )

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        flags: tuple[bool, bool, bool],
        mask: Any,
        dense: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Run each sequence of nested tensors (N, ·, embed_dim) separately.

        `flags` are need_weights, average_attn_weights and is_causal. `dense` are the arguments that
        a nested query does not support; each must be None.
        """
        if not self.batch_first or key is None or value is None:
            raise ArgumentError("a nested query needs batch_first=True, and a nested key and value")
        if isinstance(mask, torch.Tensor):
            dense = {"mask": mask, **dense}
        for name, x in dense.items():
            if x is not None:
                raise ArgumentError(
                    f"{name} cannot be used with a nested query, because its sequences differ in "
                    "length: pass a mask of qkv.masks or is_causal, or call once per sequence"
                )
        check_tensors(key=key, value=value)
        parts = {"query": query.unbind(), "key": key.unbind(), "value": value.unbind()}
        for name, x in parts.items():
            if len(x) != len(parts["query"]):
                raise ShapeError(f"query holds {len(parts['query'])} sequences and {name} {len(x)}")
        need_weights, average, is_causal = flags
        arguments = (None, need_weights, None, average, is_causal)
        out, alpha = zip(
            *(
                self.forward(q, k, v, *arguments, mask=mask)
                for q, k, v in zip(*parts.values(), strict=True)
            ),
            strict=True,
        )
        nested = TORCH.pack_nested(list(out), query)
        if not need_weights:
            return nested, None
        n, m = (max(x.shape[axis] for x in alpha) for axis in (-2, -1))
        padded = (pad(x, (0, m - x.shape[-1], 0, n - x.shape[-2])) for x in alpha)
        return nested, torch.stack(list(padded))

    def extra_repr(self) -> str:
        heads = f"{self.embed_dim}, num_heads={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        return f"{heads}, {describe_scoring(self)}"


def _intersect_masks(parts: list[Any]) -> Any:
    """Combine masks with "and"; boolean tensors give a tensor."""
    if len(parts) < 2:
        return parts[0] if parts else None
    if all(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in parts):
        return reduce(torch.logical_and, parts)
    return reduce(and_, map(masks.array, parts))


def _check_mask(name: str, mask: Any, shapes: list[tuple[int, ...]], device: torch.device) -> None:
    if isinstance(mask, masks.Mask | str):
        raise DtypeError(f"{name} takes a tensor, not a mask of qkv.masks: pass it as mask=")
    check_tensors(**{name: mask})
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(
            f"{name} must be a tensor of booleans (True: masked out) or floats (added), not "
            f"{mask.dtype}"
        )
    if tuple(TORCH.as_plain_array(mask, name).shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ShapeError(f"{name} must have shape {expected}, not {tuple(mask.shape)}")
    if mask.device != device:
        raise ArgumentError(
            f"query is on {device} but {name} is on {mask.device}: pass {name}.to(query.device)"
        )
