"""Launch the kernels for the gradients of query, key, value, bias, gate, mask and caps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import row_terms
from qkv.engines.triton.backward import (
    backward_few_queries,
    backward_keys,
    backward_mask,
    backward_queries,
    captured_gradients,
    wide_gradients,
)
from qkv.engines.triton.launching import launch, precompile, tile_choice, workspace
from qkv.engines.triton.launching.kernel_call import (
    KernelCall,
    Numbers,
    round_query,
    shared_strides,
)
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.pair_functions.functions import CapturedGradient
from qkv.engines.triton.sparse import best_value, thresholds
from qkv.engines.triton.tile_functions import score_tile
from qkv.engines.triton.tile_functions.records import ARRAY_COUNT, Arrays

MAX_SCRATCH_BYTES = 64 * 2**20
"""The most bytes of score gradients in memory, if φ is too wide to be summed on chip."""


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    gate_query: Tensor
    gate_key: Tensor
    pairs: Tensor
    caps: Tensor
    captured_floats: Tensor


class BackwardState(NamedTuple):
    """Arguments of every backward pass; `wide`: φ's gradients are matrix products."""

    call: KernelCall
    output_gradient: Tensor
    centre: Tensor | None
    row_statistics: Tensor
    grads: Gradients | None
    wide: bool


