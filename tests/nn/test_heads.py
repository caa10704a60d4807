"""`SelfAttention` against the seeds' formula, `MultiHeadAttention` against torch's own layer."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import masks, scores, weightings  # noqa: E402
from qkv.errors import ArgumentError, DtypeError, FrameworkError, QkvError, ShapeError  # noqa: E402
from qkv.nn import (  # noqa: E402
    Cache,
    MultiHeadAttention,
    Rotary,
    SelfAttention,
    TransformerBlock,
)

L, S, N, H, E = 3, 4, 2, 2, 8
F64 = {"dtype": torch.float64}

CONSTRUCTORS = [
    dict(zip(("bias", "add_bias_kv", "add_zero_attn", "batch_first"), flags, strict=True)) | widths
    for flags in itertools.product((True, False), repeat=4)
    for widths in ({}, {"kdim": 6, "vdim": 5})
]


def describe_options(options):
    return " ".join(f"{k}={v}" for k, v in options.items() if v) or "plain"


def pair(**options):
    """Torch's layer and ours, made from one seed."""
    made = []
    for kind in (torch.nn.MultiheadAttention, MultiHeadAttention):
        torch.manual_seed(5)
        made.append(kind(E, H, **options))
    return made


def inputs(layer, layout, dtype=torch.float64):
    """query, key, value: "self", "memory" (key is value) or "apart", with or without a batch."""
    kind, batched = layout
    torch.manual_seed(1)

    def draw(length, width):
        shape = (N, length, width) if layer.batch_first else (length, N, width)
        return torch.randn(shape if batched else (length, width), dtype=dtype).requires_grad_()

    if kind == "self":
        x = draw(S, E)
        return x, x, x
    query = draw(L, E)
    if kind == "memory":
        key = draw(S, E)
        return query, key, key
    return query, draw(S, layer.kdim), draw(S, layer.vdim)


def padding(kind, batched, m=S):
    mask = torch.zeros(N, m, dtype=torch.bool)
    mask[0, -2:] = mask[1, 1] = True
    mask = mask if batched else mask[0]
    return {"none": None, "bool": mask, "float": torch.where(mask, -1.5, 0.25).double()}[kind]


