"""Bad input gets one clear error: what came, what was expected, the nearest valid name."""

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    EngineError,
    FrameworkError,
    QkvError,
    ShapeError,
    escape_control_characters,
    unknown_name_error,
)

Q, K, V = np.ones((4, 3)), np.ones((6, 3)), np.ones((6, 2))
HEADS = np.ones((2, 4, 5, 3))


def one(*shape: int, dtype: str = "float64") -> np.ndarray:
    return np.ones(shape, dtype)


def attend(query: Any = Q, key: Any = K, value: Any = V, **options: Any) -> Any:
    return qkv.attend(query, key, value, **options)


def load(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed")


def tensor(x: Any) -> Any:
    return load("torch").tensor(x)


Case = tuple[str, Callable[[], Any], type[Exception], str]

# Each line: what is wrong, the call, the error, and what the message must say (a pattern).

INPUTS: list[Case] = [
    ("no float", lambda: scores.Gaussian(10**400), ArgumentError, r"Gaussian: bandwidth.*finite"),
    ("no scale", lambda: scores.ScaledDot(10**400), ArgumentError, r"scale must be finite"),
    ("no alpha", lambda: weightings.Entmax(10**400), ArgumentError, r"Entmax: alpha.*finite"),
    (
        "a score_mod",
        lambda: attend(score=lambda s, b, h, q, k: s),
        DtypeError,
        r"score: the function must take \(query, key\), not \(s, b, h, q, k\).*scores.Modified",
    ),
    ("one argument", lambda: attend(score=lambda q: q), DtypeError, r"\(query, key\).*\(q\)"),
    (
        "a function as score_mod",
        lambda: attend(score=scores.Modified("dot", lambda q, k: q)),
        DtypeError,
        r"score_mod must take \(score, b, h, q_idx, kv_idx\), not \(q, k\)",
    ),
    (
        "a function as mask_mod",
        lambda: attend(mask=masks.custom(lambda q, k: q >= k)),
        DtypeError,
        r"mask_mod must take \(b, h, q_idx, kv_idx\), not \(q, k\)",
    ),
    ("no chance", lambda: attend(dropout_p=10**400), ArgumentError, r"dropout_p"),
    (
        "a temperature for each key",
        lambda: attend(weighting=weightings.Softmax(one(6))),
        ShapeError,
        r"temperature.*each row \(4, 1\).*\(6,\)",
    ),
    (
        "temperatures of other rows",
        lambda: attend(weighting=weightings.Softmax(one(3, 1))),
        ShapeError,
        r"temperature.*each row \(4, 1\).*\(3, 1\)",
    ),
    (
        "a frame",
        lambda: qkv.attend(load("pandas").DataFrame({"a": [1.0]}), one(1, 1), one(1, 1)),
        DtypeError,
        r"query must be an array.*not DataFrame: pass query\.to_numpy\(\)",
    ),
    (
        "scores that are whole numbers",
        lambda: weightings.Softmax()(np.array([[1, 2]])),
        DtypeError,
        r"scores must be a float array.*int64",
    ),
    ("scores of one row", lambda: weightings.TopK(1)(one(3)), DtypeError, r"\(…, n, m\).*\(3,\)"),
    ("query is a vector", lambda: attend(one(3)), ShapeError, r"query.*two axes.*\(3,\)"),
    ("key is a vector", lambda: attend(key=one(3)), ShapeError, r"key.*two axes.*\(3,\)"),
    ("value is a vector", lambda: attend(value=one(6)), ShapeError, r"value.*two axes.*\(6,\)"),
    ("query is one number", lambda: attend(np.array(1.0)), ShapeError, r"query.*two axes.*\(\)"),
    ("fewer values", lambda: attend(value=one(5, 2)), ShapeError, r"key has 6.*value.* 5"),
    ("widths differ", lambda: attend(key=one(6, 4)), ShapeError, r"query has 3.*key 4"),
    (
        "batches differ",
        lambda: attend(one(2, 1, 4, 3), one(3, 1, 6, 3), one(3, 1, 6, 2)),
        ShapeError,
        r"\(2, 1, 4, 3\).*\(3, 1, 6, 3\)",
    ),
    (
        "heads do not divide",
        lambda: attend(HEADS, one(2, 3, 6, 3), one(2, 3, 6, 2)),
        ShapeError,
        r"\(2, 4, 5, 3\).*\(2, 3, 6, 3\).*heads",
    ),
    (
        "more key heads than query heads",
        lambda: attend(HEADS, one(2, 8, 6, 3), one(2, 8, 6, 2)),
        ShapeError,
        r"\(2, 4, 5, 3\).*\(2, 8, 6, 3\)",
    ),
    (
        "value heads do not divide",
        lambda: attend(HEADS, one(2, 4, 6, 3), one(2, 3, 6, 2)),
        ShapeError,
        r"value.*\(2, 3, 6, 2\)",
    ),
    ("integers", lambda: attend(one(4, 3, dtype="int64")), DtypeError, r"query.*int64.*float"),
    ("booleans", lambda: attend(key=one(6, 3, dtype="bool")), DtypeError, r"key.*bool.*float"),
    ("complex", lambda: attend(value=one(6, 2, dtype="complex128")), DtypeError, r"value.*complex"),
    ("objects", lambda: attend(one(4, 3, dtype="object")), DtypeError, r"query.*object.*float"),
    ("words", lambda: attend(np.array([["a", "b", "c"]])), DtypeError, r"query.*float"),
    (
        "two precisions",
        lambda: attend(one(4, 3, dtype="float32")),
        DtypeError,
        r"query is float32.*key is float64",
    ),
    ("nothing", lambda: attend(None), DtypeError, r"query.*array.*NoneType"),
    ("no key", lambda: attend(key=None), DtypeError, r"key.*array.*NoneType"),
    ("no value", lambda: attend(value=None), DtypeError, r"value.*array.*NoneType"),
    ("explain: no value", lambda: qkv.explain(Q, K, None), DtypeError, r"value.*array.*NoneType"),
    ("weights: no key", lambda: qkv.weights(Q, None), DtypeError, r"key.*array.*NoneType"),
    ("weights: a word", lambda: qkv.weights(Q, "key"), DtypeError, r"key.*array.*str"),
    ("onnx: no array", lambda: qkv.onnx.attention(None, K, V), DtypeError, r"Q.*NoneType"),
    (
        "onnx: a mask that is none",
        lambda: qkv.onnx.attention(HEADS, HEADS, HEADS, True),
        DtypeError,
        r"attn_mask must be an array, not bool",
    ),
    ("on_empty is a list", lambda: weightings.Normalized([]), ArgumentError, r"on_empty \[\]"),
    (
        "a gate's bias is a word",
        lambda: scores.Gated(one(3), one(3), "x"),
        DtypeError,
        r"Gated: bias must be a number or an array, not 'x'",
    ),
    ("a ragged mask", lambda: attend(mask=[[True], [True, False]]), DtypeError, r"mask.*length"),
    (
        "ragged lengths",
        lambda: masks.lengths([[1], [2, 3]]),
        DtypeError,
        r"lengths.*integers.*differ in length",
    ),
    ("client: no url", lambda: qkv.Client(5), DtypeError, r"url must be text, not int"),
    ("client: a token", lambda: qkv.Client("http://a", 5), DtypeError, r"token must be text"),
    (
        "client: no timeout",
        lambda: qkv.Client("http://a", timeout=None),
        ArgumentError,
        r"timeout must be a number of seconds",
    ),
    ("a word", lambda: attend("query"), DtypeError, r"query.*array.*str"),
    ("a number", lambda: attend(value=3.0), DtypeError, r"value.*array.*float"),
    ("a ragged list", lambda: attend([[1.0, 2.0], [3.0]]), DtypeError, r"query.*rectangular"),
    ("a list of words", lambda: attend([["a", "b", "c"]]), DtypeError, r"query.*rectangular"),
    ("a set", lambda: attend({1.0, 2.0}), DtypeError, r"query.*array.*set"),
    ("weights: a vector", lambda: qkv.weights(one(3), K), ShapeError, r"query.*two axes"),
    ("explain: widths", lambda: qkv.explain(Q, one(6, 4), V), ShapeError, r"query has 3.*key 4"),
]

FRAMEWORKS: list[Case] = [
    (
        "two frameworks",
        lambda: attend(key=tensor(K)),
        FrameworkError,
        r"query.*numpy.*key.*torch",
    ),
    ("value of another", lambda: attend(value=tensor(V)), FrameworkError, r"value.*torch"),
    (
        "a mask of another",
        lambda: attend(mask=tensor(np.ones((4, 6), bool))),
        FrameworkError,
        r"query.*numpy.*mask.*torch",
    ),
    (
        "a combined mask of another",
        lambda: attend(mask=masks.causal & tensor(np.ones((4, 6), bool))),
        FrameworkError,
        r"query.*numpy.*mask.*torch",
    ),
    (
        "a parameter of another",
        lambda: attend(score=scores.Multiplicative(tensor(one(3, 3)))),
        FrameworkError,
        r"query.*numpy.*score.*torch",
    ),
    (
        "a parameter inside",
        lambda: attend(score=scores.Gated(one(3), one(3), score=scores.Gaussian(tensor(1.0)))),
        FrameworkError,
        r"query.*numpy.*score.*torch",
    ),
    (
        "a temperature of another",
        lambda: attend(weighting=weightings.Softmax(tensor(1.0))),
        FrameworkError,
        r"query.*numpy.*weighting.*torch",
    ),
    (
        "torch: two precisions",
        lambda: attend(tensor(Q), tensor(K).float(), tensor(V)),
        DtypeError,
        r"query is float64.*key is float32",
    ),
    (
        "torch: a parameter of another precision",
        lambda: attend(
            *map(tensor, (Q, K, V)), score=scores.Multiplicative(tensor(one(3, 3)).float())
        ),
        DtypeError,
        r"query is float64.*\(3, 3\).*score.*float32",
    ),
    (
        "NumPy: a parameter of another precision",
        lambda: attend(score=scores.Gated(one(3, dtype="float32"), one(3))),
        DtypeError,
        r"query is float64.*\(3,\).*score.*float32",
    ),
    (
        "torch: a parameter of integers",
        lambda: attend(
            *map(tensor, (Q, K, V)), score=scores.Multiplicative(tensor([[1, 0, 0]] * 3))
        ),
        DtypeError,
        r"(score|Multiplicative).*int64",
    ),
    (
        "JAX: dropout without a seed",
        lambda: attend(*map(load("jax.numpy").asarray, (Q, K, V)), dropout_p=0.5),
        ArgumentError,
        r"JAX.*seed",
    ),
    *(
        (
            f"JAX: dropout with {name}",
            lambda make=make: attend(
                *map(load("jax.numpy").asarray, (Q, K, V)),
                dropout_p=0.5,
                seed=make(load("jax").random),
            ),
            DtypeError,
            r"seed must be one key.*\(2,\).*vmap",
        )
        for name, make in (
            ("two keys", lambda random: random.split(random.key(0))),
            ("two raw keys", lambda random: random.split(random.PRNGKey(0))),
            ("two numbers", lambda random: random.randint(random.key(0), (2,), 0, 9)),
        )
    ),
    (
        "JAX: a shape for an array",
        lambda: attend(load("jax").ShapeDtypeStruct((4, 3), "float32"), K, V),
        DtypeError,
        r"query must be an array.*ShapeDtypeStruct",
    ),
]

NAMES: list[Case] = [
    ("score", lambda: attend(score="gausian"), ArgumentError, r"score 'gausian'.*'gaussian'"),
    ("score, near", lambda: attend(score="scaled"), ArgumentError, r"'scaled'.*'scaled_dot'"),
    ("score, case", lambda: attend(score="Dot"), ArgumentError, r"'Dot'.*'dot'"),
    ("score, far", lambda: attend(score="qqqqqq"), ArgumentError, r"'qqqqqq'.*Known: .*laplace"),
    ("score needs arrays", lambda: attend(score="additive"), DtypeError, r"Additive\(w_query"),
    ("weighting", lambda: attend(weighting="softmx"), ArgumentError, r"'softmx'.*'softmax'"),
    (
        "weighting, far",
        lambda: attend(weighting="zzz"),
        ArgumentError,
        r"'zzz'.*Known: .*sparsemax",
    ),
    ("weighting needs k", lambda: attend(weighting="topk"), DtypeError, r"TopK\(k\)"),
    ("engine", lambda: attend(engine="streeming"), ArgumentError, r"'streeming'.*'streaming'"),
    ("engine, far", lambda: attend(engine="cuda"), ArgumentError, r"engine 'cuda'.*Known: .*dense"),
    ("explain", lambda: qkv.explain(Q, K, V, engine="dens"), ArgumentError, r"'dens'.*'dense'"),
    ("inner score", lambda: scores.Gated(one(3), one(3), score="dott"), ArgumentError, r"'dot'"),
    ("modified", lambda: scores.Modified("cosin", max), ArgumentError, r"'cosin'.*'cosine'"),
    ("on_empty", lambda: weightings.Normalized("zeros"), ArgumentError, r"'zeros'.*'zero'"),
    ("align", lambda: masks.causal(align="bottom"), ArgumentError, r"'bottom_right'.*'bottom'"),
    ("score is no score", lambda: attend(score=3), DtypeError, r"score.*name.*function.*int"),
    (
        "score is a class",
        lambda: attend(score=scores.Dot),
        DtypeError,
        r"class Dot.*pass an instance",
    ),
    ("weighting is no weighting", lambda: attend(weighting=max), DtypeError, r"weighting.*name"),
    (
        "weighting is a class",
        lambda: attend(weighting=weightings.TopK),
        DtypeError,
        r"class TopK.*pass an instance",
    ),
    ("engine is no name", lambda: attend(engine=3), ArgumentError, r"engine 3"),
    ("engine is a list", lambda: attend(engine=["dense"]), (ArgumentError, DtypeError), r"engine"),
]

NUMBERS: list[Case] = [
    (
        f"{kind.__name__}({value!r})",
        lambda k=kind, v=value: k(v),
        error,
        rf"{kind.__name__}.*{message}",
    )
    for kind in (
        scores.Gaussian,
        scores.Laplace,
        scores.Boxcar,
        scores.Triangular,
        scores.Epanechnikov,
        scores.Cosine,
        weightings.Softmax,
    )
    for value, error, message in (
        (-1.0, ArgumentError, r"above 0, not -1\.0"),
        (0, ArgumentError, r"above 0, not 0"),
        (float("nan"), ArgumentError, r"above 0, not nan"),
        (float("inf"), ArgumentError, r"not inf"),
        ("wide", (DtypeError, ArgumentError), r"number, not 'wide'"),
        (True, (DtypeError, ArgumentError), r"number, not True"),
        (None, (DtypeError, ArgumentError), r"number, not None"),
    )
] + [
    ("softcap", lambda: scores.ScaledDot(softcap=-5.0), ArgumentError, r"softcap.*above 0.*-5"),
    ("scale", lambda: scores.ScaledDot("big"), DtypeError, r"scale.*number.*'big'"),
    ("scale of NaN", lambda: scores.ScaledDot(float("nan")), ArgumentError, r"scale.*nan"),
    ("k of 0", lambda: weightings.TopK(0), ArgumentError, r"TopK: k.*at least 1, not 0"),
    ("k below 0", lambda: weightings.TopK(-2), ArgumentError, r"TopK: k.*at least 1, not -2"),
    ("k of 1.5", lambda: weightings.TopK(1.5), ArgumentError, r"TopK: k.*integer.*1\.5"),
    ("k of True", lambda: weightings.TopK(True), ArgumentError, r"TopK: k.*integer.*True"),
    ("alpha of 0", lambda: weightings.Entmax(0), ArgumentError, r"alpha.*above 0.*not 0"),
    ("alpha below 0", lambda: weightings.Entmax(-1.5), ArgumentError, r"alpha.*above 0.*-1\.5"),
    ("alpha of NaN", lambda: weightings.Entmax(float("nan")), ArgumentError, r"alpha.*nan"),
    ("alpha of words", lambda: weightings.Entmax("x"), DtypeError, r"alpha.*number.*'x'"),
    (
        "straight_through",
        lambda: weightings.Hard("yes"),
        (DtypeError, ArgumentError),
        r"straight_through.*True or False.*'yes'",
    ),
    ("dropout_p below 0", lambda: attend(dropout_p=-0.1), ArgumentError, r"between 0 and 1.*-0\.1"),
    ("dropout_p above 1", lambda: attend(dropout_p=1.5), ArgumentError, r"between 0 and 1.*1\.5"),
    ("dropout_p of NaN", lambda: attend(dropout_p=float("nan")), ArgumentError, r"nan"),
    ("dropout_p of words", lambda: attend(dropout_p="half"), DtypeError, r"number.*'half'"),
    ("dropout_p of True", lambda: attend(dropout_p=True), DtypeError, r"number.*True"),
    ("seed", lambda: attend(dropout_p=0.5, seed="abc"), DtypeError, r"seed.*integer.*str"),
    ("seed of 1.5", lambda: attend(dropout_p=0.5, seed=1.5), DtypeError, r"seed.*integer.*float"),
    (
        "tolerance",
        lambda: attend(tolerance=-1e-3),
        ArgumentError,
        r"tolerance.*at least 0.*-0\.0",
    ),
    ("tolerance, NaN", lambda: attend(tolerance=float("nan")), ArgumentError, r"tolerance.*nan"),
    (
        "tolerance of words",
        lambda: attend(tolerance="loose"),
        (ArgumentError, DtypeError),
        r"tolerance.*number.*'loose'",
    ),
    ("return_lse", lambda: attend(return_lse="yes"), DtypeError, r"return_lse.*True or False"),
    ("return_weights", lambda: attend(return_weights=1), DtypeError, r"return_weights.*not 1"),
]

PARAMETERS: list[Case] = [
    ("w is a list", lambda: scores.Multiplicative([[1.0]]), DtypeError, r"w.*array.*list"),
    ("w is a vector", lambda: scores.Multiplicative(one(3)), ShapeError, r"\(d_q, d_k\).*\(3,\)"),
    (
        "w does not fit",
        lambda: attend(score=scores.Multiplicative(one(3, 4))),
        ShapeError,
        r"w must be.*\(3, 3\).*\(3, 4\)",
    ),
    (
        "w turned round",
        lambda: attend(Q, one(6, 5), V, score=scores.Multiplicative(one(5, 3))),
        ShapeError,
        r"w must be.*\(3, 5\).*\(5, 3\)",
    ),
    (
        "w for more heads than there are",
        lambda: attend(score=scores.Multiplicative(one(5, 3, 3))),
        ShapeError,
        r"w.*\(5, 3, 3\)",
    ),
    (
        "hidden widths differ",
        lambda: scores.Additive(one(4, 3), one(5, 3), one(4)),
        ShapeError,
        r"hidden width.*w_query has 4.*w_key has 5",
    ),
    (
        "v of another width",
        lambda: scores.Additive(one(4, 3), one(4, 3), one(3)),
        ShapeError,
        r"hidden width.*v has 3",
    ),
    (
        "bias of another width",
        lambda: scores.Additive(one(4, 3), one(4, 3), one(4), one(2)),
        ShapeError,
        r"hidden width.*bias has 2",
    ),
    (
        "w_query is a vector",
        lambda: scores.Additive(one(3), one(4, 3), one(4)),
        ShapeError,
        r"w_query must be \(h, d_q\).*\(3,\)",
    ),
    (
        "w_query does not fit",
        lambda: attend(score=scores.Additive(one(4, 2), one(4, 3), one(4))),
        ShapeError,
        r"Additive: w_query must be \(h, 3\).*\(4, 2\)",
    ),
    (
        "w_key does not fit",
        lambda: attend(score=scores.Additive(one(4, 3), one(4, 2), one(4))),
        ShapeError,
        r"Additive: w_key must be \(h, 3\).*\(4, 2\)",
    ),
    ("v is a list", lambda: scores.Additive(one(1, 1), one(1, 1), [1.0]), DtypeError, r"v.*list"),
    (
        "gate does not fit the query",
        lambda: attend(score=scores.Gated(one(2), one(3))),
        ShapeError,
        r"Gated: w_query must be \(3,\).*\(2,\)",
    ),
    (
        "gate does not fit the key",
        lambda: attend(score=scores.Gated(one(3), one(2))),
        ShapeError,
        r"Gated: w_key must be \(3,\).*\(2,\)",
    ),
    (
        "gate is a matrix",
        lambda: attend(score=scores.Gated(one(7, 3), one(7, 3))),
        ShapeError,
        r"w_query.*\(7, 3\)",
    ),
    ("gate is a number", lambda: scores.Gated(1.0, one(3)), DtypeError, r"w_query.*array.*float"),
    ("many biases", lambda: scores.Gated(one(3), one(3), one(4)), ShapeError, r"bias.*one number"),
    (
        "the gated score does not fit",
        lambda: attend(Q, one(6, 5), V, score=scores.Gated(one(3), one(5))),
        ShapeError,
        r"query has 3.*key 5",
    ),
    ("no score_mod", lambda: scores.Modified("dot", 3), DtypeError, r"score_mod.*function.*int"),
    (
        "a score_mod of another shape",
        lambda: attend(score=scores.Modified("dot", lambda s, b, h, i, j: s[..., :1])),
        ShapeError,
        r"\(4, 1\).*\(.*4, 6\)",
    ),
    (
        "a function of another shape",
        lambda: attend(score=lambda q, k: q),
        ShapeError,
        r"function.*\(4, 3\).*4, 6",
    ),
    (
        "a function of more axes",
        lambda: attend(score=lambda q, k: one(5, 4, 6)),
        ShapeError,
        r"function.*\(5, 4, 6\)",
    ),
    (
        "a function of another framework",
        lambda: attend(score=lambda q, k: tensor(one(4, 6))),
        (FrameworkError, DtypeError),
        r"(score|function).*torch",
    ),
    (
        "a function that gives a number",
        lambda: attend(score=lambda q, k: 1.0),
        (ShapeError, DtypeError),
        r"function.*4, 6",
    ),
]

MASKS: list[Case] = [
    ("integers", lambda: attend(mask=one(4, 6, dtype="int64")), DtypeError, r"int64.*booleans"),
    (
        "a list of integers",
        lambda: attend(mask=[[1, 0, 1, 1, 1, 1]]),
        DtypeError,
        r"int64.*booleans",
    ),
    ("a word", lambda: attend(mask="casual"), ArgumentError, r"mask 'casual'.*'causal'"),
    ("a rule's name", lambda: attend(mask="window"), DtypeError, r"masks\.window\(left, right"),
    ("a function", lambda: attend(mask=lambda b, h, i, j: i >= j), DtypeError, r"mask.*function"),
    ("does not fit", lambda: attend(mask=np.ones((4, 5), bool)), ShapeError, r"\(4, 5\).*\(4, 6\)"),
    (
        "too many axes",
        lambda: attend(mask=np.ones((2, 4, 6), bool)),
        ShapeError,
        r"\(2, 4, 6\).*\(4, 6\)",
    ),
    ("float does not fit", lambda: attend(mask=one(3, 6)), ShapeError, r"\(3, 6\).*\(4, 6\)"),
    (
        "the part of & does not fit",
        lambda: attend(mask=masks.causal & np.ones((4, 5), bool)),
        ShapeError,
        r"\(4, 5\).*\(4, 6\)",
    ),
    ("not of floats", lambda: ~masks.array(one(4, 6)), DtypeError, r"float mask.*&"),
    ("or of floats", lambda: masks.causal | one(4, 6), DtypeError, r"float mask.*&"),
    ("and of integers", lambda: masks.causal & one(4, 6, dtype="int8"), DtypeError, r"int8"),
    ("and of words", lambda: masks.causal & "window", DtypeError, r"masks\.window\("),
    ("window below 0", lambda: masks.window(-1), ArgumentError, r"window: left.*at least 0.*-1"),
    ("window, right", lambda: masks.window(2, -2), ArgumentError, r"right.*at least 0.*-2"),
    ("window, right of −1", lambda: masks.window(2, -1), ArgumentError, r"right.*at least 0.*-1"),
    ("window of 1.5", lambda: masks.window(1.5), DtypeError, r"window: left.*integer.*1\.5"),
    ("window of True", lambda: masks.window(True), DtypeError, r"window: left.*integer.*True"),
    ("window, align", lambda: masks.window(1, align="x"), ArgumentError, r"align.*'x'"),
    ("dilated", lambda: masks.dilated(-1, 2), ArgumentError, r"dilated: window.*at least 0.*-1"),
    ("dilated, step", lambda: masks.dilated(1, 0), ArgumentError, r"dilated: step.*at least 1.*0"),
    ("strided", lambda: masks.strided(0), ArgumentError, r"strided: step.*at least 1, not 0"),
    ("strided of 2.0", lambda: masks.strided(2.0), DtypeError, r"strided: step.*integer.*2\.0"),
    ("global", lambda: masks.global_tokens(-1), ArgumentError, r"count.*at least 0.*-1"),
    ("blocks, layout", lambda: masks.blocks([1, 0], 2), ShapeError, r"layout.*2 or 3.*\(2,\)"),
    ("blocks, size", lambda: masks.blocks([[1]], 0), ArgumentError, r"size.*at least 1, not 0"),
    (
        "blocks, three sizes",
        lambda: masks.blocks([[1]], (2, 2, 2)),
        (ShapeError, ArgumentError, DtypeError),
        r"size",
    ),
    (
        "blocks too few",
        lambda: attend(mask=masks.blocks([[1, 1]], 2)),
        ShapeError,
        r"1 × 2.*4 queries × 6 keys",
    ),
    (
        "blocks of other heads",
        lambda: attend(mask=masks.blocks(np.ones((3, 1, 1)), 9)),
        ShapeError,
        r"3 heads.*\(4, 6\)",
    ),
    ("lengths of floats", lambda: masks.lengths([1.0]), DtypeError, r"lengths.*integer.*float64"),
    (
        "lengths without a batch",
        lambda: attend(mask=masks.lengths([3])),
        ShapeError,
        r"lengths.*\(1,\)",
    ),
    (
        "lengths of another batch",
        lambda: attend(one(2, 4, 3), one(2, 6, 3), one(2, 6, 2), mask=masks.lengths([1, 2, 3])),
        ShapeError,
        r"lengths.*\(2,\).*\(3,\)",
    ),
    ("documents of words", lambda: masks.documents(["a"]), DtypeError, r"documents.*integer"),
    (
        "documents do not fit the keys",
        lambda: attend(mask=masks.documents([0, 0, 1, 1])),
        ShapeError,
        r"documents.*key.*\(6,\).*\(4,\)",
    ),
    (
        "documents do not fit the queries",
        lambda: attend(mask=masks.documents([0] * 5, [0] * 6)),
        ShapeError,
        r"documents.*\(4,\).*\(5,\)",
    ),
    ("custom", lambda: masks.custom(3), DtypeError, r"mask_mod.*function.*int"),
    ("not called", lambda: attend(mask=masks.window), DtypeError, r"call it, masks\.window\(…\)"),
    (
        "custom gives numbers",
        lambda: attend(mask=masks.custom(lambda b, h, i, j: i - j)),
        DtypeError,
        r"mask_mod.*int32",
    ),
    (
        "custom gives one answer",
        lambda: attend(mask=masks.custom(lambda b, h, i, j: "yes")),
        DtypeError,
        r"mask_mod.*str",
    ),
    (
        "custom of another shape",
        lambda: attend(mask=masks.custom(lambda b, h, i, j: np.ones((2, 2), bool))),
        ShapeError,
        r"mask_mod.*\(2, 2\).*\(4, 6\)",
    ),
    ("offset of 1.5", lambda: masks.causal(offset=1.5), DtypeError, r"offset.*integer.*1\.5"),
    ("offset of words", lambda: masks.causal(offset="far"), DtypeError, r"offset.*integer"),
    (
        "offset of another batch",
        lambda: attend(mask=masks.causal(offset=np.array([1, 2]))),
        ShapeError,
        r"offset.*\(2,\)",
    ),
]

COMBINATIONS: list[Case] = [
    (
        f"normalized of {name}",
        lambda name=name: attend(score=name, weighting="normalized"),
        CombinationError,
        r"Normalized.*negative.*softmax",
    )
    for name in ("scaled_dot", "dot", "cosine", "gaussian", "laplace")
] + [
    (
        "normalized of a gate",
        lambda: attend(score=scores.Gated(one(3), one(3)), weighting="normalized"),
        CombinationError,
        r"Normalized.*Gated.*negative",
    ),
    (
        "normalized with a float mask",
        lambda: attend(score="boxcar", weighting="normalized", mask=one(4, 6)),
        CombinationError,
        r"Normalized.*float mask.*boolean",
    ),
    *(
        (
            f"the log-sum-exp of {name}",
            lambda name=name: attend(weighting=name, return_lse=True),
            CombinationError,
            r"return_lse.*softmax.*",
        )
        for name in ("hard", "average", "raw", "sigmoid", "sparsemax", "entmax15")
    ),
    (
        "the nearest of no distance",
        lambda: attend(score="constant", weighting=weightings.Normalized("nearest")),
        CombinationError,
        r"nearest.*distance.*Constant",
    ),
    (
        "nothing in the window",
        lambda: attend(K[:1] + 99, score="boxcar", weighting=weightings.Normalized("raise")),
        ArgumentError,
        r"1 query has no key.*larger width",
    ),
    (
        "native on NumPy",
        lambda: attend(engine="native"),
        EngineError,
        r"'native' does not support.*numpy has no fused",
    ),
    (
        "native of another score",
        lambda: attend(*map(tensor, (Q, K, V)), score="gaussian", engine="native"),
        EngineError,
        r"'native' does not support.*only dot products, not Gaussian",
    ),
    (
        "native of another weighting",
        lambda: attend(*map(tensor, (Q, K, V)), weighting="hard", engine="native"),
        EngineError,
        r"'native' does not support.*only softmax, not Hard",
    ),
    (
        "shared heads without asking",
        lambda: qkv.scaled_dot_product_attention(HEADS, HEADS[:, :2], HEADS[:, :2]),
        ArgumentError,
        r"4, 2, 2 heads.*enable_gqa=True",
    ),
    (
        "a mask of integers for torch's signature",
        lambda: qkv.scaled_dot_product_attention(Q, K, V, one(4, 6, dtype="int64")),
        DtypeError,
        r"int64.*booleans",
    ),
    (
        "torch's signature, scale",
        lambda: qkv.scaled_dot_product_attention(Q, K, V, scale="x"),
        DtypeError,
        r"scale.*'x'",
    ),
]

TABLES = {
    "input": INPUTS,
    "framework": FRAMEWORKS,
    "name": NAMES,
    "number": NUMBERS,
    "parameter": PARAMETERS,
    "mask": MASKS,
    "together": COMBINATIONS,
}
CASES = [
    pytest.param(*case[1:], id=f"{table}: {case[0]}")
    for table, result in TABLES.items()
    for case in result
]


@pytest.mark.parametrize(("call", "error", "pattern"), CASES)
def test_one_clear_error(
    call: Callable[[], Any], error: Any, pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        with pytest.raises(Exception) as caught:
            call()
    result = caught.value
    assert isinstance(result, error), repr(result)
    assert isinstance(result, qkv.QkvError) and isinstance(result, ValueError | TypeError)
    message = str(result)
    assert re.search(pattern, message), message
    assert "\n" not in message
    assert result.__cause__ is None and (result.__context__ is None or result.__suppress_context__)
    assert [str(w.message) for w in leaked] == []
    assert capfd.readouterr() == ("", "")


def test_ids_are_distinguished() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax.numpy", "tensorflow"])
def test_each_framework_says_the_same(framework: str) -> None:
    """The checks run before the framework's own, so that users never see its errors."""
    module = load(framework)
    make = getattr(module, "asarray", None) or module.constant
    if framework == "torch":
        make = module.tensor
    q, k, v = (make(x.astype("float32")) for x in (Q, K, V))
    w = make(one(3, 4, dtype="float32"))
    table = [
        (lambda: attend(q[0], k, v), ShapeError, "query.*two axes"),
        (lambda: attend(q, k[:, :2], v), ShapeError, "query has 3.*key 2"),
        (lambda: attend(q, k, v[:5]), ShapeError, "key has 6.*value.* 5"),
        (lambda: attend(q, k, make(one(6, 2, dtype="int32"))), DtypeError, "value.*int32"),
        (lambda: attend(q, k, v, score=scores.Multiplicative(w)), ShapeError, r"\(3, 4\)"),
        (
            lambda: attend(q, k, v, mask=make(one(4, 6, dtype="int32"))),
            DtypeError,
            "int32.*boolean",
        ),
        (lambda: attend(q, k, v, mask=make(one(4, 5, dtype="bool"))), ShapeError, r"\(4, 5\)"),
        (lambda: attend(q, k, v, mask=masks.lengths([3])), ShapeError, "lengths"),
        (lambda: attend(q, k, v, dropout_p=0.5, seed="x"), DtypeError, "seed.*str"),
        (
            lambda: attend(q, k, v, dropout_p=0.5, seed=make(np.array([1, 2]))),
            DtypeError,
            "seed must",
        ),
        (lambda: attend(q, k, v, dropout_p=0.5, seed=make(np.array(1.5))), DtypeError, "seed must"),
        (lambda: attend(q, k, v, score=lambda q, k: q), ShapeError, r"\(4, 3\).*4, 6"),
    ]
    for call, error, pattern in table:
        with pytest.raises(error, match=pattern):
            call()


def test_lists_and_masks_are_read_in_the_precision_of_the_query() -> None:
    """No error: nested lists of numbers and a float mask become what the query is."""
    q, k, v = (tensor(x) for x in np.random.default_rng(0).normal(size=(3, 5, 5)))
    bias = tensor(np.random.default_rng(1).normal(size=(5, 5))).float()
    table = [((k.tolist(), v), None, None), ((k, v), bias, bias.double())]
    for arguments, inputs, meant in table:
        want = qkv.attend(q, k, v, engine="dense", mask=meant)
        for engine in (None, "dense", "streaming"):
            got = qkv.attend(q, *arguments, engine=engine, mask=inputs)
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, 1e-10, 1e-10)
    for one, two in ((q, k), (q.numpy(), k.numpy())):
        for inputs in ((one, k.tolist()), (q.tolist(), two)):
            np.testing.assert_allclose(qkv.weights(*inputs), qkv.weights(one, two), 1e-12)


def test_line_ends_of_windows_are_line_ends() -> None:
    assert escape_control_characters("one\r\ntwo\rthree") == "one\ntwo\\rthree"


@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**31, 10**30])
def test_a_bound_beyond_all_positions_is_none(far: int) -> None:
    for make in (np.asarray, tensor):
        q, k, v = make(Q), make(K), make(V)
        every = qkv.attend(q, k, v)
        rules = (masks.window(far), masks.dilated(far, 1), masks.blocks([[True]], far))
        for mask in (*rules, masks.causal(offset=far), masks.window(far, far, offset=far)):
            np.testing.assert_allclose(qkv.attend(q, k, v, mask=mask), every, 1e-12)
        assert not qkv.weights(q, k, mask=masks.causal(offset=-far)).any()
        alone = qkv.weights(q, k, mask=masks.window(0))
        for mask in (masks.strided(far), masks.dilated(2, far), masks.window(0, offset=0)):
            np.testing.assert_array_equal(qkv.weights(q, k, mask=mask), alone)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: qkv.attend(Q, K, V, score=weightings.Hard()), "weighting Hard.*as weighting="),
        (lambda: qkv.attend(Q, K, V, score=masks.causal), "mask causal.*: pass it as mask="),
        (
            lambda: qkv.Database({"a": 1.0}).ask("a", score=weightings.Hard()),
            "pass it as weighting=",
        ),
        (
            lambda: load("qkv.nn").Attention(score=masks.window(2)),
            "mask window.*: pass it as mask=",
        ),
        (lambda: qkv.attend(Q, K, V, return_weights=Q), "^return_weights must be True, False or"),
        (lambda: masks.window(np.ones(3)), "window: left must be an integer"),
        (lambda: masks.blocks([[1], [1, 0]], 2), "differ in length"),
        (lambda: qkv.scaled_dot_product_attention(Q, K, V, is_causal=Q), "as attn_mask"),
    ],
)
def test_one_thing_in_the_place_of_another_is_named(call, says) -> None:
    with pytest.raises(QkvError, match=says):
        call()


def test_known_names_with_blanks_are_shown_with_them() -> None:
    message = "unknown column 'name': did you mean 'name '? Known: ' age', 'name ', town."
    assert str(unknown_name_error("column", "name", ["name ", " age", "town"])) == message


def test_a_mistake_inside_a_function_is_its_own():
    with pytest.raises(TypeError, match=r"^my own$") as caught:
        attend(score=_wrong)
    assert not isinstance(caught.value, QkvError)


def _wrong(query: Any, key: Any) -> Any:
    raise TypeError("my own")
