"""The frameworks' own kernels, through our meaning of masks, NaN and empty rows."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import EngineError

rng = np.random.default_rng(4)
QUERY = rng.normal(size=(2, 4, 40, 8))
KEY, VALUE = rng.normal(size=(2, 2, 50, 8)), rng.normal(size=(2, 2, 50, 6))
WANTED = {
    "plain": {},
    "dot": {"score": "dot"},
    "scale and temperature": {
        "score": scores.ScaledDot(0.4),
        "weighting": weightings.Softmax(0.7),
    },
}


def jax_arrays():
    jax = pytest.importorskip("jax")
    return [jax.numpy.asarray(x, "float32") for x in (QUERY, KEY, VALUE)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask", [None, masks.causal], ids=str)
@pytest.mark.parametrize("options", WANTED.values(), ids=WANTED)
def test_jax_nn_agrees_with_dense(options, mask):
    import jax

    arrays = jax_arrays()

    def loss(*args, engine):
        return (qkv.attend(*args, **options, mask=mask, engine=engine) ** 2).sum()

    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
    got, want = (value_and_grad(*arrays, engine=engine) for engine in ("native", "dense"))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_jax_nn_leaks_no_nan_past_the_mask():
    query, key, value = jax_arrays()
    value = value.at[..., 30, :].set(np.nan)
    out = qkv.attend(query, key, value, mask=masks.causal, engine="native")
    shown = np.isnan(np.asarray(out)).any((0, 1, 3))
    np.testing.assert_array_equal(shown, np.arange(40) >= 30)


def test_jax_nn_serves_no_other_mask():
    with pytest.raises(EngineError, match="a query that sees no key"):
        qkv.attend(*jax_arrays(), mask=masks.window(3), engine="native")


def test_jax_nn_serves_no_float64():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    with pytest.raises(EngineError, match="float32"):
        qkv.attend(*(jax.numpy.asarray(x) for x in (QUERY, KEY, VALUE)), engine="native")


TORCH_MASKS = {
    "none": None,
    "causal": masks.causal,
    "bottom right": masks.causal(align="bottom_right"),
    "band": masks.causal & masks.window(9),
    "band and globals": masks.window(5) | masks.global_tokens(2),
    "lengths": masks.lengths([50, 0]),
    "documents": masks.documents(np.arange(40) // 15, np.arange(50) // 15),
    "dilated": masks.dilated(3, 4),
    "custom": masks.custom(lambda b, h, i, j: (i + j + h) % 3 > 0),
}


@pytest.mark.parametrize("most", [0.0, 1.1], ids=["whole", "in rows"])
@pytest.mark.parametrize("mask", TORCH_MASKS.values(), ids=TORCH_MASKS)
@pytest.mark.parametrize("options", WANTED.values(), ids=WANTED)
def test_torch_agrees_with_dense(options, mask, most, monkeypatch):
    """Values and gradients, in groups along the diagonal, in runs of keys, and of other widths."""
    torch = pytest.importorskip("torch")
    from qkv.engines.native import query_spans as native

    monkeypatch.setattr(native, "QUERIES_PER_SPAN", 7)
    monkeypatch.setattr(native, "PAIRS_PER_CALL", 0)
    monkeypatch.setattr(native, "MAX_VISIBLE_SHARE", most)
    result = {}
    for engine in ("native", "dense"):
        inputs = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE)]
        out = qkv.attend(*inputs, **options, mask=mask, engine=engine)
        out.square().sum().backward()
        result[engine] = [out.detach(), *(x.grad for x in inputs)]
    for a, b in zip(*result.values(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_mask_that_leaves_most_goes_to_one_call(monkeypatch):
    torch = pytest.importorskip("torch")
    from qkv.engines.native import query_spans as native

    monkeypatch.setattr(native, "QUERIES_PER_SPAN", 10)
    monkeypatch.setattr(native, "PAIRS_PER_CALL", 0)
    inputs = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]

    def explain_detail(keys):
        seen = masks.array((torch.arange(50) < keys).repeat(inputs[0].shape[-2], 1))
        return qkv.explain(*inputs, mask=seen, engine="native").detail

    assert explain_detail(45) == "PyTorch's scaled_dot_product_attention"
    assert explain_detail(20) == "PyTorch's scaled_dot_product_attention, 10 queries at a time"
    monkeypatch.setattr(native, "MAX_MASK_NUMBERS", 10)  # too large to be held
    assert explain_detail(45) == explain_detail(20)


SHARED = {
    "lengths": masks.lengths([20, 13]),
    "the last": np.arange(50) >= 45,
    "between": (np.arange(50) > 10) & (np.arange(50) < 30),
    "nothing": np.zeros(50, dtype=bool),
    "floats": np.where(np.arange(50) < 20, 0.5, -np.inf),
}


@pytest.mark.parametrize("mask", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("spoiled", [None, 5, 40])
def test_keys_that_no_query_sees_are_not_read(mask, spoiled):
    """One call of the kernel, on the keys that are left; a NaN among the others does not count."""
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    if not isinstance(mask, masks.Mask):
        mask = torch.tensor(mask)[None]
    for x in inputs[1:]:
        if spoiled is not None:
            x[..., spoiled, :] = float("nan")
    for _ in range(2):  # the second by the plan of the first
        got = qkv.attend(*inputs, mask=mask)
        want = qkv.attend(*inputs, mask=mask, engine="dense")
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("at", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_one_number_behind_a_shared_mask_does_not_leak(number, at):
    """An infinite key spoils those rows alone whose query has its sign there."""
    torch = pytest.importorskip("torch")
    inputs, mask = [torch.tensor(x) for x in (QUERY, KEY, VALUE)], masks.lengths([48, 45])
    want = qkv.attend(*inputs, mask=mask)
    inputs[at][1, 1, 47, 3] = float(number)
    assert qkv.explain(*inputs, mask=mask).engine != "native"
    torch.testing.assert_close(qkv.attend(*inputs, mask=mask), want)


def test_a_row_that_all_keys_share_is_whole_on_a_device():
    torch = pytest.importorskip("torch")
    from qkv.engines.native.sdpa_kernel import expand_mask_rows

    thin = torch.arange(3.0)[:, None]
    full = expand_mask_rows(thin, 4)
    assert full.is_contiguous() and full.tolist() == [[i] * 4 for i in (0.0, 1.0, 2.0)]
    assert expand_mask_rows(full, 4) is full


def test_rows_that_see_nothing_are_reported():
    torch = pytest.importorskip("torch")
    from qkv.engines.native.sdpa_kernel import rows_with_keys

    live = torch.tensor([[True, False], [False, False]])
    for mask in (live, torch.zeros(2, 2).masked_fill(~live, -torch.inf)):
        assert rows_with_keys(mask).tolist() == [[True], [False]]


REFUSALS = {
    "Gaussian": {"score": "gaussian"},
    "softcap": {"score": scores.ScaledDot(softcap=3.0)},
    "Hard": {"weighting": "hard"},
    "log-sum-exp": {"return_lse": True},
    "random": {"dropout_p": 0.5, "seed": 1},
}


@pytest.mark.parametrize("word", REFUSALS)
def test_a_refusal_says_why(word):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    explanation = qkv.explain(*inputs, **REFUSALS[word])
    assert explanation.engine != "native"
    assert word in dict(explanation.refusals)["native"]
    with pytest.raises(EngineError, match=word):
        qkv.attend(*inputs, **REFUSALS[word], engine="native")


def test_explain_counts_only_what_the_mask_leaves():
    x = np.zeros((2048, 8))
    full, part = (qkv.explain(x, x, x, mask=mask) for mask in (None, masks.window(64)))
    assert part.flops < full.flops / 4
    assert "with mask window(64, 64)" in str(part)
    assert "streaming" in str(part)
    assert full.bytes == 4 * x.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 4)])
@pytest.mark.parametrize("m", [2**14, 2**14 + 13])
def test_few_queries_split_the_keys(m, lead, dtype):
    """The kernel shares out queries alone, so the keys become heads, merged by log-sum-exp."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(m)
    kind = getattr(torch, dtype)
    query = torch.randn(*lead, 2, 8, dtype=kind)
    heads = (*lead[:-1], 1) if lead else ()
    key, value = (torch.randn(*heads, m, width, dtype=kind) for width in (8, 5))
    assert qkv.explain(query, key, value).engine == "native"
    got = qkv.attend(query, key, value)
    want = qkv.attend(*(x.double() for x in (query, key, value)), engine="dense")
    assert got.dtype == kind and got.shape == want.shape
    near = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(got.double(), want, atol=near, rtol=0)
    key[..., 700, 3] = float("nan")
    assert torch.isnan(qkv.attend(query, key, value)).all()
    key[..., 700, 3] = float("inf")
    value[..., 700, :] = 0
    spoiled = qkv.attend(query, key, value)
    want = qkv.attend(*(x.double() for x in (query, key, value)), engine="dense")
    torch.testing.assert_close(spoiled.double(), want, atol=near, rtol=0, equal_nan=True)


