"""Tensors that are not plain memory of a CPU's, and devices that are not where the numbers are."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import FrameworkError
from qkv.frameworks import is_array, to_numpy
from qkv.frameworks.int8 import Int8Queries
from qkv.frameworks.torch import is_finite

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.sample_of_module(14)

KINDS = {
    "native": {},
    "causal": {"mask": "causal"},
    "searched": {"score": "gaussian", "weighting": "entmax15"},
    "chosen": {"score": "dot", "weighting": weightings.TopK(2), "mask": "causal"},
    "hard": {"score": "laplace", "weighting": "hard"},
}


@pytest.fixture(name="arrays")
def random_arrays():
    chance = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)
    return [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]


class Wrapped(torch.Tensor):
    """Numbers that another tensor holds, as in DTensor and in quantized weights."""

    @staticmethod
    def __new__(cls, inner):
        options = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map

        def opened(x):
            return x.inner if isinstance(x, Wrapped) else x

        result = function(*tree_map(opened, args), **tree_map(opened, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_wrap_others(arrays, kind):
    want = qkv.attend(*arrays, **KINDS[kind])
    for inputs in ([Wrapped(x) for x in arrays], [arrays[0], *map(Wrapped, arrays[1:])]):
        actual = qkv.attend(*inputs, **KINDS[kind])
        torch.testing.assert_close(actual.inner, want)


def test_tensors_that_several_processes_hold():
    """Values and gradients where torch has rules for what is done, else a next step."""
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    x, along = torch.randn(2, 2, 5, 4, dtype=torch.float64), torch.randn(2, 2, 5, 4).double()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for options in ({}, {"score": "gaussian"}, {"weighting": "sigmoid"}):
            plain = x.clone().requires_grad_()
            sharded = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            actual = qkv.attend(sharded, sharded, sharded, **options).full_tensor()
            want = qkv.attend(plain, plain, plain, **options)
            torch.testing.assert_close(actual, want)
            for out in (actual, want):
                (out * along).sum().backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
        for options in (
            {"weighting": "entmax15"},
            {"mask": "causal"},
            {"dropout_p": 0.5, "seed": 1},
        ):
            with pytest.raises(FrameworkError, match=r"DTensors.*to_local\(\)"):
                qkv.attend(sharded, sharded, sharded, **options)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_views_that_are_negated(arrays, kind):
    minus = [torch.complex(x * 0, x).conj().imag for x in arrays]
    assert all(x.is_neg() for x in minus)
    want = qkv.attend(*(-x for x in arrays), **KINDS[kind])
    torch.testing.assert_close(qkv.attend(*minus, **KINDS[kind]), want)
    assert (to_numpy(minus[0]) == -arrays[0].numpy()).all()


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_block_of_numbers_is_refused_by_name(layout):
    parts = [torch.zeros(3, 4), torch.zeros(5, 4)]
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    for call in (lambda: qkv.explain(nested, nested, nested), lambda: qkv.weights(nested, nested)):
        with pytest.raises(FrameworkError, match=r"query is a nested.*masks\.lengths"):
            call()
    sparse = parts[0].to_sparse()
    with pytest.raises(FrameworkError, match=r"key has layout.*to_dense\(\)"):
        qkv.attend(parts[0], sparse, sparse)
    with pytest.raises(FrameworkError, match=r"array of the score .*to_dense\(\)"):
        qkv.attend(*parts, parts[1], score=scores.Multiplicative(torch.eye(4).to_sparse()))


def test_a_default_device_is_not_where_the_numbers_are(arrays):
    with torch.device("meta"):
        result = [qkv.attend(*arrays, dropout_p=0.5)]
        for seed in (1, None):
            result.append(qkv.attend(*arrays, score="gaussian", dropout_p=0.5, seed=seed))
    assert all(x.is_cpu and x.isfinite().all() for x in result)


@pytest.mark.parametrize("count", [1, 3])
def test_a_default_device_is_not_where_the_codes_are(count):
    chance = np.random.default_rng(0)
    vectors, codes = chance.normal(size=(count, 8)), chance.integers(-9, 9, (40, 8), np.int8)
    with torch.device("meta"):
        result = Int8Queries(vectors).inner_products(codes)
    np.testing.assert_allclose(result, vectors @ codes.T, atol=1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda convert: masks.lengths(convert([3, 5])),
        lambda convert: masks.causal(offset=convert([1, 2])),
        lambda convert: masks.documents(convert([0, 0, 1, 1, 1]), convert([0, 0, 0, 1, 1, 1])),
    ],
    ids=["lengths", "offset", "documents"],
)
@pytest.mark.parametrize("mode", ["tensor", "compiled"])
def test_numbers_of_a_mask_go_to_the_device_of_the_query(arrays, make, mode):
    convert = torch.tensor if mode == "tensor" else list
    far = [x.to("meta") for x in arrays]

    def call(*arrays):
        return qkv.attend(*arrays, mask=make(convert))

    function = torch.compile(call, backend="eager") if mode == "compiled" else call
    assert function(*far).is_meta


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)], ids=str)
def test_products_of_short_matrices(lead, mkl, monkeypatch):
    """x yᵀ as it is and by a copy, with derivatives of both orders, for one y and for many."""
    from qkv.frameworks import torch as adapter

    monkeypatch.setattr(adapter, "HAS_MKL", mkl)
    inner, chance = adapter.FRAMEWORK.inner_products, np.random.default_rng(0)
    x, y = (chance.normal(size=(*shape, 2)) for shape in ((2, 3, 12), (*lead, 3)))
    inputs = [torch.as_tensor(part) for part in (x, y)]
    np.testing.assert_allclose(inner(*inputs), x @ y.swapaxes(-1, -2), atol=1e-12)
    one, other = (part.clone().requires_grad_() for part in inputs)
    for pair in ((one, other), (one, inputs[1]), (inputs[0], other)):
        np.testing.assert_allclose(inner(*pair).detach(), x @ y.swapaxes(-1, -2), atol=1e-12)
        assert torch.autograd.gradcheck(inner, pair)
    assert torch.autograd.gradgradcheck(inner, (one[:1, :1], other[..., :1, :]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_is_mapped_inside_a_graph_of_any_length(randomness):
    def drop(x):
        return qkv.attend(x, x, torch.eye(x.shape[-2]), score="laplace", dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.vmap(drop, randomness=randomness)(x), backend="eager", fullgraph=True
    )
    torch.manual_seed(0)
    for n in (8, 13, 15):
        x = torch.randn(n, 3)
        result, alpha = compiled(x.expand(2, n, 3)), qkv.weights(x, x, score="laplace")
        live = result != 0
        torch.testing.assert_close(result[live], (2 * alpha).expand_as(result)[live])
        assert 0.3 < live.float().mean() < 0.7
        assert torch.equal(*live) == (randomness == "same")


def test_a_constant_is_copied_to_a_device_once_and_forgotten_with_its_array():
    from qkv.frameworks import load_framework
    from qkv.frameworks import torch as adapter

    class OnDevice:
        is_cuda, device = True, torch.device("meta")

    host = np.ones((2, 3), dtype=bool)
    before = len(adapter._DEVICE_COPIES)
    first = load_framework("torch").cached_constant(host, OnDevice(), "bool")
    assert load_framework("torch").cached_constant(host, OnDevice(), "bool") is first
    assert first.shape == (2, 3) and len(adapter._DEVICE_COPIES) == before + 1
    del host
    assert len(adapter._DEVICE_COPIES) == before


class DataDependent(torch.nn.Module):
    """Attention over as many keys as the data say, under a mask of that size."""

    def __init__(self, options, by_item, floats):
        super().__init__()
        self.options, self.by_item, self.floats = options, by_item, floats

    def forward(self, query, key, live):
        if self.by_item:
            size = live.sum().item()
            torch._check(size >= 2)
            torch._check(size <= key.shape[-2])
            key = key.narrow(2, 0, size)
        else:
            at = live.nonzero()[:, 0]
            size = at.shape[0]
            torch._check(size >= 2)
            key = key[:, :, at]
        mask = (torch.arange(size)[None] != 1).expand(query.shape[-2], size)
        mask = torch.where(mask, 0.0, -torch.inf) if self.floats else mask
        return qkv.attend(query, key, key, mask=mask, **self.options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("by_item", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"weighting": "entmax15"}, {"weighting": "sigmoid"}, {"score": "gaussian"}],
    ids=str,
)
def test_a_mask_whose_size_the_data_decide_is_exported(options, by_item, floats):
    model = DataDependent(options, by_item, floats)
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4)
    made = torch.export.export(model, (query, key, torch.tensor([1, 1, 1, 1, 1, 0, 0]))).module()
    for live in ([1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]):
        inputs = query, key, torch.tensor(live)
        torch.testing.assert_close(made(*inputs), model(*inputs))


def test_a_batch_whose_size_the_data_decide_is_exported():
    class Model(torch.nn.Module):
        def forward(self, x, live):
            x = x[live.nonzero()[:, 0]]
            return qkv.scaled_dot_product_attention(x, x, x)

    x, model = torch.randn(4, 2, 5, 3), Model()
    made = torch.export.export(model, (x, torch.tensor([1, 0, 1, 1]))).module()
    for live in ([1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]):
        torch.testing.assert_close(made(x, torch.tensor(live)), model(x, torch.tensor(live)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3,), (7, 65), (2, 3, 129, 64)], ids=str)
def test_is_finite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 100).to(dtype)
    assert is_finite(x, torch.empty(0, 3, dtype=dtype))
    for number in (float("nan"), float("inf"), -float("inf")):
        for at in (0, x.numel() // 2, -1):
            changed = x.clone()
            changed.view(-1)[at] = number
            assert not is_finite(x, changed)


def test_sums_of_float16_do_not_overflow() -> None:
    assert is_finite(torch.full((4096, 64), 300, dtype=torch.float16))


def test_a_generator_seen_before_does_not_stop_the_compiler():
    """torch.compile reads the table of known types, and cannot compare torch.Generator."""
    query, key, value = (torch.randn(2, 6, 3) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    qkv.attend(query, key, value, dropout_p=0.1, seed=generator)
    assert not is_array(generator)

    def attend(*arrays):
        return qkv.attend(*arrays, score=scores.Gaussian(0.5))

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, value), attend(query, key, value))


@pytest.mark.parametrize("masked", ["no mask", "causal", "bool", "float"])
def test_sdpa_drops_the_weights_that_pytorch_drops(masked):
    query, key, value = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    options = {
        "no mask": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(6, 6) > 0.5},
        "float": {"attn_mask": torch.randn(6, 6)},
    }[masked]
    if masked == "bool":
        options["attn_mask"][2] = False  # a row without keys is 0
    found = []
    for function in (
        qkv.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        torch.manual_seed(0)
        out = function(query, key, value, dropout_p=0.4, **options)
        found.append((out, *torch.autograd.grad(out.sum(), (query, key, value))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert masked != "bool" or not found[0][0][:, :, 2].any()
    first, second = (
        qkv.scaled_dot_product_attention(query, key, value, dropout_p=0.4, seed=1, **options)
        for _ in range(2)
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("learns", [False, True])
def test_no_value_is_read_while_a_cuda_graph_records(learns, monkeypatch):
    """The search of a learned alpha then takes a fixed number of steps."""
    query, key, value = (torch.randn(6, 4, requires_grad=learns) for _ in "qkv")
    alpha = torch.tensor(1.4, requires_grad=learns)

    def attend():
        out = qkv.attend(query, key, value, weighting=weightings.Entmax(alpha), engine="dense")
        inputs = (query, key, value, alpha)
        return out, *(torch.autograd.grad(out.sum(), inputs) if learns else ())

    want = attend()
    monkeypatch.setattr("qkv.frameworks.torch._is_captured", lambda x: True)

    def refuse(_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.Tensor, "__bool__", refuse)
    got = attend()
    monkeypatch.undo()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
