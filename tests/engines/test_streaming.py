"""Blocks and cores: few queries among many keys, and many queries, shared out among threads."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.attention import build_call
from qkv.engines import streaming
from qkv.frameworks import threads, to_numpy
from tests.cases import WEIGHTINGS
from tests.installed_frameworks import FRAMEWORKS

EAGER = [fw for fw in FRAMEWORKS if fw.name in ("numpy", "torch", "array_api_strict")]


def arrays(n: int, m: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n * m)
    return [rng.normal(size=(rows, 4)) for rows in (n, m, m)]


@pytest.mark.parametrize("fw", EAGER, ids=lambda fw: fw.name)
@pytest.mark.parametrize("weighting", [w for w, k in WEIGHTINGS.items() if not k.needs_nonnegative])
def test_few_queries_among_many_keys(fw, weighting, monkeypatch):
    """The keys are shared out, whatever the weighting; the states are merged in their order."""
    monkeypatch.setattr(streaming, "MAX_KEY_NUMBERS_PER_READ", 1)
    monkeypatch.setattr(threads, "CORE_COUNT", 3)
    inputs = arrays(3, 2600)
    inputs[1][2000] = inputs[1][100]  # a tie, far apart
    tiling = streaming.build_tiling(
        build_call(*inputs, "dot", "softmax", None, 0.0, None, None), 3, 512
    )
    assert len(tiling) == 1 and len(tiling[0][1]) > 3
    resolved_weighting = WEIGHTINGS[weighting]
    want = qkv.attend(*inputs, weighting=resolved_weighting, engine="dense")
    got = qkv.attend(
        *(fw.make_array(x) for x in inputs), weighting=resolved_weighting, engine="streaming"
    )
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-10)


@pytest.mark.parametrize("fw", EAGER, ids=lambda fw: fw.name)
def test_many_queries_in_threads(fw, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (16, 64))
    inputs = arrays(200, 130)
    want = qkv.attend(*inputs, mask=qkv.masks.causal, engine="dense")
    for _ in range(3):
        got = qkv.attend(
            *(fw.make_array(x) for x in inputs), mask=qkv.masks.causal, engine="streaming"
        )
        np.testing.assert_allclose(to_numpy(got), want, atol=1e-12)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (16, 64))

    def late(query, key):
        if float(query[0, 0]) == 7.0:
            raise RuntimeError("from a thread")
        return query @ key.T

    q, k, v = arrays(64, 64)
    q[48] = 7.0
    with pytest.raises(RuntimeError, match="from a thread"):
        qkv.attend(q, k, v, score=late, engine="streaming")


@pytest.mark.parametrize("fw", EAGER, ids=lambda fw: fw.name)
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2])
@pytest.mark.parametrize("m", [100, 512, 700])
def test_rows_searched_in_one_go(fw, alpha, m, monkeypatch):
    """Entmax from the few scores that may count; rows of large scores, and of one key."""
    monkeypatch.setattr(threads, "CORE_COUNT", 3)
    monkeypatch.setattr(streaming, "MAX_SEARCHED_NUMBERS_PER_BLOCK", 2**13)
    inputs = arrays(64, m)
    inputs[0][3] *= 1e15
    inputs[1][-1] *= 9.0  # the largest of many rows stands last, beyond the last whole SOME
    inputs[1][5] = 20 * inputs[0][9]
    inputs[2][5] = np.nan  # a value that counts for some rows, the ninth among them, not for all
    options = {"weighting": qkv.weightings.Entmax(alpha), "score": "dot"}
    for mask in (None, np.arange(m) < np.arange(64)[:, None]):
        want = qkv.attend(*inputs, **options, mask=mask, engine="dense")
        assert 0 < np.isnan(want).any(-1).sum() < 64
        mask = None if mask is None else fw.make_array(mask)
        got = qkv.attend(
            *(fw.make_array(x) for x in inputs), **options, mask=mask, engine="streaming"
        )
        np.testing.assert_allclose(to_numpy(got), want, atol=1e-10)


def test_a_dense_row_has_the_root_of_all_its_scores():
    """Σ max(0, (α − 1) s − τ)^e = 1 by bisection, against weights computed in parts."""
    rng = np.random.default_rng(1)
    for alpha in (1.25, 1.5, 2):
        s = rng.normal(size=(40, 1000)) * (alpha - 1)
        low, high = s.max(-1, keepdims=True) - 1, s.max(-1, keepdims=True)
        for _ in range(80):
            middle = (low + high) / 2
            enough = np.sum(np.maximum(s - middle, 0) ** (1 / (alpha - 1)), -1, keepdims=True) >= 1
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        want = np.maximum(s - low, 0) ** (1 / (alpha - 1))
        got = qkv.weightings.Entmax(alpha)(s / (alpha - 1))
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_a_score_that_is_kept_by_its_owner_is_not_overwritten():
    q, k, v = arrays(600, 600)
    table = q @ k.T
    before = table.copy()
    for weighting in ("softmax", "sparsemax", "entmax15"):
        qkv.attend(
            q, k, v, score=lambda q, k: table[: len(q), : len(k)], weighting=weighting,
            engine="streaming",
        )  # fmt: skip
        np.testing.assert_array_equal(table, before)


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_blocks_that_are_searched_are_shared_out_and_not_too_small(cores, monkeypatch):
    monkeypatch.setattr(threads, "CORE_COUNT", cores)
    call = build_call(*arrays(2048, 2048), "dot", "sparsemax", None, 0.0, None, None)
    rows, cols = streaming.block_size(call)
    assert cols == 2048 and 64 <= rows <= 512


@pytest.mark.parametrize("options", [
    {"score": qkv.scores.Modified("dot", lambda s, b, h, q, k: s - abs(q - k))},
    {"mask": qkv.masks.custom(lambda b, h, q, k: q >= k)},
])  # fmt: skip
def test_functions_of_the_caller_under_torch_func(options):
    torch = pytest.importorskip("torch")
    inputs = [torch.from_numpy(x) for x in arrays(3, 4)]

    def loss(query, engine="streaming"):
        return qkv.attend(query, *inputs[1:], engine=engine, **options).square().sum()

    many = torch.stack([inputs[0], inputs[0] + 1])
    got = torch.func.vmap(torch.func.grad(loss))(many)
    want = [torch.func.grad(lambda x: loss(x, "dense"))(x) for x in many]
    torch.testing.assert_close(got, torch.stack(want))
    tangent = torch.func.jvp(loss, (inputs[0],), (many[1],))[1]
    torch.testing.assert_close(tangent, (want[0] * many[1]).sum())


@pytest.mark.parametrize("places", ["qqv", "qvv", "qqq"])
@pytest.mark.parametrize("mode", ["save_on_cpu", "checkpoint"])
def test_one_tensor_in_several_places_whose_copies_are_kept(mode, places):
    """Tensors saved for backward return as new tensors, which are still one leaf."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
    make = torch.Generator().manual_seed(0)
    leaf = {x: torch.randn(2, 5, 4, generator=make, dtype=torch.float64) for x in "qv"}
    inputs = [leaf[x].requires_grad_() for x in places]
    at = [leaf[x] for x in dict.fromkeys(places)]

    def attended(*args, engine="streaming"):
        return qkv.attend(*args, weighting="entmax15", engine=engine)

    want = torch.autograd.grad(attended(*inputs, engine="dense").square().sum(), at)
    if mode == "checkpoint":
        out = checkpoint(attended, *inputs, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            out = attended(*inputs)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), at), want)


