"""The ONNX operator Attention on qkv: onnx's own cases, whole models, and each option by hand."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_cases
import onnx.inliner
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

import qkv.onnx
from qkv.errors import ArgumentError, FrameworkError, QkvError, ShapeError
from qkv.onnx import attention

SOURCE = Path(node_cases.__file__).with_name("attention.py")
# Read, not generated: making the data of every operator takes seconds in each test process.
NAMES = sorted(set(re.findall(r'name="(test_\w+)"', SOURCE.read_text(encoding="utf-8"))))

FLOAT = TensorProto.FLOAT
INPUTS = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
OUTPUTS = ["Y", "present_key", "present_value", "qk_matmul_output"]
KINDS = {
    np.dtype(np.float32): FLOAT,
    np.dtype(np.bool_): TensorProto.BOOL,
    np.dtype(np.int64): TensorProto.INT64,
}


@cache
def cases() -> dict[str, Any]:
    """onnx's cases for Attention, without those that spell it out in smaller operators."""
    from onnx.backend.test.case.node import attention  # noqa: F401  # it makes its own alone

    return {
        case.name: case
        for case in node_cases._NodeTestCases
        if [node.op_type for node in case.model.graph.node] == ["Attention"]
        and "expanded" not in case.name
    }


def test_onnx_has_93_cases() -> None:
    assert sorted(cases()) == NAMES
    assert len(NAMES) == 93


@pytest.mark.parametrize("name", NAMES)
def test_conforms(name: str) -> None:
    case = cases()[name]
    session = ReferenceEvaluator(case.model, new_ops=[qkv.onnx.Attention])
    for inputs, expected in case.data_sets:
        outputs = session.run(None, dict(zip(session.input_names, inputs, strict=True)))
        Runner.assert_similar_outputs(expected, outputs, rtol=case.rtol, atol=case.atol)


def model(
    feeds: dict[str, np.ndarray[Any, Any]],
    opset: int = 25,
    outputs: list[str] = OUTPUTS,
    **attributes: Any,
) -> onnx.ModelProto:
    """One Attention node; what `feeds` lacks and what `outputs` calls "" is left out."""
    node = helper.make_node(
        "Attention", [name if name in feeds else "" for name in INPUTS], outputs, **attributes
    )
    while node.input and not node.input[-1]:
        node.input.pop()
    return wrap([node], feeds, [name for name in outputs if name], opset)


def wrap(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray[Any, Any]],
    outputs: list[str],
    opset: int = 25,
    functions: list[onnx.FunctionProto] | None = None,
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(k, KINDS[x.dtype], x.shape) for k, x in feeds.items()]
    results = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    graph = helper.make_graph(nodes, "graph", inputs, results)
    return helper.make_model(graph, opset_imports=imports, functions=functions or [])


