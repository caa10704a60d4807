"""`attend` as transformers calls an attention, under a name of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from qkv import masks, scores, weightings
from qkv.attention import ScoreLike, WeightingLike, attend, weights
from qkv.errors import ArgumentError, CombinationError, ShapeError
from qkv.scores import ScaledDot, Score
from qkv.weightings import Softmax, Weighting

CAPTURE = "qkv-capture"
RESERVED = ("eager", "sdpa", "flash", "flex_attention", "paged", CAPTURE)

WATCHERS: ContextVar[tuple[Callable[[Any, Question], None], ...]] = ContextVar(
    "qkv.transformers.watchers", default=()
)
"""Who is shown every attention that a capture's implementation computes in this thread."""


def register(
    name: str = "qkv",
    *,
    score: ScoreLike | None = None,
    weighting: WeightingLike = "softmax",
) -> str:
    """Make `attn_implementation=name` mean Σᵢ α(q, kᵢ) vᵢ by `qkv.attend`, in every model.

    A model's own scaling, softcap, position bias, sinks, masks, windows, grouped heads and dropout
    mean what they mean in "eager". `score` replaces the model's own, with its scaling and softcap;
    `weighting` its softmax. A query whose keys are all masked gives 0.

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
    if any(word in name for word in RESERVED):
        raise ArgumentError(
            f"name {name!r} would be taken for transformers' own or qkv's: choose one without "
            + ", ".join(RESERVED)
        )
    ours = Implementation(
        None if score is None else scores.resolve(score), weightings.resolve(weighting)
    )
    enter(name, ours)
    enter(f"{CAPTURE}-{name}", replace(ours, records=True))
    return name


def enter(name: str, implementation: Implementation) -> None:
    # torch.compile cannot follow a first call, which imports and looks types up.
    x, seen = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    attend(x, x, x, score=ScaledDot(1.0), mask=masks.causal & seen)
    AttentionInterface.register(name, implementation)
    AttentionMaskInterface.register(name, sdpa_mask)


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
        **_: Any,
    ) -> tuple[Any, Any]:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # Norms in float32 leave some wider than others. And sums stay in float32 inside.
            narrow = torch.get_autocast_dtype(kind)
            query, key, value = (x.to(narrow) for x in (query, key, value))
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        # Without a mask, many queries are the first ones and one query is the last.
        causal = attention_mask is None and query.shape[-2] > 1 and bool(is_causal)
        rule = Rule(causal, _usable(attention_mask, key, self.weighting), position_bias)
        score = ScaledDot(scaling, softcap) if self.score is None else self.score
        if s_aux is not None and not isinstance(self.weighting, Softmax):
            raise CombinationError(
                f"{type(module).__name__} has attention sinks, a share of the softmax: "
                f"weighting {self.weighting!r} has no place for them"
            )
        question = Question(query, key, value, score, self.weighting, rule, s_aux)
        if output_attentions is None:
            output_attentions = getattr(module.config, "output_attentions", False)
        with torch.autocast(kind, enabled=False):
            out, alpha = question.answer(float(dropout), bool(output_attentions))
            if self.records:
                _show(module, question)
        return out.transpose(1, 2).contiguous(), alpha


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _show(module: Any, question: Question) -> None:
    for watch in WATCHERS.get():
        watch(module, question)


def _usable(mask: Any, key: Any, weighting: Weighting) -> Any:
    """A mask no longer than the keys, in which the least float, transformers' −∞, is −∞."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        shape = getattr(mask, "shape", None)
        raise ShapeError(
            f"attention_mask must be a tensor (batch, heads, n, m), not {type(mask).__name__}"
            + (f" of shape {tuple(shape)}" if shape is not None else "")
        )
    mask = mask[..., : key.shape[-2]]
    if not mask.is_floating_point():
        return mask
    live = mask > torch.finfo(mask.dtype).min / 2
    if weighting.needs_nonnegative and not (mask * live).any():
        return live
    return mask.masked_fill(~live, -math.inf)


@dataclass(frozen=True)
class Rule:
    """Which keys a query may look at, and what is added to its scores."""

    causal: bool
    mask: Any
    bias: Any

    def over(self, start: int, stop: int) -> Any:
        """The same for the queries from start to stop."""
        found: Any = masks.causal(offset=start) if start else masks.causal
        found = found if self.causal else None
        for part in (self.mask, self.bias):
            if part is not None:
                part = masks.array(part if part.shape[-2] == 1 else part[..., start:stop, :])
                found = part if found is None else found & part
        return found


@dataclass(frozen=True)
class Question:
    """One layer's attention."""

    query: Any
    key: Any
    value: Any
    score: Score
    weighting: Weighting
    rule: Rule
    sinks: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, n, _ = self.query.shape
        return batch, heads, n, self.key.shape[-2]

    def answer(self, dropout: float, wants_weights: bool) -> tuple[Any, Any]:
        """The output and, if wanted, α."""
        n = self.query.shape[-2]
        found = attend(
            self.query,
            self.key,
            self.value,
            score=self.score,
            weighting=self.weighting,
            mask=self.rule.over(0, n),
            dropout_p=dropout,
            return_lse=self.sinks is not None,
            return_weights=wants_weights,
        )
        if self.sinks is None:
            return found if wants_weights else (found, None)
        out, lse, *alpha = found
        share = self.share(lse)
        return out * share, alpha[0] * share if alpha else None

    def share(self, lse: Any) -> Any:
        """What a sink leaves to the keys: Σ exp(s) / (Σ exp(s) + exp(sink))."""
        return torch.sigmoid(lse[..., None] - self.sinks.reshape(1, -1, 1, 1)).to(lse.dtype)

    def weights(self, start: int, stop: int) -> Any:
        """α of the queries from start to stop, (batch, heads, stop − start, m)."""
        query, mask = self.query[..., start:stop, :], self.rule.over(start, stop)
        how: dict[str, Any] = {"score": self.score, "weighting": self.weighting, "mask": mask}
        if self.sinks is None:
            return weights(query, self.key, **how)
        _, lse, alpha = attend(
            query, self.key, self.value, **how, return_lse=True, return_weights=True
        )
        return alpha * self.share(lse)
