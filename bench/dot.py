"""Is plain dot-product attention as fast as the framework's own? H8 n2048 d64, f32, CPU."""

from __future__ import annotations

import numpy as np
import torch
from _side_by_side import keep, times
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv

H, N, D = 8, 2048, 64
rng = np.random.default_rng(0)
arrays = [rng.normal(size=(1, H, N, D)).astype("float32") for _ in range(3)]
tensors = [torch.tensor(x) for x in arrays]


def naive(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(D))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def there_and_back(attend):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    out.backward(torch.ones_like(out))


def main() -> None:
    forward = times(
        {
            "SDPA": lambda: sdpa(*tensors),
            "qkv on torch": lambda: qkv.attend(*tensors),
            "qkv on NumPy": lambda: qkv.attend(*arrays),
            "naive NumPy": lambda: naive(*arrays),
        },
        repeats=15,
    )
    both = times(
        {
            "SDPA": lambda: there_and_back(sdpa),
            "qkv on torch": lambda: there_and_back(qkv.attend),
        },
        repeats=15,
    )
    keep(
        "dot",
        [
            {"work": work, "side": side, "ms": 1e3 * t, "times SDPA's": t / found["SDPA"]}
            for work, found in (("forward", forward), ("forward + backward", both))
            for side, t in found.items()
        ],
    )


if __name__ == "__main__":
    main()