def run(m: onnx.ModelProto, feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    return ReferenceEvaluator(m, new_ops=[qkv.onnx.Attention]).run(None, feeds)  # type: ignore[return-value]


def rand(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def small_inputs(heads: int = 4, shared: int = 2, n: int = 3, m: int = 5) -> dict[str, Any]:
    return {
        "Q": rand(2, heads, n, 8),
        "K": rand(2, shared, m, 8, seed=1),
        "V": rand(2, shared, m, 6, seed=2),
    }


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_a_model_runs_on_qkv(opset: int) -> None:
    feeds = small_inputs()
    m = model(feeds, opset, is_causal=1, softcap=2.0, scale=0.5)
    session = ReferenceEvaluator(m, new_ops=[qkv.onnx.Attention])
    assert type(session.rt_nodes_[0]) is qkv.onnx.Attention
    got = session.run(["Y", "present_key"], feeds)
    expected = ReferenceEvaluator(m).run(["Y", "present_key"], feeds)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], feeds["K"])


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "no mask": lambda n, m: {},
    "boolean (n, m)": lambda n, m: {"attn_mask": rand(n, m) > -1},
    "boolean (B, 1, n, m)": lambda n, m: {"attn_mask": rand(2, 1, n, m) > -1},
    "added (n, m)": lambda n, m: {"attn_mask": rand(n, m)},
    "added (H, n, m)": lambda n, m: {"attn_mask": rand(4, n, m)},
    "added, short": lambda n, m: {"attn_mask": rand(n, m - 1)},
}
CACHES: dict[str, dict[str, Any]] = {
    "no cache": {},
    "past": {"past_key": rand(2, 2, 4, 8, seed=3), "past_value": rand(2, 2, 4, 6, seed=4)},
    "padded": {"nonpad_kv_seqlen": np.array([2, 4])},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", MASKS)
def test_agrees_with_onnx_on_every_combination(mask: str, cache: str) -> None:
    feeds = small_inputs() | CACHES[cache]
    feeds |= MASKS[mask](3, 9 if cache == "past" else 5)
    windows = [(-1, -1), (1, -1), (-1, 1), (2, 0)]
    for causal, (left, right), mode, flat in product([0, 1], windows, [1, 2, 3], [False, True]):
        attributes: dict[str, Any] = {
            "is_causal": causal,
            "left_window_size": left,
            "right_window_size": right,
            "qk_matmul_output_mode": mode,
            "softcap": 2.0,
        }
        inputs = dict(feeds)
        if flat:
            attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
            for name in "QKV":
                x = feeds[name].transpose(0, 2, 1, 3)
                inputs[name] = x.reshape(*x.shape[:2], -1)
        m = model(inputs, **attributes)
        reference = ReferenceEvaluator(m).run(None, inputs)
        for got, expected in zip(run(m, inputs), reference, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=str(attributes))


def test_the_fourth_output_by_its_mode() -> None:
    Q, K, V = small_inputs().values()
    mask = rand(3, 5)
    raw = 0.5 * np.einsum("bhnd,bhmd->bhnm", Q, np.repeat(K, 2, axis=1))
    capped = 2 * np.tanh(raw / 2)
    biased = np.where(np.tri(3, 5, dtype=bool), capped + mask, -np.inf)
    soft = np.exp(biased) / np.exp(biased).sum(-1, keepdims=True)
    for mode, expected in enumerate([raw, capped, biased, soft]):
        *_, qk = attention(
            Q, K, V, mask, is_causal=1, scale=0.5, softcap=2.0, qk_matmul_output_mode=mode
        )
        np.testing.assert_allclose(qk, expected, rtol=1e-5, atol=1e-6)
    assert attention(Q, K, V, qk_matmul_output_mode=None)[3] is None


def test_present_is_past_then_new() -> None:
    feeds = small_inputs() | CACHES["past"]
    _, key, value, _ = attention(**feeds)
    np.testing.assert_array_equal(key, np.concatenate([feeds["past_key"], feeds["K"]], axis=2))
    np.testing.assert_array_equal(value, np.concatenate([feeds["past_value"], feeds["V"]], axis=2))


def test_outputs_left_out_stay_out_of_the_next_node() -> None:
    # onnx's own evaluator hands them to the next node as the inputs that it leaves out.
    feeds = small_inputs(heads=2)
    nodes = [
        helper.make_node("Attention", ["Q", "K", "V"], ["A", "", "", "S"]),
        helper.make_node("Attention", ["A", "A", "V", "", "", ""], ["Y"]),
    ]
    feeds["V"] = feeds["V"][:, :, :3]
    feeds["K"] = feeds["K"][:, :, :3]
    A, S, Y = run(wrap(nodes, feeds, ["A", "S", "Y"]), feeds)
    assert S.shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(Y, attention(A, A, feeds["V"])[0])


def in_a_function(**attributes: Any) -> onnx.ModelProto:
    """A call of a function whose attribute `cap` is the softcap of the Attention inside."""
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
    node.attribute.add(name="softcap", type=onnx.AttributeProto.FLOAT, ref_attr_name="cap")
    opsets = [helper.make_opsetid("", 25)]
    f = helper.make_function("mine", "Capped", ["Q", "K", "V"], ["Y"], [node], opsets, ["cap"])
    call = helper.make_node("Capped", ["Q", "K", "V"], ["Y"], domain="mine", **attributes)
    return wrap([call], small_inputs(), ["Y"], functions=[f])


def test_a_function_of_the_model() -> None:
    m = in_a_function(cap=0.25)
    expected = attention(**small_inputs(), is_causal=1, softcap=0.25)[0]
    (got,) = run(onnx.inliner.inline_local_functions(m), small_inputs())
    np.testing.assert_array_equal(got, expected)
    inner = ReferenceEvaluator(m.functions[0], new_ops=[qkv.onnx.Attention])
    (got,) = inner.run(None, small_inputs(), attributes={"cap": 0.25})
    np.testing.assert_array_equal(got, expected)


def test_a_branch_of_the_model() -> None:
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
    branch = helper.make_graph(
        [node], "branch", [], [helper.make_tensor_value_info("Y", FLOAT, None)]
    )
    choice = helper.make_node("If", ["yes"], ["Y"], then_branch=branch, else_branch=branch)
    feeds = small_inputs() | {"yes": np.array(True)}
    (got,) = run(wrap([choice], feeds, ["Y"]), feeds)
    np.testing.assert_array_equal(got, attention(**small_inputs(), is_causal=1)[0])


def test_a_mask_of_one_key_is_broadcast_in_opset_23_and_padded_since() -> None:
    feeds = small_inputs() | {"attn_mask": rand(3, 1)}
    (all_keys,) = run(model(feeds, 23, ["Y"]), feeds)
    np.testing.assert_allclose(all_keys, attention(**small_inputs())[0], rtol=1e-5, atol=1e-6)
    (one_key,) = run(model(feeds, 24, ["Y"]), feeds)
    first = np.repeat(feeds["V"][:, :, :1], 2, axis=1)
    np.testing.assert_allclose(one_key, np.broadcast_to(first, one_key.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 1, 5), (2, 1, 1, 5)])
