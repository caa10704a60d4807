"""The layers of qkv.keras on one backend; test_keras.py runs this file once for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError, ShapeError
from qkv.frameworks import to_numpy
from qkv.keras import (
    AdditiveAttention,
    Attention,
    FeedForward,
    GroupedQueryAttention,
    MultiHeadAttention,
    SelfAttention,
)

# Keras's variables were written for an older NumPy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),
    pytest.mark.sample_of_module(26),
]

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """All that is drawn is the same in every run, whichever tests run before."""
    keras.utils.set_random_seed(0)
    RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def assert_close(actual: Any, expected: Any, within: float = 1e-5) -> None:
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), atol=within, rtol=within)


def additive() -> scores.Score:
    rng = np.random.default_rng(1)
    w = [rng.standard_normal(shape) for shape in ((3, 4), (3, 4), (3,), (3,))]
    return scores.Additive(*w)


@keras.saving.register_keras_serializable("cases")
def nearer(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.5 * keras.ops.cast(keras.ops.abs(q - k), "float32")


@keras.saving.register_keras_serializable("cases")
def product(query: Any, key: Any) -> Any:
    return keras.ops.matmul(query, keras.ops.swapaxes(key, -1, -2))


@keras.saving.register_keras_serializable("cases")
@dataclass(frozen=True)
class Halved(scores.Score):
    by: float = 2.0

    def __call__(self, query: Any, key: Any) -> Any:
        return product(query, key) / self.by

    def get_config(self) -> dict[str, Any]:
        return {"by": self.by}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Halved:
        return cls(**config)


SCORES: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: name) for name in ("dot", "cosine", "gaussian", "laplace")},
    "a number": lambda: scores.Gaussian(0.7),
    "a learned number": lambda: scores.Gaussian(np.array(0.7)),
    "a cap": lambda: scores.ScaledDot(0.5, softcap=3.0),
    "arrays": additive,
    "a matrix": lambda: scores.Multiplicative(np.linspace(-1, 1, 16).reshape(4, 4)),
    "nested": lambda: scores.Gated(np.ones(4), -np.ones(4), 0.1, scores.Gaussian(0.5)),
    "modified": lambda: scores.Modified("dot", nearer),
    "a function": lambda: product,
    "a class of one's own": lambda: Halved(3.0),
}
WEIGHTINGS: dict[str, Any] = {
    **{name: name for name in ("softmax", "hard", "average", "raw", "sigmoid", "sparsemax")},
    "entmax": weightings.Entmax(1.3),
    "topk": weightings.TopK(2),
    "temperature": weightings.Softmax(0.5),
    "straight through": weightings.Hard(straight_through=True),
}


# Values


def test_attention_is_the_equation() -> None:
    q, k, v = numbers(2, 3, 4), numbers(2, 5, 4), numbers(2, 5, 6)
    s = np.exp(q @ k.swapaxes(1, 2) / 2)
    alpha = s / s.sum(-1, keepdims=True)
    out, result = Attention()([q, v, k], return_attention_scores=True)
    assert_close(out, alpha @ v)
    assert_close(result, alpha)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SCORES)
def test_attention_with_every_score(name: str) -> None:
    if name == "a class of one's own" or name == "a function":
        reference: Any = (lambda q, k: q @ k.swapaxes(-1, -2) / 3) if "class" in name else "dot"
    elif name == "modified":
        reference = scores.Modified("dot", lambda s, b, h, q, k: s - 0.5 * abs(q - k))
    else:
        reference = SCORES[name]()
    q, k, v = numbers(2, 3, 4), numbers(2, 5, 4), numbers(2, 5, 6)
    wide = (x.astype("float64") for x in (q, k, v))
    assert_close(Attention(score=SCORES[name]())([q, v, k]), qkv.attend(*wide, score=reference))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_attention_with_every_weighting(name: str) -> None:
    q, k, v = numbers(2, 3, 4), numbers(2, 5, 4), numbers(2, 5, 6)
    options = {"weighting": WEIGHTINGS[name]}
    wide = [x.astype("float64") for x in (q, k, v)]
    out, alpha = Attention(**options)([q, v, k], return_attention_scores=True)
    assert_close(out, qkv.attend(*wide, **options))
    assert_close(alpha, qkv.weights(*wide[:2], **options))


def test_without_a_key_the_value_is_the_key() -> None:
    q, v = numbers(2, 3, 4), numbers(2, 5, 4)
    assert_close(Attention()([q, v]), Attention()([q, v, v]))
    keras_layer = keras.layers.Attention()
    assert_close(Attention(score="dot")([q, v]), keras_layer([q, v]))


def test_float64_keeps_its_digits() -> None:
    if BACKEND == "jax":
        pytest.skip("JAX has float64 only if the whole process does")
    q, v = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 5, 4))
    out = Attention(score="gaussian", dtype="float64")([q, v])
    assert_close(out, qkv.attend(q, v, v, score="gaussian"), 1e-13)


def test_self_attention_is_the_seeds_formula() -> None:
    x = numbers(2, 5, 4)
    layer = SelfAttention(d_qk=3, d_v=6)
    out, alpha = layer(x, return_attention_scores=True)
    w_q, w_k, w_v = layer.get_weights()
    assert (w_q.shape, w_k.shape, w_v.shape) == ((4, 3), (4, 3), (4, 6))
    s = np.exp((x @ w_q) @ (x @ w_k).swapaxes(1, 2) / np.sqrt(3))
    expected = s / s.sum(-1, keepdims=True)
    assert_close(alpha, expected)
    assert_close(out, expected @ (x @ w_v))
    assert not np.allclose(w_q, w_k)
    assert SelfAttention()(x).shape == (2, 5, 4)


def test_feed_forward_is_its_formula() -> None:
    x = numbers(2, 5, 4)
    layer = FeedForward(8, d_out=3)
    out = layer(x)
    w1, b1, w2, b2 = layer.get_weights()
    assert (w1.shape, w2.shape) == ((4, 8), (8, 3))
    assert_close(out, np.maximum(x @ w1 + b1, 0) @ w2 + b2)
    assert FeedForward(8, use_bias=False)(x).shape == (2, 5, 4)
    assert len(FeedForward(8, use_bias=False).weights) == 0  # not built yet


LEARNED = {"additive": scores.Additive, "multiplicative": scores.Multiplicative}
LEARNED["gated"] = scores.Gated


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_score_by_its_name_or_class(name: str) -> None:
    wide = "float32" if BACKEND == "jax" else "float64"
    x, memory = (numbers(2, n, 4).astype(wide) for n in (3, 5))
    layer = Attention(score=name, dtype=wide)
    out = layer([x, memory])
    score = LEARNED[name](*layer.get_weights())
    within = 1e-5 if BACKEND == "jax" else 1e-12
    assert_close(out, qkv.attend(x, memory, memory, score=score, engine="dense"), within)
    heads = MultiHeadAttention(2, 3, score=LEARNED[name], dtype=wide)
    out, alpha = heads(x, memory, return_attention_scores=True)
    count = len(layer.get_weights())
    *own, w_q, b_q, w_k, b_k, _, _, _, _ = heads.get_weights()
    assert len(own) == count and heads.get_config()["score"] == name
    q, k = (
        np.einsum("bnd,dhw->bhnw", y, w) + b[:, None]
        for y, w, b in ((x, w_q, b_q), (memory, w_k, b_k))
    )
    score = LEARNED[name](*own)
    assert_close(alpha, qkv.weights(q, k, score=score), within)


@pytest.mark.parametrize("name", ["additive", "multiplicative"])
def test_learned_scores_start_with_a_spread_of_about_one(name: str) -> None:
    q, k = numbers(1, 200, 64), numbers(1, 200, 64)
    layer = Attention(score=name)
    layer([q, k])
    assert 0.5 < np.std(LEARNED[name](*layer.get_weights())(q, k)) < 2


def test_hidden_is_the_width_of_the_query() -> None:
    layer = Attention(score="additive")
    layer([numbers(1, 2, 3), numbers(1, 2, 5)])
    assert [w.shape for w in layer.weights] == [(3, 3), (3, 5), (3,), (3,)]


# keras.layers.MultiHeadAttention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "value_dim": {"value_dim": 6},
    "no bias": {"use_bias": False},
    "output_shape": {"output_shape": 7},
    "output_shape of two axes": {"output_shape": (3, 2)},
    "window": {"sliding_window": 2},
    "gate": {"use_gate": True},
    "axes": {"attention_axes": 1},
}
FULL = np.tril(np.ones((4, 5), bool))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    "one mask": {"attention_mask": FULL},
    "mask": {"attention_mask": np.stack([FULL, ~FULL | (np.arange(5) < 1)])},
    "whole numbers": {"attention_mask": FULL[None].astype("int32")},
    "ones and zeros": {"attention_mask": FULL[None].astype("float32")},
    "mask for each head": {"attention_mask": np.stack([FULL, FULL | True])[None]},
    "mask and causal": {"attention_mask": FULL[None, ::-1] | FULL, "use_causal_mask": True},
    "value mask": {"value_mask": np.array([[1, 1, 0, 1, 0], [1, 0, 1, 1, 1]], bool)},
    "training": {"training": True},
}


def build_pair(**options: Any) -> tuple[Any, Any]:
    """Ours with the weights of Keras's own."""
    ours, theirs = (
        kind(2, 3, **options) for kind in (MultiHeadAttention, keras.layers.MultiHeadAttention)
    )
    for layer in (ours, theirs):
        layer.build((None, 4, 4), (None, 5, 5), (None, 5, 6))
    for w in theirs.weights:
        w.assign(numbers(*w.shape))
    ours.set_weights(theirs.get_weights())
    return ours, theirs


