"""How often kernels are compiled, counted without a GPU: by their keys, in a process of its own
that does not interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from tests import sampling

pytest.importorskip("triton", reason="the kernels are written in Triton")

MOST = {
    "gaussian": 2,
    "triangular": 2,
    "laplace": 2,
    "entmax15": 2,
    "topk": 2,
    "additive": 2,
    "additive entmax15": 6,
    "documents": 4,
    "score_mod": 4,
}
"""Keys of one pass, over forty lengths; of lists of tiles those of each pass; of products in place
of tanh, over those of their widths too."""

KINDS = sampling.sample(MOST, 1)
"""The kinds of today; counting all of them takes a minute."""


def keys_of(kind: str, lengths: list[int]) -> list[str]:
    """Every kernel that calls of these lengths, and their gradients, would compile; a pass of
    entmax's centre has another key than that of the queries, and tanh another than products."""
    import torch

    from qkv import masks, scores, weightings
    from qkv.engines import triton
    from qkv.engines.triton.launching import launch
    from qkv.engines.validation import build_call

    launch.has_tma = lambda device: True
    launch.count_processors = lambda device: 132  # of an H200
    hows = {
        "gaussian": lambda x: (scores.Gaussian(1.5), "softmax"),
        "triangular": lambda x: (scores.Triangular(1.5), "raw"),
        "laplace": lambda x: ("laplace", "softmax"),
        "entmax15": lambda x: ("scaled_dot", "entmax15"),
        "topk": lambda x: ("scaled_dot", weightings.TopK(8)),
        "additive": lambda x: (scores.Additive(x(64, 64), x(64, 64), x(64)), "softmax"),
        "additive entmax15": lambda x: (scores.Additive(x(8, 64), x(8, 64), x(8)), "entmax15"),
    }

    def normal(*shape):
        return torch.randn(shape, dtype=torch.bfloat16)

    def relative(n):
        table = normal(2, 2 * n)
        score_mod = lambda s, b, h, q, k: s + table[h, q - k + n]  # noqa: E731
        return scores.Modified("scaled_dot", score_mod), "softmax"

    jobs: dict = {}
    for n in lengths:
        mask = None
        hows["score_mod"] = lambda x, n=n: relative(n)
        hows["documents"] = hows["entmax15"]
        if kind == "documents":
            mask = masks.documents(torch.arange(n) // 50) & masks.causal
        arrays = [(normal(2, 2, n, 64) / 32).requires_grad_() for _ in "qkv"]
        call = build_call(*arrays, *hows[kind](normal), mask, 0.0, None, None)
        jobs |= triton.find_missing_kernels(call)
    return [
        f"{key.name} {key.dtypes[-6:-3] if key.name == 'backward_queries_kernel' else ''} "
        + ("tanh" if "TANH1" in key.constexprs.description else "")
        for key in jobs
    ]


def compiled() -> dict[str, list]:
    """The bytes of kernels as they are compiled for Hopper, of records too; whose launchers were
    built, and how often `inner` reported that it had been read."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from qkv.engines import triton as engine
    from qkv.engines.triton import nan_repair, weights
    from qkv.engines.triton.forward import forward, hopper
    from qkv.engines.triton.launching import precompile, tile_choice
    from qkv.engines.triton.launching.kernel_call import KernelCall
    from qkv.engines.triton.tile_functions import score_tile
    from qkv.engines.triton.tile_functions.records import ARRAY_COUNT, intern_constexprs
    from qkv.engines.validation import build_call

    launchers: list[str] = []
    read: list[None] = []

    class Driver:
        launcher_cls = staticmethod(lambda src, metadata: launchers.append(src.name))
        get_current_device = get_current_stream = staticmethod(lambda *args: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    triton.runtime.driver.set_active(Driver())
    precompile.ON_SOURCE_READ.set(lambda: read.append(None))
    half, full = torch.bfloat16, torch.float32
    facts = {"D": 64, "BLOCK_D": 64, "WEIGHTING": "softmax", "EXPONENTIAL": True}
    triton.knobs.compilation.always_compile = True  # not read where Triton has it on disk
    inner = score_tile.centre_kernel.warmup(
        half,
        half,
        None,
        full,
        100,
        F=intern_constexprs(facts | {"ROWS": 64}),
        grid=(2, 1, 1),
        num_warps=4,
    )
    triton.knobs.compilation.always_compile = False
    before = len(read)
    merge = forward.merge_kernel.warmup(
        full, full, full, half, full, full, 100, 4,
        F=intern_constexprs(facts | {"BLOCK_S": 16, "APART": False}), grid=(100, 1, 1), num_warps=4,
    )  # fmt: skip
    x = torch.zeros(1, 2, 32, 16, dtype=half, requires_grad=True)

    def run():
        nan_repair.repair_output(x.detach().clone(), *[x.detach()] * 3, 0.3)
        weights.compute_weights(x, x, torch.zeros(1, 2, 32), 0.3, 0, True).float().sum().backward()

    def hopped():
        """Tiles of the kernel for Hopper that are compiled in a third of the time."""
        hopper.TILES[64] = hopper.TILES[128]._replace(cols=64)
        y, rows = x.detach()[..., :1].expand(1, 2, 32, 64).contiguous(), torch.zeros(2, 1, 2, 32)
        call = KernelCall(y, y, y, torch.zeros(1, 2, 32), *[None] * (ARRAY_COUNT - 4), 0.3)
        hopper.launch_pool(call, y, rows[0], rows)

    with torch.autograd.set_multithreading_enabled(False):
        jobs = precompile.find_missing_kernels(run, True)
    assert {key.name for key in jobs} == {
        "repair_kernel", "weights_kernel", "backward_queries_kernel", "backward_keys_kernel",
    }  # fmt: skip
    tile_choice.TILE_OVERRIDES["to_pairs"] = tile_choice.Tile(16, 16, 16, 4, 1)
    wide = torch.zeros(1, 1, 32, 160, dtype=half)
    mask = torch.zeros(32, 32, requires_grad=True)  # of another dtype than the values
    result = engine.find_missing_kernels(
        build_call(wide, wide, wide, "dot", "softmax", mask, 0.0, None, None)
    )
    jobs |= {key: job for key, job in result.items() if key.name == "backward_mask_kernel"}
    jobs |= precompile.find_missing_kernels(hopped, False)
    for score in ("triangular", "laplace"):
        result = engine.find_missing_kernels(
            build_call(x, x, x, score, "softmax", None, 0.0, None, None)
        )
        jobs |= {key: job for key, job in result.items() if key.name == "pool_kernel"}
    made = []
    for kernel, grid, inputs, named, _ in (job.args for job in jobs.values()):
        arrays = type(inputs[0])(*map(triton.MockTensor.wrap_dtype, inputs[0]))
        made.append(kernel.warmup(arrays, *inputs[1:], grid=grid, **named))
    assert len(made) == 9
    made += [inner, merge]
    return {
        "bytes": [len(x.asm["cubin"]) for x in made],
        "names": [x.src.name for x in made],
        "waits": [x.src.name for x in made if "griddepcontrol.wait" in x.asm["ptx"]],
        "early": [x.src.name for x in made if x.metadata.launch_pdl],
        "launchers": launchers,
        "reads_before": [before],
    }


@pytest.fixture(scope="module")
def report():
    """What this file finds when it is run, by Python, without the interpreter."""
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_forty_lengths_compile_a_kernel_twice_at_most(report, kind):
    count = Counter(report[kind])
    assert {"pool_kernel", "backward_keys_kernel"} <= {name.split()[0] for name in count}
    assert max(count.values()) <= MOST[kind], count


def test_the_kernels_are_compiled_for_hopper_without_a_gpu(report):
    assert min(report["compiled"]["bytes"]) > 1000


def test_what_is_started_early_waits_by_itself(report):
    assert report["compiled"]["waits"] == report["compiled"]["early"] == ["repair_kernel"]


def test_a_launcher_is_built_while_its_kernel_is_compiled(report):
    about = report["compiled"]
    assert sorted(about["launchers"]) == sorted(about["names"])


def test_a_kernel_tells_when_it_has_been_read(report):
    assert report["compiled"]["reads_before"] == [2], "then, and in the end"


if __name__ == "__main__":
    random = Random(0)
    lengths = [random.randint(60, 1500) for _ in range(40 if sampling.FULL else 15)]
    report: dict = {kind: keys_of(kind, lengths) for kind in KINDS}
    print(json.dumps(report | {"compiled": compiled()}))
