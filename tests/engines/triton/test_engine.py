"""The engine `triton`: every score, weighting and mask that it serves, against the formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import triton as engine
from qkv.errors import EngineError
from tests import cases
from tests.cases import case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.sample_of_module(7),
    pytest.mark.skipif(
        not (engine.is_interpreted() or torch.cuda.is_available()), reason="no interpreter, no CUDA"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = ("dot", "scaled_dot", "softcap", "learned_scale", "cosine", "learned_cosine",
          "multiplicative", "gaussian", "learned_gaussian", "additive", "gated", "laplace",
          "learned_laplace", "boxcar", "triangular", "epanechnikov", "learned_window", "constant",
          "exact")  # fmt: skip
COVERING = [case for case in cases.covering() if case[0] in SCORES]


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        name: torch.tensor(x, device=DEVICE, dtype=torch.float32 if x.dtype.kind == "f" else None)
        for name, x in arrays.items()
    }


def serves(score: str, weighting: str, mask: str) -> bool:
    arrays = tensors(case(score, weighting, mask).arrays)
    options = case(score, weighting, mask).build_options(arrays)
    main = (arrays[name] for name in ("query", "key", "value"))
    return engine.unsupported_reason(build_call(*main, *options.values(), 0.0, None, None)) is None


SERVED = [case for case in COVERING if serves(*case)]


def test_it_serves_what_it_should():
    assert {weighting for _, weighting, _ in SERVED} >= {
        "softmax", "temperature", "average", "raw", "sigmoid", "sparsemax", "entmax15", "top3",
    }  # fmt: skip
    assert {mask for _, _, mask in SERVED} >= {
        "none", "causal", "bottom_right", "window", "one_sided", "causal_window", "blocks",
        "lengths",
    }  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize(("score", "weighting", "mask"), SERVED)
def test_values_and_gradients(score, weighting, mask):
    call = case(score, weighting, mask)
    arrays = tensors(call.arrays)
    inputs = {n: x.requires_grad_(x.dtype.is_floating_point) for n, x in arrays.items()}
    out = call.attend(inputs, engine="triton")
    np.testing.assert_allclose(out.detach().cpu().numpy(), call.expected, atol=3e-5)
    wide = {n: torch.tensor(x, requires_grad=x.dtype.kind == "f") for n, x in call.arrays.items()}
    call.attend(wide, engine="dense").backward(torch.tensor(call.output_gradient))
    out.backward(torch.tensor(call.output_gradient, dtype=torch.float32, device=DEVICE))
    for name, x in inputs.items():
        if not x.requires_grad:
            continue
        right = wide[name].grad
        right = torch.zeros_like(wide[name]) if right is None else right
        got = torch.zeros_like(x) if x.grad is None else x.grad
        size = float(right.abs().max()) + 1
        np.testing.assert_allclose(
            got.cpu().double().numpy(), right.cpu().numpy(), atol=1e-4 * size, err_msg=name
        )


@pytest.mark.parametrize("lead", [(), (3,), (2, 2), (2, 3, 2)])
@pytest.mark.parametrize("few", [False, True])
def test_leading_axes(lead, few):
    """Any number of them, with keys that have all, fewer heads, or none."""
    rng = np.random.default_rng(4)
    own = lead if not few else ((*lead[:-1], 1) if lead else ())
    q, k, v = (rng.normal(size=(*x, n, 5)) for x, n in ((lead, 6), (own, 7), (own, 7)))
    gate = [rng.normal(size=5) for _ in range(2)]
    for score in (scores.Gated(*gate), scores.Gaussian(0.8)):
        mask = masks.lengths([3, 7, 0][: lead[0]]) if lead else masks.causal
        want, expected = qkv.attend(q, k, v, score=score, mask=mask, return_lse=True)
        made = score
        if isinstance(score, scores.Gated):
            made = scores.Gated(*(torch.tensor(x).float().to(DEVICE) for x in gate))
        inputs = (torch.tensor(x).float().to(DEVICE) for x in (q, k, v))
        got, lse = qkv.attend(*inputs, score=made, mask=mask, return_lse=True, engine="triton")
        np.testing.assert_allclose(got.cpu().numpy(), want, atol=3e-5)
        np.testing.assert_allclose(lse.cpu().numpy(), expected, atol=3e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("score", ["gaussian", "additive", "gated", "cosine"])
def test_half_the_bits(score, dtype):
    """No worse than rounding the arguments and the result."""
    call, kind = case(score, "softmax", "none"), getattr(torch, dtype)
    arrays = {n: torch.tensor(x, dtype=kind, device=DEVICE) for n, x in call.arrays.items()}
    rounded = {n: x.cpu().double().numpy() for n, x in arrays.items()}
    want, expected = call.attend(rounded, engine="dense", return_lse=True)
    got, lse = call.attend(arrays, engine="triton", return_lse=True)
    assert got.dtype == kind and lse.dtype == torch.float32  # so that it merges
    np.testing.assert_allclose(got.cpu().double().numpy(), want, atol=4e-2)
    np.testing.assert_allclose(lse.cpu().double().numpy(), expected, atol=4e-2)


@pytest.mark.parametrize("weighting", ["softmax", "sparsemax", weightings.TopK(3), "sigmoid"])
def test_a_score_mod_of_distances_in_16_bits(weighting):
    """A score_mod needs the whole distance, also where a constant per row changes no weight."""
    torch.manual_seed(0)
    arrays = [torch.randn(2, 2, n, 8, device=DEVICE, dtype=torch.float16) for n in (5, 9, 9)]
    score = scores.Modified(scores.Gaussian(2.0), lambda s, b, h, i, j: torch.tanh(2 * s))
    wide = [x.double() for x in arrays]
    want = qkv.attend(*wide, score=score, weighting=weighting, engine="dense")
    got = qkv.attend(*arrays, score=score, weighting=weighting, engine="triton")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["relative", "modified"])
def test_the_range_of_a_score_with_a_score_mod_is_checked_in_each_call(kind):
    """A cached plan once ran a Gaussian with ALiBi in a range where its rewritten form is wrong."""
    arrays = [torch.randn(1, 2, 5, 8, device=DEVICE) for _ in range(3)]
    score: Any = scores.Modified("gaussian", lambda s, b, h, i, j: s - (i - j).abs())
    if kind == "relative":
        score = scores.Relative(scores.Alibi(torch.ones(2, device=DEVICE)), "gaussian")
    qkv.attend(*arrays, score=score, engine="triton")
    with pytest.raises(EngineError, match="bandwidths from the mean key"):
        qkv.attend(*(300 * x for x in arrays), score=score, engine="triton")


@pytest.mark.parametrize("mask", [None, masks.causal, masks.lengths([40, 7]), "bool", "float"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_gaussian_with_few_queries(n, mask):
    """The kernel computes the squares of the keys while it reads them."""
    torch.manual_seed(n)
    shapes = (2, 4, n, 24), (2, 2, 40, 24), (2, 2, 40, 8)
    arrays = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
    if isinstance(mask, str):
        values = torch.randn(2, 1, n, 40, device=DEVICE)
        mask = values if mask == "float" else values > 0
    options = {"score": scores.Gaussian(4.0), "weighting": weightings.Softmax(0.5), "mask": mask}
    want = qkv.attend(*(x.double() for x in arrays), **options, engine="dense", return_lse=True)
    got = qkv.attend(*arrays, **options, engine="triton", return_lse=True)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)
    learned = [x.clone().requires_grad_() for x in arrays]  # the squares have a gradient
    qkv.attend(*learned, **options, engine="triton").float().square().sum().backward()
    wide = [x.double().requires_grad_() for x in arrays]
    qkv.attend(*wide, **options, engine="dense").square().sum().backward()
    for x, y in zip(learned, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "weighting", "mask"),
    [
        (torch.float32, "sigmoid", "bool"),
        (torch.float32, "raw", "float"),
        (torch.bfloat16, "sigmoid", None),
        (torch.bfloat16, "raw", "blocks"),
    ],
)
def test_distances_where_a_shift_of_the_row_counts(dtype, weighting, mask):
    """−‖q‖²/2σ² belongs to the score: checked in float64, with every gradient."""
    made = torch.Generator(device=DEVICE).manual_seed(3)
    shapes = ((2, 4, 9, 5), (2, 2, 11, 5), (2, 2, 11, 3), (4, 9, 11))
    inputs = [torch.randn(x, generator=made, device=DEVICE).to(dtype) for x in shapes]
    along = torch.randn((2, 4, 9, 3), generator=made, device=DEVICE).to(dtype)
    seen = torch.rand((9, 11), generator=made, device=DEVICE) > 0.3
    rules = {"bool": seen, "blocks": masks.blocks(np.eye(2, dtype=bool), 8)}

    def results(engine, kind):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        rule = leaves[3] if mask == "float" else rules.get(mask)
        options = {"score": scores.Gaussian(1.5), "weighting": weighting, "mask": rule}
        out = qkv.attend(*leaves[:3], **options, engine=engine)
        used = leaves if mask == "float" else leaves[:3]
        return out, *torch.autograd.grad(out, used, along.to(kind))

    near = 2e-6 if dtype == torch.float32 else 2e-2
    for got, want in zip(results("triton", dtype), results("dense", torch.float64), strict=True):
        assert float((got - want).detach().norm() / want.detach().norm()) < near


@pytest.mark.parametrize(
    ("dtype", "weighting", "mask"),
    [
        (torch.float32, weightings.Softmax(0.5), masks.causal),
        (torch.float32, "entmax15", None),
        (torch.float32, weightings.TopK(3), None),
        (torch.bfloat16, "sigmoid", None),
    ],
)
def test_a_softcap(dtype, weighting, mask):
    """s = cap · tanh(scale q·k / cap), and its slope 1 − (s / cap)²: half the scores are bent."""
    inputs, along = torch.randn(3, 1, 2, 21, 8).to(DEVICE, dtype), torch.randn(1, 2, 21, 8)

    def results(engine, kind):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        options = {
            "score": scores.ScaledDot(1.0, softcap=2.0),
            "weighting": weighting,
            "mask": mask,
        }
        out = qkv.attend(*leaves, **options, engine=engine)
        return out, *torch.autograd.grad(out, leaves, along.to(DEVICE, dtype).to(kind))

    near = 2e-6 if dtype == torch.float32 else 1e-2
    for got, want in zip(results("triton", dtype), results("dense", torch.float64), strict=True):
        assert float((got - want).detach().norm() / want.detach().norm()) < near


def test_a_learned_mask_is_combined_with_blocks():
    mask, inputs = torch.randn(20, 20, device=DEVICE), torch.randn(3, 20, 8, device=DEVICE)
    rule = masks.blocks(np.array([[True, False], [True, True]]), 16)

    def slope(engine, kind):
        own = mask.to(kind).requires_grad_()
        out = qkv.attend(*inputs.to(kind), mask=rule & own, engine=engine)
        return torch.autograd.grad(out, own, inputs[0].to(kind))[0]

    torch.testing.assert_close(
        slope("triton", torch.float32).double(), slope("dense", torch.float64), atol=1e-5, rtol=0
    )


def test_a_query_that_is_not_a_number_stays_one_where_its_length_counts():
    x = torch.ones(1, 1, 3, 4, device=DEVICE, dtype=torch.float16)
    q = x.clone()
    q[..., 1, 2] = torch.nan
    out = qkv.attend(q, x, x, score="gaussian", weighting="raw", engine="triton")
    assert out.isnan().any(-1).flatten().tolist() == [False, True, False]


def test_what_it_refuses_it_explains(monkeypatch):
    x, w = torch.ones(2, 4, 6, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    for options, reason in (
        ({"score": scores.Gated(w, w, None, scores.Laplace())}, "no dot product form"),
        ({"weighting": weightings.Entmax(torch.tensor(1.5, device=DEVICE))}, "alpha"),
        ({"weighting": weightings.Entmax(2.5)}, "alpha"),
    ):
        with pytest.raises(EngineError, match=reason):
            qkv.attend(x, x, x, **options, engine="triton")
    with monkeypatch.context() as patched, pytest.raises(EngineError, match="as an array"):
        patched.setattr(engine, "MAX_MASK_PAIRS", 5)
        qkv.attend(x, x, x, mask=torch.ones(6, 6, device=DEVICE) > 0, engine="triton")
    with monkeypatch.context() as patched, pytest.raises(EngineError, match="learned temperature"):
        patched.setattr(engine, "MAX_MASK_PAIRS", 36)
        warm = weightings.Softmax(torch.ones(4, 1, 1, device=DEVICE))
        qkv.attend(x, x, x, weighting=warm, mask=torch.zeros(6, 6, device=DEVICE), engine="triton")
    with pytest.raises(EngineError, match="float32"):
        qkv.attend(x.double(), x.double(), x.double(), engine="triton")
    with pytest.raises(EngineError, match="torch tensors"):
        qkv.attend(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), engine="triton")


@pytest.mark.parametrize(("n", "left"), [(400, True), (187, False)])
@pytest.mark.parametrize(("learned", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.3)])
def test_what_the_framework_knows_is_left_to_it(n, left, learned, dropout):
    """A cosine, but not so short that `dense` would have it, nor under a learned temperature or a
    seed, which its kernel does not take."""
    call: Any = SimpleNamespace(
        fw=SimpleNamespace(
            is_traced=lambda x: False,
            static_shape=lambda x: (2, 2, n, 64),
            compiles_calls=False,
            is_in_fixed_graph=lambda x: False,
            eager_block_numbers=0,
            name="torch",
            device_block_numbers=lambda x: 2**27,
        ),
        query=SimpleNamespace(device=SimpleNamespace(type="cuda")),
        key=None,
        lead=(2, 2),
        n=n,
        m=n,
        wants_lse=False,
        rule=None,
        score=scores.Cosine(),
    )
    call.weighting = weightings.Softmax(torch.tensor(2.0) if learned else 2.0)
    call.dropout = dropout
    assert (engine.slower_reason(call) is not None) == (left and not learned and not dropout)


def test_a_short_causal_call_is_left_to_it(monkeypatch):
    """One launch instead of the framework's kernel and its repair."""
    sdpa = pytest.importorskip("qkv.engines.native.sdpa")
    monkeypatch.setattr(sdpa, "is_on_device", lambda call: True)

    def declined(x, mask=masks.causal):
        return sdpa.slower_reason(
            build_call(x, x, x, "scaled_dot", "softmax", mask, 0.0, None, None)
        )

    short = torch.ones(1, 2, 8, 16, device=DEVICE, dtype=torch.bfloat16)
    assert "one launch" in declined(short)
    long, deep = short.expand(1, 2, 8, 16).repeat(1, 1, 65, 1), short.expand(2**12, 2, 8, 16)
    for x in (long, deep, short.float(), short.clone().requires_grad_()):
        assert declined(x) is None
    assert declined(short, None) is None


