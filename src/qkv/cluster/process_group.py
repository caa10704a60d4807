"""The processes of a torch.distributed group, and `attend` among them."""

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
    query: Tensor, key: Tensor, value: Tensor, group: Any, *, queries: str, **how: Any
) -> Any:
    """`attend` to the keys of all processes of the group, by the lengths that they tell."""
    ranks = RankGroup(group)
    rows, cols = ranks.gather_lengths(query, key)
    at = ShardPosition(0, sum(cols[: ranks.rank]), rows[0], sum(cols))
    if queries == "sharded":
        ranks.query_counts, at = rows, at._replace(row=sum(rows[: ranks.rank]), n=sum(rows))
    elif len(set(rows)) > 1:
        raise ShapeError(
            f"query: the processes have {rows} queries: pass the same on all, or queries='sharded'"
        )
    return attention.attend_sharded(ranks, at, query, key, value, **how)


class RankGroup:
    """The processes of a group, as `attention.attend_sharded` asks for them."""

    def __init__(self, group: Any):
        if not dist.is_available() or not dist.is_initialized():
            raise FrameworkError(
                "there is no group of processes yet: call torch.distributed.init_process_group, or "
                "start with torchrun"
            )
        self.group = group
        self.query_counts: Sequence[int] = ()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError("group: this process is none of its members")

    def gather_lengths(self, *arrays: Tensor) -> list[list[int]]:
        """How many rows each of the arrays has on each process."""
        own = torch.tensor([x.shape[-2] for x in arrays], device=arrays[0].device)
        return torch.stack(self._all_gather(own)).T.tolist()  # type: ignore[no-any-return]

    def all_reduce_state(self, state: State, merge: Callable[[State, State], State]) -> State:
        rows = state[0].shape[-2]
        if self.size < 3 or rows < self.size:
            return self._merge_states([state], merge)
        # Each process merges its share of the rows: less travels than all states to all of them.
        share = -(-rows // self.size)
        padded = [pad(x, (0, 0, 0, share * self.size - rows)) for x in state]
        mine = self._merge_states(zip(*(x.split(share, -2) for x in padded), strict=True), merge)
        flat, unpack = pack_by_dtype(mine)
        shares = map(unpack, zip(*map(self._all_gather, flat), strict=True))
        return tuple(torch.cat(x, -2)[..., :rows, :] for x in zip(*shares, strict=True))

    def _merge_states(
        self, states: Iterable[State], merge: Callable[[State, State], State]
    ) -> State:
        """The states of all processes merged: of several, one for each process, this one's."""
        sent = [pack_by_dtype(state) for state in states]
        unpack, kinds = sent[0][1], zip(*(flat for flat, _ in sent), strict=True)
        found = [self._all_gather(x[0]) if len(x) == 1 else self._exchange_parts(x) for x in kinds]
        return reduce(merge, map(unpack, zip(*found, strict=True)))

    def _exchange_parts(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts that all processes have for this one, of one length."""
        together = torch.cat(list(parts))
        boxes = torch.empty_like(together)
        dist.all_to_all_single(boxes, together, group=self.group)
        return boxes.chunk(self.size)

    def all_reduce_sum(self, arrays: Sequence[Tensor]) -> State:
        flat, unpack = pack_by_dtype([x.contiguous() for x in arrays])
        for x in flat:
            dist.all_reduce(x, group=self.group)
        return unpack(flat)

    def all_gather_rows(self, array: Tensor) -> Tensor:
        longest = max(self.query_counts)
        shape = (*array.shape[:-2], longest - array.shape[-2], array.shape[-1])
        parts = self._all_gather(torch.cat([array, array.new_zeros(shape)], -2))
        return torch.cat([x[..., :n, :] for x, n in zip(parts, self.query_counts, strict=True)], -2)

    def ring_shift(self, arrays: Sequence[Tensor], rows: int) -> State:
        if self.size == 1:
            return tuple(arrays)
        flat, _ = pack_by_dtype(arrays)
        due = [x.new_empty((*x.shape[:-2], rows, x.shape[-1])) for x in arrays]
        boxes, unpack = pack_by_dtype(due)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        moves = [dist.P2POp(dist.isend, x, group=self.group, group_peer=after) for x in flat]
        moves += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=before) for x in boxes]
        moves = [op for op in moves if op.tensor.numel()]
        for move in dist.batch_isend_irecv(moves) if moves else ():  # it takes no empty batch
            move.wait()
        return unpack(boxes)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        """x of every process, in the order of the ranks."""
        boxes = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        if x.numel():
            dist.all_gather(boxes, x.contiguous(), group=self.group)
        return boxes


def pack_by_dtype(
    arrays: Sequence[Tensor],
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], State]]:
    """The numbers of all arrays, one vector for each dtype, and the way back from such vectors."""
    kinds = list(dict.fromkeys(x.dtype for x in arrays))
    flat = [torch.cat([x.reshape(-1) for x in arrays if x.dtype == kind]) for kind in kinds]

    def unpack(flat: Sequence[Tensor]) -> State:
        parts: dict[int, Tensor] = {}
        for kind, numbers in zip(kinds, flat, strict=True):
            of = [i for i, x in enumerate(arrays) if x.dtype == kind]
            ends = list(accumulate(arrays[i].numel() for i in of))
            cut = numbers.tensor_split(ends[:-1]) if len(of) > 1 else (numbers,)
            parts |= {i: x.reshape(arrays[i].shape) for i, x in zip(of, cut, strict=True)}
        return tuple(parts[i] for i in range(len(arrays)))

    return flat, unpack