def attend_backward(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any,
    known: Tensor | None = None, dvalue: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients: the fields of `Gradients`.

    `along` is ∂L/∂out; `along_lse`, for softmax and top-k, is ∂L/∂lse. `rest` holds the arguments
    of `attend_forward`, then four booleans: gradients for queries, for keys, for pairs, for
    `captured_floats`. A gradient that is not needed is an empty array. `known` is
    `compute_centre(along, along_lse, out)`, if the caller has it. If `dvalue` is given, the
    gradient of the values is written into it.
    """
    *given, for_queries, for_keys, for_pairs, for_captured = rest
    call = KernelCall(*round_query(given))
    if call.is_hard and along_lse is not None:  # the score of the best key has a gradient
        call = KernelCall(*_with_tolerant_thresholds(round_query(given)))
    grads = _allocate_gradients(
        given, for_queries, for_keys, for_pairs, for_captured, dvalue=dvalue
    )
    if out.numel() == 0 or call.m == 0:
        for x in grads:
            x.zero_()
        return grads
    along = along.contiguous()
    if call.is_hard and along_lse is None:
        for x in (*grads[:2], *grads[3:]):
            if x.numel():
                wide_gradients.fill_zeros(x)
        if for_keys:
            best_value.scatter_gradient(call, along, grads.value)
        return grads
    centred = call.weighting in ("softmax", "topk", "normalized", "entmax")
    call.constexprs = call.constexprs | {"CENTRED": centred}
    gradients = along, along_lse, out, kept
    exact = _needs_exact_centre(call)
    few = for_queries and for_keys and not (for_pairs or for_captured)
    if few and backward_few_queries.fits_one_tile(call):
        backward_few_queries.fill_gradients(call, *gradients, known, exact, grads)
        return grads
    fill_by_sides(
        call, *gradients, known, exact, grads, for_queries, for_keys, for_pairs, for_captured
    )
    return grads


def _needs_exact_centre(call: KernelCall) -> bool:
    """Return whether softmax's centre is summed over the keys.

    The centre from the rounded output is precise enough unless the sum of a row's gradients
    matters: for a temperature, a gate of few rows, or a single row. For captured numbers, see
    `_sum_captured_by_row`.
    """
    few = call.n <= (tile_choice.MAX_PACKED_ROWS if call.gate_query is not None else 1)
    return call.weighting == "entmax" or few or call.needs_exact_row_sums


def _find_row_sum(call: KernelCall, wide: bool) -> CapturedGradient | None:
    """Return the captured number whose gradient the queries' pass can sum over the keys, or None.

    Its index does not depend on the key.
    """
    facts = call.constexprs
    if wide or call.weighting == "average" or call.form != "product" or call.functions is None:
        return None
    if facts["GATE"] or facts["CAP"] < 0:  # their sums take the place
        return None
    return next((x for x in call.functions.captured if "k" not in x.positions), None)


def fill_by_sides(
    call: KernelCall, along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor,
    known: Tensor | None, exact: bool, grads: Gradients, for_queries: bool, for_keys: bool,
    for_pairs: bool, for_captured: bool,
) -> None:  # fmt: skip
    """Fill the gradients with one pass for the queries and one for the keys."""
    broad = (
        call.w > tile_choice.MAX_BACKWARD_TILE_WIDTH or call.d > tile_choice.MAX_BACKWARD_TILE_WIDTH
    )
    bent = call.gate_query is not None or call.constexprs["CAP"] or for_captured
    bent = bent or call.form != "product"
    fused = call.weighting == "entmax" and for_queries and not broad and not bent
    fused = fused and _split_query_loop(call, call.choose_tile("to_queries", call.n))[0] == 1
    wide = (broad or not call.has_product) and call.weighting != "average"
    captured = call.functions.captured if for_captured and call.functions is not None else ()
    summed = _find_row_sum(call, wide) if captured and for_queries else None
    # The weights of a row add up to 1, so the sums for the exact centre follow from one pass.
    corrects = summed is not None and not exact and along_lse is None
    corrects = corrects and call.weighting in ("softmax", "topk")
    exact = exact or any("k" not in x.positions for x in captured if not (corrects and x is summed))
    way = BackwardState(call, along, None, kept, grads, wide)
    way = way._replace(centre=_row_centre(way, along_lse, out, fused or not exact, known))
    if fused:
        way = way._replace(centre=_launch_queries(way, fused))
    if for_pairs and call.weighting != "average":
        backward_mask.fill_mask_gradient(call, along, way.centre, kept, grads.pairs)
    if for_captured and call.weighting != "average":
        sums = None
        if summed is not None:
            sums = _launch_queries(way, captured=(summed, 1 + corrects))
            for_queries = False
        captured_gradients.fill_captured_gradient(
            call, along, way.centre, kept, grads.captured_floats, (summed, sums)
        )
    if call.weighting == "average":
        for x in (*grads[:2], *grads[3:]):
            x.zero_()
        for_queries = False
    elif not (call.has_product or call.constexprs["SLOPED"]):
        for x in grads[:2]:
            if x.numel():
                wide_gradients.fill_zeros(x)
    _launch_both_sides(way, for_queries and not fused, for_keys)


def _with_tolerant_thresholds(given: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of `attend_forward` with thresholds that all passes can use."""
    arrays, numbers = Arrays(*given[:ARRAY_COUNT]), Numbers(*given[ARRAY_COUNT:])
    row_a, row_b = thresholds.find_tolerant_thresholds(arrays, numbers)
    return *arrays._replace(row_a=row_a, row_b=row_b), *numbers


def weights_backward(call: KernelCall, along: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of query and key from those of softmax's weights (B, H or 1, n, m).

    `lse` (B, H, n) is the log-sum-exp of the scores.
    """
    wide = call.w > tile_choice.MAX_BACKWARD_TILE_WIDTH
    # Aligned rows are read 16 bytes at a time: worth a copy if all heads read the same array.
    shared = along.shape[1] < call.h
    if along.stride(3) != 1 or (shared and along.stride(2) % 16):
        along = workspace.allocate_aligned(along, along.shape, along.dtype).copy_(along)
    call.gradient_strides = shared_strides(along)[:3]
    call.constexprs = call.constexprs | {"CENTRED": True, "QUICK": False, "ALONG": True}
    call.can_use_descriptors, call.float_mask_bytes = call.can_use_descriptors and not wide, 0
    grads = _allocate_gradients(call.inputs, True, True, False)
    way = BackwardState(call, along, None, lse, grads, wide)
    _launch_both_sides(way._replace(centre=_launch_queries(way._replace(grads=None))), True, True)
    return grads.query, grads.key


def units_backward(
    call: KernelCall, along: Tensor, centre: Tensor, kept: Tensor,
    sums: tuple[Tensor, Tensor], dvalue: Tensor,
) -> Tensor:  # fmt: skip
    """For exact additive scores, fill the sums per unit of queries and keys, and dvalue.

    Return the sums of ∂L/∂v per query and unit. `centre` is `compute_centre`.
    """
    call.constexprs = call.constexprs | {"CENTRED": True}
    none = dvalue  # placeholder for gradients that do not exist; it is not written
    way = BackwardState(call, along, centre, kept, Gradients(*sums, dvalue, *[none] * 6), True)
    _launch_keys(way)
    return _launch_queries(way)


def _launch_both_sides(way: BackwardState, for_queries: bool, for_keys: bool) -> None:
    if way.wide and way.call.has_product:
        _launch_wide_products(way, for_queries, for_keys)
        more = way.call.gate_query is not None or way.call.caps is not None
        for_queries, for_keys = for_queries and more, False
    if for_keys:
        _launch_keys(way)
    if for_queries:
        _launch_queries(way)


def _allocate_gradients(
    given: Sequence[Any], for_queries: bool, for_keys: bool, for_pairs: bool,
    for_captured: bool = False, *, dvalue: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return empty arrays for the gradients; of size 0 for those that are not needed."""
    keys = for_keys, for_keys and dvalue is None, for_keys
    needed = (
        for_queries, *keys, for_queries, for_keys, for_pairs, for_queries, for_captured,
    )  # fmt: skip
    arrays = Arrays(*given[:ARRAY_COUNT])
    learned = (*arrays[:6], arrays.pairs, arrays.caps, arrays.captured_floats)
    made = Gradients(
        *(
            arrays.query.new_empty((0,))
            if x is None or not is_needed
            else workspace.allocate_buffer(x, x.shape, x.dtype)
            for x, is_needed in zip(learned, needed, strict=True)
        )
    )
    return made if dvalue is None else made._replace(value=dvalue)


def fake_gradients(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any
) -> Gradients:
    return _allocate_gradients(rest, *rest[-4:])


def _row_centre(
    way: BackwardState, along_lse: Tensor | None, out: Tensor, near: bool, known: Tensor | None
) -> Tensor | None:
    """Return c of ∂L/∂s = … (∂L/∂α − c) per row; None if the weighting has no centre.

    With `near`, an approximation is enough: that of softmax from the rounded output.
    """
    call = way.call
    if not call.constexprs["CENTRED"]:
        return None
    if call.weighting in ("softmax", "entmax") and not near:
        found = _launch_queries(way._replace(grads=None))
        return found if along_lse is None else found - along_lse.reshape(-1)
    return compute_centre(way.output_gradient, along_lse, out) if known is None else known


def compute_centre(along: Tensor, along_lse: Tensor | None, out: Tensor) -> Tensor:
    """Return Σ ∂L/∂out · out − ∂L/∂lse of each row, (B, H, n)."""
    *rows, d = out.shape
    centre = workspace.allocate_buffer(out, rows)
    facts = {"D": d, "BLOCK_D": tile_choice.block_width(d, out.dtype), "ROWS": 64}
    arrays = (along, out, None if along_lse is None else along_lse.contiguous(), centre)
    lines, tile = centre.numel(), Tile(64, 1, 1, 4, 1)
    launch.launch_kernel(
        score_tile.centre_kernel, -(-lines // 64), arrays, (), (lines,), facts, tile
    )
    return centre


def _split_query_loop(call: KernelCall, tile: Tile) -> tuple[int, int]:
    """Return into how many parts the loop for query gradients is split, and the tiles per part."""
    programs = call.b * call.h * -(-call.n // tile.rows)
    return call.split_loop(programs, call.m, tile.cols, tile.waves)


def _launch_queries(
    way: BackwardState,
    fused: bool = False,
    captured: tuple[CapturedGradient | None, int] = (None, 0),
) -> Tensor:
    """Fill the gradients of query, gate_query and caps.

    Return the centre if `grads` is None, or with `fused`, which starts from an approximate centre.
    For exact additive scores, return the sums of ∂L/∂v. For a `captured` number, with the kind of
    its sums (`F.CAPTURED_SUMS`), return its gradients, summed over the keys.
    """
    call, along, centre, kept, grads, wide = way
    lines = call.b * call.h * call.n
    one = two = kept
    gradient_function: Any = None
    if captured[0] is not None and call.functions is not None:
        gradient_function = call.functions.function(captured[0].gradient_function)
    columns = _allocate_columns(call, None if grads is None else grads.query)

    def run_tile(tile: Tile) -> None:
        nonlocal one, two
        splits, span = _split_query_loop(call, tile)
        if fused or captured[1] == 2:
            splits, span = 1, -(-call.m // tile.cols)
        dquery: Tensor | None = None
        if grads is not None and call.constexprs["TANH"]:
            dquery = grads.query
            one = two = workspace.allocate_buffer(dquery, dquery.shape, dquery.dtype)
        else:
            one, two = call.allocate_buffer(splits, lines), call.allocate_buffer(splits, lines)
            if grads is not None and not wide:
                dquery = grads.query
            if dquery is not None and splits > 1:
                dquery = call.allocate_buffer(splits * call.b, call.h, call.n, call.w)
            dquery = dquery if columns is None else columns
        for own, at, counts, at_columns, more in call.tile_loops(tile, splits):
            facts = call.pass_constexprs(own, wide, splits) | {"PACKED": False} | more
            facts["LAID"] = facts["LAID"] and facts["QUICK"]
            facts["CENTRE"] = 1 if grads is None else 2 * fused
            facts["CENTRED"] = facts["CENTRED"] and grads is not None
            facts["CAPTURED_SUMS"], facts["CAPTURED_GRADIENT"] = captured[1], gradient_function
            facts |= call.exact_tile_constexprs(facts, "COLS")
            arrays = (at, counts, along, centre, kept, dquery, one, two)
            sizes = (call.build_sizes(at_columns=at_columns, splits=splits, span=span), lines)
            grid = call.b * call.h * -(-call.n // own.rows) * splits
            call.launch_kernel(
                backward_queries.backward_queries_kernel, grid, arrays, dquery, sizes, facts, own
            )
        if columns is not None and grads is not None:
            row_terms.restore_rows(columns, call.column_factor, grads.query)
        elif dquery is not None and grads is not None and splits > 1:
            grads.query.copy_(dquery.view(splits, *grads.query.shape).sum(0))

    call.run_with_fitting_tile("to_queries", call.choose_tile("to_queries", call.n), run_tile)
    if grads is None and one.shape[0] > 1:
        down = two.sum(0)
        return one.sum(0) / torch.where(down == 0, 1.0, down)
    if grads is not None and call.gate_query is not None:
        grads.gate_query.copy_(one.sum(0).view(grads.gate_query.shape))
    if grads is not None and call.caps is not None:
        grads.caps.copy_(two.sum(0).view(grads.caps.shape))
    return one


def _allocate_columns(call: KernelCall, grad: Tensor | None) -> Tensor | None:
    """Return a buffer for the sums by column of a gradient, if the kernels compute them so.

    They take the place of a gradient (B, H, rows, W) that is needed.
    """
    by_column = call.constexprs["BY_COLUMN"] and call.constexprs["SLOPED"]
    if grad is None or not by_column or call.weighting == "average":
        return None
    return row_terms.allocate_columns(grad)


def _launch_keys(way: BackwardState, *some: tuple[int, int], ds: Tensor | None = None) -> None:
    """Fill the gradients of key, value, key_bias and gate_key; with `wide`, `ds` but not key's.

    `some` selects pairs and keys: (first, count) of each; by default all.
    """
    call, along, centre, kept, grads, wide = way
    assert grads is not None
    columns = _allocate_columns(call, grads.key)
    (first_pair, count), (first_key, keys_n) = some or ((0, call.b * call.hk), (0, call.m))
    lines = call.b * call.hk * call.m
    rows = call.b * call.h * call.n if call.constexprs["ALONG"] else kept.stride(0)

    def run_tile(tile: Tile) -> None:
        programs = count * -(-keys_n // tile.cols)
        splits, span = call.split_loop(programs, call.n, tile.rows, tile.waves)
        if columns is not None:
            splits, span = 1, -(-call.n // tile.rows)
        key = grads.key if columns is None else columns
        places = (key, grads.value, grads.key_bias, grads.gate_key)
        targets = list(places)
        if splits > 1:
            written = (
                not wide, not call.constexprs["ALONG"], call.key_bias is not None,
                call.gate_key is not None,
            )  # fmt: skip
            if call.weighting == "average":
                written = (False, True, False, False)
            targets = [
                call.allocate_buffer(splits, lines, width) if there else x
                for x, width, there in zip(places, (call.w, call.d, 1, 1), written, strict=True)
            ]
        for own, at, counts, at_columns, more in call.tile_loops(tile, splits, by_key=True):
            facts = call.pass_constexprs(own, wide, splits) | more
            facts["UNEVEN"] = call.n % own.rows != 0 and not facts["EDGES"]
            many = call.b * call.h * call.n > launch.MAX_INT32
            facts["LINED"] = facts["QUICK"] and facts["TMA"] and not many
            facts |= call.exact_tile_constexprs(facts, "ROWS")
            arrays = (at, counts, along, centre, kept, *targets, ds)
            sizes = call.build_sizes(heads=call.hk, at_columns=at_columns, splits=splits, span=span)
            whole = (sizes, rows, first_pair, first_key, keys_n, lines)
            grid = count * -(-keys_n // own.cols) * splits
            call.launch_kernel(
                backward_keys.backward_keys_kernel, grid, arrays, ds, whole, facts, own
            )
        for place, part in zip(places, targets, strict=True):
            if part is not place:
                at = (slice(first_pair, first_pair + count), slice(first_key, first_key + keys_n))
                part = part.view(splits, call.b * call.hk, call.m, -1)[:, *at]
                place.view(call.b * call.hk, call.m, -1)[at] = part.sum(0).to(place.dtype)
        if columns is not None:
            row_terms.restore_rows(columns, call.column_factor, grads.key)

    call.run_with_fitting_tile("to_keys", call.choose_tile("to_keys", call.m), run_tile)


def _launch_wide_products(way: BackwardState, for_queries: bool, for_keys: bool) -> None:
    """Compute ∂L/∂φ = dS·ψ and ∂L/∂ψ = dSᵀ·φ by matrix products, MAX_SCRATCH_BYTES at a time."""
    call, grads = way.call, way.grads
    assert grads is not None
    pairs, wide_n = call.b * call.hk, call.group * call.n
    dtype, device = grads.query.dtype, call.query.device
    # Aligned rows of one head are written 16 bytes at a time, whatever their length.
    line = -(-call.n // 16) * 16 if call.group == 1 else call.n
    max_elements = MAX_SCRATCH_BYTES // (dtype.itemsize * call.group * line)
    keys_n = call.m if call.m <= max_elements else max(max_elements // 256, 1) * 256
    count = max(min(max_elements // min(keys_n, call.m), pairs), 1)
    phi = call.query.reshape(pairs, wide_n, call.w).to(dtype)
    psi = call.key.reshape(pairs, call.m, call.w).to(dtype)
    fits_all_keys = keys_n >= call.m
    ours = call.width is not None and fits_all_keys and call.group * line % 8 == 0
    ours = ours and launch.has_tma(device)
    if not for_keys:
        way = way._replace(grads=_allocate_gradients(call.inputs, False, True, False))
    total: Tensor | None = None
    scratch = workspace.allocate_buffer(
        phi, (count * min(keys_n, call.m) * call.group * line,), dtype
    )
    for pair in range(0, pairs, count):
        pair_slice = slice(pair, min(pair + count, pairs))
        size = pair_slice.stop - pair_slice.start
        if for_queries and not fits_all_keys:
            total = torch.zeros((size, wide_n, call.w), dtype=torch.float32, device=device)
        for first in range(0, call.m, keys_n):
            span = slice(first, min(first + keys_n, call.m))
            width = span.stop - first
            shape = (size, width, call.group, line)
            ds = scratch[: math.prod(shape)].view(shape)
            ds = wide_gradients.fill_zeros(ds) if call.is_masked else ds
            _launch_keys(way, (pair, size), (first, width), ds=ds)
            if ours:
                dphi, dpsi = (x.view(pairs, -1, call.w)[pair_slice] for x in grads[:2])
                band = call.band if call.group == 1 else (None, None)
                wide_gradients.fill_gradients(
                    ds.flatten(2), phi[pair_slice], psi[pair_slice], dphi, dpsi, call.width, band
                )
            if (
                ours or precompile.DRY_RUN_JOBS.get() is not None
            ):  # a dry run launches no other products
                continue
            ds = ds[..., : call.n].flatten(2)
            window = call.constexprs["WINDOW"]
            if for_keys:
                place = grads.key.view(pairs, call.m, call.w)[pair_slice, span]
                if fits_all_keys and place.dtype == dtype:
                    torch.matmul(ds, _zero_nonfinite(call, phi[pair_slice]), out=place)
                else:
                    place.copy_(torch.matmul(ds, _zero_nonfinite(call, phi[pair_slice])))
                if window:
                    place -= _scale_rows(psi[pair_slice, span], ds.sum(-1, keepdim=True))
            if for_queries:
                back, there = ds.transpose(1, 2), _zero_nonfinite(call, psi[pair_slice, span])
                place = grads.query.view(pairs, wide_n, call.w)[pair_slice]
                if total is None:
                    torch.matmul(back, there, out=place)
                else:
                    total += torch.matmul(back, there)
                if window:
                    place = place if total is None else total
                    place -= _scale_rows(phi[pair_slice], back.sum(-1, keepdim=True))
                del back
        if total is not None:
            grads.query.view(pairs, wide_n, call.w)[pair_slice] = total.to(dtype)


def _scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """Return x · factor, with 0 for a factor of 0 and rows that are not finite."""
    return torch.where(factor == 0, 0.0, x * factor)


def _zero_nonfinite(call: KernelCall, x: Tensor) -> Tensor:
    """Return x with 0 for NaN and ∞ if there is a mask: 0 · NaN of an excluded pair is NaN."""
    return torch.where(torch.isfinite(x), x, 0.0) if call.is_masked else x
