"""All that a call and its way back will launch, compiled together before the first launch.

One kernel after the other, each when it is launched, a first call with its gradient would wait for
the sum. A dry run, which launches nothing, tells them all, and threads compile them side by side:
what Triton does in Python, which holds the interpreter's lock, one after the other, so that the
first is soon beyond it; and meanwhile, by a C compiler, what reaches the device and what launches.
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
from qkv.frameworks.torch_functions import without_saved_tensor_hooks
from qkv.util.progress import progress_bar

Jobs = dict[Any, Callable[[], Any]]
"""What compiles each kernel that has to be, by its `launch.KernelKey`."""

SLOWEST_KERNELS = (
    "pool_kernel", "topk_kernel", "backward_keys_kernel", "backward_queries_kernel",
    "entmax_kernel", "_features_grad_kernel", "_projection_kernel", "_features_kernel",
    "wide_gradients_kernel",
)  # fmt: skip
"""Kernels that take longest to compile, by name."""

ON_SOURCE_READ: ContextVar[Callable[[], Any]] = ContextVar("ON_SOURCE_READ", default=bool)
"""Whom to tell that Triton has read the kernel that this thread compiles."""

DRY_RUN_JOBS: ContextVar[Jobs | None] = ContextVar("DRY_RUN_JOBS", default=None)
"""What a dry run has found so far."""

DRY_RUN: ContextVar[tuple[Callable[[], Any], bool] | None] = ContextVar("DRY_RUN", default=None)
"""What to run dry when a kernel is met that is not compiled, and whether gradients are wanted."""


@contextmanager
def compile_together(run: Callable[[], Any]) -> Iterator[None]:
    """Where a kernel must be compiled meanwhile, so are all others that `run()` would launch."""
    token = DRY_RUN.set((run, torch.is_grad_enabled()))
    try:
        yield
    finally:
        DRY_RUN.reset(token)


def find_missing_kernels(run: Callable[[], Any], learns: bool) -> Jobs:
    """What `run()` would launch and is not compiled.

    Nothing where the arrays of the way back do not fit beside: each is compiled when launched.
    """
    jobs: Jobs = {}
    quiet, token = DRY_RUN.set(None), DRY_RUN_JOBS.set(jobs)
    try:
        with torch.set_grad_enabled(learns):  # the kernel may have been met inside of a node
            run()
    except torch.cuda.OutOfMemoryError:
        jobs = {}
    finally:
        DRY_RUN_JOBS.reset(token)
        DRY_RUN.reset(quiet)
    return jobs


def compile_all_missing(known: dict[Any, Any]) -> None:
    """Add to `known` what the run at hand will launch; nothing where none was announced."""
    dry = DRY_RUN.get()
    jobs = {} if dry is None else find_missing_kernels(*dry)
    if len(jobs) > 1:
        compile_jobs(jobs, known)


def compile_jobs(jobs: Jobs, known: dict[Any, Any], label: str | None = None) -> None:
    """Do the jobs side by side, and add what comes of them to `known`; a label has a bar."""
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
    """Has Triton build what reaches the device, and read its own files, by which it knows what it
    has on disk, while kernels are imported and listed: else each thread would do both anew, of
    those that come before they are done."""
    threads = tuple(
        Thread(target=x, daemon=True) for x in (_initialize_driver, _compute_triton_key)
    )
    for x in threads:
        x.start()
    return threads


def _initialize_driver() -> None:
    with suppress(Exception):  # a launch says so
        triton.runtime.driver.active  # noqa: B018


def _compute_triton_key() -> None:
    # A thread that computes lets go of Python's lock every 5 ms, and here it is wanted 800 times.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with suppress(ImportError):  # another Triton has it elsewhere
            from triton.runtime.cache import triton_key

            triton_key()
    finally:
        sys.setswitchinterval(before)


class CompileNotifier:
    """A kernel of Triton's that tells when it has been read, and has its launcher built while it is
    compiled."""

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
                ON_SOURCE_READ.get()()  # where Triton had it on disk, it was not read
                building.join()

        self.ASTSource, self.compile = Source, compile_with_launcher
        return found


class NotifyingKernel(CompileNotifier, triton.JITFunction):  # type: ignore[misc]
    """What `triton.jit` makes, and such a one."""


def _build_launcher(src: Any) -> None:
    """Build what launches such a kernel, which Triton then finds on disk."""
    numbers = ("global_scratch_size", "global_scratch_align", "profile_scratch_size",
               "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")  # fmt: skip
    with suppress(Exception):  # Triton builds it itself, and says so
        unknown = SimpleNamespace(**dict.fromkeys(numbers))
        triton.runtime.driver.active.launcher_cls(src, unknown)


def run_forward_and_backward(
    run: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]
) -> None:
    """`run` on copies of the arrays that are only marked, and its gradient for those that want one.

    In this thread, which alone knows that the run is dry.
    """
    marked = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
    with without_saved_tensor_hooks():
        found = [x for x in run(marked) if isinstance(x, Tensor) and x.requires_grad]
        if found:
            with torch.autograd.set_multithreading_enabled(False):
                wanted = [x for x in marked if x.requires_grad]
                # Of one number: torch would import sympy to look at the shapes of gradients given.
                torch.autograd.grad(sum(x.sum() for x in found), wanted, allow_unused=True)