def pairs_mask(kind, batched, n, m=S):
    if kind == "none":
        return None
    lead = ((N if batched else 1) * H,) if kind.endswith("3") else ()
    torch.manual_seed(3)
    mask = torch.rand(*lead, n, m) < 0.4
    mask[..., 0] = False  # no row without a key
    if kind.startswith("bool"):
        return mask
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def run(layer, inputs, **options):
    """Output, weights and every gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates masks of two kinds
        out, alpha = layer(*inputs, **options)
    torch.manual_seed(7)
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    if alpha is not None:
        loss = loss + (alpha * torch.randn(alpha.shape, dtype=out.dtype)).sum()
    expected = list({id(x): x for x in (*inputs, *layer.parameters())}.values())
    slopes = torch.autograd.grad(loss, expected, allow_unused=True)
    return [out, *([] if alpha is None else [alpha]), *(x for x in slopes if x is not None)]


def assert_same(got, want, tolerance):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


WEIGHTS = {
    "no weights": {"need_weights": False},
    "mean": {},
    "heads": {"average_attn_weights": False},
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("options", CONSTRUCTORS, ids=describe_options)
def test_every_option_equals_torch(options):
    theirs, ours = pair(**options, **F64)
    layouts = [("apart", True), ("apart", False)]
    if "kdim" not in options:
        layouts += [("self", True), ("self", False), ("memory", True)]
    kinds = itertools.product(
        layouts, ("none", "bool", "float"), ("none", "bool2", "float2", "bool3", "float3")
    )
    # Each constructor meets a third of the product with the weights, three of them all of it.
    all_weight_options = itertools.cycle(WEIGHTS.values())
    next(itertools.islice(all_weight_options, CONSTRUCTORS.index(options) % 3, None))
    for layout, pad, attn in kinds:
        weight_options = next(all_weight_options)
        arguments = inputs(theirs, layout)
        n = S if layout[0] == "self" else L
        settings = weight_options | {
            "key_padding_mask": padding(pad, layout[1]),
            "attn_mask": pairs_mask(attn, layout[1], n),
        }
        assert_same(run(ours, arguments, **settings), run(theirs, arguments, **settings), 1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 6, "vdim": 5}], ids=describe_options
)
@pytest.mark.parametrize("weight_options", WEIGHTS.values(), ids=WEIGHTS)
def test_float32_equals_torch(options, weight_options):
    theirs, ours = pair(**options)
    arguments = inputs(theirs, ("apart", True), torch.float32)
    for pad, attn in itertools.product(("none", "bool"), ("none", "bool2", "bool3")):
        settings = weight_options | {
            "key_padding_mask": padding(pad, True),
            "attn_mask": pairs_mask(attn, True, L),
        }
        assert_same(run(ours, arguments, **settings), run(theirs, arguments, **settings), 1e-6)


@pytest.mark.parametrize("weight_options", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("pad", ["none", "bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_eval_equals_torch_and_its_fast_path(weight_options, pad, batch_first):
    theirs, ours = (x.eval() for x in pair(batch_first=batch_first))
    x = inputs(theirs, ("self", True), torch.float32)[0].detach()
    mask = padding(pad, True)
    options = weight_options | {"key_padding_mask": None if mask is None else mask.to(x.dtype)}
    options["key_padding_mask"] = mask if pad == "bool" else options["key_padding_mask"]
    with torch.inference_mode():
        got, want = (layer(x, x, x, **options) for layer in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=describe_options
)
@pytest.mark.parametrize("weight_options", WEIGHTS.values(), ids=WEIGHTS)
def test_causal_hint_equals_torch(weight_options, extra):
    theirs, ours = pair(**F64, **extra)
    arguments = inputs(theirs, ("self", True))
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    # With keys that the layer adds, torch's hint without weights hides those too.
    read = {} if extra else {"is_causal": True}
    for pad in ("none", "bool"):
        options = weight_options | {"key_padding_mask": padding(pad, True)}
        want = run(theirs, arguments, **options, attn_mask=causal, **read)
        assert_same(run(ours, arguments, **options, attn_mask=causal, is_causal=True), want, 1e-10)
        assert_same(run(ours, arguments, **options, is_causal=True), want, 1e-10)


def test_a_float_mask_has_a_gradient():
    theirs, ours = pair(**F64)
    arguments = inputs(theirs, ("apart", True))
    result = []
    for layer in (theirs, ours):
        mask = pairs_mask("float2", True, L).nan_to_num(neginf=-3.0).requires_grad_()
        result.append(
            torch.autograd.grad(layer(*arguments, attn_mask=mask)[0].square().sum(), mask)[0]
        )
    torch.testing.assert_close(*result)


@pytest.mark.parametrize("weight_options", WEIGHTS.values(), ids=WEIGHTS)
def test_a_row_without_keys_gives_zero(weight_options):
    theirs, ours = pair(**F64)
    arguments = inputs(theirs, ("apart", True))
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[0] = True
    result = run(ours, arguments, key_padding_mask=mask, **weight_options)
    assert all(bool(x.isfinite().all()) for x in result)
    torch.testing.assert_close(result[0][:, 0], ours.out_proj.bias.expand(L, E))
    if weight_options.get("need_weights", True):
        assert not result[1][0].any()
        assert theirs(*arguments, key_padding_mask=mask, **weight_options)[0][:, 0].isnan().all()
    clear = run(theirs, arguments, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(result[0], clear[0])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("attn", ["none", "bool2", "float3"])
def test_weights_in_pieces_equal_torch(monkeypatch, average, attn):
    monkeypatch.setattr(
        "qkv.engines.weights.MAX_SCORES_PER_BLOCK", N * H * S * 2
    )  # two queries at a time
    theirs, ours = pair(**F64)
    arguments = inputs(theirs, ("apart", True))
    options = {"average_attn_weights": average, "attn_mask": pairs_mask(attn, True, L)}
    want = run(theirs, arguments, **options)
    assert_same(run(ours, arguments, **options), want, 1e-10)
    with torch.no_grad():
        assert_same(list(ours(*arguments, **options)), want[:2], 1e-10)


@pytest.mark.parametrize("options", CONSTRUCTORS[:4] + CONSTRUCTORS[-4:], ids=describe_options)
def test_state_dicts_go_both_ways(options):
    theirs, ours = pair(**options)
    first, second = theirs.state_dict(), ours.state_dict()
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for x in source.parameters():
                x.add_(1)
        target.load_state_dict(source.state_dict())
        x = inputs(theirs, ("apart", True), torch.float32)
        torch.testing.assert_close(source(*x)[0], target(*x)[0], rtol=1e-6, atol=1e-6)


def test_copies_and_pickles():
    layer = MultiHeadAttention(E, H, score="gaussian", weighting="entmax15", rotary=True)
    x = torch.randn(S, N, E)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x, x, x)[0], layer(x, x, x)[0])


def test_nested_sequences_equal_torch():
    theirs, ours = (x.eval() for x in pair(batch_first=True))
    parts = [torch.randn(n, E) for n in (4, 2)]
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor(parts)
        got, want = (layer(x, x, x, need_weights=False)[0] for layer in (ours, theirs))
        for a, b in zip(got.unbind(), want.unbind(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sequences_under_a_rule(layout):
    """Each sequence has it for itself; what is of one shape for all of them is refused."""
    layer = MultiHeadAttention(E, H, batch_first=True, **F64)
    parts = [torch.randn(n, E, **F64) for n in (4, 2)]
    x = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    for mask in ("causal", masks.window(1) & masks.causal):
        for causal in (False, True):
            actual = layer(x, x, x, mask=mask, is_causal=causal)[0].unbind()
            for got, part in zip(actual, parts, strict=True):
                want = layer(part, part, part, mask=mask)[0]
                torch.testing.assert_close(got, want)
    block = TransformerBlock(E, H, 16, dropout=0.0, **F64)
    for got, part in zip(block(x, mask=masks.causal).unbind(), parts, strict=True):
        torch.testing.assert_close(got, block(part, mask=masks.causal))
    far = torch.randn(2, 3, E, **F64)
    alpha = layer(x, far, far)[1]
    assert alpha.shape == (2, 4, 3)  # the longest of each, and 0 beyond
    for got, part, rows in zip(alpha, parts, far, strict=True):
        torch.testing.assert_close(got[: len(part)], layer(part, rows, rows)[1])
        assert not got[len(part) :].any()
    full = torch.ones(4, 4, dtype=torch.bool)
    for name, value in {
        "mask": full,
        "attn_mask": full,
        "key_padding_mask": full[:2],
        "cache": Cache(),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}.*nested"):
            layer(x, x, x, **{name: value})
    with pytest.raises(ShapeError):
        layer(x, x, x, mask=masks.lengths(torch.tensor([3, 1])))


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sequences_that_mean_nothing(layout):
    layer, dense = MultiHeadAttention(E, H, batch_first=True), torch.randn(2, 4, E)
    parts = [torch.randn(n, E) for n in (4, 2)]
    x, fewer = (torch.nested.nested_tensor(y, layout=getattr(torch, layout))
                for y in (parts, parts[:1]))  # fmt: skip
    for key, value in ((x, x), (dense, x), (x, dense)):
        with pytest.raises(ArgumentError, match="nest the query too"):
            layer(dense, key, value)
    with pytest.raises(ShapeError, match="query holds 2 sequences and key 1"):
        layer(x, fewer, fewer)
    with pytest.raises(FrameworkError, match="MultiHeadAttention"):
        SelfAttention(E)(x)


def test_torch_encoder_layer_runs_with_ours_inside():
    layer = torch.nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    x = torch.randn(N, S, E)
    with torch.inference_mode():
        plain = layer(x)
        for options in ({}, {"weighting": "entmax15"}):
            ours = MultiHeadAttention(E, H, batch_first=True, **options).eval()
            ours.load_state_dict(layer.self_attn.state_dict())
            changed = copy.deepcopy(layer)
            changed.self_attn = ours
            # Its fast path would run softmax whatever the layer says.
            assert torch.allclose(changed(x), plain, atol=1e-6) is not bool(options)


def test_dropout_acts_while_training_alone():
    layer = MultiHeadAttention(E, H, dropout=0.5)
    x = torch.randn(64, N, E)
    torch.manual_seed(0)
    out, alpha = layer(x, x, x, average_attn_weights=False)
    torch.manual_seed(0)
    again = layer(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, again)
    assert 0.45 < float((alpha == 0).float().mean()) < 0.55
    layer.eval()
    torch.testing.assert_close(layer(x, x, x)[0], layer(x, x, x)[0])
    assert bool((layer(x, x, x, average_attn_weights=False)[1] > 0).all())


# Beyond torch


@pytest.mark.parametrize("kdim", [None, 6])
def test_grouped_heads_equal_repeated_heads(kdim):
    torch.manual_seed(0)
    few = MultiHeadAttention(16, 4, num_kv_heads=2, kdim=kdim, add_bias_kv=True, **F64)
    with torch.no_grad():
        few.in_proj_bias.normal_()
    many = MultiHeadAttention(16, 4, kdim=kdim, add_bias_kv=True, **F64)
    state = many.state_dict()
    at = (torch.tensor([0, 0, 1, 1])[:, None] * 4 + torch.arange(4)).flatten()
    for name, x in few.state_dict().items():
        if name in ("in_proj_weight", "in_proj_bias"):
            x = torch.cat([x[:16], x[16:24][at], x[24:][at]])
        elif name in ("k_proj_weight", "v_proj_weight"):
            x = x[at]
        elif name in ("bias_k", "bias_v"):
            x = x[..., at]
        state[name] = x
    many.load_state_dict(state)
    query, key = torch.randn(L, N, 16, **F64), torch.randn(S, N, kdim or 16, **F64)
    value = torch.randn(S, N, 16, **F64)
    for a, b in zip(few(query, key, value), many(query, key, value), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_the_formula(interleaved):
    d, base, offset = 6, 100.0, 3
    x = torch.randn(2, 5, d, **F64)
    got = Rotary(d, base, interleaved)(x, offset)
    want = torch.empty_like(x)
    for p, i in itertools.product(range(5), range(d // 2)):
        angle = torch.tensor((p + offset) * base ** (-2 * i / d), **F64)
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        a, b = x[:, p, first], x[:, p, second]
        want[:, p, first] = a * angle.cos() - b * angle.sin()
        want[:, p, second] = a * angle.sin() + b * angle.cos()
    torch.testing.assert_close(got, want)


def test_rotary_scores_see_distances_alone():
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 8, **F64)
    one = rotary(q, 7) @ rotary(k, 4).mT
    torch.testing.assert_close(one, rotary(q, 103) @ rotary(k, 100).mT)


def test_rotary_turns_each_head():
    layer = MultiHeadAttention(E, H, rotary=Rotary(4, base=50.0), **F64)
    x = torch.randn(S, E, **F64)
    q, k, v = (x @ layer.in_proj_weight.T).split(E, -1)
    heads = [y.unflatten(-1, (H, 4)).transpose(0, 1) for y in (q, k, v)]
    turned = [layer.rotary(y) for y in heads[:2]]
    want = qkv.attend(*turned, heads[2]).transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x, x, x)[0], want)


CACHED = {
    "plain": {},
    "rotary": {"rotary": True},
    "grouped": {"num_kv_heads": 1, "rotary": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "entmax": {"weighting": "entmax15", "score": "gaussian"},
}


@pytest.mark.parametrize("options", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("grad", [True, False])
def test_a_cache_equals_the_full_pass(options, grad):
    layer = MultiHeadAttention(E, H, batch_first=True, **options, **F64)
    x = torch.randn(N, 40, E, **F64)
    want, alpha = layer(x, x, x, is_causal=True)
    cache, start = Cache(), 0
    with torch.set_grad_enabled(grad):
        for size in (5, 1, 3, *[1] * 31):  # a prompt, then token by token
            part = x[:, start : start + size]
            out, seen = layer(part, part, part, is_causal=True, cache=cache)
            start += size
            torch.testing.assert_close(out, want[:, start - size : start])
            torch.testing.assert_close(seen[..., :start], alpha[:, start - size : start, :start])
    assert len(cache) == 40


def test_a_cache_keeps_a_memory():
    layer = MultiHeadAttention(E, H, kdim=6, vdim=5, **F64)
    query, key, value = inputs(layer, ("apart", True))
    want = layer(query, key, value)[0]
    cache = Cache()
    torch.testing.assert_close(layer(query, key, value, cache=cache)[0], want)
    torch.testing.assert_close(layer(query, None, None, cache=cache)[0], want)
    assert len(cache) == S


def test_any_score_weighting_and_mask():
    layer = MultiHeadAttention(
        E, H, score="cosine", weighting=weightings.TopK(2), bias=False, **F64
    )
    x = torch.randn(S, E, **F64)
    q, k, v = (
        y.unflatten(-1, (H, 4)).transpose(0, 1) for y in (x @ layer.in_proj_weight.T).split(E, -1)
    )
    options = {"score": "cosine", "weighting": weightings.TopK(2), "mask": masks.window(1)}
    out, alpha = qkv.attend(q, k, v, **options, return_weights=True)
    got = layer(x, x, x, mask=masks.window(1), average_attn_weights=False)
    torch.testing.assert_close(got[1], alpha)
    torch.testing.assert_close(got[0], out.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T)


@pytest.mark.parametrize(
    "mask",
    [masks.causal, "causal", torch.ones(S, S).tril().bool(), torch.ones(S, S, **F64).tril().log()],
    ids=["rule", "name", "booleans", "floats"],
)
def test_a_mask_of_ours_spares_the_added_keys(mask):
    layer = MultiHeadAttention(E, H, add_bias_kv=True, add_zero_attn=True, **F64)
    x = torch.randn(S, N, E, **F64)
    want = layer(x, x, x, attn_mask=torch.ones(S, S).triu(1).bool())
    for a, b in zip(layer(x, x, x, mask=mask), want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_mask_of_one_column_spares_the_added_keys():
    layer, shut = MultiHeadAttention(E, H, add_zero_attn=True), torch.ones(S, 1).bool()
    x, shut[1] = torch.randn(S, N, E), False
    want = layer(x, x, x, mask=shut.expand(S, S))
    for a, b in zip(layer(x, x, x, mask=shut), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize(
    ("mask", "step"),
    [
        (masks.causal, "pass it as mask="),
        ("causal", "pass it as mask="),
        (np.ones((S, S), bool), "not ndarray: pass torch.as_tensor"),
        (torch.ones(S, S, dtype=torch.int64), "not torch.int64"),
    ],
    ids=["rule", "name", "ndarray", "integers"],
)
def test_an_error_for_a_mask_that_torch_lacks_names_the_argument(name, mask, step):
    layer, x = MultiHeadAttention(E, H), torch.randn(S, N, E)
    with pytest.raises(DtypeError, match=f"^{name} .*{re.escape(step)}"):
        layer(x, x, x, **{name: mask})


@pytest.mark.parametrize(
    "weighting", [weightings.Hard(straight_through=True), weightings.Normalized("uniform")], ids=str
)
def test_weightings_made_of_several_give_weights(weighting):
    score = "boxcar" if isinstance(weighting, weightings.Normalized) else "scaled_dot"
    layer = MultiHeadAttention(E, H, score=score, weighting=weighting)
    x = torch.randn(S, N, E)
    out, alpha = layer(x, x, x)
    torch.testing.assert_close(out, layer(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(alpha.sum(-1), torch.ones(N, S))


def test_self_attention_is_the_seeds_formula():
    layer = SelfAttention(5, d_qk=3, d_v=2, **F64)
    x = torch.randn(4, 5, **F64)
    q, k, v = x @ layer.w_query, x @ layer.w_key, x @ layer.w_value
    alpha = torch.softmax(q @ k.T / 3**0.5, -1)
    got = layer(x, need_weights=True)
    torch.testing.assert_close(got[0], alpha @ v)
    torch.testing.assert_close(got[1], alpha)
    torch.testing.assert_close(layer(x), alpha @ v)
    loss = torch.autograd.grad(layer(x).square().sum(), layer.w_query)[0]
    want = torch.autograd.grad((alpha @ v).square().sum(), layer.w_query)[0]
    torch.testing.assert_close(loss, want)


# What is refused

X = torch.zeros(S, N, E)
WRONG = {
    "heads do not divide": (ArgumentError, "embed_dim", lambda: MultiHeadAttention(10, 4)),
    "no heads": (ArgumentError, "num_heads", lambda: MultiHeadAttention(8, 0)),
    "groups": (ArgumentError, "num_kv_heads", lambda: MultiHeadAttention(8, 4, num_kv_heads=3)),
    "dropout": (ArgumentError, "dropout", lambda: MultiHeadAttention(8, 2, 1.5)),
    "rotary's width": (ArgumentError, "rotary", lambda: MultiHeadAttention(8, 2, rotary=Rotary(8))),
    "an odd head": (ArgumentError, "rotary", lambda: MultiHeadAttention(6, 2, rotary=True)),
    "score": (QkvError, "gaussian", lambda: MultiHeadAttention(8, 2, score="gausian")),
    "weighting": (QkvError, "weighting", lambda: MultiHeadAttention(8, 2, weighting=3)),
}
CALLS = {
    "padding's shape": (ShapeError, "key_padding_mask", {"key_padding_mask": X[..., 0] > 0}),
    "padding's dtype": (
        DtypeError,
        "key_padding_mask",
        {"key_padding_mask": torch.zeros(N, S).int()},
    ),
    "mask's shape": (ShapeError, "attn_mask", {"attn_mask": torch.zeros(S, S + 1)}),
    "mask's heads": (ShapeError, "attn_mask", {"attn_mask": torch.zeros(N, S, S)}),
    "mask's dtype": (DtypeError, "attn_mask", {"attn_mask": torch.zeros(S, S).long()}),
    "our mask's shape": (ShapeError, "mask", {"mask": torch.ones(S, 9).bool()}),
    "no cache": (DtypeError, "cache", {"cache": {}}),
}


@pytest.mark.parametrize("kind, match, make", WRONG.values(), ids=WRONG)
def test_a_wrong_layer_is_refused(kind, match, make):
    with pytest.raises(kind, match=match):
        make()


@pytest.mark.parametrize("kind, match, options", CALLS.values(), ids=CALLS)
def test_a_wrong_call_is_refused(kind, match, options):
    with pytest.raises(kind, match=match):
        MultiHeadAttention(E, H)(X, X, X, **options)


@pytest.mark.parametrize(
    "inputs, match",
    [
        ((X[..., :4], X, X), "query"),
        ((X, X[0], X), "key"),
        ((X, X, X[:2]), "value"),
        ((X, X[:, :1], X[:, :1]), "batch"),
        ((X, None, None), "cache"),
    ],
)
def test_wrong_inputs_are_refused(inputs, match):
    with pytest.raises(QkvError, match=match):
        MultiHeadAttention(E, H)(*inputs)


def test_a_cache_of_another_model_is_refused():
    one, two = MultiHeadAttention(E, H), MultiHeadAttention(E, H)
    cache = Cache()
    one(X, X, X, cache=cache)
    with pytest.raises(ArgumentError, match=r"cache .* another"):
        two(X, X, X, cache=cache)
    with pytest.raises(ArgumentError, match=r"cache .* another"):
        two(X, None, None, cache=cache)
    with pytest.raises(ShapeError, match=r"cache .* another batch"):
        one(X[:, :1], X[:, :1], X[:, :1], cache=cache)
    with pytest.raises(ShapeError, match="attn_mask"):
        one(X, X, X, attn_mask=torch.zeros(S, S), cache=cache)
    assert len(cache) == S


def test_a_score_object_is_shared_by_heads():
    score = scores.Multiplicative(torch.eye(4, **F64) / 2)
    ours, plain = pair(**F64)[1], MultiHeadAttention(E, H, score=score, **F64)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(S, N, E, **F64)
    torch.testing.assert_close(plain(x, x, x)[0], ours(x, x, x)[0])


def test_a_nan_is_not_hidden():
    """Torch's kernel on the CPU takes a row with a NaN for an empty one."""
    layer = MultiHeadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 8)
    x[0, 2] = float("nan")
    with torch.no_grad():
        assert layer(x, x, x, need_weights=False)[0].isnan().all()


