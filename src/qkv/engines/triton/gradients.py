"""Gradients of query, key, value, bias, gate and mask: which kernels are launched for them, how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import ahead, launch, pairs, rooms, to_keys, to_queries, weigh, wide
from qkv.engines.triton.arguments import Arguments, rounded, shared_strides
from qkv.engines.triton.launch import Tile
from qkv.engines.triton.records import ARRAYS, Arrays

SCRATCH = 64 * 2**20
"""Bytes of score gradients held at once where φ is too wide to be summed on chip."""


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    gate_query: Tensor
    gate_key: Tensor
    pairs: Tensor
    caps: Tensor


class Way(NamedTuple):
    """What every pass of the way back is given; `wide` takes φ's own gradients by products."""

    call: Arguments
    along: Tensor
    centre: Tensor | None
    kept: Tensor
    grads: Gradients | None
    wide: bool


def attend_backward(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any,
    known: Tensor | None = None, dvalue: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of query, key, value, key_bias, gate_query, gate_key, pairs, caps.

    After the results of `forward.attend` comes what that was given, and whether gradients are
    wanted for queries, for keys and for pairs. Where there is no such argument, or nobody wants the
    gradient, the array is empty. `along_lse` is None but for softmax and top-k; `known` is `inner`
    of the first three, if it is, and `dvalue` where the values' gradient goes, if that is told.
    """
    *given, for_queries, for_keys, for_pairs = rest
    call = Arguments(*rounded(given))
    grads = _places(given, for_queries, for_keys, for_pairs, dvalue)
    if out.numel() == 0 or call.m == 0:
        for x in grads:
            x.zero_()
        return grads
    along = along.contiguous()
    centred = call.weighting in ("softmax", "topk", "normalized", "entmax")
    broad = call.w > launch.HELD_BACK or call.d > launch.HELD_BACK
    call.facts = call.facts | {"CENTRED": centred}
    bent = call.gate_query is not None or call.facts["CAP"]
    fused = call.weighting == "entmax" and for_queries and not broad and not bent
    fused = fused and _parts(call, call.tile("to_queries", call.n))[0] == 1
    # That of softmax is taken from the rounded output, which is near enough where what a row's
    # gradients add up to does not count. It does for a temperature, for a gate of few rows, and for
    # what has one row alone.
    few = call.n <= (launch.FEW if call.gate_query is not None else 1)
    whole = call.weighting == "entmax" or few or call.whole
    near = fused or not whole
    way = Way(call, along, None, kept, grads, broad and call.weighting != "average")
    way = way._replace(centre=_centre(way, along_lse, out, near, known))
    if fused:
        way = way._replace(centre=_to_queries(way, fused))
    if for_pairs and call.weighting != "average":
        pairs.fill(call, along, way.centre, kept, grads.pairs)
    if call.weighting == "average":
        for x in (*grads[:2], *grads[3:]):
            x.zero_()
        for_queries = False
    _each_side(way, for_queries and not fused, for_keys)
    return grads


def weights_backward(call: Arguments, along: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of query and key from that of the softmax's weights, (B, H or 1, n, m). The
    log-sum-exp of the scores is (B, H, n)."""
    wide = call.w > launch.HELD_BACK
    # Even lines are read 16 bytes at once: worth a copy where all heads read the same.
    shared = along.shape[1] < call.h
    if along.stride(3) != 1 or (shared and along.stride(2) % 16):
        along = rooms.even(along, along.shape, along.dtype).copy_(along)
    call.along = shared_strides(along)[:3]
    call.facts = call.facts | {"CENTRED": True, "QUICK": False, "ALONG": True}
    call.described, call.quick = call.described and not wide, 0
    grads = _places(call.inputs, True, True, False)
    way = Way(call, along, None, lse, grads, wide)
    _each_side(way._replace(centre=_to_queries(way._replace(grads=None))), True, True)
    return grads.query, grads.key


def units_backward(
    call: Arguments, along: Tensor, centre: Tensor, kept: Tensor,
    sums: tuple[Tensor, Tensor], dvalue: Tensor,
) -> Tensor:  # fmt: skip
    """Of scores by tanh, fill the sums of each query's and each key's units (`tanh.add_units`) and
    dvalue; those of ∂L/∂v, of each query's units. The centre is `inner`."""
    call.facts = call.facts | {"CENTRED": True}
    none = dvalue  # of what there is no gradient: it is not touched
    way = Way(call, along, centre, kept, Gradients(*sums, dvalue, *[none] * 5), True)
    _to_keys(way)
    return _to_queries(way)


def _each_side(way: Way, for_queries: bool, for_keys: bool) -> None:
    if way.wide:
        _through_scratch(way, for_queries, for_keys)
        more = way.call.gate_query is not None or way.call.caps is not None
        for_queries, for_keys = for_queries and more, False
    if for_keys:
        _to_keys(way)
    if for_queries:
        _to_queries(way)


def _places(
    given: Sequence[Any], for_queries: bool, for_keys: bool, for_pairs: bool,
    dvalue: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Room for the gradients of these; none where there is no argument or no wish."""
    keys = for_keys, for_keys and dvalue is None, for_keys
    wishes = (for_queries, *keys, for_queries, for_keys, for_pairs, for_queries)
    arrays = Arrays(*given[:ARRAYS])
    learned = (*arrays[:6], arrays.pairs, arrays.caps)
    made = Gradients(
        *(
            arrays.query.new_empty((0,))
            if x is None or not wish
            else rooms.new(x, x.shape, x.dtype)
            for x, wish in zip(learned, wishes, strict=True)
        )
    )
    return made if dvalue is None else made._replace(value=dvalue)


def fake(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any
) -> Gradients:
    return _places(rest, *rest[-3:])


def _centre(
    way: Way, along_lse: Tensor | None, out: Tensor, near: bool, known: Tensor | None
) -> Tensor | None:
    """c of ∂L/∂s = … (∂L/∂α − c), each row's own; None where the weighting has none. Where a number
    `near` it will do, that of softmax from the output."""
    call = way.call
    if not call.facts["CENTRED"]:
        return None
    if call.weighting in ("softmax", "entmax") and not near:
        found = _to_queries(way._replace(grads=None))
        return found if along_lse is None else found - along_lse.reshape(-1)
    return inner(way.along, along_lse, out) if known is None else known


def inner(along: Tensor, along_lse: Tensor | None, out: Tensor) -> Tensor:
    """Σ ∂L/∂out · out − ∂L/∂lse of each row, (B, H, n)."""
    *rows, d = out.shape
    centre = rooms.new(out, rows)
    facts = {"D": d, "BLOCK_D": launch.block_of(d, out.dtype), "ROWS": 64}
    arrays = (along, out, None if along_lse is None else along_lse.contiguous(), centre)
    lines, tile = centre.numel(), Tile(64, 1, 1, 4, 1)
    launch.start(weigh.inner, -(-lines // 64), arrays, (), (lines,), facts, tile)
    return centre


def _parts(call: Arguments, tile: Tile) -> tuple[int, int]:
    """Into how many parts the loops on the way to the queries are split, and the tiles of each."""
    programs = call.b * call.h * -(-call.n // tile.rows)
    return call.parts(programs, call.m, tile.cols, tile.waves)


def _to_queries(way: Way, fused: bool = False) -> Tensor:
    """Fill the gradients of query, gate_query and caps. Returns the centre where there is no place
    for them, or with `fused` where the one given is near it; of scores by tanh sums of ∂L/∂v."""
    call, along, centre, kept, grads, wide = way
    lines = call.b * call.h * call.n
    one = two = kept

    def run(tile: Tile) -> None:
        nonlocal one, two
        splits, span = _parts(call, tile)
        if fused:
            splits, span = 1, -(-call.m // tile.cols)
        dquery: Tensor | None = None
        if grads is not None and call.facts["TANH"]:
            dquery = grads.query
            one = two = rooms.new(dquery, dquery.shape, dquery.dtype)
        else:
            one, two = call.new(splits, lines), call.new(splits, lines)
            if grads is not None and not wide:
                dquery = grads.query
            if dquery is not None and splits > 1:
                dquery = call.new(splits * call.b, call.h, call.n, call.w)
        for own, at, counts, at_columns, more in call.walks(tile, splits):
            facts = call.known(own, wide, splits) | {"PACKED": False} | more
            facts["LAID"] = facts["LAID"] and facts["QUICK"]
            facts["CENTRE"] = 1 if grads is None else 2 * fused
            facts["CENTRED"] = facts["CENTRED"] and grads is not None
            arrays = (at, counts, along, centre, kept, dquery, one, two)
            sizes = (call.sizes(at_columns=at_columns, splits=splits, span=span), lines)
            grid = call.b * call.h * -(-call.n // own.rows) * splits
            call.start(to_queries.to_queries, grid, arrays, dquery, sizes, facts, own)
        if dquery is not None and grads is not None and splits > 1:
            grads.query.copy_(dquery.view(splits, *grads.query.shape).sum(0))

    call.fitting("to_queries", call.tile("to_queries", call.n), run)
    if grads is None and one.shape[0] > 1:
        down = two.sum(0)
        return one.sum(0) / torch.where(down == 0, 1.0, down)
    if grads is not None and call.gate_query is not None:
        grads.gate_query.copy_(one.sum(0).view(grads.gate_query.shape))
    if grads is not None and call.caps is not None:
        grads.caps.copy_(two.sum(0).view(grads.caps.shape))
    return one


def _to_keys(way: Way, *some: tuple[int, int], ds: Tensor | None = None) -> None:
    """Fill the gradients on the side of the keys; with `wide`, `ds` instead of the key's own.

    `some` are which pairs and which keys of theirs: the first, and how many; else all.
    """
    call, along, centre, kept, grads, wide = way
    assert grads is not None
    (first_pair, count), (first_key, keys_n) = some or ((0, call.b * call.hk), (0, call.m))
    lines = call.b * call.hk * call.m
    rows = call.b * call.h * call.n if call.facts["ALONG"] else kept.stride(0)

    def run(tile: Tile) -> None:
        programs = count * -(-keys_n // tile.cols)
        splits, span = call.parts(programs, call.n, tile.rows, tile.waves)
        places = (grads.key, grads.value, grads.key_bias, grads.gate_key)
        targets = list(places)
        if splits > 1:
            written = (
                not wide, not call.facts["ALONG"], call.key_bias is not None,
                call.gate_key is not None,
            )  # fmt: skip
            if call.weighting == "average":
                written = (False, True, False, False)
            targets = [
                call.new(splits, lines, width) if there else x
                for x, width, there in zip(places, (call.w, call.d, 1, 1), written, strict=True)
            ]
        for own, at, counts, at_columns, more in call.walks(tile, splits, by_key=True):
            facts = call.known(own, wide, splits) | more
            facts["UNEVEN"] = call.n % own.rows != 0 and not facts["EDGES"]
            many = call.b * call.h * call.n > launch.LARGE
            facts["LINED"] = facts["QUICK"] and facts["TMA"] and not many
            arrays = (at, counts, along, centre, kept, *targets, ds)
            sizes = call.sizes(heads=call.hk, at_columns=at_columns, splits=splits, span=span)
            whole = (sizes, rows, first_pair, first_key, keys_n, lines)
            grid = count * -(-keys_n // own.cols) * splits
            call.start(to_keys.to_keys, grid, arrays, ds, whole, facts, own)
        for place, part in zip(places, targets, strict=True):
            if part is not place:
                at = (slice(first_pair, first_pair + count), slice(first_key, first_key + keys_n))
                part = part.view(splits, call.b * call.hk, call.m, -1)[:, *at]
                place.view(call.b * call.hk, call.m, -1)[at] = part.sum(0).to(place.dtype)

    call.fitting("to_keys", call.tile("to_keys", call.m), run)


def _through_scratch(way: Way, for_queries: bool, for_keys: bool) -> None:
    """∂L/∂φ = dS·ψ and ∂L/∂ψ = dSᵀ·φ by matrix products, of as many scores as SCRATCH holds."""
    call, grads = way.call, way.grads
    assert grads is not None
    pairs, wide_n = call.b * call.hk, call.group * call.n
    dtype, device = grads.query.dtype, call.query.device
    # Lines of one head that begin evenly are written 16 bytes at once, whatever their length.
    line = -(-call.n // 16) * 16 if call.group == 1 else call.n
    room = SCRATCH // (dtype.itemsize * call.group * line)
    keys_n = call.m if call.m <= room else max(room // 256, 1) * 256
    count = max(min(room // min(keys_n, call.m), pairs), 1)
    phi = call.query.reshape(pairs, wide_n, call.w).to(dtype)
    psi = call.key.reshape(pairs, call.m, call.w).to(dtype)
    whole = keys_n >= call.m
    ours = call.width is not None and whole and call.group * line % 8 == 0
    ours = ours and launch.copy_engine(device)
    if not for_keys:
        way = way._replace(grads=_places(call.inputs, False, True, False))
    total: Tensor | None = None
    held = rooms.new(phi, (count * min(keys_n, call.m) * call.group * line,), dtype)
    for pair in range(0, pairs, count):
        some = slice(pair, min(pair + count, pairs))
        size = some.stop - some.start
        if for_queries and not whole:
            total = torch.zeros((size, wide_n, call.w), dtype=torch.float32, device=device)
        for first in range(0, call.m, keys_n):
            span = slice(first, min(first + keys_n, call.m))
            width = span.stop - first
            shape = (size, width, call.group, line)
            ds = held[: math.prod(shape)].view(shape)
            ds = wide.cleared(ds) if call.masked else ds
            _to_keys(way, (pair, size), (first, width), ds=ds)
            if ours:
                dphi, dpsi = (x.view(pairs, -1, call.w)[some] for x in grads[:2])
                band = call.band if call.group == 1 else (None, None)
                wide.fill(ds.flatten(2), phi[some], psi[some], dphi, dpsi, call.width, band)
            if ours or ahead.LISTED.get() is not None:  # a dry run launches no other products
                continue
            ds = ds[..., : call.n].flatten(2)
            if for_keys:
                place = grads.key.view(pairs, call.m, call.w)[some, span]
                if whole and place.dtype == dtype:
                    torch.matmul(ds, _clean(call, phi[some]), out=place)
                else:
                    place.copy_(torch.matmul(ds, _clean(call, phi[some])))
            if for_queries:
                back, there = ds.transpose(1, 2), _clean(call, psi[some, span])
                place = grads.query.view(pairs, wide_n, call.w)[some]
                if total is None:
                    torch.matmul(back, there, out=place)
                else:
                    total += torch.matmul(back, there)
                del back
        if total is not None:
            grads.query.view(pairs, wide_n, call.w)[some] = total.to(dtype)


def _clean(call: Arguments, x: Tensor) -> Tensor:
    """x with 0 for what is not finite, since 0 · NaN would bring back what the mask ruled out."""
    return torch.where(torch.isfinite(x), x, 0.0) if call.masked else x
