"""How much memory does additive attention need? n = m = 8,192, h = 64, f32, with gradients."""

from __future__ import annotations

import time

import torch

from bench._clocks import Cpu
from bench._formulas import Formula, additive, there_and_back
from bench._results import show
from bench._side_by_side import relative_error, save_results, size
from bench.additive import attend

N, D, H = size(8192, 512), 64, 64
CHECKED = 256


def rows():
    """Measure one cold call: later calls reuse memory of the process."""
    torch.manual_seed(0)
    weights = (torch.randn(H, D) / D**0.5, torch.randn(H, D) / D**0.5, torch.randn(H))
    given = (*torch.randn(3, N, D), *weights, torch.randn(N, D))
    got = []
    start = time.perf_counter()
    extra = Cpu().peak(lambda: got.extend(there_and_back(attend)(*given)))
    seconds = time.perf_counter() - start
    # The query's gradient is a row's own affair, so a few rows can be checked by themselves.
    query, *others, cotangent = given
    want = Formula(additive, wide=H).exact(query[:CHECKED], *others, cotangent=cotangent[:CHECKED])
    row = {
        "work": f"additive n{N} h{H} f32, forward + backward, memory",
        "sides": {
            "qkv": {
                "ms": 1e3 * seconds,
                "error": relative_error(got[0][:CHECKED], want[:1]),
                "extra MiB": extra,
            },
            "eager's tanh alone": {"extra MiB": N * N * H * 4 / 2**20, "note": "by arithmetic"},
        },
        "goals": [],
    }
    show(row)
    yield row


if __name__ == "__main__":
    save_results("memory", rows())
