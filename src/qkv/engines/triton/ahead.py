"""All that a call and its way back will launch, compiled together before the first launch.

One kernel after the other, each when it is launched, a first call with its gradient would wait for
the sum. A dry run, which launches nothing, tells them all, and threads compile them side by side.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from qkv.arrays.threads import begin
from qkv.bar import bar

Jobs = dict[Any, Callable[[], Any]]
"""What compiles each kernel that has to be, by its `launch.Key`."""

LONGEST = ("pool", "topk_kernel", "to_keys")
"""Kernels that take longest to compile, by name."""
HEAD_START = 0.25
"""Seconds that each of them has before the next begins. What Triton does in Python holds the
interpreter's lock: of four kernels together, each had done with it after a second (H200)."""

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
    long = sorted((key for key in jobs if key.name in LONGEST), key=lambda x: LONGEST.index(x.name))
    ended: SimpleQueue[Any] = SimpleQueue()

    def job(key: Any) -> Any:
        try:
            return jobs[key]()
        finally:
            ended.put(key)

    begun: Jobs = {}
    done = 0
    with contextlib.nullcontext() if label is None else bar(label, len(jobs)) as shown:
        for key in (*long, *[key for key in jobs if key.name not in LONGEST]):
            begun[key] = begin(job, key)
            until = time.monotonic() + HEAD_START
            with contextlib.suppress(Empty):
                while key in long[:-1] and done < len(begun):
                    ended.get(timeout=max(0, until - time.monotonic()))
                    done += 1
        while shown is not None and done < len(jobs):
            ended.get()
            done += 1
            shown(done, len(jobs))
        known.update({key: result() for key, result in begun.items()})


def there_and_back(run: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> None:
    """`run` on copies of the arrays that are only marked, and its gradient for those that want one.

    In this thread, which alone knows that the run is dry.
    """
    marked = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
    found = [x for x in run(marked) if isinstance(x, Tensor) and x.requires_grad]
    if found:
        with torch.autograd.set_multithreading_enabled(False):
            wanted = [x for x in marked if x.requires_grad]
            # Of one number: torch would import sympy to look at the shapes of gradients given.
            torch.autograd.grad(sum(x.sum() for x in found), wanted, allow_unused=True)