@pytest.mark.parametrize("weight_options", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("spoiled", ["nothing", "a dead row", "a padded row"])
def test_short_inference_equals_the_pass_that_learns(weight_options, spoiled):
    """Torch's operator for the whole layer, but where it would give NaN."""
    layer = MultiHeadAttention(E, H, batch_first=True).eval()
    x = torch.randn(N, S, E)
    pairs = torch.rand(S, S).triu(1) > 0.5
    pairs[2] |= spoiled == "a dead row"
    ends = torch.arange(S).expand(N, S) >= S - 1
    x[:, -1] = float("nan") if spoiled == "a padded row" else x[:, -1]
    for options in {"attn_mask": pairs}, {"key_padding_mask": ends}:
        want = layer(x, x, x, **options, **weight_options)
        with torch.no_grad():
            got = layer(x, x, x, **options, **weight_options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert want[0][:, :-1].isfinite().all()


def test_a_hook_on_the_last_layer_is_called():
    layer, called = MultiHeadAttention(8, 2, batch_first=True).eval(), []
    layer.out_proj.register_forward_hook(lambda *args: called.append(args))
    with torch.no_grad():
        layer(*[torch.randn(1, 5, 8)] * 3, need_weights=False)
    assert called


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_a_parameter_that_is_made_anew_counts(name):
    """Such as torch's parametrizations and pruning make: the layer keeps what it is made of."""
    layer, x = MultiHeadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    part, _, last = name.rpartition(".")
    module = layer.get_submodule(part)
    torch.nn.utils.parametrize.register_parametrization(module, last, Doubled())
    got = layer(x, x, x, need_weights=False)[0]
    with torch.no_grad():
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], got)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x + 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_without_a_mask_has_second_derivatives(batch_first):
    layer = MultiHeadAttention(4, 2, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: layer(x, x, x, need_weights=False)[0], x)


