"""Compile all kernels of a call and of its gradient in parallel, before the first launch.

Triton compiles a kernel when it is launched, so a first call would wait for one kernel after the
other. A dry run, which launches nothing, lists the kernels instead, and threads compile them:

1. Triton's front end runs in Python and holds the interpreter's lock. Kernels pass it one by one,
   the longest first, so that the first soon reaches step 2.
2. LLVM, ptxas and the C compiler of the launcher run without the lock, in parallel.

This module holds the library's only changes to Triton and to the interpreter:

- `CompileNotifier` subclasses `triton.JITFunction`. It reports the end of step 1, and builds the
  launcher while the kernel is compiled.
- `frequent_thread_switches` shortens the interpreter's switch interval while Triton hashes its own
  files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from qkv.frameworks.threads import submit_job
from qkv.frameworks.torch import without_saved_tensor_hooks
from qkv.util.progress import progress_bar

Jobs = dict[Any, Callable[[], Any]]
"""Functions that compile one kernel each, by `launch.KernelKey`."""

SLOWEST_KERNELS = (
    "pool_kernel", "topk_kernel", "backward_few_queries_kernel", "backward_keys_kernel",
    "backward_queries_kernel", "entmax_kernel", "_features_grad_kernel", "_projection_kernel",
    "_features_kernel", "wide_gradients_kernel",
)  # fmt: skip
"""Names of the kernels that take longest to compile, the longest first."""

ON_SOURCE_READ: ContextVar[Callable[[], Any]] = ContextVar("ON_SOURCE_READ", default=bool)
"""Called when Triton's front end is done with the kernel that this thread compiles."""

DRY_RUN_JOBS: ContextVar[Jobs | None] = ContextVar("DRY_RUN_JOBS", default=None)
"""The kernels that the current dry run has found; None outside of a dry run."""

DRY_RUN: ContextVar[tuple[Callable[[], Any], bool] | None] = ContextVar("DRY_RUN", default=None)
"""The function to run dry when a kernel is not compiled, and whether gradients are needed."""


@contextmanager
def compile_together(run: Callable[[], Any]) -> Iterator[None]:
    """Inside this context, the first missing kernel makes all kernels of `run()` compile."""
    token = DRY_RUN.set((run, torch.is_grad_enabled()))
    try:
        yield
    finally:
        DRY_RUN.reset(token)


def find_missing_kernels(run: Callable[[], Any], learns: bool) -> Jobs:
    """Return the kernels that `run()` would launch and that are not compiled.

    The result is empty if the arrays of the backward pass do not fit into memory. Each kernel is
    then compiled when it is launched.
    """
    jobs: Jobs = {}
    quiet, token = DRY_RUN.set(None), DRY_RUN_JOBS.set(jobs)
    try:
        with torch.set_grad_enabled(learns):  # an autograd node may have disabled it
            run()
    except torch.cuda.OutOfMemoryError:
        jobs = {}
    finally:
        DRY_RUN_JOBS.reset(token)
        DRY_RUN.reset(quiet)
    return jobs


def compile_all_missing(known: dict[Any, Any]) -> None:
    """Compile the kernels of the function in `DRY_RUN` and add them to `known`."""
    dry = DRY_RUN.get()
    jobs = {} if dry is None else find_missing_kernels(*dry)
    if len(jobs) > 1:
        compile_jobs(jobs, known)


def compile_jobs(jobs: Jobs, known: dict[Any, Any], label: str | None = None) -> None:
    """Run the jobs in parallel and add the results to `known`; a label shows a progress bar."""
    if not jobs:
        return
    for thread in start_triton_setup():
        thread.join()
    long = sorted(
        (key for key in jobs if key.name in SLOWEST_KERNELS),
        key=lambda x: SLOWEST_KERNELS.index(x.name),
    )
    ended: SimpleQueue[Any] = SimpleQueue()

    def run_job(key: Any, read: SimpleQueue[Any]) -> Any:
        token = ON_SOURCE_READ.set(lambda: read.put(key))
        try:
            return jobs[key]()
        finally:
            ON_SOURCE_READ.reset(token)
            read.put(key)
            ended.put(key)

    results: Jobs = {}
    with nullcontext() if label is None else progress_bar(label, len(jobs)) as shown:
        for key in (*long, *[key for key in jobs if key.name not in SLOWEST_KERNELS]):
            read: SimpleQueue[Any] = SimpleQueue()
            results[key] = submit_job(run_job, key, read)
            read.get()
        if shown is not None:
            for done in range(1, len(jobs) + 1):
                ended.get()
                shown(done, len(jobs))
        known.update({key: result() for key, result in results.items()})


