"""How close to memory bandwidth is a look-up? 1 and 16 queries in 1M rows of 128, f32, CPU."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._formulas import Formula, dot
from bench._side_by_side import compare, input_sets, mute, peer, save_results, size

M, D = size(1_000_000, 10_000), 128
BYTES = 2 * M * D * 4
READING = "reading the same bytes"


def in_numpy(q, k, v):
    import numpy as np

    q, k, v = (x.numpy() for x in (q, k, v))
    s = q @ k.T / np.float32(math.sqrt(D))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def rows():
    torch.manual_seed(0)
    faiss = peer("faiss")

    def make():
        k, v = torch.randn(2, M, D)
        index = None
        if faiss:
            index = faiss.IndexFlatIP(D)
            index.add(k.numpy())
        return k, v, index

    tables = input_sets(make)
    plain = Formula(dot)
    for n, goals in ((1, {READING: 0.8}), (16, {"SDPA": 1.5})):
        sets = [(torch.randn(n, D), *table) for table in tables]
        yield compare(
            f"look-up, {n} quer{'y' if n == 1 else 'ies'} in {M:,} × {D} f32",
            {
                "qkv": lambda q, k, v, _: qkv.attend(q, k, v),
                READING: mute(lambda q, k, v, _: (k.sum(), v.sum())),
                "SDPA": lambda q, k, v, _: sdpa(q[None, None], k[None, None], v[None, None]),
                "torch": lambda q, k, v, _: plain(q, k, v),
                "qkv on NumPy": lambda *x: qkv.attend(*(y.numpy() for y in x[:3])),
                "NumPy": lambda q, k, v, _: in_numpy(q, k, v),
                # It answers with ten rows and reads no values.
                "FAISS flat, top 10": faiss
                and mute(lambda q, k, v, index: index.search(q.numpy(), 10)),
            },
            sets,
            exact=lambda q, k, v, _: plain.exact(q, k, v),
            goals=goals,
            rate=(BYTES, "GB/s"),
            repeats=15,
        )


if __name__ == "__main__":
    save_results("lookup", rows())