PAIRS = [("plain", call) for call in CALLS] + [(option, "mask and causal") for option in OPTIONS]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("options", "call"), dict.fromkeys(PAIRS))
def test_multi_head_attention_is_that_of_keras(options: str, call: str) -> None:
    ours, theirs = build_pair(**OPTIONS[options])
    q, v, k = numbers(2, 4, 4), numbers(2, 5, 5), numbers(2, 5, 6)
    settings = CALLS[call]
    expected, alpha = theirs(q, v, k, return_attention_scores=True, **settings)
    assert_close(ours(q, v, k, **settings), expected)
    out, actual = ours(q, v, k, return_attention_scores=True, **settings)
    assert_close(out, expected)
    assert_close(actual, alpha)


AXES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = {
    "all": (None, (2, 3, 4, 8), (2, 5, 2, 8), (2, 3, 4, 5, 2)),
    "from the end": (-2, (2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 4, 5)),
    "one mask for the others": (2, (2, 3, 4, 8), (2, 3, 5, 8), (2, 4, 5)),
    "the first": ((1,), (2, 3, 4, 8), (2, 5, 4, 8), None),
    "two of three": ((2, 3), (2, 2, 3, 4, 8), (2, 2, 5, 2, 8), (2, 3, 4, 5, 2)),
}
"""attention_axes, the shapes of query and value, and of a mask."""


