"""What a call and its gradient launch is compiled together, before the first launch."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.utils.checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton")

import qkv
from qkv import scores, weightings
from qkv.engines import plan_cache, triton
from qkv.engines.triton import norms
from qkv.engines.triton.backward import backward_few_queries, backward_keys, backward_queries
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import kernel_call, launch, launch_replay, precompile
from qkv.engines.triton.sparse import thresholds
from qkv.engines.triton.tile_functions import score_tile
from qkv.frameworks import threads
from tests.engines.triton.test_launch_replay import Kernel
from tests.interrupt import cores, moments

pytestmark = [
    pytest.mark.sample_of_module(9),
    pytest.mark.skipif(not triton.is_interpreted(), reason="launches are stood in for"),
]


class Ready(Kernel):
    """An interpreted kernel that notes if it is compiled in a thread of its own, or where it is
    launched."""

    def __init__(self, kernel, ahead, late):
        super().__init__(kernel)
        self.ahead, self.late = ahead, late

    def warmup(self, *args, **options):
        alone = threading.current_thread() is threading.main_thread()
        (self.late if alone else self.ahead).append(self.kernel.__name__)
        return super().warmup(*args, **options)


@pytest.fixture
def met(monkeypatch):
    """The kernels that were compiled ahead, and those when they were launched."""
    early, late = [], []
    for module, names in (
        (forward, ("pool_kernel", "merge_kernel")), (score_tile, ("centre_kernel",)),
        (backward_keys, ("backward_keys_kernel",)),
        (backward_queries, ("backward_queries_kernel",)),
        (backward_few_queries, ("backward_few_queries_kernel", "join_parts_kernel")),
        (norms, ("_square_kernel", "_square_backward_kernel")),
        (thresholds, ("entmax_kernel", "topk_kernel")),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, Ready(getattr(module, name), early, late))
    monkeypatch.setattr(launch, "COMPILED_KERNELS", {})
    monkeypatch.setattr(launch_replay, "LAUNCH_LISTS", launch_replay.LaunchListCache())
    for name in ("PLANS_BY_SIGNATURE", "_PLANS_BY_SIZE_CLASS"):
        monkeypatch.setattr(plan_cache, name, {})
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "count_processors", lambda device: 1)
    monkeypatch.setattr(launch, "is_current_device", lambda device: True)
    monkeypatch.setattr(launch, "current_stream", lambda index: None)
    facts = kernel_call._base_constexprs.__wrapped__
    monkeypatch.setattr(
        kernel_call, "_base_constexprs", lambda *args: facts(*args) | {"FAST": False}
    )
    return early, late


def arrays_of(learned=True):
    made = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 20, 16), (1, 2, 24, 16), (1, 2, 24, 8))
    return [torch.randn(x, generator=made).requires_grad_(learned) for x in shapes]


WAY_BACK = {"backward_few_queries_kernel"}
ENTMAX = {"pool_kernel", "entmax_kernel", "join_parts_kernel", *WAY_BACK}
CASES = {
    "gaussian": ({"score": scores.Gaussian(1.5)}, {"pool_kernel", *WAY_BACK}),
    "entmax": (
        {"weighting": "entmax15"},
        {"pool_kernel", "entmax_kernel", "join_parts_kernel", *WAY_BACK},
    ),
    "top-k": ({"weighting": weightings.TopK(3)}, {"pool_kernel", "topk_kernel", *WAY_BACK}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_of_both_ways_are_compiled_in_threads_of_their_own(met, name):
    early, late = met
    options, kernels = CASES[name]
    arrays = arrays_of()
    out = qkv.attend(*arrays, engine="triton", **options)
    assert set(early) == kernels and not late
    out.square().sum().backward()
    assert not late, "backward found everything that it needs"
    wide = [x.detach().double().requires_grad_() for x in arrays]
    want = qkv.attend(*wide, engine="dense", **options)
    want.square().sum().backward()
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    for x, y in zip(arrays, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-4, rtol=1e-4)


def test_checkpointing_sees_the_same_saved_tensors_in_the_first_call_and_in_its_recomputation(met):
    arrays = arrays_of()
    saved = []

    def attend(*arrays):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            return qkv.attend(*arrays, engine="triton", weighting="entmax15")

    first = attend(*arrays)
    count = len(saved)
    second = attend(*arrays)
    assert len(saved) == 2 * count
    torch.testing.assert_close(first, second)
    for weighting in ("sparsemax", "entmax15"):  # the first call of its kind, and a later one
        got = torch.utils.checkpoint.checkpoint(
            lambda *x, w=weighting: qkv.attend(*x, engine="triton", weighting=w),
            *arrays,
            use_reentrant=False,
        )
        want = qkv.attend(*arrays, engine="triton", weighting=weighting)
        for x, y in zip(
            torch.autograd.grad(got.square().sum(), arrays),
            torch.autograd.grad(want.square().sum(), arrays),
            strict=True,
        ):
            torch.testing.assert_close(x, y)


def test_without_a_gradient_backward_is_not_compiled(met):
    early, late = met
    with torch.no_grad():
        qkv.attend(*arrays_of(), engine="triton", weighting="entmax15")
    assert set(early) == {"pool_kernel", "entmax_kernel"} and not late
    qkv.attend(*arrays_of(), engine="triton", weighting="entmax15").sum().backward()
    assert set(late) == {"join_parts_kernel", *WAY_BACK}


def test_where_backward_does_not_fit_each_kernel_waits_for_its_launch(met, monkeypatch):
    early, late = met

    def full(*args):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(precompile, "run_forward_and_backward", full)
    qkv.attend(*arrays_of(), engine="triton", weighting="entmax15").sum().backward()
    assert not early and set(late) == CASES["entmax"][1]


def test_warm_compiles_what_the_call_and_its_gradient_launch(met, monkeypatch):
    early, late = met
    options = {"weighting": "entmax15", "engine": "triton"}
    arrays = arrays_of()
    monkeypatch.setattr(triton, "is_interpreted", lambda: True)
    report = qkv.warm(*arrays, **options)
    assert report.engine == "triton" and report.is_plan_cached and not report.compiled
    monkeypatch.setattr(triton, "is_interpreted", lambda: False)
    monkeypatch.setattr(triton, "unsupported_reason", lambda call: None)
    assert "compiles 5 kernels now, about" in str(qkv.explain(*arrays, **options))
    report = qkv.warm(*arrays, **options)
    assert len(report.compiled) == 5 and "entmax_kernel of float32" in str(report)
    assert set(early) == CASES["entmax"][1]
    assert "kernels: ready" in str(qkv.explain(*arrays, **options))
    assert "nothing to compile" in str(qkv.warm(*arrays, **options))
    qkv.attend(*arrays, **options).sum().backward()
    assert not late, "all was there"


def test_warm_keeps_a_plan_where_nothing_is_compiled(monkeypatch):
    for name in ("PLANS_BY_SIGNATURE", "_PLANS_BY_SIZE_CLASS"):
        monkeypatch.setattr(plan_cache, name, {})
    arrays = [x.detach() for x in arrays_of()]
    assert qkv.warm(*arrays, weighting="sigmoid").is_plan_cached
    assert "plan:   cached" in str(qkv.explain(*arrays, weighting="sigmoid"))


class Named(NamedTuple):
    name: str


@pytest.fixture
def one():
    with cores(1):
        yield


def test_what_takes_longest_begins_first():
    begun, known = [], {}
    names = ("centre_kernel", "backward_keys_kernel", "_square_kernel", "pool_kernel")
    precompile.compile_jobs({Named(x): partial(begun.append, x) for x in names}, known)
    assert begun == ["pool_kernel", "backward_keys_kernel", "centre_kernel", "_square_kernel"]
    assert known == dict.fromkeys(map(Named, names))


@pytest.mark.parametrize("label", [None, "compiling"])
def test_an_interrupted_compilation_keeps_no_thread(one, label):
    """Ctrl-C wherever a call of C returns, to ours and to the standard library's."""
    jobs = {
        Named(x): partial(str, x) for x in ("pool_kernel", "backward_keys_kernel", "centre_kernel")
    }
    waits = (precompile.__file__, threads.__file__, threading.__file__)
    waits += (os.path.dirname(concurrent.futures.__file__),)
    for _ in moments(lambda: precompile.compile_jobs(jobs, {}, label), waits):
        known = {}
        precompile.compile_jobs(jobs, known)
        assert known == {key: key.name for key in jobs}


