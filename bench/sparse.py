"""Time sparsemax and entmax 1.5 attention against the entmax package: n2048 d64, f32, CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._formulas import Formula, dot, entmax15, sparsemax, there_and_back
from bench._side_by_side import compare, input_sets, mute, peer, save_results, size

N, D = size(2048, 128), 64


def rows():
    torch.manual_seed(0)
    entmax = peer("entmax")
    sets = input_sets(lambda: tuple(torch.randn(4, N, D)))
    for name, formula in (("sparsemax", sparsemax), ("entmax15", entmax15)):
        truth = Formula(dot, formula)
        package = entmax and Formula(dot, getattr(entmax, name))

        def attend(q, k, v, name=name):
            return qkv.attend(q, k, v, weighting=name)

        yield compare(
            f"{name} n{N} d{D} f32, forward",
            {
                "qkv": lambda q, k, v, g, f=attend: f(q, k, v),
                "entmax package": package and (lambda q, k, v, g, f=package: f(q, k, v)),
                "qkv on NumPy": lambda *x, f=attend: f(*(y.numpy() for y in x[:3])),
                "softmax by SDPA": mute(lambda q, k, v, g: sdpa(q[None], k[None], v[None])),
            },
            sets,
            exact=lambda q, k, v, g, f=truth: f.exact(q, k, v),
            goals={"entmax package": 10.0},
            repeats=15,
        )
        yield compare(
            f"{name} n{N} d{D} f32, forward + backward",
            {"qkv": there_and_back(attend), "entmax package": package and there_and_back(package)},
            sets,
            exact=lambda q, k, v, g, f=truth: f.exact(q, k, v, cotangent=g),
        )


if __name__ == "__main__":
    save_results("sparse", rows())
