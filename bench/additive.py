"""Time v·tanh(W₁q + W₂k) against PyTorch eager and compiled. n2048 h64, f32, CPU."""

from __future__ import annotations

import torch

import qkv
from bench._formulas import Formula, additive, compiled, there_and_back
from bench._side_by_side import compare, input_sets, save_results, size
from qkv import scores

N, D, H = size(2048, 128), 64, 64
GOALS = {"torch.compile": 4.0}


def make():
    """Return q, k, value, W₁, W₂, v and a cotangent."""
    weights = (torch.randn(H, D) / D**0.5, torch.randn(H, D) / D**0.5, torch.randn(H))
    return (*torch.randn(3, N, D), *weights, torch.randn(N, D))


def attend(q, k, value, *parameters):
    return qkv.attend(q, k, value, score=scores.Additive(*parameters))


def rows():
    torch.manual_seed(0)
    sets = input_sets(make)
    eager = Formula(additive, wide=H)
    sides = {"qkv": attend, "torch.compile": compiled(eager), "eager": eager}
    yield compare(
        f"additive n{N} h{H} f32, forward",
        {name: lambda *x, f=f: f(*x[:-1]) for name, f in sides.items()},
        sets,
        exact=lambda *x: eager.exact(*x[:-1]),
        goals=GOALS,
        rate=(N * N * H, "Gtanh/s"),
    )
    yield compare(
        f"additive n{N} h{H} f32, forward + backward",
        {name: there_and_back(f) for name, f in sides.items()},
        sets,
        exact=lambda *x: eager.exact(*x[:-1], cotangent=x[-1]),
        goals=GOALS,
    )


if __name__ == "__main__":
    save_results("additive", rows())