def test_a_score_that_is_changed_later_counts():
    layer = MultiHeadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)
    first = layer(x, x, x, need_weights=False)[0]
    layer.score = scores.Gaussian()
    want = layer(x, x, x)[0]
    assert (first - want).abs().max() > 1e-3
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], want)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("block", [2**20, 2**5], ids=["at once", "in pieces"])
def test_weights_are_returned_with_torchs_kernel(average, block, monkeypatch):
    """Values, gradients through the weights alone and through both, and second derivatives."""
    from qkv.engines.native import weights

    monkeypatch.setattr(weights, "MAX_WEIGHTS_PER_BLOCK", block)
    ours = MultiHeadAttention(4, 2, batch_first=True, dtype=torch.float64)
    theirs = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)

    def slopes(layer, through):
        out, alpha = layer(x, x, x, average_attn_weights=average)
        loss = {"out": out.square().sum(), "alpha": alpha.square().sum()}
        expected = [x, layer.in_proj_weight]
        actual = torch.autograd.grad(sum(loss[name] for name in through), expected)
        return [out, alpha, *actual]

    for through in (["out"], ["alpha"], ["out", "alpha"]):
        for got, want in zip(slopes(ours, through), slopes(theirs, through), strict=True):
            torch.testing.assert_close(got, want)
    small = x.detach()[:1, :3].requires_grad_()

    def both(x):
        out, alpha = ours(x, x, x, average_attn_weights=average)
        return out.sum() + alpha.square().sum()

    assert torch.autograd.gradgradcheck(both, small)


