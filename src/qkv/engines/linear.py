"""The linear engine: φ(q)·Σⱼ ψ(kⱼ) vⱼᵀ, for weights that are dot products themselves.

With `Raw` weights α(q, k) = φ(q)·ψ(k), the sum over the keys is a matrix (w, d_v) that all queries
share. So n queries and m keys cost n + m products with it, instead of n · m scores. Bias and offset
of a score are two further columns of φ and ψ. `Normalized` weights are divided by φ(q)·Σ ψ(k), the
sum of one more column of values, 1. With a causal mask the sums are cumulative, by chunks.
Gradients follow from the framework's operations.

An eager call on a CPU checks that the sums are finite, and computes the scores if they are not. A
traced graph and a GPU skip this check: there, NaN or infinity in a row of key and value reaches all
queries that may attend to the row, also those with a weight of 0, and no other query.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qkv.engines import call as calls
from qkv.engines import streaming, triton
from qkv.engines.call import Call
from qkv.engines.causal_sums import chunk_size, sum_any_causally, sum_causally
from qkv.engines.triton_import import has_triton
from qkv.errors import format_count
from qkv.frameworks.base import Framework
from qkv.frameworks.stored_rows import RowReader, RowSpan, UnreadArray, to_framework_array
from qkv.frameworks.tree import array_leaves, replace_arrays
from qkv.masks import is_plain_causal
from qkv.scores import Cosine, Decay, Dot, FeatureMap, Gated, Multiplicative, ScaledDot, Score
from qkv.scores.distance import ExpandedGaussian
from qkv.util.types import Array, Span
from qkv.weightings.normalized import Normalized, Raw, divisor_or_infinity

NAME = "linear"
UPCASTS = True

MAX_DENSE_SCORES = 2**16
"""Scores up to which the whole matrix takes no longer than the sums."""

FUSED_KERNEL_SPEEDUP = 16
"""How many products of a fused kernel on a GPU take the time of one product of the sums."""

CHUNK_KERNEL_SPEEDUP = 4
"""The same, if a kernel computes the sums."""

MAX_FORM_NUMBERS = 2**26
"""Most numbers of φ and ψ together, which are in memory at once."""

MAX_CHUNK_KERNEL_WIDTH = 128
"""The widest φ and values of the kernel for causal sums."""

STORED_SCORES = (Dot, ScaledDot, Cosine, Multiplicative)
"""Scores whose ψ does not depend on arrays that may need a gradient, nor on other keys."""


def shape_based_reason(call: Call) -> str | None:
    """Return why this engine is not used, judged by shapes and types without array values."""
    if type(call.weighting) not in (Raw, Normalized):
        name = type(call.weighting).__name__
        return f"the weights of {name} are not the scores, so the sum cannot be rearranged"
    if getattr(call.weighting, "on_empty", "zero") != "zero":
        return "a query without weights needs its scores: only on_empty='zero' does not"
    if call.wants_weights:
        return "it never computes the weights that the call returns"
    if call.wants_lse:
        return f"{type(call.weighting).__name__} has no log-sum-exp"
    if call.dropout:
        return "dropout changes each weight separately"
    if call.bias is not None:
        return "a float mask changes each score separately"
    is_causal = _is_causal(call)
    if isinstance(call.score, Decay) and (call.score.align != "top_left" or not is_causal):
        return "the weights decay with the distance, which only sums with masks.causal can do"
    if call.rule is not None and not (call.rule.is_shared_by_queries or is_causal):
        return "the mask differs between queries, and is not masks.causal"
    is_decaying = isinstance(call.score, Decay)
    call = _without_decay(call)
    if isinstance(call.score, Gated):
        return "the gate multiplies each score, so the score is not a dot product"
    if call.has_unknown_length:
        return streaming.UNKNOWN_LENGTH_REASON
    needs_fixed_chunks = is_decaying or (is_causal and not call.fw.allows_length_guards())
    if needs_fixed_chunks and not _has_fixed_lengths(call):
        return "a length is not fixed in the traced graph, so there are no fixed chunks"
    return None


def unsupported_reason(call: Call) -> str | None:
    if reason := shape_based_reason(call):
        return reason
    lowering = _without_decay(call).lowering
    return lowering if isinstance(lowering, str) else None


def slower_reason(call: Call) -> str | None:
    if not _has_fixed_lengths(call):
        return None  # a comparison would fix the lengths of the graph
    if call.n * call.m <= MAX_DENSE_SCORES:
        return f"{format_count(call.n * call.m)} scores are too few: the sums would take longer"
    width, numbers = _feature_width(call), math.prod(call.lead) * (call.n + call.m)
    value_width = call.fw.static_shape(call.value)[-1]
    pairs = call.n * call.m * (call.fw.static_shape(call.key)[-1] + value_width)
    products = 2 * (call.n + call.m) * width * value_width
    if _is_causal(call):
        pairs //= 2
        products += call.n * chunk_size(width, value_width) * (width + value_width)
    if pairs < products:
        return (
            f"sums of {format_count(width)} × {format_count(value_width)} numbers take longer than "
            f"the scores of {format_count(call.n)} queries and {format_count(call.m)} keys"
        )
    if call.fw.device_block_numbers(call.query) is not None:
        return _slower_on_device_reason(call, pairs, products)
    if numbers * width > MAX_FORM_NUMBERS:
        return f"its vectors would need {format_count(numbers * width)} numbers in memory"
    return None


def _slower_on_device_reason(call: Call, pairs: int, products: int) -> str | None:
    """Return why fused kernels take less time than the sums in float32, if they do."""
    has_kernel = triton.unsupported_reason(call) is None
    speedup = CHUNK_KERNEL_SPEEDUP if _has_chunk_kernel(call) else FUSED_KERNEL_SPEEDUP
    if has_kernel and pairs < speedup * products:
        return (
            f"a fused kernel computes the scores of {format_count(call.n)} queries and "
            f"{format_count(call.m)} keys in less time than the sums"
        )
    return None


def is_data_dependent(call: Call) -> bool:
    """Return whether array values decide if the score can be lowered."""
    return _without_decay(call).score.needs_range


def describe(call: Call) -> str:
    shape = _feature_width(call), call.fw.static_shape(call.value)[-1]
    text = f"φ(q)·Σ ψ(k) vᵀ, rearranged: one sum of {shape[0]:,} × {shape[1]:,} numbers"
    if _has_chunk_kernel(call):
        return f"{text} for each segment of queries, in kernels"
    if _is_causal(call):
        return f"{text} for each {chunk_size(*shape)} queries"
    return f"{text}, no scores"


def _feature_width(call: Call) -> int:
    """Return the width of φ and ψ, with bias and offset."""
    call = _without_decay(call)
    score = call.score if isinstance(call.lowering, str) else call.lowering[0]
    if isinstance(score, FeatureMap):
        width: int = score.feature_width(call.query)
        return width
    columns = 2 if isinstance(score, ExpandedGaussian) else 0
    return score.dot_product_width(call.fw.static_shape(call.query)[-1]) + columns


def run(call: Call) -> tuple[Array, None, None]:
    """Return the output; in blocks of scores if the sums are not finite.

    Then a value is infinite, or NaN where its weight may be 0, or the sums overflow.
    """
    original, lowering = call, _without_decay(call).lowering
    assert not isinstance(lowering, str)
    score: Score = lowering[0]
    score = replace(call.score, score=score) if isinstance(call.score, Decay) else score
    if _has_chunk_kernel(original):
        return _run_chunk_kernel(replace(call, score=score)), None, None
    call = replace(call, score=score).upcast()
    out, sums = _compute_output(call)
    if sums is None:
        return out, None, None
    finite = _are_finite(call.fw, sums)
    if finite is not None:
        return out if finite else streaming.run(original)[0], None, None

    def run_linear(*arrays: Array) -> Array:
        return _compute_output(replace_arrays(call.fw, call, arrays))[0]

    def run_in_blocks(*arrays: Array) -> Array:
        return streaming.run(replace_arrays(call.fw, call, arrays))[0]

    condition = call.fw.xp.all(call.fw.xp.isfinite(sums))
    return (
        call.fw.cond(condition, run_linear, run_in_blocks, *array_leaves(call.fw, call)),
        None,
        None,
    )


def _checks_sums(call: Call) -> bool:
    """Return whether `run` computes the scores if a sum is not finite."""
    fw = call.fw
    return not fw.is_in_fixed_graph(call.query) and fw.device_block_numbers(call.query) is None


def _has_fixed_lengths(call: Call) -> bool:
    """Return whether the lengths are numbers, not symbols of a traced graph."""
    return isinstance(call.n, int) and isinstance(call.m, int)


def _is_causal(call: Call) -> bool:
    return call.at is None and is_plain_causal(call.rule)


def _without_decay(call: Call) -> Call:
    """Return the call with the score inside of `Decay`."""
    return replace(call, score=call.score.score) if isinstance(call.score, Decay) else call


def _has_chunk_kernel(call: Call) -> bool:
    """Return whether kernels compute the sums: causal, in 16 bits, on CUDA."""
    fw = call.fw
    if fw.name != "torch" or not _is_causal(call):
        return False
    if fw.dtype_name(call.query) not in ("bfloat16", "float16"):
        return False
    if call.query.device.type != "cuda" and not triton.is_interpreted():
        return False
    if not has_triton() or fw.is_traced(call.query) or fw.in_functional_transform():  # type: ignore[attr-defined]
        return False
    assert call.value is not None
    widths = _feature_width(call), fw.static_shape(call.value)[-1]
    return min(widths) > 0 and max(widths) <= MAX_CHUNK_KERNEL_WIDTH


def _run_chunk_kernel(call: Call) -> Array:
    """Return the output by `triton.causal_sums`, which sums products of 16 bits in float32."""
    from qkv.engines.triton.causal_sums import sum_rows

    fw, score, dtype = call.fw, _without_decay(call).score, call.fw.dtype_name(call.query)
    query, key, value = call.query, call.key, call.value
    phi = None
    if type(score) is FeatureMap and isinstance(score.phi, str) and call.n <= call.m:
        phi = score.phi  # missing keys would be rows of 0, whose features are not 0
    if type(score) is not Dot and phi is None:  # φ is computed in float32, and rounded once
        wide = replace(call, value=None).upcast()
        query, key = score.dot_product_form(wide.query, wide.key).augmented_vectors()
    key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
    query, key, value = (fw.astype(x, dtype) for x in (query, key, value))
    rates = call.score.rate if isinstance(call.score, Decay) else None
    is_normalized = type(call.weighting) is Normalized
    return sum_rows(query, key, value, call.lead, rates, is_normalized, phi)


def _compute_output(call: Call) -> tuple[Array, Array | None]:
    """Return the output (…, n, d_v), and Σⱼ ψ(kⱼ) vⱼᵀ (…, w, d_v) over all keys that count.

    The sums are None if the output needs no check that they are finite.
    """
    fw, key, value = call.fw, call.key, call.value
    assert value is not None
    is_causal, is_normalized = _is_causal(call), type(call.weighting) is Normalized
    heads = {fw.static_shape(x)[-3] for x in (key, value) if len(x.shape) > 2} - {1}
    if call.rule is not None or len(heads) > 1:
        key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
    if is_normalized:  # the sum of this column is that of the weights
        value = fw.xp.concat([value, fw.full((*value.shape[:-1], 1), 1.0, value)], axis=-1)
    if call.rule is not None and not is_causal:
        # One query stands for all. Masked rows may be NaN.
        live = call.rule.allowed_pairs(calls.make_block(call, Span(0, 1)))
        live = None if live is None else fw.xp.matrix_transpose(live)
        key, value = (fw.fill_unless(x, live) for x in (key, value))
    score = _without_decay(call).score
    query, key = score.dot_product_form(call.query, key).augmented_vectors()
    if is_causal:
        size = chunk_size(query.shape[-1], value.shape[-1])
        rate = call.score.rates(query) if isinstance(call.score, Decay) else None
        if _checks_sums(call):
            out, sums = sum_causally(query, key, value, size, rate)
        else:
            out, sums = sum_any_causally(query, key, value, size, rate), None
    else:
        sums = fw.matmul(fw.xp.matrix_transpose(key), value)
        sums = calls.repeat_shared_heads(call, sums)
        out = fw.matmul(query, sums)
    if is_normalized:
        out = out[..., :-1] / divisor_or_infinity(out[..., -1:])
    return out, sums if _checks_sums(call) else None


def _are_finite(fw: Framework, sums: Array) -> bool | None:
    """Return whether all sums are finite; None if that is known only when a graph runs."""
    if fw.is_surely_finite(sums):
        return True
    if type(fw).is_surely_finite is not Framework.is_surely_finite:
        return False  # or not known, under a functional transform
    finite = fw.concrete_value(fw.xp.all(fw.xp.isfinite(sums)))
    return None if finite is None else bool(finite)


# Stored rows


def run_stored(call: Call) -> Array | None:
    """Return the output over stored rows, which are read once; None: the scores are needed.

    The sums do not depend on arrays that need a gradient, so the query and the score receive theirs
    from one product.
    """
    assert isinstance(call.key, UnreadArray) and call.value is not None
    (m, width), value_width = call.key.shape, call.value.shape[-1]
    is_linear = type(call.score) in STORED_SCORES and not getattr(call.score, "softcap", None)
    if type(call.weighting) is not Raw or not is_linear or not m:
        return None
    call = call.upcast()
    if call.n * m <= MAX_DENSE_SCORES or call.n * (width + value_width) < 2 * width * value_width:
        return None
    fw = call.fw
    template = fw.full((1, fw.static_shape(call.query)[-1]), 0.0, call.query)

    def sum_span(span: RowSpan) -> Array:
        live = span.allowed_mask(fw, call.query)
        stored = (span.read_keys(), span.read_values())
        key, value = (to_framework_array(fw, x, call.query) for x in stored)
        if live is not None:
            key, value = (fw.fill_unless(x, fw.xp.matrix_transpose(live)) for x in (key, value))
        form = call.score.dot_product_form(template, key)
        return fw.detach(fw.matmul(fw.xp.matrix_transpose(form.key), value))

    size = max(streaming.MAX_KEY_NUMBERS_PER_READ // max(width, value_width, 1), 512)
    sums = RowReader(fw).reduce_spans(
        sum_span,
        lambda one, two: one + two,
        fw.full((width, value_width), 0.0, call.query),
        call.key.rows.iter_spans(size),
    )
    if not _are_finite(fw, sums):
        return None
    form = call.score.dot_product_form(call.query, fw.full((1, width), 0.0, call.query))
    return fw.matmul(form.query if form.scale == 1 else form.query * form.scale, sums)
