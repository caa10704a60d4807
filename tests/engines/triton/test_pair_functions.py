"""score_mod and mask_mod inside the kernels, against `dense` in float64, with all gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import triton as engine
from qkv.engines.call import Call
from qkv.util.types import ShardPosition

if not (engine.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("no interpreter, no CUDA", allow_module_level=True)

from qkv.engines.triton.backward import captured_gradients
from qkv.engines.triton.launching import tile_choice
from qkv.engines.triton.pair_functions import tile_lists
from qkv.scores import Modified, ScaledDot

pytestmark = pytest.mark.sample_of_module(5)

N, M = 37, 26
IDS = torch.tensor([0] * 11 + [1] * 15 + [2] * 11)
KEY_IDS = torch.tensor([0] * 9 + [1] * 6 + [2] * 11)
SAME = masks.documents(IDS, KEY_IDS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in short calls, and lists of them."""
    monkeypatch.setattr(tile_lists, "MIN_LISTED_LENGTH", 16)
    for name in ("pool", "split", "to_keys", "to_queries", "to_pairs"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, tile_choice.Tile(16, 16, 16, 4, 1))


def alibi(s, b, h, q, k, *, slopes, **_):
    return s - slopes[h] * (q - k).abs()


def relative_bias(s, b, h, q, k, *, table, **_):
    return s + table[h, q - k + M - 1]


def bucketed_bias(s, b, h, q, k, *, table, **_):
    return s * 1.5 + table[h, torch.clamp(torch.abs(q - k), max=7)]


def softcap(s, b, h, q, k, **_):
    return torch.tanh(s / 2) * 2 + b * 0.1


def prefix(s, b, h, q, k, **_):
    return torch.where((k < 5) | (q >= k), s, -float("inf"))


