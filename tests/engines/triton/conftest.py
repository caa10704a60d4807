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
def run_both_backward_ways(monkeypatch):
    """Calls with few queries run the kernels for many queries too; the gradients must agree."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from qkv.engines.triton.backward import backward, backward_few_queries
    from qkv.engines.triton.launching import launch

    def fill_both(call, along, along_lse, out, kept, known, exact, grads):
        given = call, along, along_lse, out, kept, known, exact
        fill(*given, grads)
        if launch.launch_kernel is not launch_kernel or not launch.is_interpreted():
            return  # the test stands in for launches
        other = backward.Gradients(*map(torch.empty_like, grads))
        backward.fill_by_sides(*given, other, True, True, False, False)
        close = 3e-2 if call.query.dtype != torch.float32 else 1e-3
        for name, x, y in zip(grads._fields[:4], grads, other, strict=False):
            if x.numel():
                size = y.float().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
                torch.testing.assert_close(
                    x, y, rtol=close, atol=close * size + 1e-6, equal_nan=True, msg=name
                )

    fill, launch_kernel = backward_few_queries.fill_gradients, launch.launch_kernel
    monkeypatch.setattr(backward_few_queries, "fill_gradients", fill_both)


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
