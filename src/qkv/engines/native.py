"""The framework's own fused attention: `torch.nn.functional.scaled_dot_product_attention` and
`jax.nn.dot_product_attention`, for softmax of dot products."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qkv.arrays import framework, is_array, threads, tree
from qkv.engines import call as calls
from qkv.engines import dense, streaming
from qkv.engines.call import Call
from qkv.masks import is_causal
from qkv.scores import Dot, ScaledDot
from qkv.types import Array, Span
from qkv.weightings import Softmax

NAME = "native"

MANY = 2**14
"""Keys from which a few queries are a matter of reading them."""

SHARED = 32
"""Queries that torch's kernel on the CPU gives to one core."""

WHOLE = 2**24
"""Numbers of a mask that the kernel may be given at once."""

MOST = 0.75
"""The share of the pairs that a mask must leave for that."""

WORTH = 2**34
"""Products of a call from which another backend may gain more than it takes to name it."""

ROWS = 64
"""Queries per call of the kernel where a mask leaves only part of the keys to each."""


def cannot(call: Call) -> str | None:
    if call.fw.name not in ("torch", "jax"):
        return f"{call.fw.name} has no fused attention of its own"
    if type(call.score) not in (Dot, ScaledDot):
        return f"fused kernels know dot products only, not {type(call.score).__name__}"
    if getattr(call.score, "softcap", None) is not None:
        return "fused kernels have no softcap"
    if type(call.weighting) is not Softmax:
        return f"fused kernels know softmax only, not {type(call.weighting).__name__}"
    if is_array(getattr(call.score, "scale", None)) or is_array(call.weighting.temperature):
        return "a learned scale or temperature needs a gradient that the kernel does not give"
    if call.wants_lse or call.wants_weights:
        return "fused kernels return neither the weights nor their log-sum-exp"
    if call.dropout:
        return "fused kernels draw their own random numbers, so a seed would mean something else"
    if 0 in (*call.lead, call.n, call.m):
        return "there is nothing to compute"
    return _torch_cannot(call) if call.fw.name == "torch" else _jax_cannot(call)


def declines(call: Call) -> str | None:
    widths = [call.fw.shape(x)[-1] for x in (call.query, call.value)]
    if max(widths) > 2 * min(widths) and max(widths) > 128:
        return (
            f"the kernel takes one width, and {widths[0]} for queries against {widths[1]} for "
            "values would be mostly padding"
        )
    if call.m >= MANY and streaming.is_few(call) and _has_look_up(call):
        return "for a few queries among many keys it reads memory more slowly than ours"
    if call.fw.name == "jax" and _jax_platform(call) == "cpu":
        return "on a CPU jax.nn makes the whole n × m matrix: it is no faster than ours"
    if call.fw.name == "jax" and not _cudnn_fits(call):
        return "cuDNN takes 16-bit vectors of up to 128 numbers; without it jax.nn makes the matrix"
    return None


def has_kernels(call: Call) -> bool:
    """Whether there are fused kernels for 16-bit vectors where the call's arrays are."""
    if call.fw.dtype(call.query) not in ("float16", "bfloat16"):
        return False
    if call.fw.name == "torch":
        return bool(call.query.device.type == "cuda")
    return call.fw.name == "jax" and _jax_platform(call) != "cpu"


def describe(call: Call) -> str:
    if call.fw.name == "jax":
        return "jax.nn.dot_product_attention"
    if call.rule is None or is_causal(call.rule):
        return f"torch's scaled_dot_product_attention{_told(call)}"
    if call.fw.tracing(call.query) or _leaves_most(call, _plan(call)):
        return "torch's scaled_dot_product_attention"
    return f"torch's scaled_dot_product_attention, {ROWS} queries at a time"


def run(call: Call) -> tuple[Array, None, None]:
    out = _torch(call) if call.fw.name == "torch" else _jax(call)
    return out, None, None


