"""Turn a `Call` into the arrays that the kernels read.

- Axes: arrays on four axes (batch, heads, rows, width).
- Masks: a band, lengths, a layout of blocks, and one array for every other rule.
- Scores: φ, ψ, the bias, the gate and the cap of the lowered score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.triton.distance_arrays import build_distance_form, kernel_form
from qkv.frameworks import is_array, tree
from qkv.masks.band import Band
from qkv.masks.base import AndMask, ArrayMask, Mask
from qkv.masks.packed_sequences import KeySpans
from qkv.masks.sequences import Blocks, Lengths
from qkv.scores import Additive, Cosine, Gated, Gaussian, Modified, RelativeScore, ScaledDot, Score
from qkv.scores.additive import SeparableAdditive
from qkv.scores.base import DotProductForm
from qkv.scores.distance import ExpandedGaussian
from qkv.scores.functions import EvaluatedScore
from qkv.util.types import Array
from qkv.weightings import Average, Entmax, Hard, Normalized, Raw, Sigmoid, Softmax, Sparsemax, TopK
from qkv.weightings.entmax import SinkEntmax
from qkv.weightings.power import broadcast_to_rows
from qkv.weightings.softmax import SinkSoftmax


def batch_and_heads(call: Call) -> tuple[int, int]:
    """Return the leading axes as (batch, heads). A single axis is the batch, as for `lengths`."""
    lead = call.lead
    if len(lead) == 2:
        return lead
    return (lead[0], 1) if len(lead) == 1 else (math.prod(lead[:-1]), lead[-1] if lead else 1)


def count_key_heads(call: Call) -> int:
    """Return the heads of keys and values; the query's number if keys and values differ."""
    both: tuple[Any, ...] = (call.key, call.value)
    one, two = (x.shape[-3] if x.ndim > 2 else 1 for x in both)
    return one if one == two and len(call.lead) > 1 else batch_and_heads(call)[1]


