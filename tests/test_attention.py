"""The public functions: a call goes in, down to an engine, and out again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import attention, masks, scores, weightings
from qkv.errors import ArgumentError, CombinationError, DtypeError, FrameworkError, ShapeError
from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS

SOURCE = Path(attention.__file__)
X = np.random.default_rng(0).normal(size=(2, 5, 3))
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"mask": masks.causal & masks.window(2)},
    "gaussian": {"score": "gaussian"},
    "function": {"score": lambda q, k: scores.Dot()(q, k)},
    **{name: {"weighting": name} for name in ("hard", "entmax15", "sigmoid")},
    "straight through": {"weighting": weightings.Hard(straight_through=True)},
    **{
        f"or {on_empty}": {
            "score": scores.Boxcar(0.5),
            "weighting": weightings.Normalized(on_empty),
        }
        for on_empty in ("zero", "nan", "uniform", "nearest")
    },
}


def climbs(function: Any, *args: Any, **options: Any) -> list[str]:
    """Functions of attention.py that something below it has called."""
    below = SOURCE.parent / "engines"
    stack, result = [], []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path == SOURCE and any(below in x.parents for x in stack):
                result.append(frame.f_code.co_qualname)
            stack.append(path)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(watch)
    try:
        function(*args, **options)
    finally:
        sys.setprofile(None)
    return result


@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("options", HOWS.values(), ids=HOWS)
def test_a_call_goes_down_and_does_not_come_back_up(options, engine):
    assert not climbs(qkv.attend, X, X, X, **options, engine=engine, return_weights=True)
    if engine is None:
        assert not climbs(qkv.weights, X, X, **options)


# torch's own function, whose signature ours has


def torchs(*shapes: tuple[int, ...]) -> tuple[Any, list[Any]]:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return torch, [x.requires_grad_() for x in arrays]


@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_torchs_causal_biases(name: str, n: int, m: int) -> None:
    torch, inputs = torchs((2, 3, n, 4), (2, 3, m, 4), (2, 3, m, 5))
    bias = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(n, m)
    result = []
    for function in (
        qkv.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        out = function(*inputs, bias)
        result.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(*result, atol=1e-12, rtol=0)
    with pytest.raises(ShapeError, match=rf"attn_mask .*{n + 1} queries and {m} keys"):
        qkv.scaled_dot_product_attention(*inputs, type(bias)(bias.variant, n + 1, m))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_turns_the_order_round_under_a_mask(scale: float) -> None:
    torch, inputs = torchs((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 5))
    live = torch.ones(5, 7).tril().bool()
    scores = (inputs[0] @ inputs[1].mT * scale).masked_fill(~live, -torch.inf)
    want = torch.softmax(scores, -1) @ inputs[2]
    for options in ({"is_causal": True}, {"attn_mask": live}):
        for x in (inputs, [x.detach() for x in inputs]):
            actual = qkv.scaled_dot_product_attention(*x, scale=scale, **options)
            torch.testing.assert_close(actual.detach(), want.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_a_mask_together_with_is_causal_is_an_error_as_in_torch(fw: Any) -> None:
    x = fw.make_array(np.ones((1, 2, 3, 4)))
    for mask in (np.ones((3, 3), bool), np.zeros((3, 3))):
        with pytest.raises(CombinationError, match=r"Explicit attn_mask should not") as error:
            qkv.scaled_dot_product_attention(x, x, x, fw.make_array(mask), is_causal=True)
        assert isinstance(error.value, RuntimeError)  # as PyTorch's, and a ValueError


def test_a_causal_bias_of_torch_together_with_is_causal_is_an_error() -> None:
    _, inputs = torchs((1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2))
    bias = pytest.importorskip("torch.nn.attention.bias").causal_upper_left(4, 4)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        qkv.scaled_dot_product_attention(*inputs, bias, is_causal=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
def test_it_may_stand_in_the_place_of_torchs(options: dict[str, Any], monkeypatch: Any) -> None:
    torch, inputs = torchs((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    torch.manual_seed(0)
    want = [qkv.scaled_dot_product_attention(*inputs, **options) for _ in range(2)]
    patched = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, patched, qkv.scaled_dot_product_attention)
    torch.manual_seed(0)
    actual = [
        torch.nn.functional.scaled_dot_product_attention(*inputs, **options) for _ in range(2)
    ]
    torch.testing.assert_close(actual, want, atol=0, rtol=0)
    slopes = torch.autograd.grad(actual[0].sum(), inputs)
    torch.testing.assert_close(slopes, torch.autograd.grad(want[0].sum(), inputs))


# Arrays on another device than the query


def misplaced() -> dict[str, dict[str, Any]]:
    torch = pytest.importorskip("torch")
    far = torch.ones(4, 4, device="meta")
    return {
        "mask is": {"mask": far > 0},
        "mask": {"mask": far},
        "mask i": {"mask": masks.causal & (far > 0)},
        "key": {"key": torch.ones(2, 4, 4, device="meta")},
        "value": {"value": torch.ones(2, 4, 4, device="meta")},
        "of the score": {"score": scores.Multiplicative(far)},
        r"array \(\) of the score": {"score": scores.Gaussian(far[0, 0])},
        "of the weighting": {"weighting": weightings.Entmax(far[0, 0] + 0.5)},
    }


@pytest.mark.parametrize("entry_point", ["attend", "weights", "explain", "warm"])
def test_an_array_on_another_device_is_named(entry_point: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 4, 4)
    near = torch.ones(4, 4)
    for mask in (near > 0, near):  # the choice for masks on the query's device is cached
        qkv.attend(x, x, x, mask=mask)
    function = getattr(qkv, entry_point)
    for reported, options in misplaced().items():
        inputs = {"query": x, "key": x, "value": x} | options
        if entry_point == "weights" and inputs.pop("value") is not x:
            continue
        arrays = [inputs.pop(name) for name in ("query", "key", "value") if name in inputs]
        result = rf"query is on cpu but .*{reported}.* on meta: .*\.to\(query\.device\)"
        for _ in range(2):
            with pytest.raises(ArgumentError, match=result):
                function(*arrays, **inputs)


def test_a_mask_of_sdpa_on_another_device_is_named() -> None:
    torch = pytest.importorskip("torch")
    x, far = torch.randn(1, 2, 4, 4), torch.ones(4, 4, device="meta")
    for mask in (far, far > 0):
        with pytest.raises(ArgumentError, match=r"attn_mask is on meta: pass attn_mask\.to"):
            qkv.scaled_dot_product_attention(x, x, x, mask)


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_torch(layout: str, options: dict[str, Any], heads: int | None) -> None:
    lead = () if heads is None else (heads,)
    rows, keys = (4, 1, 6), (4, 3, 2) if not options.get("is_causal") else (4, 1, 6)
    shapes = [
        [(*size, *lead, d) for size in zip(sizes)] for sizes, d in ((rows, 4), (keys, 4), (keys, 5))
    ]
    torch, leaves = torchs(*(shape for kind in shapes for shape in kind))

    def nested(at: int) -> Any:
        x = torch.nested.as_nested_tensor(
            leaves[3 * at : 3 * at + 3], layout=getattr(torch, layout)
        )
        return x if heads is None else x.transpose(1, 2)

    q, k, v = map(nested, range(3))
    out = qkv.scaled_dot_product_attention(q, k, v, **options)
    assert out.is_nested and out.layout == q.layout
    parts = [x if heads is None else x.transpose(0, 1) for x in leaves]
    want = [
        torch.nn.functional.scaled_dot_product_attention(*parts[i::3], **options) for i in range(3)
    ]
    torch.testing.assert_close(list(out.unbind()), want, atol=1e-12, rtol=0)
    slopes = [
        torch.autograd.grad(sum(x.square().sum() for x in actual), leaves)
        for actual in (out.unbind(), want)
    ]
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=0)
    if layout == "jagged":  # a residual can be added
        assert (out.sum(-1, keepdim=True) + q).shape == q.shape


NESTED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": "causal", "weighting": "entmax15"},
    {"mask": masks.window(1), "score": "gaussian"},
    {"score": scores.Decay(0.3), "mask": "causal"},
    {"score": scores.Modified("dot", lambda s, b, h, q, k: s + 0.1 * q)},
]


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.parametrize("options", NESTED_OPTIONS, ids=str)
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_nested_tensors(
    layout: str, options: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, others = (4, 1, 6), ((4, 1, 6) if "mask" in options else (3, 2, 7))
    torch, leaves = torchs(*((2, n, 4) for n in sizes), *((2, n, 4) for n in others * 2))
    kind = getattr(torch, layout)
    q, k, v = (
        torch.nested.as_nested_tensor(
            [x.transpose(0, 1) for x in leaves[3 * i : 3 * i + 3]], layout=kind
        ).transpose(1, 2)
        for i in range(3)
    )
    packed = []
    if packs:  # as on a GPU
        fw = type(get_framework(leaves[0]))
        monkeypatch.setattr(fw, "device_block_numbers", lambda self, like: 2**26)
        original = masks.packed
        monkeypatch.setattr(masks, "packed", lambda *a, **b: packed.append(1) or original(*a, **b))
    out = qkv.attend(q, k, v, **options)
    assert out.is_nested and out.layout == q.layout
    depends_on_position = any(
        isinstance(x, scores.Modified | type(masks.window(1))) for x in options.values()
    )
    assert bool(packed) == (packs and not depends_on_position)
    monkeypatch.undo()
    want = [qkv.attend(*leaves[i::3], **options, engine="dense") for i in range(3)]
    torch.testing.assert_close(list(out.unbind()), want, atol=1e-12, rtol=0)
    slopes = [
        torch.autograd.grad(sum(x.square().sum() for x in actual), leaves)
        for actual in (out.unbind(), want)
    ]
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_mean_nothing() -> None:
    torch, (x, y) = torchs((2, 3), (4, 3))
    q = torch.nested.as_nested_tensor([x, y], layout=torch.jagged)
    with pytest.raises(FrameworkError, match="but key is not: pass key as a nested tensor"):
        qkv.scaled_dot_product_attention(q, y, y)
    with pytest.raises(CombinationError, match="attn_mask"):
        qkv.scaled_dot_product_attention(q, q, q, torch.ones(4, 4).bool())
    for mask in (torch.ones(4, 4), np.ones((4, 4), bool), masks.lengths([2, 4])):
        with pytest.raises(CombinationError, match="array in mask"):
            qkv.attend(q, q, q, mask=mask)
    with pytest.raises(CombinationError, match="return_lse"):
        qkv.attend(q, q, q, return_lse=True)
    with pytest.raises(FrameworkError, match="value is not"):
        qkv.attend(q, q, y)
    few = torch.nested.as_nested_tensor([x], layout=torch.jagged)
    with pytest.raises(ShapeError, match=r"2 sequences.*key has 1"):
        qkv.scaled_dot_product_attention(q, few, few)


@pytest.mark.parametrize("function", [qkv.attend, qkv.explain, qkv.warm], ids=lambda x: x.__name__)
def test_an_error_for_a_misspelt_argument_names_the_function_called(function):
    x = np.ones((2, 3))
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}\(\) got an unexpected .* 'wieghting'"
    ):
        function(x, x, x, wieghting="sigmoid")


@pytest.mark.parametrize("function", [qkv.explain, qkv.warm], ids=lambda x: x.__name__)
def test_the_nearest_argument_is_named(function):
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=r"'wieghting': did you mean 'weighting'\? Known: .*mask"):
        function(x, x, x, wieghting="sigmoid")


BEYOND: list[dict[str, Any]] = [
    {"score": scores.Gaussian(1e-200)},
    {"score": scores.Gaussian(1e-310), "weighting": "sparsemax"},
    {"score": scores.Gaussian(1e-160), "mask": "causal", "return_weights": True},
    {"score": scores.Laplace(1e-310), "return_lse": True},
    {"weighting": weightings.Softmax(1e-310)},
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", BEYOND, ids=lambda options: str(options)[:40])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_scores_that_float64_does_not_hold_are_reported(library, options, dtype):
    inputs = [*np.random.default_rng(0).normal(size=(3, 3, 4)).astype(dtype)]
    if library == "torch":
        inputs = [pytest.importorskip("torch").tensor(x) for x in inputs]
    with pytest.raises(ArgumentError, match=r"overflow float64 .*use a larger bandwidth"):
        qkv.attend(*inputs, **options)


def test_a_bandwidth_of_any_size_suits_keys_of_that_size():
    query, key, value = np.random.default_rng(0).normal(size=(3, 5, 4))
    want = qkv.attend(query, key, value, score="gaussian")
    actual = qkv.attend(query * 2.0**-700, key * 2.0**-700, value, score=scores.Gaussian(2.0**-700))
    np.testing.assert_allclose(actual, want)
    met = qkv.attend(key, key, value, score=scores.Gaussian(1e-300))
    np.testing.assert_array_equal(met, value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entmax_of_the_largest_alpha_is_the_best_key(dtype):
    query, key, value = (x.astype(dtype) for x in np.random.default_rng(0).normal(size=(3, 5, 4)))
    result = qkv.attend(query, key, value, weighting=weightings.Entmax(1e308))
    np.testing.assert_array_equal(result, value[(query @ key.T).argmax(1)])
    tied = qkv.attend(query, key * 0, value, weighting=weightings.Entmax(1e308))
    np.testing.assert_allclose(tied, np.tile(value.mean(0), (5, 1)), rtol=1e-5)


EXTREME: list[dict[str, Any]] = [
    {"score": scores.Gaussian(1e-30)},
    {"score": scores.Laplace(1e-60), "mask": "causal"},
    {"score": scores.ScaledDot(1e60), "return_weights": True},
    {"score": "dot", "weighting": weightings.Softmax(1e-60), "engine": "streaming"},
    {"score": scores.Gaussian(1e-22), "weighting": "sparsemax"},
    {"score": scores.Gaussian(1e30), "weighting": "raw", "engine": "dense"},
    {"score": scores.Gaussian(np.float32(1e-20))},  # type: ignore[arg-type]
]


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("options", EXTREME, ids=str)
def test_numbers_that_float32_does_not_hold(options, fw):
    narrow = X.astype("f4")
    want = qkv.attend(*[narrow.astype("f8")] * 3, **options)
    with np.errstate(all="ignore"):
        actual = qkv.attend(*[fw.make_array(narrow, "float32")] * 3, **options)
    for a, b in zip(*(x if type(x) is tuple else (x,) for x in (actual, want)), strict=True):
        assert to_numpy(a).dtype == np.float32
        np.testing.assert_allclose(to_numpy(a), b, rtol=1e-6, atol=1e-38)


def test_numbers_that_jax_without_float64_does_not_hold():
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        x = jax.numpy.asarray(X, "float32")
        near = qkv.attend(x, x, x, score=scores.Gaussian(1e-12))
        np.testing.assert_allclose(near, x)
        with pytest.raises(DtypeError, match=r"bandwidth=1e-30.* overflow float32.*enable_x64"):
            qkv.attend(x, x, x, score=scores.Gaussian(1e-30))
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("at", range(3))
def test_arrays_on_two_devices(at):
    torch = pytest.importorskip("torch")
    inputs = [torch.ones(2, 3) for _ in range(3)]
    qkv.attend(*inputs)  # so that there is a plan for these shapes
    inputs[at] = inputs[at].to("meta")
    message = ["query is on meta but key on cpu", "cpu but key on meta", "cpu but value on meta"][
        at
    ]
    with pytest.raises(ArgumentError, match=message):
        qkv.attend(*inputs)


@pytest.mark.parametrize(
    "fw", [x for x in FRAMEWORKS if x.name != "array_api_strict"], ids=lambda x: x.name
)
def test_a_function_gets_16_bits_as_float32(fw):
    """On every framework: its sums run in float32, as those of our own scores do."""
    rng, seen = np.random.default_rng(0), []
    q, k, v = (fw.make_array(rng.normal(size=(3, 4)), "float16") for _ in range(3))

    def score(query, key):
        seen.append((get_framework(query).dtype_name(query), get_framework(key).dtype_name(key)))
        return scores.Dot()(query, key)

    out = qkv.attend(q, k, v, score=score)
    assert set(seen) == {("float32", "float32")}
    assert get_framework(out).dtype_name(out) == "float16"
    want = qkv.attend(*(to_numpy(x).astype("float64") for x in (q, k, v)), score="dot")
    np.testing.assert_allclose(to_numpy(out), want, atol=2e-3)
