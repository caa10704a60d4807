"""Graphs of torch.export and torch.compile whose lengths depend on data, as after `nonzero`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from qkv import masks, scores, weightings

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": qkv.scaled_dot_product_attention,
    "sdpa, causal": lambda q, k, v: qkv.scaled_dot_product_attention(q, k, v, is_causal=True),
    "softmax": qkv.attend,
    "weights": lambda q, k, v: qkv.weights(q, k),
    "window": lambda q, k, v: qkv.attend(q, k, v, mask=masks.window(2)),
    "cosine": lambda q, k, v: qkv.attend(q, k, v, score="cosine"),
    "gaussian": lambda q, k, v: qkv.attend(q, k, v, score="gaussian"),
    "alibi": lambda q, k, v: qkv.attend(
        q, k, v, score=scores.Relative(scores.Alibi(torch.tensor([0.1, 0.3]))), mask="causal"
    ),
    "linear": lambda q, k, v: qkv.attend(
        q, k, v, score=scores.FeatureMap("elu"), weighting="normalized", mask="causal"
    ),
    **{
        name: lambda q, k, v, name=name: qkv.attend(q, k, v, weighting=name)
        for name in ("entmax15", "sparsemax", "sigmoid", "hard")
    },
    "top-k": lambda q, k, v: qkv.attend(q, k, v, weighting=weightings.TopK(2)),
}
X = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(0))
KEEP = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
OTHERS = (~KEEP, torch.arange(12) == 3, torch.zeros(12, dtype=torch.bool))
"""Masks with 4 rows, one row and none."""


class Selected(torch.nn.Module):
    """Attention to the rows that `keep` selects, from these rows or from all."""

    def __init__(self, call: Callable[..., Tensor], all_queries: bool) -> None:
        super().__init__()
        self.call, self.all_queries = call, all_queries

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows = x.index_select(-2, keep.nonzero()[:, 0])
        return self.call(x if self.all_queries else rows, rows, rows)


@pytest.fixture(autouse=True)
def dynamic_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


@pytest.mark.sample(6)
@pytest.mark.parametrize("all_queries", [True, False])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", ["export", "compile"])
def test_lengths_that_depend_on_data(how: str, name: str, all_queries: bool) -> None:
    layer = Selected(CALLS[name], all_queries)
    graph: Any
    if how == "export":
        graph = torch.export.export(layer, (X, KEEP)).module()
    else:
        graph = torch.compile(layer, fullgraph=True, backend="eager")
    for keep in (KEEP, *OTHERS):
        torch.testing.assert_close(graph(X, keep), layer(X, keep), atol=1e-5, rtol=1e-5)