def test_a_mask_is_left_to_it(monkeypatch):
    """But not with a gradient if PyTorch is faster: for one query, small float masks, and wide
    float32 under an array."""
    sdpa = pytest.importorskip("qkv.engines.native.sdpa")
    monkeypatch.setattr(sdpa, "is_on_device", lambda call: True)

    def declined(n, mask, learned=False, width=16, dtype=torch.bfloat16):
        k = torch.ones(1, 1, 256, width, device=DEVICE, dtype=dtype)
        q = k[:, :, :n].clone().requires_grad_(learned)
        return sdpa.slower_reason(
            build_call(q, k, k, "scaled_dot", "softmax", mask, 0.0, None, None)
        )

    floats = torch.zeros(256, 256, device=DEVICE, dtype=torch.bfloat16)
    for mask in (lambda n: floats[:n], lambda n: floats[:n] == 0, lambda n: masks.window(100)):
        for n in (1, 4, 256):
            assert "masked tiles" in declined(n, mask(n))
        assert "masked tiles" in declined(256, mask(256), learned=True)

    assert "masked tiles" in declined(255, floats[:255] == 0, learned=True)
    assert declined(255, floats[:255], learned=True) is None
    assert declined(1, floats[:1] == 0, learned=True) is None
    assert "masked tiles" in declined(1, masks.window(100), learned=True)
    assert declined(256, masks.causal, learned=True) is declined(256, None) is None

    def wide(mask, learned):
        return declined(256, mask, learned=learned, width=128, dtype=torch.float32)

    assert wide(floats == 0, True) is None
    assert "masked tiles" in wide(floats == 0, False)
    assert "masked tiles" in wide(masks.window(100), True)