def test_a_mask_of_lower_rank_is_broadcast(shape: tuple[int, ...]) -> None:
    # onnx's own evaluator takes the frontier of query 0 for all where the mask has one row.
    mask = rand(*shape) > -0.5
    got = attention(**small_inputs(), attn_mask=mask, is_causal=1)[0]
    full = np.broadcast_to(mask, (2, 4, 3, 5))
    np.testing.assert_array_equal(got, attention(**small_inputs(), attn_mask=full, is_causal=1)[0])


def test_an_integer_mask_is_added() -> None:
    feeds = small_inputs()
    mask = np.array([[0, 1, -2, 3, 0]], dtype=np.int64)
    got = attention(**feeds, attn_mask=mask)[0]
    expected = attention(**feeds, attn_mask=mask.astype(np.float32))[0]
    np.testing.assert_array_equal(got, expected)


def test_what_lies_beyond_the_padding_is_never_seen() -> None:
    feeds = small_inputs() | CACHES["padded"]
    expected = attention(**feeds, is_causal=1, qk_matmul_output_mode=3)
    for name in "KV":
        feeds[name] = feeds[name].copy()
        feeds[name][0, :, 2:] = np.nan
        feeds[name][1, :, 4:] = np.inf
    got = attention(**feeds, is_causal=1, qk_matmul_output_mode=3)
    for i in (0, 3):
        np.testing.assert_array_equal(got[i], expected[i])
    # Batch 0 has two keys and three queries, so its first query stands before all keys.
    assert not got[0][0, :, 0].any() and got[0][0, :, 1].any()


