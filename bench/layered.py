"""Compare random Keras layers with qkv's: outputs, one training step, saved files.

KERAS_BACKEND=tensorflow|jax|torch python -m bench.layered SECONDS SEED

The layer, its sizes, the masks with their kinds and dtypes, several attention axes, the dtype
policy and the batch are drawn. qkv's layer must give the output of Keras's, before and after one
step of `fit`, and after saving and loading. Every query sees a key: without one, the two differ on
purpose.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import keras
import numpy as np

import qkv.keras as ours

KINDS = ("heads", "heads", "axes", "grouped", "additive", "attention")
LIMIT = {"float32": 2e-4, "mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}
"""‖ours − theirs‖ / ‖theirs‖."""


class Drawn(NamedTuple):
    """A pair of layers as a function of the policy, their inputs, and a description."""

    make: Any
    listed: bool
    arrays: list[np.ndarray]
    how: dict[str, Any]
    policy: str
    description: str


def draw(random: Random) -> Drawn:
    make = np.random.default_rng(random.randrange(2**31))
    kind, policy = random.choice(KINDS), random.choice(("float32", "float32", *LIMIT))
    b, n, m, d = random.choice((1, 3)), random.randint(1, 6), random.randint(1, 6), 4
    between = (random.randint(1, 3),) if kind == "axes" else ()
    query, value = (make.normal(size=(b, *between, x, d)).astype("float32") for x in (n, m))
    arrays = [
        query,
        value,
        *([make.normal(size=value.shape).astype("float32")] * random.choice((0, 1))),
    ]
    heads = random.choice((1, 2, 4))
    sizes: dict[str, Any] = {"num_heads": heads, "key_dim": random.choice((2, 3))}
    if kind in ("heads", "axes"):
        widths = (None,) if keras.backend.backend() == "jax" else (None, 5)  # Keras's own fails
        sizes |= {"value_dim": random.choice(widths), "use_bias": random.random() < 0.5}
        sizes |= {"output_shape": random.choice((None, 3))}
    if kind == "axes":
        sizes |= {"attention_axes": random.choice((None, (2,), (-2,)))}
    if kind == "grouped":
        few = random.choice([x for x in (1, 2, 4) if heads % x == 0])
        sizes = {"head_dim": 3, "num_query_heads": heads, "num_key_value_heads": few}
    if kind in ("additive", "attention"):
        sizes = {"use_scale": random.random() < 0.5} if kind == "additive" else {}
    over = 1 if kind != "axes" or sizes["attention_axes"] is not None else 2
    how = _masked(random, make, kind, over, query.shape, value.shape)

    def pair() -> tuple[Any, Any]:
        if kind in ("heads", "axes"):
            return ours.MultiHeadAttention(**sizes), keras.layers.MultiHeadAttention(**sizes)
        if kind == "grouped":
            return ours.GroupedQueryAttention(**sizes), keras.layers.GroupQueryAttention(**sizes)
        if kind == "additive":
            return ours.AdditiveAttention(**sizes), keras.layers.AdditiveAttention(**sizes)
        return ours.Attention(score="dot"), keras.layers.Attention()

    shown = {name: getattr(x, "shape", x) for name, x in how.items()}
    description = f"{kind} {sizes} {policy} {[x.shape for x in arrays]} {shown}"
    return Drawn(pair, kind in ("additive", "attention"), arrays, how, policy, description)


def _masked(random: Random, make: Any, kind: str, over: int, query: Any, value: Any) -> Any:
    """Return masks under which every query sees the first key."""
    listed, how = kind in ("additive", "attention"), {}
    if kind != "axes" and random.random() < 0.3:  # Keras takes axis 1 for the sequence, always
        how["use_causal_mask"] = True
    dtype = random.choice(("bool", "bool", "int32", "float32"))

    def seen(*shape: int) -> Any:
        mask = make.random(shape) > 0.4
        mask[(..., *[0] * (over if shape != value[:-1] or over > 1 else 1))] = True
        return mask

    if kind != "axes" and random.random() < 0.5:
        mask = seen(*value[:-1])
        how["mask"] = mask
    if not listed and random.random() < 0.5:
        b, rows, keys = query[0], query[1:-1][-over:], value[1:-1][-over:]
        shape = random.choice(((b, *rows, *keys), (1, *rows, *keys), (b, *[1] * over, *keys)))
        mask = make.random(shape) > 0.4
        mask[(..., *[0] * over)] = True
        how["attention_mask"] = mask.astype(dtype)
    if random.random() < 0.4:
        how["return_attention_scores"] = True
    return how


def called(drawn: Drawn, layer: Any, arrays: list[Any]) -> Any:
    how = dict(drawn.how)
    mask = how.pop("mask", None)
    if drawn.listed:
        found = layer(
            arrays, mask=None if mask is None else [None, mask, *[None] * (len(arrays) - 2)], **how
        )
    else:
        how |= {} if mask is None else {"value_mask": mask}
        found = layer(*arrays, **how)
    return found if isinstance(found, list | tuple) else [found]


def off(got: Any, want: Any) -> float:
    got, want = (keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in (got, want))
    if got.shape != want.shape:
        return float("inf")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 0.1 * want.size**0.5))


def complaint(drawn: Drawn, random: Random) -> str | None:
    keras.config.set_dtype_policy(drawn.policy)
    limit = LIMIT[drawn.policy]
    mine, theirs = drawn.make()
    called(drawn, theirs, drawn.arrays)
    called(drawn, mine, drawn.arrays)
    mine.set_weights(theirs.get_weights())
    pairs = zip(called(drawn, mine, drawn.arrays), called(drawn, theirs, drawn.arrays), strict=True)
    for what, (a, b) in zip(("output", "weights"), pairs, strict=False):
        if not (gap := off(a, b)) <= limit:
            return f"the {what} is off by {gap:.1e}"
    if drawn.policy != "float32" or random.random() < 0.5:
        return None
    return trained(drawn, mine, theirs, limit)


def trained(drawn: Drawn, mine: Any, theirs: Any, limit: float) -> str | None:
    """Run one step of `fit` for a model with unknown batch size, and save and load qkv's layer."""
    plain = {name: x for name, x in drawn.how.items() if name == "use_causal_mask"}
    drawn = drawn._replace(how=plain)
    models = []
    for layer in (mine, theirs):
        inputs = [keras.Input(x.shape[1:]) for x in drawn.arrays]
        model = keras.Model(inputs, called(drawn, layer, inputs)[0])
        model.compile("sgd", "mse")
        want = np.ones(called(drawn, theirs, drawn.arrays)[0].shape, "float32")
        model.fit(drawn.arrays, want, batch_size=len(want), epochs=1, verbose=0)
        models.append(model)
    for name, a, b in zip(theirs.weights, mine.get_weights(), theirs.get_weights(), strict=True):
        if not (gap := off(a, b)) <= limit:
            return f"after a step {name.name} is off by {gap:.1e}"
    with tempfile.TemporaryDirectory() as folder:
        models[0].save(Path(folder, "model.keras"))
        again = keras.models.load_model(Path(folder, "model.keras"))
        kept, want = (x.predict(drawn.arrays, verbose=0) for x in (again, models[0]))
    return None if (gap := off(kept, want)) <= 1e-5 else f"the file is off by {gap:.1e}"


def main(seconds: float, seed: int) -> None:
    random, started, done, wrongs = Random(seed), time.monotonic(), Counter[str](), 0
    while time.monotonic() - started < seconds:
        drawn = draw(random)
        done[drawn.description.split()[0]] += 1
        try:
            wrong = complaint(drawn, random)
        except Exception as error:
            message = " ".join(str(error).split())
            wrong = f"raised {type(error).__name__}: {message[:300]} … {message[-200:]}"
        if wrong is not None:
            wrongs += 1
            print(f"call {sum(done.values())}: {wrong} | {drawn.description}", flush=True)
    where = keras.backend.backend()
    print(f"{sum(done.values())} layers on {where}, {wrongs} complaints, {dict(done)}")
    sys.exit(bool(wrongs))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(float(sys.argv[1]), int(sys.argv[2]))