def check_same_layers(ours: Any, theirs: Any, *inputs: Any, **options: Any) -> None:
    """Ours with the weights of Keras's own gives the same, and the same shapes beforehand."""
    for layer in (theirs, ours):
        layer(*inputs, **options)
    for w in theirs.weights:
        w.assign(numbers(*w.shape) / 2)
    ours.set_weights(theirs.get_weights())
    assert [(w.name, w.shape) for w in ours.weights] == [(w.name, w.shape) for w in theirs.weights]
    actual, want = (x(*inputs, return_attention_scores=True, **options) for x in (ours, theirs))
    for one, two in zip(actual, want, strict=True):
        assert_close(one, two)
    assert_close(ours(*inputs, **options), want[0])
    again = type(ours).from_config(ours.get_config())
    assert again.get_config() == ours.get_config()
    blank = [keras.Input(x.shape[1:]) for x in keras.tree.flatten(inputs)]
    blank = keras.tree.pack_sequence_as(inputs, blank)
    for symbolic, made in zip(again(*blank, return_attention_scores=True), actual, strict=True):
        assert symbolic.shape[1:] == tuple(made.shape)[1:]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", AXES)
def test_more_axes_are_attended_over_as_in_keras(name: str) -> None:
    axes, query, value, pairs = AXES[name]
    ours, theirs = (
        kind(2, 3, attention_axes=axes)
        for kind in (MultiHeadAttention, keras.layers.MultiHeadAttention)
    )
    options = {}
    if pairs is not None:
        mask = np.random.default_rng(3).random(pairs) > 0.3
        mask[..., 0] = True  # where there is nothing to attend to, Keras averages
        options["attention_mask"] = mask
    check_same_layers(ours, theirs, numbers(*query), numbers(*value), **options)


GROUPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"use_causal_mask": True}),
    "floats": ({}, {"attention_mask": np.tril(np.ones((2, 5, 5), "float32"))}),
    "window, gate": ({"use_gate": True, "sliding_window": 2}, {"use_causal_mask": True}),
    "no bias": ({"use_bias": False}, {"value_mask": np.arange(5)[None] < [[3], [5]]}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_query_attention_is_that_of_keras(name: str) -> None:
    options, settings = GROUPED[name]
    ours, theirs = (
        kind(3, 4, 2, **options)
        for kind in (GroupedQueryAttention, keras.layers.GroupQueryAttention)
    )
    check_same_layers(ours, theirs, numbers(2, 5, 8), numbers(2, 5, 8), **settings)


@pytest.mark.parametrize("scale", [True, False])
def test_additive_attention_is_that_of_keras(scale: bool) -> None:
    for shapes, options in (
        (((2, 3, 4), (2, 5, 4)), {}),
        (((2, 3, 4), (2, 5, 6), (2, 5, 4)), {"use_causal_mask": True}),
        (((2, 3, 4), (2, 5, 4)), {"mask": [None, np.arange(5)[None] < [[3], [5]]]}),
    ):
        inputs = [numbers(*shape) for shape in shapes]
        ours, theirs = AdditiveAttention(scale), keras.layers.AdditiveAttention(scale)
        check_same_layers(ours, theirs, inputs, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["dot", "concat"])
@pytest.mark.parametrize("scale", [True, False])
def test_attention_takes_the_arguments_of_keras(mode: str, scale: bool) -> None:
    made = [kind(use_scale=scale, score_mode=mode) for kind in (Attention, keras.layers.Attention)]
    inputs = [numbers(*shape) for shape in ((2, 3, 4), (2, 5, 6), (2, 5, 4))]
    for layer in made:
        layer.build([x.shape for x in inputs])
    ours, theirs = made
    assert [w.name for w in ours.weights] == [w.name for w in theirs.weights]
    for w in theirs.weights:
        w.assign(0.7)
    check_same_layers(ours, theirs, inputs)
    check_same_layers(ours, theirs, inputs, use_causal_mask=True)
    assert (ours.use_scale, ours.score_mode) == (scale, mode)
    again = Attention.from_config(ours.get_config())
    again.build([x.shape for x in inputs])
    again.set_weights(ours.get_weights())
    assert_close(again(inputs), ours(inputs))


def test_the_score_of_keras_alone_is_its_dot() -> None:
    inputs = [numbers(2, 3, 4), numbers(2, 5, 4)]
    for options in ({"use_scale": False}, {"score_mode": "dot"}):
        assert_close(Attention(**options, weighting="sparsemax")(inputs),
              Attention("dot", "sparsemax")(inputs))  # fmt: skip


def test_a_mask_by_name() -> None:
    ours, _ = build_pair()
    q, v, k = numbers(2, 4, 4), numbers(2, 5, 5), numbers(2, 5, 6)
    for named in ("causal", masks.causal):
        assert_close(ours(q, v, k, attention_mask=named), ours(q, v, k, use_causal_mask=True))
    with pytest.raises(ArgumentError, match="did you mean 'causal'"):
        ours(q, v, k, attention_mask="casual")


def test_weights_move_both_ways() -> None:
    ours, theirs = build_pair(use_gate=True, value_dim=6)
    assert [(w.name, w.shape) for w in ours.weights] == [(w.name, w.shape) for w in theirs.weights]
    for w in ours.weights:
        w.assign(numbers(*w.shape))
    theirs.set_weights(ours.get_weights())
    x, y, z = numbers(2, 4, 4), numbers(2, 5, 5), numbers(2, 5, 6)
    # On JAX, Keras's short cut without weights fails for a value_dim.
    assert_close(ours(x, y, z), theirs(x, y, z, return_attention_scores=True)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_files_of_weights_move_both_ways(dropout: float, tmp_path: Path) -> None:
    def model(kind: Any) -> Any:
        x = keras.Input((5, 4))
        return keras.Model(x, kind(2, 3, dropout=dropout, name="heads")(x, x))

    ours, theirs = model(MultiHeadAttention), model(keras.layers.MultiHeadAttention)
    x = numbers(2, 5, 4)
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    ours.load_weights(tmp_path / "theirs.weights.h5")
    assert_close(ours(x), theirs(x))
    again = model(keras.layers.MultiHeadAttention)
    ours.save_weights(tmp_path / "ours.weights.h5")
    again.load_weights(tmp_path / "ours.weights.h5")
    assert_close(again(x), ours(x))


def test_one_step_of_training_is_that_of_keras() -> None:
    # The step of plain gradient descent is the gradient.
    x, y = numbers(4, 5, 4), numbers(4, 5, 4)
    stepped = []
    start = None
    for kind in (keras.layers.MultiHeadAttention, MultiHeadAttention):
        inputs = keras.Input((None, 4))
        model = keras.Model(inputs, kind(2, 3)(inputs, inputs, use_causal_mask=True))
        start = start or [numbers(*w.shape) for w in model.weights]
        model.set_weights(start)
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.fit(x, y, batch_size=4, verbose=0)
        stepped.append(model.get_weights())
    for theirs, ours, before in zip(*stepped, start, strict=True):
        assert_close(ours, theirs)
        assert before.shape != (4, 2, 3) or np.abs(ours - before).max() > 1e-3


@pytest.mark.parametrize("mode", ["dot", "concat"])
def test_one_step_of_the_scales_of_keras(mode: str) -> None:
    x, y = numbers(4, 5, 4), numbers(4, 5, 4)
    stepped = []
    for kind in (keras.layers.Attention, Attention):
        inputs = keras.Input((None, 4))
        model = keras.Model(inputs, kind(use_scale=True, score_mode=mode)([inputs, inputs]))
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.fit(x, y, batch_size=4, verbose=0)
        stepped.append(model.get_weights())
    assert len(stepped[0]) == (2 if mode == "concat" else 1)
    for theirs, ours in zip(*stepped, strict=True):
        assert_close(ours, theirs)
        assert ours != 1


def test_a_query_with_nothing_to_attend_to_gets_0() -> None:
    x = numbers(2, 4, 4)
    mask = np.ones((2, 4, 4), bool)
    mask[0, 1] = False
    layer = MultiHeadAttention(2, 3, use_bias=False)
    out, alpha = layer(x, x, attention_mask=mask, return_attention_scores=True)
    assert np.abs(to_numpy(out)[0, 1]).max() == 0 == np.abs(to_numpy(alpha)[0, :, 1]).max()
    assert np.abs(to_numpy(out)[1, 1]).max() > 0


# Masks


def test_masks_that_come_with_the_tensors() -> None:
    tokens = np.array([[3, 1, 0, 0], [2, 2, 4, 0]])
    embed = keras.layers.Embedding(5, 4, mask_zero=True)
    x = embed(tokens)
    plain = to_numpy(x)
    for layer, call in (
        (SelfAttention(), lambda x: (x,)),
        (MultiHeadAttention(2, 3), lambda x: (x, x)),
        (Attention(), lambda x: ([x, x],)),
    ):
        out = layer(*call(embed(tokens)))
        assert keras.ops.shape(out) == (2, 4, 4)
        mask = getattr(out, "_keras_mask", None)
        if mask is not None:  # on JAX it is kept elsewhere
            assert_close(to_numpy(mask), tokens != 0)
        alone = layer(*call(plain[:1, :2]))
        assert_close(to_numpy(out)[:1, :2], alone)
        causal = np.tril(np.ones((4, 4), bool))[None]
        narrowed = layer(*call(embed(tokens)), attention_mask=causal)
        assert_close(to_numpy(narrowed)[:1, :2], layer(*call(plain[:1, :2]), use_causal_mask=True))


def test_masks_travel_through_a_model() -> None:
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, 4, mask_zero=True)(tokens)
    for layer in (SelfAttention(), FeedForward(6)):
        x = layer(x)
    x = MultiHeadAttention(2, 3)(x, x)
    x = Attention()([x, x])
    model = keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(x))
    short, long = np.array([[3, 1]]), np.array([[3, 1, 0, 0, 0]])
    assert_close(model.predict(long, verbose=0), model.predict(short, verbose=0))


