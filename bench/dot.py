"""Is dot-product attention as fast as the framework's own? H8 n2048 d64, f32, CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._formulas import Formula, dot, there_and_back
from bench._side_by_side import compare, input_sets, save_results, size

H, N, D = 8, size(2048, 128), 64
FLOPS = 4 * H * N * N * D
GOALS = {"SDPA": 0.95}


def naive(q, k, v):
    q, k, v = (x.numpy() for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(D))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def rows():
    torch.manual_seed(0)
    sets = input_sets(lambda: tuple(torch.randn(4, 1, H, N, D)))
    truth = Formula(dot)
    yield compare(
        f"dot H{H} n{N} d{D} f32, forward",
        {
            "qkv": lambda q, k, v, g: qkv.attend(q, k, v),
            "SDPA": lambda q, k, v, g: sdpa(q, k, v),
            "qkv on NumPy": lambda *x: qkv.attend(*(y.numpy() for y in x[:3])),
            "naive NumPy": lambda q, k, v, g: naive(q, k, v),
        },
        sets,
        exact=lambda q, k, v, g: truth.exact(q, k, v),
        goals=GOALS,
        rate=(FLOPS, "GFLOP/s"),
        repeats=15,
    )
    yield compare(
        f"dot H{H} n{N} d{D} f32, forward + backward",
        {"qkv": there_and_back(qkv.attend), "SDPA": there_and_back(sdpa)},
        sets,
        exact=lambda q, k, v, g: truth.exact(q, k, v, cotangent=g),
        goals=GOALS,
        rate=(3.5 * FLOPS, "GFLOP/s"),
        repeats=15,
    )


if __name__ == "__main__":
    save_results("dot", rows())
