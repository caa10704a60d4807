"""How fast is Gaussian regression? 200,000 rows × 2,000 queries in three dimensions, CPU.

Every side starts from plain arrays, so building trees and boxes is included. KeOps has two
variants: softmax, which is safe far from all keys, and plain exponentials, which are not.
scikit-learn reads the keys within 5.5 σ; about a millionth of the weight is outside.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import qkv
from bench._side_by_side import compare, input_sets, peer, save_results, size
from qkv.scores import Gaussian

M, N, D = size(200_000, 20_000), size(2_000, 300), 3
TOLERANCE = 1e-6
SCOTT = M ** (-1 / (D + 4))
UNIFORM = SCOTT / math.sqrt(12)
CASES = [
    ("uniform", UNIFORM, torch.float32),
    ("normal", SCOTT, torch.float32),
    ("normal", 0.05, torch.float32),
    ("uniform", 1.0, torch.float32),
    ("normal", 1.0, torch.float32),
    ("normal", SCOTT, torch.float64),
]


def keops(q, k, v, sigma, safe):
    from pykeops.torch import LazyTensor

    apart = LazyTensor(q[:, None] / sigma) - LazyTensor(k[None] / sigma)
    s = -(apart**2).sum(-1) / 2
    if safe:
        return s.sumsoftmaxweight(LazyTensor(v[None]), axis=1)
    sums = s.exp() @ torch.cat([v, torch.ones_like(v)], 1)
    return sums[:, :1] / sums[:, 1:]


def by_cdist(q, k, v, sigma):
    parts = []
    for some in q.split(100):
        s = torch.cdist(some, k).square_().mul_(-0.5 / sigma**2)
        parts.append(torch.softmax(s, -1) @ v)
    return torch.cat(parts)


def within(q, k, v, sigma):
    from sklearn.neighbors import RadiusNeighborsRegressor

    def weigh(apart):
        return [np.exp(-0.5 * (x / sigma) ** 2) for x in apart]

    model = RadiusNeighborsRegressor(5.5 * sigma, weights=weigh, algorithm="kd_tree")
    model.fit(k.numpy(), v.numpy())
    return np.concatenate([model.predict(some.numpy()) for some in q.split(100)])


def exact(q, k, v, sigma):
    k = k.double()
    parts = []
    for some in q.double().split(50):
        s = sum((some[:, i, None] - k[:, i]).square_() for i in range(D))
        parts.append(torch.softmax(s * (-0.5 / sigma**2), -1) @ v.double())
    return [torch.cat(parts)]


def rows():
    torch.manual_seed(0)
    has_keops, has_sklearn = peer("pykeops"), peer("sklearn")
    for law, sigma, dtype in CASES:

        def make(law=law, dtype=dtype):
            draw = torch.rand if law == "uniform" else torch.randn
            q, k = (draw(count, D, dtype=dtype) for count in (N, M))
            v = torch.sin(3 * k.sum(1, keepdim=True)) + 0.1 * torch.randn(M, 1, dtype=dtype)
            return q, k, v

        def ours(q, k, v, sigma=sigma):
            return qkv.attend(q, k, v, score=Gaussian(sigma), tolerance=TOLERANCE)

        def of(side, *more, sigma=sigma):
            return lambda *given: side(*given, sigma, *more)

        sides = {
            "qkv": ours,
            "KeOps, exponentials": of(keops, False) if has_keops else None,
            "qkv on NumPy": lambda *given, ours=ours: ours(*(x.numpy() for x in given)),
        }
        goals = {}
        if dtype is torch.float32 and sigma in (SCOTT, UNIFORM):
            goals = {("KeOps, exponentials", "KeOps, softmax"): 20}
            sides["KeOps, softmax"] = of(keops, True) if has_keops else None
            sides["torch cdist"] = of(by_cdist)
            sides["scikit-learn within 5.5 σ"] = of(within) if has_sklearn else None
        short = "f64" if dtype is torch.float64 else "f32"
        yield compare(
            f"Gaussian, {M:,} {law} rows × {N:,} queries d{D}, σ {sigma:.3g}, {short}",
            sides,
            input_sets(make),
            exact=of(exact),
            goals=goals,
            rate=(M * N, "Gpair/s"),
            repeats=5,
        )


if __name__ == "__main__":
    save_results("gaussian", rows())
