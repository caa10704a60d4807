"""Compare random valid calls under JAX or TensorFlow transforms with the equation in float64.

python -m bench.transformed jax|tensorflow SECONDS SEED [TRANSFORM]

Scores, weightings, masks, dtypes, lengths, grouped heads, dropout, results, the engine and the
transform are drawn. A call is reported if its output, a gradient, a forward derivative or a second
derivative is further from float64 than LIMIT, or if it raises anything but an error of qkv.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from bench._drawn import CHOOSY, STEEP, Drawn, draw, exact, output, rounded
from bench._transforms import Asked, Function, Jax, TensorFlow
from qkv.errors import QkvError

LIMIT = {"float64": 1e-7, "float32": 5e-4, "bfloat16": 6e-2, "float16": 8e-3}
"""‖got − want‖ / ‖want‖."""


def attended(drawn: Drawn, names: list[str], rest: dict[str, Any]) -> Function:
    """Return the call as a function of the arrays with these names."""

    def function(*arrays: Any) -> Any:
        return drawn.call({**rest, **dict(zip(names, arrays, strict=True))})

    function.names = names  # type: ignore[attr-defined]
    return function


def off(got: np.ndarray, want: np.ndarray) -> float:
    if got.shape != want.shape:
        return float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    gap = np.linalg.norm((got - want)[finite])
    return float(gap / max(np.linalg.norm(want[finite]), 0.1 * max(want.size, 1) ** 0.5))


def complaint(fw: Any, drawn: Drawn, transform: str, random: Random) -> str | None:
    narrow = drawn.dtype != "float64"
    free = drawn.weighting in CHOOSY or (drawn.score in STEEP and narrow)
    limit = LIMIT[drawn.dtype] * (1e9 if free else 1)
    moved = [name for name, x in drawn.arrays.items() if x.dtype != bool]
    given = {name: fw.array(x, drawn.dtype) for name, x in rounded(drawn).items()}
    rest = {name: x for name, x in given.items() if name not in moved}
    function = fw.transforms[transform](attended(drawn, moved, rest))
    floats = [given[name] for name in moved]
    want = output(drawn)
    with fw.strict(transform):
        out = function(*floats)
    if not (gap := off(fw.numbers(out), want)) <= limit:
        return f"the output is off by {gap:.1e}"
    if not np.isfinite(want).all():
        return None
    make = np.random.default_rng(random.randrange(2**31))
    along = make.normal(size=want.shape)
    bends = fw.bends(transform)
    twice = bends and drawn.dtype in ("float32", "float64") and random.random() < 0.3
    way = make.normal(size=floats[0].shape) if twice else None
    forwards = bends and random.random() < 0.3 and drawn.weighting != "straight"
    ways = [fw.numbers(fw.array(make.normal(size=x.shape), drawn.dtype)) for x in floats]
    right = exact(drawn, moved, along, way)
    got = fw.found(transform, function, floats, Asked(along, ways if forwards else [], way))
    for name, x, y in zip(moved, got.slopes, right.slopes, strict=True):
        if not (gap := off(fw.numbers(x), y)) <= 4 * limit:
            return f"the gradient of {name} is off by {gap:.1e}"
    if got.push is not None:
        tangent = np.sum(fw.numbers(got.push) * along)
        pairs = list(zip(right.slopes, ways, strict=True))
        expected = sum(float(np.sum(x * y)) for x, y in pairs)
        scale = sum(float(np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs)
        if not abs(tangent - expected) <= 4 * limit * max(scale, 1.0):
            return f"jvp gives {tangent:.6g}, not {expected:.6g}"
    gap = 0.0 if right.bend is None else off(fw.numbers(got.bend), right.bend)
    return None if gap <= 40 * limit else f"the second derivative is off by {gap:.1e}"


def run(fw: Any, random: Random, only: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield calls without end: the transform, and the complaint."""
    while True:
        drawn, transform = draw(random), only or random.choice([*fw.transforms])
        if not fw.serves(transform, drawn.dtype):
            continue
        try:
            output(drawn)
        except QkvError:
            continue  # two things that mean nothing together
        try:
            with fw.setting(transform):
                wrong = complaint(fw, drawn, transform, random)
        except QkvError as error:
            wrong = None if "engine" in str(error) else f"refused: {error}"
        except Exception as error:
            message = " ".join(str(error).split())
            ours = "Error: engine" in message  # AutoGraph wraps what it does not know
            wrong = (
                None
                if ours
                else f"raised {type(error).__name__}: {message[:200]} … {message[-200:]}"
            )
        yield transform, None if wrong is None else f"{wrong} | {drawn.description}"


def main(name: str, seconds: float, seed: int, only: str | None = None) -> None:
    fw = {"jax": Jax, "tensorflow": TensorFlow}[name]()
    started, done, wrongs = time.monotonic(), Counter[str](), 0
    for transform, wrong in run(fw, Random(seed), only):
        done[transform] += 1
        if wrong is not None:
            wrongs += 1
            print(f"call {sum(done.values())} under {transform}: {wrong}", flush=True)
        if time.monotonic() - started > seconds:
            break
    print(f"{sum(done.values())} calls, {wrongs} complaints, {dict(done)}")
    sys.exit(bool(wrongs))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in ("jax", "tensorflow"):
        sys.exit(__doc__)
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
