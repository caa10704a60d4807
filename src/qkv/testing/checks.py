"""What is checked of one call on one framework and engine: each against `dense` in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any
from unittest import SkipTest, mock

import numpy as np

from qkv.arrays import of, to_numpy
from qkv.attention import attend
from qkv.engines import streaming
from qkv.errors import EngineError
from qkv.scores import functions_in, resolve
from qkv.scores.modified import Function
from qkv.testing.frameworks import NumPy as Framework
from qkv.types import Array
from qkv.weightings import Weighting

TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 2e-5}
"""How far from float64 a result may lie, once its arguments are rounded to a dtype."""
STEP = 1e-6

Arrays = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One call: NumPy arrays by name, and what `attend` is told beside query, key and value.

    `how` makes score, weighting and mask of the arrays, whichever framework's they are by then.
    `follows` is the weighting whose gradient the scores get, where that is not its own.
    """

    arrays: Mapping[str, np.ndarray]
    how: Callable[[Arrays], dict[str, Any]]
    follows: Weighting | None = None

    def attend(self, arrays: Arrays, **more: Any) -> Any:
        return attend(arrays["query"], arrays["key"], arrays["value"], **self.how(arrays) | more)

    @cached_property
    def expected(self) -> np.ndarray:
        return self.attend(self.arrays, engine="dense")  # type: ignore[no-any-return]

    @cached_property
    def along(self) -> np.ndarray:
        """The gradient of the output in every check of gradients."""
        return np.random.default_rng(7).normal(size=self.expected.shape)

    @cached_property
    def slopes(self) -> dict[str, tuple[np.ndarray, float]]:
        """A random direction for each array, and the loss's slope along it by differences."""
        rng, out = np.random.default_rng(1), {}

        def loss(name: str, x: np.ndarray) -> float:
            follows = self.follows if name != "value" else None
            more = {} if follows is None else {"weighting": follows}
            return float(np.sum(self.attend({**self.arrays, name: x}, **more) * self.along))

        for name, x in self.arrays.items():
            if x.dtype.kind == "f":
                along = rng.normal(size=x.shape)
                ahead, behind = (loss(name, x + side * STEP * along) for side in (1, -1))
                out[name] = along, (ahead - behind) / (2 * STEP)
        return out

    def gradients(
        self, fw: Framework, arrays: Arrays, engine: str, **more: Any
    ) -> list[np.ndarray]:
        """Of each array, for the gradient `along` of the output."""
        along = fw.make(self.along, of(arrays["query"]).dtype(arrays["query"]))

        def loss(*given: Array) -> Array:
            now = dict(zip(arrays, given, strict=True))
            out = self.attend(now, engine=engine, **more) * along
            return of(out).xp.sum(out)

        return fw.grads(loss, list(arrays.values()))

    def made(self, fw: Framework, dtype: str = "float64") -> dict[str, Any]:
        return {name: fw.make(x, dtype) for name, x in self.arrays.items()}


@contextmanager
def served(case: Case, fw: Framework, engine: str) -> Iterator[None]:
    """In blocks that do not divide the call; a refusal skips the test.

    `dense` and `streaming` serve everything but a function whose arrays the framework cannot find.
    """
    sizes = {"block_size": lambda call: (3, 4), "BLOCK": 2 * 8 * case.arrays["key"].shape[-2]}
    try:
        with mock.patch.multiple(streaming, **sizes):
            yield
    except EngineError as refusal:
        score = resolve(case.how(case.arrays).get("score", "scaled_dot"))
        closed = isinstance(score, Function) and functions_in(score)
        if engine in ("dense", "streaming") and not (closed and fw.name in ("tensorflow", "mxnet")):
            raise
        raise SkipTest(str(refusal)) from None


