"""The attentions of published models on a CUDA device, beside FlexAttention and PyTorch's kernels.

python -m bench.published [PART …]

With names of parts (packed, linear, decay, float16, growth, paged, sink, entmax_sink, alibi,
t5), other rows stay.

ALiBi and a learned sink, beside FlexAttention with the same function; T5's buckets, beside SDPA of
a float mask; a packed batch, beside PyTorch's kernel for variable lengths; linear attention and
decay, beside the chunk kernels of flash-linear-attention (fla), on arrays in the order of axes that
each side has; a paged cache, beside SDPA over the gathered keys. Results agree with the equation in
float32 (relative error). Learned rates are measured beside fixed ones: with Triton 3.4 to 3.7 on
Hopper, fla 0.6 refuses the gradient of gates.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._clocks import Cpu, Cuda
from bench._side_by_side import SMALL, Row, compare, mute, save_results, size
from qkv import masks, nn, scores, weightings
from qkv.scores import Alibi, T5Bias

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
ROWS = size(4096, 48)
CHUNK = 64
Given = tuple[Tensor, ...]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def with_gradients(
    function: Callable[..., Tensor], *given: Tensor, learned: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of query, key, value and `learned`; the last array is ∂L/∂out."""
    arrays = [x.detach().requires_grad_() for x in given[:3]]
    if learned is not None:
        arrays.append(learned)
    return list(torch.autograd.grad(function(*arrays[:3]), arrays, given[3], allow_unused=True))


def forward(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*given[:3])


DIRECTIONS = {"forward": forward, "forward + backward": with_gradients}


def heads_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of axes (batch, heads, rows, width) for fla's (batch, rows, heads, width).

    Arrays are copied into that order once, not in the calls that are timed.
    """
    copies: dict[int, Tensor] = {}

    def run(*given: Tensor) -> Any:
        for x in given:
            if x.data_ptr() not in copies:
                copies[x.data_ptr()] = x.transpose(1, 2).contiguous()
        found = function(*(copies[x.data_ptr()] for x in given))
        if isinstance(found, Tensor):
            return found.transpose(1, 2)
        return [x.transpose(1, 2) if x.ndim == 4 else x for x in found]

    return run


def adapt_side(name: str, side: Callable[..., Any]) -> Callable[..., Any]:
    """Return a side as it is timed. The one with fixed rates lacks a gradient: it has no error."""
    if name == "fixed rates":
        return mute(side)
    return heads_second(side) if name == "fla" else side


def load_fla(module: str) -> Any:
    """Return a module of fla. Its first import may fail in transformers, which it does not need."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(module)
    return importlib.import_module(module)


def list_rows(
    work: str,
    shape: tuple[int, ...],
    sides: dict[str, Callable[..., Tensor]],
    equation: Callable[..., Tensor] | None,
    goals: dict[str, float],
    directions: tuple[str, ...] = tuple(DIRECTIONS),
    dtype: torch.dtype = DTYPE,
    learned: Tensor | None = None,
) -> Iterator[Row]:
    """Yield a row for each direction. The goals say how many times a peer's time is allowed.

    `learned` is an array that the functions read, whose gradient is computed too.
    """
    torch.manual_seed(0)
    given = tuple(draw(*shape).to(dtype) for _ in range(4))
    for name in directions:
        run: Any = DIRECTIONS[name]
        if name != "forward" and learned is not None:
            run = partial(with_gradients, learned=learned)

        def exact(*given: Tensor, run: Any = run) -> list[Tensor]:
            found = run(equation, *[x.float() for x in given])
            return found if isinstance(found, list) else [found]

        yield compare(
            f"{work}, {name}",
            {side: adapt_side(side, partial(run, function)) for side, function in sides.items()},
            [given],
            exact=exact if equation else None,
            goals={peer: 1 / times for peer, times in goals.items()},
            clock=Cuda() if DEVICE == "cuda" else Cpu(),
            repeats=15,
        )


def compile_flex(**options: Any) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    if DEVICE == "cpu":  # FlexAttention has no gradient there
        return lambda *given: flex_attention(*given, **options)
    return partial(torch.compile(flex_attention, dynamic=False), **options)


