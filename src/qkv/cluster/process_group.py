"""Collective operations of a torch.distributed group, and `attend` on such a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from qkv import attention
from qkv.errors import ArgumentError, FrameworkError, ShapeError
from qkv.util.types import ShardPosition

State = tuple[Tensor, ...]


def attend_in_group(
    query: Tensor, key: Tensor, value: Tensor, group: Any, *, queries: str, **options: Any
) -> Any:
    """Attend to the keys of all processes of the group.

    `queries` is "same" if all processes pass the same queries, or "sharded" if each passes its own.
    """
    ranks = RankGroup(group)
    rows, cols = ranks.gather_lengths(query, key)
    position = ShardPosition(0, sum(cols[: ranks.rank]), rows[0], sum(cols))
    if queries == "sharded":
        ranks.query_counts, position = (
            rows,
            position._replace(row=sum(rows[: ranks.rank]), n=sum(rows)),
        )
    elif len(set(rows)) > 1:
        raise ShapeError(
            f"query: the processes pass {rows} queries: pass the same queries in every process, or "
            "set queries='sharded'"
        )
    return attention.attend_sharded(ranks, position, query, key, value, **options)


class RankGroup:
    """The operations between processes that `attention.attend_sharded` needs."""

    def __init__(self, group: Any):
        if not dist.is_available() or not dist.is_initialized():
            raise FrameworkError(
                "there is no process group yet: call torch.distributed.init_process_group, or "
                "start with torchrun"
            )
        self.group = group
        self.query_counts: Sequence[int] = ()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError(
                "group: this process is not a member of the group: call attend only in members"
            )

    def gather_lengths(self, *arrays: Tensor) -> list[list[int]]:
        """Return, for each array, its number of rows on each process."""
        lengths = torch.tensor([x.shape[-2] for x in arrays], device=arrays[0].device)
        return torch.stack(self._all_gather(lengths)).T.tolist()  # type: ignore[no-any-return]

    def all_reduce_state(self, state: State, merge: Callable[[State, State], State]) -> State:
        """Merge the weightings' states of all processes; every process gets the result."""
        rows = state[0].shape[-2]
        if self.size < 3 or rows < self.size:
            return self._merge_states([state], merge)
        # Each process merges a share of the rows. That sends less than every process sending its
        # state.
        share = -(-rows // self.size)
        padded = [pad(x, (0, 0, 0, share * self.size - rows)) for x in state]
        merged = self._merge_states(zip(*(x.split(share, -2) for x in padded), strict=True), merge)
        flat, unpack = pack_by_dtype(merged)
        shares = map(unpack, zip(*map(self._all_gather, flat), strict=True))
        return tuple(torch.cat(x, -2)[..., :rows, :] for x in zip(*shares, strict=True))

    def _merge_states(
        self, states: Iterable[State], merge: Callable[[State, State], State]
    ) -> State:
        """Merge the states of all processes with `merge`.

        If each process passes one state, every process gets the merged state. If each process
        passes one state for every process, process i gets the merged state of those meant for it.
        """
        sent = [pack_by_dtype(state) for state in states]
        unpack, kinds = sent[0][1], zip(*(flat for flat, _ in sent), strict=True)
        gathered = [
            self._all_gather(x[0]) if len(x) == 1 else self._exchange_parts(x) for x in kinds
        ]
        return reduce(merge, map(unpack, zip(*gathered, strict=True)))

    def _exchange_parts(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Send part i to process i; return the parts that the others sent here.

        All parts have one length.
        """
        sent = torch.cat(list(parts))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.chunk(self.size)

    def all_reduce_sum(self, arrays: Sequence[Tensor]) -> State:
        """Return the sums of the arrays over all processes."""
        flat, unpack = pack_by_dtype([x.contiguous() for x in arrays])
        for x in flat:
            dist.all_reduce(x, group=self.group)
        return unpack(flat)

    def all_gather_rows(self, array: Tensor) -> Tensor:
        """Return the rows (axis −2) of all processes, concatenated in the order of their ranks."""
        longest = max(self.query_counts)
        shape = (*array.shape[:-2], longest - array.shape[-2], array.shape[-1])
        parts = self._all_gather(torch.cat([array, array.new_zeros(shape)], -2))
        return torch.cat([x[..., :n, :] for x, n in zip(parts, self.query_counts, strict=True)], -2)

    def ring_shift(self, arrays: Sequence[Tensor], rows: int) -> State:
        """Send arrays to the next process in the ring; return those of the previous one.

        `rows` is the number of rows (axis −2) of the arrays to receive.
        """
        if self.size == 1:
            return tuple(arrays)
        flat, _ = pack_by_dtype(arrays)
        buffers = [x.new_empty((*x.shape[:-2], rows, x.shape[-1])) for x in arrays]
        received, unpack = pack_by_dtype(buffers)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        moves = [dist.P2POp(dist.isend, x, group=self.group, group_peer=after) for x in flat]
        moves += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=before) for x in received]
        moves = [op for op in moves if op.tensor.numel()]
        for move in dist.batch_isend_irecv(moves) if moves else ():  # an empty batch is an error
            move.wait()
        return unpack(received)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the array x of every process, ordered by rank."""
        gathered = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        if x.numel():
            dist.all_gather(gathered, x.contiguous(), group=self.group)
        return gathered


def pack_by_dtype(
    arrays: Sequence[Tensor],
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], State]]:
    """Concatenate the elements of all arrays to one vector per dtype.

    Also return the function that turns such vectors back into arrays of these shapes.
    """
    dtypes = list(dict.fromkeys(x.dtype for x in arrays))
    flat = [torch.cat([x.reshape(-1) for x in arrays if x.dtype == dtype]) for dtype in dtypes]

    def unpack(flat: Sequence[Tensor]) -> State:
        parts: dict[int, Tensor] = {}
        for dtype, vector in zip(dtypes, flat, strict=True):
            indices = [i for i, x in enumerate(arrays) if x.dtype == dtype]
            ends = list(accumulate(arrays[i].numel() for i in indices))
            pieces = vector.tensor_split(ends[:-1]) if len(indices) > 1 else (vector,)
            parts |= {i: x.reshape(arrays[i].shape) for i, x in zip(indices, pieces, strict=True)}
        return tuple(parts[i] for i in range(len(arrays)))

    return flat, unpack
