"""`register`: an attention implementation for transformers that calls `attend`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from qkv import masks, scores, weightings
from qkv.attention import attend, weights
from qkv.errors import ArgumentError, CombinationError, ShapeError
from qkv.frameworks import load_framework
from qkv.scores import ScaledDot, Score, ScoreLike
from qkv.transformers import models
from qkv.util.caches import memoize
from qkv.weightings import Softmax, Weighting, WeightingLike

CAPTURE_NAME = "qkv-capture"
RESERVED_WORDS = ("eager", "sdpa", "flash", "flex_attention", "paged", CAPTURE_NAME)

UNSUPPORTED_ARGUMENTS = frozenset({"block_indices", "cache"})
"""Arguments that change what attention computes, and that qkv does not support."""

OBSERVERS: ContextVar[tuple[Callable[[Any, AttentionCall], None], ...]] = ContextVar(
    "qkv.transformers.observers", default=()
)
"""Functions that get every attention call of a recording implementation in this thread."""

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def register(
    name: str = "qkv",
    *,
    score: ScoreLike | None = None,
    weighting: WeightingLike = "softmax",
) -> str:
    """Register `attn_implementation=name`, which computes Σᵢ α(q, kᵢ) vᵢ with `qkv.attend`.

    It works for every model that uses transformers' AttentionInterface. Building a model that
    computes attention by itself raises an error.

    Scaling, softcap, position bias, sinks, masks, windows, grouped heads and dropout of the model
    have the same effect as in "eager". `score` replaces the model's score, including its scaling
    and softcap; `weighting` replaces the softmax. Returns the name.

    A query whose keys are all masked out gives 0, as in "sdpa". If the model masks by adding the
    lowest float, such a query gives the mean of the values, as in "eager" and "sdpa".

    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(
    ...     vocab_size=9,
    ...     hidden_size=8,
    ...     intermediate_size=8,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> config._attn_implementation = register("qkv-entmax", weighting="entmax15")
    >>> LlamaModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ArgumentError(f"name may contain only letters, digits, -, _ and ., not {name!r}")
    if any(word in name for word in RESERVED_WORDS):
        raise ArgumentError(
            f"name {name!r} contains a reserved word: choose one without "
            + ", ".join(RESERVED_WORDS)
        )
    implementation = AttentionImplementation(
        None if score is None else scores.resolve(score), weightings.resolve(weighting)
    )
    register_implementation(name, implementation)
    register_implementation(f"{CAPTURE_NAME}-{name}", replace(implementation, records=True))
    return name


def register_implementation(name: str, implementation: AttentionImplementation) -> None:
    """Register an implementation of attention, and its masks, under a name."""
    # The first call imports modules, which torch.compile cannot trace: make it here.
    x, mask = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    attend(x, x, x, score=ScaledDot(1.0), mask=masks.causal & mask)
    models.allow_implementation(name)
    AttentionInterface.register(name, implementation)
    AttentionMaskInterface.register(name, models.make_mask)


@dataclass(frozen=True)
class AttentionImplementation:
    """Σᵢ α(q, kᵢ) vᵢ with the signature of transformers' attention functions.

    query (batch, heads, n, d), key and value (batch, kv_heads, m, …) → (batch, n, heads, d_v),
    and α (batch, heads, n, m) if `output_attentions`. `records` passes each call to `OBSERVERS`.
    """

    score: Score | None = None
    weighting: Weighting = field(default_factory=Softmax)
    records: bool = False

    def __call__(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: Any = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        position_bias: Any = None,
        output_attentions: bool | None = None,
        indices: Any = None,
        **unused: Any,
    ) -> tuple[Any, Any]:
        if output_attentions is None:
            output_attentions = _wants_weights(module)
        if s_aux is not None and (self.weighting.is_sparse or not self.weighting.has_lse):
            raise CombinationError(
                f"{type(module).__name__} has attention sinks, which need a softmax: weighting "
                f"{self.weighting!r} does not support them"
            )
        if not UNSUPPORTED_ARGUMENTS.isdisjoint(unused):
            _refuse_unsupported(module, unused)
        mask = None
        if attention_mask is None:
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            # Several queries are then the first positions; a single query is the last.
            mask = masks.causal if query.shape[-2] > 1 and is_causal else None
        elif not getattr(attention_mask, "is_full", False):
            span = getattr(attention_mask, "span", None)
            needs_all_keys = output_attentions or self.records or position_bias is not None
            if span is None or sum(span) > key.shape[-2] or needs_all_keys or indices is not None:
                mask = _prepare_mask(attention_mask, key, self.weighting)
            else:
                key, value = key.narrow(-2, *span), value.narrow(-2, *span)
        if indices is not None:
            mask = _restrict_to_keys(indices, mask, key)
        score = self.score
        if score is None:
            # The cache must not keep a learned scale alive, and dynamo ignores lru_cache.
            fresh = isinstance(scaling, torch.Tensor) or torch.compiler.is_compiling()
            score = (ScaledDot if fresh else _scaled_dot)(scaling, softcap)
        casts = _is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type)
        if position_bias is s_aux is None and not (output_attentions or self.records or casts):
            out = attend(query, key, value, score=score, weighting=self.weighting, mask=mask,
                         dropout_p=float(dropout))  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
        call = AttentionCall(query, key, value, score, self.weighting, mask, position_bias, s_aux)
        options = module, float(dropout), bool(output_attentions)
        if not casts:
            return self.compute_output(call, *options)
        # Norms that run in float32 leave arrays of different dtypes. Inside, sums stay in float32.
        fw = load_framework("torch")
        query, key, value = map(fw.apply_autocast, (query, key, value))
        with fw.use_own_settings():
            return self.compute_output(call._replace(query=query, key=key, value=value), *options)

    def compute_output(
        self, call: AttentionCall, module: Any, dropout: float, wants_weights: bool
    ) -> tuple[Any, Any]:
        """Return the output (batch, n, heads, d_v) and, if wanted, α; notify the observers."""
        out, alpha = call.compute_output(dropout, wants_weights)
        if self.records:
            _notify_observers(module, call)
        return out.transpose(1, 2).contiguous(), alpha