def test_masks_given_by_hand() -> None:
    q, v = numbers(2, 3, 4), numbers(2, 5, 4)
    query_mask = np.array([[1, 0, 1], [1, 1, 1]], bool)
    value_mask = np.array([[1, 1, 0, 0, 1], [0, 1, 1, 1, 1]], bool)
    out = Attention(score="dot")([q, v], mask=[query_mask, value_mask])
    assert_close(out, keras.layers.Attention()([q, v], mask=[query_mask, value_mask]))
    assert np.abs(to_numpy(out)[0, 1]).max() == 0
    layer = MultiHeadAttention(num_heads=2, key_dim=3)
    masks_by_name = {"query_mask": query_mask, "return_attention_scores": True}
    alpha = to_numpy(layer(q, v, **masks_by_name)[1])
    plain = to_numpy(layer(q, v, return_attention_scores=True)[1])
    assert_close(alpha, plain * query_mask[:, None, :, None])


@pytest.mark.parametrize("kind", [Attention, AdditiveAttention])
def test_the_weights_of_a_masked_query_are_those_of_keras(kind: Any) -> None:
    q, v = numbers(2, 3, 4), numbers(2, 5, 4)
    given = {"mask": [np.array([[1, 0, 1], [1, 1, 1]], bool), np.arange(5)[None] < [[3], [5]]]}
    ours = kind(score="dot") if kind is Attention else kind(use_scale=False)
    theirs = getattr(keras.layers, kind.__name__)(use_scale=False)
    for options in ({}, {"use_causal_mask": True}):
        actual, expected = (
            layer([q, v], return_attention_scores=True, **given, **options)
            for layer in (ours, theirs)
        )
        for one, two in zip(actual, expected, strict=True):
            assert_close(one, two)
        assert np.abs(to_numpy(actual[1])[0, 1]).max() > 0 == to_numpy(actual[0])[0, 1].max()


@pytest.mark.parametrize("grouped", [False, True])
def test_compute_attention_combines_the_causal_and_the_explicit_mask(grouped: bool) -> None:
    # Keras documents the method for subclasses, which call it with its own arrays.
    query, key, value = (numbers(1, 5, 2, 4) for _ in range(3))
    layer = GroupedQueryAttention(4, 2, 2) if grouped else MultiHeadAttention(2, 4)
    theirs = keras.layers.GroupQueryAttention(4, 2, 2) if grouped else None
    for one in (layer, theirs := theirs or keras.layers.MultiHeadAttention(2, 4)):
        one.build((1, 5, 8), (1, 5, 8))
    full = np.ones((1, 5, 5), bool)
    full[:, 3, 1] = False
    causal = np.tril(np.ones((5, 5), bool))[None]
    both, _ = layer._compute_attention(query, key, value, full, use_causal_mask=True)
    merged, _ = layer._compute_attention(query, key, value, attention_mask=full & causal)
    assert_close(both, merged)
    assert_close(both, theirs._compute_attention(query, key, value, full & causal)[0])
    alone, _ = layer._compute_attention(query, key, value, use_causal_mask=True)
    assert_close(alone, layer._compute_attention(query, key, value, causal)[0])


def test_flash_attention_without_weights_and_dropout_only() -> None:
    # What Keras refuses with flash attention, because a flash kernel has no weights.
    x = numbers(2, 4, 8)
    for layer, theirs in (
        (MultiHeadAttention(2, 4, flash_attention=True), keras.layers.MultiHeadAttention(2, 4)),
        (
            GroupedQueryAttention(4, 2, 1, flash_attention=True),
            keras.layers.GroupQueryAttention(4, 2, 1),
        ),
    ):
        check_same_outputs(layer, theirs, x, x)
        check_refused(
            CombinationError,
            "return_attention_scores.*flash_attention|attention scores.*flash attention",
            lambda: layer(x, x, return_attention_scores=True),  # noqa: B023
        )
    check_refused(
        ArgumentError,
        "Dropout.*flash attention",
        lambda: MultiHeadAttention(2, 4, flash_attention=True, dropout=0.1),
    )


def check_same_outputs(ours: Any, theirs: Any, *inputs: Any) -> None:
    for layer in (ours, theirs):
        layer(*inputs)
    ours.set_weights(theirs.get_weights())
    assert_close(ours(*inputs), theirs(*inputs))


def test_four_axes_have_masks_too() -> None:
    x = numbers(2, 3, 5, 4)
    mask = RNG.random((2, 5, 5)) > 0.3
    out = Attention()([x, x], attention_mask=mask)
    assert_close(out, qkv.attend(x, x, x, mask=mask[:, None]))


# Compiled, symbolic, in few bits


