"""How much does a sliding window save? Window 256 of n = 16,384, d64, f32, CPU."""

from __future__ import annotations

import numpy as np
import torch
from _side_by_side import keep, times

import qkv
from qkv import masks

N, D = 16_384, 64
WINDOW = masks.causal & masks.window(256)


def main() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for heads in (1, 8):
        arrays = [rng.normal(size=(heads, N, D)).astype("float32") for _ in range(3)]
        tensors = [torch.tensor(x) for x in arrays]
        sides = {"torch": tensors} | ({"NumPy": arrays} if heads == 1 else {})
        for name, given in sides.items():
            found = times(
                {
                    "full causal": lambda given=given: qkv.attend(*given, mask=masks.causal),
                    "window": lambda given=given: qkv.attend(*given, mask=WINDOW),
                },
                repeats=7,
            )
            full, part = found["full causal"], found["window"]
            rows.append(
                {
                    "side": name,
                    "heads": heads,
                    "full causal ms": 1e3 * full,
                    "window ms": 1e3 * part,
                    "times faster": full / part,
                }
            )
    keep("window", rows)


if __name__ == "__main__":
    main()
