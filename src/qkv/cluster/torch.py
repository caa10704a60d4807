"""`attend` to keys and values that the processes of a torch.distributed group hold together."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, Unpack

from qkv.errors import MissingExtraError, unknown_name_error

if importlib.util.find_spec("torch") is None:
    raise MissingExtraError('qkv.cluster.torch needs PyTorch: pip install "qkv[torch]"')

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
    **meaning: Unpack[FormulaOptions],
) -> Any:
    """Σᵢ α(q, kᵢ) vᵢ over the keys of all processes: query (…, n, d_q), own key (…, m_r, d_k), own
    value (…, m_r, d_v) → (…, n, d_v), as one process would give for all of them. score, weighting,
    mask, dropout_p, seed and tolerance are as for `qkv.attend`.

    Every process of the group calls it; the keys count in the order of the ranks, and each may have
    as many as it likes. Keys and values stay where they are. With `queries="same"` all pass the
    same queries, states are merged, and the output is the same on all. With "sharded" each passes
    its own, which go round in a ring with their states; the output is that of one's own queries.

    Positions, in masks and score_mods, are those of the whole. An array in a mask has a row for
    each query of the whole, and a column for each key that is here.

    Gradients, where the queries are the same, are those of the one loss that all compute: whole for
    the query and for the arrays in score and weighting, one's own for key and value. Where they are
    sharded, they are those of the sum of the losses; arrays in score and weighting get the part of
    one's own keys, so that DDP averages them as it does all others.

    To torch.compile it is one operator, which looks at the keys again on the way back. Functions
    in score or mask cannot go with it; `torch.compiler.disable` leaves a call out of the graph.

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
            query, key, value, group, return_lse, queries=queries, **meaning
        )
    return attend_in_group(
        query, key, value, group, queries=queries, return_lse=return_lse, **meaning
    )


def sum_gradient(x: Tensor, group: Any = None) -> Tensor:
    """x, whose gradient is summed over the processes of the group.

    For a parameter of which each process sees its own part of the use, as a projection of its own
    keys: `key = mine @ whole(w_key)`. Then all have the whole gradient, and DDP's mean is that too.
    No score that is a function may hold it: a function is differentiated once for each block.
    """
    found: Tensor = _SumGradient.apply(x, group)
    return found


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return RankGroup(ctx.group).all_reduce_sum([gradient])[0], None