def test_shapes_are_known_before_any_number_is() -> None:
    x, y = keras.Input((None, 4)), keras.Input((7, 6))
    assert SelfAttention(3, 6)(x).shape == (None, None, 6)
    assert FeedForward(8, 3)(x).shape == (None, None, 3)
    assert Attention(score="additive")([x, y]).shape == (None, None, 6)
    out, alpha = MultiHeadAttention(2, 3)(x, y, return_attention_scores=True)
    assert (out.shape, alpha.shape) == ((None, None, 4), (None, 2, None, 7))
    out, alpha = SelfAttention(3)(x, return_attention_scores=True)
    assert (out.shape, alpha.shape) == ((None, None, 4), (None, None, None))
    assert Attention().compute_output_shape([(2, 3, 4), (2, 5, 6)]) == (2, 3, 6)
    assert SelfAttention(3, 2).compute_output_shape((2, 3, 4)) == (2, 3, 2)
    layer = MultiHeadAttention(2, 3, output_shape=9)
    assert layer.compute_output_shape((2, 3, 4), (2, 5, 4)) == (2, 3, 9)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("score", "weighting"),
    [
        ("scaled_dot", "softmax"),
        ("additive", "entmax15"),
        ("gaussian", "hard"),
        ("multiplicative", "sigmoid"),
    ],
)
def test_compiled_is_eager(score: str, weighting: str) -> None:
    x = keras.Input((None, 4))
    layer = MultiHeadAttention(2, 4, score=score, weighting=weighting)
    model = keras.Model(x, layer(x, x, use_causal_mask=True, return_attention_scores=True))
    data = numbers(3, 5, 4)
    out, alpha = model.predict(data, verbose=0)
    expected = layer(data, data, use_causal_mask=True, return_attention_scores=True)
    assert_close(out, expected[0])
    assert_close(alpha, expected[1])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
def test_tf_function_with_nothing_known() -> None:
    import tensorflow as tf

    layer = SelfAttention(3, score="additive")
    x = numbers(2, 5, 4)
    expected = layer(x, use_causal_mask=True)
    spec = tf.TensorSpec((None, None, 4))
    graph = tf.function(lambda x: layer(x, use_causal_mask=True), input_signature=[spec])
    assert_close(graph(x), expected)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    x = numbers(2, 5, 4)
    for make in (
        lambda **k: SelfAttention(3, score="additive", **k),
        lambda **k: MultiHeadAttention(2, 3, score=scores.Gaussian(np.array(0.7)), **k),
        lambda **k: FeedForward(6, **k),
    ):
        layer, full = make(dtype=policy), make()
        args = (x, x) if isinstance(layer, MultiHeadAttention) else (x,)
        out = layer(*args)
        assert keras.backend.standardize_dtype(out.dtype) == policy.removeprefix("mixed_")
        assert {w.dtype for w in layer.weights} == {"float32"}
        full(*args)
        full.set_weights(layer.get_weights())
        assert_close(keras.ops.cast(out, "float32"), full(*args), 3e-2)
        config = keras.saving.serialize_keras_object(layer)
        assert keras.saving.deserialize_keras_object(config).dtype_policy.name == policy


# Training, saving


def build_small_model(self: Any, heads: Any, last: Any) -> Any:
    """A model of all four layers, each with the arguments given for it."""
    x = keras.Input((None, 4))
    y = SelfAttention(4, **self)(x)
    y = MultiHeadAttention(2, 4, **heads)(y, y, use_causal_mask=True)
    return keras.Model(x, FeedForward(8)(Attention(**last)([y, x])))


MODELS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({}, {"score": scores.Modified("dot", nearer)}, {"score": "multiplicative"}),
    "learned": (
        {"score": "additive", "weighting": "entmax15"},
        {"score": scores.Gaussian(np.array(0.7)), "weighting": weightings.TopK(2)},
        {"score": "gated", "weighting": weightings.Softmax(np.array(0.5))},
    ),
    "alphas": ({}, {"weighting": weightings.Entmax(np.array([1.3, 1.8]))}, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_train_save_load_resume(name: str, tmp_path: Path) -> None:
    x, y = numbers(8, 5, 4), numbers(8, 5, 4)
    model = build_small_model(*MODELS[name])
    model.compile("adam", "mse", jit_compile=False)
    start = model.get_weights()
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    assert np.isfinite(model.fit(x, y, **options).history["loss"]).all()
    still = [
        w.path
        for w, before in zip(model.weights, start, strict=True)
        # A bias of all keys alike moves no weight, and so has no slope.
        if np.array_equal(to_numpy(w.value), before) and "key/bias" not in w.path
    ]
    assert not still
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0), 1e-6)
    ahead, resumed = (m.fit(x, y, **options).history["loss"] for m in (model, again))
    assert_close(np.array(resumed), np.array(ahead))
    for one, two in zip(model.get_weights(), again.get_weights(), strict=True):
        assert_close(two, one)