def as_four_axes(call: Call, x: Any, heads: int) -> Any:
    """Return (…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    lead, shape = call.lead, x.shape
    if len(lead) == 2 and len(shape) == 4 and shape[0] == lead[0] and shape[1] == heads:
        pass
    elif len(lead) < 2:
        x = calls.repeat_shared_heads(call, x).expand(*lead, *shape[-2:])
        x = x.reshape(lead[0] if lead else 1, 1, *shape[-2:])
    else:
        if len(shape) > 2 and shape[-3] not in (1, heads):
            x = calls.repeat_shared_heads(call, x)
        x = x.expand(*lead[:-1], heads, *shape[-2:])
        x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def as_aligned_rows(call: Call, x: Any, heads: int) -> Any:
    """Return (…, rows, 1) as float32 (batch, heads, rows, 1); heads start at multiples of 16."""
    if x is None:
        return None
    from qkv.engines.triton.launching.workspace import align_rows

    return align_rows(as_four_axes(call, x.float(), heads))


class MaskBounds(NamedTuple):
    """The parts of a mask: lower ≤ j − i ≤ upper, j < lengths, a layout of blocks, spans of keys,
    other rules.

    Arrays among the other rules are read as one array. The rest is translated to Triton.
    """

    lower: int | None = None
    upper: int | None = None
    lengths: Array | None = None
    layout: Array | None = None
    layout_size: int = 0
    rules: tuple[Mask, ...] = ()
    spans: KeySpans | None = None

    def as_rules(self) -> MaskBounds:
        """Return the parts with the spans of keys among the rules."""
        if self.spans is None:
            return self
        return self._replace(rules=(*self.rules, self.spans), spans=None)


def split_mask(call: Call) -> MaskBounds:
    return MaskBounds() if call.rule is None else _split_rule(call, call.rule)


def _split_rule(call: Call, rule: Mask) -> MaskBounds:
    import torch

    device = call.query.device
    if isinstance(rule, AndMask):
        one, two = _split_rule(call, rule.one), _split_rule(call, rule.two)
        if one.layout is not None and two.layout is not None:
            two = MaskBounds(rules=(rule.two,))
        if one.spans is not None and two.spans is not None:
            two = two.as_rules()
        return _intersect_bounds(one, two)
    if isinstance(rule, Band) and rule.is_relative:
        shift, left, right = rule.offset, rule.left, rule.right
        if shift is None:
            shift = call.m - call.n if rule.align == "bottom_right" else 0
        return MaskBounds(
            None if left is None else shift - left, None if right is None else shift + right
        )
    if isinstance(rule, Lengths) and call.lead and len(rule.valid.shape) == 1:
        valid = torch.as_tensor(rule.valid, device=device)
        each = batch_and_heads(call)[0] // call.lead[0]
        return MaskBounds(lengths=valid if each == 1 else valid.repeat_interleave(each))
    if isinstance(rule, Blocks) and rule.layout.ndim == 2:
        size = rule.size[0]
        if size == rule.size[1]:
            layout: Any = call.fw.cached_constant(rule.layout, call.query, "bool")
            layout = layout[: -(-call.n // size), : -(-call.m // size)].contiguous()
            return MaskBounds(layout=layout, layout_size=size)
    if isinstance(rule, KeySpans) and call.at is None:
        fw = call.fw
        spans = (
            fw.cached_constant(x, call.query, "int32")
            if isinstance(x, np.ndarray)
            else torch.as_tensor(x, device=device).int().contiguous()
            for x in (rule.bounds, rule.query_bounds)
        )
        return MaskBounds(spans=KeySpans(*spans))
    return MaskBounds(rules=(rule,))


def split_score(call: Call) -> tuple[Call, tuple[Callable[..., Any], ...]]:
    """Return the call with the score inside of `Modified`, and the score_mods, the first first.

    What a `RelativeScore` does is a score_mod too.
    """
    inner, score_mods = split_modified(call.score, call.n, call.m)
    return (replace(call, score=inner) if score_mods else call), score_mods


def split_modified(score: Any, n: int, m: int) -> tuple[Any, tuple[Callable[..., Any], ...]]:
    """Return the score inside of `Modified` and `RelativeScore`, and the score_mods in order.

    n and m are the numbers of queries and keys.
    """
    score_mods: tuple[Callable[..., Any], ...] = ()
    while isinstance(score, Modified | RelativeScore):
        own = score.as_score_mod(n, m) if isinstance(score, RelativeScore) else score.score_mod
        score_mods = (own, *score_mods)
        score = score.score
    return score, score_mods


class TranslatedCall(NamedTuple):
    """The functions of a call in Triton and what they capture, and the rules left for an array."""

    functions: Any = None
    captured: Any = None
    array_rules: tuple[Mask, ...] = ()


def translate_functions(
    call: Call, bounds: MaskBounds, score_mods: Sequence[Callable[..., Any]] = ()
) -> TranslatedCall:
    """Translate rules and score_mods; a rule without a translation becomes an array.

    A learned temperature (…, n or 1, 1) divides the scores after the score_mods.
    Raise TranslationError if a score_mod has no translation.
    """
    from qkv.engines.triton.pair_functions.functions import TranslationError, translate_call

    if not score_mods and (call.fw.is_traced(call.query) or not bounds.rules):
        return TranslatedCall(array_rules=bounds.rules)
    temperature: Any = getattr(call.weighting, "temperature", None)
    temperature = temperature if score_mods and is_array(temperature) else None
    fixed: tuple[Mask, ...] = tuple(x for x in bounds.rules if isinstance(x, ArrayMask))
    rules = tuple(x for x in bounds.rules if not isinstance(x, ArrayMask))
    if not (rules or score_mods):
        return TranslatedCall(array_rules=fixed)
    try:
        return TranslatedCall(*translate_call(call, rules, score_mods, temperature), fixed)
    except TranslationError:
        able = tuple(x for x in rules if rule_translation_error(call, x) is None)
        if len(able) == len(rules):  # a score_mod has none
            raise
    fixed += tuple(x for x in rules if x not in able)
    if not (able or score_mods):
        return TranslatedCall(array_rules=fixed)
    return TranslatedCall(*translate_call(call, able, score_mods, temperature), fixed)


def rule_translation_error(call: Call, rule: Mask) -> str | None:
    """Return why a rule is not evaluated in the kernels but read as an array; None: it is."""
    from qkv.engines.triton.pair_functions.functions import TranslationError, translate_call

    if isinstance(rule, ArrayMask):
        return "an array is read as it is"
    if call.fw.is_traced(call.query):
        return "a traced graph cannot contain functions"
    try:
        translate_call(call, (rule,), ())
    except TranslationError as error:
        return str(error)
    return None


def build_mask_array(call: Call, bounds: MaskBounds) -> Array | None:
    """Return the rules as one array (B or 1, H or 1, n or 1, m or 1); None: there are none.

    Floats if a rule adds to the scores, with −∞ for excluded pairs; else bytes, 0 for excluded.
    Scores that exist already are added too.
    """
    import torch

    allowed: Any = None
    bias: Any = call.score.values if isinstance(call.score, EvaluatedScore) else None
    for rule in bounds.rules:
        if isinstance(rule, ArrayMask) and rule.is_bias:
            own = rule.values if rule.values.dtype != torch.float64 else rule.values.float()
            bias = own if bias is None else bias + own
            continue
        some = rule.allowed_pairs(calls.make_block(call))
        if some is not None:
            some = torch.as_tensor(some, device=call.query.device)
            allowed = some if allowed is None else allowed & some
    if bias is None:
        return None if allowed is None else _as_shared_axes(call, allowed).view(torch.uint8)
    return _as_shared_axes(call, bias if allowed is None else bias.where(allowed, -math.inf))


def scale_mask_array(call: Call, pairs: Any, temperature: Any) -> Any:
    """Return pairs / temperature in float32; −∞ stays, without a gradient to the temperature."""
    pairs, temperature = pairs.float(), _as_shared_axes(call, temperature.float())
    counts = pairs != -math.inf
    return (pairs.where(counts, 0.0) / temperature).where(counts, -math.inf)


def drop_row_constants(query: Any, pairs: Any) -> tuple[Any, Any]:
    """Return the query, and a mask array with one number per row set to 0, or −∞ as before.

    Such a number does not change the weights, so its gradient is exactly 0. That gradient goes
    through the query. The kernels would sum terms that cancel, which leaves rounding errors.
    """
    out = pairs == -math.inf
    linked = 0 * pairs.masked_fill(out, 0.0)
    return query + linked.to(query.dtype), (pairs - pairs).masked_fill(out, -math.inf).detach()


def add_row_offsets(call: Call, pairs: Any, offset: Any) -> Any:
    """Return the mask array with the offset of each query (…, n, 1) added to its row.

    Offsets that are not finite become 0, because −∞ would exclude the row. The products of such a
    row are not finite either.
    """
    if offset is None:
        return pairs
    offset = _as_shared_axes(call, offset.nan_to_num(0.0))
    if pairs is None or pairs.is_floating_point():
        return offset if pairs is None else pairs + offset
    return offset.where(pairs.bool(), -math.inf)


def _as_shared_axes(call: Call, x: Any) -> Any:
    """Return (…, n or 1, m or 1) on four axes; shared axes keep length 1."""
    x = x[(None,) * (len(call.lead) + 2 - x.ndim)]
    if len(call.lead) < 2:
        return x[:, None] if call.lead else x[None, None]
    if math.prod(x.shape[:-3]) > 1 and len(call.lead) > 2:
        x = x.expand(*call.lead[:-1], *x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])


def _intersect_bounds(one: MaskBounds, two: MaskBounds) -> MaskBounds:
    lower = [x.lower for x in (one, two) if x.lower is not None]
    upper = [x.upper for x in (one, two) if x.upper is not None]
    lengths = [x.lengths for x in (one, two) if x.lengths is not None]
    return MaskBounds(
        max(lower, default=None),
        min(upper, default=None),
        lengths[0].minimum(lengths[-1]) if lengths else None,
        one.layout if two.layout is None else two.layout,
        one.layout_size or two.layout_size,
        one.rules + two.rules,
        two.spans if one.spans is None else one.spans,
    )


KERNEL_WEIGHTINGS = {
    Softmax: "softmax",
    SinkSoftmax: "softmax",
    Average: "average",
    Normalized: "normalized",
    Raw: "raw",
    Sigmoid: "sigmoid",
    Entmax: "entmax",
    Sparsemax: "entmax",
    SinkEntmax: "entmax",
    TopK: "topk",
    Hard: "topk",
}
SHIFT_INVARIANT_WEIGHTINGS = ("softmax", "average", "entmax", "topk")
"""Weightings that do not change if a constant is added to a row of scores."""


def kernel_lowering(call: Call) -> tuple[Any, float] | str:
    """Return a score with a dot-product form and its error, or a sentence why there is none.

    In 16 bits only the range of an additive score is read, so other calls do not wait for the
    device.
    """
    dtype = call.fw.dtype_name(call.query)
    if compiled_cap(call):
        return call.score, 0.0
    if dtype == "float32" or isinstance(call.score, Additive):
        found = call.lowering
    else:
        found = call.score.find_lowering(call.query, call.key, call.tolerance, dtype)
    if isinstance(found, str):
        return found
    inner = getattr(found[0], "score", found[0])
    if type(inner) is Additive:
        return "the kernels do not support a gate on an additive score"
    return found


def compiled_cap(call: Call) -> float:
    """Return the softcap that kernels are compiled for; 0: none.

    −1: the cap or the temperature is learned, and each row has its own (`capped_form`).
    """
    cap = _score_softcap(call)
    if is_array(cap) or (cap and is_array(getattr(call.weighting, "temperature", 1.0))):
        return -1.0
    return cap or 0.0


def _score_softcap(call: Call) -> Any:
    inner = call.score.score if type(call.score) is Gated else call.score
    return inner.softcap if type(inner) is ScaledDot else None


def capped_form(call: Call, form: DotProductForm) -> tuple[DotProductForm, Any]:
    """Return the form of c · tanh(φ·ψ / c) / T as cap · tanh(φ·ψ), and the caps (…, n, 1).

    Both are float32; the gradients of c and T flow through them.
    """
    given: Any = _score_softcap(call), getattr(call.weighting, "temperature", 1.0)
    cap, temperature = (x.float() if is_array(x) else x for x in given)
    if is_array(cap):
        form = form._replace(query=form.query.float() / cap)
    else:
        form = form._replace(scale=form.scale / cap)
    own = cap / temperature
    own = own.reshape(1, 1) if own.ndim < 2 else own
    return form, own.expand(*own.shape[:-2], call.n, 1)


def divide_by_temperature(x: Any, temperature: Any) -> Any:
    """Return x / temperature in x's dtype, computed in float32."""
    if not is_array(temperature):
        return x if temperature == 1 else x * (1 / temperature)
    return (x.float() / temperature.float()).to(x.dtype)


