"""Attention over keys held by 1, 2 and 4 processes: time and bytes of a step, forward and backward.

The alternative is to gather: every process gets all keys and values, attends, and the gradients are
summed. gloo on one machine, one thread for each process. With more processes than cores, the times
do not predict several machines, but the bytes do. torch's context_parallel cannot be compared here:
it has no rule for the CPU kernel.

python -m bench.shards [--small]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

import qkv
from bench._side_by_side import Row, save_results, size
from qkv.cluster import torch as cluster

N, D, HEADS = size(512, 64), 64, 4
REPEATS = size(7, 2)
LIMIT = 20.0
"""Seconds after which a question has been asked often enough."""
SIZES = (1, 2, 4)
WORK = {
    "self-attention, causal softmax": ("sharded", 1, {"mask": "causal"}),
    "self-attention, causal entmax15": ("sharded", 1, {"mask": "causal", "weighting": "entmax15"}),
    "16 times as many keys as queries, softmax": ("same", 16, {}),
    "16 times as many keys as queries, top-8": ("same", 16, {"weighting": qkv.weightings.TopK(8)}),
}


class Counted:
    """Counts the bytes that this process sends, by the minimum of each collective."""

    def __init__(self, world: int) -> None:
        self.bytes = 0.0
        others = world - 1
        self._count("all_reduce", 2 * others / world, lambda x: [x])
        self._count("all_gather", others, lambda boxes, x: [x])
        self._count("all_to_all_single", others / world, lambda boxes, x: [x])
        self._count(
            "batch_isend_irecv", 1, lambda moves: [m.tensor for m in moves if m.op is dist.isend]
        )

    def _count(self, name: str, share: float, sent: Callable[..., list[Tensor]]) -> None:
        function = getattr(dist, name)

        def counted(*given: Any, **named: Any) -> Any:
            self.bytes += share * sum(x.numel() * x.element_size() for x in sent(*given))
            return function(*given, **named)

        setattr(dist, name, counted)


class Gathered(torch.autograd.Function):
    """Gathers the keys of all processes; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        boxes = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(boxes, x.contiguous())
        return torch.cat(boxes, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), -2)[dist.get_rank()]


def ours(queries: str, how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: cluster.attend(q, k, v, queries=queries, **how)


def gathered(queries: str, how: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = map(Gathered.apply, (k, v))
        start = dist.get_rank() * q.shape[-2]
        mask = qkv.masks.causal(offset=start) if how.get("mask") else None
        return qkv.attend(q, k, v, **{**how, "mask": mask})

    return attend


def step(attend: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    out = attend(*given)
    return out, *torch.autograd.grad(out.square().sum(), given)


def late(begin: float) -> bool:
    """Return whether a process has exceeded its time: then all stop together."""
    spent = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item() > LIMIT


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    meet = Path(folder, f"meet{world}").as_uri()
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    sent, found = Counted(world), {}
    for name, (queries, more, how) in WORK.items():
        sides = {"qkv": ours(queries, how), "keys gathered": gathered(queries, how)}
        torch.manual_seed(0)
        whole = [torch.randn(HEADS, n, D) for n in (N, more * N, more * N)]
        given = [x.chunk(world, -2)[rank].clone().requires_grad_() for x in whole]
        if queries == "same":
            given[0] = whole[0].clone().requires_grad_()
        times: dict[str, list[float]] = {side: [] for side in sides}
        measured: dict[str, dict[str, float]] = {side: {} for side in sides}
        begin, turns = time.perf_counter(), 0
        while turns < REPEATS and not (turns and late(begin)):
            turns += 1
            for side, attend in sides.items():
                dist.barrier()
                sent.bytes, start = 0.0, time.perf_counter()
                step(attend, given)
                dist.barrier()
                times[side].append(time.perf_counter() - start)
                measured[side]["MB sent"] = sent.bytes / 1e6
        for side in sides:
            measured[side]["ms"] = 1e3 * min(times[side])
        found[name] = measured
    if rank == 0:
        torch.save(found, Path(folder, f"{world}.pt"))
    dist.destroy_process_group()


def rows() -> Iterator[Row]:
    from bench._results import show

    with tempfile.TemporaryDirectory() as folder:
        for world in SIZES:
            multiprocessing.start_processes(work, (world, folder), nprocs=world)
            for name, sides in torch.load(Path(folder, f"{world}.pt")).items():
                label = f"{name}, n{N} d{D}, {HEADS} heads, f32, {world} process" + "es" * (
                    world > 1
                )
                row: Row = {"work": label, "sides": sides, "goals": []}
                show(row)
                yield row


if __name__ == "__main__":
    save_results("shards", rows())
