"""How much time does a sliding window save? Window 256 of n = 16,384, d64, f32, CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._side_by_side import compare, input_sets, mute, save_results, size
from qkv import masks

N, D, LEFT = size(16_384, 512), 64, size(256, 32)
WINDOW = masks.causal & masks.window(LEFT)


def banded(q, k, v):
    """Return softmax(QKᵀ/√d) V in float64, in blocks of queries with their visible keys."""
    q, k, v = (x.double() for x in (q, k, v))
    parts = []
    for start in range(0, N, LEFT):
        rows, first = torch.arange(start, start + LEFT), max(0, start - LEFT)
        cols = torch.arange(first, start + LEFT)
        s = q[:, rows] @ k[:, cols].mT / D**0.5
        gap = rows[:, None] - cols
        s = s.masked_fill((gap < 0) | (gap > LEFT), -torch.inf)
        parts.append(torch.softmax(s, -1) @ v[:, cols])
    return [torch.cat(parts, 1)]


def rows():
    torch.manual_seed(0)
    for heads in (1, 8):
        yield compare(
            f"causal window {LEFT} of n{N} H{heads} d{D} f32, forward",
            {
                "qkv": lambda q, k, v: qkv.attend(q, k, v, mask=WINDOW),
                "qkv on NumPy": lambda *x: qkv.attend(*(y.numpy() for y in x), mask=WINDOW),
                "qkv, causal, no window": mute(
                    lambda q, k, v: qkv.attend(q, k, v, mask=masks.causal)
                ),
                "SDPA, causal, no window": mute(
                    lambda q, k, v: sdpa(q[None], k[None], v[None], is_causal=True)
                ),
            },
            input_sets(lambda h=heads: tuple(torch.randn(3, h, N, D))),
            exact=banded,
            repeats=7,
        )


if __name__ == "__main__":
    save_results("window", rows())