def test_training_learns() -> None:
    # Which of five keys is like the query: only the weights of a sharp score can tell.
    keys = np.tile(np.eye(5, dtype="float32"), (64, 1, 1))
    at = RNG.integers(5, size=64)
    values = numbers(64, 5, 1)
    query = keras.Input((1, 5)), keras.Input((5, 5)), keras.Input((5, 1))
    model = keras.Model(
        query, Attention(score=scores.Gaussian(np.array(3.0)))([query[0], query[2], query[1]])
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    data = [np.eye(5, dtype="float32")[at][:, None], keys, values]
    loss = model.fit(data, values[np.arange(64), at][:, None], epochs=60, verbose=0)
    assert loss.history["loss"][-1] < 0.02 * loss.history["loss"][0]
    assert (
        float(model.weights[0].numpy() if BACKEND == "tensorflow" else model.get_weights()[0]) < 1
    )


def test_a_last_batch_that_is_shorter_in_a_compiled_step() -> None:
    if BACKEND != "tensorflow":
        pytest.skip("the others compile for each length")
    x, lost = numbers(5, 3, 4), []
    for jit in (True, False):
        keras.utils.set_random_seed(0)
        rows = keras.Input((None, 4))
        model = keras.Model(rows, MultiHeadAttention(2, 3)(rows, rows, use_causal_mask=True))
        model.compile("sgd", "mse", jit_compile=jit)
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        lost.append(model.fit(x, x, **options).history["loss"])
    assert_close(np.array(lost[0]), np.array(lost[1]))


@pytest.mark.parametrize("kind", SCORES)
def test_every_score_is_kept_in_the_config(kind: str) -> None:
    layer = Attention(score=SCORES[kind](), name="one")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()
    q, v = numbers(2, 3, 4), numbers(2, 5, 4)
    assert_close(again([q, v]), layer([q, v]), 1e-7)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting_is_kept_in_the_config(name: str) -> None:
    layer = MultiHeadAttention(2, 3, weighting=WEIGHTINGS[name])
    again = MultiHeadAttention.from_config(layer.get_config())
    assert again.weighting == layer.weighting


def test_every_argument_is_kept_in_the_config() -> None:
    made: list[tuple[Any, dict[str, Any]]] = [
        (Attention, {"dropout": 0.1, "seed": 4, "score": "gaussian"}),
        (Attention, {"use_scale": True, "score_mode": "concat"}),
        (SelfAttention, {"d_qk": 3, "d_v": 5, "dropout": 0.1, "seed": 4}),
        (FeedForward, {"hidden": 3, "d_out": 5, "dropout": 0.1, "use_bias": False, "seed": 4}),
        (
            MultiHeadAttention,
            {"num_heads": 2, "key_dim": 3, "value_dim": 4, "dropout": 0.1, "use_bias": False},
        ),
    ]
    for kind, arguments in made:
        config = kind.from_config(kind(**arguments).get_config()).get_config()
        assert {name: config[name] for name in arguments} == arguments
    layer = SelfAttention(kernel_initializer="he_normal", kernel_regularizer="l2")
    again = SelfAttention.from_config(layer.get_config())
    again(numbers(1, 2, 3))
    assert len(again.losses) == 3


def test_arrays_of_a_score_become_weights() -> None:
    score = additive()
    layer = MultiHeadAttention(2, 4, score=score, weighting=weightings.Softmax(np.array(2.0)))
    x = numbers(2, 3, 4)
    layer(x, x)
    names = [w.name for w in layer.weights[:5]]
    fields = ["score_w_query", "score_w_key", "score_v", "score_bias"]
    assert names == [*fields, "weighting_temperature"]
    for w, x in zip(layer.weights, (score.w_query, score.w_key, score.v, score.bias), strict=False):
        assert_close(w, x, 1e-6)


# Dropout


@pytest.mark.parametrize("kind", ["attention", "self", "heads"])
def test_dropout(kind: str) -> None:
    x = np.broadcast_to(np.eye(16, dtype="float32"), (3, 16, 16))
    make: dict[str, Callable[[], tuple[Any, Any]]] = {
        "attention": lambda: (Attention("constant", "average", dropout=0.4, seed=1), ([x, x],)),
        "self": lambda: (SelfAttention(dropout=0.4, seed=1), (x,)),
        "heads": lambda: (MultiHeadAttention(2, 4, dropout=0.4, seed=1), (x, x)),
    }
    layer, args = make[kind]()
    at_rest = to_numpy(layer(*args))
    assert_close(layer(*args), at_rest, 1e-7)
    first, second = (to_numpy(layer(*args, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    assert np.abs(first[0] - first[1]).max() > 1e-3
    out, alpha = layer(*args, training=True, return_attention_scores=True)
    if kind == "heads":  # as in Keras, the weights before dropout
        assert_close(alpha, layer(*args, return_attention_scores=True)[1], 1e-6)
    else:  # as in Keras, the weights that were applied
        assert abs((to_numpy(alpha) == 0).mean() - 0.4) < 0.1
        values = x if kind == "attention" else x @ to_numpy(layer.w_v.value)
        assert_close(out, to_numpy(alpha) @ values)
    if kind == "attention":
        # The values are the identity, so the output is the weights: dropped ones are 0.
        np.testing.assert_allclose(np.unique(first), [0, 1 / 16 / 0.6], atol=1e-6)
        assert abs((first == 0).mean() - 0.4) < 0.06
        again, _ = make[kind]()
        assert_close(again(*args, training=True), first, 1e-7)


def test_dropout_in_training() -> None:
    # With no step taken, what moves the loss from one epoch to the next is what was dropped.
    x = keras.Input((None, 4))
    y = MultiHeadAttention(2, 4, dropout=0.5)(x, x)
    model = keras.Model(x, FeedForward(8, dropout=0.5)(SelfAttention(dropout=0.5)(y)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    data = numbers(4, 5, 4)
    first, second = model.fit(data, data, epochs=2, verbose=0).history["loss"]
    assert np.isfinite([first, second]).all() and abs(first - second) > 1e-4
    assert model.evaluate(data, data, verbose=0) == model.evaluate(data, data, verbose=0)


# Wrong input


def check_refused(error: type[QkvError], says: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=says):
        call()


def test_wrong_arguments_are_named() -> None:
    check_refused(ArgumentError, "num_heads", lambda: MultiHeadAttention(0, 3))
    check_refused(ArgumentError, "key_dim", lambda: MultiHeadAttention(2, 3.0))
    check_refused(ArgumentError, "value_dim", lambda: MultiHeadAttention(2, 3, value_dim="4"))
    check_refused(
        ArgumentError, "output_shape", lambda: MultiHeadAttention(2, 3, output_shape=(3, 0.5))
    )
    check_refused(
        ArgumentError, "Invalid `output_shape`", lambda: MultiHeadAttention(2, 3, output_shape=8.0)
    )
    check_refused(ArgumentError, "dropout", lambda: MultiHeadAttention(2, 3, dropout=1.5))
    check_refused(DtypeError, "dropout", lambda: Attention(dropout="some"))
    check_refused(ArgumentError, "did you mean 'concat'", lambda: Attention(score_mode="concatt"))
    check_refused(ArgumentError, "score=.*score_mode", lambda: Attention("cosine", use_scale=True))
    check_refused(ArgumentError, "d_qk", lambda: SelfAttention(-1))
    check_refused(ArgumentError, "hidden", lambda: FeedForward(None))
    check_refused(ArgumentError, "did you mean 'gaussian'", lambda: Attention("gausian"))
    check_refused(
        ArgumentError, "did you mean 'softmax'", lambda: SelfAttention(weighting="softmx")
    )
    check_refused(DtypeError, "weighting", lambda: SelfAttention(weighting=3))
    check_refused(DtypeError, "Keras layer", lambda: Attention(score=keras.layers.Dense(3)))
    x = numbers(2, 5, 4)
    check_refused(
        TypeError, r"FeedForward\.call.*'training'", lambda: FeedForward(3)(x, trainig=True)
    )
    unknown = {"name": "Gausian", "fields": {}}
    check_refused(ArgumentError, "did you mean 'Gaussian'", lambda: Attention(unknown))


def test_wrong_shapes_are_named() -> None:
    x = numbers(2, 5, 4)
    for kind in (Attention, AdditiveAttention):  # the words and the ValueError of Keras
        check_refused(ArgumentError, "must be called on a list", lambda: kind()(x))  # noqa: B023
        check_refused(ArgumentError, "of length 2 or 3", lambda: kind()([x]))  # noqa: B023
        check_refused(ArgumentError, "of length 2 or 3", lambda: kind()([x] * 4))  # noqa: B023
    check_refused(ShapeError, "key has 3 and value 5", lambda: Attention()([x, x, x[:, :3]]))
    check_refused(DtypeError, "value must be an array", lambda: Attention()([x, None]))
    check_refused(ShapeError, "same width", lambda: Attention()([x, x, x[..., :3]]))
    check_refused(ShapeError, "inputs", lambda: SelfAttention()(x[0]))
    check_refused(ShapeError, "query", lambda: GroupedQueryAttention(3, 2, 1)(x[None], x))
    check_refused(ArgumentError, "num_query_heads", lambda: GroupedQueryAttention(3, 3, 2))
    beyond = MultiHeadAttention(2, 3, attention_axes=2)
    check_refused(ArgumentError, "attention_axes", lambda: beyond(x, x))
    far = MultiHeadAttention(2, 3, attention_axes=7)
    check_refused(ArgumentError, "attention_axes", lambda: far(x, x))
    first = MultiHeadAttention(2, 3, attention_axes=1)
    check_refused(
        ShapeError, "must agree in all axes", lambda: first(x[:, :, None], numbers(2, 5, 3, 4))
    )
    two = MultiHeadAttention(2, 3)
    check_refused(
        ArgumentError,
        "need one attention axis, not 2",
        lambda: two(x[None], x[None], use_causal_mask=True),
    )
    check_refused(
        ShapeError, "must be equal.*key has 3", lambda: MultiHeadAttention(2, 3)(x, x, x[:, :3])
    )
    grouped = GroupedQueryAttention(3, 2, 1)
    check_refused(
        ShapeError,
        "widths of query and value must be equal",
        lambda: grouped.compute_output_shape((2, 4, 8), (2, 2, 7)),
    )
    check_refused(
        ShapeError, "w must be", lambda: MultiHeadAttention(2, 3, score=SCORES["a matrix"]())(x, x)
    )


def test_wrong_masks_are_named() -> None:
    x = numbers(2, 5, 4)
    for layer, args in (
        (Attention(), ([x, x],)),
        (SelfAttention(), (x,)),
        (MultiHeadAttention(2, 3), (x, x)),
    ):
        for mask in (np.ones((2, 5, 4), bool), np.ones((3, 5, 5), bool), np.ones((1,) * 5, bool)):
            check_refused(ShapeError, "attention_mask", lambda: layer(*args, attention_mask=mask))  # noqa: B023
        added = np.where(np.eye(5), 0, -1e9).astype("float32")
        check_refused(DtypeError, "attention_mask", lambda: layer(*args, attention_mask=added))  # noqa: B023
    short = np.ones((2, 4), bool)
    check_refused(
        ShapeError, "value_mask", lambda: MultiHeadAttention(2, 3)(x, x, value_mask=short)
    )
    check_refused(ShapeError, "query_mask", lambda: SelfAttention()(x, mask=short))
    check_refused(ArgumentError, "mask must be a list", lambda: Attention()([x, x], mask=short))
    check_refused(
        ArgumentError, "of length 2 or 3", lambda: Attention()([x, x], mask=[np.ones((2, 5), bool)])
    )