def test_triton_is_not_imported_after_tensorflow(monkeypatch):
    """Their two copies of LLVM would end the process."""
    from qkv.engines.triton_import import has_triton, triton_missing_reason

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    assert "import triton first" in triton_missing_reason() and not has_triton()
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert has_triton()


@pytest.mark.parametrize("mask", [None, "causal", "padding", "float"])
def test_without_a_seed_weights_are_dropped_by_torchs_generator(mask):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    b, h, m, p = 2, 2, 64, 0.2
    query, key = (torch.randn(b, h, m, 4, dtype=torch.float64) for _ in range(2))
    value = torch.eye(m, dtype=torch.float64).expand(b, h, m, m)  # so that the output is α
    seen = torch.arange(m) < torch.tensor([m // 2, 0])[:, None, None, None]
    rule = {"padding": seen, "float": torch.randn(m, m).double()}.get(mask, mask)
    assert qkv.explain(query, key, value, mask=rule, dropout_p=p).engine == "native"

    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    one = qkv.attend(*leaves, mask=rule, dropout_p=p)
    alpha = qkv.weights(*leaves[:2], mask=rule)
    included, live = one > 0, alpha > 0
    deviation = (p * (1 - p) * live.sum()).sqrt()
    assert abs((live & ~included).sum() - p * live.sum()) < 4 * deviation
    two = torch.where(included, alpha / (1 - p), 0.0) @ leaves[2]
    pairs = zip(*(torch.autograd.grad((x**2).sum(), leaves) for x in (one, two)), strict=True)
    for got, want in ((one, two), *pairs):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_nan_among_the_few_keys_that_a_mask_leaves_is_not_hidden():
    torch = pytest.importorskip("torch")
    query, key, value = torch.randn(3, 2, 65, 8).unbind()
    seen = (torch.arange(65) >= 64).expand(65, 65).clone()
    qkv.attend(query, key, value, mask=seen)  # a plan is made of finite numbers
    key[0, 64] = float("nan")
    out = qkv.attend(query, key, value, mask=seen)
    assert torch.isnan(out[0]).all() and torch.isfinite(out[1]).all()


@pytest.mark.parametrize("mask", [None, "causal", "booleans", "floats"])
def test_a_gradient_of_torchs_kernel_can_be_differentiated_whatever_came_before(mask):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    x = torch.randn(1, 2, 18, 8, dtype=torch.float64, requires_grad=True)
    if mask == "booleans":
        mask = torch.rand(18, 18) < 0.7
        mask[3] = False
    elif mask == "floats":
        mask = torch.randn(18, 18, dtype=torch.float64)

    def slopes(engine, before):
        inputs = x, 2 * x, x.sin()
        out = qkv.attend(*inputs, mask=mask, engine=engine)
        for created in before:  # the kernel's node is met, and in one of them not run
            torch.autograd.grad(out.sum(), out, retain_graph=True, create_graph=created)
            torch.autograd.grad(out.sum(), x, retain_graph=True, create_graph=created)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope, *torch.autograd.grad(slope.square().sum(), x)

    want = slopes("dense", ())
    for before in (), (False,), (True, True):
        torch.testing.assert_close(slopes("native", before), want)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(slopes("native", ()), want)


@pytest.mark.parametrize("created", [False, True])
def test_nothing_outlives_a_gradient_of_torchs_kernel(created):
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 2, 18, 8, requires_grad=True)
    query = 2 * x
    held = weakref.ref(query)
    gc.disable()
    try:
        slope = torch.autograd.grad(qkv.attend(query, x, x).sum(), x, create_graph=created)
        del query, slope
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("n", [16, 128])
def test_one_value_behind_the_causal_mask_does_not_leak(n, learned, number):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 8, n, 64)
    value[0, 3, 9, 2] = number
    for x in (query, key, value):
        x.requires_grad_(learned)
    actual = qkv.attend(query, key, value, mask=masks.causal)
    want = qkv.attend(query, key, value, mask=masks.causal, engine="dense")
    assert actual[0, 3, :9].isfinite().all() and not actual[0, 3, 9:, 2].isfinite().any()
    torch.testing.assert_close(actual, want, equal_nan=True)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", range(3))
