"""The additive score itself, tile by tile, and its join with the features, against float64."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import TANH_FUNCTION_PAIRS
from qkv.engines.triton.additive import additive, additive_exact
from qkv.engines.triton.additive.additive import attend_additive
from qkv.errors import EngineError
from tests.engines.triton.test_additive_features import DEVICE, GRID, TABLE, WIDEST

INFINITY = float("inf")
# NumPy, which the interpreter runs on, speaks of overflows that are meant.
pytestmark = [
    pytest.mark.sample_of_module(4),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(additive_exact, "TILE_ROWS", 16)


def arrays(b=1, heads=1, few=1, n=21, m=35, h=3, d=5, scale=1.0, dtype=torch.float32):
    torch.manual_seed(n + m + h)
    made = (
        torch.randn(b, heads, n, h) * scale,
        torch.randn(b, few, m, h) * scale,
        torch.randn(h),
        torch.randn(b, few, m, d),
    )
    return [x.to(DEVICE, dtype) for x in made]


def attend_exactly(a, b, v, value, lower=None, upper=None, lengths=None):
    return additive._additive(a, b, v, value, None, None, lower, upper, lengths, None)[:2]


def formula(a, b, v, value, lower=None, upper=None, lengths=None):
    group = a.shape[1] // b.shape[1]
    b, value = b.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    i = torch.arange(a.shape[2], device=DEVICE)[:, None]
    j = torch.arange(b.shape[2], device=DEVICE)[None, :]
    live = torch.ones_like(j - i, dtype=torch.bool)[None, None]
    if lower is not None:
        live = live & (j - i >= lower)
    if upper is not None:
        live = live & (j - i <= upper)
    if lengths is not None:
        live = live & (j < lengths[:, None, None, None])
    seen = live.any(-2)[..., None]  # a key that no query sees may hold anything
    b, value = torch.where(seen, b, 0.0), torch.where(seen, value, 0.0)
    s = (torch.tanh(a[:, :, :, None] + b[:, :, None]) * v).sum(-1)
    s = torch.where(live, s, -INFINITY)
    has_keys = live.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(has_keys, s, 0.0), -1) * live
    lse = torch.where(
        has_keys[..., 0], torch.logsumexp(torch.where(has_keys, s, 0.0), -1), -INFINITY
    )
    return weights @ value, lse


def gradients(run, inputs, *rest, lse_too=True):
    torch.manual_seed(7)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = run(*inputs, *rest)
    loss = (out.double() * torch.randn(out.shape, dtype=torch.float64).to(DEVICE)).sum()
    u = torch.randn(lse.shape, dtype=torch.float64).to(DEVICE)
    if lse_too:
        loss = loss + torch.where(lse == -INFINITY, 0.0, lse.double() * u).sum()
    return out, lse, *torch.autograd.grad(loss, inputs)


def check_gradients(run, inputs, *rest, rtol=2e-5, lse_too=True):
    """Output, log-sum-exp and every gradient, each as far off as its largest number allows."""
    got = gradients(run, inputs, *rest, lse_too=lse_too)
    want = gradients(formula, [x.double() for x in inputs], *rest, lse_too=lse_too)
    for one, two in zip(got, want, strict=True):
        assert torch.equal(torch.isinf(one), torch.isinf(two))
        one, two = (torch.where(torch.isinf(x), 0.0, x.double()) for x in (one, two))
        torch.testing.assert_close(one, two, rtol=0, atol=rtol * max(two.abs().max().item(), 1e-3))


LENGTHS = torch.tensor([29, 0], dtype=torch.int32, device=DEVICE)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("shape", "rest"),
    [
        pytest.param({}, (), id="plain"),
        pytest.param({"heads": 4, "few": 2}, (None, 0, None), id="causal, shared heads"),
        pytest.param({"b": 2}, (None, None, LENGTHS), id="lengths, one of them 0"),
        pytest.param({"b": 2, "heads": 2}, (-6, 4, LENGTHS), id="band, lengths"),
        pytest.param({"n": 40, "m": 20}, (-3, None, None), id="rows beyond the last key"),
        pytest.param({"n": 20, "m": 33}, (18, 30, None), id="a band to the right"),
        pytest.param({"n": 1, "m": 1, "h": 1, "d": 1}, (), id="one of everything"),
        pytest.param({"n": 16, "m": 32, "h": 4, "d": 16}, (), id="whole tiles"),
    ],
)
def test_values_and_gradients(shape, rest):
    check_gradients(attend_exactly, arrays(**shape), *rest)


@pytest.mark.parametrize("scale", [8.0, 60.0])
def test_large_numbers(scale):
    """e²ᵃ overflows at 44: beyond 40 r is computed from the sum, tile by tile."""
    a, b, v, value = arrays(scale=1.0)
    a[:, :, 3] *= scale
    b[:, :, ::2] *= scale
    check_gradients(attend_exactly, [a, b, v, value], None, 2, None)


def test_infinite_numbers_are_saturated():
    a, b, v, value = arrays()
    a[0, 0, 2, 1], b[0, 0, 5, 0] = INFINITY, -INFINITY
    out, _ = attend_exactly(a, b, v, value)
    want, _ = formula(*(x.double() for x in (a, b, v, value)))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_sixteen_bits(dtype, rtol):
    check_gradients(attend_exactly, arrays(dtype=dtype), -9, 9, None, rtol=rtol)


def test_without_a_gradient_of_the_logarithm():
    check_gradients(attend_exactly, arrays(), lse_too=False)


def test_the_gradient_of_the_logarithm_alone():
    inputs = [x.requires_grad_() for x in arrays()]
    exact_given = [x.detach().double().requires_grad_() for x in inputs]
    got = torch.autograd.grad(attend_exactly(*inputs)[1].sum(), inputs)
    want = torch.autograd.grad(formula(*exact_given)[1].sum(), exact_given[:3])
    for one, two in zip(got[:3], want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-5)
    assert not got[3].any()


def test_nothing_comes_from_behind_a_mask():
    """NaN in keys and values that no query may look at, and in a query that may look at nothing."""
    numbers = (-3, 0, torch.tensor([30], dtype=torch.int32, device=DEVICE))
    clean = arrays(n=40)
    spoiled = [x.clone() for x in clean]
    spoiled[1][:, :, 30:], spoiled[3][:, :, 30:] = float("nan"), INFINITY
    spoiled[0][:, :, 34:] = float("nan")
    for one, two in zip(
        gradients(attend_exactly, spoiled, *numbers),
        gradients(attend_exactly, clean, *numbers),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_a_value_that_is_not_finite_spoils_its_readers_alone():
    inputs = arrays()
    inputs[3][0, 0, 10, 2] = INFINITY
    out, _ = attend_exactly(*inputs, None, 0, None)
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[0, 0, 10:, 2] = True
    assert torch.equal(torch.isnan(out), spoiled)


def test_no_queries_and_no_keys():
    out, lse = attend_exactly(*arrays(n=0))
    assert out.shape == (1, 1, 0, 5)
    out, lse, *grads = gradients(attend_exactly, arrays(m=0))
    assert not out.any()
    assert (lse == -INFINITY).all()
    assert not any(x.any() for x in grads)


def test_the_gradient_is_the_same_each_time():
    inputs = arrays(heads=2)
    for one, two in zip(
        *(gradients(attend_exactly, inputs, None, 0, None) for _ in range(2)), strict=True
    ):
        assert torch.equal(one, two)


def attend_joined(a, b, v, value, *rest):
    return attend_additive(a, b, v, value, TABLE, GRID, *rest)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rest", [(), (-9, 4, None)], ids=["plain", "band"])
@pytest.mark.parametrize(
    ("scale", "rtol"),
    [pytest.param(0.6, 2e-2, id="by features"), pytest.param(4.0, 4e-3, id="exactly")],
)
def test_the_join(scale, rtol, rest):
    inputs = arrays(heads=2, dtype=torch.float16, scale=scale, h=4, d=16)
    within = max(x.abs().max() for x in inputs[:2]) <= WIDEST
    assert within == (scale < 1)
    check_gradients(attend_joined, inputs, *rest, rtol=rtol)


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", [0, 1])
def test_the_join_is_exact_where_one_unit_is_beyond_the_table(side):
    inputs = arrays(heads=2, dtype=torch.float16, scale=0.6, h=4, d=16)
    inputs[side][0, 0, 3, 2] = 3 * WIDEST
    for one, two in zip(
        gradients(attend_joined, inputs), gradients(attend_exactly, inputs), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.full
@pytest.mark.parametrize("scale", [0.6, 4.0])
def test_the_join_goes_back_in_pieces(scale, monkeypatch):
    inputs = arrays(b=2, heads=4, few=2, dtype=torch.float16, scale=scale, h=4, d=16)
    want = gradients(attend_joined, inputs, None, 5, LENGTHS)
    a, b = inputs[:2]
    each = 4 * TANH_FUNCTION_PAIRS * 4 * (2 * a.shape[2] + b.shape[2]) * 2
    for held, pieces in {1: 4, 2: 2, 3: 2, 4: 1, 100: 1}.items():
        monkeypatch.setattr(additive, "MAX_FEATURE_BYTES", held * each + 1)
        assert len(additive._split_pieces(a, b, TANH_FUNCTION_PAIRS)) == pieces
        got = gradients(attend_joined, inputs, None, 5, LENGTHS)
        for one, two in zip(got[2:], want[2:], strict=True):
            atol = 0 if scale > 1 else 1e-3 * two.abs().max().item()
            torch.testing.assert_close(one, two, rtol=0, atol=atol)


@pytest.mark.parametrize(("n", "m", "b"), [(0, 3, 1), (3, 0, 1), (3, 3, 0)])
def test_the_join_of_nothing(n, m, b):
    inputs = arrays(b=b, n=n, m=m, h=4, dtype=torch.float16)
    for x in gradients(attend_joined, inputs)[2:]:
        assert not x.any()


def test_the_join_has_no_second_derivative():
    inputs = [x.requires_grad_() for x in arrays(n=3, m=4, h=2, dtype=torch.float16, scale=0.5)]
    (first,) = torch.autograd.grad(attend_joined(*inputs)[0].sum(), inputs[:1], create_graph=True)
    with pytest.raises(EngineError, match="no second derivatives"):
        first.sum().backward()


def test_the_join_takes_float32_exactly():
    inputs = arrays()
    assert torch.equal(attend_joined(*inputs)[0], attend_exactly(*inputs)[0])


def test_the_join_has_a_gradient_of_the_logarithm_alone():
    inputs = [x.requires_grad_() for x in arrays(dtype=torch.float16, scale=0.6)]
    want = [x.detach().double().requires_grad_() for x in inputs]
    got = torch.autograd.grad(attend_joined(*inputs)[1].sum(), inputs[:3])
    for one, two in zip(got, torch.autograd.grad(formula(*want)[1].sum(), want[:3]), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=3e-2 * two.abs().max().item())


def test_the_operators_pass_opcheck():
    inputs = [x.requires_grad_() for x in arrays(n=3, m=4, h=2)]
    torch.library.opcheck(additive._additive.node, (*inputs, None, None, None, 0, None, None))


def test_torch_compile_sees_through():
    inputs = arrays(n=3, m=4, h=2, dtype=torch.float16, scale=0.5)
    compiled = torch.compile(attend_joined, backend="aot_eager", fullgraph=True)
    for one, two in zip(gradients(compiled, inputs), gradients(attend_joined, inputs), strict=True):
        assert torch.equal(one, two)


def test_float32_values_have_tiles_that_triton_compiles_rightly():
    """On an H200, tiles of 16 columns with 8 warps were an illegal memory access."""
    call = additive_exact.ExactKernelCall(*arrays(d=16))
    assert call.constexprs["BLOCK_D"] == 32