def _wants_weights(module: Any) -> bool:
    """Return whether weights are wanted, for a call without `output_attentions`."""
    # Outside a compiled model the collector is a ContextVar, which dynamo cannot read.
    known = _active_collector.compiling or not torch.compiler.is_compiling()
    collected = _active_collector.get() if known else None
    if collected is not None:
        return any("attentions" in key for key in collected)
    return _config_wants_weights(module.config)


def _refuse_unsupported(module: Any, arguments: dict[str, Any]) -> None:
    for name in sorted(UNSUPPORTED_ARGUMENTS):
        if arguments.get(name) is not None:
            raise ArgumentError(
                f"{type(module).__name__} passes {name} to its attention, which qkv does not "
                'support: use attn_implementation="eager"'
            )


def _config_wants_weights(config: Any) -> bool:
    """Return `config.output_attentions`, without the config's slow attribute lookup."""
    if torch.compiler.is_compiling():
        return bool(getattr(config, "output_attentions", False))
    value = object.__getattribute__(config, "__dict__").get("_output_attentions")
    return bool(getattr(config, "output_attentions", False) if value is None else value)


@memoize("transformers.scaled_dot_scores", max_entries=64)
def _scaled_dot(scaling: float | None, softcap: float | None) -> Score:
    """Return a model's own score; the same object for every token."""
    return ScaledDot(scaling, softcap)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _notify_observers(module: Any, call: AttentionCall) -> None:
    for observe in OBSERVERS.get():
        observe(module, call)


def _prepare_mask(mask: Any, key: Any, weighting: Weighting) -> Any:
    """Crop the mask to the keys, and replace the lowest float by −∞.

    transformers masks with the lowest float. A row that contains only this float is not changed:
    all its keys get equal weights, as in eager and sdpa.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        shape = getattr(mask, "shape", None)
        raise ShapeError(
            f"attention_mask must be a tensor (batch, heads, n, m), not {type(mask).__name__}"
            + (f" of shape {tuple(shape)}" if shape is not None else "")
        )
    if mask.shape[-1] > key.shape[-2]:
        mask = mask[..., : key.shape[-2]]
    if not mask.is_floating_point():
        return mask
    visible = mask > torch.finfo(mask.dtype).min / 2
    if weighting.needs_nonnegative and not (mask * visible).any():
        return visible
    return mask.masked_fill(~visible & visible.any(-1, keepdim=True), -math.inf)


def _restrict_to_keys(indices: Any, mask: Any, key: Any) -> Any:
    """Restrict the mask to the keys (batch, n, k) that a model has selected for each query."""
    shape = (indices.shape[0], 1, indices.shape[1], key.shape[-2])
    selected = torch.zeros(shape, dtype=torch.bool, device=key.device)
    selected.scatter_(-1, indices[:, None].long(), True)
    if mask is None or mask is masks.causal:
        return selected if mask is None else selected.tril()
    return selected & mask if mask.dtype == torch.bool else mask.masked_fill(~selected, -math.inf)


class AttentionCall(NamedTuple):
    """The inputs of one layer's attention. `mask` is `masks.causal`, a tensor or None."""

    query: Any
    key: Any
    value: Any
    score: Score
    weighting: Weighting
    mask: Any
    bias: Any
    sinks: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, n, _ = self.query.shape
        return batch, heads, n, self.key.shape[-2]

    def compute_output(self, dropout: float, wants_weights: bool) -> tuple[Any, Any]:
        """Return the output and, if wanted, α."""
        result = attend(
            self.query,
            self.key,
            self.value,
            score=self.score,
            weighting=self.weighting,
            mask=_combine_mask_and_bias(self.mask, self.bias),
            dropout_p=dropout,
            return_lse=self.sinks is not None,
            return_weights=wants_weights,
        )
        if self.sinks is None:
            return result if wants_weights else (result, None)
        out, lse, *alpha = result
        share = self.sink_share(lse)
        return out * share, alpha[0] * share if alpha else None

    def sink_share(self, lse: Any) -> Any:
        """Return the share of the weight that is not the sink's: Σ exp(s) / (Σ exp(s) + exp(sink)).

        `lse` is log Σ exp(s), the log-sum-exp of the scores.
        """
        share = torch.sigmoid(lse[..., None] - self.sinks.reshape(1, -1, 1, 1))
        return share.to(self.query.dtype)

    def compute_weights(self, start: int, stop: int) -> Any:
        """Return α of the queries from start to stop, (batch, heads, stop − start, m)."""
        query = self.query[..., start:stop, :]
        mask = _combine_mask_and_bias(
            *(_slice_rows(x, start, stop) for x in (self.mask, self.bias))
        )
        options: dict[str, Any] = {"score": self.score, "weighting": self.weighting, "mask": mask}
        if self.sinks is None:
            return weights(query, self.key, **options)
        _, lse, alpha = attend(
            query, self.key, self.value, **options, return_lse=True, return_weights=True
        )
        return alpha * self.sink_share(lse)


def _combine_mask_and_bias(mask: Any, bias: Any) -> Any:
    return mask if bias is None else bias if mask is None else masks.array(mask) & bias


def _slice_rows(mask: Any, start: int, stop: int) -> Any:
    """Return the part of a mask or bias for the queries from start to stop."""
    if mask is masks.causal:
        return masks.causal(offset=start)
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