def scale_of(call: Call) -> float:
    """The factor on qᵀk, with the softmax's temperature."""
    scale: Any = 1.0
    if isinstance(call.score, ScaledDot):
        width = call.fw.shape(call.query)[-1]
        scale = 1 / math.sqrt(width or 1) if call.score.scale is None else call.score.scale
    return float(scale / call.weighting.temperature)  # type: ignore[attr-defined]


# PyTorch


def _torch_cannot(call: Call) -> str | None:
    fw = call.fw
    if call.bias is not None and fw.needs_gradient([call.bias]):
        return "the kernel gives no gradient for a float mask"
    if (call.query.device.type == "cuda" and _heals(call)) or _splits(call):
        return None
    # Behind a mask the kernel multiplies a NaN by 0, and that is NaN; on a CPU it takes a row
    # with a NaN for an empty one. A sum finds either in one pass.
    on_cpu = call.query.device.type == "cpu"
    if (on_cpu or call.rule is not None) and not fw.tracing(call.query):
        import torch

        wide = torch.promote_types(call.query.dtype, torch.float32)
        parts: list[Any] = [call.query, call.key, call.value]
        if not math.isfinite(sum(float(x.detach().sum(dtype=wide)) for x in parts)):
            return "an argument is not finite, which the kernel would hide, or leak past a mask"
    return None


def _heals(call: Call) -> bool:
    """Whether what a NaN behind the mask has spoiled is found and mended on the device itself."""
    if call.rule is None:
        return True
    plain = is_causal(call.rule) and call.fw.dtype(call.query) != "float64"
    plain = plain and max(call.fw.shape(x)[-1] for x in (call.query, call.value)) <= 256
    return plain and not call.fw.tracing(call.query) and has_triton()


