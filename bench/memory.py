"""How much memory does additive attention take? n = m = 8,192, h = 64, f32, forward + backward."""

from __future__ import annotations

import time

import torch
from _side_by_side import keep, peak_extra

import qkv
from qkv import scores

N, D, H = 8_192, 64, 64


def main() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(N, D, requires_grad=True) for _ in range(3))
    w_query, w_key = (torch.randn(H, D, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        for w in (w_query, w_key):
            w /= D**0.5
    v = torch.randn(H, requires_grad=True)

    def work() -> None:
        out = qkv.attend(query, key, value, score=scores.Additive(w_query, w_key, v))
        out.square().sum().backward()

    start = time.perf_counter()
    extra = peak_extra(work)
    keep(
        "memory",
        [
            {
                "work": f"additive n = m = {N}, h = {H}, f32, forward + backward on torch",
                "peak extra MiB": extra,
                "the naive form's tanh alone, MiB": N * N * H * 4 / 2**20,
                "seconds": time.perf_counter() - start,
            }
        ],
    )


if __name__ == "__main__":
    main()
