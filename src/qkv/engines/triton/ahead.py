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

from qkv.arrays.functions import without_saved_tensor_hooks
from qkv.arrays.threads import begin
from qkv.bar import bar

Jobs = dict[Any, Callable[[], Any]]
"""What compiles each kernel that has to be, by its `launch.Key`."""

LONGEST = (
    "pool", "topk_kernel", "to_keys", "to_queries", "entmax_kernel", "_features_grad_kernel",
    "_hidden_kernel", "_features_kernel", "grads_kernel",
)  # fmt: skip
"""Kernels that take longest to compile, by name."""

READ: ContextVar[Callable[[], Any]] = ContextVar("READ", default=bool)
"""Whom to tell that Triton has read the kernel that this thread compiles."""

LISTED: ContextVar[Jobs | None] = ContextVar("LISTED", default=None)
"""What a dry run has found so far."""

DRY: ContextVar[tuple[Callable[[], Any], bool] | None] = ContextVar("DRY", default=None)
"""What to run dry when a kernel is met that is not compiled, and whether gradients are wanted."""


@contextmanager
def together(run: Callable[[], Any]) -> Iterator[None]:
    """Where a kernel must be compiled meanwhile, so are all others that `run()` would launch."""
    token = DRY.set((run, torch.is_grad_enabled()))
    try:
        yield
    finally:
        DRY.reset(token)


def missing(run: Callable[[], Any], learns: bool) -> Jobs:
    """What `run()` would launch and is not compiled.

    Nothing where the arrays of the way back do not fit beside: each is compiled when launched.
    """
    jobs: Jobs = {}
    quiet, token = DRY.set(None), LISTED.set(jobs)
    try:
        with torch.set_grad_enabled(learns):  # the kernel may have been met inside of a node
            run()
    except torch.cuda.OutOfMemoryError:
        jobs = {}
    finally:
        LISTED.reset(token)
        DRY.reset(quiet)
    return jobs


def compile_all(known: dict[Any, Any]) -> None:
    """Add to `known` what the run at hand will launch; nothing where none was announced."""
    dry = DRY.get()
    jobs = {} if dry is None else missing(*dry)
    if len(jobs) > 1:
        compile_jobs(jobs, known)


def compile_jobs(jobs: Jobs, known: dict[Any, Any], label: str | None = None) -> None:
    """Do the jobs side by side, and add what comes of them to `known`; a label has a bar."""
    if not jobs:
        return
    for thread in begun():
        thread.join()
    long = sorted((key for key in jobs if key.name in LONGEST), key=lambda x: LONGEST.index(x.name))
    ended: SimpleQueue[Any] = SimpleQueue()

    def job(key: Any, read: SimpleQueue[Any]) -> Any:
        token = READ.set(lambda: read.put(key))
        try:
            return jobs[key]()
        finally:
            READ.reset(token)
            read.put(key)
            ended.put(key)

    results: Jobs = {}
    with nullcontext() if label is None else bar(label, len(jobs)) as shown:
        for key in (*long, *[key for key in jobs if key.name not in LONGEST]):
            read: SimpleQueue[Any] = SimpleQueue()
            results[key] = begin(job, key, read)
            read.get()
        if shown is not None:
            for done in range(1, len(jobs) + 1):
                ended.get()
                shown(done, len(jobs))
        known.update({key: result() for key, result in results.items()})


@cache
def begun() -> tuple[Thread, ...]:
    """Has Triton build what reaches the device, and read its own files, by which it knows what it
    has on disk, while kernels are imported and listed: else each thread would do both anew, of
    those that come before they are done."""
    threads = tuple(Thread(target=x, daemon=True) for x in (_reach, _read_itself))
    for x in threads:
        x.start()
    return threads


def _reach() -> None:
    with suppress(Exception):  # a launch says so
        triton.runtime.driver.active  # noqa: B018


def _read_itself() -> None:
    # A thread that computes lets go of Python's lock every 5 ms, and here it is wanted 800 times.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with suppress(ImportError):  # another Triton has it elsewhere
            from triton.runtime.cache import triton_key

            triton_key()
    finally:
        sys.setswitchinterval(before)


class Heard:
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
                    READ.get()()

        def beside(src: Any, *given: Any, **named: Any) -> Any:
            building = Thread(target=_launcher, args=(src,), daemon=True)
            building.start()
            try:
                return compiled(src, *given, **named)
            finally:
                READ.get()()  # where Triton had it on disk, it was not read
                building.join()

        self.ASTSource, self.compile = Source, beside
        return found


class Kernel(Heard, triton.JITFunction):  # type: ignore[misc]
    """What `triton.jit` makes, and such a one."""


def _launcher(src: Any) -> None:
    """Build what launches such a kernel, which Triton then finds on disk."""
    numbers = ("global_scratch_size", "global_scratch_align", "profile_scratch_size",
               "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")  # fmt: skip
    with suppress(Exception):  # Triton builds it itself, and says so
        unknown = SimpleNamespace(**dict.fromkeys(numbers))
        triton.runtime.driver.active.launcher_cls(src, unknown)


def there_and_back(run: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> None:
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