def test_a_masked_number_spoils_no_gradient_of_the_weights(at, number):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    mask = torch.rand(5, 6) < 0.6
    mask[:, 2] = torch.tensor([True, False, False, True, False])
    arrays = [-torch.rand(1, 2, n, 4, dtype=torch.float64) for n in (5, 6, 6)]
    arrays[at][0, 1, 2, 3] = number
    result = []
    for engine in (None, "dense"):
        inputs = [x.clone().requires_grad_() for x in arrays]
        out, alpha = qkv.attend(*inputs, mask=mask, engine=engine, return_weights=True)
        loss = out.sum() + alpha.square().sum()
        result.append([out, alpha, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*result, equal_nan=True)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=str)
@pytest.mark.parametrize("n", [3, 16, 190])
def test_weights_of_keys_that_were_copied_for_the_product(n, mask, mkl, learned, monkeypatch):
    torch = pytest.importorskip("torch")
    from qkv.frameworks import torch as adapter

    monkeypatch.setattr(adapter, "HAS_MKL", mkl)
    chance = torch.Generator().manual_seed(n)
    packed = torch.randn(2, n, 9, 4, generator=chance, dtype=torch.float64).transpose(1, 2)
    inputs = [x.requires_grad_(learned) for x in packed.split(3, 1)]
    for _ in range(2):  # the second by the plan of the first
        for returned in (True, "mean"):
            got = qkv.attend(*inputs, mask=mask, return_weights=returned)
            want = qkv.attend(*inputs, mask=mask, return_weights=returned, engine="dense")
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_mask_without_arrays_is_cached(n):
    """Under inference mode first: the cached mask must serve gradients too."""
    torch = pytest.importorskip("torch")
    rule = masks.global_tokens(2) | masks.window(3)
    inputs = [torch.randn(2, 2, size, 8) for size in (n, 40, 40)]
    with torch.inference_mode():
        first = qkv.attend(*inputs, mask=rule)
    learned = [x.clone().requires_grad_() for x in inputs]
    out = qkv.attend(*learned, mask=rule)
    out.sum().backward()
    want = qkv.attend(*inputs, mask=rule, engine="dense")
    for x in (first, out.detach()):
        torch.testing.assert_close(x, want)
    inputs[1][..., 20, :] = torch.nan
    actual, want = (qkv.attend(*inputs, mask=rule, engine=x) for x in (None, "dense"))
    torch.testing.assert_close(actual, want, equal_nan=True)


