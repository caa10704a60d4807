"""`attend` as transformers calls an attention, under a name of its own."""

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
"""Arguments by which an attention means something else."""

OBSERVERS: ContextVar[tuple[Callable[[Any, AttentionCall], None], ...]] = ContextVar(
    "qkv.transformers.watchers", default=()
)
"""Who is shown every attention that a capture's implementation computes in this thread."""

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def register(
    name: str = "qkv",
    *,
    score: ScoreLike | None = None,
    weighting: WeightingLike = "softmax",
) -> str:
    """Make `attn_implementation=name` mean Σᵢ α(q, kᵢ) vᵢ by `qkv.attend`.

    It does in every model that looks its attention up in transformers' AttentionInterface. One that
    computes it by itself is refused as it is built.

    A model's own scaling, softcap, position bias, sinks, masks, windows, grouped heads and dropout
    mean what they mean in "eager". `score` replaces the model's own, with its scaling and softcap;
    `weighting` its softmax. A query whose keys are all masked gives 0, as in "sdpa"; where a model
    masks by adding the least float, their mean, as in both.

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
        raise ArgumentError(f"name must be letters, digits and -, _ or . only, not {name!r}")
    if any(word in name for word in RESERVED_WORDS):
        raise ArgumentError(
            f"name {name!r} would be taken for transformers' own or qkv's: choose one without "
            + ", ".join(RESERVED_WORDS)
        )
    ours = Implementation(
        None if score is None else scores.resolve(score), weightings.resolve(weighting)
    )
    register_implementation(name, ours)
    register_implementation(f"{CAPTURE_NAME}-{name}", replace(ours, records=True))
    return name


def register_implementation(name: str, implementation: Implementation) -> None:
    # torch.compile cannot follow a first call, which imports and looks types up.
    x, seen = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    attend(x, x, x, score=ScaledDot(1.0), mask=masks.causal & seen)
    models.allow_implementation(name)
    AttentionInterface.register(name, implementation)
    AttentionMaskInterface.register(name, models.make_mask)


@dataclass(frozen=True)
class Implementation:
    """Σᵢ α(q, kᵢ) vᵢ as transformers calls it.

    query (batch, heads, n, d), key and value (batch, fewer heads, m, …) → (batch, n, heads, d_v),
    and α (batch, heads, n, m) if `output_attentions`.
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
        **others: Any,
    ) -> tuple[Any, Any]:
        if output_attentions is None:
            output_attentions = _wants_weights(module)
        if s_aux is not None and (self.weighting.is_sparse or not self.weighting.has_lse):
            raise CombinationError(
                f"{type(module).__name__} has attention sinks, a share of the softmax: "
                f"weighting {self.weighting!r} has no place for them"
            )
        if not UNSUPPORTED_ARGUMENTS.isdisjoint(others):
            _refuse_unsupported(module, others)
        mask = None
        if attention_mask is None:
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            # Many queries are then the first ones, and one query is the last.
            mask = masks.causal if query.shape[-2] > 1 and is_causal else None
        elif not getattr(attention_mask, "is_full", False):
            span = getattr(attention_mask, "span", None)
            whole = output_attentions or self.records or position_bias is not None
            if span is None or sum(span) > key.shape[-2] or whole or indices is not None:
                mask = _prepare_mask(attention_mask, key, self.weighting)
            else:
                key, value = key.narrow(-2, *span), value.narrow(-2, *span)
        if indices is not None:
            mask = _restrict_to_keys(indices, mask, key)
        score = self.score
        if score is None:
            # A learned scale is not to be kept alive, and dynamo passes a cache by.
            fresh = isinstance(scaling, torch.Tensor) or torch.compiler.is_compiling()
            score = (ScaledDot if fresh else _scaled_dot)(scaling, softcap)
        casts = _is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type)
        if position_bias is s_aux is None and not (output_attentions or self.records or casts):
            out = attend(query, key, value, score=score, weighting=self.weighting, mask=mask,
                         dropout_p=float(dropout))  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
        question = AttentionCall(
            query, key, value, score, self.weighting, mask, position_bias, s_aux
        )
        how = module, float(dropout), bool(output_attentions)
        if not casts:
            return self.compute_output(question, *how)
        # Norms in float32 leave some wider than others. And sums stay in float32 inside.
        fw = load_framework("torch")
        query, key, value = map(fw.apply_autocast, (query, key, value))
        with fw.compute_context():
            return self.compute_output(question._replace(query=query, key=key, value=value), *how)

    def compute_output(
        self, question: AttentionCall, module: Any, dropout: float, wants_weights: bool
    ) -> tuple[Any, Any]:
        out, alpha = question.compute_output(dropout, wants_weights)
        if self.records:
            _notify_observers(module, question)
        return out.transpose(1, 2).contiguous(), alpha


