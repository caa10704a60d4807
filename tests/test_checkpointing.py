"""Activation checkpointing: what is computed again is what was computed first.

torch.utils.checkpoint asks that the recomputation saves as many tensors as the first run did. The
first call of a kind chooses an engine and later ones take the cached choice, so both orders run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import choice, plan_cache
from tests.installed_frameworks import FRAMEWORKS

torch = pytest.importorskip("torch")

from torch.utils import checkpoint as checkpointing  # noqa: E402

from qkv import nn  # noqa: E402

pytestmark = pytest.mark.sample_of_module(14)

N, D = 20, 8
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-10}
WEIGHTINGS: dict[str, Any] = {
    **{name: name for name in ("softmax", "hard", "average", "sigmoid", "sparsemax", "entmax15")},
    "top 3": weightings.TopK(3),
    "straight through": weightings.Hard(straight_through=True),
    "entmax 1.3": weightings.Entmax(1.3),
}
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": lambda: masks.causal,
    "window": lambda: masks.window(2),
    "lengths": lambda: masks.lengths([N - 1, N - 2]),
    "documents": lambda: masks.documents(torch.arange(N) // 7),
    "boolean": lambda: torch.ones(N, N).tril().bool(),
    "float": lambda: torch.linspace(-1, 1, N * N).reshape(N, N),
    "custom": lambda: masks.custom(lambda b, h, i, j: (i + j) % 2 == 0),
}


def random_tensor(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()


def run(function: Callable[[Any], Any], x: Any) -> tuple[Any, ...]:
    """The output and the gradient, from the same random state."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    out = function(x)
    out.float().square().sum().backward()
    return out.detach(), x.grad


def check(
    function: Callable[[Any], Any], x: Any, use_reentrant: bool = False, **options: Any
) -> None:
    """The same with and without a checkpoint, in the first call of its kind and in later ones."""
    options = {"use_reentrant": use_reentrant, **options}
    plan_cache.PLANS_BY_SIGNATURE.clear()
    plan_cache._PLANS_BY_SIZE_CLASS.clear()
    actual = [
        run(lambda a: checkpointing.checkpoint(function, a, **options), x)
        for _ in ("first", "later")
    ]
    want, near = run(function, x), TOLERANCES[x.dtype]
    for one in actual:
        torch.testing.assert_close(one, want, atol=near, rtol=near)


@pytest.mark.sample(27)
@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_weighting_and_mask(weighting: str, dropout_p: float, engine: Any) -> None:
    for mask in MASKS.values():
        options = {"weighting": WEIGHTINGS[weighting], "mask": mask(), "dropout_p": dropout_p}
        check(
            lambda a, options=options: qkv.attend(a, a, a, **options, engine=engine),
            random_tensor(2, 2, N, D),
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_every_precision(weighting: str, dtype: Any, use_reentrant: bool) -> None:
    for mask, dropout_p in itertools.product(("none", "causal", "boolean"), (0.0, 0.3)):
        options = {"weighting": weighting, "mask": MASKS[mask](), "dropout_p": dropout_p}
        x = random_tensor(2, 2, N, D, dtype=dtype)
        check(lambda a, options=options: qkv.attend(a, a, a, **options), x, use_reentrant)


W = random_tensor(16, D).detach()
SCORES: dict[str, Any] = {
    **{name: name for name in ("gaussian", "cosine", "laplace")},
    "multiplicative": scores.Multiplicative(W[:D]),
    "additive": scores.Additive(W, W.flip(0), W[:, 0]),
    "gated": scores.Gated(W[0], W[1]),
    "function": lambda q, k: (q @ W.mT) @ (k @ W.mT).mT / 8,
}


@pytest.mark.parametrize("score", SCORES)
def test_every_score(score: str) -> None:
    check_score(score, None)
    served = []
    for engine in set(choice.ENGINES_BY_NAME) - {"triton"}:
        try:
            check_score(score, engine)
        except qkv.errors.EngineError:
            continue
        served.append(engine)
    assert {"dense", "streaming"} <= {*served}


def check_score(score: str, engine: str | None) -> None:
    def attend(a: Any) -> Any:
        return qkv.attend(a, a, a, score=SCORES[score], engine=engine)

    x = random_tensor(2, 2, N, D)
    attend(x.detach())  # raises where the engine does not serve the call
    check(attend, x)


@pytest.mark.applies(lambda expected, weighting, **_: expected != "lse" or weighting == "softmax")
@pytest.mark.parametrize("n", [N, 300])
@pytest.mark.parametrize("expected", [True, "mean", "lse", "alone"])
@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_the_weights_and_the_log_sum_exp_too(weighting: str, expected: Any, n: int) -> None:
    def attend(a: Any) -> Any:
        if expected == "alone":
            return qkv.weights(a, a, weighting=weighting, dropout_p=0.2)
        options = {"return_lse": True} if expected == "lse" else {"return_weights": expected}
        actual = qkv.attend(a, a, a, weighting=weighting, **options)
        return torch.cat([x.flatten() for x in actual])

    check(attend, random_tensor(1, 2, n, D))


LARGE: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "additive": (lambda a: qkv.attend(a, a, a, score=SCORES["additive"]), (1, 1, 600, D)),
    "gaussian": (lambda a: qkv.attend(a, a, a, score=scores.Gaussian(0.05)), (1, 1, 1500, 3)),
    "window": (lambda a: qkv.attend(a, a, a, mask=masks.window(3)), (1, 2, 400, D)),
    "dropout": (lambda a: qkv.attend(a, a, a, dropout_p=0.2), (1, 2, 400, D)),
    "rare dropout": (lambda a: qkv.attend(a, a, a, dropout_p=0.001), (1, 2, 200, D)),
    "entmax": (lambda a: qkv.attend(a, a, a, weighting="entmax15", dropout_p=0.2), (1, 2, 400, D)),
    "shared heads": (lambda a: qkv.attend(a, a[:, :1], a[:, :1]), (1, 2, 30, D)),
    "three axes": (lambda a: qkv.attend(a, a, a, mask="causal"), (2, 30, D)),
    "no keys": (lambda a: qkv.attend(a, a[:, :0], a[:, :0]) + a, (2, 30, D)),
}