@cache
def start_triton_setup() -> tuple[Thread, ...]:
    """Start two threads, once: Triton builds its driver, and hashes its own files.

    Both take seconds and overlap with the import of the kernels and the dry run. Otherwise every
    compiling thread that starts before they are done would repeat them.
    """
    threads = tuple(
        Thread(target=x, daemon=True) for x in (_initialize_driver, _compute_triton_key)
    )
    for x in threads:
        x.start()
    return threads


def _initialize_driver() -> None:
    with suppress(Exception):  # a launch raises the same error
        triton.runtime.driver.active  # noqa: B018


def _compute_triton_key() -> None:
    with suppress(ImportError), frequent_thread_switches():  # other versions define it elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    """Let threads take the interpreter's lock after 0.1 ms instead of 5 ms.

    `triton_key` reads about 800 files and needs the lock after each read. The calling thread
    computes meanwhile and releases the lock once per switch interval. Measured with a busy
    thread on two ARM cores: 4.0 s with Python's default of 5 ms, 2.3 s with 0.1 ms.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class CompileNotifier:
    """Subclass of Triton's kernel class that reports the end of the front end.

    It also builds the kernel's launcher in a thread while the kernel is compiled. Triton would
    build it afterwards. `create_binder` is the method in which Triton sets `ASTSource` and
    `compile`; a Triton without it ignores this class, and kernels compile one after the other.
    """

    def create_binder(self) -> Any:
        found = super().create_binder()  # type: ignore[misc]
        source, compiled = self.ASTSource, self.compile  # type: ignore[has-type]

        class Source(source):  # type: ignore[misc,valid-type]
            def make_ir(self, *given: Any, **named: Any) -> Any:
                try:
                    return super().make_ir(*given, **named)
                finally:
                    ON_SOURCE_READ.get()()

        def compile_with_launcher(src: Any, *given: Any, **named: Any) -> Any:
            building = Thread(target=_build_launcher, args=(src,), daemon=True)
            building.start()
            try:
                return compiled(src, *given, **named)
            finally:
                ON_SOURCE_READ.get()()  # a kernel from Triton's cache skips the front end
                building.join()

        self.ASTSource, self.compile = Source, compile_with_launcher
        return found


class NotifyingKernel(CompileNotifier, triton.JITFunction):  # type: ignore[misc]
    """The kernel class of `triton.jit`, with `CompileNotifier`."""


def _build_launcher(src: Any) -> None:
    """Build the kernel's launcher; Triton then finds it in its cache on disk."""
    numbers = ("global_scratch_size", "global_scratch_align", "profile_scratch_size",
               "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")  # fmt: skip
    with suppress(Exception):  # Triton builds it again and raises the error
        unknown = SimpleNamespace(**dict.fromkeys(numbers))
        triton.runtime.driver.active.launcher_cls(src, unknown)


def run_forward_and_backward(
    run: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]
) -> None:
    """Run `run` and its backward pass on detached views of the arrays.

    Autograd stays in this thread, because only this thread knows that the run is dry.
    """
    marked = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
    with without_saved_tensor_hooks():
        found = [x for x in run(marked) if isinstance(x, Tensor) and x.requires_grad]
        wanted = [x for x in marked if x.requires_grad]
        if found and wanted:
            with torch.autograd.set_multithreading_enabled(False):
                # A scalar loss: with given gradients torch would import sympy to check shapes.
                torch.autograd.grad(sum(x.sum() for x in found), wanted, allow_unused=True)