def _wants_weights(module: Any) -> bool:
    """Whether weights are wanted, where a layer is not told."""
    # Outside of a model it is a ContextVar, and dynamo reads none.
    known = _active_collector.compiling or not torch.compiler.is_compiling()
    collected = _active_collector.get() if known else None
    if collected is not None:
        return any("attentions" in key for key in collected)
    return _config_wants_weights(module.config)


def _refuse_unsupported(module: Any, others: dict[str, Any]) -> None:
    for name in sorted(UNSUPPORTED_ARGUMENTS):
        if others.get(name) is not None:
            raise ArgumentError(
                f"{type(module).__name__} leaves {name} to its attention, which qkv does not know: "
                'use attn_implementation="eager"'
            )


def _config_wants_weights(config: Any) -> bool:
    """Whether a config asks for weights, past its own look-up, which takes as long as a product."""
    if torch.compiler.is_compiling():
        return bool(getattr(config, "output_attentions", False))
    found = object.__getattribute__(config, "__dict__").get("_output_attentions")
    return bool(getattr(config, "output_attentions", False) if found is None else found)


@memoize("transformers.scaled_dot_scores", max_entries=64)
def _scaled_dot(scaling: float | None, softcap: float | None) -> Score:
    """A model's own score, one object for all its tokens."""
    return ScaledDot(scaling, softcap)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _notify_observers(module: Any, question: AttentionCall) -> None:
    for watch in OBSERVERS.get():
        watch(module, question)


def _prepare_mask(mask: Any, key: Any, weighting: Weighting) -> Any:
    """A mask no longer than the keys, in which the least float, transformers' −∞, is −∞; but in a
    row of nothing else it is a number as any, by which all keys count alike in eager and sdpa."""
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
    live = mask > torch.finfo(mask.dtype).min / 2
    if weighting.needs_nonnegative and not (mask * live).any():
        return live
    return mask.masked_fill(~live & live.any(-1, keepdim=True), -math.inf)


def _restrict_to_keys(indices: Any, mask: Any, key: Any) -> Any:
    """The mask for a model that has chosen keys (batch, n, k) for each query."""
    shape = (indices.shape[0], 1, indices.shape[1], key.shape[-2])
    live = torch.zeros(shape, dtype=torch.bool, device=key.device)
    live.scatter_(-1, indices[:, None].long(), True)
    if mask is None or mask is masks.causal:
        return live if mask is None else live.tril()
    return live & mask if mask.dtype == torch.bool else mask.masked_fill(~live, -math.inf)


class AttentionCall(NamedTuple):
    """One layer's attention. `mask` is `masks.causal`, a tensor or None."""

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
        """The output and, if wanted, α."""
        found = attend(
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
            return found if wants_weights else (found, None)
        out, lse, *alpha = found
        share = self.sink_share(lse)
        return out * share, alpha[0] * share if alpha else None

    def sink_share(self, lse: Any) -> Any:
        """What a sink leaves to the keys: Σ exp(s) / (Σ exp(s) + exp(sink))."""
        left = torch.sigmoid(lse[..., None] - self.sinks.reshape(1, -1, 1, 1))
        return left.to(self.query.dtype)

    def compute_weights(self, start: int, stop: int) -> Any:
        """α of the queries from start to stop, (batch, heads, stop − start, m)."""
        query = self.query[..., start:stop, :]
        mask = _combine_mask_and_bias(
            *(_slice_rows(x, start, stop) for x in (self.mask, self.bias))
        )
        how: dict[str, Any] = {"score": self.score, "weighting": self.weighting, "mask": mask}
        if self.sinks is None:
            return weights(query, self.key, **how)
        _, lse, alpha = attend(
            query, self.key, self.value, **how, return_lse=True, return_weights=True
        )
        return alpha * self.sink_share(lse)


def _combine_mask_and_bias(mask: Any, bias: Any) -> Any:
    return mask if bias is None else bias if mask is None else masks.array(mask) & bias


def _slice_rows(part: Any, start: int, stop: int) -> Any:
    """What holds for the queries from start to stop."""
    if part is masks.causal:
        return masks.causal(offset=start)
    return part if part is None or part.shape[-2] == 1 else part[..., start:stop, :]
