"""Textbook formulas in torch: the eager alternative in a row, and its exact result in float64.

    formula(q, k, v, *parameters) = weigh(score(q, k, *parameters)) v

q (…, n, d), k (…, m, d), v (…, m, d_v).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def dot(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def multiplicative(q, k, w):
    return q @ w @ k.mT


def cosine(temperature: float):
    unit = torch.nn.functional.normalize
    return lambda q, k: unit(q, dim=-1) @ unit(k, dim=-1).mT / temperature


def gaussian(bandwidth: float):
    def score(q, k):
        square = (q * q).sum(-1)[..., :, None] + (k * k).sum(-1)[..., None, :] - 2 * q @ k.mT
        return -square / (2 * bandwidth**2)

    return score


def additive(q, k, w_query, w_key, v):
    return torch.tanh((q @ w_query.mT)[..., :, None, :] + (k @ w_key.mT)[..., None, :, :]) @ v


def gated(q, k, w_query, w_key):
    gate = torch.sigmoid((q @ w_query)[..., :, None] + (k @ w_key)[..., None, :])
    return gate * dot(q, k)


def softmax(s):
    return torch.softmax(s, -1)


def sparsemax(s):
    """max(0, s − t), with the threshold t from the sorted row."""
    ordered = s.sort(-1, descending=True).values
    rank = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
    t = (ordered.cumsum(-1) - 1) / rank
    size = (ordered > t).sum(-1, keepdim=True)
    return (s - t.gather(-1, size - 1)).clamp(min=0)


def entmax15(s):
    """max(0, s/2 − t)², with the threshold t from prefix means and variances of the sorted row."""
    s = (s - s.amax(-1, keepdim=True)) / 2
    ordered = s.sort(-1, descending=True).values
    rank = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
    mean = ordered.cumsum(-1) / rank
    spread = rank * ((ordered**2).cumsum(-1) / rank - mean**2)
    t = mean - ((1 - spread) / rank).clamp(min=0).sqrt()
    size = (t <= ordered).sum(-1, keepdim=True)
    return (s - t.gather(-1, size - 1)).clamp(min=0) ** 2


def entmax15_by_halves(s, steps: int = 24):
    """Entmax 1.5 by bisection: no sort, but each step reads the row again."""
    s = (s - s.amax(-1, keepdim=True)) / 2
    low, width = s.new_full((*s.shape[:-1], 1), -1.0), 1.0
    for _ in range(steps):
        width /= 2
        enough = ((s - low - width).clamp(min=0) ** 2).sum(-1, keepdim=True) >= 1
        low = torch.where(enough, low + width, low)
    weights = (s - low).clamp(min=0) ** 2
    return weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Formula:
    """A score and a weighting. wide: numbers per pair that the score holds in memory."""

    score: Callable[..., Any]
    weigh: Callable[..., Any] = softmax
    causal: bool = False
    wide: int = 1

    def __call__(self, q, k, v, *parameters, start: int = 0):
        s = self.score(q, k, *parameters)
        if self.causal:
            row, col = (torch.arange(size, device=s.device) for size in s.shape[-2:])
            s = s.masked_fill(col > row[:, None] + start, -math.inf)
        return self.weigh(s) @ v

    def exact(self, q, k, v, *parameters, cotangent=None, budget: int = 2**28) -> Sequence[Any]:
        """Return the output, or with a cotangent the gradients, in float64, block by block."""
        leaves = [x.double().requires_grad_(cotangent is not None) for x in (q, k, v, *parameters)]
        row = 8 * math.prod(q.shape[:-2]) * k.shape[-2] * self.wide
        step = max(1, budget // row)
        parts = []
        for i in range(0, q.shape[-2], step):
            part = self(leaves[0][..., i : i + step, :], *leaves[1:], start=i)
            if cotangent is None:
                parts.append(part)
            else:
                part.backward(cotangent[..., i : i + step, :].double())
        return [torch.cat(parts, -2)] if cotangent is None else [x.grad for x in leaves]


def there_and_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (*inputs, cotangent): the output and the gradients."""

    def both(*given):
        leaves = [x.detach().requires_grad_() for x in given[:-1]]
        return torch.autograd.grad(function(*leaves), leaves, given[-1])

    return both


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile for the one shape of a row, after a reset of the compiler."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)
