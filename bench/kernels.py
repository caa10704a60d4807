"""How long does a first call on CUDA compile, how fast is entmax with few nonzero weights, and
softmax with a float mask?

python -m bench.kernels [first lengths sparse floats]

A first call is a new process with nothing compiled, forward and backward. Lengths are drawn from 60
to 1,500, as in batches of text. With --small it runs on the CPU under Triton's interpreter, to
check all rows.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from torch.nn.attention.flex_attention import flex_attention

import qkv
from bench._formulas import compiled, there_and_back
from bench._results import show
from bench._side_by_side import SMALL, Row, peer, save_results, size
from bench.gpu import CUDA, DEVICE, measure, one_way, pass_name, randn
from bench.start import SRC
from qkv import masks, scores, weightings

LONGEST_FIRST, LONGEST_LENGTHS = 5.0, 8.0
"""Seconds."""
FIRST = (
    ("gaussian", 64, "bfloat16"),
    ("entmax15", 200, "bfloat16"),
    ("causal entmax15", 256, "float16"),
    ("top-k", 200, "float16"),
    ("top-k", 256, "float32"),
    ("additive", 64, "bfloat16"),
)
LENGTHS = ("gaussian", "entmax15", "top-k", "additive")


def asked(kind: str, d: int, dtype: torch.dtype):
    """Return the arguments for a call of this kind."""

    def learned(*shape):
        return (torch.randn(*shape, device=DEVICE, dtype=dtype) / 8).requires_grad_()

    return {
        "gaussian": lambda: {"score": scores.Gaussian(8.0)},
        "entmax15": lambda: {"weighting": "entmax15"},
        "causal entmax15": lambda: {"weighting": "entmax15", "mask": masks.causal},
        "top-k": lambda: {"weighting": weightings.TopK(8)},
        "additive": lambda: {"score": scores.Additive(learned(64, d), learned(64, d), learned(64))},
    }[kind]()


def seconds(kind: str, lengths: list[int], d: int, dtype: torch.dtype) -> float:
    """Return the seconds of successive calls, forward and backward."""
    synchronize = torch.cuda.synchronize if CUDA else lambda: None
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    (x @ x).sum().backward()  # what torch itself does at first is not ours
    synchronize()
    begin = time.perf_counter()
    for n in lengths:
        q, k, v = torch.randn(3, 2, 8, n, d, device=DEVICE, dtype=dtype).requires_grad_().unbind()
        qkv.attend(q, k, v, engine="triton", **asked(kind, d, dtype)).sum().backward()
    synchronize()
    return time.perf_counter() - begin


def alone(kind: str, lengths: list[int], d: int, dtype: str) -> float:
    """Return the seconds in a process that has compiled nothing."""
    code = (
        "import torch; from bench.kernels import seconds;"
        f"print(seconds({kind!r}, {lengths}, {d}, torch.{dtype}))"
    )
    path = os.pathsep.join((str(SRC), str(SRC.parent)))
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache},
        )
    return float(done.stdout.splitlines()[-1])


def judged(work: str, took: float, most: float) -> Row:
    goal = {"goal": f"≤ {most:g} s", "found": took, "met": took <= most}
    row: Row = {"work": work, "sides": {"qkv": {"ms": 1e3 * took}}, "goals": [goal]}
    show(row)
    return row


def first() -> Iterator[Row]:
    for kind, d, dtype in FIRST[: 1 if SMALL else None]:
        took = alone(kind, [size(512, 16)], d, dtype)
        yield judged(f"first call, {kind} d{d} {dtype}, {pass_name(True)}", took, LONGEST_FIRST)


def lengths() -> Iterator[Row]:
    drawn = random.Random(0)
    some = [drawn.randint(60, 1500) for _ in range(40)] if not SMALL else [16, 17]
    for kind in LENGTHS[: 1 if SMALL else None]:
        took = alone(kind, some, 64, "bfloat16")
        yield judged(f"forty lengths, {kind} d64 bf16, {pass_name(True)}", took, LONGEST_LENGTHS)


def sparse() -> Iterator[Row]:
    """Measure sharp weights: queries six times as long, so 0.05 % of the weights are not 0."""
    adasplash = peer("adasplash")
    sides = {
        "qkv": lambda *x: qkv.attend(*x, weighting="entmax15", mask=masks.causal),
        "AdaSplash-2": adasplash and adasplash.adasplash_v2,
    }
    for b, n, d, sharp, least in (
        (4, 4096, 64, 1, (1.2, 1.1)),
        (4, 4096, 128, 1, (1.2, 1.1)),
        (1, 16384, 64, 6, (1.5, 1.5)),
    ):
        n = size(n, 32)

        def make(b=b, n=n, d=d, sharp=sharp):
            q, k, v, g = randn(4, b, 16, n, d)
            return sharp * q, k, v, g

        for back, turn in ((False, one_way), (True, there_and_back)):
            yield measure(
                f"entmax15 causal B{b} H16 n{n} d{d}{', sharp' * (sharp > 1)}, {pass_name(back)}",
                {name: side and turn(side) for name, side in sides.items()},
                make,
                goals={"AdaSplash-2": least[back]},
            )


def floats() -> Iterator[Row]:
    """Measure a float mask shared by all heads, also with its gradient."""
    n, d = size(4096, 32), 64
    fused = compiled(flex_attention)

    def flex(q, k, v, m):
        return fused(q, k, v, score_mod=lambda s, b, h, i, j: s + m[i, j])

    def attend(q, k, v, m):
        return qkv.attend(q, k, v, mask=m)

    def make():
        q, k, v, g = randn(4, 4, 16, n, d)
        return q, k, v, randn(n, n), g

    def named(q, k, v, m):
        return qkv.attend(q, k, v, mask=m, engine="triton")

    for back, turn in ((False, one_way), (True, there_and_back)):
        yield measure(
            f"float mask (n, n) B4 H16 n{n} d{d}, {pass_name(back)}",
            {"qkv": turn(attend), "qkv, engine='triton'": turn(named), "FlexAttention": turn(flex)},
            make,
            goals={"FlexAttention": 1.3},
        )


ROWS = {f.__name__: f for f in (first, lengths, sparse, floats)}


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    if set(names) - set(ROWS):
        sys.exit(f"no rows {', '.join(set(names) - set(ROWS))}; there are {', '.join(ROWS)}")
    if not (CUDA or SMALL):
        sys.exit("bench.kernels needs a CUDA device, which torch does not find")
    torch.manual_seed(0)
    save_results(
        "kernels", (row for name in names or ROWS for row in ROWS[name]()), replace=not names
    )


if __name__ == "__main__":
    main()
