"""Scores with parameters of their own, as torch modules."""

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

    `build(dtype)` is the same as an object of `qkv.scores` over the parameters as they stand:
    what `attend` and its engines take. With a hook on it, or on all modules, the module itself is
    called instead, for the whole matrix or, of a long call, for each block of it.
    """

    __prepare_scriptable__ = reject_torchscript

    @classmethod
    def for_widths(cls, widths: tuple[int, int] | None, **where: Any) -> Self:
        """The score of a layer with queries and keys of these widths; None: it knows of none."""
        if widths is None:
            raise ArgumentError(
                f"score: this layer does not know the widths of its queries and keys: pass "
                f"{cls.__name__}(d_query, d_key)"
            )
        return cls(*widths, **where)

    def build(self, dtype: Any) -> Score:
        raise NotImplementedError("a learned score says which score its parameters make")

    def project_keys(self, memory: Tensor) -> tuple[Any, Tensor]:
        """The score, and the keys as it has them, where all are known before the first query."""
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
    """A learned score as the object that `attend` takes; anything else as it is."""
    kinds = (LearnedScore, ProjectedKeysScore)  # a union would be made anew in each call
    return score.build(dtype) if isinstance(score, kinds) and not has_hooks(score) else score


def has_hooks(module: Any) -> bool:
    """Whether hooks run where it is called, its own or those on all modules: then call it."""
    of = module.__dict__.get
    return bool(
        of("_forward_hooks")
        or of("_forward_pre_hooks")
        or of("_backward_hooks")
        or of("_backward_pre_hooks")
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def resolve_score(score: Any, widths: tuple[int, int] | None = None, **where: Any) -> Any:
    """The score of a layer: a module as it is, a name or a function as a score.

    A learned score goes by its name or its class: it is made for the widths of query and key.
    """
    kind = LEARNED_SCORES.get(score) if isinstance(score, str) else score
    if isinstance(kind, type) and issubclass(kind, LearnedScore):
        return kind.for_widths(widths, **{name: x for name, x in where.items() if x is not None})
    return score if isinstance(score, nn.Module) else scores.resolve(score)


def copy_score(score: Any) -> Any:
    """The same score for one more layer: a module with parameters of its own, drawn anew."""
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
    """The options of one more layer, with parameters of its own."""
    return {name: copy_score(x) for name, x in options.items()}


def score_name(score: Any) -> str:
    """A score in a word, for a layer's repr."""
    return type(score).__name__


@suggest_keywords
class AdditiveScore(LearnedScore):
    """s = vᵀ tanh(W₁q + W₂k + b): a network with one hidden layer.

    w_query (hidden, d_q), w_key (hidden, d_k), v (hidden,), bias (hidden,). `hidden` is d_q unless
    given.

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
        # So that the scores spread by about one.
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
    """An additive score for keys that are W₂k already: for a memory that is asked step by step."""

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
    """s = σ(w_query·q + w_key·k + bias) · score(q, k): a gate on any score, learned ones too.

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

    Its logarithm is the parameter, so that σ stays above zero.

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
            raise DtypeError("bandwidth must be one number; features=d learns one for each of d")
        scores.Gaussian(bandwidth)  # refuses what is not above zero
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
"""The scores that a layer makes of their names."""


def empty_parameter(shape: tuple[int, ...], device: Any, dtype: Any) -> Any:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