def values(case: Case, fw: Framework, engine: str) -> None:
    """The output, and weights that make it of the values."""
    with served(case, fw, engine):
        out, alpha = case.attend(case.made(fw), engine=engine, return_weights=True)
    np.testing.assert_allclose(to_numpy(out), case.expected, atol=1e-10)
    value = np.nan_to_num(case.arrays["value"])
    groups = alpha.shape[-3] // value.shape[-3] if value.ndim > 2 else 1
    shared = np.repeat(value, groups, axis=-3) if groups > 1 else value
    np.testing.assert_allclose(to_numpy(alpha) @ shared, to_numpy(out), atol=1e-10)


def gradients(case: Case, fw: Framework, engine: str) -> None:
    """The gradient of every array, along a random direction, against finite differences."""
    with served(case, fw, engine):
        found = case.gradients(fw, case.made(fw), engine)
    for name, gradient in zip(case.arrays, found, strict=True):
        assert np.isfinite(gradient).all(), f"the gradient of {name} is not finite"
        if name in case.slopes:
            direction, slope = case.slopes[name]
            parts = np.nan_to_num(gradient * direction)
            error, size = abs(parts.sum() - slope), np.abs(parts).sum() + 1
            assert error < 1e-7 * size, f"the gradient of {name} is {error} from {slope}"


def dtype(case: Case, fw: Framework, engine: str, dtype: str) -> None:
    """Sums run in float32 at least: the error is that of rounding the arguments and the result."""
    given = case.made(fw, dtype)
    want = case.attend(widened(given), engine="dense")
    with served(case, fw, engine):
        out = case.attend(given, engine=engine)
    assert of(out).dtype(out) == dtype
    atol = TOLERANCE[dtype] * (np.abs(want).max() + 1)
    np.testing.assert_allclose(to_numpy(out), want, atol=atol)


def widened(arrays: Arrays) -> dict[str, np.ndarray]:
    host = {name: to_numpy(x) for name, x in arrays.items()}
    return {n: x.astype("float64") if x.dtype.kind == "f" else x for n, x in host.items()}


def merging(weighting: Weighting, nonnegative: bool = False) -> None:
    """The states of three blocks give the same whatever their order, and none is nothing."""
    rng = np.random.default_rng(3)
    scores, value = rng.normal(size=(4, 9)), rng.normal(size=(9, 2))
    scores = np.abs(scores) if nonnegative else scores
    k, rows = np.arange(9, dtype="int32")[None], np.zeros((4, 1))
    scaled, blocks = weighting.scale(scores), (slice(0, 4), slice(4, 5), slice(5, 9))

    def fold(lift: Any, merge: Any, init: Any) -> Any:
        state = init(rows)
        for at in blocks:
            state = merge(state, lift(scaled[:, at].copy(), None, k[:, at]))
        return state

    found = weighting.search(fold)
    states = [
        weighting.lift(scaled[:, at].copy(), None, k[:, at], found, value[at], None)
        for at in blocks
    ]
    want = weighting(scores) @ value
    for order in permutations(states):
        state = weighting.init(rows, 2)
        for part in order:
            state = weighting.merge(state, part)
        np.testing.assert_allclose(weighting.finish(state, found)[0], want, atol=1e-10)


def leaving(weighting: Weighting, nonnegative: bool = False) -> None:
    """Without a key the others weigh what `without` makes of them, and as before where a weighting
    that is sparse gave it nothing."""
    scores = np.random.default_rng(4).normal(size=(4, 9))
    scores = np.abs(scores) if nonnegative else scores
    alpha = np.asarray(weighting(scores))
    for i in range(9):
        live = np.arange(9)[None] != i
        want, rest = np.asarray(weighting(scores, live)), np.where(live, alpha, 0)
        by = weighting.without(rest.sum(axis=1, keepdims=True))
        if by is not None:
            np.testing.assert_allclose(rest / by, want, atol=1e-10)
        elif weighting.sparse:
            gone = alpha[:, i] == 0
            np.testing.assert_allclose(alpha[gone], want[gone], atol=1e-10)
