"""The kernels that repair rows which a causal mask hides from NaN."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from qkv.engines.triton import nan_repair


def test_the_gradient_of_queries_before_a_value_that_is_nan():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    along = torch.randn(1, 2, 40, 16)
    clean = scaled_dot_product_attention(query, key, value, is_causal=True)
    (expected,) = torch.autograd.grad(clean, query, along)
    given = [x.detach().clone() for x in (query, key, value)]
    given[2][:, :, 30] = torch.nan
    out, dquery = torch.full_like(given[0], torch.nan), torch.full_like(given[0], torch.nan)
    kept = nan_repair.repair_output(out, *given, 0.25)
    nan_repair.repair_query_gradient(dquery, along, out, kept, *given, 0.25)
    torch.testing.assert_close(out[:, :, :30], clean[:, :, :30].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dquery[:, :, :30], expected[:, :, :30], atol=1e-5, rtol=1e-5)