@pytest.mark.parametrize("name", LARGE)
def test_longer_sequences_and_other_shapes(name: str) -> None:
    function, shape = LARGE[name]
    check(function, random_tensor(*shape))


def test_a_key_that_is_not_finite_behind_the_mask() -> None:
    """The kernel runs first and the equation after it; so it is when it is computed again."""
    mask = (torch.arange(N) < N - 1).expand(N, N)
    spoiled = torch.zeros(N, 1)
    spoiled[-1] = float("nan")
    check(lambda a: qkv.attend(a, a.detach() + spoiled, a, mask=mask), random_tensor(2, 2, N, D))


@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_under_autocast(weighting: str) -> None:
    def attend(a: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return qkv.attend(a, a, a, weighting=weighting, dropout_p=0.3).float()

    check(attend, random_tensor(2, 2, N, D))


@pytest.mark.parametrize("weighting", ["softmax", "entmax15", "sigmoid"])
def test_what_to_save_may_be_selected(weighting: str) -> None:
    """Products of matrices are saved, all else is computed again."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]

    def context() -> Any:
        return checkpointing.create_selective_checkpoint_contexts(products)

    def attend(a: Any) -> Any:
        return qkv.attend(a @ W[:D], a, a, weighting=weighting)

    check(attend, random_tensor(2, 2, N, D), context_fn=context)


def test_a_graph_of_torch_compile() -> None:
    def attend(a: Any) -> Any:
        return qkv.attend(a, a, a, mask=masks.causal)

    def held(a: Any) -> Any:
        return checkpointing.checkpoint(attend, a, use_reentrant=False)

    x = random_tensor(1, 2, N, D)
    compiled = torch.compile(held, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, x), run(attend, x))
    inner = torch.compile(attend, backend="aot_eager")
    check(lambda a: inner(a), x)


LAYERS: dict[str, Callable[[], Any]] = {
    "heads": lambda: nn.MultiHeadAttention(D, 2, dropout=0.3, batch_first=True),
    "entmax heads": lambda: nn.MultiHeadAttention(
        D, 2, dropout=0.3, batch_first=True, weighting="entmax15"
    ),
    "additive heads": lambda: nn.MultiHeadAttention(D, 2, batch_first=True, score="additive"),
    "block": lambda: nn.TransformerBlock(D, 2, dropout=0.3),
    "self-attention": lambda: nn.SelfAttention(D, dropout=0.3),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_training(name: str, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().train()
    is_heads = isinstance(layer, nn.MultiHeadAttention)

    def forward(a: Any) -> Any:
        return layer(a, a, a, need_weights=False)[0] if is_heads else layer(a)

    check(forward, random_tensor(2, N, D), use_reentrant)
    slopes = []
    for held in (False, True):
        layer.zero_grad()
        inner = forward
        if held:

            def inner(a: Any) -> Any:
                return checkpointing.checkpoint(forward, a, use_reentrant=use_reentrant)

        run(inner, random_tensor(2, N, D))
        slopes.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    torch.testing.assert_close(*slopes)


# Other frameworks


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("weighting", "jitted"), [("softmax", False), ("softmax", True), ("sigmoid", True)]
)
def test_jax_checkpoint(weighting: str, jitted: bool) -> None:
    if "jax" not in [fw.name for fw in FRAMEWORKS]:
        pytest.skip("jax is not among the frameworks of this run")
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(random_tensor(1, 2, N, D).detach().numpy())
    for options in ({}, {"mask": masks.causal, "dropout_p": 0.3, "seed": 7, "score": "gaussian"}):

        def loss(a: Any, options: Any = options) -> Any:
            return (qkv.attend(a, a, a, weighting=weighting, **options) ** 2).sum()

        made = [jax.value_and_grad(f) for f in (loss, jax.checkpoint(loss))]
        want, actual = [(jax.jit(f) if jitted else f)(x) for f in made]
        np.testing.assert_allclose(actual[0], want[0], rtol=1e-5)
        np.testing.assert_allclose(actual[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("weighting", ["softmax", "sparsemax"])
def test_tensorflow_recompute_grad(weighting: str, in_graph: bool) -> None:
    if "tensorflow" not in [fw.name for fw in FRAMEWORKS]:
        pytest.skip("tensorflow is not among the frameworks of this run")
    tf = pytest.importorskip("tensorflow")
    x = tf.Variable(random_tensor(1, 2, N, D).detach().numpy())
    for options in ({}, {"mask": masks.causal, "dropout_p": 0.3, "seed": 7, "score": "gaussian"}):

        def attend(a: Any, options: Any = options) -> Any:
            return qkv.attend(a, a, a, weighting=weighting, **options)

        def slope(function: Any) -> Any:
            with tf.GradientTape() as tape:
                out = tf.reduce_sum(function(tf.identity(x)) ** 2)
            return out, tape.gradient(out, x)

        held = tf.recompute_grad(attend)
        actual = [
            (tf.function(slope, autograph=False) if in_graph else slope)(f) for f in (attend, held)
        ]
        for want, other in zip(*actual, strict=True):
            np.testing.assert_allclose(other, want, rtol=1e-4, atol=1e-5)