def test_it_leaves_torch_func_to_others():
    x = torch.randn(2, 3, 5, 4, device=DEVICE)

    def loss(x, **options):
        return qkv.attend(x, x, x, score="gaussian", **options).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(each[1], torch.func.grad(loss)(x[1]))
    with pytest.raises(EngineError, match=r"torch\.func"):
        torch.func.grad(lambda x: loss(x, engine="triton"))(x)


@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_nan_behind_the_causal_mask_stays_there(place):
    query, key, value = torch.randn(3, 1, 2, 16, 16, dtype=torch.float16, device=DEVICE).unbind()
    value[:, :, place] = float("nan")
    out = qkv.attend(query, key, value, mask=masks.causal, engine="triton")
    assert out[:, :, :place].isfinite().all() and out[:, :, place:].isnan().all()


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_autocast_casts(score):
    arrays = [torch.randn(1, 2, 5, 16, device=DEVICE) for _ in "qkv"]
    if score == "additive":
        shapes = ((4, 16), (4, 16), (4,))
        score = scores.Additive(*[torch.randn(x, device=DEVICE) for x in shapes])
    with torch.autocast(DEVICE, torch.bfloat16):
        out, lse = qkv.attend(*arrays, score=score, engine="triton", return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["additive", "multiplicative", "gated", "gaussian", "temperature"])