def _has_look_up(call: Call) -> bool:
    on_cuda = call.fw.name == "torch" and call.query.device.type == "cuda"
    return on_cuda and has_triton() and not call.fw.tracing(call.query)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is there to run kernels of our own."""
    return importlib.util.find_spec("triton") is not None


def _torch(call: Call) -> Array:
    fw = call.fw
    tracing = fw.tracing(call.query)
    if _splits(call):
        return _split(call)
    if call.rule is None and call.bias is None:
        return _open(call)
    plan = None
    if call.rule is not None and not is_causal(call.rule) and not tracing:
        plan = _plan(call)
    whole = plan is None or _leaves_most(call, plan)
    attend = _whole if whole else functools.partial(_in_rows, plan)
    heals = call.rule is not None and call.query.device.type == "cuda" and _heals(call)
    if tracing or not fw.needs_gradient((call.query, call.key, call.value)):
        out = attend(call)[0]
        return _healed(call, out)[0] if heals else out
    leaves = tree.leaves(fw, call)
    held: list[Any] = []

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        import torch

        inner = [x.detach() for x in arrays]
        if not whole:
            return (attend(tree.rebuild(fw, call, inner))[0],), ()
        for x in inner[:3]:
            x.requires_grad_()
        with torch.enable_grad():  # the kernel's own graph waits here for the way back
            out, _ = attend(tree.rebuild(fw, call, inner))
        held[:] = [out, inner[:3]]
        if not heals:
            return (out.detach(),), ()
        mended, found = _healed(tree.rebuild(fw, call, [x.detach() for x in inner]), out.data)
        return (mended,), (found, mended)

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        import torch

        if whole:
            main = torch.autograd.grad(held[0], held[1], gradients[0], retain_graph=True)
            if heals:
                _heal_slopes(call, arrays, main[0], gradients[0], kept)
        else:
            main = attend(tree.rebuild(fw, call, [x.detach() for x in arrays]), gradients[0])[1]
        return (*main, *[None] * (len(arrays) - 3))

    def reference(*arrays: Array) -> tuple[Array, ...]:
        out = dense.run(tree.rebuild(fw, call, arrays))[0]
        return (fw.astype(out, fw.dtype(call.query)),)

    return fw.custom(forward, backward, reference, leaves)[0]


def fused(query: Array, key: Array, value: Array, scale: float) -> Array:
    """softmax(q kᵀ · scale) v by torch's kernel, with gradients of both orders.

    query (batch, heads, n, d), key and value (batch, heads, m, d), or with fewer heads.
    """
    fw = framework("torch")
    parts = (query, key, value)
    if fw.tracing(query) or not fw.needs_gradient(parts):
        return _sdpa(parts, None, False, scale)
    held: list[Any] = []

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        out, pull = fw.vjp(lambda *x: _sdpa(x, None, False, scale), *arrays)
        held[:] = [pull]  # with the kernel's own graph, for the way back
        return (out,), ()

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        return tuple(held[0](gradients[0]))

    def reference(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
        out = dense.run(Call(query, key, value, ScaledDot(scale), Softmax()))[0]
        return (fw.astype(out, fw.dtype(query)),)

    return fw.custom(forward, backward, reference, parts)[0]


def _open(call: Call) -> Array:
    """The kernel without a mask."""
    query, key, value = call.query, call.key, call.value
    query, key, value, width = _one_width(query, key, value)
    if key.shape[-3:-2] != value.shape[-3:-2]:
        key, value = (calls.share_heads(call, x) for x in (key, value))
    query, key, value = (_four_axes(x, call.lead) for x in (query, key, value))
    out = fused(query, key, value, scale_of(call))
    return out[..., :width].reshape(*call.lead, call.n, width)


def _one_width(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array, int]:
    """The three with zeros up to the widest, and the width of the value."""
    from torch.nn.functional import pad

    width = value.shape[-1]
    if width < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - width))
    elif width > query.shape[-1]:
        query, key = (pad(x, (0, width - query.shape[-1])) for x in (query, key))
    return query, key, value, width


def _seen(call: Call) -> list[Any]:
    """Query, and the keys and values that the last query sees, on four axes."""
    key, value = call.key, call.value
    if key.shape[-3:-2] != value.shape[-3:-2]:  # type: ignore[union-attr]
        key, value = (calls.share_heads(call, x) for x in (key, value))
    query, key, value = (_four_axes(x, call.lead) for x in (call.query, key, value))
    return [query, key[..., : call.n, :], value[..., : call.n, :]]


def _healed(call: Call, out: Array) -> tuple[Array, Array]:
    """The output without what a NaN behind the causal mask has spoiled; and for the way back."""
    from qkv.engines.triton import mend

    out = out.contiguous()
    query, key, value = _seen(call)
    found = mend.heal(_four_axes(out, call.lead), query, key, value, scale_of(call))
    return out, found


def _heal_slopes(
    call: Call, arrays: Sequence[Array], slopes: Array, along: Array, kept: Sequence[Array]
) -> None:
    """The same for the gradient of the query, in place; those of key and value are right."""
    from qkv.engines.triton import mend

    call = tree.rebuild(call.fw, call, [x.detach() for x in arrays])
    dquery, along, out = (_four_axes(x, call.lead) for x in (slopes, along.contiguous(), kept[1]))
    query, key, value = _seen(call)
    mend.heal_backward(dquery, along, out, kept[0], query, key, value, scale_of(call))


def _splits(call: Call) -> bool:
    """Whether the kernel, which shares out queries and heads alone, would leave cores idle."""
    if call.query.device.type != "cpu" or call.rule is not None or call.m < MANY:
        return False
    if call.fw.tracing(call.query) or call.fw.dtype(call.query) == "float64":
        return False
    if math.prod(call.lead) * call.n > SHARED:
        return False
    return not call.fw.needs_gradient((call.query, call.key, call.value))


def _split(call: Call) -> Array:
    """The kernel on parts of the keys as so many heads, merged by their log-sum-exps."""
    import torch

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = call.query
    key, value = (calls.share_heads(call, x) for x in (call.key, call.value))
    width = max(query.shape[-1], value.shape[-1])
    parts = [
        torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        for x in (query, key, value)
    ]
    query, key, value = (x.expand(*call.lead, *x.shape[-2:]).flatten(0, -3)[:, None]
                         if call.lead else x[None, None] for x in parts)  # fmt: skip
    batch, count = query.shape[0], 4 * threads.cores()
    size = call.m // count

    def some(start: int, heads: int, size: int) -> tuple[Array, Array]:
        end = start + heads * size
        k, v = (x[:, :, start:end].reshape(batch, heads, size, width) for x in (key, value))
        return kernel(query.expand(-1, heads, -1, -1), k, v, scale=scale_of(call))  # type: ignore[no-any-return]

    found = [some(0, count, size)]
    if call.m % count:
        found.append(some(count * size, 1, call.m % count))
    out, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
    if not (torch.isfinite(lse).all() and torch.isfinite(out).all()):
        return streaming.run(call)[0].to(call.query.dtype)  # the kernel may have hidden a NaN
    share = torch.softmax(lse.float(), 1)[..., None].to(out.dtype)
    merged = (share * out).sum(1)[..., : call.value.shape[-1]]  # type: ignore[union-attr]
    return merged.reshape(*call.lead, call.n, -1)


def _whole(call: Call, gradient: Array | None = None) -> tuple[Array, None]:
    """One call of the kernel."""
    plain = is_causal(call.rule)
    mask = None
    if call.rule is not None and not plain:
        block = calls.place(call, calls.all_rows(call), calls.all_cols(call))
        mask = _additive(call, block)
    return _kernel(call, (call.query, call.key, call.value), mask, plain), None


def _in_rows(
    plan: Any, call: Call, gradient: Array | None = None
) -> tuple[Array, list[Array] | None]:
    """The kernel on each span of queries and the keys that the mask leaves it.

    With the gradient of the output, the gradients of query, key and value instead.
    """
    import torch

    value: Any = call.value
    outs: list[Array] = []
    totals = None
    if gradient is not None:
        totals = [torch.zeros_like(x) for x in (call.query, call.key, value)]
    for group in _alike(call, plan):
        rows, runs = group[0]
        rows = Span(rows.start, sum(span.size for span, _ in group))
        if not runs:
            outs.append(call.query.new_zeros((*call.lead, rows.size, value.shape[-1])))
            continue
        runs = [*runs[:-1], _reach(runs[-1], group[-1][1][-1])]
        parts = [call.fw.cut(call.query, rows, -2), _gather(call.key, runs), _gather(value, runs)]
        if totals is None:
            outs.append(_kernel_of(call, group, parts))
            continue
        parts = [x.detach().requires_grad_() for x in parts]
        with torch.enable_grad():
            out = _kernel_of(call, group, parts)
        found = torch.autograd.grad(out, parts, call.fw.cut(gradient, rows, -2))
        call.fw.add_at(totals[0], found[0], rows, None)
        for total, new in zip(totals[1:], found[1:], strict=True):
            at = 0
            for run in runs:
                call.fw.add_at(total, new[..., at : at + run.size, :], run, None)
                at += run.size
    return (torch.cat(outs, -2) if totals is None else call.query), totals


def _plan(call: Call) -> Any:
    start, end = call.rule.extent(Span(call.n // 2, 1), call.n, call.m)  # type: ignore[union-attr]
    wide = call.m if end - start < call.m else ROWS  # keys within reach, or to be picked out
    return streaming.plan_of(call, min(ROWS, call.n), min(wide, call.m))


def _leaves_most(call: Call, plan: Any) -> bool:
    """Whether the mask rules out so little that one call with all of it takes less than many."""
    given = call.rule.arrays()  # type: ignore[union-attr]
    lead = max((math.prod(x.shape[:-2]) for x in given), default=1)
    if lead * call.n * call.m > WHOLE:
        return False
    left = sum(rows.size * span.size for rows, keys in plan for span in keys)
    return bool(left >= MOST * call.n * call.m)


Group = list[tuple[Span, list[Span]]]


def _alike(call: Call, plan: Any) -> list[Group]:
    """The plan in groups that one call of the kernel serves.

    A rule on distances alone looks the same at every place along the diagonal: there, neighbours
    with one run of keys of the same size go together.
    """
    groups: list[Group] = []
    for rows, keys in plan:
        runs = _runs(keys)
        if groups and call.rule.relative and call.bias is None:  # type: ignore[union-attr]
            (last_rows, last_runs), step = groups[-1][-1], rows.size
            if len(runs) == len(last_runs) == 1 and last_rows.size == step:
                moved = last_runs[0]._replace(start=last_runs[0].start + step)
                if runs[0] == moved:
                    groups[-1].append((rows, runs))
                    continue
        groups.append([(rows, runs)])
    return groups


def _reach(first: Span, last: Span) -> Span:
    return Span(first.start, last.start + last.size - first.start, open=first.open)


def _kernel_of(call: Call, group: Group, parts: list[Array]) -> Array:
    """The kernel on one span of queries, or on several at once as one more axis of the batch."""
    import torch

    rows, runs = group[0]
    mask = None
    if call.bias is not None or not all(run.open for run in runs):
        blocks = [_additive(call, calls.place(call, rows, run)) for run in runs]
        mask = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
    if len(group) == 1:
        return _kernel(call, parts, mask, False)
    count, size, wide = len(group), rows.size, runs[0].size
    query, key, value = parts
    lead = (*call.lead, count)
    query = query.reshape(*lead, size, query.shape[-1])
    key, value = (
        calls.share_heads(call, x).unfold(-2, wide, size).transpose(-1, -2) for x in (key, value)
    )
    parts = [query, key, value]
    return _kernel(replace(call, query=query), parts, mask, False).flatten(-3, -2)


def _runs(keys: list[Span]) -> list[Span]:
    """The spans with neighbours joined."""
    runs = keys[:1]
    for span in keys[1:]:
        last = runs[-1]
        if last.start + last.size == span.start:
            runs[-1] = Span(last.start, last.size + span.size, open=last.open and span.open)
        else:
            runs.append(span)
    return runs


def _gather(x: Array, runs: list[Span]) -> Array:
    import torch

    parts = [x[..., run.start : run.start + run.size, :] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _additive(call: Call, block: Any) -> Array:
    """The mask of a block as the kernel likes it best: numbers to add, −∞ to rule out."""
    import torch

    live = calls.live(call, block)
    mask: Any = torch.zeros((), dtype=call.query.dtype, device=call.query.device)
    if call.bias is not None:
        mask = call.fw.cut(call.fw.cut(call.bias, block.rows, -2), block.cols, -1)
        mask = mask.to(call.query.dtype) / call.weighting.temperature  # type: ignore[attr-defined]
    return mask if live is None else torch.where(live, mask, -math.inf)


def _kernel(call: Call, parts: Sequence[Array], mask: Array | None, plain: bool) -> Array:
    """SDPA on (batch, heads, rows, width), the form that its fused kernels take."""
    query, key, value, width = _one_width(*parts)
    if key.shape[-3:-2] != value.shape[-3:-2]:
        key, value = (calls.share_heads(call, x) for x in (key, value))
    query, key, value = (_four_axes(x, call.lead) for x in (query, key, value))
    if mask is not None:
        mask = mask.expand(*call.lead, *mask.shape[-2:])
        mask = _four_axes(mask, call.lead)
    out = _sdpa((query, key, value), mask, plain, scale_of(call))
    return out[..., :width].reshape(*call.lead, out.shape[-2], width)


def _four_axes(x: Array, lead: tuple[int, ...]) -> Array:
    """(…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    heads = x.shape[-3] if x.ndim > 2 else 1
    heads = lead[-1] if lead and heads == 1 else heads
    x = x.expand(*lead[:-1], heads, *x.shape[-2:])
    x = x.reshape(math.prod(lead[:-1]), *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


# Which of torch's own kernels is fastest is measured once for each kind of call on a CUDA device.

_FASTEST: dict[tuple[Any, ...], Any] = {}


def _kind(query: Array, key: Array, value: Array, plain: bool) -> tuple[Any, ...]:
    learning = query.requires_grad or key.requires_grad or value.requires_grad
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    return (*shapes, query.dtype, query.device, plain, learning)


def _sdpa(parts: Sequence[Array], mask: Array | None, plain: bool, scale: float) -> Array:
    import torch
    from torch.nn.attention import sdpa_kernel

    query, key, value = parts
    grouped = key.shape[1] != query.shape[1]

    def attend() -> Array:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=plain, scale=scale, enable_gqa=grouped
        )

    if query.device.type != "cuda" or mask is not None or torch.compiler.is_compiling():
        return attend()
    if query.numel() * key.shape[-2] < WORTH:
        return attend()
    kind = _kind(query, key, value, plain)
    if kind not in _FASTEST:
        if torch.cuda.is_current_stream_capturing():
            return attend()
        _FASTEST[kind] = _measured(attend, parts)
    if _FASTEST[kind] is None:
        return attend()
    with sdpa_kernel(_FASTEST[kind]):
        return attend()


def _told(call: Call) -> str:
    """What was measured for calls like this one."""
    if call.query.device.type != "cuda":
        return ""
    query, key, value = (_four_axes(x, call.lead) for x in (call.query, call.key, call.value))
    backend = _FASTEST.get(_kind(query, key, value, call.rule is not None))
    return "" if backend is None else f", by {backend.name.lower()}, measured as the fastest"


def _measured(attend: Callable[[], Array], parts: Sequence[Array]) -> Any:
    """The backend that clearly beats torch's own choice, None where none does."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    learning = any(x.requires_grad for x in parts)

    def once() -> None:
        out = attend()
        if learning:
            wanted = [x for x in parts if x.requires_grad]
            torch.autograd.grad(out, wanted, out.detach())

    def seconds() -> float:
        times: list[float] = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            once()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    best, least = None, seconds() * 0.97
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says why a backend cannot
                took = seconds()
        except RuntimeError:
            continue
        if took < least:
            best, least = backend, took
    return best


# JAX


def _jax_cannot(call: Call) -> str | None:
    if call.rule is not None and not is_causal(call.rule):
        return "jax.nn gives a row with nothing to attend to the average, and we give 0"
    if call.fw.dtype(call.query) == "float64":
        return "jax.nn sums in float32 whatever it is given"
    if len(call.lead) > 2:
        return "jax.nn takes one axis of batches and one of heads"
    return None


def _jax_platform(call: Call) -> str:
    import jax

    if call.fw.tracing(call.query):
        return str(jax.default_backend())
    return str(next(iter(call.query.devices())).platform)


def _cudnn_fits(call: Call) -> bool:
    widths = [call.fw.shape(x)[-1] for x in (call.query, call.value)]
    return call.fw.dtype(call.query) in ("float16", "bfloat16") and max(widths) <= 128


def _jax(call: Call) -> Array:
    import jax
    import jax.numpy as jnp

    def kernel(query: Array, key: Array, value: Array) -> Array:
        key, value = (calls.share_heads(call, x) for x in (key, value))
        lead = (1,) * (2 - len(call.lead)) + call.lead
        # It takes one width, and cuDNN a multiple of eight: zeros make up for it.
        width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        fused = _cudnn_fits(call) and _jax_platform(call) in ("gpu", "cuda")
        parts = []
        for x in (query, key, value):
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
            parts.append(jnp.swapaxes(jnp.broadcast_to(x, (*lead, *x.shape[-2:])), -3, -2))
        out = jax.nn.dot_product_attention(
            *parts,
            scale=scale_of(call),
            is_causal=call.rule is not None,
            implementation="cudnn" if fused else None,
        )
        out = jnp.swapaxes(out, -3, -2)[..., : value.shape[-1]]
        return jnp.reshape(out, (*call.lead, call.n, value.shape[-1]))

    def careful(query: Array, key: Array, value: Array) -> Array:
        fresh = tree.rebuild(call.fw, call, [query, key, value])
        return call.fw.astype(streaming.run(fresh)[0], call.fw.dtype(call.query))

    arrays = (call.query, call.key, call.value)
    if call.rule is None:
        return kernel(*arrays)
    # A NaN behind the mask would be multiplied by 0, and that is NaN.
    finite = jnp.isfinite(jnp.sum(call.key)) & jnp.isfinite(jnp.sum(call.value))
    pick: Callable[..., Array] = call.fw.when
    return pick(finite, kernel, careful, *arrays)
