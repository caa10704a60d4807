"""Scores with learned parameters, as torch modules."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from qkv import scores
from qkv.errors import ArgumentError, DtypeError, validate_sizes
from qkv.nn import weightings
from qkv.nn.tensors import called_as, check_plain
from qkv.scores import Score
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import Weighting


class LearnedScore(nn.Module):
    """s = score(q, k), (…, n, d_q) and (…, m, d_k) → (…, n, m), with learned parameters.

    `build(dtype)` returns the score of `qkv.scores` with the current parameters, for `attend`. If
    the module has hooks, or there are global module hooks, the module itself is called instead: for
    the whole matrix, or for each of its blocks in a long call.
    """

    __prepare_scriptable__ = reject_torchscript

    @classmethod
    def for_widths(cls, widths: tuple[int, int] | None, **where: Any) -> Self:
        """Create the score for queries and keys of these widths; None if the layer has none."""
        if widths is None:
            raise ArgumentError(
                f"score: this layer does not know the widths of its queries and keys: pass "
                f"{cls.__name__}(d_query, d_key)"
            )
        return cls(*widths, **where)

    def build(self, dtype: Any) -> Score:
        """Return the score of `qkv.scores` with the current parameters, cast to `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} must implement build(dtype)")

    def project_keys(self, memory: Tensor) -> tuple[Any, Tensor]:
        """Project all keys once, for many queries; return the score and the keys to use with it."""
        return self, memory

    def forward(self, query: Tensor, key: Tensor, **wrong: Never) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        check_plain(query=query, key=key)
        score = self.build(query.dtype)
        score.check_shapes(query.shape, key.shape)
        return score(query, key)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


LayerScore = scores.ScoreLike | scores.LearnedName | LearnedScore | type[LearnedScore]


def build_score(score: Any, dtype: Any) -> Any:
    """Return the score to pass to `attend`; only a learned one without hooks is built."""
    kinds = (LearnedScore, ProjectedKeysScore)  # A | B would build a new union in each call
    return score.build(dtype) if isinstance(score, kinds) and not has_hooks(score) else score


def has_hooks(module: Any) -> bool:
    """Return whether calling the module runs hooks, its own or global ones."""
    attribute = module.__dict__.get
    return bool(
        attribute("_forward_hooks")
        or attribute("_forward_pre_hooks")
        or attribute("_backward_hooks")
        or attribute("_backward_pre_hooks")
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def resolve_score(score: Any, widths: tuple[int, int] | None = None, **where: Any) -> Any:
    """Return the score of a layer, given as a name, a function, a score or a module.

    The name or class of a learned score creates it for the widths of query and key.
    """
    kind = LEARNED_SCORES.get(score) if isinstance(score, str) else score
    if isinstance(kind, type) and issubclass(kind, LearnedScore):
        return kind.for_widths(widths, **{name: x for name, x in where.items() if x is not None})
    return score if isinstance(score, nn.Module) else scores.resolve(score)


def copy_score(score: Any) -> Any:
    """Return the score for another layer; a module is copied and its parameters reset."""
    if isinstance(score, Weighting):
        return weightings.copy_weighting(score)
    if not isinstance(score, nn.Module):
        return score
    copy = deepcopy(score)
    for part in copy.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return copy


def copy_options(options: Any) -> Any:
    """Return a copy of the options for another layer; learned modules get new parameters."""
    return {name: copy_score(x) for name, x in options.items()}


def score_name(score: Any) -> str:
    """Return the class name of a score, for a layer's repr."""
    return type(score).__name__


@suggest_keywords
class AdditiveScore(LearnedScore):
    """s = vᵀ tanh(W₁q + W₂k + b): a network with one hidden layer.

    w_query W₁ (hidden, d_q), w_key W₂ (hidden, d_k), v (hidden,), bias (hidden,). `hidden`
    defaults to d_q.

    >>> score = AdditiveScore(4, 6, hidden=8)
    >>> score(torch.zeros(2, 4), torch.zeros(3, 6)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        d_q: int,
        d_k: int,
        hidden: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = d_q if hidden is None else hidden
        validate_sizes(d_q=d_q, d_k=d_k, hidden=hidden)
        self.w_query = empty_parameter((hidden, d_q), device, dtype)
        self.w_key = empty_parameter((hidden, d_k), device, dtype)
        self.v = empty_parameter((hidden,), device, dtype)
        self.register_parameter("bias", empty_parameter((hidden,), device, dtype) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.w_query)
        nn.init.xavier_uniform_(self.w_key)
        # Gives scores with a standard deviation of about 1.
        bound = math.sqrt(3 / self.v.shape[0])
        nn.init.uniform_(self.v, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def build(self, dtype: Any) -> scores.Additive:
        bias = None if self.bias is None else self.bias.to(dtype)
        return scores.Additive(self.w_query.to(dtype), self.w_key.to(dtype), self.v.to(dtype), bias)

    def project_keys(self, memory: Tensor) -> tuple[Any, Tensor]:
        return ProjectedKeysScore(self), linear(memory, self.build(memory.dtype).w_key)

    def extra_repr(self) -> str:
        hidden, d_q = self.w_query.shape
        return f"d_q={d_q}, d_k={self.w_key.shape[1]}, hidden={hidden}"


@dataclass(frozen=True)
class ProjectedKeysScore:
    """An additive score whose keys are already projected to W₂k, for step-by-step decoding."""

    score: AdditiveScore

    def build(self, dtype: Any) -> Score:
        return replace(self.score.build(dtype), w_key=None)


@suggest_keywords
class MultiplicativeScore(LearnedScore):
    """s = qᵀWk, with w (d_q, d_k).

    >>> MultiplicativeScore(4, 6)(torch.zeros(2, 4), torch.zeros(3, 6)).shape
    torch.Size([2, 3])
    """

    def __init__(self, d_q: int, d_k: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        validate_sizes(d_q=d_q, d_k=d_k)
        self.w = empty_parameter((d_q, d_k), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w, std=1 / math.sqrt(self.w.numel()))

    def build(self, dtype: Any) -> Score:
        return scores.Multiplicative(self.w.to(dtype))

    def extra_repr(self) -> str:
        return f"d_q={self.w.shape[0]}, d_k={self.w.shape[1]}"


@suggest_keywords
class GatedScore(LearnedScore):
    """s = σ(w_query·q + w_key·k + bias) · score(q, k): a gate on any score, also a learned one.

    >>> GatedScore(4, 4)(torch.zeros(2, 4), torch.zeros(3, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        d_q: int,
        d_k: int,
        score: scores.ScoreLike = "dot",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        validate_sizes(d_q=d_q, d_k=d_k)
        self.w_query = empty_parameter((d_q,), device, dtype)
        self.w_key = empty_parameter((d_k,), device, dtype)
        self.register_parameter("bias", empty_parameter((1,), device, dtype) if bias else None)
        self.score = resolve_score(score, (d_q, d_k), device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = 1 / math.sqrt(self.w_query.numel() + self.w_key.numel())
        nn.init.normal_(self.w_query, std=std)
        nn.init.normal_(self.w_key, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def build(self, dtype: Any) -> Score:
        bias = None if self.bias is None else self.bias.to(dtype)
        inner = build_score(self.score, dtype)
        return scores.Gated(self.w_query.to(dtype), self.w_key.to(dtype), bias, inner)

    def extra_repr(self) -> str:
        return (
            f"d_q={self.w_query.numel()}, d_k={self.w_key.numel()}, score={score_name(self.score)}"
        )


@suggest_keywords
class GaussianScore(LearnedScore):
    """s = −‖(q − k)/σ‖²/2 with σ learned: one number, or one for each feature.

    The parameter is log σ, so σ stays positive.

    >>> GaussianScore(0.5)(torch.tensor([[1.0]]), torch.tensor([[1.0], [2.0]])).tolist()
    [[-0.0, -2.0]]
    """

    def __init__(
        self,
        bandwidth: float = 1.0,
        features: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if getattr(bandwidth, "shape", ()):
            raise DtypeError(
                "bandwidth must be one number: pass features=d to learn one for each of d features"
            )
        scores.Gaussian(bandwidth)  # raises unless bandwidth > 0
        if features is not None:
            validate_sizes(features=features)
        shape = () if features is None else (features,)
        log = torch.full(shape, math.log(bandwidth), device=device, dtype=dtype)
        self.log_bandwidth = nn.Parameter(log)

    @classmethod
    def for_widths(cls, widths: tuple[int, int] | None, **where: Any) -> Self:
        return cls(**where)

    @property
    def bandwidth(self) -> Tensor:
        return self.log_bandwidth.exp()

    def build(self, dtype: Any) -> Score:
        return scores.Gaussian(self.bandwidth.to(dtype))

    def extra_repr(self) -> str:
        if self.log_bandwidth.dim():
            return f"features={len(self.log_bandwidth)}"
        return f"bandwidth={float(self.bandwidth.detach()):.4g}"


LEARNED_SCORES: dict[str, type[LearnedScore]] = {
    "additive": AdditiveScore,
    "gated": GatedScore,
    "multiplicative": MultiplicativeScore,
}
"""The learned scores that a layer creates from a name."""


def empty_parameter(shape: tuple[int, ...], device: Any, dtype: Any) -> Any:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