@pytest.mark.parametrize("n", [5, 600])
def test_a_hook_on_a_tensor_sees_its_gradient_once(n):
    torch = pytest.importorskip("torch")
    make = torch.Generator().manual_seed(0)
    shapes = (2, n, 4), (2, n + 2, 4), (2, n + 2, 3), (4, 4)
    inputs = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
    *arrays, w = (x.requires_grad_() for x in inputs)

    def slopes(engine):
        out = qkv.attend(*arrays, score=qkv.scores.Multiplicative(w), engine=engine)
        return torch.autograd.grad(out.square().sum(), inputs)

    want = slopes("dense")
    for x in inputs:
        x.register_hook(lambda slope: slope * 2)
    torch.testing.assert_close(slopes("streaming"), tuple(2 * slope for slope in want))


def test_a_tensor_that_is_the_query_and_inside_the_score():
    torch = pytest.importorskip("torch")
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, generator=make, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()

    def slope(engine):
        options = {"score": lambda a, b: a @ b.mT + a @ q[0, 0, :, None], "weighting": "sigmoid"}
        return torch.autograd.grad(qkv.attend(q, k, v, **options, engine=engine).square().sum(), q)

    torch.testing.assert_close(slope("streaming"), slope("dense"))


def _hooked(x, score):
    x.register_hook(lambda slope: slope.clamp(min=-0.25))
    return lambda q, k: score(q, k, x)


