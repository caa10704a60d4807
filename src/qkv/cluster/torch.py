"""`attend` to keys and values that are sharded over a torch.distributed group."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, Unpack

from qkv.errors import missing_extra_error, unknown_name_error

if importlib.util.find_spec("torch") is None:
    raise missing_extra_error("qkv.cluster.torch needs PyTorch", "torch")

import torch
from torch import Tensor

from qkv.attention import FormulaOptions
from qkv.cluster import custom_op
from qkv.cluster.process_group import RankGroup, attend_in_group
from qkv.nn.tensors import check_tensors


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any = None,
    *,
    queries: Literal["same", "sharded"] = "same",
    return_lse: bool = False,
    **options: Unpack[FormulaOptions],
) -> Any:
    """Compute Σᵢ α(q, kᵢ) vᵢ over the keys of all processes of a group.

    query (…, n, d_q), this process's key (…, m_r, d_k) and value (…, m_r, d_v) → (…, n, d_v). The
    result is the same as in one process with all keys. score, weighting, mask, dropout_p, seed and
    tolerance are those of `qkv.attend`.

    Every process of the group must call this function. Keys are ordered by rank, and ranks may have
    different numbers of keys. Keys and values are not sent. With `queries="same"` all processes
    pass the same queries, and all get the same output. With `queries="sharded"` each process passes
    its own queries and gets the output for them; the queries are sent around in a ring.

    Masks and score_mods get positions among all queries and keys. An array in a mask has a row for
    each query of all processes, and a column for each key of this process.

    With `queries="same"`, all processes must compute the same loss. Each process then gets the
    complete gradients of query, of its own key and value, and of arrays in score and weighting.
    With "sharded", the loss is the sum of the losses of all processes. Arrays in score and
    weighting then get the part of the gradient that this process's keys contribute, which DDP
    averages as usual.

    torch.compile records one operator, which recomputes the scores in the backward pass. It does
    not support functions in score or mask: exclude such a call with `torch.compiler.disable`.

    >>> import torch
    >>> from torch import distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> attend(torch.zeros(1, 2), torch.eye(2), torch.tensor([[10.0], [20.0]]))
    tensor([[15.]])
    >>> dist.destroy_process_group()
    """
    check_tensors(query=query, key=key, value=value)
    if queries not in ("same", "sharded"):
        raise unknown_name_error("queries", queries, ("same", "sharded"))
    if torch.compiler.is_compiling():
        return custom_op.attend_compiled(
            query, key, value, group, return_lse, queries=queries, **options
        )
    return attend_in_group(
        query, key, value, group, queries=queries, return_lse=return_lse, **options
    )


def sum_gradient(x: Tensor, group: Any = None) -> Tensor:
    """Return x; the backward pass sums its gradient over the processes of the group.

    Use it for a parameter that each process applies to its own keys, as in
    `key = local_input @ sum_gradient(w_key)`. Every process then gets the complete gradient, and
    DDP, which averages gradients, keeps it. Do not use it inside a score that is a function: a
    function is differentiated once per block.
    """
    result: Tensor = _SumGradient.apply(x, group)
    return result


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return RankGroup(ctx.group).all_reduce_sum([gradient])[0], None