def test_short_masked_calls_are_not_split():
    """Sixteen calls of the kernel take longer than one that computes the masked pairs too."""
    torch = pytest.importorskip("torch")
    inputs = [torch.zeros(1, 1, 1024, 64)] * 3
    rule = masks.causal & masks.array(torch.ones(1, 1, 1, 1024, dtype=torch.bool))
    assert "queries at a time" not in qkv.explain(*inputs, mask=rule).detail
    many = [torch.zeros(1, 16, 1024, 64)] * 3
    assert "64 queries at a time" in qkv.explain(*many, mask=rule).detail


def dense_output(q, k, v, live):
    torch = pytest.importorskip("torch")
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~live, -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("n", [4, 40, 520])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_that_follow_from_a_signature_are_cached(n, dtype):
    """The mask of a function is built once; another closure, layout or tensor gives another."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    shapes = (2, 4, n, 16), (2, 2, 520, 16), (2, 2, 520, 16)
    inputs = [torch.randn(*shape).to(getattr(torch, dtype)) for shape in shapes]
    i, j = torch.arange(n)[:, None], torch.arange(520)
    at, moved = torch.zeros(1, dtype=torch.int64), [0]
    layouts = np.random.default_rng(0).random((2, 11, 11)) > 0.4

    def reads_tensor(b, h, q, k):
        return (q + k + at[0]) % 3 != 1

    def is_random(b, h, q, k):
        return torch.rand(n, 520) > 0.5

    def reads_list(b, h, q, k):
        return (q + k + moved[0] + h) % 3 != 1

    for step in range(3):
        at[0], moved[0] = step, step
        heads = torch.arange(4)[:, None, None]
        layout, thirds = layouts[step % 2], (i + j + step + heads) % 3 != 1
        for mask, live in (
            (masks.custom(reads_tensor), (i + j + step) % 3 != 1),
            (masks.custom(reads_list), thirds),
            (masks.custom(reads_list) & masks.causal, thirds & (j <= i)),
            (masks.blocks(layout, 50), torch.tensor(layout)[i // 50, j // 50]),
        ):
            for _ in range(2):
                got = qkv.attend(*inputs, mask=mask)
                want = dense_output(*inputs, live)
                tolerance = 2e-5 if dtype == "float32" else 3e-2
                torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)
    first, second = (qkv.attend(*inputs, mask=masks.custom(is_random)) for _ in range(2))
    assert not torch.equal(first, second), "a mask of random numbers is new in each call"


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", [None, "causal", "boolean"])
def test_shared_heads_and_16_bits_run_the_kernel_directly(heads, dtype, mask):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 24, 16).to(getattr(torch, dtype)) for h in (4, heads, heads)]
    live = torch.rand(24, 24) > 0.3
    live[:, 0] = True
    seen = {"causal": torch.ones(24, 24).tril().bool(), "boolean": live}.get(mask, live | True)
    given = live if mask == "boolean" else mask
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    for _ in range(2):
        got = qkv.attend(*inputs, mask=given)
        assert got.dtype == inputs[0].dtype
        want = dense_output(*inputs, seen)
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)
    for place in (1, 2):
        spoiled = [x.clone() for x in inputs]
        spoiled[place][0, 0, 7] = torch.nan
        got = qkv.attend(*spoiled, mask=given)
        shown = got.isnan().any(-1)
        assert (shown[0, : 4 // heads] == seen[:, 7]).all() and not shown[1].any()
        assert not shown[0, 4 // heads :].any()


@pytest.mark.parametrize(
    ("heads", "n", "m", "width", "dtype", "learns", "expected"),
    [
        ((64, 32, 8), 1, 4096, 128, "bfloat16", True, True),
        ((64, 32, 8), 1, 4096, 128, "bfloat16", False, False),  # the output alone
        ((64, 32, 8), 1, 4096, 128, "float32", False, True),
        ((4, 32, 8), 1, 512, 128, "bfloat16", True, False),  # too small
        ((64, 32, 8), 17, 4096, 128, "bfloat16", True, False),  # more than one tile
        ((16, 32, 32), 1, 4096, 128, "bfloat16", True, False),  # no shared keys
        ((256, 12, 12), 128, 128, 64, "float16", True, True),
        ((256, 12, 12), 128, 128, 128, "float16", True, False),
        ((64, 12, 12), 64, 64, 64, "float16", True, False),
    ],
)
def test_few_queries_that_our_kernels_take(heads, n, m, width, dtype, learns, expected):
    torch = pytest.importorskip("torch")
    from qkv.engines.native import sdpa
    from qkv.engines.validation import build_call

    b, h, few = heads
    shapes = (b, h, n, width), (b, few, m, width), (b, few, m, width)
    number = torch.zeros((), dtype=getattr(torch, dtype))  # expanded, and never read
    arrays = [number.expand(x).requires_grad_(learns) for x in shapes]
    call = build_call(*arrays, "scaled_dot", "softmax", None)
    assert sdpa._is_faster_in_one_pass(call) == expected
