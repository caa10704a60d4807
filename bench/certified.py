"""What does an error bound cost? Weights within 0.01 from 8-bit codes, against the exact scan, CPU.

The vectors are wordllama's, of phrases, repeated with noise if there are too few. The load of the
machine is stored too. Ratios compare sides that took turns.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch

import qkv
from bench._results import show
from bench._side_by_side import compare, peer, save_results, size
from qkv import attention
from qkv.database.encoders import resolve
from qkv.database.encoders.base import sharpness_for_rows
from qkv.database.table import quantization
from qkv.frameworks.stored_rows import RowChunk, StoredRows

M, D = size(int(os.environ.get("QKV_BENCH_ROWS", 1_000_000)), 20_000), 256
PHRASES = size(100_000, 5_000)
QUERIES = size(10_000, 200)
CHECKED = size(20_000, 5_000)
"""Rows among which the true error of so many queries is looked at."""
STEP = 2**18
TOLERANCE = 0.01


def embeddings(rng, count):
    """Return vectors (count, D) of phrases from the words of this project's documents."""
    root = Path(__file__).resolve().parent.parent
    text = " ".join(
        file.read_text() for file in sorted(root.glob("*.md")) + sorted(root.glob("docs/*.md"))
    )
    words = np.array(sorted(set(re.findall(r"[a-z]{3,}", text))))
    some = min(count, PHRASES)
    lengths = rng.integers(2, 10, some)
    phrases = [" ".join(words[rng.integers(len(words), size=n)]) for n in lengths]
    found = np.asarray(resolve("words").encode(phrases), np.float32)[:, :D]
    found = found[np.arange(count) % some]
    if count > some:
        found = found + 0.02 * rng.standard_normal((count, D), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def asked(rng, keys, n):
    found = keys[rng.integers(len(keys), size=n)] + 0.05 * rng.standard_normal((n, D), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def over(keys, near, value=None):
    parts = [slice(at, at + STEP) for at in range(0, len(keys), STEP)]

    def read():
        for at in parts:
            some = None if value is None else value[at]
            yield RowChunk(keys[at], some, quantized=near.slice_rows(at))

    return StoredRows(read, keys.shape, 0 if value is None else value.shape[1])


def row(work, goal, found, met, **more):
    result = {
        "work": work,
        "sides": {"qkv": more},
        "goals": [{"goal": goal, "found": found, "met": met}],
    }
    show(result)
    return result


def speeds(rng, keys, near):
    value = rng.standard_normal((len(keys), 256), np.float32)
    score = qkv.scores.ScaledDot(sharpness_for_rows(len(keys)))
    faiss, index = peer("faiss"), None
    if faiss is not None:
        faiss.omp_set_num_threads(2)
        index = faiss.IndexFlatIP(D)
        index.add(keys)
    load = os.getloadavg()[0]
    how = {"score": score, "weighting": "softmax"}

    def near_to(rows, query):
        return attention.weigh_rows(rows, query, **how, tolerance=TOLERANCE)

    for n, alone, pooled in ((1, 1.7, 3.0), (16, 2.0, 3.0)):
        query = asked(rng, keys, n)
        for what, rows, least in (
            ("weights", over(keys, near), alone),
            ("256-wide values pooled", over(keys, near, value), pooled),
        ):
            result = compare(
                f"{n} queries, {len(keys):,} × {D}, {what}, load {load:.0f}",
                {
                    "qkv": lambda rows, query: near_to(rows, query).output,
                    "exact": lambda rows, query: attention.weigh_rows(rows, query, **how).output,
                    "faiss": index and (lambda _, query: index.search(query, 10)[0]),
                },
                [(rows, query)],
                goals={"exact": least, "faiss": 1.0},
                repeats=7,
            )
            found = near_to(rows, query)
            result["sides"]["qkv"] |= {
                "rows read": found.rows_read,
                "bound": float(found.weight_error.max()),
            }
            yield result

    rows, even = over(keys, near, value), {"score": "scaled_dot", "weighting": "softmax"}
    attention.attend_rows(
        rows, asked(rng, keys, D // 8), **even, tolerance=TOLERANCE
    )  # pays for the sums
    yield compare(
        f"a flat query, {len(keys):,} × {D}, 256-wide values pooled, load {load:.0f}",
        {
            "qkv": lambda rows, query: attention.attend_rows(
                rows, query, **even, tolerance=TOLERANCE
            ),
            "exact": lambda rows, query: attention.attend_rows(rows, query, **even),
        },
        [(rows, asked(rng, keys, 1))],
        goals={"exact": 3.0},
        repeats=7,
    )


def errors(rng):
    """Return the true errors of many queries, and their bounds."""
    keys = embeddings(rng, CHECKED)
    near = quantization.read_codes({"code": keys, **quantization.quantize_with_bounds(keys, 0)})
    rows, above, worst, ratio = over(keys, near), 0, 0.0, 0.0
    wide = torch.from_numpy(keys).double()
    for scale in (sharpness_for_rows(CHECKED), 4.0):
        score = qkv.scores.ScaledDot(scale)
        for _ in range(0, QUERIES // 2, 50):
            query = asked(rng, keys, 50)
            found = attention.weigh_rows(
                rows, query, score=score, weighting="softmax", tolerance=TOLERANCE
            )
            true = torch.softmax(torch.from_numpy(query).double() @ wide.T * scale, dim=-1)
            error = 0.5 * np.abs(found.weights - true.numpy()).sum(axis=1)
            above += int((error > found.weight_error).sum())
            worst, ratio = (
                max(worst, found.weight_error.max()),
                max(ratio, (error / found.weight_error).max()),
            )
    work = f"true error of {QUERIES:,} queries on {CHECKED:,} rows"
    yield row(
        work,
        "never above its bound",
        above,
        above == 0,
        **{"largest bound": worst, "error / bound": ratio},
    )


def disk(rng, keys):
    """Return the bytes of the segments, which hold the vectors, without the catalog."""
    sizes = {}
    for precision in ("float32", "int8"):
        with tempfile.TemporaryDirectory(prefix="qkv-bench-") as folder:
            with qkv.open(Path(folder) / "d.qkv", precision=precision) as database:
                database.add(keys, np.zeros(len(keys), np.float32))
            files = (Path(folder) / "d.qkv").glob("segment-*")
            sizes[precision] = sum(file.stat().st_size for file in files)
    share = sizes["int8"] / keys.nbytes
    yield row(
        f"int8 store of {len(keys):,} × {D}",
        "≤ 30 % of the bytes of the float32 vectors",
        share,
        share <= 0.3,
        **{f"MB {name}": n / 1e6 for name, n in sizes.items()},
    )


def rows():
    rng = np.random.default_rng(0)
    keys = embeddings(rng, M)
    yield from disk(rng, keys[: M // 10])
    yield from errors(rng)
    near = quantization.read_codes({"code": keys, **quantization.quantize_with_bounds(keys, 0)})
    yield from speeds(rng, keys, near)


if __name__ == "__main__":
    save_results("certified", rows())
