"""Calls made again by their launches alone: the same numbers as the equation gives."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton")

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import plan_cache, triton
from qkv.engines import weights as weights_engine
from qkv.engines.triton import nan_repair, norms, weights
from qkv.engines.triton.additive import (
    additive,
    additive_exact,
    additive_features,
    additive_projection,
)
from qkv.engines.triton.backward import (
    backward,
    backward_few_queries,
    backward_keys,
    backward_queries,
    wide_gradients,
)
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import (
    joined_arrays,
    kernel_call,
    launch,
    launch_replay,
    precompile,
    workspace,
)
from qkv.engines.triton.sparse import best_value, thresholds
from qkv.engines.triton.tile_functions import score_tile
from qkv.engines.triton.tile_functions.records import Arrays
from qkv.errors import EngineError
from tests.engines.triton import formulas

pytestmark = [
    pytest.mark.sample_of_module(5),
    pytest.mark.skipif(not triton.is_interpreted(), reason="launches are stood in for"),
]


class Compiled:
    """Stands for a compiled kernel: takes places in memory as its launcher does, and interprets."""

    function = packed_metadata = None
    metadata = SimpleNamespace(global_scratch_size=384, num_ctas=1)

    def __init__(self, kernel, inputs, options):
        self.kernel, self.options = kernel, options
        self.dtypes = [dtypes_of(x) for x in inputs]
        self.records = [type(x) if isinstance(x, tuple) else None for x in inputs]

    def run(self, x, y, z, stream, function, metadata, a, b, c, *args):
        *args, known = args
        arrays = [
            at if dtype is None else _tensor(at, dtype)
            for at, dtype in zip(args, self.dtypes, strict=True)
        ]
        pairs = zip(arrays, self.records, strict=True)
        arrays = [x if record is None else record(*x) for x, record in pairs]
        self.kernel[(x, y, z)](*arrays, F=known, **self.options)


def dtypes_of(x):
    """None for what is no array; of a tuple, those of its members."""
    if isinstance(x, tuple):
        return [dtypes_of(y) for y in x]
    return x if isinstance(x, torch.dtype) else getattr(x, "dtype", None)


def _tensor(at, dtype):
    """Its first bytes: the interpreter looks at no length. An empty array lies nowhere."""
    if isinstance(at, tuple):
        return [y if x is None else _tensor(y, x) for y, x in zip(at, dtype, strict=True)]
    if not at:
        return torch.empty(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * 16).from_address(at), dtype=dtype)


class Kernel:
    """A kernel of Triton's, interpreted."""

    params = ()

    def __init__(self, kernel):
        self.kernel, self.__name__ = kernel, kernel.__name__

    def warmup(self, *args, grid, F, num_warps, num_stages, enable_fp_fusion, maxnreg=None):
        return Compiled(self.kernel, args, {"num_warps": num_warps, "num_stages": num_stages})