def pair_bias(s, b, h, q, k, *, table, **_):
    return s + table[h, q // 2 + k // 4]


def per_query(s, b, h, q, k, *, rows, **_):
    return s * torch.sigmoid(rows[b, q]) + rows[0, k].exp() * 0.1


def several(s, b, h, q, k, *, slopes, scale, **_):
    near = torch.exp(-(q - k).square() / 50.0)
    return torch.minimum(s * scale, slopes[h] * 3) + near.sqrt() - (k % 3) / 4 + (q & 1)


def both_ways(score_mod, options, dtype=torch.float32, n=N, m=M, heads=2, few=1, width=8):
    """Return outputs and gradients of the kernels, and of `dense` in float64."""
    make = torch.Generator().manual_seed(1)
    inputs = {
        "query": torch.randn(2, heads, n, width, generator=make),
        "key": torch.randn(2, few, m, width, generator=make),
        "value": torch.randn(2, few, m, width, generator=make),
        "slopes": torch.rand(heads, generator=make),
        "table": torch.randn(heads, n + m, generator=make),
        "rows": torch.randn(2, max(n, m), generator=make),
        "scale": torch.tensor(0.7),
    }
    if "warm" in options:
        inputs["warm"] = torch.randn(options["warm"], generator=make)
    result = []
    for kind, name in ((dtype, "triton"), (torch.float64, "dense")):
        arrays = {x: y.to(dtype).to(kind).requires_grad_() for x, y in inputs.items()}
        captured = {x: arrays[x] for x in ("slopes", "table", "rows", "scale")}
        own = dict(options)
        if callable(own.get("mask")) and not isinstance(own["mask"], masks.Mask):
            own["mask"] = own["mask"](kind)
        if score_mod is not None:
            own["score"] = Modified(
                own.get("score", ScaledDot()), lambda *at, c=captured: score_mod(*at, **c)
            )
        if "warm" in own:
            own["weighting"] = weightings.Softmax(arrays["warm"].abs() + 0.5)
            del own["warm"]
        out = qkv.attend(*(arrays[x] for x in ("query", "key", "value")), **own, engine=name)
        outs = out if isinstance(out, tuple) else (out,)
        loss = sum((x.double() * x.double().detach().nan_to_num(0, 0, 0).cos()).nan_to_num(
            0, 0, 0).sum() for x in outs)  # fmt: skip
        grads = torch.autograd.grad(loss, [*arrays.values()], allow_unused=True)
        result.append(
            {f"result {i}": x.detach() for i, x in enumerate(outs)}
            | {x: g for x, g in zip(arrays, grads, strict=True) if g is not None}
        )
    return result


def check(actual, tolerance=2e-5):
    ours, want = actual
    ours = {name: torch.zeros_like(x) for name, x in want.items()} | ours  # no gradient: 0
    for name, x in want.items():
        size = float(x[x.isfinite()].abs().max()) + 1
        torch.testing.assert_close(
            ours[name].double(), x, rtol=0, atol=tolerance * size, msg=lambda t, n=name: f"{n} {t}"
        )


CASES = {
    "alibi": (alibi, {"mask": masks.causal}),
    "alibi lse": (alibi, {"mask": SAME & masks.causal, "return_lse": True}),
    "relative bias": (relative_bias, {}),
    "relative bias entmax": (relative_bias, {"weighting": "entmax15", "mask": SAME}),
    "buckets sparsemax": (bucketed_bias, {"weighting": "sparsemax", "mask": masks.window(9)}),
    "softcap topk": (softcap, {"weighting": weightings.TopK(5), "mask": SAME}),
    "prefix": (prefix, {}),
    "pairs sigmoid": (pair_bias, {"weighting": "sigmoid", "mask": masks.causal}),
    "rows raw": (per_query, {"weighting": "raw", "mask": ~masks.strided(3)}),
    "hard": (alibi, {"weighting": "hard"}),
    "normalized": (lambda *at, **_: at[0].abs(), {"weighting": "normalized", "mask": SAME}),
    "average": (alibi, {"weighting": "average", "mask": SAME}),
    "several dropout": (several, {"dropout_p": 0.3, "seed": 3, "mask": masks.causal}),
    "warm gaussian": (
        relative_bias,
        {"score": scores.Gaussian(2.0), "weighting": weightings.Softmax(0.7)},
    ),
    "cap below": (softcap, {"score": ScaledDot(softcap=3.0), "mask": SAME}),
    "two": (alibi, {"score": Modified(ScaledDot(), lambda s, *at: s.relu())}),
    "float mask": (alibi, {"mask": lambda kind: torch.ones(N, M, dtype=kind).tril() * 0.7}),
    "lengths": (per_query, {"mask": masks.lengths([20, 9]) & masks.strided(2)}),
    "wide": (alibi, {"mask": SAME}),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_score_mods_and_their_gradients(name):
    score_mod, options = CASES[name]
    check(both_ways(score_mod, options, width=136 if name == "wide" else 8))


def is_even(b, h, q, k):
    return (q + k + h) % 2 == b % 2


def prefix_mask(b, h, q, k):
    return (k < 7) | (q >= k)


def same_document(b, h, q, k):
    return IDS[q] == KEY_IDS[k]


MASKS = {
    "documents": SAME & masks.causal,
    "captured documents": masks.custom(same_document) & masks.causal,
    "batched": masks.documents(torch.stack([IDS, IDS.flip(0)]), torch.stack([KEY_IDS, KEY_IDS])),
    "even": masks.custom(is_even),
    "prefix": masks.custom(prefix_mask),
    "dilated or global": masks.dilated(3, 2) | masks.global_tokens(2),
    "not causal": ~masks.causal("bottom_right"),
    "lengths or window": masks.lengths([3, 20]) | masks.window(2),
    "row lengths": masks.lengths(torch.arange(2 * N).reshape(2, N) % (M + 1)),
    "offsets": masks.causal(offset=torch.tensor([-3, 4])),
    "blocks of heads": masks.blocks(torch.rand(2, 3, 2, generator=torch.Generator()) > 0.4, 16),
    "layout": masks.blocks([[1, 0], [1, 1], [0, 0]], 16),
    "two layouts": masks.blocks([[1, 1], [1, 1], [0, 1]], 16) & masks.blocks([[0, 1], [1, 1]], 19),
    "booleans": masks.array((IDS[:, None] == KEY_IDS) & (KEY_IDS != 2)) & masks.causal,
    "booleans of heads": masks.array(torch.arange(2 * N * M).reshape(2, N, M) % 7 < 4) & SAME,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_masks_and_lists_of_tiles(name, weighting):
    check(both_ways(None, {"mask": MASKS[name], "weighting": weighting}))


def test_masks_without_lists(monkeypatch):
    monkeypatch.setattr(tile_lists, "MIN_LISTED_LENGTH", 1000)
    check(both_ways(alibi, {"mask": MASKS["even"]}))
    check(both_ways(None, {"mask": MASKS["layout"], "weighting": weightings.TopK(3)}))


def test_few_queries_stack_the_heads_of_a_group():
    check(both_ways(alibi, {"mask": masks.custom(is_even)}, n=3, heads=4, few=1))


def test_gradients_in_parts_of_the_pairs(monkeypatch):
    monkeypatch.setattr(captured_gradients, "MAX_PAIRS_PER_LAUNCH", 16 * M)
    check(both_ways(relative_bias, {"mask": masks.causal}))
    check(both_ways(pair_bias, {}))


@pytest.mark.parametrize(
    "options", [{"mask": masks.causal}, {"return_lse": True}, {"weighting": weightings.TopK(9)}]
)
def test_gradients_of_captured_numbers_in_16_bits(options):
    """Their sums over the keys need the exact centre, which no rounded output gives."""

    def scaled(s, b, h, q, k, *, slopes, **_):
        return s + 3 + slopes[h]  # changes no weight, so the gradient of the weights is 0

    ours, want = both_ways(alibi, options, dtype=torch.bfloat16)
    error = (ours["slopes"].double() - want["slopes"]).norm()
    assert error < 2e-2 * want["slopes"].norm()
    if "return_lse" not in options:
        ours, _ = both_ways(scaled, options, dtype=torch.bfloat16)
        assert ours["slopes"].abs().max() < 2e-3


def test_gradients_repeat_bit_for_bit():
    first, second = (both_ways(relative_bias, {"mask": SAME})[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_leading_axis_is_the_heads_of_a_function():
    slopes = torch.rand(3)
    q, k, v = (torch.randn(3, x, 8) for x in (20, 17, 17))
    mask = masks.custom(lambda b, h, q, k: (q + h) % 3 != 0)
    score = Modified(ScaledDot(), lambda s, b, h, q, k: s - slopes[h] * (q - k) + b)
    got = qkv.attend(q, k, v, score=score, mask=mask, engine="triton")
    want = qkv.attend(q, k, v, score=score, mask=mask, engine="dense")
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def build_test_call(score_mod=None, mask=None, **more) -> Call:
    q = torch.zeros(2, 4, 300, 8)
    score = "scaled_dot" if score_mod is None else Modified(ScaledDot(), score_mod)
    weighting = more.get("weighting", "softmax")
    return build_call(q, q, q, score, weighting, mask, 0.0, None, None)


TALLY = torch.zeros(1)
WRONG = {
    "depends on the value": lambda s, b, h, q, k: s if q > 3 else s * 2,
    "not indexed by positions": lambda s, b, h, q, k: s + torch.ones(4),
    "cumsum": lambda s, b, h, q, k: s.cumsum(-1),
    "does not return one number": lambda s, b, h, q, k: "s",
    "by 1 positions": lambda s, b, h, q, k: s + torch.ones(4, 4)[h].sum(),
    "writes into": lambda s, b, h, q, k: TALLY.add_(s),
    "float64": lambda s, b, h, q, k: s + torch.ones(4, dtype=torch.float64)[h],
    "depends on positions": lambda s, b, h, q, k: s + (q + k)[h, h],
    "more than": lambda s, b, h, q, k: s + sum(torch.ones(4)[h] * i for i in range(40)),
    "on single numbers": lambda s, b, h, q, k: s.reshape(3, 4),
    "raises integers": lambda s, b, h, q, k: s + q**k,
}


@pytest.mark.parametrize("reason", WRONG)
def test_the_reason_names_what_cannot_be_translated(reason):
    result = engine.unsupported_reason(build_test_call(WRONG[reason]))
    assert result is not None and reason in result


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (N, 1)])
def test_a_learned_temperature_divides_what_score_mod_returns(shape):
    mask = (lambda kind: torch.ones(N, M, dtype=kind).tril() * 0.7) if shape == () else SAME
    check(both_ways(alibi, {"warm": shape, "mask": mask}))


def test_positions_of_a_shard_are_left_to_others():
    call = replace(build_test_call(softcap), at=ShardPosition(0, 300, 300, 600))
    assert "spread over processes" in engine.unsupported_reason(call)


def test_rows_that_score_mod_excludes_are_empty():
    def late(s, b, h, q, k, **_):
        return torch.where(q > 4, s, -float("inf"))

    result = both_ways(late, {"return_lse": True})
    check(result)
    assert not result[0]["result 0"][:, :, :5].any()
    assert (result[0]["result 1"][:, :, :5] == -float("inf")).all()


def test_a_mask_without_translation_is_an_array():
    def tall(b, h, q, k):
        return q.expand(-1, k.shape[-1]).cumsum(-1) > 40

    mask = masks.custom(tall) & masks.custom(is_even)
    check(both_ways(None, {"mask": mask}))


def test_equal_functions_share_their_source():
    from qkv.engines.triton.call_arrays import split_mask, translate_functions

    def make(offset):
        table = torch.rand(offset, 600)
        return lambda s, b, h, q, k: s + table[h, q - k + 300]

    result = [
        translate_functions(
            call := build_test_call(make(heads)), split_mask(call), [call.score.score_mod]
        )
        for heads in (4, 5)
    ]
    assert result[0].functions == result[1].functions
    assert result[0].captured.numbers != result[1].captured.numbers


def of_positive(function, x):
    return function(x.abs() + 0.5)


FORMULAS = {
    name: getattr(torch, name)
    for name in ("exp", "exp2", "expm1", "sin", "cos", "erf", "tanh", "sigmoid", "relu", "floor",
                 "ceil", "trunc", "sign", "sgn", "neg", "square", "reciprocal")
} | {
    name: partial(of_positive, getattr(torch, name))
    for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")
} | {
    "power": lambda x: (x.abs() + 0.1) ** 1.7 + x**3 + x**5 - x**-1 + 2.0**x + (x * x) ** 0.5,
    "extremes": lambda x: torch.maximum(x, x.new_full((1, 1), 0.3)) + x.clamp(-0.5, 0.5) * 2
    + x.clamp_min(0.1) - torch.clamp(x, max=0.2) + torch.minimum(x, x),
    "silu": lambda x: torch.nn.functional.silu(x) + torch.nn.functional.logsigmoid(x),
    "filled": lambda x: x.masked_fill(x > 0.2, 2.0) + torch.zeros_like(x) + (1 - x),
    "remainders": lambda x: x % 0.7 + torch.div(x, 0.3, rounding_mode="trunc") + 1 / x,
    "detached": lambda x: x * x.detach() + x.clone(),
    "logic": lambda x: torch.where(~((x > 0) ^ (x < 0.5)) & (x != 7) | (x == 3), x, x * 2),
    "in place": lambda x: x.mul(2).add_(1).mul_(x),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_and_their_derivatives(name):
    from qkv.engines.triton.pair_functions.expressions import Expressions, Value
    from qkv.engines.triton.pair_functions.trace import trace_function
    from tests.engines.triton.python_source import run_source

    made = Expressions()
    score = made.score()
    out = trace_function(FORMULAS[name], made, [score], torch.device("cpu"))
    (slope,) = made.derivatives(out, Value("g", "float"), [score])
    x = torch.linspace(-2.03, 2.11, 40).reshape(5, 8).requires_grad_()
    want = FORMULAS[name](x)
    (expected,) = torch.autograd.grad(want.sum(), x, allow_unused=True)
    got = run_source(made.function_source("f", "g, s", out, "s"), 1.0, x.detach())
    torch.testing.assert_close(got, want.detach(), rtol=2e-5, atol=2e-5)
    got = run_source(made.function_source("f", "g, s", slope, "s"), 1.0, x.detach())
    expected = torch.zeros_like(x) if expected is None else expected
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


class Slopes:
    """An object whose method is a score_mod."""

    def __init__(self):
        self.slopes, self.weight = torch.tensor([0.5, -0.25]), 1.0

    def score_mod(self, s, b, h, i, j):
        return s + self.slopes[h] * self.weight * (j - i)


def test_a_method_reads_the_object_of_the_call():
    """A plan and a translation of an earlier call do not keep its numbers."""
    arrays, layer = [torch.randn(1, 2, x, 8) for x in (5, 9, 9)], Slopes()
    for weight, slopes in ((1.0, None), (2.0, None), (2.0, torch.tensor([1.0, 3.0]))):
        layer.weight = weight
        layer.slopes = layer.slopes if slopes is None else slopes
        for _ in range(2):
            score = scores.Modified(scores.ScaledDot(), layer.score_mod)
            results = [qkv.attend(*arrays, score=score, engine=x) for x in ("triton", "dense")]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
