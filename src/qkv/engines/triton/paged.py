"""Attention over keys and values in pages, which the kernels read through a table.

A decoding step has few queries for each head of keys, and reads each page once. Longer calls gather
their pages first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from qkv.engines import triton as engine
from qkv.engines.call import Call
from qkv.engines.triton import call_arrays
from qkv.engines.triton.sink import build_sink_runner
from qkv.frameworks import get_framework, is_array, tree
from qkv.scores import Dot, Gaussian, ScaledDot
from qkv.util.types import Array
from qkv.weightings.softmax import SinkSoftmax

MIN_PAGE_ROWS = 16
"""Fewest rows of a page: those of the smallest tile of keys."""
MAX_WIDTH = 256


class PagePool(NamedTuple):
    """Keys and values (pages, heads, rows, width), the pages (B, P) of each batch, int32, and the
    scales (pages, heads, rows, 1) of rows that are stored as codes of 8 bits."""

    key: Array
    value: Array
    table: Array
    key_scales: Array | None = None
    value_scales: Array | None = None


def unsupported_device_reason(query: Any) -> str | None:
    """Return why no kernel reads pages for queries like this one; None: some may."""
    fw = get_framework(query)
    if query.device.type != "cuda" and not engine.is_interpreted():
        return "only kernels on CUDA read pages"
    if fw.is_traced(query) or fw.in_functional_transform():  # type: ignore[attr-defined]
        return "a traced graph gathers the pages"
    if torch.is_autocast_enabled(query.device.type):
        return "autocast may change the dtype of the rows"
    return None


def unsupported_reason(call: Call, pool: PagePool) -> str | None:
    """Return why the kernels do not read the pages; None: they do.

    Key and value of the call stand for those of the pages: only their shapes and dtypes count.
    """
    fw, (inner, _) = call.fw, call_arrays.split_score(call)
    score: Any = inner.score
    if fw.needs_gradient(tree.array_leaves(fw, call)):
        return "the kernels have no gradient for pages"
    if type(score) not in (Dot, ScaledDot, Gaussian) or is_array(getattr(score, "scale", None)):
        return "only dot products and Gaussians read pages; other scores need arrays of the keys"
    if type(score) is Gaussian:
        if not call_arrays.is_16bit_gaussian(call) or not call_arrays._adds_squares(call):
            return "only 16-bit Gaussians under softmax read pages"
        if pool.key_scales is not None:
            return "a Gaussian needs the squares of rows, which are stored as codes"
    reason = engine.unsupported_reason(call)
    if reason:
        return reason
    if pool.key.dtype == torch.float8_e4m3fn and not _reads_float8(pool.key.device):
        return "the device has no float8: compute capability 8.9 or higher is needed"
    rows, group = pool.key.shape[2], call.query.shape[1] // pool.key.shape[1]
    if rows % MIN_PAGE_ROWS:
        return f"a page has {rows} rows, which is not a multiple of {MIN_PAGE_ROWS}"
    from qkv.engines.triton.launching.tile_choice import MAX_PACKED_ROWS

    if call.n * group > MAX_PACKED_ROWS:
        return f"{call.n} queries of {group} heads share keys: gathered pages are faster"
    if max(call.query.shape[-1], pool.value.shape[-1]) > MAX_WIDTH:
        return f"rows are wider than {MAX_WIDTH}"
    if not pool.key.is_contiguous() or not pool.value.is_contiguous():
        return "the pool is not contiguous"
    return _weighting_reason(call)


def _reads_float8(device: torch.device) -> bool:
    return device.type != "cuda" or bool(torch.cuda.get_device_capability(device) >= (8, 9))


def _weighting_reason(call: Call) -> str | None:
    kind = call_arrays.KERNEL_WEIGHTINGS[type(call.weighting)]
    if kind not in ("entmax", "topk"):
        return None
    from qkv.engines.triton.sparse import thresholds

    if getattr(call.weighting, "k", 0) == 1 or type(call.weighting).__name__ == "Hard":
        return "the value of the best key is copied from an array"
    few = call.n * (call.query.shape[1] // call_arrays.count_key_heads(call))
    b, h, n, _ = call.query.shape
    if not thresholds.is_stored_shape(b, h, n, call.m, few):
        return "the scores are too many, or too few, to be stored for the search of thresholds"
    return None


class PageRunner(NamedTuple):
    """A function of a query, the table and the lengths, which returns the output (B, H, n, d_v).

    `is_reusable`: it runs all calls with the same shapes, strides and options over this pool.
    """

    run: Callable[[Any, Any, Any], Array]
    is_reusable: bool


def build_page_runner(call: Call, pool: PagePool) -> PageRunner:
    """Return the runner of a call that the kernels support."""
    from qkv.engines.triton import attend_operator
    from qkv.engines.triton.launching import precompile
    from qkv.engines.triton.sparse import thresholds

    pooled = {"key": pool.key, "value": pool.value}
    pooled |= {"key_scales": pool.key_scales, "value_scales": pool.value_scales}

    def run_kernels(arrays: Any, numbers: Any) -> Any:
        arrays = thresholds.with_thresholds(arrays, numbers)
        return attend_operator.attend(*arrays, *numbers)[:2]

    def run_call(call: Call) -> tuple[Array, Array | None, None]:
        arrays, numbers, offset = call_arrays.build_kernel_arrays(
            call, call_arrays.is_16bit_gaussian(call)
        )
        found = run_kernels(arrays._replace(**pooled, pages=pool.table), numbers)
        return engine._shape_results(call, found[0], found[1], offset)

    def run_once(query: Any, table: Any, lengths: Any) -> Array:
        run: Any = run_call
        if isinstance(call.weighting, SinkSoftmax):
            run = build_sink_runner(call, lambda _: run_call)
        with precompile.compile_together(partial(run, call)):
            out: Array = run(call)[0]
            return out

    if isinstance(call.weighting, SinkSoftmax):
        return PageRunner(run_once, False)
    arrays, numbers, _ = call_arrays.build_kernel_arrays(call, call_arrays.is_16bit_gaussian(call))
    own = arrays._replace(key=None, value=None, lengths=None)
    _, score_mods = call_arrays.split_score(call)
    if score_mods or own.query is not call.query or any(x is not None for x in own[1:]):
        return PageRunner(run_once, False)
    kept = own._replace(query=None, **pooled)
    with precompile.compile_together(partial(run_call, call)):
        pass

    def run_again(query: Any, table: Any, lengths: Any) -> Array:
        given = kept._replace(query=query, pages=table, lengths=lengths)
        out: Array = run_kernels(given, numbers)[0]
        return out

    return PageRunner(run_again, True)