def is_shift_sensitive(call: Call) -> bool:
    """Return whether adding a constant to a row of scores changes the weights."""
    if isinstance(call.weighting, SinkEntmax):
        return True
    return KERNEL_WEIGHTINGS[type(call.weighting)] not in SHIFT_INVARIANT_WEIGHTINGS


def needs_merged_squares(call: Call) -> bool:
    """Return whether the squares of a Gaussian must be columns of φ and ψ.

    They must if a gate multiplies the score or each query has its own temperature.
    """
    shape = getattr(getattr(call.weighting, "temperature", None), "shape", ())
    gated = isinstance(getattr(call.score, "score", None), Gaussian)
    return gated or (isinstance(call.score, Gaussian) and shape[-2:-1] not in ((), (1,)))


def call_with_form(call: Call, is_modified: bool = False) -> tuple[Call, DotProductForm]:
    """Return the call and its score's form, in float32 if squares are columns of φ and ψ.

    If the score `is_modified` by a score_mod, the form has no offset, which would come too late.
    """
    if not needs_merged_squares(call):
        found = kernel_lowering(call)
        assert not isinstance(found, str)
        form = build_dot_product_form(call, found[0], is_modified)
        if not is_modified or form.offset is None:
            return call, form
    wide = call.upcast()
    found = call.lowering
    if wide is not call:  # 16 bits: without reading values
        dtype = call.fw.dtype_name(call.query)
        found = wide.score.find_lowering(wide.query, wide.key, call.tolerance, dtype)
    assert not isinstance(found, str)
    form = found[0].dot_product_form(wide.query, wide.key)
    query, key = form.augmented_vectors()
    return wide, DotProductForm(query, key, gate_query=form.gate_query, gate_key=form.gate_key)