CAPTURES = {
    "a leaf": lambda torch, w: lambda q, k: (q * w) @ k.mT,
    "what was made of one": lambda torch, w: _hooked(2 * w, lambda q, k, x: (q * x) @ k.mT),
    "among others": lambda torch, w: lambda q, k: torch.stack([w * q, w * w * q]).sum(0) @ k.mT,
    "in a map": lambda torch, w: lambda q, k: torch.vmap(lambda row: row * w)(q) @ k.mT,
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("weights", [False, True])
def test_a_hook_on_what_a_function_holds_sees_its_gradient_once(capture, weights, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("qkv.engines.weights.MAX_SCORES_PER_BLOCK", 64)
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 4, generator=make, dtype=torch.float64) for _ in range(3))
    w = torch.randn(4, generator=make, dtype=torch.float64).requires_grad_()
    w.register_hook(lambda slope: slope.clamp(max=0.25))

    def slopes(engine):
        score = CAPTURES[capture](torch, w)
        options = {"return_weights": True} if weights and engine != "dense" else {}
        out = qkv.attend(q, k, v, score=score, **options, engine=None if options else engine)
        out = out[0] if options else out
        (slope,) = torch.autograd.grad(out.square().sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), w, retain_graph=True)
        (plain,) = torch.autograd.grad(out.square().sum(), w, retain_graph=True)
        return slope, second, plain

    monkeypatch.setattr("qkv.engines.streaming.MAX_NUMBERS_PER_BLOCK", 2**8)
    torch.testing.assert_close(slopes("streaming"), slopes("dense"))


def test_a_function_of_torchs_own_that_holds_a_tensor():
    """No mode sees what a torch.autograd.Function is given: its gradient is found all the same."""
    torch = pytest.importorskip("torch")
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 4, generator=make, dtype=torch.float64) for _ in range(3))
    w = torch.randn(4, generator=make, dtype=torch.float64).requires_grad_()

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, slope):
            x, y = ctx.saved_tensors
            return slope * y, (slope * x).sum_to_size(y.shape)

    def slopes(engine):
        out = qkv.attend(
            q, k, v, score=lambda q, k: Times.apply(q, Times.apply(w, w)) @ k.mT, engine=engine
        )
        return torch.autograd.grad(out.square().sum(), w)

    torch.testing.assert_close(slopes("streaming"), slopes("dense"))


def test_the_tiling_of_a_rule_is_that_of_its_number_of_keys():
    """Tilings are cached: calls that differ in the number of keys alone have their own."""
    for m in (40, 56, 40):
        query, key, value = arrays(8, m)
        call = build_call(query, key, value, "dot", "softmax", qkv.masks.causal("bottom_right"))
        tiling = streaming.build_tiling(call, 8, 16)
        assert [keys[-1].start + keys[-1].size for _, keys in tiling] == [m]


@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_a_gpu_computes_few_hidden_units_densely(weighting, monkeypatch):
    """Their range, which the kernels need, takes the host longer."""
    torch = pytest.importorskip("torch")
    from qkv import scores
    from qkv.frameworks import load_framework

    device = type(load_framework("torch"))
    monkeypatch.setattr(device, "device_block_numbers", lambda self, like: 2**28)
    additive = scores.Additive(torch.ones(8, 4), torch.ones(8, 4), torch.ones(8))
    score = scores.Modified(additive, lambda s, b, h, i, j: s - abs(i - j))

    def reason(n):
        x = torch.zeros(1).expand(256, n, 4)
        call = build_call(x, x, x, score, weighting, None, 0.0, None, None)
        return streaming.slower_reason(call)

    assert "dense" in reason(64)
    assert reason(2048) is None