def alibi_rows() -> Iterator[Row]:
    from torch.nn.attention.flex_attention import create_block_mask

    heads = size(16, 2)
    slopes = scores.alibi_slopes(heads)
    slopes = torch.as_tensor(slopes, device=DEVICE, dtype=torch.float32)
    score = scores.Relative(Alibi(slopes))
    block_mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, ROWS, ROWS, device=DEVICE, _compile=False
    )
    flex = compile_flex(
        score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), block_mask=block_mask
    )
    attend = partial(qkv.attend, score=score, mask="causal")
    yield from list_rows(
        f"ALiBi, causal, B4 H{heads} n{ROWS} d64",
        (size(4, 1), heads, ROWS, 64),
        {"qkv": attend, "flex": flex},
        partial(attend, engine="dense"),
        {"flex": 1.0},
    )


def t5_rows() -> Iterator[Row]:
    """Yield rows for T5's buckets.

    FlexAttention does not compile a score_mod that reads such a table: on an H200, it finds no
    configuration that fits into shared memory.
    """
    heads = size(8, 2)
    table = torch.randn(heads, 32, device=DEVICE)
    bias = T5Bias(table)
    at = torch.arange(ROWS, device=DEVICE)
    reach = bias.max_distance
    far = (at[None, :] - at[:, None]).clamp(-reach, reach) + reach
    pairs = bias.distance_table()[:, far].to(DTYPE)
    attend = partial(qkv.attend, score=scores.Relative(bias))
    yield from list_rows(
        f"T5's buckets, B2 H{heads} n{ROWS} d64",
        (2, heads, ROWS, 64),
        {"qkv": attend, "SDPA of a float mask": partial(sdpa, attn_mask=pairs)},
        partial(attend, engine="dense"),
        {"SDPA of a float mask": 1.0},
    )


def entmax_sink_rows() -> Iterator[Row]:
    heads = size(16, 2)
    attend = partial(qkv.attend, weighting=weightings.Entmax(1.5, sink=0.5))
    yield from list_rows(
        f"Entmax(1.5) with a sink, B4 H{heads} n{ROWS} d64",
        (size(4, 1), heads, ROWS, 64),
        {"qkv": attend, "qkv without a sink": partial(qkv.attend, weighting="entmax15")},
        partial(attend, engine="dense"),
        {"qkv without a sink": 1.1},
    )


def sink_rows() -> Iterator[Row]:
    heads = size(16, 2)
    sink = torch.randn(heads, device=DEVICE)
    flex = compile_flex(return_lse=True)

    def scale_by_sink(*given: Tensor) -> Tensor:
        out, lse = flex(*given)
        return out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)

    attend = partial(qkv.attend, weighting=weightings.Softmax(sink=sink))
    yield from list_rows(
        f"learned sink, B4 H{heads} n{ROWS} d64",
        (size(4, 1), heads, ROWS, 64),
        {"qkv": attend, "flex": scale_by_sink},
        partial(attend, engine="dense"),
        {"flex": 1.0},
    )