def build_dot_product_form(call: Call, score: Score, keeps_offset: bool = False) -> DotProductForm:
    """Return `score.dot_product_form`; kernels compute norms of 16-bit rows in one pass.

    Unless it `keeps_offset`, a constant that changes no weight may be left out of a row's scores.
    """
    if isinstance(score, SeparableAdditive):
        rows = (call.query, call.key)
        wide = score.dot_product_form(*[x.float() if is_16bit(call) else x for x in rows])
        return DotProductForm(*[_pad_width(x).to(call.query.dtype) for x in wide[:2]])
    if is_16bit(call):
        from qkv.engines.triton import norms

        if isinstance(score, Cosine) and not is_array(score.temperature):
            scale = 1 / score.temperature
            return DotProductForm(
                norms.normalize_rows(call.query), norms.normalize_rows(call.key), scale=scale
            )
        if isinstance(score, ExpandedGaussian) and not is_array(score.bandwidth):
            return expanded_form(call, score.bandwidth, keeps_offset=keeps_offset)
        if any(x.dtype != call.query.dtype for x in tree.array_leaves(call.fw, score)):
            form = score.dot_product_form(call.query.float(), call.key.float())  # rounded once
            dtype = call.query.dtype
            return form._replace(query=form.query.to(dtype), key=form.key.to(dtype))
    return score.dot_product_form(call.query, call.key)


