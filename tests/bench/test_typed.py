import os
import subprocess
import sys

import pytest

from tests import sampling

pytest.importorskip("triton", reason="the kernels are written in Triton")


def test_the_compiler_accepts_a_kernel_of_each_name():
    """In a process of its own, without the interpreter."""
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    seed = str(sum(map(ord, sampling.DAY)))
    done = subprocess.run(
        [sys.executable, "-m", "bench.typed", "72", seed, "1"],
        env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "topk_kernel" in done.stdout
    assert "entmax_kernel" in done.stdout