def test_float32_parameters_work_with_16_bit_queries(name):
    def drawn(*shape):
        return (torch.randn(shape, device=DEVICE) / 4).requires_grad_()

    options = {
        "additive": lambda: {"score": scores.Additive(drawn(8, 16), drawn(8, 16), drawn(8))},
        "multiplicative": lambda: {"score": scores.Multiplicative(drawn(16, 16))},
        "gated": lambda: {"score": scores.Gated(drawn(16), drawn(16), drawn())},
        "gaussian": lambda: {"score": scores.Gaussian(drawn().detach().exp().requires_grad_())},
        "temperature": lambda: {"weighting": weightings.Softmax(drawn().detach().exp())},
    }[name]()
    x = [torch.randn(1, 2, 16, 16, device=DEVICE).half().requires_grad_() for _ in range(3)]
    held = [p for record in options.values() for p in vars(record).values() if torch.is_tensor(p)]
    held = [p.requires_grad_() for p in held]
    result = [
        (out, *torch.autograd.grad(out.float().square().sum(), [*x, *held]))
        for out in (qkv.attend(*x, **options, engine=engine) for engine in ("triton", "dense"))
    ]
    assert [p.dtype for p in result[0][4:]] == [torch.float32] * len(held)
    torch.testing.assert_close(*result, atol=0.05, rtol=0.05)
    with torch.no_grad():
        bare = qkv.attend(*x, **options, engine="triton")
    torch.testing.assert_close(bare, result[0][0], atol=0.01, rtol=0.01)
