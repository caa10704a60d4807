"""The kernels run on CUDA where there is one, else under Triton's interpreter on the CPU, which
tests/conftest.py asks for."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    if torch.cuda.is_available():
        torch.set_default_device("cuda")


@pytest.fixture(autouse=True)
def same_draws():
    """Each test draws the same numbers whatever ran before it: roundings are a matter of them."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_facts():
    """What a test that stands in for a device had kernels compiled for is not the next one's."""
    from qkv.engines.triton.launching import kernel_call

    yield
    kernel_call._base_constexprs.cache_clear()


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    """The interpreter without what it does twice, and with a product of bfloat16."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    def call(self, *args, **kwargs):
        # A launch has made triton.language ready; doing it again for each function that a kernel
        # calls takes most of the time.
        ours = self.fn.__module__.startswith("qkv.")
        return self.rewrite()(*args, **kwargs) if ours else slow(self, *args, **kwargs)

    slow, plain = InterpretedFunction.__call__, InterpreterBuilder.create_dot

    def widened(x):
        # The interpreter takes the bits of a bfloat16 for a whole number.
        if x.dtype.scalar.name != "bf16":
            return x
        bits = x.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def product(self, a, b, *rest):
        return plain(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