@pytest.fixture
def counted(monkeypatch):
    """Kernels that are launched as compiled ones are; how often the launches were repeated."""
    for module, name in (
        (forward, "pool_kernel"), (nan_repair, "repair_kernel"), (norms, "_square_kernel"),
        (thresholds, "entmax_kernel"), (thresholds, "topk_kernel"), (forward, "merge_kernel"),
        (thresholds, "best_kernel"), (best_value, "take_kernel"), (best_value, "scatter_kernel"),
        (additive_projection, "_projection_kernel"),
        (additive_projection, "_projection_backward_kernel"),
        (additive_features, "_fit_kernel"), (additive_features, "_features_kernel"),
        (additive_exact, "prepare_kernel"), (additive_exact, "finish_kernel"),
        (additive_exact, "fold_kernel"), (score_tile, "centre_kernel"),
        (additive_features, "_features_grad_kernel"), (backward_keys, "backward_keys_kernel"),
        (backward_queries, "backward_queries_kernel"),
        (backward_few_queries, "backward_few_queries_kernel"),
        (backward_few_queries, "join_parts_kernel"),
        (norms, "_square_backward_kernel"), (weights, "weights_kernel"),
        (wide_gradients, "clear_kernel"), (joined_arrays, "copy_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Kernel(getattr(module, name)))
    monkeypatch.setattr(launch, "COMPILED_KERNELS", {})
    monkeypatch.setattr(launch_replay, "LAUNCH_LISTS", launch_replay.LaunchListCache())
    for name in ("PLANS_BY_SIGNATURE", "_PLANS_BY_SIZE_CLASS"):
        monkeypatch.setattr(plan_cache, name, {})
    monkeypatch.setattr(precompile, "compile_all_missing", lambda known: None)
    monkeypatch.setattr(
        additive_projection, "PROGRAMS_PER_SIDE", 2
    )  # programs, which are interpreted one by one
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "count_processors", lambda device: 1)
    monkeypatch.setattr(launch, "is_current_device", lambda device: True)
    monkeypatch.setattr(launch, "current_stream", lambda index: None)
    facts = kernel_call._base_constexprs.__wrapped__
    monkeypatch.setattr(
        kernel_call, "_base_constexprs", lambda *args: facts(*args) | {"FAST": False}
    )
    count, again = [], launch_replay.LaunchList.replay

    def counting(steps, *args):
        out = again(steps, *args)
        count.append(out is not None)
        return out

    monkeypatch.setattr(launch_replay.LaunchList, "replay", counting)
    return count


def arrays_of(seed, n=20, m=24, few=2, dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(seed)
    shapes = ((1, 2, n, 16), (1, few, m, 16), (1, few, m, 8))
    return [torch.randn(x, generator=made).to(dtype) for x in shapes]


def check(arrays, atol=2e-2, **options):
    got = qkv.attend(*arrays, engine="triton", **options)
    few = arrays[1].shape[1]
    wide = (arrays[0].double(), *(x.double().repeat_interleave(2 // few, 1) for x in arrays[1:]))
    want = qkv.attend(*wide, engine="dense", **options)
    assert got.dtype == arrays[0].dtype
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=atol)


CASES = {
    "gaussian": {"score": scores.Gaussian(1.5)},
    "cool gaussian": {"score": "gaussian", "weighting": weightings.Softmax(4.0)},
    "entmax": {"weighting": "entmax15"},
    "gaussian entmax": {"score": scores.Gaussian(2.0), "weighting": weightings.Entmax(1.3)},
    "sparsemax": {"weighting": "sparsemax"},
    "top-k": {"weighting": weightings.TopK(3)},
    "sigmoid": {"weighting": "sigmoid", "score": "dot"},
    "causal": {"score": scores.Gaussian(1.5), "mask": masks.causal},
    "window": {"weighting": "entmax15", "mask": masks.window(3, 2, align="bottom_right")},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "few"), [*((x, 2) for x in CASES), ("gaussian", 1), ("window", 1)]
)
def test_other_numbers_by_the_same_launches(counted, name, few):
    for seed in range(3):
        check(arrays_of(seed, few=few), **CASES[name])
    assert counted == [True] * 2


def build_masked(name, seed, n=20, m=24):
    """Return a call's options with a mask or a function whose numbers depend on the seed."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (m,), generator=made).sort()[0]
    table = torch.randn(n + m, generator=made)

    def add_distance(s, b, h, i, j):
        return s + table[j - i + n].to(s.dtype)

    def is_near(b, h, i, j):
        return (j - i).abs() <= ids[j] + 4

    slopes = torch.rand(2, generator=made)

    def add_scaled_distance(s, b, h, i, j):
        return s + slopes[h] * table[j - i + n].to(s.dtype)

    own = torch.randint(0, 3, (n,), generator=made).sort()[0]
    relative = scores.Modified(scores.ScaledDot(), add_distance)
    return {
        "documents of queries": lambda: {"mask": masks.documents(own, ids)},
        "two tables": lambda: {"score": scores.Modified(scores.ScaledDot(), add_scaled_distance)},
        "boolean": lambda: {"mask": torch.rand(1, 1, 1, m, generator=made) < 0.6},
        "float": lambda: {"mask": torch.randn(2, n, m, generator=made).bfloat16()},
        "lengths": lambda: {"mask": masks.lengths(torch.tensor([m - 3 * seed]))},
        "packed": lambda: {"mask": masks.packed(*map(torch.tensor, ([0, seed, n], [0, 4, m])))},
        "documents": lambda: {"mask": masks.documents(ids[:n], ids) & masks.causal},
        "blocks": lambda: {
            "mask": masks.blocks(torch.rand(5, 6, generator=made) < 0.6, 4) & masks.window(9, 9)
        },
        "mask_mod": lambda: {"mask": masks.custom(is_near), "weighting": "entmax15"},
        "score_mod": lambda: {"score": relative, "mask": "causal"},
        "both": lambda: {"score": relative, "mask": masks.custom(is_near)},
        "gaussian": lambda: {"score": scores.Modified(scores.Gaussian(2.0), add_distance)},
    }[name]()


MASKED = (
    "boolean", "float", "lengths", "documents", "blocks", "mask_mod", "score_mod", "both",
    "gaussian", "documents of queries", "two tables", "packed",
)  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_masks_and_functions_of_other_numbers_by_the_same_launches(counted, name):
    for seed in range(4):
        arrays = arrays_of(seed)
        options = build_masked(name, seed)
        wide = [x.double() for x in arrays]
        got = qkv.attend(*arrays, engine="triton", **options)
        want = qkv.attend(*wide, engine="dense", **options)
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
    assert counted[-1:] == [True], counted


LEARNED = {
    "plain": {"weighting": "sigmoid", "score": "dot"},
    "entmax": {"weighting": "entmax15"},
    "top-k": {"weighting": weightings.TopK(3), "mask": "causal"},
    "hard": {"weighting": "hard", "mask": "causal"},
}


@pytest.mark.parametrize("name", [*MASKED, *LEARNED])
def test_gradients_of_other_numbers_by_the_same_launches(counted, name):
    for seed in range(4):
        arrays = [x.requires_grad_() for x in arrays_of(seed)]
        wide = [x.detach().double().requires_grad_() for x in arrays]
        options = LEARNED.get(name) or build_masked(name, seed)
        got = qkv.attend(*arrays, engine="triton", **options)
        along = torch.randn(got.shape).bfloat16()
        want = qkv.attend(*wide, engine="dense", **options)
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
        found = torch.autograd.grad(got, arrays, along)
        expected = torch.autograd.grad(want, wide, along.double())
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, atol=6e-2, rtol=6e-2)
    assert counted[-2:] == [True] * 2, counted


def test_gradients_of_some_arrays_and_of_strided_ones(counted):
    for needed in ((0,), (1,), (2,), (0, 2), (1,), (0,)):
        arrays = [x.requires_grad_(i in needed) for i, x in enumerate(arrays_of(len(needed)))]
        wide = [x.detach().double().requires_grad_(i in needed) for i, x in enumerate(arrays)]
        got = qkv.attend(*arrays, mask="causal", weighting="entmax15", engine="triton")
        want = qkv.attend(*wide, mask="causal", weighting="entmax15", engine="dense")
        # The sum's gradient is one number, expanded.
        found = torch.autograd.grad(got.sum(), [arrays[i] for i in needed])
        expected = torch.autograd.grad(want.sum(), [wide[i] for i in needed])
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, atol=6e-2, rtol=6e-2)


def test_a_second_derivative_of_a_replayed_gradient_is_an_error(counted):
    q, k, v = (x.requires_grad_() for x in arrays_of(1))
    for _ in range(2):
        out = qkv.attend(q, k, v, mask=masks.lengths(torch.tensor([20])), engine="triton")
        (gradient,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        with pytest.raises(EngineError, match="second derivatives"):
            torch.autograd.grad(gradient.sum(), q)


SAVED = {
    "plain": {"mask": masks.lengths(torch.tensor([20]))},
    "gaussian": {"score": scores.Gaussian(2.0), "mask": masks.lengths(torch.tensor([20]))},
    "learned scale": {
        "score": scores.ScaledDot(torch.full((2, 1, 1), 0.3, requires_grad=True)),
        "weighting": "hard",
    },
}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_saves_the_same_arrays_in_the_first_call(counted, name):
    for seed in range(2):
        q, k, v = (x.requires_grad_() for x in arrays_of(seed, dtype=torch.float32))

        def run(q, k, v):
            return qkv.attend(q, k, v, **SAVED[name], engine="triton")

        out = torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)
        found, want = (
            torch.autograd.grad(x.sum(), (q, k, v), materialize_grads=True)
            for x in (out, run(q, k, v))
        )
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("change", ["other array", "same array", "longer"])
def test_a_captured_tensor_that_is_replaced(counted, change):
    q, k, v = arrays_of(1)
    table = torch.linspace(-1, 1, 24)
    for _ in range(3):
        held = {
            "other array": lambda: torch.randn(24),
            "same array": lambda: table.mul_(-1),
            "longer": lambda: torch.randn(24 + torch.randint(0, 9, ()).item()),
        }[change]()

        def score_mod(s, b, h, i, j, held=held):
            return s + held[j].to(s.dtype)

        score = scores.Modified(scores.Dot(), score_mod)
        got = qkv.attend(q, k, v, score=score, engine="triton")
        want = qkv.attend(*(x.double() for x in (q, k, v)), score=score, engine="dense")
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


class Settings:
    """Settings of a user, as attributes of a class and of an object."""

    slope = 0.0


MODULE = ModuleType("users_settings")


HOLDERS = {"class": Settings, "object": Settings(), "module": MODULE}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_function_that_reads_an_attribute(counted, holder):
    def score_mod(s, b, h, i, j):
        return s - (i - j).abs() * holder.slope

    q, k, v = arrays_of(1)
    for slope in (0.1, 0.5, 0.1):
        holder.slope = slope
        score = scores.Modified(scores.Dot(), score_mod)
        got = qkv.attend(q, k, v, score=score, engine="triton")
        want = qkv.attend(*(x.double() for x in (q, k, v)), score=score, engine="dense")
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def test_other_lengths_have_launches_of_their_own(counted):
    """Though they have one plan: their numbers of binary digits are equal."""
    options = CASES["causal"] | {"mask": masks.window(5, 0, align="bottom_right")}
    for n, m in ((20, 24), (20, 31), (17, 24)):
        for seed in range(3):
            check(arrays_of(seed, n, m), **options)
        assert counted and all(counted)
        counted.clear()


def test_other_lengths_of_the_same_strides(counted):
    for n, m in ((20, 24), (17, 24), (20, 21)) * 3:
        q, k, v = arrays_of(n)
        check((q[:, :, :n], k[:, :, :m], v[:, :, :m]), weighting="entmax15")
    assert counted and all(counted)


def test_other_bandwidths_and_scales(counted):
    for width in (0.5, 2.0) * 3:
        check(arrays_of(1), score=scores.Gaussian(width))
        check(arrays_of(2), score=scores.ScaledDot(width / 4), weighting="entmax15")
    assert counted and all(counted)


def test_strides_and_places(counted):
    """Heads side by side, gaps, one array thrice, and arrays that begin at no multiple of 16."""
    for seed in range(3):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays_of(seed))
        check((q, k, v), weighting="entmax15")
        check((q, k, v), score="gaussian")
        wide = torch.empty(1, 2, 24, 32, dtype=k.dtype)[..., :16].copy_(k)
        check((q, wide, v), score="gaussian", mask=masks.causal)
    assert counted == [True] * 6
    counted.clear()
    for seed in range(3):
        x = arrays_of(seed)[0]
        check((x, x, x), weighting="entmax15")
        check([*arrays_of(seed, m=20)[:2], arrays_of(seed + 1)[0]], weighting="entmax15")
    assert counted and all(counted)
    counted.clear()
    for seed in range(5):
        q, k, v = arrays_of(seed, m=20)
        odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
        check((q if seed < 3 else odd, k, v), weighting="entmax15")
    assert counted == [True, True, False, False]


def test_descriptors_are_in_the_workspace(counted, monkeypatch):
    """Triton asks for their memory at each launch, and another's must not be given ours."""
    from triton.runtime import _allocation

    allocations, buffers, run, new_empty = [], [], Compiled.run, torch.Tensor.new_empty

    def asking(self, x, y, z, stream, *args):
        give = _allocation._allocator.get()
        allocations.append(
            give if give is launch._allocate_scratch else give(384 * x * y * z, 128, stream)
        )
        run(self, x, y, z, stream, *args)

    def noted(like, *shape, **options):
        buffers.append(new_empty(like, *shape, **options))
        return buffers[-1]

    monkeypatch.setattr(Compiled, "run", asking)
    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    for seed in range(2):
        allocations.clear(), buffers.clear()
        qkv.attend(*arrays_of(seed), weighting="entmax15", engine="triton")
        if not seed:
            assert allocations[0] is launch._allocate_scratch
    _, buffer, *_ = buffers  # after the output; the interpreter allocates some too
    first, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    assert counted == [True]
    assert 0 <= allocations[0] - first <= size - 384 * 2 and (allocations[0] - first) % 128 == 0
    assert allocations[1] == allocations[0], "of which one is over when the next begins"
    assert _allocation._allocator.get() is launch._allocate_scratch


def test_split_keys_and_what_joins_them(counted, monkeypatch):
    monkeypatch.setattr(launch, "count_processors", lambda device: 64)
    monkeypatch.setattr(launch, "MIN_ROWS_PER_PART", 16)
    for seed in range(4):
        check(arrays_of(seed, 4, 600), score="gaussian")
    assert counted == [True] * 3


def additive_of(seed, h=8, reach=1.0, dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(100 + seed)
    shapes = ((h, 16), (h, 16), (h,), (h,))
    arrays = [
        torch.randn(x, generator=made) * y
        for x, y in zip(shapes, (reach / 4, reach / 4, 0.25, 0.25), strict=True)
    ]
    return scores.Additive(*[x.to(dtype) for x in arrays])


def wide(score):
    inputs = (score.w_query, score.w_key, score.v, score.bias)
    return scores.Additive(*[x if x is None else x.double() for x in inputs])


def check_additive(arrays, score, **options):
    before = [x.clone() for x in arrays]
    got = qkv.attend(*arrays, score=score, engine="triton", **options)
    want = qkv.attend(*(x.double() for x in before), score=wide(score), engine="dense", **options)
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
    return got, want


@pytest.mark.sample(1)
@pytest.mark.parametrize(("h", "options"), [(8, {}), (20, {"mask": masks.window(5, 2)})])
def test_additive_calls_by_the_same_launches(counted, options, h):
    """Within the table and beyond it, in any order: which it is, is known to the kernels alone."""
    held = []
    for seed, reach in enumerate((1, 1, 6, 1)):
        held.append(check_additive(arrays_of(seed, 16, 32), additive_of(seed, h, reach), **options))
    assert counted == [True] * 3
    for got, want in held:  # no result overlaps another's buffer
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def test_additive_calls_of_other_strides_and_places(counted):
    """Two weights that are one array; and after them what is copied first, rows and weights."""
    for seed in range(3):
        score, (q, k, v) = additive_of(seed), arrays_of(seed, 16, 16)
        check_additive((q, k, v), score)
        check_additive((q, k, v), replace(score, w_key=score.w_query))
    assert counted == [True] * 4
    counted.clear()
    for _ in range(2):
        check_additive((q, k, v), replace(score, w_query=score.w_query.T.contiguous().T))
        thin = torch.stack([score.bias, -score.bias], 1)[:, 0]
        check_additive((q, k, v), replace(score, bias=thin))
        check_additive((q.mT.contiguous().mT, k, v), score)
    assert all(counted), "never as a whole, but what follows a copy"


def test_additive_calls_with_gradients_and_odd_lengths(counted):
    for seed in range(2):
        score, (q, k, v) = additive_of(seed), arrays_of(seed, 16, 32)
        check_additive((q, k[:, :, :21], v[:, :, :21]), score)
        learned = replace(score, v=score.v.clone().requires_grad_())
        got = qkv.attend(q, k, v, score=learned, engine="triton")
        assert got.requires_grad
        with torch.no_grad():
            again = qkv.attend(q, k, v, score=learned, engine="triton")
        torch.testing.assert_close(got, again, atol=2e-2, rtol=2e-2)
    assert counted and all(counted)


def test_additive_calls_with_their_backward(counted):
    """While results of earlier ones are held; the last is beyond the table."""
    held = []
    for seed, reach in enumerate((1, 1, 1, 4)):
        score, arrays = additive_of(seed, reach=reach), arrays_of(seed, 16, 32)
        inputs = [*arrays, score.w_query, score.w_key, score.v, score.bias]
        along = torch.randn(1, 2, 16, 8)
        got = way_back(inputs, along.to(torch.bfloat16), "triton")
        want = way_back([x.double() for x in inputs], along.to(torch.bfloat16).double(), "dense")
        held.append((got, want))
        for got, want in held:
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x.double(), y, atol=4e-2, rtol=4e-2)
    assert counted == [True] * 12, "hidden and the rest, there and back, thrice"


def test_backward_in_pieces_is_one_repeat(counted, monkeypatch):
    monkeypatch.setattr(additive, "MAX_FEATURE_BYTES", 1)
    monkeypatch.setattr(triton, "TANH_FUNCTION_PAIRS", 2)  # of which the interpreter is sooner done
    monkeypatch.setattr(triton, "_TABLE_CACHE", {})
    for seed in range(2):
        score = additive_of(seed, h=4)
        inputs = [torch.cat([x[:, :1], -x[:, 1:]]) for x in arrays_of(seed, 8, 16)]
        inputs += [score.w_query, score.w_key, score.v, score.bias]
        along = torch.randn(2, 1, 8, 8).to(torch.bfloat16)
        got = way_back(inputs, along, "triton")
        want = way_back([x.double() for x in inputs], along.double(), "dense")
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.double(), y, atol=4e-2, rtol=4e-2)
    assert counted == [True] * 4


@pytest.mark.parametrize(("least", "known"), [(0, True), (2, False)])
def test_successive_launches_share_one_workspace(counted, least, known):
    """Unless a result lies there, which may be smaller."""

    @launch_replay.replay_launches
    def squares(x):
        for i in workspace.reuse_buffers(range(3)):
            part = workspace.slice_recorded(x, slice(i, i + 1))
            lines = backward.compute_centre(part, None, part)[..., None]
            backward.compute_centre(lines, None, lines)
        for start in (0, 32):  # parts of a line, side by side in one of the two buffers
            view = workspace.slice_recorded(x, (slice(2, 3), slice(0, 1), slice(start, start + 32)))
            backward.compute_centre(view, None, view)
        x = workspace.slice_recorded(x, slice(least, 3))
        return backward.compute_centre(x, None, x)

    for seed in range(2):
        x = torch.cat([arrays_of(seed + i, 64)[0] for i in range(3)]).float()
        torch.testing.assert_close(squares(x), x[least:].square().sum(-1))
    assert counted == [True] * known
    for steps in launch_replay.LAUNCH_LISTS.values():
        assert len(steps.launches) == 9 and len(steps.offsets) == 2
        assert any(by == 128 for _, by in steps.slices)


def test_overlapping_slices_are_distinguished_from_others(counted):
    @launch_replay.replay_launches
    def each(x, y):
        return backward.compute_centre(
            workspace.slice_recorded(x, slice(1, 2)), None, workspace.slice_recorded(y, slice(0, 1))
        )

    x, y = (torch.cat([z[:, :1], z[:, 1:]]) for z in arrays_of(0, 16, 16)[:2])
    for other in (x[1:], y, y, x[1:], y):
        want = (x[1:2].float() * other[:1].float()).sum(-1)
        torch.testing.assert_close(each(x, other), want, atol=1e-5, rtol=1e-5)
    assert counted == [True] * 2, "those of y alone"


def way_back(inputs, along, engine):
    """The output, and the gradients of all arrays."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = qkv.attend(*leaves[:3], score=scores.Additive(*leaves[3:]), engine=engine)
    return [out.detach(), *torch.autograd.grad(out, leaves, along)]


WAYS = {
    "gaussian": {"score": scores.Gaussian(2.0)},
    "window": {"weighting": "sigmoid", "score": "dot", "mask": masks.window(4)},
    "their mean": {"return_weights": "mean", "mask": masks.causal},
}


@pytest.mark.parametrize("name", WAYS)
def test_backward_by_the_same_launches(counted, name, monkeypatch):
    """While gradients of earlier ones are held."""
    monkeypatch.setattr(weights_engine, "_run_from_lse", by_kernels)
    held = []
    for seed in range(2):
        arrays = arrays_of(seed)
        got = slopes_of(arrays, **WAYS[name])
        held.append((got, slopes_of([x.double() for x in arrays], **WAYS[name])))
    for got, want in held:
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.double(), y, atol=4e-2, rtol=4e-2)
    assert len(counted) >= 2 and all(counted), "there and back"


def by_kernels(call):
    """As on CUDA."""
    mean = call.wants_weights == "mean"
    return triton.run_with_weights(replace(call, wants_weights=None), mean)


def slopes_of(arrays, **options):
    leaves = [x.detach().requires_grad_() for x in arrays]
    engine = "dense" if arrays[0].dtype == torch.float64 else "triton"
    if "return_weights" in options:
        engine = None
    result = qkv.attend(*leaves, engine=engine, **options)
    result = result if isinstance(result, tuple) else (result,)
    return torch.autograd.grad(sum((x * x.detach()).sum() for x in result), leaves)


def test_arrays_of_other_strides_have_launches_of_their_own(counted):
    """Launches hold the strides: the same shapes in another layout are read in another order."""
    for seed in range(2):
        arrays = arrays_of(seed)
        heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
        want = slopes_of([x.double() for x in arrays], **WAYS["window"])
        for inputs in (arrays, heads_inside):
            for x, y in zip(slopes_of(inputs, **WAYS["window"]), want, strict=True):
                torch.testing.assert_close(x.double(), y, atol=4e-2, rtol=4e-2)
    assert counted and all(counted), "the second of each layout"


def test_a_gradient_with_a_destination_uses_no_workspace():
    query, key, value = arrays_of(0)
    with workspace.record_launches() as notes:
        grads = backward._allocate_gradients(
            Arrays(query, key, value), True, True, False, dvalue=value
        )
    assert [x.shape for x in notes.buffers] == [query.shape, key.shape] and grads.value is value


def test_a_launch_that_has_one_array(counted):
    @launch_replay.replay_launches
    def nothing(x):
        return wide_gradients.fill_zeros(workspace.allocate_buffer(x, x.shape, x.dtype))

    for seed in range(2):
        assert (nothing(arrays_of(seed)[0]) == 0).all()
    assert counted == [True]


def test_what_torch_makes_is_not_noted_twice(counted):
    """Notes hold all that a call had until it ends: 8 MiB more of entmax over long rows."""
    notes = []

    @launch_replay.replay_launches
    def inner(x):
        notes.append(workspace.CURRENT_RECORDING.get())
        return backward.compute_centre(x + 1, None, x)

    for seed in range(3):
        x = arrays_of(seed)[0]
        torch.testing.assert_close(inner(x), ((x + 1).float() * x.float()).sum(-1))
    assert notes[0] is not None and notes[1:] == [None] * 2 and not counted


def test_a_result_that_torch_made_is_made_anew(counted):
    """No launch fills it, and in inference mode torch does not count what it wrote."""

    @launch_replay.replay_launches
    def both(x):
        filled = workspace.allocate_buffer(x, x.shape[:1])
        return backward.compute_centre(x, None, x), filled.copy_(x.float().sum((1, 2, 3)))

    with torch.inference_mode():
        for seed in range(4):
            x = arrays_of(seed)[0]
            inner, total = both(x)
            torch.testing.assert_close(inner, x.float().square().sum(-1))
            torch.testing.assert_close(total, x.float().sum((1, 2, 3)))
    assert not any(counted)


def test_a_transform_sees_the_operators(counted):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **kwargs or {})

    for seed in range(3):
        check(arrays_of(seed), weighting="entmax15")
    with Seen() as seen:
        qkv.attend(*arrays_of(4), weighting="entmax15", engine="triton")
    assert counted == [True] * 2 and "qkv.attend_forward.default" in seen.names


def test_what_it_leaves_to_the_operators():
    q, k, v = arrays_of(0)
    direct = lambda *arrays, score="gaussian", mask=None: triton.build_direct_runner(  # noqa: E731
        build_call(*arrays, score, "softmax", mask, 0.0, None, None)
    )
    assert direct(q, k, v) is not None and direct(q, k, v, mask=masks.causal) is not None
    assert direct(q.clone().requires_grad_(), k, v) is None
    assert direct(q[0], k[0], v[0]) is None
    assert direct(q, k[:, :1], v) is None
    assert direct(q, k, v[..., :0]) is None
    assert direct(q, k, v, score="cosine") is None
    assert direct(q, k, v, score=scores.Gaussian(torch.tensor(1.0, dtype=q.dtype))) is None
    assert direct(q, k, v, mask=masks.lengths([3])) is None


def test_repair_keeps_nothing(counted):
    """Two heads, of which one has a value that the rows before it must not see."""
    for seed in range(4):
        q, k, v = arrays_of(seed, 20, 20, dtype=torch.float32)
        v[0, 1, 12, 3] = torch.nan
        want, _ = formulas.attend(q, k, v, scale=0.25, upper=0)
        out = torch.where(torch.isnan(v).any((2, 3))[..., None, None], torch.nan, want)
        nan_repair.repair_in_place(out, q, k, v, 0.25)
        torch.testing.assert_close(out, want, equal_nan=True)
        assert torch.isfinite(out[0, 1, :12]).all()


@pytest.mark.parametrize("learned", [False, True])
def test_relative_scores_of_other_numbers(counted, learned):
    """Its arrays are fields, and reach the kernels as captured tensors of a score_mod."""
    for seed in range(3):
        arrays = arrays_of(seed)
        table = torch.randn(2, 9, requires_grad=learned)
        for bias in (table, scores.Alibi(table[:, 0]), lambda distance, head: -abs(distance)):
            score = scores.Relative(bias, align="bottom_right")
            got = qkv.attend(*arrays, score=score, engine="triton")
            want = qkv.attend(*(x.float() for x in arrays), score=score, engine="dense")
            torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=3e-2)
    assert counted[-1:] == [True], counted


def test_buckets_of_other_numbers(counted):
    """The table of distances that the kernels read is computed from the numbers of the buckets."""
    for seed in range(3):
        arrays = arrays_of(seed)
        score = scores.Relative(scores.T5Bias(torch.randn(2, 8), max_distance=9))
        got = qkv.attend(*arrays, score=score, engine="triton")
        want = qkv.attend(*(x.float() for x in arrays), score=score, engine="dense")
        torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=3e-2)
    assert counted[-1:] == [True], counted