def test_positions_that_are_given_later_count():
    plain, turned = (MultiHeadAttention(8, 2, batch_first=True, rotary=r) for r in (False, True))
    plain.load_state_dict(turned.state_dict(), strict=False)
    x = torch.randn(1, 5, 8)
    plain.rotary = Rotary(4)
    for weights in (True, False):
        got, want = (layer(x, x, x, need_weights=weights)[0] for layer in (plain, turned))
        torch.testing.assert_close(got, want)


def test_an_exported_causal_layer_takes_more_keys_than_queries_and_fewer():
    layer = MultiHeadAttention(8, 2, batch_first=True)

    class Cross(torch.nn.Module):
        def forward(self, query, key):
            return layer(query, key, key, is_causal=True, need_weights=False)[0]

    any_length = {1: torch.export.Dim.DYNAMIC}
    inputs = torch.randn(2, 7, 8), torch.randn(2, 5, 8)
    program = torch.export.export(Cross(), inputs, dynamic_shapes=(any_length, any_length)).module()
    for n, m in ((7, 5), (4, 9)):
        inputs = torch.randn(2, n, 8), torch.randn(2, m, 8)
        torch.testing.assert_close(program(*inputs), Cross()(*inputs))


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_a_short_layer_with_and_without_mkl(weights, large, mkl, monkeypatch):
    """By torch's operator for all of it, or by its parts."""
    from qkv.engines.native import multi_head_layer as layer

    monkeypatch.setattr(layer, "HAS_MKL", mkl)
    monkeypatch.setattr(
        layer, "MAX_PROJECTION_PRODUCTS", 0 if large else layer.MAX_PROJECTION_PRODUCTS
    )
    theirs, ours = (layer.eval() for layer in pair(batch_first=True))
    x, hidden = torch.randn(N, L, E), torch.ones(L, L, dtype=torch.bool).triu(1)
    with torch.no_grad():
        for options in ({}, {"attn_mask": hidden}):
            want = theirs(x, x, x, need_weights=weights, **options)
            got = ours(x, x, x, need_weights=weights, **options)
            torch.testing.assert_close(got, want)