@pytest.mark.parametrize("precision", [1, 10, 11, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_softmax_precision_changes_no_type(precision: int, dtype: str) -> None:
    feeds = {name: x.astype(dtype) for name, x in small_inputs().items()}
    outputs = attention(**feeds, softmax_precision=precision, qk_matmul_output_mode=3)
    assert {x.dtype for x in outputs} == {np.dtype(dtype)}
    exact = attention(**{name: x.astype("float64") for name, x in feeds.items()})[0]
    tolerance = 2 * np.finfo(dtype).eps
    np.testing.assert_allclose(outputs[0], exact, rtol=tolerance, atol=tolerance)


def test_values_of_another_type() -> None:
    feeds = small_inputs()
    expected, *_ = attention(**feeds)
    feeds["V"] = feeds["V"].astype("float64")
    got, _, present, _ = attention(**feeds)
    assert got.dtype == np.float32 and present.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_double_precision_is_double_throughout() -> None:
    feeds = small_inputs(n=64, m=512)
    exact = attention(**{name: x.astype("float64") for name, x in feeds.items()})[0]
    got = attention(**feeds, softmax_precision=11)[0]
    np.testing.assert_array_equal(got, exact.astype("float32"))


def test_double_precision_needs_float64() -> None:
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        feeds = {name: jax.numpy.asarray(x) for name, x in small_inputs().items()}
        with pytest.raises(ArgumentError, match=r"softmax_precision is 11 .*enable_x64"):
            attention(**feeds, softmax_precision=11)
    finally:
        jax.config.update("jax_enable_x64", before)


def test_torch_with_gradients() -> None:
    torch = pytest.importorskip("torch")
    feeds: dict[str, Any] = small_inputs() | CACHES["padded"] | MASKS["added (H, n, m)"](3, 5)
    tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
    floats = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    options = {"is_causal": 1, "left_window_size": 2, "softcap": 2.0}
    for mode in range(4):
        got = attention(**tensors, **options, qk_matmul_output_mode=mode)
        expected = attention(**feeds, **options, qk_matmul_output_mode=mode)
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x.detach().numpy(), y, rtol=1e-5, atol=1e-6)
    got[0].sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in floats)


def test_jax_under_jit() -> None:
    jax = pytest.importorskip("jax")
    feeds: dict[str, Any] = small_inputs() | MASKS["boolean (B, 1, n, m)"](3, 5)
    call = jax.jit(lambda **x: attention(**x, right_window_size=1, qk_matmul_output_mode=2))
    got = call(**{name: jax.numpy.asarray(x) for name, x in feeds.items()})
    expected = attention(**feeds, right_window_size=1, qk_matmul_output_mode=2)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


BAD: list[tuple[type[QkvError], str, dict[str, Any]]] = [
    (ShapeError, r"Q has shape \(3, 8\)", {"Q": rand(3, 8)}),
    (ArgumentError, "Q has shape .* pass q_num_heads", {"Q": rand(2, 3, 32)}),
    (ShapeError, "32 is not a multiple of 5 heads", {"Q": rand(2, 3, 32), "q_num_heads": 5}),
    (ShapeError, "so 2 heads, but kv_num_heads=4", {"kv_num_heads": 4}),
    (ShapeError, "at most 5 keys", {"attn_mask": rand(3, 6)}),
    (ShapeError, r"\(2, 5\) does not broadcast", {"attn_mask": rand(2, 5)}),
    (ArgumentError, "past_key was passed without past_value", {"past_key": rand(2, 2, 4, 8)}),
    (ArgumentError, "past_value was passed without past_key", {"past_value": rand(2, 2, 4, 6)}),
    (ArgumentError, "nonpad_kv_seqlen", CACHES["past"] | CACHES["padded"]),
    (ArgumentError, "qk_matmul_output_mode is 4", {"qk_matmul_output_mode": 4}),
    (ArgumentError, "left_window_size is -2", {"left_window_size": -2}),
    (ArgumentError, "right_window_size is -9", {"right_window_size": -9}),
    (ArgumentError, r"softmax_precision is 7; .* 11 \(float64\)", {"softmax_precision": 7}),
    (QkvError, "heads", {"Q": rand(2, 3, 3, 8)}),
]


@pytest.mark.parametrize(("error", "message", "change"), BAD, ids=[m for _, m, _ in BAD])
def test_bad_input(error: type[QkvError], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attention(**(small_inputs() | change))


def test_two_frameworks_in_one_call() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(FrameworkError, match="attn_mask"):
        attention(**small_inputs(), attn_mask=torch.ones(3, 5))


def test_the_function_needs_no_onnx_and_the_class_says_so() -> None:
    code = """
import sys
sys.modules["onnx"] = None
import numpy as np, qkv, qkv.onnx
x = np.ones((1, 1, 2, 2))
assert (qkv.onnx.attention(x, x, x)[0] == 1).all()
try:
    qkv.onnx.Attention
except qkv.errors.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == 'qkv.onnx.Attention needs onnx: pip install "qkv[onnx]"\n'


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="Attentio"):
        qkv.onnx.Attentio  # noqa: B018
