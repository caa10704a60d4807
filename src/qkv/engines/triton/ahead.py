"""All that a call and its way back will launch, compiled together before the first launch.

One kernel after the other, each when it is launched, a first call with its gradient would wait for
the sum. A dry run, which launches nothing, tells them all, and threads compile them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]


LISTED: ContextVar[dict[Key, Callable[[], Any]] | None] = ContextVar("LISTED", default=None)
"""In a dry run, what compiles each kernel that has to be."""

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


def compile_all(known: dict[Key, Any]) -> None:
    """Add to `known` what the run at hand will launch; nothing where none was announced."""
    dry = DRY.get()
    if dry is None:
        return
    run, learns = dry
    jobs: dict[Key, Callable[[], Any]] = {}
    quiet, token = DRY.set(None), LISTED.set(jobs)
    try:
        with torch.set_grad_enabled(learns):  # the kernel may have been met inside of a node
            run()
    except torch.cuda.OutOfMemoryError:
        return  # the arrays of the way back do not fit beside: each is compiled when launched
    finally:
        LISTED.reset(token)
        DRY.reset(quiet)
    if len(jobs) > 1:
        with ThreadPoolExecutor(len(jobs)) as pool:
            known.update(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))


def there_and_back(run: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> None:
    """`run` on copies of the arrays that are only marked, and its gradient for those that want one.

    In this thread, which alone knows that the run is dry.
    """
    marked = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
    found = [x for x in run(marked) if isinstance(x, Tensor) and x.requires_grad]
    if found:
        with torch.autograd.set_multithreading_enabled(False):
            wanted = [x for x in marked if x.requires_grad]
            torch.autograd.grad(found, wanted, found, allow_unused=True)
