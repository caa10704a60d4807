"""How long does the first call of a compiled block take, forward and backward, with cold caches?

Each side runs in its own process. `CPU s` is the CPU time of the process and its compilers: compare
this if other processes use the cores. `kernels` is the number of compiled kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from bench._results import show
from bench._side_by_side import Row, save_results
from bench.start import SRC

MOST = 20.0
"""Seconds, on two cores."""
KINDS = {"qkv": "entmax15", "softmax": "softmax", "torch's own block": "torch"}
FIRST = """
import json, resource, sys, time
import torch
from torch._inductor import metrics
from qkv import nn

block = torch.nn.TransformerEncoderLayer(256, 8, batch_first=True)
if sys.argv[1] != "torch":
    block = nn.TransformerBlock(256, 8, weighting=sys.argv[1])
x = torch.randn(4, 128, 256)

def worked():
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in both)

begin, before = time.perf_counter(), worked()
if sys.argv[2] == "forward":
    with torch.no_grad():
        torch.compile(block)(x)
else:
    torch.compile(block)(x).sum().backward()
took = {"ms": 1e3 * (time.perf_counter() - begin), "CPU s": worked() - before}
print(json.dumps({**took, "kernels": metrics.generated_kernel_count}))
"""


def first(kind: str, ways: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        own = {
            "PYTHONPATH": str(SRC),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FIRST, kind, ways],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **own},
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows():
    for ways in ("forward", "forward + backward"):
        sides = {name: first(kind, ways) for name, kind in KINDS.items()}
        took = sides["qkv"]["ms"] / 1e3
        row: Row = {
            "work": f"first call of a compiled block of entmax15 heads, {ways}",
            "sides": sides,
            "goals": [{"goal": f"≤ {MOST:g} s", "found": took, "met": took <= MOST}],
        }
        show(row)
        yield row


if __name__ == "__main__":
    save_results("compiled", rows())