def test_an_error_of_a_compilation_is_raised(one):
    known = {}
    jobs = {Named("pool_kernel"): partial(int, "x"), Named("centre_kernel"): partial(int, "1")}
    with pytest.raises(ValueError, match="'x'"):
        precompile.compile_jobs(jobs, known, "compiling")
    assert known == {}


def test_a_kernel_is_read_after_the_one_before_it_while_that_is_compiled(monkeypatch):
    monkeypatch.setattr(threads, "CORE_COUNT", 2)
    threads._job_queue.cache_clear()
    both, compiled_names = threading.Barrier(2, timeout=300), []

    def job(name):
        compiled_names.append(name)
        precompile.ON_SOURCE_READ.get()()
        both.wait()  # for the other, which is read by now

    precompile.compile_jobs(
        {Named(x): partial(job, x) for x in ("centre_kernel", "pool_kernel")}, {}
    )
    threads._job_queue.cache_clear()
    assert compiled_names == ["pool_kernel", "centre_kernel"]


def test_a_call_that_torch_compiles_begins_nothing(monkeypatch):
    """A thread cannot be part of a graph."""
    monkeypatch.setattr(triton, "is_interpreted", lambda: False)
    monkeypatch.setattr(triton, "unsupported_reason", lambda call: None)
    arrays = [x.detach() for x in arrays_of()]

    def attend(*args):
        return qkv.attend(*args, weighting="sigmoid", engine="triton")

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arrays), attend(*arrays))
