"""Random legal calls of JAX or TensorFlow under their transforms, against the equation in float64.

python -m bench.transformed jax|tensorflow SECONDS SEED

Scores, weightings, masks, dtypes, lengths, grouped heads, dropout, what is returned, the engine and
the transform are drawn. A call is complained of where its output or a gradient is further from
float64 than LIMIT, or where it raises anything that is not ours.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

import qkv
from qkv import masks, scores, weightings
from qkv.errors import QkvError

LIMIT = {"float64": 1e-7, "float32": 5e-4, "bfloat16": 6e-2, "float16": 8e-3}
"""‖got − want‖ / ‖want‖."""
SCORES = (
    *("scaled_dot", "dot", "cosine", "gaussian", "laplace", "softcap", "epanechnikov"),
    *("learned", "gated", "additive"),  # by arrays
)
WEIGHTINGS = (
    *("softmax", "entmax15", "sparsemax", "topk", "hard", "average", "sigmoid", "raw"),
    *("warm", "alpha"),
)
RULES = ("none", "none", "causal", "window", "lengths", "bool", "float", "documents", "not")
CHOOSY = ("hard", "topk")
"""Weightings that another rounding may have choose another key."""

Function = Callable[..., Any]


class Drawn(NamedTuple):
    """Arrays by name, the other arguments as a function of such arrays, and how it reads."""

    arrays: dict[str, np.ndarray]
    how: Callable[[dict[str, Any]], dict[str, Any]]
    dtype: str
    weighting: str
    told: str


def draw(random: Random) -> Drawn:
    make = np.random.default_rng(random.randrange(2**31))
    dtype = random.choice(("float32", "float32", "float64", "bfloat16", "float16"))
    few = random.choice((1, 2))
    lead = random.choice(((), (2,), (2, 2 * few), (1, 2 * few)))
    less = (lead[0], few) if len(lead) == 2 else lead
    top = random.choice((5, 9, 9, 20, 300))
    n, m = random.choice((1, random.randint(1, top))), random.randint(1, top)
    w, d = random.choice((1, 3, 8)), random.choice((1, 4))
    arrays = {
        "query": make.normal(size=(*lead, n, w)),
        "key": make.normal(size=(*less, m, w)),
        "value": make.normal(size=(*less, m, d)),
    }
    score = random.choice(SCORES)
    shapes = {"learned": ((w, w),), "gated": ((w,), (w,)), "additive": ((4, w), (4, w), (4,))}
    for i, shape in enumerate(shapes.get(score, ())):
        arrays[f"of the score {i}"] = make.normal(size=shape) / w**0.5
    weighting = random.choice(WEIGHTINGS)
    if weighting == "warm":
        arrays["temperature"] = np.abs(make.normal(size=())) + 0.5
    if weighting == "alpha":
        shape = random.choice(((), lead[1:], (n, 1)))
        arrays["alpha"] = make.uniform(1.1, 1.9, size=shape)
    rule = random.choice(RULES)
    own = random.choice(((n, m), (1, m), (n, 1), (*lead, n, m)))
    fixed: dict[str, Any] = {}
    if rule == "float":
        arrays["mask"] = make.normal(size=own)
        if random.random() < 0.5:
            arrays["mask"][make.random(own) < 0.3] = -np.inf
    elif rule == "bool":
        arrays["mask"] = make.random(own) > 0.3
    elif rule == "lengths" and lead:
        fixed["mask"] = masks.lengths(make.integers(0, m + 1, lead[0]))
    elif rule == "documents" and n == m:
        fixed["mask"] = masks.documents(np.sort(make.integers(0, 3, n)))
    elif rule == "causal":
        fixed["mask"] = masks.causal(random.choice(("top_left", "bottom_right")))
    elif rule == "window":
        fixed["mask"] = masks.window(random.randrange(4), random.randrange(4))
    elif rule == "not":
        fixed["mask"] = ~masks.dilated(2, 1) | masks.global_tokens(1)
    if random.random() < 0.15:
        fixed |= {"dropout_p": 0.3, "seed": random.randrange(1000)}
    if random.random() < 0.2:
        fixed["engine"] = random.choice(("streaming", "dense"))
    poisoned = "lengths" in rule and "mask" in fixed and random.random() < 0.5
    if poisoned:  # behind every sequence's end
        arrays["key"][..., int(fixed["mask"].valid.max()) :, :] = np.nan
        arrays["value"][..., int(fixed["mask"].valid.max()) :, :] = np.inf

    def how(given: dict[str, Any]) -> dict[str, Any]:
        held = [x for name, x in given.items() if name.startswith("of the score")]
        kinds: dict[str, Any] = {
            "learned": scores.Multiplicative,
            "gated": scores.Gated,
            "additive": scores.Additive,
            "softcap": lambda: scores.ScaledDot(softcap=2.0),
            "epanechnikov": lambda: scores.Epanechnikov(2.0),
        }
        ways: dict[str, Any] = {
            "topk": lambda: weightings.TopK(3),
            "warm": lambda: weightings.Softmax(given["temperature"]),
            "alpha": lambda: weightings.Entmax(given["alpha"]),
        }
        return {
            "score": kinds[score](*held) if score in kinds else score,
            "weighting": ways[weighting]() if weighting in ways else weighting,
            **fixed,
            **({"mask": given["mask"]} if "mask" in given else {}),
        }

    told = f"{score}, {weighting}, {rule}{own if rule in ('bool', 'float') else ''}, {dtype} "
    told += f"{[x.shape for x in arrays.values()]} {fixed} {'poisoned' if poisoned else ''}"
    return Drawn(arrays, how, dtype, weighting, told)


def attended(drawn: Drawn, names: list[str], rest: dict[str, Any]) -> Function:
    """attend as a function of the arrays of these names."""

    def function(*arrays: Any) -> Any:
        given = {**rest, **dict(zip(names, arrays, strict=True))}
        return qkv.attend(given["query"], given["key"], given["value"], **drawn.how(given))

    function.names = names  # type: ignore[attr-defined]
    return function


def exact(drawn: Drawn, names: list[str], along: np.ndarray | None = None) -> Any:
    """The output in float64; with `along` also the gradients of Σ output · along."""
    given = {name: torch.tensor(x) for name, x in rounded(drawn).items()}
    for name in names:
        given[name].requires_grad_()
    how = {**drawn.how(given), "engine": "dense"}
    out = qkv.attend(given["query"], given["key"], given["value"], **how)
    if along is None:
        return out.detach().numpy()
    total = (out * torch.tensor(along)).sum()
    slopes = (
        torch.autograd.grad(total, [given[name] for name in names], allow_unused=True)
        if total.requires_grad
        else [None] * len(names)
    )
    return out.detach().numpy(), [
        np.zeros(given[name].shape) if x is None else x.numpy()
        for name, x in zip(names, slopes, strict=True)
    ]


def rounded(drawn: Drawn) -> dict[str, np.ndarray]:
    """What the call is given, in float64: numbers that its dtype has."""
    kind = getattr(torch, drawn.dtype)
    return {
        name: x if x.dtype == bool else torch.tensor(x).to(kind).double().numpy()
        for name, x in drawn.arrays.items()
    }


class Jax:
    def __init__(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self.jax, self.np = jax, jax.numpy
        self.transforms = {
            "plain": lambda f: f,
            "jit": jax.jit,
            "vmap": lambda f: self.mapped(f),
            "jit of vmap": lambda f: jax.jit(self.mapped(f)),
            "checkpoint": lambda f: jax.checkpoint(f),
        }

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return self.np.asarray(x) if x.dtype == bool else self.np.asarray(x, dtype)

    def mapped(self, function: Function) -> Function:
        """The function of one array less its new first axis, by vmap over three alike."""
        jax = self.jax

        def call(*given: Any) -> Any:
            stacked = [self.np.stack([x] * 3) for x in given]
            return jax.vmap(function)(*stacked)[1]

        return call

    def slopes(self, function: Function, given: list[Any], along: np.ndarray) -> list[Any]:
        def total(*given: Any) -> Any:
            out = function(*given)
            return self.np.sum(out.astype("float64") * along)

        return list(self.jax.grad(total, tuple(range(len(given))))(*given))

    def push(self, function: Function, given: list[Any], along: list[np.ndarray]) -> Any:
        moved = [self.np.asarray(t, x.dtype) for t, x in zip(along, given, strict=True)]
        return self.jax.jvp(function, tuple(given), tuple(moved))[1]


class TensorFlow:
    push = None

    def __init__(self) -> None:
        import tensorflow as tf

        self.tf = tf
        self.transforms = {
            "plain": lambda f: f,
            "tf.function": lambda f: tf.function(f, autograph=False),
            "unknown lengths": lambda f: self.unknown(f, -2),
            "unknown batch": lambda f: self.unknown(f, 0),
            "nothing known": lambda f: self.unknown(f, None),
        }

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return self.tf.constant(x) if x.dtype == bool else self.tf.cast(self.tf.constant(x), dtype)

    def unknown(self, function: Any, axis: int | None) -> Function:
        """In a graph that does not know an axis of queries, keys, values and masks, or any but the
        last; what is learned has a shape."""
        tf = self.tf

        def shape(name: str, x: Any) -> list[int | None]:
            known = list(x.shape)
            if name in ("query", "key", "value", "mask"):
                for i in range(len(known) - 1) if axis is None else [axis]:
                    known[i] = None
            return known

        def call(*given: Any) -> Any:
            pairs = zip(function.names, given, strict=True)
            specs = [tf.TensorSpec(shape(name, x), x.dtype) for name, x in pairs]
            return tf.function(function, input_signature=specs, autograph=False)(*given)

        return call

    def slopes(self, function: Function, given: list[Any], along: np.ndarray) -> list[Any]:
        tf = self.tf
        with tf.GradientTape() as tape:
            tape.watch(given)
            out = tf.reduce_sum(tf.cast(function(*given), "float64") * along)
        found = tape.gradient(out, given, unconnected_gradients="zero")
        return [tf.convert_to_tensor(x) for x in found]


def off(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got).astype(float)
    if got.shape != want.shape:
        return float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    gap = np.linalg.norm((got - want)[finite])
    return float(gap / max(np.linalg.norm(want[finite]), 0.1 * max(want.size, 1) ** 0.5))


def complaint(fw: Any, drawn: Drawn, transform: str, random: Random) -> str | None:
    limit = LIMIT[drawn.dtype] * (1 if drawn.weighting not in CHOOSY else 1e9)
    moved = [name for name, x in drawn.arrays.items() if x.dtype != bool]
    given = {name: fw.array(x, drawn.dtype) for name, x in rounded(drawn).items()}
    rest = {name: x for name, x in given.items() if name not in moved}
    function = fw.transforms[transform](attended(drawn, moved, rest))
    floats = [given[name] for name in moved]
    want = exact(drawn, [])
    out = function(*floats)
    if not (gap := off(out, want)) <= limit:
        return f"the output is off by {gap:.1e}"
    if not np.isfinite(want).all():
        return None
    make = np.random.default_rng(random.randrange(2**31))
    along = make.normal(size=want.shape)
    want, slopes = exact(drawn, moved, along)
    got = fw.slopes(function, floats, along)
    for name, x, y in zip(moved, got, slopes, strict=True):
        if not (gap := off(x, y)) <= 4 * limit:
            return f"the gradient of {name} is off by {gap:.1e}"
    if fw.push and random.random() < 0.3:
        ways = [make.normal(size=x.shape) for x in floats]
        tangent = np.sum(np.asarray(fw.push(function, floats, ways)).astype(float) * along)
        rounded_ways = [np.asarray(fw.array(x, drawn.dtype)).astype(float) for x in ways]
        pairs = list(zip(slopes, rounded_ways, strict=True))
        expected = sum(float(np.sum(x * y)) for x, y in pairs)
        scale = sum(float(np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs)
        if not abs(tangent - expected) <= 4 * limit * max(scale, 1.0):
            return f"jvp gives {tangent:.6g}, not {expected:.6g}"
    return None


def run(fw: Any, random: Random) -> Iterator[tuple[str, str | None]]:
    """Calls without end: the transform, and the complaint."""
    while True:
        drawn, transform = draw(random), random.choice([*fw.transforms])
        try:
            exact(drawn, [])
        except QkvError:
            continue  # two things that mean nothing together
        try:
            wrong = complaint(fw, drawn, transform, random)
        except QkvError as error:
            wrong = None if "engine" in str(error) else f"refused: {error}"
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {str(error)[-300:]}"
        yield transform, None if wrong is None else f"{wrong} | {drawn.told}"


def main(name: str, seconds: float, seed: int) -> None:
    fw = {"jax": Jax, "tensorflow": TensorFlow}[name]()
    started, done, wrongs = time.monotonic(), Counter[str](), 0
    for transform, wrong in run(fw, Random(seed)):
        done[transform] += 1
        if wrong is not None:
            wrongs += 1
            print(f"call {sum(done.values())} under {transform}: {wrong}", flush=True)
        if time.monotonic() - started > seconds:
            break
    print(f"{sum(done.values())} calls, {wrongs} complaints, {dict(done)}")
    sys.exit(bool(wrongs))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("jax", "tensorflow"):
        sys.exit(__doc__)
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