class Adapter(torch.nn.Module):
    """W x + B A x, with no weight of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.a = torch.nn.Linear(inner.in_features, 2, bias=False)
        self.b = torch.nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"num_kv_heads": 1}])
def test_an_adapter_may_stand_in_the_place_of_out_proj(options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2, batch_first=True, **options)
    same = copy.deepcopy(layer)
    layer.out_proj = Adapter(layer.out_proj)
    with torch.no_grad():
        same.out_proj.weight += layer.out_proj.b.weight @ layer.out_proj.a.weight
    x = torch.randn(2, 5, 8)
    for settings in ({}, {"is_causal": True}, {"need_weights": False, "mask": masks.window(1)}):
        torch.testing.assert_close(layer(x, x, x, **settings)[0], same(x, x, x, **settings)[0])
    block = TransformerBlock(8, 2, 16)
    block.self_attn.out_proj = Adapter(block.self_attn.out_proj)
    assert block(x).shape == x.shape


def test_a_mask_on_another_device_is_named():
    layer = MultiHeadAttention(4, 2, batch_first=True)
    x, far = torch.randn(2, 3, 4), torch.zeros(3, 3, dtype=torch.bool, device="meta")
    padding = torch.zeros(2, 3, dtype=torch.bool, device="meta")
    for training, recorded in ((True, True), (False, False)):
        layer.train(training)
        with torch.set_grad_enabled(recorded):
            with pytest.raises(ArgumentError, match=r"attn_mask is on meta: pass attn_mask\.to"):
                layer(x, x, x, attn_mask=far)
            with pytest.raises(ArgumentError, match=r"key_padding_mask is on meta"):
                layer(x, x, x, key_padding_mask=padding)


def test_torchs_fast_path_can_be_turned_off(monkeypatch):
    """`torch.backends.mha.set_fastpath_enabled(False)` holds for our layer too."""
    layer = MultiHeadAttention(4, 2, batch_first=True).eval()
    x, calls = torch.randn(2, 3, 4), []
    operator = torch._native_multi_head_attention
    monkeypatch.setattr(
        torch, "_native_multi_head_attention", lambda *args: calls.append(1) or operator(*args)
    )
    with torch.no_grad():
        want = layer(x, x, x)[0]
        assert len(calls) == 1
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            actual = layer(x, x, x)[0]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(calls) == 1
    torch.testing.assert_close(actual, want)