ZERO_WIDTH = 16
"""The width of vectors whose products are 0."""


def build_zero_form(call: Call) -> DotProductForm:
    """Return the form of scores that exist already: 0, to which the kernels add them as a mask."""
    query, key = (
        cast(Any, x).new_zeros((*x.shape[:-1], ZERO_WIDTH)) for x in (call.query, call.key)
    )
    return DotProductForm(query, key)


def in_one_dtype(call: Call) -> Call:
    """Return the call with its score's arrays in the dtype of its 16-bit queries."""
    leaves = tree.array_leaves(call.fw, call.score)
    if not is_16bit(call) or all(x.dtype == call.query.dtype for x in leaves):
        return call
    score = tree.map_arrays(call.fw, lambda x: x.to(call.query.dtype), call.score)
    return replace(call, score=score)


def _pad_width(x: Any) -> Any:
    """Pad rows with zeros to one of eight widths per octave.

    The width of an additive score depends on its values, and kernels are compiled for each width.
    """
    import torch

    width = x.shape[-1]
    step = max(2 ** (width.bit_length() - 4), 64 if width > 64 else 16)
    return torch.nn.functional.pad(x, (0, -width % step))


def expanded_form(
    call: Call, bandwidth: float, share: float = 1.0, keeps_offset: bool = False,
    has_bias: bool = True,
) -> DotProductForm:  # fmt: skip
    """Return the form of `ExpandedGaussian` without a centre; the bias is multiplied by `share`.

    The squares are precise enough in float32.
    """
    from qkv.engines.triton import norms

    scale = 1 / bandwidth**2
    shown = keeps_offset or call.wants_lse or is_shift_sensitive(call)
    offset = norms.squared_norms(call.query, -scale / 2) if shown else None
    bias = norms.squared_norms(call.key, -scale * share / 2) if has_bias else None
    return DotProductForm(call.query, call.key, bias, offset, scale=scale)