def packed_rows() -> Iterator[Row]:
    heads, documents, total = size(16, 2), size(64, 3), size(32_768, 60)
    cuts = torch.randperm(total - 1, generator=torch.Generator().manual_seed(0))[: documents - 1]
    bounds = [0, *sorted((cuts + 1).tolist()), total]
    cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in itertools.pairwise(bounds))

    def run_varlen(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        given = [x[0].transpose(0, 1) for x in (query, key, value)]
        window = (-1, 0) if causal else (-1, -1)
        out = varlen_attn(*given, cu, cu, longest, longest, window_size=window)
        return out.transpose(0, 1)[None]

    def run_each(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        parts = [[x[:, :, a:b] for x in (query, key, value)] for a, b in itertools.pairwise(bounds)]
        return torch.cat([sdpa(*part, is_causal=causal) for part in parts], 2)

    document = torch.bucketize(torch.arange(total, device=DEVICE), cu[1:], right=True)
    for causal in (False, True):
        kind = ", causal" if causal else ""
        yield from list_rows(
            f"packed, {documents} documents, {total} rows, H{heads} d64{kind}",
            (1, heads, total, 64),
            {
                "qkv": partial(qkv.attend, mask=masks.packed(cu, causal=causal)),
                "torch's variable lengths": partial(run_varlen, causal=causal),
                "flex": flex_of_documents(document, causal),
            },
            partial(run_each, causal=causal),
            {"torch's variable lengths": 1.1, "flex": 1.0},
        )


def flex_of_documents(document: Tensor, causal: bool) -> Callable[..., Tensor]:
    """Return FlexAttention in which each row attends to those of its document."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & ((i >= j) | (not causal))

    total = len(document)
    block_mask = create_block_mask(sees, None, None, total, total, device=DEVICE, _compile=False)
    return compile_flex(block_mask=block_mask)


def sum_by_chunks(query: Tensor, key: Tensor, value: Tensor, rates: Tensor | None = None) -> Tensor:
    """Return Σ over earlier keys of (q·k) v, with a decay per row, by chunks, in float32."""
    n = query.shape[-2]
    chunks = [
        x.float().unflatten(2, (n // CHUNK, CHUNK)) for x in (query, key, value)
    ]  # (B, H, chunks, CHUNK, d)
    q, k, v = chunks
    at = torch.arange(CHUNK, device=query.device)
    gap = (at[:, None] - at[None, :]).float()
    inside = torch.tril(torch.ones_like(gap))
    late, early, whole = (torch.ones(1, device=query.device) for _ in range(3))
    if rates is not None:
        rate = rates[:, None, None, None]
        inside = inside * torch.exp(-rate * gap.clamp(min=0))
        late = torch.exp(-rate * (at + 1.0)[:, None])
        early = torch.exp(-rate * (CHUNK - 1.0 - at)[:, None])
        whole = torch.exp(-rates * CHUNK)[:, None, None]
    sums = (k * early).mT @ v
    state, states = torch.zeros_like(sums[:, :, 0]), []
    for i in range(n // CHUNK):
        states.append(state)
        state = state * whole + sums[:, :, i]
    out = (q @ k.mT * inside) @ v + (q * late) @ torch.stack(states, 2)
    return out.flatten(2, 3).to(query.dtype)


def positive(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


def run_linear_fla(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chunk_linear_attn = load_fla("fla.ops.linear_attn").chunk_linear_attn
    out: Tensor = chunk_linear_attn(positive(query), positive(key), value, scale=1.0)[0]
    return out


def sum_normalized(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return linear attention of `positive` features by the chunk formula in float32."""
    ones = torch.ones_like(value[..., :1])
    mapped = positive(query), positive(key)
    out = sum_by_chunks(*mapped, torch.cat([value, ones], -1).float())
    return (out[..., :-1] / out[..., -1:]).to(value.dtype)


def float16_rows() -> Iterator[Row]:
    batch, heads, n = size(4, 1), size(16, 2), size(16_384, 128)
    normalized = partial(
        qkv.attend, score=scores.FeatureMap(), weighting="normalized", mask="causal"
    )
    yield from list_rows(
        f"linear attention, causal, B{batch} H{heads} n{n} d64, float16",
        (batch, heads, n, 64),
        {"qkv": normalized, "fla": run_linear_fla},
        sum_normalized,
        {"fla": 1.2},
        dtype=torch.float16,
    )


def linear_rows() -> Iterator[Row]:
    batch, heads, n = size(4, 1), size(16, 2), size(16_384, 128)
    shape = (batch, heads, n, 64)
    attend = partial(qkv.attend, mask="causal", engine="linear")
    normalized = partial(attend, score=scores.FeatureMap(), weighting="normalized")

    def run_raw_fla(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chunk_linear_attn = load_fla("fla.ops.linear_attn").chunk_linear_attn
        out: Tensor = chunk_linear_attn(query, key, value, scale=1.0, normalize=False)[0]
        return out

    yield from list_rows(
        f"linear attention, causal, B{batch} H{heads} n{n} d64",
        shape,
        {"qkv": normalized, "fla": run_linear_fla, "SDPA": partial(sdpa, is_causal=True)},
        sum_normalized,
        {"fla": 1.2},
    )
    yield from list_rows(
        f"linear attention of dot products, raw, causal, B{batch} H{heads} n{n} d64",
        shape,
        {"qkv": partial(attend, score="dot", weighting="raw"), "fla": run_raw_fla},
        sum_by_chunks,
        {"fla": 1.2},
    )
    torch.manual_seed(0)
    given = tuple(draw(*shape) for _ in range(3))
    numbers = batch * heads * n * 64
    half, other = (torch.empty(4 * numbers // 2, device=DEVICE, dtype=DTYPE) for _ in range(2))
    yield compare(
        f"linear attention, causal, B{batch} H{heads} n{n} d64, beside a copy of its arrays",
        {"qkv": partial(forward, normalized), "copy": lambda *_: half.copy_(other)},
        [given],
        clock=Cuda() if DEVICE == "cuda" else Cpu(),
        repeats=15,
    )


def growth_rows() -> Iterator[Row]:
    """Yield rows for lengths that double, which docs/pictures/plot-linear-times.png shows."""
    heads = size(8, 2)
    attend = partial(
        qkv.attend,
        score=scores.FeatureMap(),
        weighting="normalized",
        mask="causal",
        engine="linear",
    )
    for n in (2**i for i in range(size(10, 6), size(18, 8))):
        torch.manual_seed(0)
        given = tuple(draw(1, heads, n, 64) for _ in range(4))
        sides = {"qkv": attend, "SDPA": partial(sdpa, is_causal=True)}
        for direction, run in DIRECTIONS.items():
            yield compare(
                f"linear attention, causal, B1 H{heads} n{n} d64, {direction}",
                {name: partial(run, side) for name, side in sides.items()},
                [given],
                clock=Cuda() if DEVICE == "cuda" else Cpu(),
                repeats=9,
            )


def decay_rows() -> Iterator[Row]:
    batch, heads = size(4, 1), size(16, 2)
    rates = torch.linspace(0.002, 0.1, heads, device=DEVICE)
    learned = rates.clone().requires_grad_()

    def attend(query: Tensor, key: Tensor, value: Tensor, rates: Tensor) -> Tensor:
        score = scores.Decay(rates, scores.Dot())
        out: Tensor = qkv.attend(query, key, value, score=score, weighting="raw", mask="causal")
        return out

    def run_fla(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chunk_simple_gla = load_fla("fla.ops.simple_gla").chunk_simple_gla
        out: Tensor = chunk_simple_gla(query, key, value, scale=1.0, g_gamma=-rates)[0]
        return out

    for n in (size(4096, 128), size(16_384, 256)):
        yield from list_rows(
            f"decay, causal, B{batch} H{heads} n{n} d64",
            (batch, heads, n, 64),
            {"qkv": partial(attend, rates=rates), "fla": run_fla},
            partial(sum_by_chunks, rates=rates),
            {"fla": 1.2},
        )
    yield from list_rows(
        f"decay, causal, B{batch} H{heads} n{size(4096, 128)} d64, learned rates",
        (batch, heads, size(4096, 128), 64),
        {"qkv": partial(attend, rates=learned), "fixed rates": partial(attend, rates=rates)},
        partial(sum_by_chunks, rates=learned),
        {"fixed rates": 2.0},
        ("forward + backward",),
        learned=learned,
    )


def paged_rows() -> Iterator[Row]:
    batch, heads, key_heads, n = size(64, 2), size(32, 4), size(8, 2), size(4096, 40)
    torch.manual_seed(0)
    key, value = (draw(batch, key_heads, n, 128) for _ in range(2))
    cache = nn.PagedCache(block=256, pages=batch * -(-n // 256))
    sequences = [cache.add_sequence() for _ in range(batch)]
    cache.append_rows(sequences, key, value)
    query = draw(batch, heads, 1, 128)

    def run_paged(query: Tensor) -> Tensor:
        with torch.no_grad():
            return cache.attend(query, sequences)

    def run_sdpa(query: Tensor) -> Tensor:
        with torch.no_grad():
            return sdpa(query, key, value, enable_gqa=True)

    def exact(query: Tensor) -> list[Tensor]:
        return [sdpa(query.float(), key.float(), value.float(), enable_gqa=True)]

    yield compare(
        f"paged decode, B{batch}, {heads} / {key_heads} heads, {n} keys, d128",
        {"qkv": run_paged, "SDPA": run_sdpa},
        [(query,)],
        exact=exact,
        goals={"SDPA": 1 / 1.15},
        clock=Cuda() if DEVICE == "cuda" else Cpu(),
        repeats=15,
    )


PARTS = {
    "packed": packed_rows,
    "linear": linear_rows,
    "decay": decay_rows,
    "growth": growth_rows,
    "float16": float16_rows,
    "paged": paged_rows,
    "sink": sink_rows,
    "entmax_sink": entmax_sink_rows,
    "alibi": alibi_rows,
    "t5": t5_rows,
}


def rows(names: list[str]) -> Iterator[Row]:
    for name in names or PARTS:
        try:
            yield from PARTS[name]()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    chosen = [x for x in sys.argv[1:] if not x.startswith("-")]
    if DEVICE == "cuda" or SMALL:
        save_results("published_cuda", rows(chosen), replace=not chosen)
    else:
        sys.exit("bench.published needs a CUDA device, which torch does not find")
