"""Sparsemax and entmax 1.5 of a 2048 × 2048 matrix of scores, beside the entmax package."""

from __future__ import annotations

import entmax
import torch
from _side_by_side import keep, times

from qkv import weightings


def main() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2048, 2048)
    rows = []
    for name, theirs, ours in (
        ("sparsemax", entmax.sparsemax, weightings.Sparsemax()),
        ("entmax15", entmax.entmax15, weightings.Entmax(1.5)),
    ):
        found = times(
            {
                "entmax package": lambda theirs=theirs: theirs(scores, dim=-1),
                "qkv on torch": lambda ours=ours: ours(scores),
                "qkv on NumPy": lambda ours=ours: ours(scores.numpy()),
                "softmax": lambda: torch.softmax(scores, -1),
            },
            repeats=15,
        )
        error = (ours(scores) - theirs(scores.double(), dim=-1)).abs().max().item()
        rows += [
            {
                "weighting": name,
                "side": side,
                "ms": 1e3 * t,
                "times faster than the package": found["entmax package"] / t,
                "largest error of qkv": error,
            }
            for side, t in found.items()
        ]
    keep("sparse", rows)


if __name__ == "__main__":
    main()