def _adds_squares(call: Call) -> bool:
    """Return whether the kernel computes the squares of a Gaussian's keys while it reads them.

    That saves a pass over the keys, which counts where there are few queries. It has no gradient.
    """
    from qkv.engines.triton.launching.tile_choice import MAX_FORWARD_TILE_WIDTH, MAX_PACKED_ROWS

    fw, (_, heads) = call.fw, batch_and_heads(call)
    if type(call.weighting) is not Softmax or is_array(call.weighting.temperature):
        return False
    if fw.is_traced(call.query) or fw.needs_gradient(tree.array_leaves(fw, call)):
        return False
    width = fw.static_shape(call.key)[-1]
    rows = call.n * (heads // max(count_key_heads(call), 1))
    return rows <= MAX_PACKED_ROWS and width <= MAX_FORWARD_TILE_WIDTH


def is_16bit(call: Call) -> bool:
    return call.fw.dtype_name(call.query) in ("float16", "bfloat16")


def is_16bit_gaussian(call: Call) -> bool:
    """Return whether the call is a Gaussian of 16-bit rows: its form does not depend on values."""
    call, score_mods = split_score(call)
    if not is_16bit(call) or score_mods:
        return False
    return isinstance(kernel_lowering(call)[0], ExpandedGaussian)


def build_kernel_arrays(
    call: Call, expanded: bool, mask_as_array: bool = False
) -> tuple[Any, Any, Array | None]:
    """Return the `Arrays` and `Numbers` for `attend_operator.attend`, and the row offsets.

    The kernels leave the offset (B, H, n, 1) out of each row's scores: add it to the log-sum-exp.
    With `mask_as_array`, the kernels read the whole mask as an array and evaluate no rule.
    """
    from qkv.engines.triton.launching.kernel_call import Numbers
    from qkv.engines.triton.tile_functions.records import Arrays

    bounds, (call, score_mods) = split_mask(call), split_score(call)
    if mask_as_array:
        bounds = bounds.as_rules()
    translated = TranslatedCall(array_rules=bounds.rules)
    if not mask_as_array:
        translated = translate_functions(call, bounds, score_mods)
    bounds = bounds._replace(rules=translated.array_rules)
    learned = getattr(call.weighting, "temperature", None)
    if score_mods and is_array(learned):  # the translated functions divide by it
        call = replace(call, weighting=Softmax())
    score = cast(Any, call.score)
    distance = kernel_form(score)
    expanded = expanded and not score_mods
    expanded = expanded and not is_array(score.bandwidth) and not needs_merged_squares(call)
    square_scale, caps = 1.0, cast(Any, None)
    if distance:
        call, query, key, scale, square_scale, caps = build_distance_form(call)
        form = DotProductForm(query, key, scale=scale)
    elif isinstance(score, EvaluatedScore):
        form = build_zero_form(call)
    elif not expanded:
        call, form = call_with_form(call, bool(score_mods))
    weighting: Any = call.weighting
    temperature: Any = getattr(weighting, "temperature", 1.0)
    share, cap = 1.0 if is_array(temperature) else 1 / temperature, compiled_cap(call)
    before = 1.0 if score_mods else share  # a score_mod gets the scores without temperature
    adds_squares = expanded and _adds_squares(call)
    if expanded:
        form = expanded_form(call, score.bandwidth, share, has_bias=not adds_squares)
        square_scale = -form.scale * share / 2 if adds_squares else square_scale
    scale = form.scale if distance else form.scale * before
    if distance:
        cap = 0.0 if caps is None else -1.0
    elif cap < 0:
        form, caps = capped_form(call, form)
        scale = form.scale
    elif is_array(temperature):  # in float32, for the gradient of the temperature
        form = form._replace(query=divide_by_temperature(form.query.float(), temperature))
    if isinstance(weighting, Hard):  # piecewise constant: no gradient of the scores
        form = DotProductForm(*(x.detach() if is_array(x) else x for x in cast(Any, form)))
        caps = caps if caps is None else caps.detach()
    (_, heads), few, bias = batch_and_heads(call), count_key_heads(call), form.bias
    if form.key.shape[-3:-2] not in ((), (1,), (few,)):  # ψ differs between query heads
        few = heads
    if bias is not None:
        if is_array(temperature) and math.prod(temperature.shape) > 1:  # heads no longer share keys
            few, bias = heads, calls.repeat_shared_heads(call, bias)
        bias = (
            bias
            if score_mods or (expanded and not is_array(temperature))
            else divide_by_temperature(bias, temperature)
        )
    query, key = as_four_axes(call, form.query, heads), as_four_axes(call, form.key, few)
    parts = (
        as_aligned_rows(call, bias, few),
        as_aligned_rows(call, form.gate_query, heads),
        as_aligned_rows(call, form.gate_key, few),
    )
    lower, upper, lengths, layout, size, _, spans = bounds
    functions, captured, _ = translated
    pairs: Any = build_mask_array(call, bounds)
    added = pairs is not None and pairs.is_floating_point()
    if added and is_array(learned):
        pairs = scale_mask_array(call, pairs, learned)
    sink = weighting.sink if isinstance(weighting, SinkEntmax) else None
    if is_shift_sensitive(call):
        pairs = add_row_offsets(call, pairs, form.offset)
        if is_array(sink):
            rows, sink = broadcast_to_rows(sink, call.query).float(), 0.0
            if caps is None and cap >= 0:
                caps = rows.expand(*rows.shape[:-2], call.n, 1)
            else:  # a sink of 0, with its score subtracted from all others
                pairs = add_row_offsets(call, pairs, -rows)
    elif added and pairs.shape[-1] == 1 and not call.wants_lse:
        query, pairs = drop_row_constants(query, pairs)
    terms: tuple[Any, ...] = (None, None)
    if distance not in (None, "constant"):
        from qkv.engines.triton.row_terms import collect_row_terms

        squared = distance not in ("laplace", "exact")
        terms = tuple(collect_row_terms(x.detach(), squared) for x in (query, key))
    value, seed = as_four_axes(call, call.value, few), call.seed if call.dropout else None
    chosen = weighting.alpha if isinstance(weighting, Entmax) else getattr(weighting, "k", 1)
    numbers = Numbers(
        scale, KERNEL_WEIGHTINGS[type(weighting)], float(chosen), lower, upper, size,
        is_array(temperature) or cap < 0,
        share, call.dropout, heads if len(call.lead) > 1 else math.prod(call.lead),
        cap * before if cap > 0 else cap,
        functions,
        None if captured is None else captured.numbers,
        distance or "product",
        square_scale,
        adds_squares,
        sink,
    )  # fmt: skip
    arrays = Arrays(query, key, value, *parts, None, None, lengths, layout, pairs, seed)
    if captured is not None:
        floats = captured.floats
        if floats is not None and isinstance(weighting, Hard):
            floats = floats.detach()
        arrays = arrays._replace(captured_floats=floats, captured_integers=captured.integers)
    offset = form.offset if call.wants_lse else None
    offset = as_aligned_rows(
        call, None if offset is None else divide_by_temperature(offset, temperature), heads
    )
    arrays = arrays._replace(query_terms=terms[0], key_terms=terms[1])
    if spans is not None:
        arrays = arrays._replace(key_spans=spans.bounds, query_spans=spans.query_bounds)
    return arrays._replace(caps=as_aligned_rows(call, caps, heads)), numbers, offset
