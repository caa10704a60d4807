"""What does the host need to launch one call? (1, 8, 128, 64) bf16, against torch's SDPA.

python -m bench.host [--cuda]

`ms` is the median of a call while the device is idle; `queued` is that of one of CALLS in a row. On
the CPU the same calls include their computation.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._results import show, show_goals
from bench._side_by_side import SMALL, save_results
from qkv import masks, scores

CALLS = 5 if SMALL else 200
KINDS = {
    "plain": (30, {}, {}),
    "causal": (30, {"mask": masks.causal}, {"is_causal": True}),
    "gaussian": (60, {"score": scores.Gaussian(8.0)}, {}),
    "entmax15": (60, {"weighting": "entmax15"}, {}),
}
"""The most µs on a CUDA device, what `attend` is asked for, and SDPA."""


def rows(device="cpu"):
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    given = torch.randn(3, 1, 8, 128, 64, device=device, dtype=torch.bfloat16).unbind()
    for name, (most, ours, theirs) in KINDS.items():
        sides = {"qkv": partial(qkv.attend, **ours), "SDPA": partial(sdpa, **theirs)}
        row = {"work": f"{name} (1, 8, 128, 64) bf16, {device}", "sides": {}, "goals": []}
        for side in sides.values():
            for _ in range(4):  # the first calls choose and compile
                side(*given)
        alone = {side: [] for side in sides}
        for _ in range(CALLS):
            for side, function in sides.items():
                alone[side].append(seconds(function, given, synchronize, 1))
        for side, function in sides.items():
            queued = min(seconds(function, given, synchronize, CALLS) for _ in range(3)) / CALLS
            ms = 1e3 * statistics.median(alone[side])
            row["sides"][side] = {"ms": ms, "least": 1e3 * min(alone[side]), "queued": 1e3 * queued}
        if device == "cuda":
            micro = 1e3 * row["sides"]["qkv"]["ms"]
            row["goals"].append({"goal": f"≤ {most} µs", "found": micro, "met": micro <= most})
        show(row)
        yield row


def seconds(function, given, synchronize, calls):
    """Return the seconds to launch calls from an empty queue; the device may still run."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function(*given)
    return time.perf_counter() - begin


if __name__ == "__main__":
    device = "cuda" if "--cuda" in sys.argv else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.host --cuda needs a CUDA device, which torch does not find")
    show_goals(save_results("host_cuda" if device == "cuda" else "host", rows(device)))
